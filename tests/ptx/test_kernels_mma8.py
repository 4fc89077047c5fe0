"""The 8-bit mma.sync attention kernels, their PTX executed on the CPU: against the specification, against a model of
the same codes, and broken on purpose."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import kernel_backends
import numpy as np
import pytest
import torch
from mma8_kernels import ARCHS, compiled
from ptx import formats as fm
from ptx.attention_model import mismatch
from ptx.attention_model_mma8 import attention as model
from ptx.machine import Fault
from ptx.memory import Buffer
from ptx.mutants_mma8 import MUTANTS
from ptx.parser import PtxError
from ptx.run import Loaded
from vc_attention.kernels import FAITHFUL, FAST, Plan
from vc_attention.kernels.cute import layouts_mma8 as lo
from vc_attention.kernels.cute.config_mma8 import Mma8Config, config_of, configs
from vc_attention.kernels.cute.reference_mma8 import prepare
from vc_attention.kernels.launch.images import Images
from vc_attention.kernels.launch.manifest import Manifest, read_manifest
from vc_attention.kernels.spec.attention import attention as spec_attention

pytestmark = pytest.mark.xdist_group("mma8")

FAST_KEYS, FAITHFUL_KEYS = Plan(key_means=True), Plan(probability="exp2", key_means=True)


@lru_cache
def _kernel(arch: str, config: Mma8Config) -> tuple[Loaded, int]:
    """A parsed kernel and its shared memory in bytes."""
    manifest = read_manifest(compiled(arch))
    assert isinstance(manifest, Manifest)
    text = (manifest.folder / f"{config.name}.ptx").read_text(encoding="utf-8")
    return Loaded(text), manifest.kernels[config.name].shared


def _array(tensor: torch.Tensor | None) -> np.ndarray | None:
    if tensor is None:
        return None
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()


def _run(kernel: Loaded, shared: int, images: Images, output: str, **options) -> np.ndarray:
    """Output [B H, Lq, 128] of a launch on `images`, every element of which must have been written."""
    b, h, lq = images.batch, images.heads, images.lq
    out = np.zeros((b, lq, h, 128), np.uint16)
    pointers = [images.q, images.k, images.v, images.qs, images.ks, images.sv, images.mu, images.qb, images.km]
    numbers = [lq, images.lkv, h, 128**-0.5 * math.log2(math.e)]
    arguments = [*map(_array, pointers), Buffer(out, "out", written=False), *numbers]
    report = kernel.launch((images.q.shape[1], b * h), None, arguments, shared, **options)
    assert not report.unwritten
    values = fm.from_bf16(out) if output == "bf16" else out.view(np.float16).astype(np.float32)
    return values.transpose(0, 2, 1, 3).reshape(b * h, lq, 128)


def _call(batch: int, heads: int, lq: int, lkv: int, what: str = "") -> tuple[torch.Tensor, ...]:
    """q, k, v with clusters in k and v, and the labels of the clusters."""
    g = torch.Generator().manual_seed(lq + 1000 * lkv)
    labels = torch.randint(0, 4, (batch, heads, lkv), generator=g)
    at = labels[..., None].expand(-1, -1, -1, 128)
    centres = torch.randn(2, batch, heads, 4, 128, generator=g)
    q, k, v = (torch.randn(batch, heads, n, 128, generator=g) for n in (lq, lkv, lkv))
    k, v = k + 0.5 * centres[0].gather(2, at), v + centres[1].gather(2, at)
    if what == "outlier":
        v[:, :, lkv // 2] *= 60
        k[:, :, lkv // 3] *= 20
    elif what == "small outlier":
        v[:, :, lkv // 2] *= 20
    elif what == "zero v":
        v = torch.zeros_like(v)
    elif what == "huge scores":
        q, k = 40 * q, 10 * k
    elif what == "one value":
        # The largest sums that there are: every P and every V code at its top.
        k, v = k[:, :, :1].expand_as(k).clone(), torch.full_like(v, -3.0)
    elif what == "equal keys":
        k = k[:, :, :1].expand_as(k).clone()
    return q, k, v, labels.to(torch.uint8)


CASES = [
    # batch, heads, Lq, Lkv, plan, what is special, output, schedule, accumulators
    (1, 1, 128, 128, FAST, "", "bf16", "orderly", "f32"),
    (1, 1, 1, 1, FAITHFUL, "", "bf16", "random", "f32"),
    (1, 1, 130, 257, FAST.without_smoothing(), "", "bf16", "eager", "f32"),
    (1, 2, 40, 300, FAITHFUL.without_smoothing(), "", "fp16", "random", "f32"),
    (1, 1, 17, 1153, FAST, "", "bf16", "random", "f32"),
    (1, 1, 16, 2049, FAST_KEYS, "", "bf16", "random", "f32"),
    (1, 1, 16, 1100, FAITHFUL_KEYS, "", "fp16", "eager", "f32"),
    (2, 2, 9, 129, FAST_KEYS, "", "fp16", "orderly", "f32"),
    (1, 1, 33, 255, FAITHFUL, "outlier", "bf16", "random", "f32"),
    (1, 1, 33, 400, FAST, "outlier", "bf16", "eager", "f32"),
    (1, 1, 20, 200, FAST, "zero v", "bf16", "orderly", "f32"),
    (1, 1, 20, 200, FAITHFUL_KEYS, "zero v", "bf16", "random", "f32"),
    (1, 1, 50, 300, FAST_KEYS, "huge scores", "bf16", "random", "f32"),
    (1, 1, 50, 300, FAITHFUL, "huge scores", "bf16", "orderly", "f32"),
    (1, 1, 12, 127, FAITHFUL_KEYS, "equal keys", "bf16", "eager", "f32"),
    (1, 1, 18, 140, FAST, "", "fp16", "random", "f32"),
    (1, 1, 18, 140, FAST.without_smoothing(), "", "fp16", "eager", "f32"),
    (1, 1, 18, 140, FAITHFUL, "", "fp16", "orderly", "f32"),
    (1, 1, 18, 140, FAITHFUL.without_smoothing(), "", "bf16", "random", "f32"),
    (1, 1, 130, 300, FAST, "", "bf16", "random", "f16"),
    (1, 2, 16, 1153, FAITHFUL_KEYS, "", "fp16", "eager", "f16"),
    (1, 1, 40, 400, FAST.without_smoothing(), "small outlier", "bf16", "random", "f16"),
    (1, 1, 20, 300, FAITHFUL, "equal keys", "bf16", "orderly", "f16"),
    (1, 1, 20, 256, FAST.without_smoothing(), "one value", "bf16", "orderly", "f16"),
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x) for x in (*c[:4], c[5] or "plain", *c[6:])))
def test_attention(arch, case):
    batch, heads, lq, lkv, plan, what, output, schedule, accumulate = case
    *call, labels = _call(batch, heads, lq, lkv, what)
    q, k, v = (x.to(torch.bfloat16 if output == "bf16" else torch.float16) for x in call)
    used = labels if plan.demean else None
    images = prepare(q, k, v, plan, used, accumulate)
    config = config_of(plan, output, accumulate)
    found = _run(*_kernel(arch, config), images, output, schedule=schedule, seed=lkv)
    expected = model(images, config)
    if what == "zero v":
        assert not found.any()
        return
    assert mismatch(found, expected, output) is None
    exact = torch.softmax(q.double() @ k.double().transpose(2, 3) * 128**-0.5, -1) @ v.double()
    spec = spec_attention(q, k, v, plan, used).double()
    error, spec_error = (
        float((x - exact.flatten(0, 1)).norm() / exact.norm())
        for x in (torch.from_numpy(found).double(), spec.flatten(0, 1))
    )
    # Below 0.004 the output type's own rounding is what is seen.
    assert error <= max(1.1 * spec_error, 4e-3)


def test_every_kernel_that_is_shipped_is_among_the_cases():
    """Those with fp16 accumulators are a trial, of which the cases hold some."""
    executed = {config_of(plan, output, accumulate) for *_, plan, _, output, _, accumulate in CASES}
    assert executed >= {config for config in configs() if config.accumulate == "f32"}


def test_both_loaders_give_the_same_bits():
    *call, labels = _call(1, 1, 20, 1300)
    for plan in (FAST_KEYS, FAITHFUL):
        images, config = prepare(*call, plan, labels), config_of(plan, "bf16")
        first, second = (_run(*_kernel(arch, config), images, "bf16") for arch in ARCHS)
        assert np.array_equal(first, second)


def test_schedules_give_the_same_bits():
    *call, labels = _call(1, 1, 16, 700)
    images, config = prepare(*call, FAST, labels), config_of(FAST, "bf16")
    for arch in ARCHS:
        kernel = _kernel(arch, config)
        outs = [_run(*kernel, images, "bf16", schedule="random", seed=seed) for seed in range(3)]
        assert all(np.array_equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(
    ("name", "byte", "lkv"),
    [
        ("k", lo.k_offset(2, 37), 4),
        ("v", lo.v_offset(37, 2), 4),
        ("v", lo.v_offset(lo.row_sum_row(0), 2), 4),
        ("mu", 2 * lo.mu_offset(37, 0) + 1, 4),
        ("qb", 2 * lo.qb_offset(3, 36) + 1, 130),
        ("km", 2 * lo.km_offset(0, 37) + 1, 130),
    ],
)
@pytest.mark.parametrize("plan", [FAST_KEYS, FAITHFUL_KEYS], ids=["fast", "faithful"])
def test_one_wrong_byte_is_seen(plan, name, byte, lkv):
    """One byte of an image, which only one lane reads, moves the result of a call with few keys beyond the limits.

    Except in a row of ones where exact sums do not read them.
    """
    *call, labels = _call(1, 1, 16, lkv)
    images, config = prepare(*call, plan, labels), config_of(plan, "bf16")
    expected = model(images, config)
    getattr(images, name).view(torch.uint8).view(-1)[byte] ^= 0x41
    wrong = mismatch(_run(*_kernel("sm_89", config), images, "bf16"), expected)
    ignored = name == "v" and config.exact_sums and byte >= lo.v_offset(lo.HEAD_DIM, 0)
    assert (wrong is None) == ignored


@pytest.fixture(scope="module")
def mutants(tmp_path_factory) -> Path:
    """Folder with the PTX of every mutant."""
    if not kernel_backends.has_compiler():
        pytest.skip(kernel_backends.NO_COMPILER)
    folder = tmp_path_factory.mktemp("mutants")
    for arch in ARCHS:
        command = [sys.executable, str(Path(__file__).with_name("mutants_mma8.py")), str(folder)]
        done = subprocess.run(command, env={**os.environ, "CUTE_DSL_ARCH": arch}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[m.fault for m in MUTANTS])
def test_mutants_are_caught(mutants, number):
    mutant = MUTANTS[number]
    plan = Plan(probability=mutant.plan[0], demean=bool(mutant.plan[1]), key_means=bool(mutant.plan[2]))
    *call, labels = _call(1, 1, *mutant.lengths)
    images, config = prepare(*call, plan, labels if plan.demean else None), config_of(plan, "bf16")
    kernel = Loaded((mutants / f"{number}.ptx").read_text(encoding="utf-8"))
    shared = _kernel(mutant.arch, config)[1]
    try:
        found = _run(kernel, shared, images, "bf16", schedule="random", seed=number)
    except (Fault, PtxError) as fault:
        # What the mutant broke, not that the interpreter lacks an instruction.
        assert isinstance(fault, Fault), fault
    else:
        assert mismatch(found, model(images, config)) is not None
