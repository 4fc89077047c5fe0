"""Extreme values, ragged tails and pad rows: the row of known failures where frames came out black or NaN."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BOUND, PLANS, VALUE_STEP, each_plan, exact, qkv, relative, run, shuffled_labels

POISON = float("nan")


@each_plan
@pytest.mark.parametrize("constant", [1.0, -3.0, 1e-30, 6e4, 1e33])
def test_constant_values_come_back(name, constant):
    q, k, v = qkv(lkv=150)
    out = run(q, k, torch.full_like(v, constant), name)
    assert torch.isfinite(out).all()
    error = (out / constant - 1).abs().max()
    assert error <= VALUE_STEP[name] + 4e-3


@each_plan
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_huge_values_stay_finite_and_bounded(name, dtype):
    q, k, v = qkv(lkv=260)
    v = (v / v.abs().max() * 6e4).to(dtype)
    out = run(q.to(dtype), k.to(dtype), v, name, shuffled_labels(260))
    assert torch.isfinite(out).all()
    assert out.abs().max() <= 6e4 * (1 + VALUE_STEP[name])
    assert relative(out, exact(q.to(dtype), k.to(dtype), v)) < BOUND[name] + 4e-3


@each_plan
def test_one_spike_does_not_reach_other_channels(name):
    q, k, v = qkv(lkv=300)
    calm = run(q, k, v, name)
    v[0, 0, 77, 5] = 3e4
    out = run(q, k, v, name)
    assert torch.isfinite(out).all()
    others = torch.arange(64) != 5
    if PLANS[name].values in ("fp8", "int8", "exact") and not PLANS[name].clip_means:
        # scales are per channel: the other channels must not notice
        assert torch.equal(out[..., others], calm[..., others])
    true = exact(q, k, v)
    assert (out[..., 5] - true[..., 5]).abs().max() <= (VALUE_STEP[name] + 0.1) * true[..., 5].abs().max()


@each_plan
def test_a_zero_channel_stays_exactly_zero(name):
    q, k, v = qkv(lkv=300)
    v[..., 9] = 0
    out = run(q, k, v, name, shuffled_labels(300))
    assert torch.isfinite(out).all()
    assert torch.equal(out[..., 9], torch.zeros_like(out[..., 9]))
    others = torch.arange(64) != 9
    assert relative(out[..., others], exact(q, k, v)[..., others]) < BOUND[name]


@each_plan
def test_all_zero_values_give_exactly_zero(name):
    q, k, v = qkv(lkv=190)
    assert torch.equal(run(q, k, v * 0, name, shuffled_labels(190)), torch.zeros_like(q))


def _poisoned_view(x: torch.Tensor) -> torch.Tensor:
    """The same values in the middle of a larger buffer of NaN: reading past either end cannot go unnoticed."""
    b, h, length, d = x.shape
    buffer = torch.full((b, h, length + 256, d), POISON)
    buffer[:, :, 128 : 128 + length] = x
    return buffer[:, :, 128 : 128 + length]


@each_plan
def test_every_length_modulo_128(name):
    """Lkv = 128 + r for every r, Lq another odd number, all memory around the tensors NaN, tail moved by labels."""
    for residue in range(128):
        lkv = 128 + residue
        q, k, v = qkv(lq=3, lkv=lkv, dim=16, seed=residue)
        v *= 2.0**-12  # small values: padding that reached a scale would drown them
        labels = shuffled_labels(lkv, seed=residue)
        out = run(*(_poisoned_view(x) for x in (q, k, v)), name, labels)
        assert torch.isfinite(out).all(), lkv
        assert torch.equal(out, run(q, k, v, name, labels)), lkv
        assert relative(out, exact(q, k, v)) < 2.2 * BOUND[name], lkv


@each_plan
@pytest.mark.parametrize("lkv", [1, 2, 63, 127, 128, 129, 191, 255, 257, 385])
def test_uniform_attention_is_the_arithmetic_mean(name, lkv):
    """Q = K = 0 and one spike in V: the output is the mean, wherever the spike is and whatever the order.

    At 129 keys, 127 pad rows that keep probability mass or that a block mean counts would halve the result; V's own
    format may move it a little.
    """
    tolerance = {"exact": 2e-6, "fp8": 1 / 32, "int8": 1 / 25, "nvfp4": 1 / 3}[PLANS[name].values]
    q, k, v = qkv(lq=2, lkv=lkv, dim=16)
    for spike in sorted({0, lkv // 2, lkv - 1}):
        v = torch.zeros_like(v)
        v[:, :, spike] = 100.0
        mean = 100.0 / lkv
        for labels in (None, shuffled_labels(lkv, seed=spike), shuffled_labels(lkv, groups=2, seed=spike)):
            out = run(q * 0, k * 0, v, name, labels)
            assert (out / mean - 1).abs().max() < tolerance


@pytest.mark.parametrize("lkv", [129, 200, 255, 300])
def test_block_means_count_only_valid_tokens(lkv):
    """Demeaned exact arithmetic: constant V leaves a residual of exactly zero, also in the last, short block."""
    from vc_attention.kernels.spec.smoothing import block_means

    v = torch.full((1, 1, lkv, 8), 50.5)
    for clip in (False, True):
        assert torch.equal(block_means(v, 128, clip=clip), torch.full((1, 1, -(-lkv // 128), 8), 50.5))
