"""Grouping of value tokens by k-means."""

from __future__ import annotations

import torch
from torch import Tensor


def auto_groups(length: int) -> int:
    """Clusters for `length` tokens: a power of two near length / 256, within 16..256."""
    return max(16, min(256, 1 << max(0, round(torch.log2(torch.tensor(max(length, 1) / 256)).item()))))


def permutation(labels: Tensor) -> Tensor:
    """Stable argsort of `labels` [B, H, L] along tokens -> int64 [B, H, L]."""
    return torch.argsort(labels, dim=-1, stable=True)


def group(v: Tensor, groups: int = 0, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """k-means labels uint8 [B, H, L] and centroids fp32 [B, H, groups, D] of the rows of `v` [B, H, L, D]."""
    v = v.to(torch.float32)
    k = groups or auto_groups(v.shape[-2])
    index = torch.linspace(0, v.shape[-2] - 1, k, device=v.device).long()
    c = v[..., index, :] if previous is None else previous
    for _ in range(3 if previous is None else 1):
        label = (v @ c.transpose(-2, -1) - (c * c).sum(-1)[..., None, :] / 2).argmax(-1)
        one_hot = torch.nn.functional.one_hot(label, k).to(v.dtype)
        n = one_hot.sum(-2)[..., None]
        c = torch.where(n > 0, one_hot.transpose(-2, -1) @ v / n.clamp_min(1), c)
    return label.to(torch.uint8), c
