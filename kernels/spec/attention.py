"""VC-Attention for every plan: an online softmax over 128-key blocks, in the order a kernel works."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..plan import BLOCK, Plan
from .grouping import permutation
from .scores import hadamard, quantise_scores_operand, smooth_keys
from .smoothing import block_means, stored_means, subtract_block_means
from .values import probabilities, quantise_values

#: Query rows (times heads) worked on at once: a [rows, 128] tile of fp32 then stays in a CPU's last-level cache.
_ROWS_AT_ONCE = 8192


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, labels: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(q k^T scale) v with the formats and smoothing of `plan`.

    q: [B, H, Lq, D], k, v: [B, H, Lkv, D], any strides, floating dtype. labels: uint8 [B, H, Lkv] group of each token
    (None: sequence order). scale: of the scores, 1 / sqrt(D) if None.
    Returns [B, H, Lq, D] in q's dtype; computed in fp32 throughout. A row whose scores are all -inf gives 0.
    """
    b, h, lq, d = q.shape
    # One storage order for every backend: [B, L, H, D], which is what ComfyUI's models flatten to [B, L, H * D].
    out = torch.empty((b, lq, h, d), dtype=q.dtype, device=q.device).transpose(1, 2)
    scale = d**-0.5 if scale is None else scale
    for i in range(b):
        for j in range(h):
            head = (slice(i, i + 1), slice(j, j + 1))
            out[head] = _one_head(
                q[head].to(torch.float32),
                k[head].to(torch.float32),
                v[head].to(torch.float32),
                plan,
                None if labels is None else labels[head],
                scale,
            ).to(q.dtype)
    return out


def _one_head(q: Tensor, k: Tensor, v: Tensor, plan: Plan, labels: Tensor | None, scale: float) -> Tensor:
    if labels is not None:
        order = permutation(labels)[..., None].expand_as(k)
        k, v = k.gather(-2, order), v.gather(-2, order)
    log2_scale = scale * math.log2(math.e)
    values = quantise_values(v, plan.values, plan.demean, plan.clip_means, BLOCK, plan.adaptive_scales)
    query, key, key_mean = _score_operands(q, k, plan)
    outs = []
    for rows in torch.arange(q.shape[-2], device=q.device).split(_ROWS_AT_ONCE):
        qr, qm = query[..., rows, :], q[..., rows, :]
        maximum = torch.full_like(qr[..., :1], -torch.inf)
        row_sum = torch.zeros_like(maximum)
        acc = torch.zeros_like(qr)
        for n, start in enumerate(range(0, k.shape[-2], BLOCK)):
            tile = slice(start, start + BLOCK)
            s = qr @ key[..., tile, :].transpose(-2, -1) * log2_scale
            if key_mean is not None:
                # One scalar for each row and block: the score lost by subtracting the block's key mean.
                mean = key_mean[..., n : n + 1, :]
                s = s + stored_means(qm) @ mean.transpose(-2, -1) * log2_scale
            new_maximum = torch.maximum(maximum, s.amax(-1, keepdim=True))
            # A row that has seen only -inf has no maximum yet; any finite stand-in keeps its u at -inf, not NaN.
            reference = torch.where(new_maximum == -torch.inf, 0.0, new_maximum)
            p, r = probabilities(s - reference, plan.values, plan.probability)
            rescale = torch.exp2(maximum - reference)
            acc = acc * rescale + p @ values.residual[..., tile, :]
            if values.means is not None:
                acc = acc + r * values.means[..., n : n + 1, :]
            row_sum = row_sum * rescale + r
            maximum = new_maximum
        outs.append(torch.where(row_sum > 0, acc / row_sum, 0.0) * values.output_scale)
    return torch.cat(outs, dim=-2)


def _score_operands(q: Tensor, k: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Q and K as the score product sees them, and the key block means (bf16 values) when the plan has them."""
    if plan.scores == "exact":
        return q, k, None
    k = smooth_keys(k)
    means = None
    if plan.key_means:
        means = stored_means(block_means(k, BLOCK))
        k = subtract_block_means(k, means, BLOCK)
    q, k = hadamard(q), hadamard(k)
    return (
        quantise_scores_operand(q, plan.scores, plan.score_groups, True, plan.adaptive_scales),
        quantise_scores_operand(k, plan.scores, plan.score_groups, False, plan.adaptive_scales),
        means,
    )
