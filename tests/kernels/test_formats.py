"""Formats against exact arithmetic: every representable value and every rounding boundary, from the definitions."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from vc_attention.kernels.spec import formats


def minifloat_values(exponent_bits: int, mantissa_bits: int, bias: int, last: Fraction) -> list[Fraction]:
    """All non-negative values of a small float, ascending, up to and including `last`; index = code."""
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if exponent == 0:
            value = Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
        else:
            value = (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)
        values.append(value)
        if value == last:
            return values
    raise AssertionError("the largest value is not on the grid")


E4M3 = minifloat_values(4, 3, 7, Fraction(448))
E2M1 = minifloat_values(2, 1, 1, Fraction(6))


def nearest_even(x: Fraction, grid: list[Fraction]) -> Fraction:
    """Round |x| onto `grid` (index = code) to nearest, ties to the even code, saturating."""
    best = min(range(len(grid)), key=lambda code: (abs(grid[code] - abs(x)), code & 1))
    return -grid[best] if x < 0 else grid[best]


def boundaries(grid: list[Fraction]) -> torch.Tensor:
    """Every value, every midpoint, and the fp32 neighbours of both, with sign."""
    points = grid + [(a + b) / 2 for a, b in itertools.pairwise(grid)]
    x = torch.tensor([float(p) for p in points], dtype=torch.float32)
    x = torch.cat([x, torch.nextafter(x, torch.tensor(torch.inf)), torch.nextafter(x, torch.tensor(-torch.inf))])
    return torch.cat([x, -x])


@pytest.mark.parametrize(("rounding", "grid"), [(formats.e4m3, E4M3), (formats.e2m1, E2M1)], ids=["e4m3", "e2m1"])
def test_rounding_is_exact_at_every_boundary(rounding, grid):
    x = boundaries(grid)
    expected = torch.tensor([float(nearest_even(Fraction(float(v)), grid)) for v in x])
    assert torch.equal(rounding(x), expected)


@pytest.mark.parametrize(("rounding", "largest"), [(formats.e4m3, 448.0), (formats.e2m1, 6.0)], ids=["e4m3", "e2m1"])
def test_rounding_saturates_and_keeps_sign(rounding, largest):
    x = torch.tensor([1e4, -1e4, torch.inf, -torch.inf, 0.0])
    assert torch.equal(rounding(x), torch.tensor([largest, -largest, largest, -largest, 0.0]))


def test_e4m3_codes_decode_to_the_format_definition():
    codes = torch.arange(127, dtype=torch.uint8)
    assert torch.equal(formats.e4m3_decode(codes), torch.tensor([float(v) for v in E4M3]))
    assert torch.equal(formats.e4m3_encode(formats.e4m3_decode(codes)).view(torch.uint8), codes)
    assert torch.isnan(formats.e4m3_decode(torch.tensor([127], dtype=torch.uint8))).all()


def test_e4m3_equals_torch_on_random_data():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2.2, 100_000)
    assert torch.equal(formats.e4m3(x), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_int8_codes_are_integers_in_range():
    x = torch.tensor([0.0, 0.5, 1.5, -1.5, 200.0, -200.0])
    assert torch.equal(formats.int8(x, torch.tensor(1.0)), torch.tensor([0.0, 0.0, 2.0, -2.0, 127.0, -127.0]))


def test_nvfp4_lies_on_the_grid_and_within_half_a_step():
    x = torch.randn(2, 3, 50, 40, generator=torch.Generator().manual_seed(1)) * 7
    second = formats.nvfp4_second_level(x)
    codes, scale = formats.nvfp4(x, second)
    assert set(codes.abs().unique().tolist()) <= {float(v) for v in E2M1}
    level = scale / second
    torch.testing.assert_close(formats.e4m3(level), level, rtol=1e-6, atol=0)
    # The largest step of E2M1 is 2 at 4..6; the rounded scale may be up to 1/16 too small, so 6 saturates by 6/16.
    assert ((codes * scale - x).abs() <= scale * 1.0001).all()


def test_nvfp4_of_one_group_by_hand():
    # amax 12: scale E4M3(12 / 6) = 2, elements divided by 2 and rounded half to even on E2M1.
    x = torch.tensor([[12.0, 5.0, -2.5, 1.0, 0.4, 7.0] + [0.0] * 10])
    codes, scale = formats.nvfp4(x, 1.0)
    assert scale.unique().tolist() == [2.0]
    assert codes[0, :6].tolist() == [6.0, 2.0, -1.0, 0.5, 0.0, 4.0]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_nvfp4_last_short_group_has_its_own_scale(length):
    x = torch.randn(4, length, generator=torch.Generator().manual_seed(length))
    codes, scale = formats.nvfp4(x, 1.0)
    assert codes.shape == scale.shape == x.shape
    tail = length - length % 16
    if tail < length:
        expected = formats.e4m3(x[:, tail:].abs().amax(-1) / 6)
        assert torch.equal(scale[:, -1], expected)


def test_zero_stays_zero_in_every_format():
    zero = torch.zeros(1, 1, 32, 32)
    codes, scale = formats.nvfp4(zero, formats.nvfp4_second_level(zero))
    unit = formats.amax_scale(zero, 127.0)
    for result in (formats.e4m3(zero), formats.e2m1(zero), codes * scale, formats.int8(zero, unit)):
        assert torch.equal(result, zero)


def test_adaptive_scale_takes_the_better_of_4_and_6():
    # 5 lies midway between E2M1's 4 and 6: with amax 6 on 6 it errs by 1; on 4 (scale 1.5) it is 3.33 -> 3, an error
    # of .5, and 6 is exact either way.
    x = torch.tensor([[6.0, 5.0, 5.0, 5.0] + [0.0] * 12])
    codes, scale = formats.nvfp4(x, 1.0, adaptive=True)
    assert scale.unique().tolist() == [1.5] and codes[0, :4].tolist() == [4.0, 3.0, 3.0, 3.0]
    # Multiples of the grid are exact on 6 and stay there.
    exact = torch.tensor([[6.0, 4.0, 3.0, 1.5] + [0.5] * 12])
    assert torch.equal(formats.nvfp4(exact, 1.0, adaptive=True)[1], torch.ones_like(exact))


def test_adaptive_scale_never_errs_more_in_any_group():
    x = torch.randn(64, 160, generator=torch.Generator().manual_seed(9))

    def error(adaptive):
        codes, scale = formats.nvfp4(x, 0.01, adaptive)
        return (codes * scale - x).square().unflatten(-1, (-1, 16)).sum(-1)

    assert (error(True) <= error(False)).all() and (error(True) < error(False)).any()
