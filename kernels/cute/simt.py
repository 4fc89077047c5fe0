"""Register-level building blocks of the preparation and grouping kernels: loads, stores, conversions, reductions.

Everything here is plain PTX that every target from sm_89 on has; nothing is Hopper-only. The functions are traced, not
compiled on their own: they unroll, so registers stay registers. Addresses are Int64 (global) or Int32 (shared) bytes.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

#: Threads of every preparation CTA: 8 warps, one for each 16 rows of a 128-row tile.
THREADS = 256
WARPS = THREADS // 32


def ptx(code, types, args):
    """One inline PTX block; `types` is one result type or a list."""
    many = isinstance(types, list)
    return cute.arch.inline_ptx(code, write_only_types=types if many else [types], read_only_args=args)


def effect(code, args):
    """One inline PTX block without a result."""
    cute.arch.inline_ptx(code, read_only_args=args)


def load16(address, valid=None):
    """Four 32-bit words at a global `address` (16-byte aligned), read once; zeros where `valid` (Int32) is 0."""
    if valid is None:
        return list(
            ptx(
                "ld.global.nc.L1::no_allocate.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
                [Uint32] * 4,
                [address],
            )
        )
    return list(
        ptx(
            "{.reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; "
            "mov.b32 {$w3}, 0; @p ld.global.nc.L1::no_allocate.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];}",
            [Uint32] * 4,
            [address, valid],
        )
    )


def load_floats(address, count):
    """`count` (a multiple of 4) consecutive fp32 values at a global `address` that several CTAs read."""
    out = []
    for i in range(count // 4):
        out += ptx("ld.global.v4.f32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", [Float32] * 4, [address + 16 * i])
    return out


def load_int(address, valid=None):
    """One 32-bit integer at a global `address`; 0 where `valid` is 0."""
    if valid is None:
        return ptx("ld.global.b32 {$w0}, [{$r0}];", Int32, [address])
    return ptx(
        "{.reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; @p ld.global.b32 {$w0}, [{$r0}];}",
        Int32,
        [address, valid],
    )


def load_byte(address, valid):
    """One byte at a global `address` as Int32; 0 where `valid` is 0."""
    return ptx(
        "{.reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; @p ld.global.u8 {$w0}, [{$r0}];}",
        Int32,
        [address, valid],
    )


def load8(address, valid):
    """Two 32-bit words at a global `address` (8-byte aligned); zeros where `valid` is 0."""
    return list(
        ptx(
            "{.reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
            "@p ld.global.v2.b32 {{$w0},{$w1}}, [{$r0}];}",
            [Uint32, Uint32],
            [address, valid],
        )
    )


def load_float(address):
    """One fp32 value at a global `address`."""
    return ptx("ld.global.f32 {$w0}, [{$r0}];", Float32, [address])


def store8(address, words):
    effect("st.global.v2.b32 [{$r0}], {{$r1},{$r2}};", [address, *words])


def store16(address, words):
    effect("st.global.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", [address, *words])


def store16_if(address, words, condition):
    effect(
        "{.reg .pred p; setp.ne.s32 p, {$r5}, 0; @p st.global.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};}",
        [address, *words, condition],
    )


def store_float(address, value, condition=None):
    if condition is None:
        effect("st.global.f32 [{$r0}], {$r1};", [address, value])
    else:
        effect("{.reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.global.f32 [{$r0}], {$r1};}", [address, value, condition])


def store_int(address, value):
    effect("st.global.b32 [{$r0}], {$r1};", [address, value])


def store_half(address, word, condition):
    """The low 16 bits of `word`, where `condition` (Int32) is not 0."""
    effect(
        "{.reg .b16 lo, hi; .reg .pred p; setp.ne.s32 p, {$r2}, 0; mov.b32 {lo, hi}, {$r1}; "
        "@p st.global.b16 [{$r0}], lo;}",
        [address, word, condition],
    )


def store_byte(address, value, condition):
    """The low byte of `value` (Int32), where `condition` is not 0."""
    effect("{.reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.global.u8 [{$r0}], {$r1};}", [address, value, condition])


def shared_add(address, value, condition):
    """Add Int32 `value` to shared memory, where `condition` is not 0; integers, so the order does not matter."""
    effect(
        "{.reg .pred p; setp.ne.s32 p, {$r2}, 0; @p red.shared.add.u32 [{$r0}], {$r1};}", [address, value, condition]
    )


def sync_warp():
    effect("bar.warp.sync 0xffffffff;", [])


def shared_store(address, value):
    """One 32-bit value to a shared byte address."""
    code = "st.shared.f32" if isinstance(value, Float32) else "st.shared.b32"
    effect(code + " [{$r0}], {$r1};", [address, value])


def shared_store16(address, words):
    effect("st.shared.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", [address, *words])


def shared_load(address, kind=Float32):
    code = "ld.shared.f32" if kind is Float32 else "ld.shared.b32"
    return ptx(code + " {$w0}, [{$r0}];", kind, [address])


def shared_load16(address, kind=Uint32):
    code = "ld.shared.v4.f32" if kind is Float32 else "ld.shared.v4.b32"
    return list(ptx(code + " {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", [kind] * 4, [address]))


def select(condition, yes, no):
    """`yes` where `condition` (Int32) is not 0, else `no`; 32-bit values of one type."""
    kind = type(no) if not isinstance(no, (int, float)) else type(yes)
    return ptx("{.reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.b32 {$w0}, {$r1}, {$r2}, p;}", kind, [condition, yes, no])


def less(a, b):
    """1 where Int32 a < b, else 0."""
    return ptx("{.reg .pred p; setp.lt.s32 p, {$r0}, {$r1}; selp.s32 {$w0}, 1, 0, p;}", Int32, [a, b])


def smaller(a, b):
    """The smaller of two Int32."""
    return ptx("min.s32 {$w0}, {$r0}, {$r1};", Int32, [a, b])


def max_abs(a, b):
    """max(a, |b|): the absolute value is a source modifier of the maximum."""
    return ptx("{.reg .f32 t; abs.f32 t, {$r1}; max.f32 {$w0}, {$r0}, t;}", Float32, [a, b])


def divide(a, b):
    """a / b rounded to nearest, as torch divides."""
    return ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", Float32, [a, b])


def shuffle_xor(value, mask):
    return cute.arch.shuffle_sync_bfly(value, mask)


def warp_max(value, masks=(16, 8, 4, 2, 1)):
    for mask in masks:
        value = cute.arch.fmax(value, shuffle_xor(value, mask))
    return value


def unpack2(word, fp16):
    """Two 16-bit floats of a word as fp32 [low, high]."""
    if fp16:
        return list(
            ptx(
                "{.reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b;}",
                [Float32, Float32],
                [word],
            )
        )
    return list(
        ptx(
            "{.reg .b32 a, b; shl.b32 a, {$r0}, 16; and.b32 b, {$r0}, 0xffff0000; mov.b32 {$w0}, a; mov.b32 {$w1}, b;}",
            [Float32, Float32],
            [word],
        )
    )


def bf16x2(low, high):
    """Two fp32 rounded to bf16 in one word."""
    return ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", Uint32, [low, high])


def half2(low, high, fp16):
    """Two fp32 rounded to the 16-bit format in one word."""
    kind = "f16x2" if fp16 else "bf16x2"
    return ptx(f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", Uint32, [low, high])


def to_bf16(words, fp16):
    """16-bit float words as bf16 words."""
    return [bf16x2(*unpack2(word, True)) for word in words] if fp16 else words


def int8x4(x):
    """Four fp32 as INT8 codes (nearest even, saturating) in one word; ptxas fuses this into two packed F2IP."""
    return ptx(
        "{.reg .s32 a,b,c,d; .reg .b32 t; cvt.rni.s32.f32 a, {$r0}; cvt.rni.s32.f32 b, {$r1}; "
        "cvt.rni.s32.f32 c, {$r2}; cvt.rni.s32.f32 d, {$r3}; "
        "cvt.pack.sat.s8.s32.b32 t, d, c, 0; cvt.pack.sat.s8.s32.b32 {$w0}, b, a, t;}",
        Uint32,
        x,
    )


def e4m3x4(x):
    """Four fp32 as E4M3 codes (nearest even, saturating) in one word."""
    return ptx(
        "{.reg .b16 a,b; cvt.rn.satfinite.e4m3x2.f32 a,{$r1},{$r0}; cvt.rn.satfinite.e4m3x2.f32 b,{$r3},{$r2}; "
        "mov.b32 {$w0},{a,b};}",
        Uint32,
        x,
    )


def mma16816(a, b, c, fp16):
    """One m16n8k16 product of 16-bit operands with fp32 accumulation: a 4 words, b 2 words, c 4 fp32 -> 4 fp32."""
    kind = "f16.f16" if fp16 else "bf16.bf16"
    return list(
        ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.f32 "
            "{{$w0},{$w1},{$w2},{$w3}}, {{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}}, {{$r6},{$r7},{$r8},{$r9}};",
            [Float32] * 4,
            [*a, *b, *c],
        )
    )


def shared_memory(nbytes):
    """Shared byte address (Int32) of the CTA's one block of dynamic shared memory."""
    return cutlass.memory.SmemAllocator().allocate(nbytes, 128).toint()


class Rows:
    """Byte addresses of the rows of a [B, H, L, 128] tensor of 16-bit floats, any strides, 64-bit offsets."""

    def __init__(self, pointer, head, heads, stride_b, stride_h, stride_l):
        b = head // heads
        offset = b.to(Int64) * stride_b + (head - b * heads).to(Int64) * stride_h
        self.base = pointer.toint() + offset * 2
        self.stride = stride_l * 2

    def address(self, token, byte):
        """Of `byte` (Int32) in the row of `token` (Int32)."""
        return self.base + (token.to(Int64) * self.stride + byte.to(Int64))


def thread_position():
    """(thread, warp, lane) of this thread in its CTA."""
    thread, _, _ = cute.arch.thread_idx()
    return thread, cute.arch.make_warp_uniform(thread // 32), thread % 32


__all__ = [name for name in dir() if not name.startswith("_") and name not in ("annotations", "cutlass", "cute")]
