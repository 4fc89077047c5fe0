"""What the NVFP4 attention kernel computes, on matrices: it reads the same images and knows no lanes or barriers.

Matrices come from the images through `layouts_nvfp4`, whose functions `test_layouts_nvfp4` compares with CuTe's. P is
quantised by the specification's own `nvfp4`; what the kernel does beyond it is that l and the means see row sums
rounded to bf16 (with means), and that the output is rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from vc_attention.kernels.cute import layouts_nvfp4 as lo
from vc_attention.kernels.launch.images import Images
from vc_attention.kernels.spec.formats import e2m1, e4m3

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TOP = 448.0 * 6.0


@dataclass
class Operands:
    """fp64 matrices of one head: q [Lq', 128], k [Lkv', 128], v [Lkv', 128] and ones [Lkv', 8] with padding, scales
    applied; mu and km [8 ng, 128], qb [Lq', 128] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    ones: Tensor
    mu: Tensor | None
    qb: Tensor | None
    km: Tensor | None


def _codes(image: Tensor, rows: int, columns: int, place) -> Tensor:
    """Values [tiles, rows, columns] of the E2M1 codes of `image` [tiles, bytes]."""
    nibbles = torch.stack((image & 15, image >> 4), -1).flatten(1)
    table = torch.tensor(_E2M1 + tuple(-x for x in _E2M1), dtype=torch.float64)
    return table[nibbles[:, place(torch.arange(rows)[:, None], torch.arange(columns)[None])].long()]


def _scales(image: Tensor, rows: int, place) -> Tensor:
    """Scales [tiles, rows, 128] of the E4M3 bytes of `image`."""
    groups = lo.HEAD_DIM // lo.GROUP
    bytes_ = image[:, place(torch.arange(rows)[:, None], torch.arange(groups)[None])]
    return bytes_.view(torch.float8_e4m3fn).double().repeat_interleave(lo.GROUP, -1)


def _plain(image: Tensor, rows: int, columns: int, place) -> Tensor:
    return image[:, place(torch.arange(rows)[:, None], torch.arange(columns)[None])].double().flatten(0, 1)


def operands(images: Images, head: int) -> Operands:
    """Decode one of the batch * heads heads."""
    q, k, v = images.q[head], images.k[head], images.v[head]
    values = _codes(v, lo.V_ROWS, lo.BLOCK, lo.v_code)
    residual = values[:, : lo.HEAD_DIM] * _scales(v, lo.HEAD_DIM, lo.v_scale)
    return Operands(
        (_codes(q, 128, 128, lo.q_code) * _scales(q, 128, lo.q_scale)).flatten(0, 1) * images.qs[head].double(),
        (_codes(k, 128, 128, lo.k_code) * _scales(k, 128, lo.k_scale)).flatten(0, 1) * images.ks[head].double(),
        residual.transpose(1, 2).flatten(0, 1),
        values[:, lo.HEAD_DIM :].transpose(1, 2).flatten(0, 1),
        None
        if images.mu is None
        else _plain(images.mu[head], 8, 128, lambda block, channel: lo.mu_offset(channel, block)),
        None if images.qb is None else _plain(images.qb[head], 128, 128, lo.qb_offset),
        None if images.km is None else _plain(images.km[head], 8, 128, lo.km_offset),
    )


def probabilities(u: Tensor) -> Tensor:
    """P of one block in units of which a row maximum has 2688: u [rows, 128], log2 units, <= 0."""
    groups = (torch.exp2(u) * _TOP).unflatten(-1, (-1, lo.GROUP))
    scale = e4m3((groups.amax(-1, keepdim=True) / 6.0).float()).double()
    ratio = torch.where(scale > 0, groups / torch.where(scale > 0, scale, 1.0), 0.0)
    return (e2m1(ratio.float()).double() * scale).flatten(-2)


def attention(images: Images, scale: float, output: torch.dtype = torch.bfloat16) -> Tensor:
    """[B, H, Lq, 128] of `output`, from nothing but the images. scale: of the scores, without log2 e."""
    heads = [_one_head(operands(images, n), scale * math.log2(math.e)) for n in range(images.batch * images.heads)]
    out = torch.stack(heads)[:, : images.lq] * images.sv.double()[:, None, None]
    return out.to(output).unflatten(0, (images.batch, images.heads))


def _one_head(x: Operands, log2_scale: float) -> Tensor:
    rows = x.q.shape[0]
    maximum = torch.full((rows, 1), -math.inf, dtype=torch.float64)
    acc = torch.zeros(rows, lo.HEAD_DIM, dtype=torch.float64)
    total, sums = torch.zeros(rows, 1, dtype=torch.float64), torch.zeros(rows, lo.MEAN_GROUP, dtype=torch.float64)
    blocks = x.k.shape[0] // lo.BLOCK
    for j in range(blocks):
        tile = slice(j * lo.BLOCK, (j + 1) * lo.BLOCK)
        s = x.q @ x.k[tile].T * log2_scale
        if x.km is not None:
            s = s + x.qb @ x.km[j][:, None] * log2_scale
        new = torch.maximum(maximum, s.amax(-1, keepdim=True))
        p, rescale = probabilities(s - new), torch.exp2(maximum - new)
        acc, total, sums = acc * rescale, total * rescale, sums * rescale
        acc = acc + p @ x.v[tile]
        sums = sums + p @ x.ones[tile]
        maximum = new
        if x.mu is None:
            continue
        if j % lo.MEAN_GROUP == lo.MEAN_GROUP - 1 or j == blocks - 1:
            rounded = sums.to(torch.bfloat16).double()
            first = j // lo.MEAN_GROUP * lo.MEAN_GROUP
            acc = acc + rounded @ x.mu[first : first + lo.MEAN_GROUP]
            total, sums = total + rounded.sum(-1, keepdim=True), torch.zeros_like(sums)
    if x.mu is None:
        total = sums.sum(-1, keepdim=True)
    return torch.where(total > 0, acc / total, 0.0)
