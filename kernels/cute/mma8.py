"""The products of the 8-bit mma.sync kernels: one instruction each, and the fragments that a lane loads for them."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from . import layouts_mma8 as lo

#: n8 tiles whose MMAs are interleaved: each is a chain of four, and a chain alone would wait for itself.
INTERLEAVE = 4
#: 32-bit words of a panel.
_WORDS = lo.PANEL // 4


def _mma(shape, a, b, c, kind):
    """One mma.sync of `shape`: a 4 words, b 2 words, c 4 accumulators, or one value that all four start from."""
    start = "{$r6},{$r6},{$r6},{$r6}" if len(c) == 1 else "{$r6},{$r7},{$r8},{$r9}"
    code = (
        f"mma.sync.aligned.{shape} {{{{$w0}},{{$w1}},{{$w2}},{{$w3}}}}, "
        f"{{{{$r0}},{{$r1}},{{$r2}},{{$r3}}}}, {{{{$r4}},{{$r5}}}}, {{{start}}};"
    )
    return list(cute.arch.inline_ptx(code, write_only_types=[kind] * 4, read_only_args=[*a, *b, *c]))


def mma_int8(a, b, c):
    """m16n8k32 of INT8 with Int32 accumulators."""
    return _mma("m16n8k32.row.col.s32.s8.s8.s32", a, b, c, Int32)


def mma_e4m3(a, b, c):
    """m16n8k32 of E4M3 with fp32 accumulators (of which the hardware keeps about 14 bits)."""
    return _mma("m16n8k32.row.col.f32.e4m3.e4m3.f32", a, b, c, Float32)


def mma_e4m3_f16(a, b, c):
    """m16n8k32 of E4M3 with fp16 accumulators, two in a word: c 2 words, or one element (any): they start from zero."""
    start = "{z,z}" if len(c) == 1 else "{$r6,$r7}"
    start = start.replace("$r6", "{$r6}").replace("$r7", "{$r7}")
    code = (
        "{.reg .b32 z; mov.b32 z, 0; mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 {{$w0},{$w1}}, "
        f"{{{{$r0}},{{$r1}},{{$r2}},{{$r3}}}}, {{{{$r4}},{{$r5}}}}, {start};}}"
    )
    arguments = [*a, *b, *(c if len(c) == 2 else [])]
    return list(cute.arch.inline_ptx(code, write_only_types=[Uint32] * 2, read_only_args=arguments))


def mma_bf16(a, b, c):
    """m16n8k16 of bf16 with fp32 accumulators."""
    return _mma("m16n8k16.row.col.f32.bf16.bf16.f32", a, b, c, Float32)


def panels(pointer, count, lane, index):
    """What `lane` loads of `count` panels, those of tile `index` of such tiles at `pointer`: tensor [4 words, count].

    The tile is a mode of the layout, as the address then stays known to be a multiple of 16.
    """
    layout = cute.make_layout((4, 32, count, 1 << 24), stride=(1, 4, _WORDS, _WORDS * count))
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), layout)[None, lane, None, index]


def load_words(tensor):
    """The words of a one-dimensional tensor, in one load where they are four."""
    words = cute.make_rmem_tensor(tensor.layout.shape, Uint32)
    cute.autovec_copy(tensor, words)
    return [words[i] for i in range(cute.size(words))]


def a_fragments(first, second):
    """The m16 fragments of two MMA steps, from the chunks of rows lane // 4 and lane // 4 + 8 (4 words each)."""
    return [[first[0], second[0], first[1], second[1]], [first[2], second[2], first[3], second[3]]]


def product(mma, a, b, tiles, start):
    """C [tile][4] = A B^T. a: fragments of the MMA steps. b: this lane's panels [4, tile * steps / 2]. tiles: the n8
    tiles to compute. start: what every accumulator begins with, a register.
    """
    out: dict[int, list] = {}
    steps = len(a)
    for first in range(0, len(tiles), INTERLEAVE):
        some = tiles[first : first + INTERLEAVE]
        for pair in range(steps // 2):
            words = {i: load_words(b[None, i * (steps // 2) + pair]) for i in some}
            for half in range(2):
                for i in some:
                    operand = words[i][2 * half : 2 * half + 2]
                    out[i] = mma(a[2 * pair + half], operand, out.get(i, [start]))
    return out
