"""Other low-bit attention, emulated from its publications, for comparison with the specification.

Written from the papers' descriptions on the number formats of `kernels.spec.formats`; no code of theirs is used. All
of them are non-causal, run the online softmax over 128 keys at a time in fp32, and sum l from the probabilities
**before** they are rounded, as their papers say.

- SageAttention2 (arXiv 2411.10958, 2505.21136): K minus its channel mean; INT8 Q and K with one scale for each thread
  of the MMA; P in E4M3 with the static scale 1/448; V in E4M3 with one scale for each channel. No rotation.
- SageAttention3 (arXiv 2505.11594): K minus its channel mean, Q minus the mean of its 128-row block, whose product
  with K is added back in high precision; NVFP4 Q and K along the head dimension; two-level P (each row of a tile is
  scaled to 448 * 6, then NVFP4); NVFP4 V along tokens. Its NVFP4 has no fp32 second level.
- Plain FP8, as in FlashAttention-3 and 4 (arXiv 2407.08608): E4M3 Q and K with one scale for each 128-token block,
  with or without a Hadamard rotation of both; E4M3 V with one scale for each head; P in E4M3 with its maximum at 256.
- Attn-QAT without its training (arXiv 2603.00040): NVFP4 Q and K without any smoothing, 8-bit P and V.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.spec.formats import E2M1_MAX, E4M3_MAX, INT8_MAX, amax_scale, e4m3, int8, nvfp4
from ..kernels.spec.scores import hadamard

BLOCK = 128
#: P of NVFP4 is scaled so that a row maximum lands on the largest value of its two levels.
NVFP4_TOP = E4M3_MAX * E2M1_MAX
#: Query rows of one head worked on at once.
_ROWS = 4096

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v in fp64: q [B, H, Lq, D], k, v [B, H, Lkv, D] -> fp32 [B, H, Lq, D]."""
    out = torch.empty(q.shape, dtype=torch.float32)
    for i, j in _heads(q):
        for rows in range(0, q.shape[-2], 1024):
            part = slice(rows, rows + 1024)
            scores = q[i, j, part].double() @ k[i, j].double().T / math.sqrt(q.shape[-1])
            out[i, j, part] = (torch.softmax(scores, -1) @ v[i, j].double()).float()
    return out


def sage2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SageAttention2, 8 bit: INT8 per-thread QK, E4M3 PV. Shapes as `exact`."""
    k = k - k.mean(-2, keepdim=True)
    k_hat = _per_thread_int8(k, 64, lambda column: column % 8 // 2)
    q_hat = _per_thread_int8(q, 32, lambda row: row % 8)
    v_scale = amax_scale(v.abs().amax(-2, keepdim=True), E4M3_MAX)
    return _attend(q_hat, k_hat, e4m3(v / v_scale) * v_scale, lambda p: e4m3(p * E4M3_MAX) / E4M3_MAX)


def sage3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SageAttention3: NVFP4 QK with both smoothed, two-level P, NVFP4 V along tokens. Shapes as `exact`."""
    k = k - k.mean(-2, keepdim=True)
    q_mean = torch.cat([block.mean(-2, keepdim=True).expand_as(block) for block in q.split(BLOCK, dim=-2)], dim=-2)
    k_hat = _nvfp4(k)
    v_hat = _nvfp4(v.transpose(-2, -1)).transpose(-2, -1)
    return _attend(_nvfp4(q - q_mean), k_hat, v_hat, _two_level_nvfp4, added=(q_mean, k))


def plain_fp8(q: Tensor, k: Tensor, v: Tensor, rotate: bool = False) -> Tensor:
    """FP8 attention with one scale for each block of Q and K and one for each head of V. Shapes as `exact`."""
    if rotate:
        q, k = hadamard(q), hadamard(k)
    v_scale = amax_scale(v.abs().amax((-2, -1), keepdim=True), E4M3_MAX)
    return _attend(_per_block_fp8(q), _per_block_fp8(k), e4m3(v / v_scale) * v_scale, lambda p: e4m3(p * 256) / 256)


def plain_fp8_hadamard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`plain_fp8` with Q and K rotated by a Hadamard matrix."""
    return plain_fp8(q, k, v, rotate=True)


def attn_qat_untrained(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """NVFP4 Q and K as they come, E4M3 P and V: what Attn-QAT computes, on weights not trained for it."""
    v_scale = amax_scale(v.abs().amax((-2, -1), keepdim=True), E4M3_MAX)
    return _attend(_nvfp4(q), _nvfp4(k), e4m3(v / v_scale) * v_scale, lambda p: e4m3(p * E4M3_MAX) / E4M3_MAX)


EMULATIONS: dict[str, Attention] = {
    "SageAttention2": sage2,
    "SageAttention3": sage3,
    "plain FP8": plain_fp8,
    "plain FP8 + QK Hadamard": plain_fp8_hadamard,
    "Attn-QAT untrained, 4/8": attn_qat_untrained,
}


def _heads(q: Tensor) -> list[tuple[int, int]]:
    return [(i, j) for i in range(q.shape[0]) for j in range(q.shape[1])]


def _per_thread_int8(x: Tensor, tile: int, thread_of: Callable[[Tensor], Tensor]) -> Tensor:
    """INT8 with one scale for the rows of each `tile` that belong to one thread; returns the dequantised values."""
    length = x.shape[-2]
    row = torch.arange(length)
    group = row // tile * tile + thread_of(row % tile)
    largest = x.abs().amax(-1)
    index = group.expand_as(largest)
    amax = largest.new_zeros((*largest.shape[:-1], length + tile))
    amax = amax.scatter_reduce(-1, index, largest, "amax")
    scale = amax_scale(amax, INT8_MAX).gather(-1, index)[..., None]
    return int8(x, scale) * scale


def _per_block_fp8(x: Tensor) -> Tensor:
    parts = []
    for block in x.split(BLOCK, dim=-2):
        scale = amax_scale(block.abs().amax((-2, -1), keepdim=True), E4M3_MAX)
        parts.append(e4m3(block / scale) * scale)
    return torch.cat(parts, dim=-2)


def _nvfp4(x: Tensor) -> Tensor:
    codes, scale = nvfp4(x, 1.0)
    return codes * scale


def _two_level_nvfp4(p: Tensor) -> Tensor:
    first_level = amax_scale(p.amax(-1, keepdim=True), NVFP4_TOP)
    return _nvfp4(p / first_level) * first_level


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    round_p: Callable[[Tensor], Tensor],
    added: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Online softmax on dequantised operands; `added`: a pair whose product joins the scores unquantised."""
    out = torch.empty_like(q)
    to_log2 = math.log2(math.e) / math.sqrt(q.shape[-1])
    for i, j in _heads(q):
        for start in range(0, q.shape[-2], _ROWS):
            rows = slice(start, start + _ROWS)
            maximum = torch.full((out[i, j, rows].shape[0], 1), -torch.inf)
            row_sum = torch.zeros_like(maximum)
            acc = torch.zeros_like(out[i, j, rows])
            for first in range(0, k.shape[-2], BLOCK):
                keys = slice(first, first + BLOCK)
                s = q[i, j, rows] @ k[i, j, keys].T
                if added is not None:
                    s = s + added[0][i, j, rows] @ added[1][i, j, keys].T
                s = s * to_log2
                new_maximum = torch.maximum(maximum, s.amax(-1, keepdim=True))
                p = torch.exp2(s - new_maximum)
                rescale = torch.exp2(maximum - new_maximum)
                acc = acc * rescale + round_p(p) @ v[i, j, keys]
                row_sum = row_sum * rescale + p.sum(-1, keepdim=True)
                maximum = new_maximum
            out[i, j, rows] = acc / row_sum
    return out
