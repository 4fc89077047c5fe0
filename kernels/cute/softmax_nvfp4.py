"""The online softmax of one 16 x 128 score tile of a warp, and its two-level NVFP4 probabilities.

Every score is exponentiated once, straight into E2M1 units of its group's rounded scale: the division by the scale and
the fixed factor are the addend of the score's FMA.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from .ptx_sm120 import log2, pack_e2m1, round_e4m3

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


class ScaleExchange:
    """How a lane gathers the scale word of its row from the two lane pairs of its quad, which own every other group.

    Quad lanes 0 and 2 feed the scales of row g to the MMA and lanes 1 and 3 those of row g + 8.
    """

    def __init__(self, lane):
        self.upper = (lane & 1) != 0
        first = (lane & 2) == 0
        # Bytes 0, 1, 4, 5 or 2, 3, 6, 7 of (mine, other), the first pair's in front.
        self.low = cutlass.select_(first, Uint32(0x5140), Uint32(0x1504))
        self.high = cutlass.select_(first, Uint32(0x7362), Uint32(0x3726))

    def words(self, rows):
        """Scale words of the two k64 MMAs. rows: this pair's four scale bytes for rows g and g + 8."""
        mine = cutlass.select_(self.upper, rows[1], rows[0])
        other = cute.arch.shuffle_sync_bfly(mine, 2)
        return [Uint32(cute.arch.prmt(mine, other, selector)) for selector in (self.low, self.high)]


def softmax_tile(scores, maximum, scale, addend, exchange):
    """Row maxima of one tile, then its P.

    scores: 64 Float32, [16 n8 tiles][row half r][2]. maximum: running row maxima (2), log2 units, updated. scale: turns
    a score into log2 units. addend: log2 units for each of the two rows, or None. exchange: a ScaleExchange.
    Returns P as A fragments of two k64 MMAs (each 4 Uint32), their scale words (2 Uint32), and the rescale factors of
    the two rows.
    """
    words, scales, rescale = [], [], []
    for r in range(2):
        values = [[scores[4 * (4 * h + i) + 2 * r + b] for i in range(4) for b in range(2)] for h in range(_GROUPS)]
        largest = [_maximum(group) for group in values]
        largest = [cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 1)) for x in largest]
        row = _maximum(largest)
        row = cute.arch.fmax(row, cute.arch.shuffle_sync_bfly(row, 2)) * scale
        if addend is not None:
            row = row + addend[r]
        new = cute.arch.fmax(maximum[r], row)
        rescale.append(cute.math.exp2(maximum[r] - new, fastmath=True))
        maximum[r] = new
        offset = -new if addend is None else addend[r] - new
        word, rounded = round_e4m3(
            [cute.math.exp2(x * scale + (offset + _SCALE_TOP_LOG2), fastmath=True) for x in largest]
        )
        scales.append(word)
        # A scale that underflows to 0 makes its elements infinite; they saturate to 6, and 6 * 0 is 0.
        bias = [(offset + _TOP_LOG2) - log2(x) for x in rounded]
        words.append(
            [pack_e2m1([cute.math.exp2(x * scale + bias[h], fastmath=True) for x in values[h]]) for h in range(_GROUPS)]
        )
    fragments = [[words[r][2 * k + half] for half in range(2) for r in range(2)] for k in range(2)]
    return fragments, exchange.words(scales), rescale
