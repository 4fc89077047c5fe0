"""The instructions of `ptx_sm120` that only sm_120 has, computed exactly by instructions of sm_90.

With them the NVFP4 kernels run on a card without block-scaled MMAs: its barriers, copies, indices, scales and
epilogue are then tested on silicon. E2M1 times E4M3 has six significant bits, so fp16 holds every scaled operand; the
sums differ from sm_120's in how wide an accumulator is inside the tensor core. For tests, never for speed.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .ptx_sm120 import emit, lane_index
from .simt import unpack2

_F16_K16 = """mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
{{$w0},{$w1},{$w2},{$w3}}, {{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}}, {{$r6},{$r7},{$r8},{$r9}};"""
#: The E4M3 byte number {$r1} / 8 of a word, as two equal fp16.
_SCALE = """{
.reg .b32 s,t; .reg .b16 h;
shr.u32 s, {$r0}, {$r1}; and.b32 s, s, 0xff; shl.b32 t, s, 8; or.b32 s, s, t;
cvt.u16.u32 h, s; cvt.rn.f16x2.e4m3x2 {$w0}, h;
}"""
#: Two E2M1 codes as scaled fp16. Exponent and mantissa go to the top of an fp16 mantissa's neighbours: the fp16 is the
#: value times 2^-14, subnormal codes included.
_DECODE = """{
.reg .b32 s,t,m; .reg .b32 up;
shr.u32 s, {$r0}, SHIFT; and.b32 t, s, 0xf0; shl.b32 t, t, 12; and.b32 s, s, 0x0f; or.b32 s, s, t;
and.b32 m, s, 0x00070007; shl.b32 m, m, 9; and.b32 s, s, 0x00080008; shl.b32 s, s, 12; or.b32 s, s, m;
mov.b32 up, 0x74007400; mul.rn.f16x2 s, s, up; mul.rn.f16x2 {$w0}, s, {$r1};
}"""
#: A float >= 0 as an E2M1 code: of the three spacings 1/2, 1 and 2 the right one gives the smallest code.
_ENCODE = """{
.reg .f32 x,y; .reg .s32 a,b;
min.f32 x, {$r0}, 0f40C00000;
mul.f32 y, x, 0f40000000; cvt.rni.s32.f32 a, y;
cvt.rni.s32.f32 b, x; add.s32 b, b, 2; min.s32 a, a, b;
mul.f32 y, x, 0f3F000000; cvt.rni.s32.f32 b, y; add.s32 b, b, 4; min.s32 {$w0}, a, b;
}"""


def _decode(word, scale):
    """Eight E2M1 codes times a scale (two equal fp16): four words of two fp16."""
    return [emit(_DECODE.replace("SHIFT", str(8 * pair)), [Uint32], [word, scale]) for pair in range(4)]


def mma_nvfp4(a, a_scales, b, b_scales, c):
    """`ptx_sm120.mma_nvfp4` with its scale selectors {0, 0}: scales of rows g, g + 8 from quad lanes 0 and 1.

    An fp16 MMA of 16 columns has other columns of k in a lane, but both operands have the same ones.
    """
    lane = lane_index()
    quad = lane & 28
    words = [cute.arch.shuffle_sync(x, lane) for x, lane in ((a_scales, quad), (a_scales, quad + 1), (b_scales, quad))]
    for half in range(2):
        # A lane's eight columns of these 32 lie in the first or in the second group of 16.
        shift = Int32(16 * half) + ((lane & 2) << 2)
        scales = [emit(_SCALE, [Uint32], [word, shift]) for word in words]
        low, high, right = (
            _decode(word, scale) for word, scale in zip((a[2 * half], a[2 * half + 1], b[half]), scales, strict=True)
        )
        for i in (0, 2):
            c = emit(_F16_K16, [Float32] * 4, [low[i], high[i], low[i + 1], high[i + 1], right[i], right[i + 1], *c])
    return c


def pack_e2m1(x):
    """`ptx_sm120.pack_e2m1` of eight Float32 >= 0."""
    word = Uint32(0)
    for i in range(8):
        word = word | emit(_ENCODE, [Uint32], [x[i]]) << (4 * i)
    return word


def pack_signed_e2m1(x):
    """`ptx_sm120.pack_signed_e2m1` of eight Float32."""
    word = pack_e2m1([emit("abs.f32 {$w0}, {$r0};", [Float32], [value]) for value in x])
    for i in range(8):
        word = word | (emit("mov.b32 {$w0}, {$r0};", [Uint32], [x[i]]) >> 31) << (4 * i + 3)
    return word


def unpack_e2m1(word):
    """`ptx_sm120.unpack_e2m1`."""
    one = emit("mov.b32 {$w0}, 0x3C003C00;", [Uint32], [])
    return [value for pair in _decode(word, one) for value in unpack2(pair, True)]
