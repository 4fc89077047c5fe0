"""The online softmax of one 64 x 256 score tile, on wgmma accumulator fragments: row maxima, probabilities, rescale."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from .config import BETA, TOP_LOG2
from .layouts import BLOCK, KEY_TILE
from .ptx import as_float, max_s32, pack_e4m3, pack_u8

#: The score accumulators start at these bits, those of MAGIC, and IGMMA adds integers of less than 2^22 to them: read
#: as fp32 they are MAGIC + score exactly. No conversion and no add per element (3 to 8 % of the kernel, H200).
MAGIC_BITS = 0x4B400000
MAGIC = 12582912.0
#: Rounding MAGIC * a (a: codes per integer score) leaves an error of up to 0.75 a codes. Subtracting two more integer
#: scores keeps a row maximum from rounding up to code 127, which is NaN, however large the scores are.
_MAGIC_GUARDED = MAGIC + 2.0

CODES_PER_BINADE = 8.0
#: y = 8 (u + TOP_LOG2 + 7) + BETA, `spec.expcast`.
_EXPCAST_OFFSET = CODES_PER_BINADE * (TOP_LOG2 + 7.0) + BETA


def fragment_view(accumulator, columns):
    """A wgmma accumulator as [b, r, i]: row lane // 4 + 8 r, column 8 i + 2 (lane % 4) + b."""
    return cute.make_tensor(accumulator.iterator, cute.make_layout((2, 2, columns // 8), stride=(1, 2, 4)))


def block_maximum(scores, r, half):
    """Largest of this thread's scores in row `r` and key block `half`, as the fp32 MAGIC + score.

    Integers compare like the floats they spell here, and max.s32 in threes is one VIMNMX3: 36 instructions, not 68.
    """
    span = BLOCK // 8
    values = [scores[b, r, i] for i in range(span * half, span * (half + 1)) for b in range(2)]
    while len(values) > 1:
        thirds = []
        for i in range(0, len(values), 3):
            largest = values[i]
            for other in values[i + 1 : i + 3]:
                largest = max_s32(largest, other)
            thirds.append(largest)
        values = thirds
    return as_float(values[0])


def quad_maximum(x):
    """Maximum over the four lanes that share an accumulator row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 2))


def quad_sum(x):
    """Sum over the four lanes that share an accumulator row."""
    x = x + cute.arch.shuffle_sync_bfly(x, 1)
    return x + cute.arch.shuffle_sync_bfly(x, 2)


def softmax_tile(expcast, accumulator, p_words, maximum, row_scale, key_scale, addend):
    """Row maxima of one tile, then its P bytes into `p_words`.

    expcast: ExpCast codes, or exp2 rounded to E4M3. accumulator: Int32 scores on MAGIC_BITS. maximum: running row
    maxima (2), log2 units, updated. row_scale (2) and key_scale (2 blocks): their product turns a score into log2
    units. addend [row][block]: log2 units, or None.
    Returns the rescale factors alpha [row]; this thread's part of the row sums [row][block] of the unrounded P, and its
    last unrounded P [row][block] (both exp2 only; ExpCast's sums are those of its codes, which the ones rows of V^T
    give).
    """
    scores = fragment_view(accumulator, KEY_TILE)
    rescale, sums, last = [], [], []
    for r in range(2):
        scale = [row_scale[r] * key_scale[0], row_scale[r] * key_scale[1]]
        largest = [(block_maximum(scores, r, h) - MAGIC) * scale[h] for h in range(2)]
        if addend is not None:
            largest = [largest[h] + addend[r][h] for h in range(2)]
        new = cute.arch.fmax(maximum[r], quad_maximum(cute.arch.fmax(largest[0], largest[1])))
        rescale.append(cute.math.exp2(maximum[r] - new, fastmath=True))
        maximum[r] = new
        partial = [Float32(0.0), Float32(0.0)]
        ends = [Float32(0.0), Float32(0.0)]
        for i in range(KEY_TILE // 16):
            h = i // (BLOCK // 16)
            offset = new if addend is None else new - addend[r][h]
            if expcast:
                a = scale[h] * CODES_PER_BINADE
                b = _EXPCAST_OFFSET - CODES_PER_BINADE * offset
            else:
                a = scale[h]
                b = TOP_LOG2 - offset
            b = b - _MAGIC_GUARDED * a
            y = [as_float(scores[c, r, 2 * i + d]) * a + b for d in range(2) for c in range(2)]
            word = (i // 2) * 4 + (i % 2) * 2 + r
            if expcast:
                p_words[word] = pack_u8(y)
            else:
                p = [cute.math.exp2(x, fastmath=True) for x in y]
                partial[h] = partial[h] + ((p[0] + p[1]) + (p[2] + p[3]))
                ends[h] = p[3]
                p_words[word] = pack_e4m3(p)
        sums.append(partial)
        last.append(ends)
    return rescale, sums, last
