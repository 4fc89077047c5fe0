"""One run at a time: a lock that the operating system releases when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from types import TracebackType

from .messages import ToolError
from .progress import Step


class Lock:
    """`with Lock(path, "preparing .venv")`: waits while another process holds it, and says so.

    On a file system without locks it does nothing: then two runs at once are not kept apart, as without it.
    """

    def __init__(self, path: Path, purpose: str, timeout: float = 3600.0) -> None:
        self.path = path
        self.purpose = purpose
        self.timeout = timeout
        self._file: int | None = None

    def __enter__(self) -> Lock:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ToolError(f"{self.path.parent} cannot be written to: {error.strerror or error}.") from error
        if not self._take():
            with Step(f"Waiting for another run.py that is {self.purpose}"):
                deadline = time.monotonic() + self.timeout
                while not self._take():
                    if time.monotonic() > deadline:
                        raise ToolError(f"Another run.py has been {self.purpose} for too long; end it and try again.")
                    time.sleep(0.5)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._release()
            os.close(self._file)
            self._file = None

    def _take(self) -> bool:
        assert self._file is not None
        try:
            if sys.platform == "win32":
                import msvcrt

                os.lseek(self._file, 0, os.SEEK_SET)
                msvcrt.locking(self._file, msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True
        return True

    def _release(self) -> None:
        assert self._file is not None
        if sys.platform == "win32":
            import msvcrt

            os.lseek(self._file, 0, os.SEEK_SET)
            msvcrt.locking(self._file, msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_UN)
