"""What Windows does that this system does not: byte locks, and files that another program holds."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from typing import Any


class FakeMsvcrt:
    """`msvcrt` as far as locks go: one byte, not waited for, refused with EACCES while another handle has it."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def locking(self, handle: int, mode: int, count: int) -> None:
        assert count == 1 and os.lseek(handle, 0, os.SEEK_CUR) == 0
        if mode == self.LK_UNLCK:
            fcntl.flock(handle, fcntl.LOCK_UN)
            return
        assert mode == self.LK_NBLCK
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EACCES, "Permission denied") from None


def busy(replace: Callable[..., None], times: int) -> Callable[..., None]:
    """os.replace whose target a scanner holds for so many calls."""
    left = times

    def held(source: Any, target: Any) -> None:
        nonlocal left
        if left:
            left -= 1
            raise PermissionError(errno.EACCES, "Access is denied", str(target))
        replace(source, target)

    return held
