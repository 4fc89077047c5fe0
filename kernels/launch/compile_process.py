"""The compiler's process, apart from ComfyUI's, as something that can be waited for and ended.

`.comfyignore` leaves this file and `kernels/compile_here.py` out of the registry's archive, as versions there may not
start programs; such a copy of the pack brings its wheels along and does not compile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from typing import IO


class Child:
    """A program that runs beside this thread. asyncio, in a thread of its own, as ComfyUI's thread has a loop already.

    status: its exit status, once it has ended. error: why it could not be started.
    """

    def __init__(self, command: list[str], output: IO[bytes]) -> None:
        self.status: int | None = None
        self.error = ""
        self._pid: int | None = None
        self._thread = threading.Thread(target=self._main, args=(command, output), daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()

    def running(self, seconds: float) -> bool:
        """Wait that long for its end; whether it still runs."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def stop(self) -> None:
        """End it, and what it has started, if it still runs."""
        if self._thread.is_alive() and self._pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
        self._thread.join(10)

    def _main(self, command: list[str], output: IO[bytes]) -> None:
        try:
            asyncio.run(self._live(command, output))
        except OSError as error:
            self.error = str(error)
        finally:
            self._started.set()

    async def _live(self, command: list[str], output: IO[bytes]) -> None:
        # A session of its own: one signal then ends the compiler and its helpers, and Ctrl+C here does not.
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output, start_new_session=True)
        self._pid = process.pid
        self._started.set()
        self.status = await process.wait()
