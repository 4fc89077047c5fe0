"""Progress of long steps: one live line on a terminal, plain lines at intervals anywhere else.

Everything goes to stderr, so that a command's result on stdout (`--json`) stays clean.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from .messages import time_text

#: Seconds between two plain lines where there is no terminal (a CI log, a pipe).
INTERVAL = 15.0
#: Seconds between two refreshes of the live line.
REFRESH = 0.2


class Step:
    """A step that takes a while. `with Step("Installing") as step: step.show("torch, 527 MB")`.

    On a terminal one line is rewritten in place with the elapsed time, so that a pause never looks like a hang. It
    ends as a plain line: "Installing: done (43 s)", or ": failed" when an exception leaves the block.
    """

    def __init__(self, title: str, stream: TextIO | None = None, interval: float = INTERVAL) -> None:
        self.title = title
        self._stream = stream or sys.stderr
        self._interval = interval
        self._live = self._stream.isatty()
        self._detail = ""
        self._result = "done"
        self._width = 0
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Step:
        if not self._live:
            self._write(f"{self.title} ...\n")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        word = self._result if kind is None else "stopped" if kind is KeyboardInterrupt else "failed"
        self._write_line(f"{self.title}: {word} ({time_text(self.elapsed)})", end=True)

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._started

    def show(self, detail: str) -> None:
        """What is going on right now; shown with the next refresh."""
        self._detail = " ".join(detail.split())

    def finish(self, result: str) -> None:
        """The word or words that the last line carries instead of "done"."""
        self._result = result

    def _run(self) -> None:
        while not self._stop.wait(REFRESH if self._live else self._interval):
            detail = f": {self._detail}" if self._detail else ""
            self._write_line(f"{self.title}{detail} ({time_text(self.elapsed)})", end=not self._live)

    def _write_line(self, text: str, end: bool) -> None:
        with self._lock:
            if not self._live:
                self._write(text + "\n")
                return
            columns = shutil.get_terminal_size().columns - 1
            text = text if len(text) <= columns or end else text[: max(columns - 3, 0)] + "..."
            self._write("\r" + text.ljust(self._width) + ("\n" if end else ""))
            self._width = 0 if end else len(text)

    def _write(self, text: str) -> None:
        # a console that lacks a character, or a closed pipe, must not end the work
        encoding = getattr(self._stream, "encoding", None) or "ascii"
        with contextlib.suppress(OSError):
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()


def say(line: str) -> None:
    """One plain line of progress."""
    print(line, file=sys.stderr, flush=True)
