"""The 8-bit mma.sync kernels, compiled once a process for the tests that disassemble or interpret them."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import kernel_backends
import pytest
from kernel_backends import ROOT

ARCHS = ("sm_89", "sm_120a")


@lru_cache
def compiled(arch: str, only: str = "") -> Path:
    """Folder with cubins, PTX and manifest of the kernels for `arch`; skips the test where there is no compiler.

    only: text in the names of those that are wanted.
    """
    if not kernel_backends.has_compiler():
        pytest.skip(kernel_backends.NO_COMPILER)
    folder = Path(tempfile.mkdtemp(prefix="mma8_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, str(ROOT / "kernels" / "build.py"), str(folder), "--only", only]
    command += ["--trial", "mma8", "--ptx"]
    done = subprocess.run(command, env={**os.environ, "CUTE_DSL_ARCH": arch}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
