"""The online softmax of one 128 x 128 score tile on tcgen05: a thread has a whole row, so nothing is shuffled."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from . import layouts as lo
from . import tmem
from .config import BETA, TOP_LOG2
from .ptx import as_float, as_int, max_s32, pack_e4m3, pack_u8
from .softmax import CODES_PER_BINADE, MAGIC, MAGIC_BITS

#: y = 8 (u + TOP_LOG2 + 7) + BETA, `spec.expcast`.
_EXPCAST_OFFSET = CODES_PER_BINADE * (TOP_LOG2 + 7.0) + BETA
#: What a row maximum m is moved by, relative to itself: more than the roundings of m and of y together, so that the
#: maximum never rounds up to code 127, which is NaN, however large the scores are.
_GUARD = 2.0**-22
#: See `softmax`: two integer scores keep a row maximum from rounding up to code 127 however MAGIC is rounded.
_MAGIC_GUARDED = MAGIC + 2.0
#: One pair of exponentials in so many is a polynomial on B200: then the special functions and the issue slots have
#: about the same to do (benchmarks/NOTES.md). The one of least relative error for 2^f, |f| <= 1/2.
_POLYNOMIAL_EVERY = 5
_POLYNOMIAL = (0.999999285, 0.693121791, 0.240247443, 0.0559178591, 0.00957010221)
#: Columns of one load from tensor memory, and of one store: the first scores are worked on while the others come, the
#: first P leave while the others are made.
_LOAD, _STORE = 32, 8


def maximum_of(values):
    """Largest of the scores, as Float32. In threes: FMNMX3, or VIMNMX3 for integers."""
    integers = isinstance(values[0], Int32)
    while len(values) > 1:
        thirds = []
        for i in range(0, len(values), 3):
            group = values[i : i + 3]
            if integers:
                largest = group[0]
                for other in group[1:]:
                    largest = max_s32(largest, other)
            else:
                largest = maximum3(*group) if len(group) == 3 else group[0]
                if len(group) == 2:
                    largest = cute.arch.fmax(*group)
            thirds.append(largest)
        values = thirds
    return values[0].to(Float32) if integers else values[0]


def maximum3(a, b, c):
    """Maximum of three Float32."""
    return cute.arch.inline_ptx(
        "max.f32 {$w0},{$r0},{$r1},{$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def float_score(score, one):
    """An integer score as the fp32 MAGIC + score.

    By IMAD, which the pipe of the FMAs does: conversions and additions would go to that of the row maximum, which then
    has more to do than the tensor cores. `one`: 1, which the compiler must not know.
    """
    return cute.arch.inline_ptx(
        f"mad.lo.s32 {{$w0}},{{$r0}},{{$r1}},{MAGIC_BITS};", write_only_types=[Float32], read_only_args=[score, one]
    )


def fma(a, b, c):
    """a b + c, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0},{$r0},{$r1},{$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def load_scores(config, address):
    """This thread's 128 scores, Float32 or Int32."""
    dtype = Float32 if config.scores == "fp8" else Int32
    scores = [x for i in range(0, lo.BLOCK, _LOAD) for x in tmem.load(address + i, _LOAD, dtype)]
    tmem.wait_load()
    return scores


def new_maximum(scores, scale, bias, old):
    """The running row maximum after this tile, in the units of `scale` times a score. bias: in these units, or None."""
    largest = maximum_of(scores) * scale
    return cute.arch.fmax(old, largest if bias is None else largest + bias)


def exp2_polynomial(x):
    """2^x of two Float32 on the FMAs' pipe, within 3e-6 of it; 2^-100 for all below."""
    x = tuple(cute.arch.fmax(t, Float32(-100.0)) for t in x)
    magic, back = (Float32(MAGIC),) * 2, (Float32(-MAGIC),) * 2
    whole = cute.arch.add_packed_f32x2(x, magic)  # to nearest: the integer is in the lowest bits
    rounded = cute.arch.add_packed_f32x2(whole, back)
    fraction = cute.arch.fma_packed_f32x2(rounded, (Float32(-1.0),) * 2, x)
    y = (Float32(_POLYNOMIAL[4]),) * 2
    for c in reversed(_POLYNOMIAL[:4]):
        y = cute.arch.fma_packed_f32x2(y, fraction, (Float32(c),) * 2)
    return tuple(as_float((as_int(n) << 23) + as_int(m)) for n, m in zip(whole, y, strict=True))


def make_probabilities(config, address, scores, scale, bias, maximum, polynomial):
    """P of one row into the 32 columns from `address`, in the order of V^T's slots.

    Returns its sum before rounding and its last P, both None where the ones rows of V^T give the sums. scale, bias,
    maximum: codes (ExpCast) or log2 units (exp2) of a score, what is added to the row's scores (or None), and the row
    maximum. polynomial: whether some exponentials of exp2 are polynomials.
    """
    expcast = config.probability == "expcast_wide"
    offset = (_EXPCAST_OFFSET if expcast else TOP_LOG2) - maximum
    if bias is not None:
        offset = offset + bias
    if expcast:
        for x in (maximum,) if bias is None else (maximum, bias):
            offset = offset - Float32(_GUARD) * cute.arch.fmax(x, -x)
    if config.scores == "int8":
        offset = fma(scale, Float32(-_MAGIC_GUARDED), offset)
        one = Int32(cute.arch.grid_dim()[2])  # the grid is flat
    a, b = (scale, scale), (offset, offset)
    words, sums, last = [], [None, None], None
    for i in range(0, lo.BLOCK, 16):
        pairs = []
        for c in range(0, 16, 2):
            pair = scores[i + c : i + c + 2]
            if config.scores == "int8":
                pair = tuple(float_score(x, one) for x in pair)
            y = cute.arch.fma_packed_f32x2(pair, a, b)
            if not expcast:
                by_polynomial = polynomial and (i + c) // 2 % _POLYNOMIAL_EVERY == 0
                y = exp2_polynomial(y) if by_polynomial else tuple(cute.math.exp2(x, fastmath=True) for x in y)
            pairs.append(y)
        if config.exact_sums:
            for n, pair in enumerate(pairs):
                sums[n % 2] = pair if sums[n % 2] is None else cute.arch.add_packed_f32x2(sums[n % 2], pair)
            last = pairs[-1][1]
        for c in range(4):
            quad = [*pairs[c], *pairs[c + 4]]
            words.append(pack_u8(quad) if expcast else pack_e4m3(quad))
        if len(words) == _STORE:
            tmem.store(address + (i // 4 + 4 - _STORE), words)
            words = []
    total = None
    if config.exact_sums:
        low, high = cute.arch.add_packed_f32x2(*sums)
        total = low + high
    return total, last


def score_unit(config):
    """Units of the softmax in one log2 unit: codes, or log2 units themselves."""
    return CODES_PER_BINADE if config.probability == "expcast_wide" else 1.0
