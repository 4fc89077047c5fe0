"""Run a pack's install.py on a machine whose NVIDIA driver is faked: what `ctypes.CDLL` opens answers as libcuda does.

    python faked_install.py SPEC PACK/install.py ARGUMENTS...

SPEC is JSON: `machine` (a name of fake_cards.MACHINES), `cuda` (driver version, 13000 is CUDA 13.0), `pause` (longest
sleep in seconds: retries back off for real, only faster), `hang_at` (the write to disk, counted from 1, that never
comes back, once it has happened) and `marker` (the file that it makes then),
`windows` (the branches that ask sys.platform take Windows's side: its driver library, its locks, and an os.replace that
a scanner holds up).
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:] = [str(Path(__file__).resolve().parent), *sys.path[1:]]

from fake_cards import MACHINES, FakeDriver  # noqa: E402 - this folder is not on the path before


def pretend_windows() -> None:
    """What the installer's Windows branches meet there."""
    from fake_windows import FakeMsvcrt, busy

    sys.platform = "win32"
    sys.modules["msvcrt"] = FakeMsvcrt()  # type: ignore[assignment]
    os.replace = busy(os.replace, 2)


def main() -> None:
    """Fake, then run."""
    spec = json.loads(sys.argv[1])
    cards = MACHINES[spec.get("machine", "cpu")]

    wanted = "nvcuda.dll" if spec.get("windows") else "libcuda.so.1"

    def library(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name != wanted or not cards:
            raise OSError(f"{name}: cannot open shared object file")
        return FakeDriver(cards, spec.get("cuda", 13000))

    ctypes.CDLL = library  # type: ignore[assignment,misc]
    sleep, sync = time.sleep, os.fsync
    time.sleep = lambda seconds: sleep(min(seconds, spec.get("pause", 0.02)))
    if "hang_at" in spec:
        left = spec["hang_at"]

        def fsync(handle: int) -> None:
            nonlocal left
            sync(handle)
            left -= 1
            if left == 0:
                Path(spec["marker"]).touch()
                sleep(600)

        os.fsync = fsync
    if spec.get("windows"):
        pretend_windows()
    sys.path.pop(0)
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
