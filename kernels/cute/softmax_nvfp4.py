"""The online softmax of one 16 x 128 score tile of a warp, and its two-level NVFP4 probabilities.

Every score is exponentiated once, straight into E2M1 units of its group's rounded scale: the division by the scale and
the fixed factor are the addend of the score's FMA.

A lane has scores of two rows, g and g + 8, and shares each group of 16 keys with its neighbour. What is done once for
a row or a group, even lanes do for row g and odd ones for g + 8, and tell each other. Both doing both took 20 more
instructions a tile, and 82 instead of 73 of the special function unit.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from .ptx_sm120 import log2, round_e4m3

#: The largest group scale and E2M1's largest value; a row maximum is their product (`spec.values`).
_SCALE_TOP_LOG2 = math.log2(448.0)
_TOP_LOG2 = math.log2(448.0 * 6.0)
#: Groups of 16 keys that a pair of lanes shares: 8 keys each, for two rows.
_GROUPS = 4


def _maximum(values):
    """Largest of 4 or 8 Float32, as a tree."""
    while len(values) > 1:
        values = [cute.arch.fmax(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


class Quad:
    """What a lane of a quad does for the others: its own row is g in even lanes and g + 8 in odd ones."""

    def __init__(self, lane):
        self.upper = (lane & 1) != 0
        first = (lane & 2) == 0
        # Bytes 0, 1, 4, 5 or 2, 3, 6, 7 of (mine, other), the first pair's in front.
        self.low = cutlass.select_(first, Uint32(0x5140), Uint32(0x1504))
        self.high = cutlass.select_(first, Uint32(0x7362), Uint32(0x3726))

    def own(self, rows):
        """This lane's and its neighbour's value for the own row. rows: this lane's values for rows g and g + 8."""
        mine = cutlass.select_(self.upper, rows[1], rows[0])
        other = cutlass.select_(self.upper, rows[0], rows[1])
        return mine, cute.arch.shuffle_sync_bfly(other, 1)

    def both(self, mine):
        """The values of rows g and g + 8, of which the neighbour has one."""
        other = cute.arch.shuffle_sync_bfly(mine, 1)
        return [cutlass.select_(self.upper, other, mine), cutlass.select_(self.upper, mine, other)]

    def scale_words(self, mine):
        """Scale words of the two k64 MMAs, which take those of row g from lanes 0 and 2 and of g + 8 from 1 and 3.

        mine: the scale bytes of the pair's four groups, every other one of the row's.
        """
        other = cute.arch.shuffle_sync_bfly(mine, 2)
        return [Uint32(cute.arch.prmt(mine, other, selector)) for selector in (self.low, self.high)]


def softmax_tile(scores, maximum, scale, addend, quad, pack_e2m1):
    """Row maxima of one tile, then its P.

    scores: 64 Float32, [16 n8 tiles][row half r][2]. maximum: running maximum (1) of the own row, log2 units, updated.
    scale: turns a score into log2 units. addend: log2 units for the own row, or None. quad: a Quad. pack_e2m1: rounds
    eight Float32 to a word of E2M1 codes.
    Returns P as A fragments of two k64 MMAs (each 4 Uint32), their scale words (2 Uint32), and the rescale factor of
    the own row.
    """
    values = [
        [[scores[4 * (4 * h + i) + 2 * r + b] for i in range(4) for b in range(2)] for r in range(2)]
        for h in range(_GROUPS)
    ]
    largest = [cute.arch.fmax(*quad.own([_maximum(row) for row in group])) for group in values]
    row = _maximum(largest)
    row = cute.arch.fmax(row, cute.arch.shuffle_sync_bfly(row, 2)) * scale
    if addend is not None:
        row = row + addend
    new = cute.arch.fmax(maximum[0], row)
    rescale = cute.math.exp2(maximum[0] - new, fastmath=True)
    maximum[0] = new
    offset = -new if addend is None else addend - new
    word, rounded = round_e4m3([cute.math.exp2(x * scale + (offset + _SCALE_TOP_LOG2), fastmath=True) for x in largest])
    # A scale that underflows to 0 makes its elements infinite; they saturate to 6, and 6 * 0 is 0.
    words = [[], []]
    for h in range(_GROUPS):
        bias = quad.both((offset + _TOP_LOG2) - log2(rounded[h]))
        for r in range(2):
            words[r].append(pack_e2m1([cute.math.exp2(x * scale + bias[r], fastmath=True) for x in values[h][r]]))
    fragments = [[words[r][2 * k + half] for half in range(2) for r in range(2)] for k in range(2)]
    return fragments, quad.scale_words(word), rescale
