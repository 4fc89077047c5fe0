"""The interpreter's modules as the package `ptx`, without putting `tests` on sys.path (it has a folder `comfy`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
_package = types.ModuleType("ptx")
_package.__path__ = [str(HERE)]
sys.modules.setdefault("ptx", _package)


@pytest.fixture(scope="session")
def ptx(cubins) -> Path:
    """Folder with the PTX and the manifest of the sm_90a kernels."""
    if not list(cubins.glob("*.ptx")):
        pytest.skip("ptx: the folder of --cubins holds no PTX (build it with kernels/build.py --ptx)")
    return cubins


@pytest.fixture(scope="session")
def cute_layouts() -> dict[str, list[str]]:
    """CuTe's own fragment layouts, from `cute_layouts.py`."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("ptx: nvidia-cutlass-dsl is not installed here")
    found = {}
    for arch in ("sm_90a", "sm_100a", "sm_120a"):
        command = [sys.executable, str(HERE / "cute_layouts.py")]
        done = subprocess.run(command, env={**os.environ, "CUTE_DSL_ARCH": arch}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found.update(json.loads(done.stdout))
    return found
