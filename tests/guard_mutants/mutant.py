"""One guard taken away, and the files whose tests have to notice."""

from __future__ import annotations

from typing import NamedTuple

CALLS = "tests/comfy/test_calls.py"
RUNS = "tests/comfy/test_runs.py"
MEMORY = "tests/comfy/test_memory.py"
OVERRIDES = "tests/comfy/test_overrides.py"
FAMILIES = "tests/comfy/test_families.py"
VALUES = "tests/known_failures/test_values.py"
LAYOUT = "tests/known_failures/test_layout.py"
GUARD = ("tests/nodes/test_guard.py", "tests/comfy/test_guard.py")
STATISTIC = ("tests/kernels/test_guard.py",)
INSTALL = "tests/tools/test_install.py"
NETWORK = "tests/tools/test_install_network.py"
DISK = "tests/tools/test_install_disk.py"
ARCHIVE = "tests/tools/test_install_archive.py"
WINDOWS = "tests/tools/test_install_windows.py"
BRIDGE = "tests/nodes/test_wrapper_bridge.py"


class Mutant(NamedTuple):
    """One edit: in `file`, `old` (which must occur exactly once) becomes `new`. needs: "0.33" when the ComfyUI must
    have tensor containers. also: further (file, old, new), for a protection that exists twice."""

    row: str
    guard: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    needs: str = ""
    also: tuple[tuple[str, str, str], ...] = ()
