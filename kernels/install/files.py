"""Writing that a crash, a full disk or a second reader cannot leave half done."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

#: Windows refuses to replace what another program has open; scanners and indexers let go within about a second.
_WAITS = (0.05, 0.1, 0.2, 0.4, 0.8)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet, down to the disk. Raises OSError."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder down to the disk, on systems that can; Windows does it by itself."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        # not every file system has this for folders, and nothing is lost where it does not
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def replace(source: Path, target: Path, pause: Callable[[float], None] = time.sleep) -> None:
    """os.replace, waiting on Windows for programs that have `target` open. Raises OSError."""
    for wait in _WAITS if sys.platform == "win32" else ():
        try:
            os.replace(source, target)
        except PermissionError:
            pause(wait)
        else:
            return
    os.replace(source, target)


def write_over(path: Path, data: bytes) -> None:
    """Replace the content of a file at one stroke: readers see the old or the new one. Raises OSError."""
    draft = path.with_name(f".{path.name}.{token()}.tmp")
    try:
        write_new(draft, data)
        replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_tree(folder: Path) -> bool:
    """Remove a folder as far as it can be; whether it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def token() -> str:
    """A name that no other process takes."""
    return os.urandom(4).hex()
