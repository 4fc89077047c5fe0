"""Grouping of value tokens: k-means on the rows of V, the permutation of V-Smooth (paper, section "V-Smooth").

The paper publishes neither the number of groups nor the iterations nor the initialisation. What is fixed here was
chosen by measuring how much of V's energy the block means remove (`smoothing.block_energy_removed`): about one group
for 256 tokens, two Lloyd steps on a strided subsample, strided initial centroids, Euclidean distance, and groups
numbered along a greedy chain of near centroids, so that a block that straddles two groups straddles similar ones.

Everything is deterministic: no random numbers, no atomics, ties go to the lower index.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: A label is one byte.
MAX_GROUPS = 256
#: The automatic choice: one group for this many tokens, within AUTO_RANGE.
TOKENS_PER_GROUP = 256
AUTO_RANGE = (16, MAX_GROUPS)
#: Tokens that the Lloyd steps look at, taken with an even stride over the sequence.
SAMPLE = 4096
LLOYD_STEPS = 2
#: Tokens scored at once; a [chunk, groups] fp32 tile for each head is the largest temporary.
_CHUNK = 2048


def auto_groups(length: int) -> int:
    """The number of groups for `length` tokens: length / 256 as the nearest power of two, within 16..256.

    Nearest on the logarithmic scale, in integers: from 2^n sqrt(2) on, 2^(n+1) is nearer.
    """
    low, high = AUTO_RANGE
    groups = low
    while groups < high and length * length >= 2 * (groups * TOKENS_PER_GROUP) ** 2:
        groups *= 2
    return groups


def permutation(labels: Tensor) -> Tensor:
    """pi of the paper: the stable argsort of `labels` (uint8 [B, H, L]) along the tokens, int64 [B, H, L].

    Stable, so that the tokens of one group keep their order and the permutation is the same on every device.
    """
    return torch.argsort(labels, dim=-1, stable=True)


def group(
    v: Tensor,
    groups: int = 0,
    previous: Tensor | None = None,
    refresh: bool = True,
    steps: int = LLOYD_STEPS,
    sample: int = SAMPLE,
) -> tuple[Tensor, Tensor]:
    """k-means on the rows of V, for every batch and head by itself.

    v: [B, H, L, D], floating and finite, any strides; all L tokens are real ones (cut padding off first). groups:
    1..256, or 0 for `auto_groups(L)`; with fewer tokens than groups some groups stay empty.
    previous: centroids [B, H, k, D] of an earlier step of the same layer (warm start). One assignment pass against
    them is enough then, no Lloyd step runs and `groups` may stay 0. refresh: after a warm assignment move the
    centroids to the means of their tokens (of the subsample), so that they follow V over the steps; False returns
    them as they came. steps, sample: Lloyd steps of a cold start, and tokens they look at.

    Returns (labels uint8 [B, H, L], centroids fp32 [B, H, k, D]); label i belongs to centroid i, and the numbers run
    along a greedy nearest-centroid chain. Raises ValueError for a group count outside 1..256, for an empty V, and for
    centroids that do not fit V.
    """
    b, h, length, d = v.shape
    k = group_count(v, groups, previous)
    # Powers of two, so no rounding: squared distances of fp32 inputs as large as 1e30 must not overflow to NaN.
    unit = _unit(v, previous)
    tokens = _Tokens(v, unit)
    subset = tokens.take(_strided(min(length, sample), length, v.device))
    if previous is None:
        centroids = subset[..., _strided(k, subset.shape[-2], v.device), :]
        for _ in range(steps):
            centroids = _lloyd_step(subset, centroids)
    else:
        centroids = previous.to(torch.float32) / unit
    order = _greedy_chain(centroids)
    centroids = centroids.gather(-2, order[..., None].expand(b, h, k, d))
    labels = torch.empty((b, h, length), dtype=torch.uint8, device=v.device)
    for start in range(0, length, _CHUNK):
        part = slice(start, start + _CHUNK)
        labels[..., part] = _assign(tokens.part(part), centroids).to(torch.uint8)
    if previous is not None and refresh:
        centroids = _lloyd_step(subset, centroids)
    return labels, centroids * unit


class _Tokens:
    """Rows of V as fp32 in the working unit, a few at a time: V is never copied whole."""

    def __init__(self, v: Tensor, unit: Tensor) -> None:
        self._v, self._unit = v, unit

    def part(self, tokens: slice) -> Tensor:
        return self._v[..., tokens, :].to(torch.float32) / self._unit

    def take(self, index: Tensor) -> Tensor:
        return self._v[..., index, :].to(torch.float32) / self._unit


def group_count(v: Tensor, groups: int, previous: Tensor | None) -> int:
    """k of a call of `group` with these arguments. Raises the ValueErrors of `group`; every backend asks here first."""
    b, h, length, d = v.shape
    if length == 0:
        raise ValueError("There are no value tokens to group.")
    if previous is not None and groups == 0 and previous.dim() == 4:
        groups = previous.shape[-2]
    k = groups or auto_groups(length)
    if not 1 <= k <= MAX_GROUPS:
        raise ValueError(
            f"The number of value groups is {k}; it must be 1 to {MAX_GROUPS} (a label is one byte), or 0 to let the "
            "token count decide."
        )
    if previous is not None and tuple(previous.shape) != (b, h, k, d):
        raise ValueError(
            f"The previous centroids have shape {tuple(previous.shape)}; {(b, h, k, d)} (batch, heads, groups, head "
            "dimension) is needed here. Start without them when the model or the number of groups changes."
        )
    if previous is not None and previous.device != v.device:
        raise ValueError(f"The previous centroids are on {previous.device}, the values on {v.device}.")
    return k


def _unit(v: Tensor, previous: Tensor | None) -> Tensor:
    """A power of two near the largest magnitude of each batch and head, fp32 [B, H, 1, 1]; 1 where all is zero."""
    amax = v.abs().amax(dim=(-2, -1), keepdim=True).to(torch.float32)
    if previous is not None:
        amax = torch.maximum(amax, previous.abs().amax(dim=(-2, -1), keepdim=True).to(torch.float32))
    exponent = torch.frexp(amax)[1].clamp(-120, 126)
    return torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent), 1.0)


def _strided(count: int, length: int, device: torch.device) -> Tensor:
    """`count` indices spread evenly over 0..length-1, int64; with count > length some occur more than once."""
    return torch.arange(count, device=device) * length // count


def _assign(tokens: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each token: argmax of v . c - |c|^2 / 2. [.., n, D], [.., k, D] -> int64 [.., n]."""
    bias = centroids.square().sum(-1) / 2
    return (tokens @ centroids.transpose(-2, -1) - bias[..., None, :]).argmax(-1)


def _lloyd_step(tokens: Tensor, centroids: Tensor) -> Tensor:
    """Means of the tokens nearest to each centroid, [.., k, D]; a centroid without tokens stays where it is."""
    total = torch.zeros_like(centroids)
    count = torch.zeros_like(centroids[..., :1])
    for chunk in tokens.split(_CHUNK, dim=-2):
        # A product with the one-hot matrix instead of index_add: the same sums in the same order on every run.
        member = torch.nn.functional.one_hot(_assign(chunk, centroids), centroids.shape[-2]).to(chunk.dtype)
        total += member.transpose(-2, -1) @ chunk
        count += member.sum(-2)[..., None]
    return torch.where(count > 0, total / count.clamp(min=1), centroids)


def _greedy_chain(centroids: Tensor) -> Tensor:
    """An order of the centroids in which each is the nearest unused one to its predecessor, int64 [B, H, k].

    Starts at centroid 0, so centroids that already lie in chain order keep it.
    """
    k = centroids.shape[-2]
    norm = centroids.square().sum(-1)
    distance = norm[..., :, None] + norm[..., None, :] - 2 * centroids @ centroids.transpose(-2, -1)
    current = torch.zeros((*centroids.shape[:-2], 1), dtype=torch.int64, device=centroids.device)
    used = torch.zeros(centroids.shape[:-1], dtype=torch.bool, device=centroids.device).scatter(-1, current, True)
    chain = [current]
    for _ in range(k - 1):
        row = distance.gather(-2, current[..., None].expand(*current.shape, k)).squeeze(-2)
        current = row.masked_fill(used, torch.inf).argmin(-1, keepdim=True)
        used = used.scatter(-1, current, True)
        chain.append(current)
    return torch.cat(chain, dim=-1)
