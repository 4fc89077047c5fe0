"""ExpCast-FP8: the E4M3 probability byte straight from a log-domain score, with one multiply-add and no exponential.

Notation of the paper: u = (s - m) log2(e) <= 0, the score below its row maximum in powers of two. E4M3 has 8 codes a
binade, so 8 u plus a constant, rounded, **is** the byte: a straight chord through each binade of 2^u. The constant
beta = -0.35 centres the chord's error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .formats import e4m3_decode

BETA = -0.35
CODES_PER_BINADE = 8
#: The smallest normal code; below it E4M3 is linear and the chord no longer fits.
FIRST_NORMAL = 8

#: log2 of the value that a row maximum gets, for each form: 256 (code 120) as published, 448 (code 126) widened.
TOP_LOG2 = {"expcast": 8.0, "expcast_wide": math.log2(448.0), "expcast_chord": math.log2(448.0)}
TOP_CODE = {"expcast": 120, "expcast_wide": 126, "expcast_chord": 126}


def expcast_codes(u: Tensor, form: str = "expcast") -> Tensor:
    """The probability byte (uint8) of each `u` (fp32, any shape, log2 units, <= 0; -inf is a masked key).

    form "expcast" [paper]: c(u) = clip[0, 120](RNE(8 (u + 8) + 56 + beta)), codes below 8 become 0.
    form "expcast_wide": the same chord with the row maximum at code 126 (448), and codes 1..7 kept.
    form "expcast_chord": as wide, and the codes below 8 follow max(y, y/2 + 4), the chord of the last subnormal
    binade, since a subnormal code is worth 2^-9 and not an eighth of a binade.
    NaN gives 0, like -inf, so that a broken score loses its weight instead of its row.
    """
    y = CODES_PER_BINADE * (u.to(torch.float32) + TOP_LOG2[form] + 7) + BETA
    if form == "expcast_chord":
        y = torch.maximum(y, y / 2 + FIRST_NORMAL / 2)
    codes = torch.round(torch.nan_to_num(y, nan=0.0, neginf=0.0, posinf=TOP_CODE[form])).clamp(0, TOP_CODE[form])
    if form == "expcast":
        codes = torch.where(codes < FIRST_NORMAL, 0.0, codes)
    return codes.to(torch.uint8)


def expcast(u: Tensor, form: str = "expcast") -> Tensor:
    """Decoded ExpCast probabilities (fp32, in (0, 256] or (0, 448]) of `u` (any shape, log2 units, <= 0)."""
    return e4m3_decode(expcast_codes(u, form))
