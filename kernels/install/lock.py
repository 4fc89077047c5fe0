"""One install at a time: a lock that the operating system releases when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from .trouble import Trouble, of_writing

#: Longer than any download takes that is still moving.
PATIENCE = 900.0


class Lock:
    """`with Lock(path, waiting) as lock`: waits while another process holds it; calls `waiting` once if it has to.

    `held` is False on a file system without locks: then two installs at once are not kept apart. Raises Trouble when
    the file cannot be made, or when the wait is longer than `patience` seconds.
    """

    def __init__(self, path: Path, waiting: Callable[[], None], patience: float = PATIENCE) -> None:
        self.path = path
        self.held = False
        self._waiting = waiting
        self._patience = patience
        self._file = -1

    def __enter__(self) -> Lock:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise of_writing(error, self.path.parent) from error
        try:
            if not self._take():
                self._waiting()
                deadline = time.monotonic() + self._patience
                while not self._take():
                    if time.monotonic() > deadline:
                        raise Trouble(
                            f"Another install.py has been at work in this pack for {self._patience / 60:.0f} minutes.",
                            "End it and run install.py again.",
                        )
                    time.sleep(0.2)
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.held:
            with contextlib.suppress(OSError):
                self._release()
        self.held = False
        os.close(self._file)

    def _take(self) -> bool:
        """False while another process has it."""
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
        self.held = True
        return True

    def _release(self) -> None:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(self._file, 0, os.SEEK_SET)
            msvcrt.locking(self._file, msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_UN)
