"""Formats against torch's conversions, ml_dtypes where it is installed, and exact fractions."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from ptx import formats as fm


@pytest.fixture(autouse=True)
def quiet():
    """Overflows and signalling NaN are what these tests are about."""
    with np.errstate(all="ignore"):
        yield


def floats(count: int, seed: int) -> np.ndarray:
    """float32 of all bit patterns alike, and as many of ordinary magnitude."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    ordinary = (generator.standard_normal(count) * 2.0 ** generator.integers(-14, 12, count)).astype(np.float32)
    return np.concatenate([bits, ordinary])


def with_midpoints(values: np.ndarray) -> np.ndarray:
    """The values, the points half-way between neighbours, and the floats beside all of these."""
    values = np.unique(values[np.isfinite(values)]).astype(np.float32)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, values[-1:] * 2, values[:1] * 2])
    return np.concatenate([points, np.nextafter(points, np.float32(9e9)), np.nextafter(points, np.float32(-9e9))])


def test_e4m3_is_torchs():
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(fm.E4M3, table, equal_nan=True)
    x = np.concatenate([with_midpoints(table), floats(200_000, 1)])
    # torch does not saturate beyond 448 in every version: the instruction does, NaN aside.
    clipped = np.where(np.isnan(x), x, np.clip(x, -448, 448))
    expected = torch.from_numpy(clipped).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    number = ~np.isnan(x)
    assert np.array_equal(fm.to_e4m3(x)[number], expected[number])
    assert (fm.to_e4m3(x)[~number] == 0x7F).all()


@pytest.mark.parametrize(("dtype", "convert"), [(torch.bfloat16, fm.to_bf16), (torch.float16, fm.to_f16)])
def test_half_formats_are_torchs(dtype, convert):
    table = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float().numpy()
    x = np.concatenate([with_midpoints(table), floats(200_000, 2)])
    expected = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(x)
    assert np.array_equal(convert(x)[number], expected[number])
    assert (convert(x)[~number] == 0x7FFF).all()


def nearest_even(x: Fraction, table: list[Fraction]) -> int:
    """Index of the entry of an ascending table that is nearest to x, an even index winning ties."""
    return min(range(len(table)), key=lambda n: (abs(table[n] - x), n % 2))


def test_e2m1_and_e4m3_by_exact_fractions():
    e2m1 = [Fraction(float(v)) for v in fm.E2M1[:8]]
    e4m3 = [Fraction(float(v)) for v in fm.E4M3[:127]]
    points = with_midpoints(np.array([float(v) for v in e2m1]))
    assert [int(c) for c in fm.to_e2m1(np.abs(points))] == [nearest_even(Fraction(float(abs(p))), e2m1) for p in points]
    points = with_midpoints(np.array([float(v) for v in e4m3]))
    assert [int(c) for c in fm.to_e4m3(np.abs(points))] == [nearest_even(Fraction(float(abs(p))), e4m3) for p in points]
    specials = np.array([np.nan, -np.inf, np.inf, -0.0, -0.2], np.float32)
    assert list(fm.to_e2m1(specials)) == [7, 15, 7, 8, 8]


def test_ml_dtypes_agrees():
    types = pytest.importorskip("ml_dtypes", reason="formats: ml_dtypes is not installed here")
    x = np.concatenate([with_midpoints(fm.E4M3), floats(100_000, 3)])
    x = np.clip(x[~np.isnan(x)], -448, 448)
    assert np.array_equal(fm.to_e4m3(x), x.astype(types.float8_e4m3fn).view(np.uint8))
    assert np.array_equal(fm.to_bf16(x), x.astype(types.bfloat16).view(np.uint16))
    x = np.clip(x, -6, 6)
    assert np.array_equal(fm.to_e2m1(x), x.astype(types.float4_e2m1fn).view(np.uint8) & 15)


def as_float32(x: Fraction) -> np.float32:
    """The float32 nearest to an exact value, ties to even (no overflow)."""
    if x == 0:
        return np.float32(0)
    exponent = -149
    while abs(x) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    quotient = x / Fraction(2) ** exponent
    return np.float32(float(Fraction(round(quotient)) * Fraction(2) ** exponent))


def test_fma_rounds_once():
    """Random values, and c chosen so that the exact sum lies at or just beside a tie."""
    generator = np.random.default_rng(4)
    a, b = (generator.standard_normal(1000).astype(np.float32) for _ in range(2))
    c = (generator.standard_normal(1000) * 2.0 ** generator.integers(-30, 30, 1000)).astype(np.float32)
    ulp = np.float32(2.0**-24) * (1 + generator.integers(0, 2, 1000)).astype(np.float32)
    a = np.concatenate([a, np.float32(1) + ulp, 1 - ulp, np.full(1000, 2.0**-100, np.float32)])
    b = np.concatenate(
        [b, np.float32(1) - ulp, np.float32(1) + ulp, generator.standard_normal(1000).astype(np.float32)]
    )
    c = np.concatenate([c, np.float32(2.0**-24) * (a[1000:2000] > 0), -ulp * a[2000:3000], c])
    found = fm.fma(a, b, c)
    for x, y, z, result in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert as_float32(exact) == result, (x, y, z)


def test_specials_of_max_min_and_integers():
    zeros = np.array([0.0, -0.0, np.nan, 1.0], np.float32)
    for a, b in itertools.product(zeros, zeros):
        high = fm.maximum(np.array([a]), np.array([b]))[0]
        low = fm.minimum(np.array([a]), np.array([b]))[0]
        if a == b == 0:
            assert np.signbit(high) == (np.signbit(a) and np.signbit(b))
            assert np.signbit(low) == (np.signbit(a) or np.signbit(b))
        assert np.isnan(high) == np.isnan(low) == (np.isnan(a) and np.isnan(b))
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, np.inf, -np.inf, np.nan], np.float32)
    top, bottom = 2**31 - 1, -(2**31)
    assert list(fm.to_s32(x)) == [0, 2, 2, 0, -2, top, bottom, top, bottom, 0]


def test_flush_and_ulps():
    x = np.array([1e-40, -1e-40, 2.0**-126, 1.0], np.float32)
    assert list(fm.flush(x)) == [0, 0, np.float32(2.0**-126), 1]
    assert list(np.signbit(fm.flush(x))) == [False, True, False, False]
    moved = fm.move_ulps(np.array([1.0, -1.0, np.inf, 0.0], np.float32), 2)
    assert list(moved) == [1 + 2.0**-22, -1 - 2.0**-22, np.inf, 0]
