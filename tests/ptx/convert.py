"""The cvt family, with the rounding of `formats`."""

from __future__ import annotations

import numpy as np

from . import formats as fm
from .formats import F32, S32, TYPES, U8, U16, U32, UNSIGNED
from .operands import opcode

_PACKED = {
    "bf16x2": (fm.to_bf16, 16),
    "f16x2": (fm.to_f16, 16),
    "satfinite.e4m3x2": (fm.to_e4m3, 8),
    "satfinite.e2m1x2": (fm.to_e2m1, 4),
}


@opcode(r"cvt\.rz\.bf16x2\.f32")
def cut_floats(c, i, m):
    """Two fp32 cut to bf16 in one register, the first operand in the upper half. No kernel has it; mutants do."""
    write = c.write(i, i.operands[0])
    high, low = (c.read(i, name, U32) for name in i.operands[1:])
    return lambda warp: write(warp, high(warp) & np.uint32(0xFFFF0000) | low(warp) >> np.uint32(16))


@opcode(r"cvt\.rn\.(bf16x2|f16x2|satfinite\.e4m3x2|satfinite\.e2m1x2)\.f32")
def pack_floats(c, i, m):
    """Two fp32 into one register, the first operand in the upper half."""
    write = c.write(i, i.operands[0])
    high, low = (c.read(i, name, F32) for name in i.operands[1:])
    convert, bits = _PACKED[m[1]]
    whole = UNSIGNED[2 * bits // 8]
    shift = whole.type(bits)

    def execute(warp):
        write(warp, convert(high(warp)).astype(whole) << shift | convert(low(warp)).astype(whole))

    return execute


@opcode(r"cvt\.rn\.(bf16|f16)\.f32")
def round_to_half(c, i, m):
    write, x = c.write(i, i.operands[0]), c.read(i, i.operands[1], F32)
    convert = fm.to_bf16 if m[1] == "bf16" else fm.to_f16
    return lambda warp: write(warp, convert(x(warp)))


@opcode(r"cvt\.f32\.(bf16|f16)")
def widen_half(c, i, m):
    write, x = c.write(i, i.operands[0]), c.read(i, i.operands[1], U16)
    convert = fm.from_bf16 if m[1] == "bf16" else fm.from_f16
    return lambda warp: write(warp, convert(np.ascontiguousarray(x(warp))))


@opcode(r"cvt\.rn\.f16x2\.e4m3x2")
def unpack_e4m3(c, i, m):
    write, x = c.write(i, i.operands[0]), c.read(i, i.operands[1], U16)

    def execute(warp):
        values = fm.E4M3[np.ascontiguousarray(x(warp)).view(U8)].astype(F32)
        write(warp, fm.to_f16(values).view(U32))

    return execute


@opcode(r"cvt\.rn\.f16x2\.e2m1x2")
def unpack_e2m1(c, i, m):
    """Two codes of a byte, the first in the low half of both."""
    write, x = c.write(i, i.operands[0]), c.read(i, i.operands[1], U8)

    def execute(warp):
        pair = np.ascontiguousarray(x(warp))
        values = fm.E2M1[np.stack((pair & 15, pair >> 4), -1)].astype(F32)
        write(warp, np.ascontiguousarray(fm.to_f16(values)).view(U32)[..., 0])

    return execute


@opcode(r"cvt\.rni\.s32\.f32")
def round_to_integer(c, i, m):
    write, x = c.write(i, i.operands[0]), c.read(i, i.operands[1], F32)
    return lambda warp: write(warp, fm.to_s32(x(warp)))


@opcode(r"cvt\.rzi\.s32\.f32")
def cut_to_integer(c, i, m):
    """Towards zero. No kernel has it; mutants do."""
    write, x = c.write(i, i.operands[0]), c.read(i, i.operands[1], F32)
    return lambda warp: write(warp, fm.to_s32(np.trunc(x(warp))))


@opcode(r"cvt\.rn\.f32\.(s32|u32)")
def integer_to_float(c, i, m):
    write, x = c.write(i, i.operands[0]), c.read(i, i.operands[1], TYPES[m[1]])
    return lambda warp: write(warp, x(warp).astype(F32))


@opcode(r"cvt\.(s8|u8|s16|u16|s32|u32|s64|u64)\.(s8|u8|s16|u16|s32|u32|s64|u64)")
def integer_to_integer(c, i, m):
    """Truncates or extends; registers may be wider than either type (8-bit values live in 16- or 32-bit ones)."""
    target, source = TYPES[m[1]], TYPES[m[2]]
    write = c.write(i, i.operands[0], "s" if target.kind == "i" else "u")
    x = c.read(i, i.operands[1], source, widen=True)
    return lambda warp: write(warp, x(warp).astype(target))


@opcode(r"cvt\.pack\.sat\.(u8|s8)\.s32\.b32")
def pack_integers(c, i, m):
    """d = two saturated bytes (a above b) under the lower half of c, shifted up."""
    write, (a, b) = c.write(i, i.operands[0]), (c.read(i, name, S32) for name in i.operands[1:3])
    rest = c.read(i, i.operands[3], U32)
    low, high = (0, 255) if m[1] == "u8" else (-128, 127)

    def execute(warp):
        bytes_ = [np.clip(x(warp), low, high).astype(U8).astype(U32) for x in (a, b)]
        write(warp, rest(warp) << np.uint32(16) | bytes_[0] << np.uint32(8) | bytes_[1])

    return execute
