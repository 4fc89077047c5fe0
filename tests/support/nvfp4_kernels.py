"""The NVFP4 attention kernels for the tests: compiled once a process, and executed by the PTX interpreter."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import kernel_backends
import numpy as np
import pytest
import torch
from torch import Tensor
from vc_attention.kernels.cute import layouts_nvfp4 as lo
from vc_attention.kernels.cute.config_nvfp4 import config_of
from vc_attention.kernels.launch.images import Images
from vc_attention.kernels.launch.manifest import Manifest, read_manifest
from vc_attention.kernels.plan import Plan

OUTPUTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@functools.cache
def _folder(emulated: bool) -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory(prefix="nvfp4-")
    script = Path(__file__).with_name("nvfp4_build.py")
    arch, more = ("sm_90a", ["emulated"]) if emulated else ("sm_120a", [])
    command = [sys.executable, str(script), folder.name, *more]
    done = subprocess.run(command, env={**os.environ, "CUTE_DSL_ARCH": arch}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def compiled(emulated: bool = False) -> Path:
    """Folder with manifest, cubins and PTX of the kernels for sm_120a, or of the emulated ones for sm_90a; the test is
    skipped where there is no compiler."""
    if not kernel_backends.has_compiler():
        pytest.skip(kernel_backends.NO_COMPILER)
    return Path(_folder(emulated).name)


@functools.cache
def manifest(emulated: bool = False) -> Manifest:
    """The manifest of `compiled`."""
    found = read_manifest(compiled(emulated))
    assert isinstance(found, Manifest), found
    return found


def ptx_text(name: str, emulated: bool = False) -> str:
    """PTX of a kernel."""
    return (compiled(emulated) / f"{name}.ptx").read_text(encoding="utf-8")


@functools.cache
def _loaded(name: str, emulated: bool):
    from ptx.run import Loaded

    return Loaded(ptx_text(name, emulated))


def execute(
    images: Images,
    plan: Plan,
    output: str = "bf16",
    text: str | None = None,
    shared: int | None = None,
    emulated: bool = False,
    **options,
) -> Tensor:
    """Run the kernel of `plan` (or the PTX `text` in its place) on `images`: [B, H, Lq, 128] of the output's dtype.

    shared: dynamic shared memory, the manifest's if None. emulated: take the kernel for sm_90a. options: of
    `ptx.run.Loaded.launch`. Raises PtxError for whatever the interpreter finds; every element of the output must have
    been written.
    """
    from ptx import opcodes_sm120  # noqa: F401 - it fills the table
    from ptx.memory import Buffer
    from ptx.run import Loaded

    config = config_of(plan, output)
    assert config is not None
    config = replace(config, emulated=emulated)
    entry = manifest(emulated).kernels[config.name]
    loaded = _loaded(config.name, emulated) if text is None else Loaded(text)
    n = images.batch * images.heads
    out = np.zeros((images.batch, images.lq, images.heads, lo.HEAD_DIM), np.uint16)
    result = Buffer(out, "out", written=False)
    params: list = []
    for name in entry.arguments[:9]:
        tensor = getattr(images, name)
        if tensor is None:
            params.append(None)
            continue
        array = tensor.contiguous().view(torch.uint8 if tensor.dtype != torch.float32 else torch.float32).numpy()
        params.append(Buffer(array, name, writable=False))
    scale = float(np.float32(lo.HEAD_DIM**-0.5 * math.log2(math.e)))
    params += [result, images.lq, images.lkv, images.heads, scale]
    report = loaded.launch(
        (lo.query_tiles(images.lq), n),
        entry.block,
        params,
        entry.shared if shared is None else shared,
        **options,
    )
    assert not report.unwritten, report.unwritten
    return torch.from_numpy(out.view(np.int16)).view(OUTPUTS[output]).transpose(1, 2)
