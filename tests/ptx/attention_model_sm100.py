"""What the tcgen05 attention kernels compute, on matrices: it reads the same images and knows no lanes or barriers.

As `attention_model` for sm_90a: it follows `kernels.cute.attention_sm100` in everything that moves a result by more
than the last bits. Against it a kernel's fault shows at a tenth of the error that quantisation alone makes.
"""

from __future__ import annotations

import math

import numpy as np
from vc_attention.kernels.cute import layouts as lo
from vc_attention.kernels.cute.config import BETA, TOP_LOG2
from vc_attention.kernels.cute.config_sm100 import Sm100Config

from . import formats as fm
from .attention_model import _GUARD, _MAGIC, _array, _gather, _restore

_CODES = 8


def attention(images, config: Sm100Config, scale: float | None = None) -> np.ndarray:
    """float64 [B H, Lq, 128] before the last rounding. images: of `kernels.launch.images`."""
    scale_log2 = np.float32((lo.HEAD_DIM**-0.5 if scale is None else scale) * math.log2(math.e))
    return np.stack([_head(images, config, head, scale_log2) for head in range(images.batch * images.heads)])


def _head(images, config: Sm100Config, head: int, scale: np.float32) -> np.ndarray:
    unit = np.float32(_CODES if config.probability == "expcast_wide" else 1)
    q, k = (
        _gather(_array(image)[head].view(np.uint8 if config.scores == "fp8" else np.int8), rows, lo.HEAD_DIM, offset)
        for image, rows, offset in ((images.q, lo.QUERY_TILE, lo.q_offset), (images.k, lo.KEY_TILE, lo.k_offset))
    )
    q, k = ((fm.E4M3[x] if config.scores == "fp8" else x).astype(np.float64) for x in (q, k))
    v = fm.E4M3[_gather(_array(images.v)[head], lo.KEY_TILE, lo.HEAD_DIM, lambda t, c: lo.v_offset(c, t))]
    row_scale, key_scale = _array(images.qs)[head] * (scale * unit), _array(images.ks)[head]
    scores = (q @ k.T).astype(np.float32)
    blocks = -(-images.lkv // lo.BLOCK)
    mu, bias = np.zeros((blocks, lo.HEAD_DIM)), np.zeros((len(q), blocks), np.float32)
    if config.key_means:
        queries = fm.from_bf16(_gather(_array(images.qb)[head], lo.QUERY_TILE, lo.HEAD_DIM, lo.qb_offset))
        means = fm.from_bf16(_gather(_array(images.km)[head], lo.MEAN_GROUP, lo.HEAD_DIM, lo.km_offset))
        bias = (queries.astype(np.float64) @ means[:blocks].T.astype(np.float64)).astype(np.float32) * (scale * unit)
    if config.demean:
        flat = _gather(_array(images.mu)[head], lo.MEAN_WIDTH, lo.HEAD_DIM, lambda b, c: lo.mu_offset(c, b))
        groups = fm.from_bf16(flat).reshape(-1, 2, lo.MEAN_GROUP, lo.HEAD_DIM)
        mu = groups[:, 0].reshape(-1, lo.HEAD_DIM)[:blocks].astype(np.float64)
    maximum = np.full(len(q), -np.inf, np.float32)
    out, total = np.zeros((len(q), lo.HEAD_DIM)), np.zeros(len(q))
    for group in range(0, blocks, lo.MEAN_GROUP):
        sums = np.zeros((len(q), lo.MEAN_GROUP))
        for block in range(group, min(group + lo.MEAN_GROUP, blocks)):
            columns = slice(block * lo.BLOCK, (block + 1) * lo.BLOCK)
            p, exact, rescale, maximum = _softmax(
                config, scores[:, columns], row_scale * key_scale[block], bias[:, block], maximum
            )
            valid = np.arange(columns.start, columns.stop) < images.lkv
            out = out * rescale[:, None] + p @ v[columns]
            total, sums = total * rescale, sums * rescale[:, None]
            sums[:, block - group] += np.where(valid, exact if config.exact_sums else p, 0.0).sum(1)
        out, total = _restore(out, total, sums, mu[group : group + lo.MEAN_GROUP], rounded=config.demean)
    return (out / total[:, None] * _array(images.sv)[head])[: images.lq]


def _softmax(config, scores, a, bias, maximum):
    """P as values [R, 128], the same unrounded, the rescale factors and the new maxima (in codes for ExpCast)."""
    expcast = config.probability == "expcast_wide"
    new = np.maximum(maximum, scores.max(1) * a + bias)
    rescale = np.exp2((maximum - new).astype(np.float64) / (_CODES if expcast else 1))
    b = np.float32(_CODES * (TOP_LOG2 + 7.0) + BETA if expcast else TOP_LOG2) - new + bias
    if expcast:
        b = b - np.float32(2.0**-22) * np.abs(new) - np.float32(2.0**-22) * np.abs(bias)
    if config.scores == "int8":
        scores, b = scores + _MAGIC, fm.fma(np.full_like(a, -_GUARD), a, b)
    shape = np.zeros(scores.shape, np.float32)
    y = fm.fma(scores, a[:, None] + shape, b[:, None] + shape)
    if expcast:
        p = fm.E4M3[np.clip(np.rint(y), 0, 255).astype(np.int64)]
        return p, p, rescale, new
    exact = np.exp2(y.astype(np.float64)).astype(np.float32)
    return fm.E4M3[fm.to_e4m3(exact)], exact.astype(np.float64), rescale, new
