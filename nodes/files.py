"""Files that the nodes write into ComfyUI's output folder: whole or not at all, and one clear sentence when not."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from . import host

SUFFIX = ".safetensors"
#: Files of one name that are there already before a new one gives up.
MOST_NUMBERS = 100_000


class FileError(ValueError):
    """A file could not be written; the text says why in a few words, without a path, which may name a person."""


def write_whole(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Save CPU tensors to `path` through a file beside it, in the place of an older one. Makes the folder.

    Raises FileError; what was at `path` is then untouched.
    """
    part = path.with_name(f".{path.stem}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part, metadata)
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise FileError(_why(error)) from error


def write_numbered(prefix: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Path:
    """Save CPU tensors as the next file of `prefix` in the output folder, by ComfyUI's own numbering.

    Never overwrites: the name is taken before anything is written to it. Returns the path below the output folder.
    Raises FileError.
    """
    path = _take_name(prefix)
    try:
        write_whole(path, tensors, metadata)
    except FileError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    try:
        return path.relative_to(host.output_folder())
    except ValueError:
        return Path(path.name)


def _take_name(prefix: str) -> Path:
    """An empty file of our own with the next free number."""
    try:
        folder, name, number = host.numbered_file(prefix)
    except OSError as error:
        raise FileError(_why(error)) from error
    except Exception as error:  # ComfyUI raises a bare Exception for a prefix that leads out of the output folder
        raise FileError("the name leads out of ComfyUI's output folder") from error
    for more in range(MOST_NUMBERS):
        path = folder / f"{name}_{number + more:05}_{SUFFIX}"
        try:
            path.open("xb").close()
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise FileError(_why(error)) from error
    raise FileError("there are too many files of that name")


def _why(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = str(error).lower()
    known = ("no space left on device", "read-only file system", "permission denied")
    return next((words for words in known if words in text), type(error).__name__)
