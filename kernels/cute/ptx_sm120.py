"""Instructions of sm_120a and the warp-level MMAs, each as a function of registers.

Fragments follow the PTX ISA: lane 4 g + t holds rows g and g + 8 of A, column g of B and columns 2 t, 2 t + 1 of C.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from .ptx import pack_e4m3

#: Scale selectors {byte, thread}: with four scales a word the byte is 0; the quad lanes that thread 0 does not read
#: hold the same words, so the product does not depend on the thread.
_NVFP4 = """mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3
{{$w0},{$w1},{$w2},{$w3}}, {{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}}, {{$r8},{$r9},{$r10},{$r11}},
{$r6}, {0,0}, {$r7}, {0,0};"""
_BF16_K16 = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
{{$w0},{$w1},{$w2},{$w3}}, {{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}}, {{$r6},{$r7},{$r8},{$r9}};"""
_BF16_K8 = """mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32
{{$w0},{$w1},{$w2},{$w3}}, {{$r0},{$r1}}, {{$r2}}, {{$r3},{$r4},{$r5},{$r6}};"""
_PACK_E2M1 = """{
.reg .b8 a,b,c,d;
cvt.rn.satfinite.e2m1x2.f32 a, {$r1}, {$r0}; cvt.rn.satfinite.e2m1x2.f32 b, {$r3}, {$r2};
cvt.rn.satfinite.e2m1x2.f32 c, {$r5}, {$r4}; cvt.rn.satfinite.e2m1x2.f32 d, {$r7}, {$r6};
mov.b32 {$w0}, {a,b,c,d};
}"""
#: The upper half is shifted down first: without that, ptxas of CUDA 12.9 reads bytes 2 and 3 of a word that
#: `_PACK_E2M1` has just made as zeros (that of 13.0 does not). PTX does not show it, so `test_sass_casts` looks for it.
_UNPACK_E2M1 = """{
.reg .b8 a,b,c,d,x,y; .reg .b32 p,q,r,s,t; .reg .b16 e,f,g,h,i,j,k,l;
shr.u32 t, {$r0}, 16; mov.b32 {a,b,x,y}, {$r0}; mov.b32 {c,d,x,y}, t;
cvt.rn.f16x2.e2m1x2 p, a; cvt.rn.f16x2.e2m1x2 q, b; cvt.rn.f16x2.e2m1x2 r, c; cvt.rn.f16x2.e2m1x2 s, d;
mov.b32 {e,f}, p; mov.b32 {g,h}, q; mov.b32 {i,j}, r; mov.b32 {k,l}, s;
cvt.f32.f16 {$w0}, e; cvt.f32.f16 {$w1}, f; cvt.f32.f16 {$w2}, g; cvt.f32.f16 {$w3}, h;
cvt.f32.f16 {$w4}, i; cvt.f32.f16 {$w5}, j; cvt.f32.f16 {$w6}, k; cvt.f32.f16 {$w7}, l;
}"""
_UNPACK_E4M3 = """{
.reg .b16 a,b,c,d,e,f; .reg .b32 p,q;
mov.b32 {a,b}, {$r0};
cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b;
mov.b32 {c,d}, p; mov.b32 {e,f}, q;
cvt.f32.f16 {$w0}, c; cvt.f32.f16 {$w1}, d; cvt.f32.f16 {$w2}, e; cvt.f32.f16 {$w3}, f;
}"""


def emit(code, results, arguments):
    """One inline PTX block: a list of its results, or its only one."""
    found = cute.arch.inline_ptx(code, write_only_types=results, read_only_args=arguments)
    return list(found) if len(results) > 1 else found


def register(value):
    """A 32-bit value in a register of its own, as a Uint32 that the compiler knows nothing about."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[Uint32(value)])


def lane_index():
    """Lane of the warp as Int32, formed anew: addresses made from it are not kept (and spilled) through the loops."""
    thread, _, _ = cute.arch.thread_idx()
    return Int32(register(thread)) & 31


def mma_nvfp4(a, a_scales, b, b_scales, c):
    """m16n8k64 of E2M1 with an E4M3 scale for 16 elements along k: 4, 1, 2 and 1 Uint32, c and result 4 Float32."""
    return emit(_NVFP4, [Float32] * 4, [*a, *b, a_scales, b_scales, *c])


def mma_bf16_k16(a, b, c):
    """m16n8k16 of bf16: a 4 and b 2 Uint32, c and result 4 Float32."""
    return emit(_BF16_K16, [Float32] * 4, [*a, *b, *c])


def mma_bf16_k8(a, b, c):
    """m16n8k8 of bf16: a 2 Uint32 and b one, c and result 4 Float32."""
    return emit(_BF16_K8, [Float32] * 4, [*a, b, *c])


def pack_e2m1(x):
    """Eight Float32 as E2M1 codes of one Uint32, to nearest even, saturating."""
    return cute.arch.inline_ptx(_PACK_E2M1, write_only_types=[Uint32], read_only_args=x)


#: The same of numbers of either sign, by a name of its own: `emulated_sm120` has two.
pack_signed_e2m1 = pack_e2m1


def unpack_e2m1(word):
    """The eight Float32 that the E2M1 codes of a Uint32 stand for."""
    return emit(_UNPACK_E2M1, [Float32] * 8, [word])


def round_e4m3(x):
    """Four Float32 as the E4M3 bytes of one Uint32, and the four rounded values."""
    word = pack_e4m3(x)
    return word, emit(_UNPACK_E4M3, [Float32] * 4, [word])


def log2(x):
    """Base-2 logarithm by the special function unit; -inf of 0."""
    return cute.arch.inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
