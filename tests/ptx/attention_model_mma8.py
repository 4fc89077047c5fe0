"""What the 8-bit mma.sync attention kernels compute, on matrices: it reads the same images and knows no lanes.

As `attention_model` for sm_90a: it follows `kernels.cute.attention_mma8` in everything that moves a result by more than
the last bits. Against it a kernel's fault shows at a tenth of the error that quantisation alone makes.
"""

from __future__ import annotations

import math

import numpy as np
from vc_attention.kernels.cute import layouts_mma8 as lo
from vc_attention.kernels.cute.config import BETA, TOP_LOG2
from vc_attention.kernels.cute.config_mma8 import Mma8Config

from . import formats as fm
from .attention_model import _CODES, _GUARD, _MAGIC, _array, _gather, _restore


def attention(images, config: Mma8Config, scale: float | None = None) -> np.ndarray:
    """float64 [B H, Lq, 128] before the last rounding. images: of `kernels.launch.images`."""
    scale_log2 = np.float32((lo.HEAD_DIM**-0.5 if scale is None else scale) * math.log2(math.e))
    return np.stack([_head(images, config, head, scale_log2) for head in range(images.batch * images.heads)])


def _head(images, config: Mma8Config, head: int, scale: np.float32) -> np.ndarray:
    q = _gather(_array(images.q)[head], lo.QUERY_TILE, lo.HEAD_DIM, lo.q_offset).astype(np.int64)
    k = _gather(_array(images.k)[head], lo.BLOCK, lo.HEAD_DIM, lo.k_offset).astype(np.int64)
    v = fm.E4M3[_gather(_array(images.v)[head], lo.BLOCK, lo.HEAD_DIM, lambda t, c: lo.v_offset(c, t))]
    row_scale, key_scale = _array(images.qs)[head] * scale, _array(images.ks)[head]
    scores, blocks = q @ k.T, len(k) // lo.BLOCK
    bias, mu = np.zeros((len(q), blocks), np.float32), np.zeros((blocks, lo.HEAD_DIM))
    if config.key_means:
        queries = fm.from_bf16(_gather(_array(images.qb)[head], lo.QUERY_TILE, lo.HEAD_DIM, lo.qb_offset))
        means = fm.from_bf16(_gather(_array(images.km)[head], lo.MEAN_GROUP, lo.HEAD_DIM, lo.km_offset))
        bias = (queries.astype(np.float64) @ means[:blocks].T.astype(np.float64)).astype(np.float32) * scale
    if config.demean:
        flat = _gather(_array(images.mu)[head], lo.MEAN_GROUP, lo.HEAD_DIM, lambda b, c: lo.mu_offset(c, b))
        mu = fm.from_bf16(flat)[:blocks].astype(np.float64)
    maximum = np.full(len(q), -np.inf, np.float32)
    out, total = np.zeros((len(q), lo.HEAD_DIM)), np.zeros(len(q))
    for group in range(0, blocks, lo.MEAN_GROUP):
        sums = np.zeros((len(q), lo.MEAN_GROUP))
        for block in range(group, min(group + lo.MEAN_GROUP, blocks)):
            columns = slice(block * lo.BLOCK, (block + 1) * lo.BLOCK)
            scales = row_scale * key_scale[block]
            p, exact, rescale, maximum = _softmax(config, scores[:, columns], scales, bias[:, block], maximum)
            valid = np.arange(columns.start, columns.stop) < images.lkv
            out = out * rescale[:, None] + p @ v[columns]
            total, sums = total * rescale, sums * rescale[:, None]
            sums[:, block - group] += np.where(valid, exact if config.exact_sums else p, 0.0).sum(1)
        out, total = _restore(out, total, sums, mu[group : group + lo.MEAN_GROUP], rounded=config.demean)
    return (out / total[:, None] * _array(images.sv)[head])[: images.lq]


def _softmax(config, scores, scale, bias, maximum):
    """P as values [R, 128], the same unrounded, the rescale factors and the new maxima."""
    new = np.maximum(maximum, scores.max(1).astype(np.float32) * scale + bias)
    rescale = np.exp2((maximum - new).astype(np.float64))
    offset = new - bias
    if config.probability == "expcast_wide":
        a, top = scale * _CODES, np.float32(8 * (TOP_LOG2 + 7.0) + BETA) - _CODES * offset
    else:
        a, top = scale, np.float32(TOP_LOG2) - offset
    b = fm.fma(np.full_like(a, -_GUARD), a, top.astype(np.float32))
    shape = np.zeros(scores.shape, np.float32)
    y = fm.fma((scores + int(_MAGIC)).astype(np.float32), a[:, None] + shape, b[:, None] + shape)
    if config.probability == "expcast_wide":
        p = fm.E4M3[np.clip(np.rint(y), 0, 255).astype(np.int64)]
        return p, p, rescale, new
    exact = np.exp2(y.astype(np.float64)).astype(np.float32)
    return fm.E4M3[fm.to_e4m3(exact)], exact.astype(np.float64), rescale, new
