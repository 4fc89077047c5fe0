"""Single instructions that CuTe has no name for, each as a function of registers."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

#: Rounds four fp32 to nearest even and saturates each to an unsigned byte, the first in the lowest byte. ptxas fuses
#: the six instructions into two F2IP.U8.F32.NTZ; `tests/kernels/test_sass.py` counts them, as nothing else promises it.
_PACK_U8 = """{
.reg .s32 a,b,c,d; .reg .b32 t;
cvt.rni.s32.f32 a, {$r0}; cvt.rni.s32.f32 b, {$r1}; cvt.rni.s32.f32 c, {$r2}; cvt.rni.s32.f32 d, {$r3};
cvt.pack.sat.u8.s32.b32 t, d, c, 0; cvt.pack.sat.u8.s32.b32 {$w0}, b, a, t;
}"""
_PACK_E4M3 = """{
.reg .b16 a,b;
cvt.rn.satfinite.e4m3x2.f32 a, {$r1}, {$r0}; cvt.rn.satfinite.e4m3x2.f32 b, {$r3}, {$r2};
mov.b32 {$w0}, {a,b};
}"""


def _emit(code, result, arguments):
    return cute.arch.inline_ptx(code, write_only_types=[result], read_only_args=arguments)


def max_s32(a, b):
    """Maximum of two Int32. ptxas fuses two of them into one VIMNMX3."""
    return _emit("max.s32 {$w0},{$r0},{$r1};", Int32, [a, b])


def as_float(bits):
    """The Float32 with the bits of a 32-bit register."""
    return _emit("mov.b32 {$w0},{$r0};", Float32, [bits])


def as_int(x):
    """The Int32 with the bits of a Float32."""
    return _emit("mov.b32 {$w0},{$r0};", Int32, [x])


def pack_u8(x):
    """Four Float32 as saturated bytes of one Uint32: ExpCast's rounding, clipping and packing in two instructions."""
    return _emit(_PACK_U8, Uint32, x)


def pack_e4m3(x):
    """Four Float32 as E4M3 bytes of one Uint32, to nearest even, saturating."""
    return _emit(_PACK_E4M3, Uint32, x)


def pack_bf16(low, high):
    """Two Float32 rounded to bf16 in one Uint32."""
    return _emit("cvt.rn.bf16x2.f32 {$w0},{$r1},{$r0};", Uint32, [low, high])


def pack_fp16(low, high):
    """Two Float32 rounded to fp16 in one Uint32."""
    return _emit("cvt.rn.f16x2.f32 {$w0},{$r1},{$r0};", Uint32, [low, high])


def low_bf16(word):
    """The lower bf16 of a register as Float32."""
    return as_float(_emit("shl.b32 {$w0},{$r0},16;", Uint32, [word]))


def high_bf16(word):
    """The upper bf16 of a register as Float32."""
    return as_float(_emit("and.b32 {$w0},{$r0},0xffff0000;", Uint32, [word]))
