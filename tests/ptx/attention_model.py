"""What the sm_90a attention kernel computes, on matrices: it reads the same images and knows no lanes or barriers.

It follows `kernels.cute.attention_sm90` in everything that moves a result by more than the last bits: integer scores,
one maximum for 256 keys, P in codes, exact or coded row sums, means restored with row sums of two bf16. Against it a
kernel's fault shows at a tenth of the error that quantisation alone makes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from vc_attention.kernels.cute import layouts as lo
from vc_attention.kernels.cute.config import BETA, TOP_LOG2, AttentionConfig

from . import formats as fm

#: The kernel adds integer scores to this float's bits, and rounds scores as it does (`softmax._MAGIC_GUARDED`).
_MAGIC = np.float32(12582912.0)
_GUARD = np.float32(12582914.0)
_CODES = np.float32(8.0)


def _array(tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _gather(tiles: np.ndarray, rows: int, columns: int, offset) -> np.ndarray:
    """Matrix [tiles * rows, columns] of images [tiles, size] through an offset function of `layouts`."""
    index = offset(np.arange(rows)[:, None], np.arange(columns)[None, :])
    return tiles.reshape(len(tiles), -1)[:, index].reshape(-1, columns)


def attention(images, config: AttentionConfig, scale: float | None = None) -> np.ndarray:
    """float64 [B H, Lq, 128] before the last rounding. images: of `kernels.launch.images`."""
    scale_log2 = np.float32((lo.HEAD_DIM**-0.5 if scale is None else scale) * math.log2(math.e))
    return np.stack([_head(images, config, head, scale_log2) for head in range(images.batch * images.heads)])


def _head(images, config: AttentionConfig, head: int, scale: np.float32) -> np.ndarray:
    q = _gather(_array(images.q)[head], lo.QUERY_TILE, lo.HEAD_DIM, lo.q_offset).astype(np.int64)
    k = _gather(_array(images.k)[head], lo.KEY_TILE, lo.HEAD_DIM, lo.k_offset).astype(np.int64)
    v_codes = _gather(_array(images.v)[head], lo.KEY_TILE, lo.HEAD_DIM, lambda t, c: lo.v_offset(c, t))
    v = fm.E4M3[v_codes]
    row_scale, key_scale = _array(images.qs)[head] * scale, _array(images.ks)[head]
    scores = q @ k.T
    blocks = len(k) // lo.BLOCK
    bias = np.zeros((len(q), blocks), np.float32)
    if config.key_means:
        queries = fm.from_bf16(_gather(_array(images.qb)[head], lo.QUERY_TILE, lo.HEAD_DIM, lo.qb_offset))
        means = fm.from_bf16(_gather(_array(images.km)[head], lo.MEAN_GROUP, lo.HEAD_DIM, lo.km_offset))
        bias = (queries.astype(np.float64) @ means[:blocks].T.astype(np.float64)).astype(np.float32) * scale
    mu = np.zeros((blocks, lo.HEAD_DIM))
    if config.demean:
        flat = _gather(_array(images.mu)[head], lo.MEAN_WIDTH, lo.HEAD_DIM, lambda b, c: lo.mu_offset(c, b))
        groups = fm.from_bf16(flat).reshape(-1, 2, lo.MEAN_GROUP, lo.HEAD_DIM)
        if not (groups[:, 0] == groups[:, 1]).all():
            raise ValueError("the two copies of the means differ")
        mu = groups[:, 0].reshape(-1, lo.HEAD_DIM)[:blocks].astype(np.float64)
    maximum = np.full(len(q), -np.inf, np.float32)
    out, total = np.zeros((len(q), lo.HEAD_DIM)), np.zeros(len(q))
    sums = np.zeros((len(q), lo.MEAN_GROUP))
    first = 0
    for tile in range(len(k) // lo.KEY_TILE):
        if config.demean and tile and tile % lo.TILES_PER_GROUP == 0:
            out, total = _restore(out, total, sums, mu[first : first + lo.MEAN_GROUP])
            sums, first = np.zeros_like(sums), first + lo.MEAN_GROUP
        columns = slice(tile * lo.KEY_TILE, (tile + 1) * lo.KEY_TILE)
        p, exact, rescale, maximum = _softmax(
            config, scores[:, columns], row_scale, key_scale[2 * tile : 2 * tile + 2], bias[:, 2 * tile :], maximum
        )
        valid = np.arange(columns.start, columns.stop) < images.lkv
        weight = np.where(valid, exact if config.exact_sums else p, 0.0).reshape(len(q), 2, lo.BLOCK).sum(2)
        out = out * rescale[:, None] + p @ v[columns]
        sums = sums * rescale[:, None]
        total = total * rescale
        sums[:, 2 * tile % lo.MEAN_GROUP : 2 * tile % lo.MEAN_GROUP + 2] += weight
    out, total = _restore(out, total, sums, mu[first : first + lo.MEAN_GROUP], rounded=config.demean)
    return (out / total[:, None] * _array(images.sv)[head])[: images.lq]


def _softmax(config, scores, row_scale, key_scale, bias, maximum):
    """P as values [R, 256], the same unrounded, the rescale factors and the new maxima."""
    scale = row_scale[:, None] * key_scale[None, :]  # [R, 2], float32
    addend = bias[:, :2]
    halves = scores.reshape(len(scores), 2, lo.BLOCK)
    largest = (halves.max(2).astype(np.float32) * scale + addend).max(1)
    new = np.maximum(maximum, largest)
    rescale = np.exp2((maximum - new).astype(np.float64))
    offset = new[:, None] - addend
    if config.probability == "expcast_wide":
        a, top = scale * _CODES, np.float32(8 * (TOP_LOG2 + 7.0) + BETA) - _CODES * offset
    else:
        a, top = scale, np.float32(TOP_LOG2) - offset
    b = fm.fma(np.full_like(a, -_GUARD), a, top.astype(np.float32))
    y = fm.fma(
        (halves + int(_MAGIC)).astype(np.float32), a[..., None] + np.zeros(halves.shape, np.float32), b[..., None]
    )
    y = y.reshape(len(scores), lo.KEY_TILE)
    if config.probability == "expcast_wide":
        p = fm.E4M3[np.clip(np.rint(y), 0, 255).astype(np.int64)]
        return p, p, rescale, new
    exact = np.exp2(y.astype(np.float64)).astype(np.float32)
    return fm.E4M3[fm.to_e4m3(exact)], exact.astype(np.float64), rescale, new


def _restore(out, total, sums, mu, rounded=True):
    """Add the means by their row sums, each of which is two bf16 (all of it where there are no means)."""
    if rounded:
        high = fm.from_bf16(fm.to_bf16(sums.astype(np.float32))).astype(np.float64)
        sums = high + fm.from_bf16(fm.to_bf16((sums - high).astype(np.float32)))
    return out + sums[:, : len(mu)] @ mu, total + sums.sum(1)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 error."""
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


def mismatch(found: np.ndarray, expected: np.ndarray, output: str = "bf16") -> str | None:
    """Why `found` is not `expected` rounded to the output type; None if it is.

    0.003 relative L2 is twice what rounding to bf16 differs by; the limit of 0.05 standard deviations, and one step of
    bf16, at any element is for faults of a single lane, which hide in norms.
    """
    convert = (fm.to_bf16, fm.from_bf16) if output == "bf16" else (fm.to_f16, fm.from_f16)
    rounded = convert[1](convert[0](expected.astype(np.float32)))
    if not np.isfinite(found).all():
        return "values that are not finite"
    error = relative_error(found, rounded)
    worst = float(np.maximum(np.abs(found - rounded) - np.abs(rounded) / 128, 0).max() / max(expected.std(), 1e-30))
    if error > 0.003 or worst > 0.05:
        return f"relative error {error:.5f}, and {worst:.3f} standard deviations too many at the worst element"
    return None
