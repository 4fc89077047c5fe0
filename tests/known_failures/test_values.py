"""Extreme values, ragged tails and pad rows: the row of known failures where frames came out black or NaN.

`backend.rounding` in a tolerance is the rounding of inputs and outputs to 16 bit, which the kernels have and the
specification, run on fp32 tensors, has not.
"""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BOUND, PLANS, VALUE_STEP, each_plan, exact, relative

POISON = float("nan")


@each_plan
@pytest.mark.parametrize("constant", [1.0, -3.0, 1e-30, 6e4, 1e33])
def test_constant_values_come_back(backend, name, constant):
    q, k, v = backend.qkv(lkv=150)
    v = torch.full_like(v, constant)
    out = backend.run(q, k, v, PLANS[name])
    assert torch.isfinite(out).all()
    error = (out.float() / v.float()[:, :, :1] - 1).abs().max()
    assert error <= VALUE_STEP[name] + 4e-3 + backend.rounding


@each_plan
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_huge_values_stay_finite_and_bounded(backend, name, dtype):
    q, k, v = backend.qkv(lkv=260)
    v = (v.float() / v.abs().max().float() * 6e4).to(dtype)
    out = backend.run(q.to(dtype), k.to(dtype), v, PLANS[name], backend.shuffled_labels(260))
    assert torch.isfinite(out).all()
    assert out.abs().max() <= 6e4 * (1 + VALUE_STEP[name])
    assert relative(out, exact(q.to(dtype), k.to(dtype), v)) < BOUND[name] + 4e-3


@each_plan
def test_one_spike_does_not_reach_other_channels(backend, name):
    q, k, v = backend.qkv(lkv=300)
    calm = backend.run(q, k, v, PLANS[name])
    v[0, 0, 77, 5] = 3e4
    out = backend.run(q, k, v, PLANS[name])
    assert torch.isfinite(out).all()
    others = torch.arange(v.shape[-1]) != 5
    if PLANS[name].values in ("fp8", "int8", "exact") and not PLANS[name].clip_means:
        # scales are per channel: the other channels must not notice
        assert torch.equal(out[..., others], calm[..., others])
    true = exact(q, k, v)
    limit = (VALUE_STEP[name] + 0.1 + backend.rounding) * true[..., 5].abs().max()
    assert (out[..., 5] - true[..., 5]).abs().max() <= limit


@each_plan
def test_a_zero_channel_stays_exactly_zero(backend, name):
    q, k, v = backend.qkv(lkv=300)
    v[..., 9] = 0
    out = backend.run(q, k, v, PLANS[name], backend.shuffled_labels(300))
    assert torch.isfinite(out).all()
    assert torch.equal(out[..., 9], torch.zeros_like(out[..., 9]))
    others = torch.arange(v.shape[-1]) != 9
    assert relative(out[..., others], exact(q, k, v)[..., others]) < BOUND[name] + backend.rounding


@each_plan
def test_all_zero_values_give_exactly_zero(backend, name):
    q, k, v = backend.qkv(lkv=190)
    assert torch.equal(backend.run(q, k, v * 0, PLANS[name], backend.shuffled_labels(190)), torch.zeros_like(q))


def _poisoned_view(x: torch.Tensor) -> torch.Tensor:
    """The same values in the middle of a larger buffer of NaN: reading past either end cannot go unnoticed."""
    b, h, length, d = x.shape
    buffer = x.new_full((b, h, length + 256, d), POISON)
    buffer[:, :, 128 : 128 + length] = x
    return buffer[:, :, 128 : 128 + length]


@each_plan
def test_every_length_modulo_128(backend, name):
    """Lkv = 128 + r for every r, Lq another odd number, all memory around the tensors NaN, tail moved by labels."""
    for residue in range(128):
        lkv = 128 + residue
        q, k, v = backend.qkv(lq=3, lkv=lkv, dim=16, seed=residue)
        v *= 2.0**-12  # small values: padding that reached a scale would drown them
        labels = backend.shuffled_labels(lkv, seed=residue)
        out = backend.run(*(_poisoned_view(x) for x in (q, k, v)), PLANS[name], labels)
        assert torch.isfinite(out).all(), lkv
        assert torch.equal(out, backend.run(q, k, v, PLANS[name], labels)), lkv
        assert relative(out, exact(q, k, v)) < 2.2 * BOUND[name] + backend.rounding, lkv


@each_plan
@pytest.mark.parametrize("lkv", [1, 2, 63, 127, 128, 129, 191, 255, 257, 385])
def test_uniform_attention_is_the_arithmetic_mean(backend, name, lkv):
    """Q = K = 0 and one spike in V: the output is the mean, wherever the spike is and whatever the order.

    At 129 keys, 127 pad rows that keep probability mass or that a block mean counts would halve the result; V's own
    format may move it a little.
    """
    tolerance = {"exact": 2e-6, "fp8": 1 / 32, "int8": 1 / 25, "nvfp4": 1 / 3}[PLANS[name].values]
    q, k, v = backend.qkv(lq=2, lkv=lkv, dim=16)
    for spike in sorted({0, lkv // 2, lkv - 1}):
        v = torch.zeros_like(v)
        v[:, :, spike] = 100.0
        mean = 100.0 / lkv
        shuffled = [backend.shuffled_labels(lkv, groups=groups, seed=spike) for groups in (7, 2)]
        for labels in (None, *shuffled):
            out = backend.run(q * 0, k * 0, v, PLANS[name], labels)
            assert (out.float() / mean - 1).abs().max() < tolerance + backend.rounding


@pytest.mark.parametrize("lkv", [129, 200, 255, 300])
def test_block_means_count_only_valid_tokens(lkv):
    """Demeaned exact arithmetic: constant V leaves a residual of exactly zero, also in the last, short block."""
    from vc_attention.kernels.spec.smoothing import block_means

    v = torch.full((1, 1, lkv, 8), 50.5)
    for clip in (False, True):
        assert torch.equal(block_means(v, 128, clip=clip), torch.full((1, 1, -(-lkv // 128), 8), 50.5))
