"""Quantisation of V for the product PV, and of P for it: residuals after V-Smooth, scales, and the restored means."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .expcast import TOP_LOG2, expcast
from .formats import E2M1_MAX, E4M3_MAX, INT8_MAX, amax_scale, e4m3, int8, nvfp4, nvfp4_second_level
from .smoothing import block_means, stored_means, subtract_block_means

#: NVFP4's P is scaled so that a row maximum lands on the largest value that two levels can hold (SageAttention3).
_NVFP4_TOP = E4M3_MAX * E2M1_MAX


@dataclass(frozen=True)
class SmoothedValues:
    """V as PV sees it: quantised residuals in the accumulator's unit, block means in the same unit, output scale.

    residual: [B, H, L, D] fp32. means: [B, H, blocks, D] fp32 holding bf16 values, or None without demeaning.
    output_scale: [B, H, 1, D] fp32, applied once in the epilogue (ones where scales act inside the product).
    """

    residual: Tensor
    means: Tensor | None
    output_scale: Tensor


def quantise_values(
    v: Tensor, kind: str, demean: bool, clip_means: bool, block: int, adaptive_scales: bool = False
) -> SmoothedValues:
    """V-Smooth (paper, section "V-Smooth"): R_j = V'_j - mu_j, quantised; mu_j kept as one 16-bit vector.

    v: [B, H, L, D] fp32, already permuted. 8 bit: E4M3 with one fp32 scale for each batch, head and channel, means
    stored divided by that scale, so that a single epilogue multiply serves both. 4 bit: NVFP4 with groups of 16 along
    tokens, scales inside the product, means unscaled. int8: one scale for each block and channel, means unscaled.
    """
    length = v.shape[-2]
    ones = torch.ones_like(v[..., :1, :])
    means = block_means(v, block, clip=clip_means) if demean else None
    residual = v if means is None else subtract_block_means(v, means, block)
    if kind == "fp8":
        scale = amax_scale(residual.abs().amax(-2, keepdim=True), E4M3_MAX)
        if means is not None:
            means = stored_means(means / scale)
            # Against the mean as stored: its 16-bit rounding then costs nothing, the residual carries it.
            residual = subtract_block_means(v, means * scale, block)
        return SmoothedValues(e4m3(residual / scale), means, scale)
    if means is not None:
        means = stored_means(means)
        residual = subtract_block_means(v, means, block)
    if kind == "nvfp4":
        return SmoothedValues(_nvfp4_along_tokens(residual, adaptive_scales), means, ones)
    if kind == "int8":
        padded = torch.nn.functional.pad(residual, (0, 0, 0, -length % block)).unflatten(-2, (-1, block))
        scale = amax_scale(padded.abs().amax(-2, keepdim=True), INT8_MAX)
        return SmoothedValues((int8(padded, scale) * scale).flatten(-3, -2)[..., :length, :], means, ones)
    return SmoothedValues(residual, means, ones)


def _nvfp4_along_tokens(residual: Tensor, adaptive: bool) -> Tensor:
    codes, scale = nvfp4(residual.transpose(-2, -1), nvfp4_second_level(residual), adaptive)
    return (codes * scale).transpose(-2, -1)


def probabilities(u: Tensor, values: str, probability: str) -> tuple[Tensor, Tensor]:
    """P of one tile as the tensor core sees it, and the row sums that go with it (paper, equation of l and r).

    u: [..., rows, keys] fp32, log2 units below the running row maximum. Returns P [..., rows, keys] in units where the
    row maximum is 1, and r [..., rows, 1].
    ExpCast, NVFP4 and INT8: r sums the **same rounded** P that multiplies V. exp2 with E4M3: r sums the unrounded P.
    Demeaning needs r to be the sum that l is made of; mixing the two costs 80 times the error once V has a mean.
    """
    if probability != "exp2":
        p = expcast(u, probability) * 2.0 ** -TOP_LOG2[probability]
        return p, p.sum(-1, keepdim=True)
    p = torch.exp2(u)
    if values == "fp8":
        return e4m3(p * E4M3_MAX) / E4M3_MAX, p.sum(-1, keepdim=True)
    if values == "nvfp4":
        codes, scale = nvfp4(p * _NVFP4_TOP, 1.0)
        p = codes * scale / _NVFP4_TOP
    elif values == "int8":
        scale = amax_scale(p.amax(-1, keepdim=True), INT8_MAX)
        p = int8(p, scale) * scale
    return p, p.sum(-1, keepdim=True)
