"""Preparation for the 8-bit mma.sync kernels in eager torch: the images of one call from the specification's own steps.

The preparation kernels are compared with this, and the attention kernels are tested on these images. Any device, fp32
throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch.images import Images
from ..plan import Plan
from ..spec.formats import INT8_MAX, amax_scale, e4m3_encode, int8
from ..spec.grouping import permutation
from ..spec.scores import hadamard, smooth_keys
from ..spec.smoothing import block_means, stored_means, subtract_block_means
from ..spec.values import quantise_values
from . import layouts_mma8 as lo
from .config_mma8 import config_of


def prepare(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, labels: Tensor | None = None, accumulate: str = "f32"
) -> Images:
    """Images of q [B, H, Lq, 128], k, v [B, H, Lkv, 128] (any floating dtype) for an INT8 / FP8 `plan`.

    labels: uint8 [B, H, Lkv], the group of each token; None keeps the sequence order. accumulate: of the kernel
    (`Mma8Config`). Raises ValueError for a plan that no 8-bit mma.sync kernel computes.
    """
    if config_of(plan, "bf16", accumulate) is None:
        raise ValueError("The 8-bit images hold scores='int8' with score_groups='per_warp' and values='fp8'.")
    if labels is not None:
        order = permutation(labels)[..., None].expand_as(k)
        k, v = k.gather(-2, order), v.gather(-2, order)
    b, h, lq, _ = q.shape
    tensors = {
        **q_image(q, plan.key_means),
        **k_image(k, plan.key_means),
        **v_image(v, plan.demean, plan.clip_means, accumulate),
    }
    return Images(b, h, lq, k.shape[-2], **tensors)


def q_image(q: Tensor, key_means: bool = False) -> dict[str, Tensor]:
    """q, qs and (for key means) qb of q [B, H, Lq, 128]."""
    heads = q.to(torch.float32).flatten(0, 1)
    tiles = lo.query_tiles(q.shape[-2])
    padded = torch.nn.functional.pad(heads, (0, 0, 0, tiles * lo.QUERY_TILE - q.shape[-2]))
    rotated = hadamard(padded)
    amax = rotated.unflatten(1, (-1, lo.WARP_ROWS)).abs().amax((-2, -1))
    scale = amax_scale(amax, INT8_MAX).repeat_interleave(lo.WARP_ROWS, 1)
    codes = int8(rotated, scale[..., None]).to(torch.int8).unflatten(1, (tiles, lo.QUERY_TILE))
    row, channel = _grid(lo.QUERY_TILE, lo.HEAD_DIM, q.device)
    images = {"q": _scatter(codes, lo.q_offset(row, channel), lo.Q_BYTES), "qs": scale}
    if key_means:
        plain = padded.to(torch.bfloat16).unflatten(1, (tiles, lo.QUERY_TILE))
        images["qb"] = _scatter(plain, lo.qb_offset(row, channel), lo.QB_ELEMENTS)
    return images


def k_image(k: Tensor, key_means: bool = False) -> dict[str, Tensor]:
    """k, ks and (for key means) km of k [B, H, Lkv, 128], already permuted."""
    length, tiles = k.shape[-2], lo.key_tiles(k.shape[-2])
    smooth = smooth_keys(k.to(torch.float32))
    images = {}
    if key_means:
        means = stored_means(block_means(smooth, lo.BLOCK))
        smooth = subtract_block_means(smooth, means, lo.BLOCK)
        flat = means.to(torch.bfloat16).flatten(0, 1)
        missing = lo.mean_groups(length) * lo.MEAN_GROUP - tiles
        flat = torch.cat((flat, flat[:, -1:].expand(-1, missing, -1)), 1).unflatten(1, (-1, lo.MEAN_GROUP))
        block, channel = _grid(lo.MEAN_GROUP, lo.HEAD_DIM, k.device)
        images["km"] = _scatter(flat, lo.km_offset(block, channel), lo.KM_ELEMENTS)
    rotated = hadamard(smooth).flatten(0, 1)
    # The first key of the last block stands in for the missing ones: its scores never raise a row maximum, and V^T and
    # the row-sum rows are zero there. No kernel needs a mask.
    first = (tiles - 1) * lo.BLOCK
    stand_in = rotated[:, first : first + 1].expand(-1, tiles * lo.BLOCK - length, -1)
    padded = torch.cat((rotated, stand_in), 1).unflatten(1, (tiles, lo.BLOCK))
    images["ks"] = amax_scale(padded.abs().amax((-2, -1)), INT8_MAX)
    codes = int8(padded, images["ks"][..., None, None]).to(torch.int8)
    key, channel = _grid(lo.BLOCK, lo.HEAD_DIM, k.device)
    images["k"] = _scatter(codes, lo.k_offset(key, channel), lo.K_BYTES)
    return images


def v_image(v: Tensor, demean: bool = True, clip_means: bool = False, accumulate: str = "f32") -> dict[str, Tensor]:
    """v (E4M3 bytes), sv and (when `demean`) mu of v [B, H, Lkv, 128], already permuted."""
    length, tiles = v.shape[-2], lo.key_tiles(v.shape[-2])
    v = v.to(torch.float32)
    values = quantise_values(v, "fp8", demean, clip_means, lo.BLOCK)
    residual, means = v, values.means
    if means is not None:
        residual = subtract_block_means(v, means * values.output_scale, lo.BLOCK)
    # Powers of two: the means stay the bf16 numbers that they are, shifted.
    smaller = lo.VALUE_TOP[accumulate] / lo.VALUE_TOP["f32"]
    scale = values.output_scale / smaller
    codes = e4m3_encode(residual / scale).view(torch.uint8).flatten(0, 1)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, tiles * lo.BLOCK - length)).unflatten(1, (tiles, lo.BLOCK))
    token, channel = _grid(lo.BLOCK, lo.HEAD_DIM, v.device)
    image = _scatter(codes, lo.v_offset(channel, token), lo.V_BYTES)
    valid = torch.arange(length, device=v.device)
    block = valid // lo.BLOCK
    image[:, block, lo.v_offset(lo.row_sum_row(block), valid % lo.BLOCK)] = lo.E4M3_ONE
    images = {"v": image, "sv": scale.flatten(0, 1)[:, 0]}
    if means is not None:
        means = (means * smaller).to(torch.bfloat16).flatten(0, 1)
        missing = lo.mean_groups(length) * lo.MEAN_GROUP - tiles
        means = torch.nn.functional.pad(means, (0, 0, 0, missing)).unflatten(1, (-1, lo.MEAN_GROUP))
        block, channel = _grid(lo.MEAN_GROUP, lo.HEAD_DIM, v.device)
        images["mu"] = _scatter(means, lo.mu_offset(channel, block), lo.MU_ELEMENTS)
    return images


def _grid(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None, :]


def _scatter(tiles: Tensor, offsets: Tensor, size: int) -> Tensor:
    """Place each [rows, columns] tile of `tiles` [..., rows, columns] at `offsets` of a zeroed image [..., size]."""
    image = torch.zeros((*tiles.shape[:-2], size), dtype=tiles.dtype, device=tiles.device)
    image[..., offsets.flatten()] = tiles.flatten(-2)
    return image
