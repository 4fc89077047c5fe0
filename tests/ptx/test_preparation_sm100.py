"""The preparation and grouping kernels of B200, executed by the project's own launchers: images against the reference;
whole calls against the specification, and the self-test's golden cases on them.

B300's are the same PTX (`tests/kernels/test_preparation.py`), except that it has none for INT8 scores.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from ptx import on_torch
from vc_attention.benchmarks import preparation_checks
from vc_attention.kernels import FAITHFUL, FAST
from vc_attention.kernels.cute import layouts as lo
from vc_attention.kernels.cute import reference
from vc_attention.kernels.launch import prepare as launch
from vc_attention.kernels.launch import selftest
from vc_attention.kernels.spec import grouping as spec_grouping
from vc_attention.kernels.spec import scores as spec_scores
from vc_attention.kernels.spec.attention import attention as spec_attention
from vc_attention.kernels.spec.formats import e4m3_decode

pytestmark = pytest.mark.xdist_group("cubins")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = replace(FAST, scores="fp8")
PLANS = {
    "fp8, v": FP8,
    "fp8, v and k": replace(FP8, key_means=True),
    "fp8, none": FP8.without_smoothing(),
    "int8, v": FAITHFUL,
    "int8, v and k": replace(FAITHFUL, key_means=True),
    "fp8, k": replace(FP8, demean=False, key_means=True),
}
#: (batch, heads, Lq, Lkv): ragged tails in both, a block that is not there, one key, two mean groups.
SHAPES = ((1, 1, 20, 129), (1, 2, 5, 200), (1, 1, 130, 40), (2, 1, 1, 1), (1, 1, 3, 1100))
CASES = list(itertools.product(PLANS, DTYPES, (False, True)))


#: The libraries that the tests of this file have used.
USED: list[on_torch.InterpretedLibrary] = []


def interpreted(folder, **options) -> on_torch.InterpretedLibrary:
    USED.append(on_torch.InterpretedLibrary(folder, **options))
    return USED[-1]


@pytest.fixture
def folder(builds):
    """The kernels of B200."""
    return builds["sm_100a"]


def tensors(b: int, h: int, lq: int, lkv: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """q, k, v [B, H, L, 128], each in a memory layout of its own; K and V with channel offsets, V with block means."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(b, h, n, 128, generator=g) for n in (lq, lkv, lkv))
    k = k + 2 * torch.randn(b, h, 1, 128, generator=g)
    v = v + torch.randn(b, h, -(-lkv // 128), 128, generator=g).repeat_interleave(128, 2)[:, :, :lkv]
    kinds = preparation_checks.LAYOUTS
    return [preparation_checks.in_layout(x.to(dtype), kinds[(seed + n) % 4], n) for n, x in enumerate((q, k, v))]


def check_images(ours, theirs, lkv: int) -> None:
    for name, (limit, share) in preparation_checks.LIMITS.items():
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if a is None:
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if name == "v":
            different, count, worst = preparation_checks.compare_v(ours, theirs, lkv)
        else:
            different, count, worst = preparation_checks.compare(name, a, b, lkv)
        assert 0 <= different <= max(share * count, 2), (name, different, count)
        assert worst <= limit, (name, worst)


@pytest.mark.parametrize(("plan", "kind", "grouped"), CASES)
def test_images(folder, plan, kind, grouped):
    """Every code is the reference's but for ties of rounding, and every byte of the images is written."""
    n = CASES.index((plan, kind, grouped))
    plan = PLANS[plan]
    b, h, lq, lkv = SHAPES[n % len(SHAPES)]
    q, k, v = tensors(b, h, lq, lkv, DTYPES[kind], n)
    g = torch.Generator().manual_seed(n)
    labels = torch.randint(13, (b, h, lkv), generator=g).to(torch.uint8) if grouped else None
    library = interpreted(folder, schedule=("orderly", "eager", "random")[n % 3], seed=n)
    ours = on_torch.prepare(library, q, k, v, plan, labels)
    check_images(ours, reference.prepare(q, k, v, plan, labels if plan.demean or plan.key_means else None), lkv)


@pytest.mark.parametrize("kind", DTYPES)
def test_fp8_operands_are_those_of_the_specification(folder, kind):
    """What the codes and scales stand for is what `kernels.spec.scores` multiplies, whatever `reference` says.

    Among the rows zeros, numbers near the end of the 16-bit range and a key much longer than the others.
    """
    lq, lkv = 40, 300
    q, k, v = tensors(1, 1, lq, lkv, DTYPES[kind], 7)
    q, k = q.clone(), k.clone()
    q[:, :, :16] = 0
    q[:, :, 16:32] *= 2.0**12
    k[:, :, 130] *= 100
    images = on_torch.prepare(interpreted(folder, schedule="random"), q, k, v, FP8)
    row, channel = torch.arange(lo.QUERY_TILE)[:, None], torch.arange(lo.HEAD_DIM)
    found_q = e4m3_decode(images.q[0, 0].flatten()[lo.q_offset(row, channel)]) * images.qs[0][:, None]
    token = torch.arange(lkv)[:, None]
    tiles = images.k[0].flatten(1)
    codes = tiles[token // lo.KEY_TILE, lo.k_offset(token % lo.KEY_TILE, channel)]
    found_k = e4m3_decode(codes) * images.ks[0][token // lo.BLOCK]
    for found, x, query in ((found_q[:lq], q, True), (found_k, spec_scores.smooth_keys(k.float()), False)):
        rotated = spec_scores.hadamard(x.float())
        want = spec_scores.quantise_scores_operand(rotated, "fp8", "per_warp", query)[0, 0]
        # One step is an eighth of a number at most; ties of rounding, and a mean whose last bit differs.
        assert ((found - want).abs() <= want.abs() / 8 + 1e-30).all()
        assert ((found - want).abs() > 1e-5 * want.abs()).float().mean() < 2e-3
    zeros = images.q[0, 0].flatten()[lo.q_offset(row[:16], channel)]
    assert (zeros & 0x7F == 0).all() and (images.qs[0, :16] == 1).all()


def test_sorting(folder):
    """The token order is the stable argsort, over more than one chunk of 4096 tokens."""
    labels = torch.randint(256, (1, 1, 4200), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    library = interpreted(folder, schedule="random")
    with library.in_use():
        order = launch.token_order(library, labels)
    assert torch.equal(order.long(), torch.argsort(labels, dim=-1, stable=True))


@pytest.mark.parametrize("kind", DTYPES)
def test_grouping(folder, kind):
    """Cold and warm start: the specification's labels and centroids."""
    g = torch.Generator().manual_seed(3)
    centres, pick = torch.randn(1, 1, 7, 128, generator=g), torch.randint(7, (1, 1, 300), generator=g)
    v = (torch.randn(1, 1, 300, 128, generator=g) + 2 * centres[0, 0][pick]).to(DTYPES[kind])
    previous = None
    for seed in (0, 1):
        library = interpreted(folder, schedule="random", seed=seed)
        with library.in_use():
            labels, centroids = launch.group(library, v, 0 if seed else 7, previous)
        theirs, their_centroids = spec_grouping.group(v, 0 if seed else 7, previous)
        assert torch.equal(labels, theirs)
        assert torch.allclose(centroids, their_centroids, atol=1e-5)
        previous = centroids


def call(folder, q, k, v, plan, labels=None, scale=None, seed=0) -> torch.Tensor:
    """Preparation and attention by `launch.prepare` and `launch.attend`: [B, H, Lq, 128]."""
    library = interpreted(folder, schedule="random", seed=seed)
    images = on_torch.prepare(library, q, k, v, plan, labels)
    return on_torch.attend(library, images, plan, q.dtype, scale).transpose(1, 2)


CALLS = [
    (FP8, "bf16", True),
    (FP8.without_smoothing(), "fp16", False),
    (replace(FAITHFUL, scores="fp8"), "fp16", True),
    (FAITHFUL, "bf16", False),
]


@pytest.mark.parametrize(("plan", "kind", "grouped"), CALLS)
def test_the_whole_call(folder, plan, kind, grouped):
    """As near to exact attention as the plan is; the queries are more than one block's, the keys end inside a block."""
    n = CALLS.index((plan, kind, grouped))
    q, k, v = tensors(1, 1, 270, 270, DTYPES[kind], n)
    labels = torch.arange(270).remainder(5).to(torch.uint8)[None, None] if grouped else None
    ours = call(folder, q, k, v, plan, labels, seed=n).double()
    exact = torch.softmax(q.double() @ k.double().mT * 128**-0.5, -1) @ v.double()
    theirs = spec_attention(q, k, v, plan, labels).double()
    assert torch.isfinite(ours).all()
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm() + 2.0**-10 * exact.norm()


@pytest.mark.parametrize("plan", [plan for plan, _, _ in CALLS], ids=lambda plan: plan.encode())
def test_the_self_tests_golden_scores(folder, plan):
    """The golden case passes on the PTX, and its bounds hold a score that is wrong by a fiftieth against it."""
    case = selftest.Case("ptx", plan, torch.bfloat16, 0.0)

    def attention(q, k, v, plan, labels, scale, factor=1.0):
        return call(folder, q, k, v, plan, labels, factor * scale)

    assert selftest._golden(attention, case, torch.device("cpu")) is None
    wrong = functools.partial(attention, factor=1.02)
    assert "probabilit" in selftest._golden(wrong, case, torch.device("cpu"))


def test_every_kernel_but_attention_has_run(folder, request):
    """After the tests above: no preparation kernel is built that the interpreter has not executed."""
    names = {item.originalname for item in request.session.items if item.module is request.module}
    if not names >= {"test_images", "test_sorting", "test_grouping"}:
        pytest.skip("ptx: only some tests of this file were selected")
    built = {name for name in on_torch.InterpretedLibrary(folder).manifest.kernels if not name.startswith("attention")}
    assert {name for library in USED for name, _ in library.reports} >= built
