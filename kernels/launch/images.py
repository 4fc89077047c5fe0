"""The prepared operands of one attention call: the tile images of `kernels.cute.layouts`, as torch tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cute import layouts as lo
from ..plan import Plan


@dataclass(frozen=True)
class Images:
    """Q, K and V of one call as the attention kernel reads them. `kernels.cute.layouts` states every shape and byte.

    q int8, qs fp32, k int8, ks fp32, v uint8 (E4M3 bytes), sv fp32; mu bf16 when V was demeaned, qb and km bf16 when K
    was, None otherwise. batch, heads, lq, lkv: of the call, lengths without padding.
    """

    batch: int
    heads: int
    lq: int
    lkv: int
    q: Tensor
    qs: Tensor
    k: Tensor
    ks: Tensor
    v: Tensor
    sv: Tensor
    mu: Tensor | None = None
    qb: Tensor | None = None
    km: Tensor | None = None


def image_shapes(
    batch: int, heads: int, lq: int, lkv: int, plan: Plan
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor in `Images` that `plan` needs."""
    n, nq, nk = batch * heads, lo.query_tiles(lq), lo.key_tiles(lkv)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "q": ((n, nq, lo.QUERY_TILE, lo.HEAD_DIM), torch.int8),
        "qs": ((n, nq * lo.QUERY_TILE), torch.float32),
        "k": ((n, nk, lo.KEY_TILE, lo.HEAD_DIM), torch.int8),
        "ks": ((n, lo.key_blocks(lkv)), torch.float32),
        "v": ((n, nk, lo.KEY_TILE // lo.BLOCK, lo.V_ROWS, lo.BLOCK), torch.uint8),
        "sv": ((n, lo.HEAD_DIM), torch.float32),
    }
    if plan.demean:
        shapes["mu"] = ((n, lo.mean_groups(lkv), lo.HEAD_DIM, lo.MEAN_WIDTH), torch.bfloat16)
    if plan.key_means:
        shapes["qb"] = ((n, nq, 2, 2, lo.WARPGROUP_ROWS, 64), torch.bfloat16)
        shapes["km"] = ((n, lo.mean_groups(lkv), 2, lo.MEAN_GROUP, 64), torch.bfloat16)
    return shapes


def allocate(batch: int, heads: int, lq: int, lkv: int, plan: Plan, device: torch.device | str) -> Images:
    """Uninitialised images of one call. Every byte is the preparation kernels' to write, padding included."""
    shapes = image_shapes(batch, heads, lq, lkv, plan)
    tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
    return Images(batch, heads, lq, lkv, **tensors)
