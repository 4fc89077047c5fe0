"""The tcgen05 attention kernels, compiled once a process for the tests that disassemble or interpret them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import kernel_backends
import pytest
from vc_attention.kernels.cute.config_sm100 import SCORES_OF

ARCHS = tuple(SCORES_OF)


@lru_cache
def compiled(arch: str) -> Path:
    """Folder with cubins, PTX and manifest of the attention kernels for `arch`; skips the test where there is no
    compiler."""
    if not kernel_backends.has_compiler():
        pytest.skip(kernel_backends.NO_COMPILER)
    folder = Path(tempfile.mkdtemp(prefix="sm100_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    kernel_backends.compile_kernels(kernel_backends.ROOT, folder, "attention_sm100", arch)
    return folder
