"""The online softmax of one 64 x 256 score tile, on wgmma accumulator fragments: row maxima, probabilities, rescale."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Uint32

from .config import BETA, TOP_LOG2
from .layouts import BLOCK
from .ptx import as_float, as_int, fma_saturate, max_s32, pack_e4m3, pack_u8, scale_by_power

#: The score accumulators start at these bits, those of MAGIC, and IGMMA adds integers of less than 2^22 to them: read
#: as fp32 they are MAGIC + score exactly. No conversion and no add per element (3 to 8 % of the kernel, H200).
MAGIC_BITS = 0x4B400000
MAGIC = 12582912.0
#: Rounding MAGIC * a (a: codes per integer score) leaves an error of up to 0.75 a codes. Subtracting two more integer
#: scores keeps a row maximum from rounding up to code 127, which is NaN, however large the scores are.
_GUARD = 2.0

CODES_PER_BINADE = 8.0
#: y = 8 (u + TOP_LOG2 + 7) + BETA, `spec.expcast`.
_EXPCAST_OFFSET = CODES_PER_BINADE * (TOP_LOG2 + 7.0) + BETA


def magic_bits(config):
    """The bits that a score accumulator starts from."""
    return MAGIC_BITS + config.tuning.shift


def magic(config):
    """`magic_bits` as the number that they spell."""
    return MAGIC + config.tuning.shift


def fragment_view(accumulator, columns):
    """A wgmma accumulator as [b, r, i]: row lane // 4 + 8 r, column 8 i + 2 (lane % 4) + b."""
    return cute.make_tensor(accumulator.iterator, cute.make_layout((2, 2, columns // 8), stride=(1, 2, 4)))


#: 2^f = (_POLY[0] f + _POLY[1]) f + _POLY[2] for |f| <= 1/2 within 0.173 %, a twentieth of half a step of E4M3.
_POLY = (0.238427, 0.703445, 1.000443)
#: `_exponential` takes exponents of -_POLY_RANGE / 2 .. _POLY_RANGE / 2 and clamps those below.
_POLY_RANGE = 64.0
#: Adding it rounds to an integer and leaves that in the lowest bits.
_ROUND = 12582912.0


def block_maximum(scores, r, half, magic):
    """Largest of this thread's scores in row `r` and key block `half` of `score_halves`, as the fp32 score.

    Integers compare like the floats they spell here, and max.s32 in threes is one VIMNMX3: 36 instructions, not 68.
    """
    values = [scores[half][b, r, i] for i in range(BLOCK // 8) for b in range(2)]
    while len(values) > 1:
        thirds = []
        for i in range(0, len(values), 3):
            largest = values[i]
            for other in values[i + 1 : i + 3]:
                largest = max_s32(largest, other)
            thirds.append(largest)
        values = thirds
    return as_float(values[0]) - magic


def score_halves(accumulator):
    """A 64 x 256 score accumulator as the `fragment_view`s of its two key blocks."""
    halves = [cute.make_tensor(accumulator.iterator + h * (BLOCK // 2), accumulator.layout) for h in range(2)]
    return [fragment_view(half, BLOCK) for half in halves]


def quad_maximum(x):
    """Maximum over the four lanes that share an accumulator row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 2))


def quad_sum(x):
    """Sum over the four lanes that share an accumulator row."""
    x = x + cute.arch.shuffle_sync_bfly(x, 1)
    return x + cute.arch.shuffle_sync_bfly(x, 2)


def _exponential(score, a, b):
    """2^(a score + b) without the special function unit: six instructions on the FMA pipe and one shift-and-add."""
    z = fma_saturate(score, a * (1.0 / _POLY_RANGE), b * (1.0 / _POLY_RANGE) + 0.5)
    n = z * _POLY_RANGE + (_ROUND - _POLY_RANGE / 2)
    f = z * _POLY_RANGE - (n - (_ROUND - _POLY_RANGE / 2))
    return scale_by_power((f * _POLY[0] + _POLY[1]) * f + _POLY[2], n)


def _after(b, result, zero):
    """`b`, but not before `result` is there: keeps the compiler from putting all exponentials before all packing.

    result: a finite Float32, or a word of P. zero: 0.0 that the compiler does not know.
    """
    if result.dtype is Float32:
        return result * zero + b
    return b + as_float(result & Uint32(as_int(zero)))


class TileSoftmax:
    """Probabilities of one tile from its scores and their maxima, a row and key block at a time.

    scores: `score_halves`, Int32 on the start value `magic_bits`. tops(row, block): `block_maximum`. maximum: running
    row maxima (2), log2 units, updated. row_scale (2) and key_scale (2 blocks): their product turns a score into log2
    units. addend [row][block]: log2 units, or None. zero: 0.0 that the compiler does not know.
    Afterwards `rescale` [row] has the factors alpha, and, of exp2, `sums` [row][block] this thread's part of the row
    sums of the unrounded P and `last` [row][block] its last unrounded P (ExpCast's sums are those of its codes, which
    the ones rows of V^T give).
    """

    def __init__(self, config, scores, tops, maximum, row_scale, key_scale, addend, zero):
        self.config, self.scores, self.tops, self.maximum = config, scores, tops, maximum
        self.row_scale, self.key_scale, self.addend, self.zero = row_scale, key_scale, addend, zero
        self.rescale, self.new, self.scale = {}, {}, {}
        self.sums = [[Float32(0.0), Float32(0.0)] for _ in range(2)]
        self.last = [[Float32(0.0), Float32(0.0)] for _ in range(2)]
        self.done = []

    def start_row(self, r):
        """The new maximum of row `r`, and its rescale factor."""
        scale = [self.row_scale[r] * self.key_scale[0], self.row_scale[r] * self.key_scale[1]]
        largest = [self.tops(r, h) * scale[h] for h in range(2)]
        if self.addend is not None:
            largest = [largest[h] + self.addend[r][h] for h in range(2)]
        new = cute.arch.fmax(self.maximum[r], quad_maximum(cute.arch.fmax(largest[0], largest[1])))
        self.rescale[r] = cute.math.exp2(self.maximum[r] - new, fastmath=True)
        self.maximum[r] = new
        self.new[r], self.scale[r] = new, scale

    def pack(self, r, h, p_words, late=None):
        """The P bytes of row `r` and key block `h` into `p_words`. `late`: a zero that they have to wait for."""
        if r not in self.new:
            self.start_row(r)
        config, sums = self.config, self.sums[r]
        chunk, poly, groups = config.tuning.chunk, config.tuning.poly, BLOCK // 16
        for i in range(groups * h, groups * (h + 1)):
            offset = self.new[r] if self.addend is None else self.new[r] - self.addend[r][h]
            if config.probability == "expcast_wide":
                a = self.scale[r][h] * CODES_PER_BINADE
                b = _EXPCAST_OFFSET - CODES_PER_BINADE * offset
            else:
                a = self.scale[r][h]
                b = TOP_LOG2 - offset
            b = b - (magic(config) + _GUARD) * a
            if late is not None:
                b = b + late
            if chunk and i % chunk == 0 and len(self.done) >= 2:
                self.begin = _after(b, self.done[-2], self.zero)
            if chunk and len(self.done) >= 2:
                b = self.begin
            x = [as_float(self.scores[h][c, r, (2 * i + d) % (BLOCK // 8)]) for d in range(2) for c in range(2)]
            word = (i // 2) * 4 + (i % 2) * 2 + r
            if config.probability == "expcast_wide":
                p_words[word] = pack_u8([score * a + b for score in x])
            else:
                if (i * poly) // 16 != ((i + 1) * poly) // 16:
                    p = [_exponential(score, a, b) for score in x]
                else:
                    p = [cute.math.exp2(score * a + b, fastmath=True) for score in x]
                sums[h] = sums[h] + ((p[0] + p[1]) + (p[2] + p[3]))
                self.last[r][h] = p[3]
                p_words[word] = pack_e4m3(p)
            if chunk and (i + 1) % chunk == 0:
                self.done.append(p_words[word] if config.probability == "expcast_wide" else sums[h])
