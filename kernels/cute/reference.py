"""Preparation in eager torch: the tile images of one call, built from the specification's own steps.

The preparation kernels are compared with this byte for byte (or within one code where rounding ties move), and the
attention kernel is tested on these images. Any device, fp32 throughout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launch.images import Images, image_shapes
from ..plan import Plan
from ..spec.formats import E4M3_MAX, INT8_MAX, amax_scale, e4m3_encode, int8
from ..spec.grouping import permutation
from ..spec.scores import hadamard, smooth_keys
from ..spec.smoothing import block_means, expand_blocks
from ..spec.values import quantise_values
from . import layouts as lo

#: Largest code of each format of Q and K.
_TOP = {"int8": INT8_MAX, "fp8": E4M3_MAX}


def prepare(q: Tensor, k: Tensor, v: Tensor, plan: Plan, labels: Tensor | None = None) -> Images:
    """Images of q [B, H, Lq, 128], k, v [B, H, Lkv, 128] (any floating dtype) for an 8-bit `plan`.

    labels: uint8 [B, H, Lkv], the group of each token; None keeps the sequence order.
    """
    if plan.scores not in _TOP or plan.values != "fp8" or plan.score_groups != "per_warp":
        raise ValueError("These images hold INT8 or FP8 scores with score_groups='per_warp' and values='fp8'.")
    if labels is not None:
        order = permutation(labels)[..., None].expand_as(k)
        k, v = k.gather(-2, order), v.gather(-2, order)
    b, h, lq, _ = q.shape
    tensors: dict[str, Any] = {
        **q_image(q, plan.key_means, plan.scores),
        **k_image(k, plan.key_means, plan.scores),
        **v_image(v, plan.demean, plan.clip_means),
    }
    for name, (shape, dtype) in image_shapes(b, h, lq, k.shape[-2], plan).items():
        tensors[name] = tensors[name].reshape(shape).to(dtype)
    return Images(b, h, lq, k.shape[-2], **tensors)


def q_image(q: Tensor, key_means: bool = False, scores: str = "int8") -> dict[str, Tensor]:
    """q, qs and (for key means) qb of q [B, H, Lq, 128]."""
    heads = q.to(torch.float32).flatten(0, 1)
    n, tiles = heads.shape[0], lo.query_tiles(q.shape[-2])
    padded = torch.nn.functional.pad(heads, (0, 0, 0, tiles * lo.QUERY_TILE - q.shape[-2]))
    rotated = hadamard(padded)
    amax = rotated.unflatten(1, (-1, lo.QUERY_GROUP)).abs().amax((-2, -1))
    scale = amax_scale(amax, _TOP[scores]).repeat_interleave(lo.QUERY_GROUP, 1)
    codes = _codes(rotated, scale[..., None], scores).unflatten(1, (tiles, lo.QUERY_TILE))
    row, channel = _grid(lo.QUERY_TILE, lo.HEAD_DIM, q.device)
    images = {"q": _scatter(codes, lo.q_offset(row, channel), lo.QUERY_TILE * lo.HEAD_DIM), "qs": scale}
    if key_means:
        plain = padded.to(torch.bfloat16).unflatten(1, (tiles, lo.QUERY_TILE))
        images["qb"] = _scatter(plain, lo.qb_offset(row, channel), lo.QUERY_TILE * lo.HEAD_DIM)
    return {name: x.reshape(n, -1) for name, x in images.items()}


def k_image(k: Tensor, key_means: bool = False, scores: str = "int8") -> dict[str, Tensor]:
    """k, ks and (for key means) km of k [B, H, Lkv, 128], already permuted."""
    length, tiles, blocks = k.shape[-2], lo.key_tiles(k.shape[-2]), lo.key_blocks(k.shape[-2])
    smooth = smooth_keys(k.to(torch.float32))
    means = None
    if key_means:
        means = block_means(smooth, lo.BLOCK).to(torch.bfloat16)
        smooth = smooth - expand_blocks(means.to(torch.float32), lo.BLOCK, length)
    rotated = hadamard(smooth).flatten(0, 1)
    last = (length - 1) // lo.BLOCK
    # The first key of the last valid block stands in for the missing ones: its scores never raise a row maximum, and
    # V^T and the row-sum rows are zero there. No kernel needs a mask.
    stand_in = rotated[:, last * lo.BLOCK : last * lo.BLOCK + 1].expand(-1, tiles * lo.KEY_TILE - length, -1)
    padded = torch.cat((rotated, stand_in), 1).unflatten(1, (blocks, lo.BLOCK))
    scale = amax_scale(padded.abs().amax((-2, -1)), _TOP[scores])
    scale[:, last:] = scale[:, last : last + 1]
    codes = _codes(padded, scale[..., None, None], scores).flatten(1, 2).unflatten(1, (tiles, lo.KEY_TILE))
    token, channel = _grid(lo.KEY_TILE, lo.HEAD_DIM, k.device)
    images = {"k": _scatter(codes, lo.k_offset(token, channel), lo.KEY_TILE * lo.HEAD_DIM), "ks": scale}
    if means is not None:
        flat = means.flatten(0, 1)
        missing = lo.mean_groups(length) * lo.MEAN_GROUP - flat.shape[1]
        flat = torch.cat((flat, flat[:, -1:].expand(-1, missing, -1)), 1).unflatten(1, (-1, lo.MEAN_GROUP))
        block, channel = _grid(lo.MEAN_GROUP, lo.HEAD_DIM, k.device)
        images["km"] = _scatter(flat, lo.km_offset(block, channel), lo.MEAN_GROUP * lo.HEAD_DIM)
    return images


def v_image(v: Tensor, demean: bool = True, clip_means: bool = False) -> dict[str, Tensor]:
    """v, sv and (when `demean`) mu of v [B, H, Lkv, 128], already permuted."""
    length, tiles = v.shape[-2], lo.key_tiles(v.shape[-2])
    values = quantise_values(v.to(torch.float32), "fp8", demean, clip_means, lo.BLOCK)
    codes = values.residual.to(torch.float8_e4m3fn).view(torch.uint8).flatten(0, 1)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, tiles * lo.KEY_TILE - length)).unflatten(1, (tiles, lo.KEY_TILE))
    token, channel = _grid(lo.KEY_TILE, lo.HEAD_DIM, v.device)
    image = torch.zeros((*codes.shape[:2], lo.KEY_TILE * lo.V_ROWS), dtype=torch.uint8, device=v.device)
    image[..., lo.v_offset(channel, token).flatten()] = codes.flatten(-2)
    valid = torch.arange(length, device=v.device)
    block = valid // lo.BLOCK
    image[:, valid // lo.KEY_TILE, lo.v_offset(lo.row_sum_row(block), valid % lo.KEY_TILE)] = lo.E4M3_ONE
    images = {"v": image, "sv": values.output_scale.flatten(0, 1)[:, 0]}
    if values.means is not None:
        means = values.means.to(torch.bfloat16).flatten(0, 1)
        missing = lo.mean_groups(length) * lo.MEAN_GROUP - means.shape[1]
        means = torch.nn.functional.pad(means, (0, 0, 0, missing)).unflatten(1, (-1, lo.MEAN_GROUP)).repeat(1, 1, 2, 1)
        block, channel = _grid(lo.MEAN_WIDTH, lo.HEAD_DIM, v.device)
        images["mu"] = _scatter(means, lo.mu_offset(channel, block), lo.HEAD_DIM * lo.MEAN_WIDTH)
    return images


def _codes(x: Tensor, scale: Tensor, scores: str) -> Tensor:
    """Codes of x / scale: int8, or E4M3 bytes."""
    if scores == "fp8":
        return e4m3_encode(x / scale).view(torch.uint8)
    return int8(x, scale).to(torch.int8)


def _grid(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None, :]


def _scatter(tiles: Tensor, offsets: Tensor, size: int) -> Tensor:
    """Place each [rows, columns] tile of `tiles` [..., rows, columns] at `offsets` of a zeroed image [..., size]."""
    image = torch.zeros((*tiles.shape[:-2], size), dtype=tiles.dtype, device=tiles.device)
    image[..., offsets.flatten()] = tiles.flatten(-2)
    return image
