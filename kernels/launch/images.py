"""The prepared operands of one attention call: tile images of a layout module of `kernels.cute`, as torch tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cute import layouts as lo
from ..cute import layouts_mma8, layouts_nvfp4
from ..plan import Plan

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Images:
    """Q, K and V of one call as the attention kernel reads them. `kernels.cute.layouts` states every shape and byte, or
    `layouts_mma8` or `layouts_nvfp4` for other kinds of images (`kernels.cute.selection`).

    q and k int8 (FP8 and NVFP4: uint8), qs and ks fp32, v uint8, sv fp32; mu bf16 when V was demeaned, qb and km bf16
    when K was, None otherwise. batch, heads, lq, lkv: of the call, lengths without padding.
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


def image_shapes(batch: int, heads: int, lq: int, lkv: int, plan: Plan, kind: str = "wgmma8") -> Shapes:
    """Shape and dtype of each tensor in `Images` that `plan` needs. kind: of images."""
    n = batch * heads
    shapes = _TABLES[kind](n, lq, lkv)
    if plan.scores == "fp8":
        shapes.update({name: (shapes[name][0], torch.uint8) for name in ("q", "k")})
    wanted = {"mu": plan.demean, "qb": plan.key_means, "km": plan.key_means}
    return {name: shape for name, shape in shapes.items() if wanted.get(name, True)}


def _wgmma8(n: int, lq: int, lkv: int) -> Shapes:
    nq, nk, ng = lo.query_tiles(lq), lo.key_tiles(lkv), lo.mean_groups(lkv)
    return {
        "q": ((n, nq, lo.QUERY_TILE, lo.HEAD_DIM), torch.int8),
        "qs": ((n, nq * lo.QUERY_TILE), torch.float32),
        "k": ((n, nk, lo.KEY_TILE, lo.HEAD_DIM), torch.int8),
        "ks": ((n, lo.key_blocks(lkv)), torch.float32),
        "v": ((n, nk, lo.KEY_TILE // lo.BLOCK, lo.V_ROWS, lo.BLOCK), torch.uint8),
        "sv": ((n, lo.HEAD_DIM), torch.float32),
        "mu": ((n, ng, lo.HEAD_DIM, lo.MEAN_WIDTH), torch.bfloat16),
        "qb": ((n, nq, 2, 2, lo.WARPGROUP_ROWS, 64), torch.bfloat16),
        "km": ((n, ng, 2, lo.MEAN_GROUP, 64), torch.bfloat16),
    }


def _mma8(n: int, lq: int, lkv: int) -> Shapes:
    at = layouts_mma8
    nq, nk, ng = at.query_tiles(lq), at.key_tiles(lkv), at.mean_groups(lkv)
    return {
        "q": ((n, nq, at.Q_BYTES), torch.int8),
        "qs": ((n, nq * at.QUERY_TILE), torch.float32),
        "k": ((n, nk, at.K_BYTES), torch.int8),
        "ks": ((n, nk), torch.float32),
        "v": ((n, nk, at.V_BYTES), torch.uint8),
        "sv": ((n, at.HEAD_DIM), torch.float32),
        "mu": ((n, ng, at.MU_ELEMENTS), torch.bfloat16),
        "qb": ((n, nq, at.QB_ELEMENTS), torch.bfloat16),
        "km": ((n, ng, at.KM_ELEMENTS), torch.bfloat16),
    }


def _nvfp4(n: int, lq: int, lkv: int) -> Shapes:
    at = layouts_nvfp4
    nq, nk, ng = at.query_tiles(lq), at.key_tiles(lkv), at.mean_groups(lkv)
    return {
        "q": ((n, nq, at.Q_BYTES), torch.uint8),
        "qs": ((n,), torch.float32),
        "k": ((n, nk, at.K_BYTES), torch.uint8),
        "ks": ((n,), torch.float32),
        "v": ((n, nk, at.V_BYTES), torch.uint8),
        "sv": ((n,), torch.float32),
        "mu": ((n, ng, at.MU_ELEMENTS), torch.bfloat16),
        "qb": ((n, nq, at.QB_ELEMENTS), torch.bfloat16),
        "km": ((n, ng, at.KM_ELEMENTS), torch.bfloat16),
    }


_TABLES = {"wgmma8": _wgmma8, "mma8": _mma8, "nvfp4": _nvfp4}


def key_blocks(lkv: int, kind: str = "wgmma8") -> int:
    """Blocks of 128 keys in the images of `lkv` keys, wholly padded ones included."""
    return lo.key_blocks(lkv) if kind == "wgmma8" else layouts_nvfp4.key_tiles(lkv)


def allocate(
    batch: int, heads: int, lq: int, lkv: int, plan: Plan, device: torch.device | str, kind: str = "wgmma8"
) -> Images:
    """Uninitialised images of one call. Every byte is the preparation kernels' to write, padding included."""
    shapes = image_shapes(batch, heads, lq, lkv, plan, kind)
    tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
    return Images(batch, heads, lq, lkv, **tensors)
