"""Images of the 8-bit mma.sync kernels: bijections, the fragments that lanes load from them, and the reference's
numbers."""

from __future__ import annotations

import pytest
import torch
from vc_attention.kernels import FAITHFUL, FAST, FOUR_BIT, Plan
from vc_attention.kernels.cute import layouts_mma8 as lo
from vc_attention.kernels.cute.config_mma8 import Mma8Config, config_of
from vc_attention.kernels.cute.reference_mma8 import prepare
from vc_attention.kernels.spec.attention import attention as spec_attention


@pytest.mark.parametrize(
    ("offset", "rows", "columns", "size"),
    [
        (lo.q_offset, lo.QUERY_TILE, lo.HEAD_DIM, lo.Q_BYTES),
        (lo.k_offset, lo.BLOCK, lo.HEAD_DIM, lo.K_BYTES),
        (lo.v_offset, lo.V_ROWS, lo.BLOCK, lo.V_BYTES),
        (lo.mu_offset, lo.HEAD_DIM, lo.MEAN_GROUP, lo.MU_ELEMENTS),
        (lo.qb_offset, lo.QUERY_TILE, lo.HEAD_DIM, lo.QB_ELEMENTS),
        (lo.km_offset, lo.MEAN_GROUP, lo.HEAD_DIM, lo.KM_ELEMENTS),
    ],
)
def test_offsets_are_bijections(offset, rows, columns, size):
    places = {offset(row, column) for row in range(rows) for column in range(columns)}
    assert places == set(range(size))


def test_key_rows_are_inverse():
    assert [lo.key_row(lo.row_key(m)) for m in range(128)] == list(range(128))


def test_offsets_take_tensors():
    row, column = torch.arange(136)[:, None], torch.arange(128)[None, :]
    table = lo.v_offset(row, column)
    assert all(table[r, c] == lo.v_offset(r, c) for r, c in ((0, 0), (7, 127), (135, 64), (128, 31)))


def _a_fragment(a: torch.Tensor, step: int) -> torch.Tensor:
    """Words of an m16 fragment [32 lanes, 4, bytes] from panels [2 row groups, width / 64, 32 lanes, 16]: `step` of
    K."""
    half = a[:, step // 2, :, 8 * (step % 2) : 8 * (step % 2) + 8].unflatten(-1, (2, 4))
    return torch.stack((half[0, :, 0], half[1, :, 0], half[0, :, 1], half[1, :, 1]), 1)


def _mma(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """D [16, 8] of one mma.m16n8k32 of bytes, from fragments as the PTX ISA states them.

    a [32, 4, 4]: a0 row g, k 4t..; a1 row g + 8; a2 row g, k 16 + 4t..; a3 row g + 8. b [32, 2, 4]: b0 k 4t.., column
    g; b1 k 16 + 4t... g = lane // 4, t = lane % 4.
    """
    rows, columns = torch.zeros(16, 32, dtype=a.dtype), torch.zeros(32, 8, dtype=b.dtype)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for word in range(4):
            start = 16 * (word // 2) + 4 * t
            rows[g + 8 * (word % 2), start : start + 4] = a[lane, word]
        for word in range(2):
            columns[16 * word + 4 * t : 16 * word + 4 * t + 4, g] = b[lane, word]
    return rows @ columns


def _panels(image: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """What 128-bit loads see: [row group, width / 64, lane, 16 bytes]."""
    return image.view(rows // 8, width // 64, 32, 16)


def test_fragments_make_the_products():
    """Q K^T of one warp and one tile from the lanes' words, and P V^T of the accumulator's own keys."""
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randint(-127, 128, (128, 128), generator=g).double() for _ in range(2))
    v = torch.randint(-9, 9, (128, 136), generator=g).double()
    q_image, k_image, v_image = (torch.zeros(n, dtype=torch.float64) for n in (lo.Q_BYTES, lo.K_BYTES, lo.V_BYTES))
    r, c = torch.arange(128)[:, None], torch.arange(128)[None]
    q_image[lo.q_offset(r, c)] = q
    k_image[lo.k_offset(r, c)] = k
    v_image[lo.v_offset(torch.arange(136)[:, None], c)] = v.T.contiguous()
    warp = 3
    queries = _panels(q_image, 128, 128)[2 * warp : 2 * warp + 2]
    keys, values = _panels(k_image, 128, 128), _panels(v_image, 136, 128)
    scores = torch.zeros(16, 128, dtype=torch.float64)
    for i in range(16):
        for step in range(4):
            b = keys[i, step // 2, :, 8 * (step % 2) : 8 * (step % 2) + 8].unflatten(-1, (2, 4))
            scores[:, 8 * i : 8 * i + 8] += _mma(_a_fragment(queries, step), b)
    want = q[16 * warp : 16 * warp + 16] @ k.T
    assert torch.equal(scores, want[:, [lo.row_key(m) for m in range(128)]])
    # The word of rows g (+ 8) and tiles 2 x, 2 x + 1 is what a lane packs; four of them are a chunk of 16 tokens.
    chunks = torch.zeros(2, 2, 32, 16, dtype=torch.float64)
    for half in range(2):
        for row in range(2):
            for lane in range(32):
                for i in range(8):
                    column = 8 * (8 * half + i) + 2 * (lane % 4)
                    chunks[row, half, lane, 2 * i : 2 * i + 2] = scores[lane // 4 + 8 * row, column : column + 2]
    out = torch.zeros(16, 136, dtype=torch.float64)
    for i in range(17):
        for step in range(4):
            b = values[i, step // 2, :, 8 * (step % 2) : 8 * (step % 2) + 8].unflatten(-1, (2, 4))
            out[:, 8 * i : 8 * i + 8] += _mma(_a_fragment(chunks, step), b)
    assert torch.equal(out, want @ v)


def _from_images(images, plan: Plan, scale: float) -> torch.Tensor:
    """Attention computed from nothing but the images, in fp64: what the kernel should return, up to its rounding."""
    n, nk = images.q.shape[0], images.k.shape[1]

    def take(x, offsets):
        return x[..., offsets.flatten()].view(n, -1, *offsets.shape).double()

    rows, c128 = torch.arange(136)[:, None], torch.arange(128)[None]
    r128, r8 = rows[:128], rows[:8]
    q = take(images.q, lo.q_offset(r128, c128)).flatten(1, 2) * images.qs[..., None]
    k = take(images.k, lo.k_offset(r128, c128)).flatten(1, 2) * images.ks.repeat_interleave(128, 1)[..., None]
    s = q @ k.transpose(1, 2)
    vt = take(images.v.view(torch.float8_e4m3fn).float(), lo.v_offset(rows, c128)).transpose(2, 3).flatten(1, 2)
    v, ones = vt[..., :128], vt[..., 128:]
    if plan.key_means:
        qb = take(images.qb, lo.qb_offset(r128, c128)).flatten(1, 2)
        km = take(images.km, lo.km_offset(r8, c128)).flatten(1, 2)[:, :nk].repeat_interleave(128, 1)
        s = s + qb @ km.transpose(1, 2)
    if plan.demean:
        mu = take(images.mu, lo.mu_offset(c128, r8)).flatten(1, 2)
        assert torch.all(mu[:, nk:] == 0)
        v = v + ones.sum(-1, keepdim=True) * mu[:, :nk].repeat_interleave(128, 1)
    assert torch.equal(ones.sum(-1) > 0, torch.arange(nk * 128)[None].expand(n, -1) < images.lkv)
    block = torch.arange(nk * 128) // 128 % 8
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


def test_padding():
    """Rows and keys beyond the lengths: queries 0, keys one real key of the last block, V^T and its ones rows 0."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 1, n, 128) for n in (130, 200, 200))
    images = prepare(q, k, v, Plan(key_means=True))
    r, c = torch.arange(136)[:, None], torch.arange(128)[None]
    assert torch.all(images.q[0, 1, lo.q_offset(r[2:128], c)] == 0)
    assert torch.all(images.qb[0, 1, lo.qb_offset(r[2:128], c)] == 0)
    assert torch.all(images.qs[0, 144:] == 1)
    keys = images.k[0, 1, lo.k_offset(r[:128], c)]
    assert torch.equal(keys[72:], keys[:1].expand(56, -1))
    assert torch.all(images.v[0, 1, lo.v_offset(r, c)][:, 72:] == 0)
    means = images.km[0, 0, lo.km_offset(r[:8], c)]
    assert torch.equal(means[2:], means[1:2].expand(6, -1))


@pytest.mark.parametrize("plan", [FAST, FAST.without_smoothing()])
def test_values_for_fp16_sums(plan):
    """V^T for fp16 accumulators: the same call by a power of two, and no tile's sum leaves the range of fp16."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 2, n, 128) for n in (8, 300, 300))
    full, small = (prepare(q, k, v, plan, None, accumulate) for accumulate in ("f32", "f16"))
    r, c = torch.arange(128)[:, None], torch.arange(128)[None]
    wide, narrow = (x.v.view(torch.float8_e4m3fn).float()[..., lo.v_offset(r, c)] for x in (full, small))
    assert narrow.abs().max() == lo.VALUE_TOP["f16"]
    assert 448 * lo.BLOCK * lo.VALUE_TOP["f16"] < torch.finfo(torch.float16).max
    assert torch.equal(small.sv, full.sv * 512)
    normal = narrow.abs() > 2.0**-6
    assert torch.equal(wide[normal], 512 * narrow[normal])
    assert (wide - 512 * narrow).abs().max() <= 0.5
    if plan.demean:
        assert torch.equal(full.mu.float(), 512 * small.mu.float())


def test_plans_have_kernels():
    assert config_of(FAST, "bf16") == Mma8Config("expcast_wide", True, False, "bf16")
    assert config_of(FAITHFUL.without_smoothing(), "fp16") == Mma8Config("exp2", False, False, "fp16")
    assert config_of(FOUR_BIT, "bf16") is None
    assert config_of(FAST, "") is None
    with pytest.raises(ValueError, match="8-bit images"):
        prepare(*(torch.zeros(1, 1, 4, 128) for _ in range(3)), FOUR_BIT)
