"""The one kind of error that a command shows: a sentence, no traceback."""

from __future__ import annotations


class ToolError(Exception):
    """What happened and what to do, in words for a person. `status` is the exit status of the command.

    1: it could not be done here and now (no network, no disk, a busy port).  2: what was asked for is wrong.
    """

    def __init__(self, sentence: str, status: int = 1) -> None:
        super().__init__(sentence)
        self.status = status


def size_text(count: float) -> str:
    """Bytes in the unit a person would use: 1536 -> "1.5 KB"."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1024 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def time_text(seconds: float) -> str:
    """Seconds in the unit a person would use: 75 -> "1 min 15 s"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
