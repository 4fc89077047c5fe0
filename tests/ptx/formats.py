"""Number formats of PTX in numpy: decode tables, and the conversions and arithmetic whose rounding must be exact.

All functions work on arrays of any shape. float32 in and out unless said otherwise; codes are unsigned integers.
"""

from __future__ import annotations

import numpy as np

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
U8, U16, U32, U64 = (np.dtype(t) for t in (np.uint8, np.uint16, np.uint32, np.uint64))
S8, S16, S32, S64 = (np.dtype(t) for t in (np.int8, np.int16, np.int32, np.int64))
B1 = np.dtype(bool)

#: Unsigned type of a width in bytes, the form in which registers travel when their type does not matter.
UNSIGNED = {1: U8, 2: U16, 4: U32, 8: U64}

#: PTX register and operand types. `b` types are untyped bits; float16 and bfloat16 travel as their bits.
TYPES = {
    "pred": B1,
    **{f"{kind}{8 * size}": dtype for kind in "bu" for size, dtype in UNSIGNED.items()},
    "s8": S8,
    "s16": S16,
    "s32": S32,
    "s64": S64,
    "f16": U16,
    "bf16": U16,
    "f16x2": U32,
    "bf16x2": U32,
    "f32": F32,
    "f64": F64,
}

_BYTE = np.arange(256)
_EXPONENT, _MANTISSA = (_BYTE >> 3) & 15, _BYTE & 7
#: Value of each E4M3 byte (float64): no infinities, S.1111.111 is NaN.
E4M3 = np.where(_EXPONENT == 0, _MANTISSA * 2.0**-9, (1 + _MANTISSA / 8) * 2.0 ** (_EXPONENT - 7.0))
E4M3 = np.where(_BYTE > 127, -E4M3, E4M3)
E4M3[(_BYTE & 127) == 127] = np.nan
#: The unsigned scale format of block-scaled MMA. A set sign bit is NaN here, so that it is never accepted silently.
UE4M3 = np.where(_BYTE < 128, E4M3, np.nan)
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
#: Value of each E2M1 nibble (float64), and of both nibbles of each byte, the lower one first.
E2M1 = np.concatenate([_POSITIVE, -_POSITIVE])
E2M1_PAIR = np.stack([E2M1[_BYTE & 15], E2M1[_BYTE >> 4]], 1)
_INFINITY = np.int32(0x7F800000)
#: Bits of the smallest float32 of each code but 0: midpoints, which belong to the even code.
_E2M1_FROM = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F32).view(S32) + np.array([1, 0] * 3 + [1], S32)


def to_e2m1(x):
    """cvt.rn.satfinite.e2m1 of float32, as nibbles: to nearest even; NaN becomes the largest positive value."""
    bits = np.ascontiguousarray(x, F32).view(S32)
    size = bits & np.int32(0x7FFFFFFF)
    code = np.searchsorted(_E2M1_FROM, size, "right").astype(np.uint8)
    code |= ((bits < 0) & (size <= _INFINITY)).astype(np.uint8) << 3
    return code


def to_e4m3(x):
    """cvt.rn.satfinite.e4m3 of float32, as bytes: to nearest even, beyond 448 it is 448; NaN becomes 0x7f."""
    nan = np.isnan(x)
    a = np.where(nan, 0.0, np.minimum(np.abs(x).astype(F64), 448.0))
    exponent = np.maximum(np.frexp(a)[1] - 1, -6)
    units = np.rint(np.ldexp(a, 3 - exponent)).astype(np.int64)  # of 2^(exponent - 3): 8 to 16, below 8 subnormal
    code = np.where(units < 8, units, (exponent + 7) * 8 + units - 8)
    return np.where(nan, 127, np.minimum(code, 126) | np.signbit(x).astype(np.int64) << 7).astype(np.uint8)


def to_bf16(x):
    """cvt.rn.bf16 of float32, as uint16 bits; NaN becomes 0x7fff."""
    u = np.ascontiguousarray(x, F32).view(U32)
    rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def from_bf16(bits):
    """float32 values of uint16 bf16 bits."""
    return (bits.astype(U32) << np.uint32(16)).view(F32)


def to_f16(x):
    """cvt.rn.f16 of float32, as uint16 bits; NaN becomes 0x7fff."""
    with np.errstate(over="ignore"):
        return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(U16)).astype(np.uint16)


def from_f16(bits):
    """float32 values of uint16 fp16 bits."""
    return bits.view(np.float16).astype(F32)


def to_s32(x):
    """cvt.rni.s32.f32: to nearest even, saturating, NaN becomes 0."""
    wide = np.clip(np.where(np.isnan(x), 0.0, x.astype(F64)), -(2.0**31), 2.0**31 - 1)
    return np.rint(wide).astype(S32)


#: The bits of a float64 that a float32 does not have, and their half. _NORMAL: below it float32 has fewer bits.
_HALF_WAY_MASK, _HALF_WAY, _NORMAL = np.int64(2**29 - 1), np.int64(2**28), 2.0**-126


def fma(a, b, c):
    """a b + c of float32 with one rounding: the float64 sum is rounded to odd first, which makes the second one exact.

    The product of two float32 is exact in float64; the sum's error follows from TwoSum; float64 has more than
    2 * 24 + 2 bits, so that rounding its odd-rounded value to float32 is rounding the exact value. Only a float64 sum
    that lies half-way between two float32 needs any of that: any other is on the side of the exact one.
    """
    product, c = a.astype(F64) * b.astype(F64), c.astype(F64)
    total = product + c
    if not ((total.view(S64) & _HALF_WAY_MASK) == _HALF_WAY).any() and not (np.abs(total) < _NORMAL)[total != 0].any():
        return total.astype(F32)
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(S64)
    inexact = (error != 0) & ((bits & 1) == 0) & np.isfinite(total)
    if not inexact.any():
        return total.astype(F32)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + toward, bits).view(F64).astype(F32)


def flush(x):
    """.ftz: subnormal float32 become zeros of the same sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def move_ulps(x, ulps):
    """Each finite float32 moved away from zero by `ulps` (towards zero if negative): a worst-case approximation."""
    if not ulps:
        return x
    step = np.isfinite(x) & (x != 0)
    return np.where(step, (x.view(S32) + np.int32(ulps)).view(F32), x)


def maximum(a, b):
    """max.f32: the other operand of a NaN, and +0 above -0."""
    return _extreme(np.fmax(a, b), a, b, np.bitwise_and)


def minimum(a, b):
    """min.f32: the other operand of a NaN, and -0 below +0."""
    return _extreme(np.fmin(a, b), a, b, np.bitwise_or)


def _extreme(found, a, b, zero_sign):
    zeros = (a == 0) & (b == 0)
    if not zeros.any():
        return found
    return np.where(zeros, zero_sign(a.view(U32), b.view(U32)).view(F32), found)
