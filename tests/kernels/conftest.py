"""Compiled kernels for the tests that look at them or run them: built here once, where the compiler is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_COMPILER = "cubins: nvidia-cutlass-dsl is not installed here"
NO_DISASSEMBLER = "sass: nvdisasm is neither on PATH nor installed with a package such as nvidia-cuda-nvdisasm"


def _compile(checkout: Path, folder: Path, only: str = "", tuning: str = "") -> None:
    """Run the build of `checkout` in a process of its own, as the compiler takes its target from the environment."""
    command = [sys.executable, str(checkout / "kernels" / "build.py"), str(folder), "--only", only]
    command += ["--tuning", tuning]
    done = subprocess.run(command, env={**os.environ, "CUTE_DSL_ARCH": "sm_90a"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def cubins(tmp_path_factory) -> Path:
    """Folder with the cubins and the manifest of sm_90a."""
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip(NO_COMPILER)
    folder = tmp_path_factory.mktemp("cubins")
    _compile(ROOT, folder)
    return folder


@pytest.fixture(scope="session")
def compile_kernels(cubins):
    """The build as a function of (checkout, folder, only, tuning), where there is a compiler."""
    return _compile


@pytest.fixture(scope="session")
def nvdisasm() -> str:
    """Path of the disassembler."""
    found = shutil.which("nvdisasm")
    if found is None:
        candidates = [p for entry in sys.path for p in Path(entry).glob("nvidia/*/bin/nvdisasm")]
        found = str(candidates[0]) if candidates else None
    if found is None:
        pytest.skip(NO_DISASSEMBLER)
    return found
