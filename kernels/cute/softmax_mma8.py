"""The online softmax of one 16 x 128 score tile, on mma.sync accumulators: row maxima, probabilities, rescale."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from .config import BETA, TOP_LOG2
from .ptx import as_float, max_s32, pack_e4m3, pack_u8
from .softmax import CODES_PER_BINADE, MAGIC, quad_maximum

#: See `softmax`: keeps a row maximum from rounding up to code 127, which is NaN.
_MAGIC_GUARDED = MAGIC + 2.0
_EXPCAST_OFFSET = CODES_PER_BINADE * (TOP_LOG2 + 7.0) + BETA


def row_maximum(scores, r):
    """Largest of this lane's scores in row lane // 4 + 8 r, as the fp32 MAGIC + score.

    Integers compare like the floats they spell here. In threes, as max.s32 twice is one VIMNMX3 from sm_90 on.
    """
    values = [scores[i][2 * r + b] for i in scores for b in range(2)]
    while len(values) > 1:
        thirds = []
        for i in range(0, len(values), 3):
            largest = values[i]
            for other in values[i + 1 : i + 3]:
                largest = max_s32(largest, other)
            thirds.append(largest)
        values = thirds
    return as_float(values[0])


def _fma(a, b, c):
    """a b + c, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0},{$r0},{$r1},{$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def softmax_tile(expcast, scores, maximum, scale, addend):
    """Row maxima of one tile, then its P bytes.

    expcast: ExpCast codes, or exp2 rounded to E4M3. scores [n8 tile][4]: Int32 on the bits of MAGIC. maximum: running
    row maxima (2), log2 units, updated. scale: turns a score into log2 units. addend (2 rows): log2 units, or None.
    Returns the P chunks [half][row] of 4 words each; the rescale factors alpha [row]; this lane's part of the row sums
    of the unrounded P [row], and its last unrounded P [row] (both exp2 only; ExpCast's sums are those of its codes,
    which the ones rows of V^T give).
    """
    chunks = [[[None] * 4 for _ in range(2)] for _ in range(2)]
    rescale, sums, last = [], [], []
    for r in range(2):
        largest = (row_maximum(scores, r) - MAGIC) * scale
        if addend is not None:
            largest = largest + addend[r]
        new = cute.arch.fmax(maximum[r], quad_maximum(largest))
        rescale.append(cute.math.exp2(maximum[r] - new, fastmath=True))
        maximum[r] = new
        offset = new if addend is None else new - addend[r]
        if expcast:
            a = scale * CODES_PER_BINADE
            b = _EXPCAST_OFFSET - CODES_PER_BINADE * offset
        else:
            a = scale
            b = TOP_LOG2 - offset
        # One rounding: the product is large, and common to both rows, for which it would be rounded on its own.
        b = _fma(a, Float32(-_MAGIC_GUARDED), b)
        partial, end = Float32(0.0), Float32(0.0)
        for i in range(0, len(scores), 2):
            y = [as_float(scores[i + d][2 * r + c]) * a + b for d in range(2) for c in range(2)]
            half, word = i // 8, i % 8 // 2
            if expcast:
                chunks[half][r][word] = pack_u8(y)
            else:
                p = [cute.math.exp2(x, fastmath=True) for x in y]
                partial = partial + ((p[0] + p[1]) + (p[2] + p[3]))
                end = p[3]
                chunks[half][r][word] = pack_e4m3(p)
        sums.append(partial)
        last.append(end)
    return chunks, rescale, sums, last
