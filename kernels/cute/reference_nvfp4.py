"""NVFP4 preparation in eager torch: the images of one call, built from the specification's own steps.

The preparation kernels are compared with this, and the sm_120a attention kernel is tested on these images. Any device,
fp32 throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch.images import Images
from ..plan import BLOCK, Plan
from ..spec.formats import e4m3_encode, nvfp4, nvfp4_second_level
from ..spec.grouping import permutation
from ..spec.scores import hadamard, smooth_keys
from ..spec.smoothing import block_means, stored_means, subtract_block_means
from . import layouts_nvfp4 as lo
from .config_nvfp4 import config_of

#: Code of each magnitude: twice an E2M1 value, as an index.
_CODE_OF_DOUBLE = (0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7)
_SIGN = 8


def prepare(q: Tensor, k: Tensor, v: Tensor, plan: Plan, labels: Tensor | None = None) -> Images:
    """Images of q [B, H, Lq, 128], k, v [B, H, Lkv, 128] (any floating dtype) for a four-bit `plan`.

    labels: uint8 [B, H, Lkv], the group of each token; None keeps the sequence order. Raises ValueError for a plan
    that no NVFP4 kernel computes.
    """
    if config_of(plan, "bf16") is None:
        raise ValueError("The NVFP4 images hold scores='nvfp4' and values='nvfp4' with probability='exp2'.")
    if labels is not None:
        order = permutation(labels)[..., None].expand_as(k)
        k, v = k.gather(-2, order), v.gather(-2, order)
    b, h, lq, _ = q.shape
    tensors = {
        **q_image(q, plan.key_means, plan.adaptive_scales),
        **k_image(k, plan.key_means, plan.adaptive_scales),
        **v_image(v, plan.demean, plan.clip_means, plan.adaptive_scales),
    }
    return Images(b, h, lq, k.shape[-2], **tensors)


def q_image(q: Tensor, key_means: bool = False, adaptive: bool = False) -> dict[str, Tensor]:
    """q, qs and (for key means) qb of q [B, H, Lq, 128]."""
    heads = q.to(torch.float32).flatten(0, 1)
    tiles = lo.query_tiles(q.shape[-2])
    padded = torch.nn.functional.pad(heads, (0, 0, 0, tiles * lo.QUERY_TILE - q.shape[-2]))
    codes, scales, second = _quantise(hadamard(padded), adaptive)
    images = {
        "q": _tiles(codes, scales, tiles, lo.q_code, lo.q_scale, lo.Q_BYTES),
        "qs": second,
    }
    if key_means:
        row, channel = _grid(lo.QUERY_TILE, lo.HEAD_DIM, q.device)
        plain = padded.to(torch.bfloat16).unflatten(1, (tiles, lo.QUERY_TILE))
        images["qb"] = _scatter(plain, lo.qb_offset(row, channel), lo.QB_ELEMENTS)
    return images


def k_image(k: Tensor, key_means: bool = False, adaptive: bool = False) -> dict[str, Tensor]:
    """k, ks and (for key means) km of k [B, H, Lkv, 128], already permuted."""
    length, tiles = k.shape[-2], lo.key_tiles(k.shape[-2])
    smooth = smooth_keys(k.to(torch.float32))
    images = {}
    if key_means:
        means = stored_means(block_means(smooth, BLOCK))
        smooth = subtract_block_means(smooth, means, BLOCK)
        flat = means.to(torch.bfloat16).flatten(0, 1)
        missing = lo.mean_groups(length) * lo.MEAN_GROUP - flat.shape[1]
        flat = torch.cat((flat, flat[:, -1:].expand(-1, missing, -1)), 1).unflatten(1, (-1, lo.MEAN_GROUP))
        block, channel = _grid(lo.MEAN_GROUP, lo.HEAD_DIM, k.device)
        images["km"] = _scatter(flat, lo.km_offset(block, channel), lo.KM_ELEMENTS)
    rotated = hadamard(smooth).flatten(0, 1)
    padding = rotated[:, -1:].expand(-1, tiles * BLOCK - length, -1)
    codes, scales, images["ks"] = _quantise(torch.cat((rotated, padding), 1), adaptive)
    images["k"] = _tiles(codes, scales, tiles, lo.k_code, lo.k_scale, lo.K_BYTES)
    return images


def v_image(v: Tensor, demean: bool = True, clip_means: bool = False, adaptive: bool = False) -> dict[str, Tensor]:
    """v, sv and (when `demean`) mu of v [B, H, Lkv, 128], already permuted.

    The means are stored divided by sv and the residual is taken against them as stored, so that their rounding costs
    nothing and one multiply in the epilogue serves both.
    """
    length, tiles = v.shape[-2], lo.key_tiles(v.shape[-2])
    residual = v.to(torch.float32)
    images = {}
    second = None
    if demean:
        means = block_means(residual, BLOCK, clip=clip_means)
        second = nvfp4_second_level(subtract_block_means(v, stored_means(means), BLOCK))
        stored = stored_means(means / second)
        residual = subtract_block_means(v, stored * second, BLOCK)
        flat = stored.to(torch.bfloat16).flatten(0, 1)
        missing = lo.mean_groups(length) * lo.MEAN_GROUP - flat.shape[1]
        flat = torch.nn.functional.pad(flat, (0, 0, 0, missing)).unflatten(1, (-1, lo.MEAN_GROUP)).transpose(2, 3)
        channel, block = _grid(lo.HEAD_DIM, lo.MEAN_GROUP, v.device)
        images["mu"] = _scatter(flat, lo.mu_offset(channel, block), lo.MU_ELEMENTS)
        second = second.flatten(0, 1)
    padded = torch.nn.functional.pad(residual.flatten(0, 1), (0, 0, 0, tiles * BLOCK - length)).transpose(1, 2)
    codes, scales, images["sv"] = _quantise(padded, adaptive, second)
    # [BH, channel, token] -> [BH, tile, V^T row, token], with a row of ones for each block.
    codes = codes.unflatten(2, (tiles, BLOCK)).transpose(1, 2)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, lo.V_ROWS - lo.HEAD_DIM))
    token = torch.arange(length, device=v.device)
    codes[:, token // BLOCK, lo.row_sum_row(token // BLOCK), token % BLOCK] = lo.E2M1_ONE
    scales = scales.unflatten(2, (tiles, BLOCK // lo.GROUP)).transpose(1, 2)
    images["v"] = _place(codes, scales, lo.v_code, lo.v_scale, lo.V_BYTES)
    return images


def _quantise(x: Tensor, adaptive: bool, second: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """E2M1 codes (uint8 [BH, n, m]), E4M3 scale bytes [BH, n, m / 16] and the second-level scale [BH] of fp32 x.

    second: [BH, 1, 1], or None to take it from `x`.
    """
    second = nvfp4_second_level(x) if second is None else second
    values, scales = nvfp4(x, second, adaptive)
    table = torch.tensor(_CODE_OF_DOUBLE, dtype=torch.uint8, device=x.device)
    codes = table[(2 * values.abs()).to(torch.int64)] + _SIGN * torch.signbit(values).to(torch.uint8)
    return codes, e4m3_encode(scales[..., :: lo.GROUP] / second).view(torch.uint8), second.flatten()


def _tiles(codes, scales, tiles, code_of, scale_of, size) -> Tensor:
    return _place(codes.unflatten(1, (tiles, -1)), scales.unflatten(1, (tiles, -1)), code_of, scale_of, size)


def _place(codes: Tensor, scales: Tensor, code_of, scale_of, size: int) -> Tensor:
    """Tiles of `codes` [BH, tiles, rows, columns] and `scales` [BH, tiles, rows, groups] as bytes [BH, tiles, size]."""
    row, column = _grid(codes.shape[2], codes.shape[3], codes.device)
    nibbles = _scatter(codes, code_of(row, column), codes.shape[2] * codes.shape[3])
    image = torch.zeros((*codes.shape[:2], size), dtype=torch.uint8, device=codes.device)
    image[..., : nibbles.shape[-1] // 2] = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    row, group = _grid(scales.shape[2], scales.shape[3], scales.device)
    image[..., scale_of(row, group).flatten()] = scales.flatten(-2)
    return image


def _grid(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None, :]


def _scatter(tiles: Tensor, offsets: Tensor, size: int) -> Tensor:
    """Place each [rows, columns] tile of `tiles` [..., rows, columns] at `offsets` of a zeroed image [..., size]."""
    image = torch.zeros((*tiles.shape[:-2], size), dtype=tiles.dtype, device=tiles.device)
    image[..., offsets.flatten()] = tiles.flatten(-2)
    return image
