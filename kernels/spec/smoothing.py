"""Block means, the smoothing of V-Smooth: mu_j of each 128-token block and the residual R_j = V'_j - mu_j.

Paper, section "V-Smooth": the residual is what gets quantised, and the mean, one 16-bit vector for a block, comes
back inside the online softmax as a rank-one update r mu^T. The same means serve K (`Plan.key_means`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import BLOCK
from .grouping import permutation

#: A token longer than this many medians of its block counts less in a clipped mean.
CLIP_MEDIANS = 2.0


def block_means(x: Tensor, block: int = BLOCK, clip: bool = False) -> Tensor:
    """mu: the mean of each `block` consecutive tokens of `x`, fp32.

    x: [B, H, L, D], floating, any strides, already permuted. Only its L tokens count: a ragged last block is the mean
    of the tokens it has. clip: norm-clipped weights w = min(1, (2 median / |x|)^2), with the median of the norms in
    the token's own block. A single huge token then cannot drag its block's mean along, whereas a block that k-means
    filled with long tokens keeps its true mean.
    Returns [B, H, ceil(L / block), D]. Not rounded: `stored_means` does that, once the caller has applied its scale.
    """
    length = x.shape[-2]
    whole = length - length % block
    parts = [_means(x[..., :whole, :].unflatten(-2, (-1, block)), clip)] if whole else []
    if whole < length:
        parts.append(_means(x[..., None, whole:, :], clip))
    return torch.cat(parts, dim=-2)


def _means(blocks: Tensor, clip: bool) -> Tensor:
    """[.., blocks, tokens, D] -> fp32 [.., blocks, D]."""
    blocks = blocks.to(torch.float32)
    if not clip:
        return blocks.mean(-2)
    # The norm in units of the largest element: the squares of fp32 data near 1e30 would overflow.
    largest = blocks.abs().amax(-1, keepdim=True)
    norm = largest * (blocks / torch.where(largest > 0, largest, 1.0)).norm(dim=-1, keepdim=True)
    limit = CLIP_MEDIANS * norm.median(dim=-2, keepdim=True).values
    weight = torch.where(norm > limit, limit / norm, 1.0).square()
    return (blocks * weight).sum(-2) / weight.sum(-2)


def stored_means(means: Tensor) -> Tensor:
    """`means` as the kernel keeps them: rounded to bf16, returned as fp32 of the same shape.

    bf16 and not fp16: a mean of 16-bit values always fits, whatever their range.
    """
    return means.to(torch.bfloat16).to(torch.float32)


def expand_blocks(means: Tensor, block: int, length: int) -> Tensor:
    """Repeat the row of each block of `means` [B, H, blocks, D] for its tokens: [B, H, length, D]."""
    return means.repeat_interleave(block, dim=-2)[..., :length, :]


def subtract_block_means(x: Tensor, means: Tensor, block: int = BLOCK) -> Tensor:
    """R = x - mu of each token's block, fp32 [B, H, L, D].

    x: [B, H, L, D], floating. means: [B, H, ceil(L / block), D], in the form in which they will be added back, so
    that their rounding cancels. Raises ValueError when the number of blocks does not fit.
    """
    length = x.shape[-2]
    if means.shape[-2] != -(-length // block):
        raise ValueError(
            f"{length} tokens make {-(-length // block)} blocks of {block}, but there are {means.shape[-2]} means."
        )
    return x.to(torch.float32) - expand_blocks(means, block, length)


def block_energy_removed(v: Tensor, labels: Tensor | None = None, block: int = BLOCK, clip: bool = False) -> float:
    """1 - sum |R|^2 / sum |V|^2: the share of V's energy that the block means take out before quantising, 0..1.

    v: [B, H, L, D], floating. labels: uint8 [B, H, L] of `grouping.group`, or None for sequence order. V's energy
    includes its channel mean. Over all batches and heads together; 0 for an all-zero V.
    """
    total = removed = 0.0
    for i in range(v.shape[0]):
        for j in range(v.shape[1]):
            head = v[i : i + 1, j : j + 1].to(torch.float64)
            if labels is not None:
                order = permutation(labels[i : i + 1, j : j + 1])
                head = head.gather(-2, order[..., None].expand_as(head))
            means = stored_means(block_means(head, block, clip)).to(torch.float64)
            energy = float(head.square().sum())
            residual = float((head - expand_blocks(means, block, head.shape[-2])).square().sum())
            total += energy
            removed += energy - residual
    return removed / total if total > 0 else 0.0
