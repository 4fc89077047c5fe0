"""The Hadamard rotation of 128 channels inside the registers of one warp, without a shuffle.

Sixteen rows of a warp are held as the quad layout of an MMA: lane 4 g + x keeps rows g and g + 8, and of each row the
channels 32 i + 8 x + e (i 0..3, e 0..7), that is four 16-byte loads a row. Channel bits 0, 1 (e % 4) and 3, 4 (x) are
rotated by the tensor core: with the right order of its k index an m16n8k16 product takes those four channels of a lane
as its A fragment, its B fragment is +-1, and the result comes back in the very same place. Bits 2, 5 and 6 stay inside
the lane: three butterflies. Products with +-1 are exact and sums are fp32, so this is the fp32 rotation of 16-bit data.
The result is not normalised: callers fold 128 ** -0.5 into their scale.
"""

from __future__ import annotations

from cutlass import Float32, Uint32

from .simt import mma16816, ptx, select, shuffle_xor

#: Of the orthonormal rotation.
NORMALISE = 128**-0.5


def signs(lane, fp16):
    """The B fragment of the rotation: one word of two +-1, and the same word negated, for this lane."""
    one = 0x3C003C00 if fp16 else 0x3F803F80
    g, x = lane // 4, lane % 4
    pair = x & (g // 2)
    first = (pair ^ (pair >> 1)) & 1
    second = first ^ (g & 1)
    word = (first << 15) | (second << 31) | one
    plain = ptx("mov.b32 {$w0}, {$r0};", Uint32, [word])
    return plain, plain ^ Uint32(0x80008000)


def rotate_partly(value, channel):
    """The part of the rotation that the tensor core does, of a vector with channel c in thread c of 128."""
    for bit in (1, 2, 8, 16):
        other = shuffle_xor(value, bit)
        value = select(channel & bit, other - value, value + other)
    return value


def rotate(low, high, b, fp16, centre=None):
    """Rotate rows g (`low`) and g + 8 (`high`), each a list of 16 words; `b` from `signs`.

    centre: None, or a vector to subtract from both rows before the rotation: a function that loads entries 8 i to
    8 i + 7 of its negated `rotate_partly`, in the order of the result. They are the addend of the product.
    Returns two lists of 32 fp32: entry 8 i + e is channel 32 i + 8 x + e of the rotated row, times 128 ** 0.5.
    """
    plain, negated = b
    out = [[None] * 32, [None] * 32]
    for i in range(4):
        addend = [Float32(0.0)] * 8 if centre is None else centre(i)
        for half in range(2):
            n = 4 * i + 2 * half
            a = [low[n], high[n], low[n + 1], high[n + 1]]
            for tile, second in ((0, plain), (1, negated)):
                at = 8 * i + 4 * half + 2 * tile
                d = mma16816(a, [plain, second], addend[at % 8 : at % 8 + 2] * 2, fp16)
                out[0][at], out[0][at + 1], out[1][at], out[1][at + 1] = d
    for row in out:
        for bit in (4, 8, 16):
            for n in range(32):
                if not n & bit:
                    row[n], row[n | bit] = row[n] + row[n | bit], row[n] - row[n | bit]
    return out
