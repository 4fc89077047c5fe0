"""What the person who installs sees: lines, and how far a download is."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable

#: Seconds between two lines about a download: on a terminal one line is written over, elsewhere each is kept.
_TERMINAL, _ELSEWHERE = 0.1, 5.0


def say(text: str, end: str = "\n") -> None:
    """Print, whatever characters the console lacks, and whether or not somebody still listens."""
    stream = sys.stdout
    if stream is None:
        return  # a program without a console
    encoding = getattr(stream, "encoding", None) or "ascii"
    try:
        stream.write(text.encode(encoding, "replace").decode(encoding) + end)
        stream.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would turn the failure of that into an exit status
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        sys.stdout = None


def size_text(size: float) -> str:
    """A number of bytes for a person."""
    if size < 1e3:
        return f"{size:.0f} bytes"
    return f"{size / 1e3:.0f} KB" if size < 1e6 else f"{size / 1e6:.1f} MB"


class Progress:
    """How far the download of `name` is, of `total` bytes."""

    def __init__(self, name: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._total, self._clock = name, total, clock
        self._terminal = sys.stdout is not None and sys.stdout.isatty()
        self._pause = _TERMINAL if self._terminal else _ELSEWHERE
        self._last = clock()
        self._width = 0

    def update(self, done: int) -> None:
        """`done` bytes are here."""
        now = self._clock()
        if now - self._last < self._pause:
            return
        self._last = now
        text = f"VC-Attention: downloading {self._name}: {100 * done // self._total} % of {size_text(self._total)}"
        if self._terminal:
            say("\r" + text.ljust(self._width), end="")
            self._width = len(text)
        else:
            say(text)

    def finish(self) -> None:
        """Leave no half line behind."""
        if self._width:
            say("\r" + " " * self._width + "\r", end="")
            self._width = 0
