"""k-means grouping: what it promises on any input, and the quality it was chosen for.

Tests with the fixture `backend` group by `kernels.group`, on the specification and on the kernels; `group` is the
specification itself, for what only it has. The kernels compare tokens with centroids rounded to 16 bit, so that a token
may be given to a centroid that is farther than the nearest one by twice that rounding (`_slack`).
"""

from __future__ import annotations

import math

import pytest
import torch
from vc_attention.benchmarks import synthetic
from vc_attention.kernels.spec import grouping
from vc_attention.kernels.spec.grouping import auto_groups, group, permutation
from vc_attention.kernels.spec.smoothing import block_energy_removed


def random_v(length=700, heads=2, dim=32, batch=1, seed=0, dtype=torch.float32):
    return torch.randn(batch, heads, length, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _slack(backend, centroids):
    return 1e-5 + 2 * backend.rounding * float(centroids.norm(dim=-1).max())


@pytest.mark.parametrize(
    ("length", "groups"),
    [
        *[(1, 16), (4096, 16), (5792, 16), (5793, 32), (8192, 32), (11585, 32), (11586, 64), (32760, 128)],
        *[(46340, 128), (46341, 256), (75600, 256), (10**7, 256)],
    ],
)
def test_automatic_group_count_is_the_nearest_power_of_two(length, groups):
    assert auto_groups(length) == groups
    assert 2 ** max(4, min(8, round(math.log2(length / 256)))) == groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_dtypes(backend, dtype):
    v = random_v(300, heads=3, dim=backend.dim or 32, batch=2, dtype=dtype).to(backend.device)
    labels, centroids = backend.group(v, 8)
    assert labels.shape == (2, 3, 300) and labels.dtype == torch.uint8
    assert centroids.shape == (2, 3, 8, v.shape[-1]) and centroids.dtype == torch.float32
    assert int(labels.max()) < 8


def test_every_head_is_grouped_by_itself_and_the_same_on_every_run(backend):
    v = backend.values(random_v(3000, heads=3, batch=2))
    labels, centroids = backend.group(v, 16)
    again = backend.group(v.transpose(1, 2).contiguous().transpose(1, 2), 16)
    assert torch.equal(labels, again[0]) and torch.equal(centroids, again[1])
    alone = backend.group(v[1:, 2:], 16)
    assert torch.equal(labels[1:, 2:], alone[0])
    torch.testing.assert_close(centroids[1:, 2:], alone[1], atol=1e-6, rtol=1e-6)


def test_labels_are_the_nearest_centroids(backend):
    v = backend.values(random_v(3000))
    labels, centroids = backend.group(v, 16)
    distance = torch.cdist(v.double(), centroids.double())
    chosen = distance.gather(-1, labels.long()[..., None])[..., 0]
    assert float((chosen - distance.amin(-1)).max()) < _slack(backend, centroids)


def test_chunking_does_not_change_the_result(monkeypatch):
    v = random_v(1000)
    labels, centroids = group(v, 16)
    monkeypatch.setattr(grouping, "_CHUNK", 64)
    small = group(v, 16)
    assert float((small[0] == labels).float().mean()) > 0.999
    torch.testing.assert_close(small[1], centroids, atol=1e-4, rtol=1e-4)


def clear_clusters():
    """2000 tokens, and which of four clusters, 100 standard deviations apart, each of them is from."""
    g = torch.Generator().manual_seed(3)
    member = torch.randint(0, 4, (1, 1, 2000), generator=g)
    centres = 20 * torch.randn(4, 32, generator=g)
    return centres[member] + torch.randn(1, 1, 2000, 32, generator=g), member


def test_lloyd_steps_lower_the_distance():
    v, _ = clear_clusters()
    spread = []
    for steps in (0, 1, 2):
        labels, centroids = group(v, 16, steps=steps)
        spread.append(float((v - centroids[0, 0][labels.long()]).square().sum()))
    assert spread[0] > spread[1] >= spread[2]


def test_no_group_holds_tokens_of_two_clear_clusters(backend):
    v, member = clear_clusters()
    labels = backend.group(backend.values(v), 16)[0].cpu()
    for i in range(16):
        assert member[labels == i].unique().numel() <= 1


def test_numbers_run_along_a_chain_of_near_centroids(backend):
    centroids = backend.group(backend.values(random_v(2000, dim=8)), 32)[1]
    # Both ends of a distance are rounded.
    slack = 2 * _slack(backend, centroids)
    for head in centroids[0]:
        distance = torch.cdist(head.double(), head.double())
        for i in range(31):
            assert float(distance[i, i + 1]) <= float(distance[i, i + 1 :].min()) + slack


def test_chain_order_shortens_the_path_through_the_centroids(backend):
    chained = backend.group(backend.values(random_v(4000, dim=4)), 64)[1]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    length = chained.diff(dim=-2).norm(dim=-1).sum()
    assert float(length) < 0.6 * float(chained[..., order, :].diff(dim=-2).norm(dim=-1).sum())


def test_permutation_is_stable_and_complete():
    labels = torch.tensor([[[2, 0, 1, 0, 2, 1, 0]]], dtype=torch.uint8)
    assert permutation(labels).tolist() == [[[1, 3, 6, 2, 5, 0, 4]]]
    labels = group(random_v(1000), 256)[0]
    order = permutation(labels)
    assert torch.equal(order.sort(-1).values, torch.arange(1000).expand_as(order))
    ordered = labels.gather(-1, order).long()
    rank = ordered * 1000 + order
    assert bool((rank.diff(dim=-1) > 0).all())


def test_warm_start_keeps_the_numbers_and_follows_slow_change(backend):
    v = random_v(2000)
    labels, centroids = backend.group(backend.values(v), 16)
    assert torch.equal(backend.group(backend.values(v), previous=centroids)[0], labels)
    later = backend.values(v + 0.25)
    warm, moved = backend.group(later, previous=centroids)
    still = later[0, 0][warm[0, 0] == 3].float().mean(0)
    torch.testing.assert_close(moved[0, 0, 3], still, atol=1e-4, rtol=1e-4)


def test_a_warm_start_without_refresh_returns_the_centroids_as_they_came():
    v = random_v(2000)
    labels, centroids = group(v, 16)
    warm_labels, same = group(v, previous=centroids, refresh=False)
    assert torch.equal(warm_labels, labels)
    torch.testing.assert_close(same, centroids)


def test_warm_start_ends_where_a_cold_start_would(backend):
    """A stale permutation keeps 31, 27, 23 of 37 % (token correlation .96, .92, .87); one assignment repairs it."""
    first, *later = (backend.values(v) for v in synthetic.make_values_over_steps(8192))
    labels, centroids = backend.group(first)
    for step, correlation, kept in zip(later, synthetic.CORRELATIONS, (31 / 37, 27 / 37, 23 / 37), strict=True):
        assert float(torch.corrcoef(torch.stack([first.flatten(), step.flatten()]).float())[0, 1]) == pytest.approx(
            correlation, abs=0.015
        )
        fresh = block_energy_removed(step, backend.group(step)[0])
        warm = block_energy_removed(step, backend.group(step, previous=centroids)[0])
        stale = block_energy_removed(step, labels)
        assert warm > fresh - 0.015
        assert stale / fresh == pytest.approx(kept, abs=0.05)


def test_a_long_cold_sequence_is_grouped_from_a_subsample():
    v = random_v(6000, heads=1, dim=8)
    v[..., 1::2, :] += 50.0
    labels, _ = group(v, 2, sample=128)
    assert torch.equal(labels[0, 0].long().bincount(), torch.tensor([3000, 3000]))


@pytest.mark.parametrize(
    "v",
    [
        torch.zeros(1, 2, 300, 16),
        torch.full((1, 2, 300, 16), 3.0),
        torch.full((1, 2, 300, 16), 65504.0, dtype=torch.float16),
        random_v(300, dim=16).mul(3e4).clamp(-65504, 65504).half(),
        random_v(300, dim=16) * 1e30,
        random_v(300, dim=16) * 1e-30,
        torch.where(torch.arange(300)[:, None] == 7, 60000.0, random_v(300, dim=16)).half(),
        random_v(1, dim=16),
        random_v(5, dim=16),
    ],
    ids=["zero", "constant", "fp16_max", "fp16_huge", "fp32_huge", "fp32_tiny", "one_huge_token", "one_token", "five"],
)
@pytest.mark.parametrize("k", [0, 1, 256])
def test_any_finite_values_give_finite_centroids_and_valid_labels(backend, v, k):
    v = backend.values(v)
    labels, centroids = backend.group(v, k)
    assert bool(centroids.isfinite().all())
    assert int(labels.max()) < centroids.shape[-2]
    # A warm pass over the same tokens must be just as safe.
    again, moved = backend.group(v, previous=centroids)
    assert bool(moved.isfinite().all()) and int(again.max()) < centroids.shape[-2]


def test_scaling_by_a_power_of_two_changes_nothing(backend):
    v = backend.values(random_v(1000))
    labels, centroids = backend.group(v, 32)
    # The kernels do not rescale V first, so squares of what they group must fit fp32.
    power = 90 if backend.name == "spec" else 40
    for scale in (2.0**-power, 2.0**power):
        scaled = backend.group(v * scale, 32)
        assert torch.equal(scaled[0], labels) and torch.equal(scaled[1], centroids * scale)


def test_an_empty_group_keeps_its_centroid(backend):
    v = backend.values(random_v(500, heads=1, dim=4))
    previous = torch.zeros(1, 1, 2, v.shape[-1], device=v.device)
    previous[..., 1, :4] = 1e4
    labels, centroids = backend.group(v, previous=previous)
    assert int(labels.max()) == 0
    assert torch.equal(centroids[0, 0, 1], previous[0, 0, 1])
    torch.testing.assert_close(centroids[0, 0, 0], v[0, 0].float().mean(0), atol=1e-5, rtol=1e-5)


def test_one_huge_token_gets_a_group_of_its_own_or_none_at_all(backend):
    v = random_v(2000, heads=1)
    v[..., 1000, :] = 1e4
    others = torch.arange(2000) != 1000
    labels, centroids = backend.group(backend.values(v), 16)
    # The other tokens must stay spread over groups, and every group in use must lie among its own tokens.
    assert labels[..., others].unique().numel() > 8
    for i in labels[..., others].unique().tolist():
        assert float(centroids[0, 0, i].abs().max()) < 100


@pytest.mark.parametrize("groups", [-1, 257, 1000])
def test_impossible_group_counts_are_refused_in_a_sentence(backend, groups):
    with pytest.raises(ValueError, match=rf"number of value groups is {groups}; it must be 1 to 256"):
        backend.group(backend.values(random_v()), groups)


def test_unfit_centroids_and_empty_values_are_refused_in_a_sentence(backend):
    v = backend.values(random_v(dim=32))
    centroids = backend.group(v, 16)[1]
    with pytest.raises(ValueError, match=r"previous centroids have shape .* is needed here"):
        backend.group(v, 32, previous=centroids)
    with pytest.raises(ValueError, match="previous centroids"):
        backend.group(backend.values(random_v(heads=3)), previous=centroids)
    with pytest.raises(ValueError, match="previous centroids"):
        backend.group(v, previous=centroids[0])
    with pytest.raises(ValueError, match="previous centroids"):
        backend.group(v, previous=centroids.to("meta"))
    with pytest.raises(ValueError, match="no value tokens"):
        backend.group(v[..., :0, :])


def test_the_generator_is_calibrated_and_white_noise_gains_little(backend):
    """The full 8 / 12 / 36 % is checked by benchmarks/fidelity.py at 8192 tokens and more; this is its small twin."""
    tokens = 8192
    order = synthetic.cube_order(synthetic.grid_for(tokens))
    v = backend.values(synthetic.make_head(tokens, seed=0).v[None, None])
    assert block_energy_removed(v) == pytest.approx(0.08, abs=0.015)
    assert block_energy_removed(v[:, :, order]) == pytest.approx(0.12, abs=0.015)
    assert block_energy_removed(v, backend.group(v)[0]) == pytest.approx(0.36, abs=0.015)
    white = backend.values(random_v(tokens, heads=1, dim=128))
    assert block_energy_removed(white) == pytest.approx(1 / 128, abs=0.001)
    assert block_energy_removed(white, backend.group(white)[0]) == pytest.approx(0.04, abs=0.01)
