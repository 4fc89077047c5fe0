"""ExpCast-FP8 against its definition and the published facts (method: golden numbers)."""

from __future__ import annotations

import math

import pytest
import torch
from vc_attention.kernels.spec.expcast import TOP_CODE, expcast, expcast_codes
from vc_attention.kernels.spec.formats import e4m3_encode

FORMS = ("expcast", "expcast_wide", "expcast_chord")


def row_distance(u: torch.Tensor, form: str) -> torch.Tensor:
    """Total variation distance of each row between the exact softmax and the decoded, normalised codes."""
    exact = torch.exp2(u.double())
    decoded = expcast(u, form).double()
    return 0.5 * (exact / exact.sum(-1, keepdim=True) - decoded / decoded.sum(-1, keepdim=True)).abs().sum(-1)


def underflow_mass(u: torch.Tensor) -> torch.Tensor:
    """tau: the share of a row's exact mass that lies at u < -14, below the published form's first normal code."""
    exact = torch.exp2(u.double())
    return torch.where(u < -14, exact, 0.0).sum(-1) / exact.sum(-1)


def test_worked_example_of_the_paper():
    u = torch.tensor([0.0, -1.60])
    assert expcast_codes(u).tolist() == [120, 107]
    assert expcast(u).tolist() == [256.0, 88.0]


def test_row_maximum_code_of_each_form():
    assert [int(expcast_codes(torch.zeros(1), form)) for form in FORMS] == [120, 126, 126]


def test_ratio_to_the_exact_exponential_is_bounded():
    u = torch.linspace(-13.9, 0, 400_001)
    ratio = expcast(u).double() / torch.exp2(u.double() + 8)
    assert ratio.min() >= 0.9290 and ratio.max() <= 1.0746
    # The bounds are tight, so that a wrong beta or a wrong constant cannot hide inside them.
    assert ratio.min() < 0.9295 and ratio.max() > 1.0740


def test_byte_agreement_with_exponential_and_cast_over_a_binade():
    u = torch.linspace(-6, -5, 1_000_001)[:-1]
    agree = (expcast_codes(u) == e4m3_encode(torch.exp2(u + 8)).view(torch.uint8)).double().mean()
    assert agree == pytest.approx(0.796, abs=5e-4)


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0, 6.0])
def test_total_variation_is_bounded_on_random_rows(spread):
    s = torch.randn(64, 4096, generator=torch.Generator().manual_seed(7)) * spread
    u = (s - s.amax(-1, keepdim=True)) * math.log2(math.e)
    distance = row_distance(u, "expcast")
    assert (distance < 0.0364 + underflow_mass(u)).all()


def test_total_variation_is_bounded_on_adversarial_rows():
    # Keys of one binade sit where the chord is highest and where it is lowest, at every share of the two.
    grid = torch.linspace(-6, -5, 20_001)[:-1]
    ratio = expcast(grid).double() / torch.exp2(grid.double() + 8)
    high, low = grid[ratio.argmax()], grid[ratio.argmin()]
    keys = 6000
    rows = [torch.cat([torch.zeros(1), high.expand(n), low.expand(keys - n)]) for n in range(0, keys + 1, 60)]
    distance = row_distance(torch.stack(rows), "expcast")
    assert distance.max() < 0.0364
    # The rows really are adversarial: they come close to the bound.
    assert distance.max() > 0.0350


def test_mean_total_variation_of_gaussian_rows():
    s = torch.randn(128, 8192, generator=torch.Generator().manual_seed(3))
    u = (s - s.amax(-1, keepdim=True)) * math.log2(math.e)
    assert 0.0125 < float(row_distance(u, "expcast").mean()) < 0.02


def test_keeping_subnormal_codes_helps_heavy_tails_and_the_chord_helps_more():
    # Many keys far below the maximum: most of the row's mass is in the tail.
    u = -14.5 + 1.2 * torch.randn(8, 205_000, generator=torch.Generator().manual_seed(5))
    u = torch.cat([torch.zeros(8, 1), u.clamp(max=-8)], dim=-1)
    paper, wide, chord = (float(row_distance(u, form).mean()) for form in FORMS)
    assert chord < wide < paper


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_monotone_and_in_range(form):
    u = torch.linspace(-40, 0, 300_001)
    codes = expcast_codes(u, form).int()
    assert (codes.diff() >= 0).all() and codes.min() == 0 and codes.max() == TOP_CODE[form]


@pytest.mark.parametrize("form", FORMS)
def test_masked_and_broken_scores_get_no_weight(form):
    assert expcast_codes(torch.tensor([-torch.inf, torch.nan, -1e30]), form).tolist() == [0, 0, 0]


def test_published_form_flushes_subnormals_and_the_wide_form_keeps_them():
    u = torch.linspace(-16, -13.5, 10_001)
    assert not ((expcast_codes(u, "expcast") > 0) & (expcast_codes(u, "expcast") < 8)).any()
    wide = torch.linspace(-16, -14.5, 10_001)
    assert set(range(1, 8)) <= set(expcast_codes(wide, "expcast_wide").unique().tolist())
