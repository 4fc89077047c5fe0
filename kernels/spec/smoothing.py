"""V-Smooth's block means (paper, section "V-Smooth"): one mean for each 128-token block, over its valid tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def block_means(x: Tensor, block: int = 128, clip: bool = False) -> Tensor:
    """Means of consecutive `block`-token blocks of `x` [B, H, L, D] -> fp32 [B, H, ceil(L / block), D]."""
    x = x.to(torch.float32)
    length = x.shape[-2]
    weight = torch.ones_like(x[..., :1])
    if clip:
        norm = x.norm(dim=-1, keepdim=True)
        median = norm.median(dim=-2, keepdim=True).values
        weight = torch.where(norm > 2 * median, (2 * median / norm) ** 2, 1.0)
    pad = (0, 0, 0, -length % block)
    total = torch.nn.functional.pad(x * weight, pad).unflatten(-2, (-1, block)).sum(-2)
    count = torch.nn.functional.pad(weight, pad).unflatten(-2, (-1, block)).sum(-2)
    return torch.where(count > 0, total / count, 0.0)


def expand_blocks(means: Tensor, block: int, length: int) -> Tensor:
    """Repeat each block's row of `means` [B, H, blocks, D] for its tokens -> [B, H, length, D]."""
    return means.repeat_interleave(block, dim=-2)[..., :length, :]
