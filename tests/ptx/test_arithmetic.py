"""Each instruction that stays within a lane against Python integers or numpy floats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx import formats as fm
from ptx.contraction import contract
from ptx.parser import PtxError, parse
from ptx.snippets import apply, kernel, run

G = np.random.default_rng(0)
EDGES = [0, 1, 2, 31, 32, 33, 127, 128, 255, 256, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFF80]


def words(count: int = 32) -> np.ndarray:
    return np.concatenate([EDGES, G.integers(0, 2**32, count)]).astype(np.uint32)[G.permutation(count)]


def signed(x: int, bits: int = 32) -> int:
    x &= 2**bits - 1
    return x - 2**bits if x >> (bits - 1) else x


INTEGER = {
    "add.s32 {}, {}, {}": lambda a, b: a + b,
    "sub.s32 {}, {}, {}": lambda a, b: a - b,
    "min.s32 {}, {}, {}": lambda a, b: min(signed(a), signed(b)),
    "max.s32 {}, {}, {}": lambda a, b: max(signed(a), signed(b)),
    "min.u32 {}, {}, {}": min,
    "max.u32 {}, {}, {}": max,
    "mul.lo.s32 {}, {}, {}": lambda a, b: a * b,
    "mul.hi.s32 {}, {}, {}": lambda a, b: signed(a) * signed(b) >> 32,
    "mul.hi.u32 {}, {}, {}": lambda a, b: a * b >> 32,
    "and.b32 {}, {}, {}": lambda a, b: a & b,
    "or.b32 {}, {}, {}": lambda a, b: a | b,
    "xor.b32 {}, {}, {}": lambda a, b: a ^ b,
    "shl.b32 {}, {}, {}": lambda a, b: a << b if b < 32 else 0,
    "shr.u32 {}, {}, {}": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32 {}, {}, {}": lambda a, b: signed(a) >> min(b, 31),
    "div.u32 {}, {}, {}": lambda a, b: a // b,
    "rem.u32 {}, {}, {}": lambda a, b: a % b,
    "div.s32 {}, {}, {}": lambda a, b: abs(signed(a)) // abs(signed(b)) * (1 if signed(a) * signed(b) > 0 else -1),
    "rem.s32 {}, {}, {}": lambda a, b: abs(signed(a)) % abs(signed(b)) * (1 if signed(a) > 0 else -1),
}


@pytest.mark.parametrize("statement", INTEGER, ids=lambda s: s.split()[0])
def test_integers_of_32_bits(statement):
    a, b = words(), words()
    if "sh" in statement:
        b = np.array([*range(30, 36), 0xFFFFFFFF, *range(25)], np.uint32)
    if statement[:3] in ("div", "rem"):
        b = np.where(b == 0, 7, b).astype(np.uint32)
    expected = [INTEGER[statement](int(x), int(y)) & 0xFFFFFFFF for x, y in zip(a, b, strict=True)]
    assert apply(statement, np.uint32, a, b).tolist() == expected


def test_integers_of_other_widths():
    a, b = words(), words()
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    found = apply("mul.wide.s32 {}, {}, {}", np.uint64, a, b)
    assert found.tolist() == [signed(x) * signed(y) % 2**64 for x, y in pairs]
    found = apply("mul.wide.u32 {}, {}, {}", np.uint64, a, b)
    assert found.tolist() == [x * y for x, y in pairs]
    c = G.integers(0, 2**63, 32).astype(np.uint64)
    triples = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    assert apply("mad.wide.s32 {}, {}, {}, {}", np.uint64, a, b, c).tolist() == [
        (signed(x) * signed(y) + z) % 2**64 for x, y, z in triples
    ]
    assert apply("mad.lo.s64 {}, {}, {}, {}", np.uint64, c, c[::-1].copy(), c).tolist() == [
        (x * y + x) % 2**64 for x, y in zip(c.tolist(), c[::-1].tolist(), strict=True)
    ]
    h = a.astype(np.uint16)
    assert apply("mul.wide.s16 {}, {}, 8", np.uint32, h).tolist() == [signed(x, 16) * 8 % 2**32 for x in h.tolist()]
    assert apply("shl.b64 {}, {}, 3", np.uint64, c).tolist() == [x * 8 % 2**64 for x in c.tolist()]
    assert apply("neg.s32 {}, {}", np.uint32, a).tolist() == [-x % 2**32 for x in a.tolist()]
    assert apply("not.b32 {}, {}", np.uint32, a).tolist() == [~x % 2**32 for x in a.tolist()]


def test_bits_and_bytes():
    a, b = words(), words()
    assert apply("popc.b32 {}, {}", np.uint32, a).tolist() == [x.bit_count() for x in a.tolist()]
    assert apply("clz.b32 {}, {}", np.uint32, a).tolist() == [32 - x.bit_length() for x in a.tolist()]
    assert apply("brev.b32 {}, {}", np.uint32, a).tolist() == [int(f"{x:032b}"[::-1], 2) for x in a.tolist()]
    assert apply("bfe.u32 {}, {}, 5, 9", np.uint32, a).tolist() == [x >> 5 & 511 for x in a.tolist()]
    selector = words()

    def permuted(x, y, s):
        source, result = (x | y << 32).to_bytes(8, "little"), 0
        for n in range(4):
            nibble = s >> 4 * n & 15
            byte = source[nibble & 7]
            result |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * n
        return result

    found = apply("prmt.b32 {}, {}, {}, {}", np.uint32, a, b, selector)
    assert found.tolist() == [permuted(*x) for x in zip(a.tolist(), b.tolist(), selector.tolist(), strict=True)]


def test_moves_between_vectors_and_their_parts():
    a, b = words(), words()
    assert apply("mov.b64 {}, {{{}, {}}}", np.uint64, a, b).tolist() == [
        x | y << 32 for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    c = G.integers(0, 2**63, 32).astype(np.uint64)
    assert apply("mov.b64 {{_, {}}}, {}", np.uint32, c).tolist() == [x >> 32 for x in c.tolist()]


FLOAT = {
    "add.f32 {}, {}, {}": np.add,
    "sub.f32 {}, {}, {}": np.subtract,
    "mul.rn.f32 {}, {}, {}": np.multiply,
    "div.rn.f32 {}, {}, {}": np.divide,
    "max.f32 {}, {}, {}": np.fmax,
    "min.f32 {}, {}, {}": np.fmin,
}


@pytest.mark.parametrize("statement", FLOAT, ids=lambda s: s.split()[0])
def test_floats(statement):
    a, b = G.standard_normal((2, 32)).astype(np.float32)
    assert np.array_equal(apply(statement, np.float32, a, b), FLOAT[statement](a, b))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_pairs_of_floats(name):
    """Each half as the instruction for one value, the first in the lower half."""
    pairs = [G.standard_normal((32, 2)).astype(np.float32) for _ in range(3 if name == "fma" else 2)]
    pairs[0][:4] *= np.float32(1e-38)
    for ftz in ("", ".ftz"):
        operands = ", ".join("{}" for _ in range(len(pairs) + 1))
        found = apply(f"{name}.rn{ftz}.f32x2 {operands}", np.uint64, *(x.view(np.uint64)[:, 0] for x in pairs))
        halves = found.view(np.float32).reshape(32, 2)
        for half in range(2):
            scalars = [np.ascontiguousarray(x[:, half]) for x in pairs]
            if ftz:
                scalars = [fm.flush(x) for x in scalars]
            expected = apply(f"{name}.rn.f32 {operands}", np.float32, *scalars)
            assert np.array_equal(halves[:, half], fm.flush(expected) if ftz else expected)


def test_extremes_of_three():
    a, b, c = G.standard_normal((3, 32)).astype(np.float32)
    a[0] = b[1] = c[2] = np.nan
    assert np.array_equal(apply("max.f32 {}, {}, {}, {}", np.float32, a, b, c), np.fmax(np.fmax(a, b), c))
    assert np.array_equal(apply("min.f32 {}, {}, {}, {}", np.float32, a, b, c), np.fmin(np.fmin(a, b), c))


def test_comparisons_with_nan():
    a, b = G.integers(0, 3, (2, 32)).astype(np.float32)
    a[:4], b[2:8] = np.nan, np.nan
    nan = np.isnan(a) | np.isnan(b)
    for name, function in (("lt", np.less), ("le", np.less_equal), ("gt", np.greater), ("ge", np.greater_equal)):
        for unordered in (False, True):
            statement = f"setp.{name}{'u' * unordered}.f32 %p0, {{1}}, {{2}}; selp.b32 {{0}}, 1, 0, %p0"
            found = apply(statement, np.uint32, a, b).astype(bool)
            assert np.array_equal(found, function(a, b) | nan if unordered else function(a, b))


def test_flushed_and_approximate_floats():
    tiny = np.full(32, 1e-20, np.float32)
    assert (apply("mul.ftz.f32 {}, {}, {}", np.float32, tiny, tiny) == 0).all()
    assert (apply("mul.f32 {}, {}, {}", np.float32, tiny, tiny) > 0).all()
    x = G.uniform(-20, 20, 32).astype(np.float32)
    exact = np.exp2(x.astype(np.float64)).astype(np.float32)
    assert np.array_equal(apply("ex2.approx.ftz.f32 {}, {}", np.float32, x), exact)
    moved = apply("ex2.approx.ftz.f32 {}, {}", np.float32, x, approximation=2)
    assert np.array_equal(moved.view(np.int32) - exact.view(np.int32), np.full(32, 2))
    assert np.array_equal(
        apply("rcp.approx.ftz.f32 {}, {}", np.float32, x), (1 / x.astype(np.float64)).astype(np.float32)
    )


def test_packed_extremes():
    a, b = words(), words()
    for kind, decode in (("bf16", fm.from_bf16), ("f16", fm.from_f16)):
        found = decode(apply(f"max.{kind}x2 {{}}, {{}}, {{}}", np.uint32, a, b).view(np.uint16))
        assert np.array_equal(found, np.fmax(decode(a.view(np.uint16)), decode(b.view(np.uint16))), equal_nan=True)


COMPARE = {
    "lt.s32": lambda a, b: a.view(np.int32) < b.view(np.int32),
    "ge.u32": lambda a, b: a >= b,
    "eq.b32": lambda a, b: a == b,
    "gt.f32": lambda a, b: a.view(np.float32) > b.view(np.float32),
}


@pytest.mark.parametrize("kind", COMPARE)
def test_comparison_and_selection(kind):
    a, b = words(), words()
    b[:8] = a[:8]
    found = apply(f"setp.{kind} %p0, {{1}}, {{2}}; selp.b32 {{0}}, {{1}}, {{2}}, %p0", np.uint32, a, b)
    assert np.array_equal(found, np.where(COMPARE[kind](a, b), a, b))
    found = apply(
        f"setp.gt.s32 %p1, {{1}}, 0; setp.{kind} %p2, {{1}}, {{2}}; and.pred %p0, %p1, %p2; not.pred %p0, %p0;"
        "selp.b32 {0}, 1, 0, %p0", np.uint32, a, b)  # fmt: skip
    assert np.array_equal(found == 0, COMPARE[kind](a, b) & (a.view(np.int32) > 0))


CONVERT = {
    "cvt.u32.u16 {}, {}": (np.uint16, np.uint32, lambda x: x),
    "cvt.s32.s16 {}, {}": (np.uint16, np.uint32, lambda x: signed(x, 16)),
    "cvt.s64.s32 {}, {}": (np.uint32, np.uint64, lambda x: signed(x, 32)),
    "cvt.u64.u32 {}, {}": (np.uint32, np.uint64, lambda x: x),
    "cvt.u16.u32 {}, {}": (np.uint32, np.uint16, lambda x: x),
    "cvt.s8.s32 {}, {}": (np.uint32, np.uint16, lambda x: signed(x, 8)),
    "cvt.s16.s8 {}, {}": (np.uint16, np.uint16, lambda x: signed(x, 8)),
}


@pytest.mark.parametrize("statement", CONVERT, ids=lambda s: s.split()[0])
def test_integer_conversions(statement):
    source, target, function = CONVERT[statement]
    x = words().astype(source)
    bits = 8 * np.dtype(target).itemsize
    assert apply(statement, target, x).tolist() == [function(v) % 2**bits for v in x.tolist()]


def test_float_conversions_place_their_halves():
    a, b = (G.standard_normal(32) * 3).astype(np.float32), (G.standard_normal(32) * 3).astype(np.float32)
    for name, convert, bits in (
        ("bf16x2", fm.to_bf16, 16),
        ("f16x2", fm.to_f16, 16),
        ("satfinite.e4m3x2", fm.to_e4m3, 8),
    ):
        whole = np.uint32 if bits == 16 else np.uint16
        found = apply(f"cvt.rn.{name}.f32 {{}}, {{}}, {{}}", whole, a, b)
        assert np.array_equal(found, convert(a).astype(whole) << whole(bits) | convert(b))
    body = "{{.reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, {1}, {2}; mov.b32 {0}, {{t, t, t, t}};}}"
    found = apply(body, np.uint32, a, b)
    assert np.array_equal(found & 255, fm.to_e2m1(a).astype(np.uint32) << 4 | fm.to_e2m1(b))
    codes = np.arange(32, dtype=np.uint32) * 0x37 & 255  # every nibble, in both halves
    found = apply("{{.reg .b8 x, y, z, w; mov.b32 {{x, y, z, w}}, {1}; cvt.rn.f16x2.e2m1x2 {0}, x;}}", np.uint32, codes)
    pairs = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float16)
    assert np.array_equal(found & 0xFFFF, pairs[codes & 15].view(np.uint16))
    assert np.array_equal(found >> 16, pairs[codes >> 4].view(np.uint16))
    integers = np.array([*range(-140, -124), *range(120, 136)], np.int32).view(np.uint32)
    rest = words()
    found = apply("cvt.pack.sat.s8.s32.b32 {}, {}, {}, {}", np.uint32, integers, integers[::-1].copy(), rest)
    low = np.clip(integers.view(np.int32), -128, 127).astype(np.int8).view(np.uint8).astype(np.uint32)
    assert np.array_equal(found, rest << 16 | low << 8 | low[::-1])
    assert apply("cvt.rni.s32.f32 {}, {}", np.uint32, a).view(np.int32).tolist() == np.rint(a).astype(int).tolist()
    assert apply("cvt.rzi.s32.f32 {}, {}", np.uint32, a).view(np.int32).tolist() == [int(x) for x in a]
    cut = apply("cvt.rz.bf16x2.f32 {}, {}, {}", np.uint32, a, b)
    halves = torch.from_numpy(cut.view(np.int16).copy()).view(torch.bfloat16).double().numpy().reshape(32, 2)
    for half, exact in zip(halves.T, (b, a), strict=True):
        away = np.abs(exact) - np.abs(half)
        assert ((away >= 0) & (away < np.abs(exact) / 64)).all() and (np.signbit(half) == np.signbit(exact)).all()


def test_division_by_zero_is_a_fault():
    with pytest.raises(PtxError, match="division by zero"):
        apply("div.s32 {}, {}, {}", np.uint32, words(), np.zeros(32, np.uint32))


def test_contraction():
    """A product that is used once fuses; one that is used twice, is rounded, or lies beyond a branch does not."""
    start = "cvt.rn.f32.u32 %f1, tid; mul.f32 %f2, %f1, 0f3F800001;"
    store = "mul.wide.u32 %d0, tid, 4; add.s64 %d0, %d0, out; st.global.f32 [%d0], %f5;"
    single = start + "mov.f32 %f3, 0fBF800000; add.f32 %f5, %f2, %f3;" + store
    assert contract(parse(kernel(single, ("out",)))) == 1
    assert contract(parse(kernel(single.replace("add.f32", "sub.f32"), ("out",)))) == 1
    twice = single.replace(store, "add.f32 %f5, %f5, %f2;" + store)
    assert contract(parse(kernel(twice, ("out",)))) == 0
    assert contract(parse(kernel(single.replace("add.f32", "add.rn.f32"), ("out",)))) == 0
    assert contract(parse(kernel(single.replace("mul.f32", "mul.rn.f32"), ("out",)))) == 0
    assert contract(parse(kernel(single.replace("mov.f32", "bra L; L: mov.f32"), ("out",)))) == 0
    assert contract(parse(kernel(single.replace("mov.f32 %f3", "mov.f32 %f1, %f2; mov.f32 %f3"), ("out",)))) == 0
    x = np.arange(32, dtype=np.float32)
    factor, one = np.float32(1 + 2.0**-23), np.full(32, -1, np.float32)
    fused, apart = np.zeros((2, 32), np.float32)
    run(single, {"out": fused})
    run(single, {"out": apart}, fmad=False)
    assert np.array_equal(fused, fm.fma(x, np.full(32, factor), one))
    assert np.array_equal(apart, x * factor - 1)
