"""Tile images: the offset functions are bijections, and the reference preparation puts the right numbers there."""

from __future__ import annotations

import pytest
import torch
from vc_attention.kernels import FAST, Plan
from vc_attention.kernels.cute import layouts as lo
from vc_attention.kernels.cute.reference import prepare
from vc_attention.kernels.spec.attention import attention as spec_attention


@pytest.mark.parametrize(
    ("offset", "rows", "columns", "size"),
    [
        (lo.q_offset, lo.QUERY_TILE, lo.HEAD_DIM, 16384),
        (lo.k_offset, lo.KEY_TILE, lo.HEAD_DIM, 32768),
        (lo.v_offset, lo.V_ROWS, lo.KEY_TILE, 34816),
        (lo.mu_offset, lo.HEAD_DIM, lo.MEAN_WIDTH, 2048),
        (lo.qb_offset, lo.QUERY_TILE, lo.HEAD_DIM, 16384),
        (lo.km_offset, lo.MEAN_GROUP, lo.HEAD_DIM, 1024),
    ],
)
def test_offsets_are_bijections(offset, rows, columns, size):
    places = {offset(row, column) for row in range(rows) for column in range(columns)}
    assert places == set(range(size))


def test_slots_and_tokens_are_inverse():
    assert [lo.token_slot(lo.slot_token(k)) for k in range(128)] == list(range(128))
    assert [lo.slot_token(k) for k in range(16)] == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]


def test_offsets_take_tensors():
    row, column = torch.arange(136)[:, None], torch.arange(256)[None, :]
    table = lo.v_offset(row, column)
    assert all(table[r, c] == lo.v_offset(r, c) for r, c in ((0, 0), (7, 129), (135, 255), (128, 31)))


def _from_images(images, plan: Plan, scale: float) -> torch.Tensor:
    """Attention computed from nothing but the images, in fp64: what the kernel should return, up to its rounding."""
    n, nk = images.q.shape[0], images.k.shape[1]

    def take(x, offsets, rows):
        return x.reshape(n, x.shape[1], -1)[..., offsets.flatten()].view(n, -1, rows, offsets.shape[1]).double()

    r128, r256, c128 = torch.arange(128)[:, None], torch.arange(256)[:, None], torch.arange(128)[None]
    q = take(images.q, lo.q_offset(r128, c128), 128).flatten(1, 2) * images.qs[..., None]
    k = take(images.k, lo.k_offset(r256, c128), 256).flatten(1, 2) * images.ks.repeat_interleave(128, 1)[..., None]
    s = q @ k.transpose(1, 2)
    rows, r8 = torch.arange(136)[:, None], torch.arange(8)[:, None]
    decoded = images.v.view(torch.float8_e4m3fn).float()
    vt = take(decoded, lo.v_offset(rows, torch.arange(256)[None]), 136).transpose(2, 3).flatten(1, 2)
    v, ones = vt[..., :128], vt[..., 128:]
    if plan.key_means:
        qb = take(images.qb, lo.qb_offset(r128, c128), 128).flatten(1, 2)
        km = take(images.km, lo.km_offset(r8, c128), 8).flatten(1, 2)[:, : 2 * nk].repeat_interleave(128, 1)
        s = s + qb @ km.transpose(1, 2)
    if plan.demean:
        mu = take(images.mu, lo.mu_offset(c128, r8), 8).flatten(1, 2)[:, : 2 * nk]
        v = v + ones.sum(-1, keepdim=True) * mu.repeat_interleave(128, 1)
    assert torch.equal(ones.sum(-1) > 0, torch.arange(nk * 256)[None].expand(n, -1) < images.lkv)
    block = torch.arange(nk * 256) // 128 % 8
    assert torch.all(ones[..., torch.arange(8)[None] != block[:, None]] == 0)
    p = torch.softmax(s * scale, -1) * ones.sum(-1)[:, None]
    out = p @ v / p.sum(-1, keepdim=True) * images.sv[:, None]
    return out[:, : images.lq].view(images.batch, images.heads, images.lq, 128)


@pytest.mark.parametrize("plan", [FAST, FAST.without_smoothing(), Plan(key_means=True, probability="exp2")])
@pytest.mark.parametrize(("lq", "lkv"), [(5, 1), (130, 300), (128, 256), (64, 1100)])
def test_images_hold_the_call(plan, lq, lkv):
    torch.manual_seed(lq + lkv)
    q, k, v = (torch.randn(1, 2, n, 128) for n in (lq, lkv, lkv))
    v = v + 2 * torch.randn(1, 2, 1, 128)
    labels = torch.randint(0, 16, (1, 2, lkv), dtype=torch.uint8)
    out = _from_images(prepare(q, k, v, plan, labels), plan, 128**-0.5)
    exact = torch.softmax((q.double() @ k.double().transpose(2, 3)) * 128**-0.5, -1) @ v.double()
    spec = spec_attention(q, k, v, Plan(probability="exp2", demean=plan.demean, key_means=plan.key_means), labels)
    error, spec_error = ((x - exact).norm() / exact.norm() for x in (out, spec))
    assert error < max(1.2 * spec_error, 1e-3)
