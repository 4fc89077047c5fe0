"""Why kernels could not be installed, as sentences."""

from __future__ import annotations

import errno
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT) if hasattr(errno, "EDQUOT") else (errno.ENOSPC,)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


class Trouble(Exception):  # noqa: N818 - it ends as a sentence, not as an error: the pack works without kernels
    """text: what happened, one sentence. advice: what to do, one sentence or none."""

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.advice = advice


def of_writing(error: OSError, folder: Path) -> Trouble:
    """The trouble behind an error of writing in `folder`."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in _FULL:
        return Trouble(f"The disk that holds {folder} is full.", "Free some space and run install.py again.")
    if error.errno in _REFUSED:
        return Trouble(
            f"{folder} cannot be written to ({reason}).",
            "Close ComfyUI, make the folder writable or become its owner, and run install.py again.",
        )
    return Trouble(f"Writing in {folder} failed ({reason}).", "Run install.py again.")


def reading_failed(error: Exception) -> str:
    """What a file is that could not be read or understood."""
    return f"not readable ({error.strerror or error})" if isinstance(error, OSError) else "damaged"
