"""What the tests that look at compiled kernels need beside `cubins` (tests/support/kernel_backends.py)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import kernel_backends
import pytest
from chain_cases import Card
from vc_attention.kernels import Reason
from vc_attention.kernels.launch import compile

NO_DISASSEMBLER = "sass: nvdisasm is neither on PATH nor installed with a package such as nvidia-cuda-nvdisasm"


@pytest.fixture(scope="session")
def compile_kernels():
    """The build as a function of (checkout, folder), where there is a compiler."""
    if not kernel_backends.has_compiler():
        pytest.skip(kernel_backends.NO_COMPILER)
    return kernel_backends.compile_kernels


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


@pytest.fixture
def card(monkeypatch, tmp_path) -> Card:
    """A faked card without a compiler."""
    monkeypatch.setattr(compile, "compiler", lambda: Reason("no_compiler", "There is no compiler."))
    return Card(monkeypatch, tmp_path)
