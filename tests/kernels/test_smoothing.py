"""Block means: exact on ragged tails, robust when clipped, and honest about the energy they remove."""

from __future__ import annotations

import pytest
import torch
from vc_attention.kernels.spec.smoothing import (
    block_energy_removed,
    block_means,
    expand_blocks,
    stored_means,
    subtract_block_means,
)


def random_x(length, heads=2, dim=16, seed=0):
    return torch.randn(1, heads, length, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 2, 63, 127, 128, 129, 192, 255, 256, 257, 300, 383, 384])
@pytest.mark.parametrize("clip", [False, True], ids=["mean", "clipped"])
def test_every_block_is_the_mean_of_its_own_tokens(length, clip):
    x = random_x(length)
    means = block_means(x, clip=clip)
    assert means.shape == (1, 2, -(-length // 128), 16) and means.dtype == torch.float32
    for j in range(means.shape[-2]):
        # A block by itself, where nothing beyond the last token exists, is the definition.
        alone = block_means(x[..., 128 * j : 128 * (j + 1), :], clip=clip)[..., 0, :]
        torch.testing.assert_close(means[..., j, :], alone)
        if not clip:
            torch.testing.assert_close(means[..., j, :], x[..., 128 * j : 128 * (j + 1), :].mean(-2))


def test_a_constant_has_itself_as_mean_in_a_ragged_block_too():
    x = torch.full((1, 1, 129, 8), 50.0)
    assert torch.equal(block_means(x), torch.full((1, 1, 2, 8), 50.0))
    assert torch.equal(block_means(x, clip=True), torch.full((1, 1, 2, 8), 50.0))


def test_other_block_lengths_and_strides():
    x = random_x(96)
    torch.testing.assert_close(block_means(x, 32)[..., 1, :], x[..., 32:64, :].mean(-2))
    view = random_x(96).transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(block_means(view, 32), block_means(x, 32))


def test_stored_means_are_bf16_values():
    means = block_means(random_x(300))
    stored = stored_means(means)
    assert stored.dtype == torch.float32
    assert torch.equal(stored.to(torch.bfloat16).to(torch.float32), stored)
    assert float((stored - means).abs().max()) <= float(means.abs().max()) * 2**-8
    assert bool(stored_means(torch.full((1, 1, 1, 4), 65504.0)).isfinite().all())


def test_subtracting_and_restoring_is_exact():
    x = random_x(300)
    means = stored_means(block_means(x))
    residual = subtract_block_means(x, means)
    torch.testing.assert_close(residual + expand_blocks(means, 128, 300), x, atol=1e-6, rtol=0)
    assert float(block_means(residual).abs().max()) < 2**-8
    with pytest.raises(ValueError, match="300 tokens make 3 blocks of 128, but there are 2 means"):
        subtract_block_means(x, means[..., :2, :])


def test_one_huge_token_moves_a_mean_but_not_a_clipped_mean():
    x = random_x(256) + 1.0
    clean = block_means(x)
    x[..., 70, :] = 1000.0
    assert float((block_means(x) - clean)[..., 0, :].abs().min()) > 5
    clipped = block_means(x, clip=True)
    assert float((clipped - clean)[..., 0, :].abs().max()) < 0.2
    torch.testing.assert_close(clipped[..., 1, :], clean[..., 1, :], atol=0.2, rtol=0)


def test_clipping_follows_its_formula():
    """Norms 1, 1, 1, 4 with the median 1: the long token gets w = (2 / 4)^2."""
    x = torch.zeros(1, 1, 4, 4)
    x[..., :3, 0] = 1.0
    x[..., 3, 1] = 4.0
    mean = block_means(x, 4, clip=True)[0, 0, 0]
    torch.testing.assert_close(mean, torch.tensor([3.0, 0.25 * 4.0, 0.0, 0.0]) / 3.25)


def test_a_block_of_long_tokens_keeps_its_true_mean():
    """k-means puts long tokens together; against the median of the whole head they would all be clipped."""
    x = random_x(256)
    x[..., 128:, :] = 100 * x[..., 128:, :].abs()
    torch.testing.assert_close(block_means(x, clip=True)[..., 1, :], block_means(x)[..., 1, :], rtol=0.05, atol=0)


@pytest.mark.parametrize("clip", [False, True], ids=["mean", "clipped"])
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1, 1, 200, 8),
        torch.full((1, 1, 200, 8), 65504.0, dtype=torch.float16),
        (random_x(200, heads=1) * 3e4).clamp(-65504, 65504).half(),
        random_x(200, heads=1) * 1e30,
        torch.where(torch.arange(200)[:, None] == 9, 60000.0, torch.zeros(1, 1, 200, 8)).half(),
    ],
    ids=["zero", "fp16_max", "fp16_huge", "fp32_huge", "one_token_not_zero"],
)
def test_extremes_stay_finite(x, clip):
    means = block_means(x, clip=clip)
    assert bool(means.isfinite().all())
    assert bool((means.abs() <= x.abs().max().float()).all())


def test_means_of_zero_values_are_exactly_zero():
    zero = torch.zeros(1, 1, 200, 8)
    for clip in (False, True):
        assert torch.equal(block_means(zero, clip=clip), torch.zeros(1, 1, 2, 8))
    assert block_energy_removed(zero) == 0.0


def test_energy_removed_counts_exactly_what_the_means_carry():
    x = torch.cat([torch.full((1, 1, 128, 4), 3.0), torch.full((1, 1, 128, 4), -3.0)], dim=-2)
    assert block_energy_removed(x) == pytest.approx(1.0)
    x[..., ::2, :] += 1.0
    x[..., 1::2, :] -= 1.0
    # Energy 9 of the means against 9 + 1 in all.
    assert block_energy_removed(x) == pytest.approx(0.9, abs=1e-6)


def test_energy_removed_follows_the_labels():
    sign = torch.where(torch.arange(256) % 2 == 0, 1.0, -1.0)
    v = 3.0 * sign[:, None].expand(1, 1, 256, 4)
    labels = (sign < 0).to(torch.uint8)[None, None]
    assert block_energy_removed(v) == pytest.approx(0.0, abs=1e-9)
    assert block_energy_removed(v, labels) == pytest.approx(1.0)


def test_clipping_costs_little_energy_on_ordinary_values():
    v = random_x(2048, dim=64) + random_x(16, dim=64, seed=1).repeat_interleave(128, dim=-2)
    assert block_energy_removed(v, clip=True) == pytest.approx(block_energy_removed(v), abs=0.01)
