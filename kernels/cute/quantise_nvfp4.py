"""NVFP4 in the registers of a warp: groups of 16 under an E4M3 scale and a second level, with 4 or 6 as their top.

A row is held as `rotate` leaves it: quad lane x has its elements 32 i + 8 x + e (i 0..3, e 0..7), so lanes x and x ^ 1
share a group, and eight neighbouring elements are one word of the image. The rule is `spec.formats.nvfp4`'s.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64, Uint32, cute

from . import simt
from .prep_q import TINY

#: The largest value of the two levels, and of E2M1.
TOP, LARGEST = 448.0 * 6.0, 6.0
#: Instead of infinity as the reciprocal of a scale below the smallest normal number: 0 times it stays 0.
_HUGE = 3.4028234663852886e38
#: Two fp32 as E4M3 bytes of one word, and the values that these have.
_SCALES = """{
.reg .b16 a, c, d; .reg .b32 p;
cvt.rn.satfinite.e4m3x2.f32 a, {$r1}, {$r0}; cvt.rn.f16x2.e4m3x2 p, a; mov.b32 {c, d}, p;
cvt.f32.f16 {$w0}, c; cvt.f32.f16 {$w1}, d; cvt.u32.u16 {$w2}, a;
}"""


def _above(a, b):
    """1 where Float32 a > b, else 0."""
    return simt.ptx("{.reg .pred p; setp.gt.f32 p, {$r0}, {$r1}; selp.s32 {$w0}, 1, 0, p;}", Int32, [a, b])


class SecondLevel:
    """The second-level scale of one head from its largest magnitude, which is of values `normalise` too large.

    stored: the scale of normalised values, that the image keeps. own: that of the values as they are.
    """

    def __init__(self, amax, normalise=1.0):
        stored = simt.divide(amax * normalise, Float32(TOP))
        usable = _above(stored, Float32(TINY))
        self.stored = simt.select(usable, stored, Float32(1.0))
        self.own = simt.select(usable, simt.divide(amax, Float32(TOP)), Float32(1.0))
        #: Factors from the largest magnitude of a group to its scale, with 6 and with 4 as its top.
        self.factors = [simt.divide(Float32(1.0), self.own * top) for top in (LARGEST, 4.0)]


def quantise_row(y, second, adaptive, native):
    """32 Float32 -> four words of eight E2M1 codes, and a word whose byte i is the scale of this lane's eight of 32 i.

    adaptive: Int32, whether a group may put its largest magnitude on 4 (where its squared error is then smaller).
    native: where the E2M1 instructions come from, `ptx_sm120` or `emulated_sm120`.
    """
    words, scales = [], Uint32(0)
    for i in range(4):
        x = y[8 * i : 8 * i + 8]
        amax = Float32(0.0)
        for value in x:
            amax = simt.max_abs(amax, value)
        amax = cute.arch.fmax(amax, simt.shuffle_xor(amax, 1))
        *steps, both = simt.ptx(_SCALES, [Float32, Float32, Uint32], [amax * f for f in second.factors])
        codes, errors = zip(*[_round(x, step, second.own, native) for step in steps], strict=True)
        four = adaptive & _above(errors[0], errors[1])
        words.append(simt.select(four, codes[1], codes[0]))
        scales = scales | (simt.select(four, both >> 8, both & 0xFF) << (8 * i))
    return words, scales


def _round(x, step, second, native):
    """Codes of `x` under the scale step * second, and the group's squared error in units of `second` squared."""
    inverse = cute.arch.fmin(simt.divide(Float32(1.0), step * second), Float32(_HUGE))
    inverse = simt.select(_above(step, Float32(0.0)), inverse, Float32(0.0))
    x = [value * inverse for value in x]
    word = native.pack_signed_e2m1(x)
    error = Float32(0.0)
    for value, rounded in zip(x, native.unpack_e2m1(word), strict=True):
        error = error + (rounded - value) * (rounded - value)
    error = error + simt.shuffle_xor(error, 1)
    return word, error * (step * step)


def store_scales(address, scales, lane):
    """The eight scales of a row at `address` (a multiple of 8): `scales` of its four quad lanes, of `quantise_row`."""
    other = simt.shuffle_xor(scales, 2)
    words = [
        simt.ptx(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {order};", Uint32, [scales, other])
        for order in ("0x5140", "0x7362")
    ]
    simt.effect(
        "{.reg .pred p; setp.eq.s32 p, {$r3}, 0; @p st.global.v2.b32 [{$r0}], {{$r1},{$r2}};}",
        [address, *words, lane % 4],
    )


def add_amax(value, amax, head, slots, thread, warp):
    """Raise amax[head] (fp32, >= 0) to the CTA's largest `value`; slots: 32 bytes of shared memory.

    The order of the atomic operations does not matter: the bits of floats that are not negative are ordered like them.
    """
    value = simt.warp_max(value)
    simt.shared_store(slots + warp * 4, value)  # every lane writes the same value
    cute.arch.sync_threads()
    for n in range(2):
        for other in simt.shared_load16(slots + 16 * n, Float32):
            value = cute.arch.fmax(value, other)
    bits = simt.ptx("mov.b32 {$w0}, {$r0};", Uint32, [value])
    simt.effect(
        "{.reg .pred p; setp.eq.s32 p, {$r2}, 0; @p red.global.max.u32 [{$r0}], {$r1};}",
        [amax.toint() + head.to(Int64) * 4, bits, thread],
    )


def token_of(order, head, length, position):
    """Token (Int32) at a valid `position`: order[head, position] of an int32 [BH, L], or itself without an order."""
    at = order.toint() + (head.to(Int64) * length.to(Int64) + position.to(Int64)) * 4
    return simt.ptx(
        "{.reg .pred p; setp.ne.s64 p, {$r0}, 0; mov.b32 {$w0}, {$r2}; @p ld.global.b32 {$w0}, [{$r1}];}",
        Int32,
        [order.toint(), at, position],
    )
