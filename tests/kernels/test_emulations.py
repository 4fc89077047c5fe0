"""The emulations of other attention compute attention, with the errors that their formats imply."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vc_attention.benchmarks import emulations
from vc_attention.kernels import FAITHFUL, attention
from vc_attention.kernels.spec.scores import quantise_scores_operand


def qkv(length=384, dim=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, 2, length, dim, generator=g) for _ in range(3))


def relative(a, b):
    return float((a - b).norm() / b.norm())


#: Relative error on Gaussian data, a lower and an upper bound: the roundings must be there and no more than them.
RANGE = {
    "SageAttention2": (0.015, 0.045),
    "SageAttention3": (0.12, 0.25),
    "plain FP8": (0.02, 0.055),
    "plain FP8 + QK Hadamard": (0.02, 0.055),
    "Attn-QAT untrained, 4/8": (0.08, 0.2),
}


@pytest.mark.parametrize("name", emulations.EMULATIONS)
def test_error_is_that_of_the_format(name):
    q, k, v = qkv()
    low, high = RANGE[name]
    assert low < relative(emulations.EMULATIONS[name](q, k, v), emulations.exact(q, k, v)) < high


def test_exact_is_torch_attention():
    q, k, v = qkv()
    torch.testing.assert_close(
        emulations.exact(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", ["SageAttention2", "SageAttention3"])
def test_key_smoothing_takes_a_bias_of_k_away(name):
    q, k, v = qkv()
    bias = 20 * torch.randn(64, generator=torch.Generator().manual_seed(9))
    emulation = emulations.EMULATIONS[name]
    assert relative(emulation(q, k + bias, v), emulation(q, k, v)) < 0.03
    unsmoothed = emulations.attn_qat_untrained
    assert relative(unsmoothed(q, k + bias, v), unsmoothed(q, k, v)) > 0.3


def test_query_smoothing_takes_a_bias_of_a_query_block_away():
    q, k, v = qkv()
    biased = q + 3.0
    smoothed = relative(emulations.sage3(biased, k, v), emulations.exact(biased, k, v))
    plain = relative(emulations.attn_qat_untrained(biased, k, v), emulations.exact(biased, k, v))
    assert smoothed < 0.6 * plain


def test_plain_fp8_suffers_from_a_bias_that_smoothing_takes_away():
    q, k, v = qkv()
    k = k + 5.0
    true = emulations.exact(q, k, v)
    smoothed = relative(emulations.sage2(q, k, v), true)
    for rotate in (False, True):
        assert relative(emulations.plain_fp8(q, k, v, rotate), true) > 1.3 * smoothed


@pytest.mark.parametrize(("tile", "query"), [(32, True), (64, False)])
def test_per_thread_groups_are_written_twice_and_agree(tile, query):
    """Here by the owner of each row, in the specification by splitting the tile: two statements of one layout."""
    x = qkv(300)[0]
    by_owner = emulations._per_thread_int8(x, tile, (lambda r: r % 8) if query else (lambda c: c % 8 // 2))
    torch.testing.assert_close(by_owner, quantise_scores_operand(x, "int8", "per_thread", query), atol=0, rtol=0)


def test_sage2_is_the_plain_plan_without_rotation():
    """On data that a rotation cannot help, the specification without block means errs as SageAttention2 does."""
    q, k, v = qkv(512)
    true = emulations.exact(q, k, v)
    plan = replace(FAITHFUL, score_groups="per_thread").without_smoothing()
    ours = relative(attention(q, k, v, plan, backend="spec"), true)
    assert ours == pytest.approx(relative(emulations.sage2(q, k, v), true), rel=0.05)
