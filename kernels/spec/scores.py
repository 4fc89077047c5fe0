"""Quantisation of Q and K for the product QK^T: channel-mean smoothing of K, Hadamard rotation, group scales."""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import E4M3_MAX, INT8_MAX, amax_scale, e4m3, int8, nvfp4, nvfp4_second_level

#: How rows are gathered into one scale, as (rows per tile, split of the tile, dims of the split that share a scale).
#: "per_thread" follows the fragments of mma.m16n8k32: a thread of a warp owns query rows i, i+8, i+16, i+24 of 32 and
#: the key columns 2g, 2g+1 of every 8 in a 64-key block, so each thread needs one scale only (SageAttention2, section
#: 3.2). "per_warp" is 16 query rows and 128 keys.
_QUERY_GROUPS = {"per_thread": (32, (4, 8), (0,)), "per_warp": (16, (16,), (0,))}
_KEY_GROUPS = {"per_thread": (64, (8, 4, 2), (0, 2)), "per_warp": (128, (128,), (0,))}


def hadamard(x: Tensor) -> Tensor:
    """Rotate the last dimension (a power of two) of fp32 `x` by the orthonormal Hadamard matrix (Sylvester order).

    Applied to Q and K alike it leaves QK^T unchanged and spreads an outlier channel over all channels.
    """
    d = x.shape[-1]
    if d & (d - 1):
        raise ValueError(f"The Hadamard rotation needs a head dimension that is a power of two, not {d}.")
    y = x
    step = 1
    while step < d:
        a, b = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return y * d**-0.5


def smooth_keys(k: Tensor) -> Tensor:
    """Subtract K's mean over tokens. It adds one constant to every score of a row, which softmax cancels.

    k [B, H, L, D] fp32 -> the same shape. The mean runs over all L tokens (L counts valid tokens only).
    """
    return k - k.mean(dim=-2, keepdim=True)


def _group_scale(x: Tensor, groups: tuple[int, tuple[int, ...], tuple[int, ...]], largest: float) -> Tensor:
    tile, split, shared = groups
    length = x.shape[-2]
    magnitude = torch.nn.functional.pad(x.abs().amax(-1), (0, -length % tile)).unflatten(-1, (-1, *split))
    offset = magnitude.dim() - len(split)
    amax = magnitude.amax([offset + i for i in shared], keepdim=True).expand_as(magnitude)
    return amax_scale(amax.flatten(offset - 1)[..., :length, None], largest)


def quantise_scores_operand(
    x: Tensor, kind: str, score_groups: str, query: bool, adaptive_scales: bool = False
) -> Tensor:
    """Quantise Q (`query`) or K and return the fp32 values that the tensor core multiplies, scales applied.

    x: [B, H, L, D] fp32, already smoothed and rotated. kind, adaptive_scales: of the Plan. Same shape out.
    """
    if kind == "exact":
        return x
    if kind == "nvfp4":
        codes, scale = nvfp4(x, nvfp4_second_level(x), adaptive_scales)
        return codes * scale
    largest = INT8_MAX if kind == "int8" else E4M3_MAX
    scale = _group_scale(x, (_QUERY_GROUPS if query else _KEY_GROUPS)[score_groups], largest)
    codes = int8(x, scale) if kind == "int8" else e4m3(x / scale)
    return codes * scale
