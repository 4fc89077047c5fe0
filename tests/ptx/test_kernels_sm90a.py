"""The PTX of every sm_90a kernel, run by the project's own launchers on the CPU: attention, preparation, grouping.

Attention is compared with a model of its own arithmetic on the same images (bits), and with the specification of the
plan (error against exact attention). Preparation is compared with the torch reference byte for byte, with the limits
that the checks on a GPU use; grouping with the specification. Schedules are mixed; races are always looked for.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ptx import attention_model, on_torch
from ptx.grouping_checks import check_grouping, check_sorting, grouping
from vc_attention.benchmarks import preparation_checks
from vc_attention.kernels import Plan
from vc_attention.kernels.cute import reference
from vc_attention.kernels.cute.config import configs
from vc_attention.kernels.spec.attention import attention as spec_attention

pytestmark = pytest.mark.xdist_group("cubins")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plan_of(config) -> Plan:
    return Plan(probability=config.probability, demean=config.demean, key_means=config.key_means)


def tensors(b: int, h: int, lq: int, lkv: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v [B, H, L, 128]: Gaussian, K and V with channel offsets, V with means of its blocks."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(b, h, n, 128, generator=g) for n in (lq, lkv, lkv))
    k = k + 2 * torch.randn(b, h, 1, 128, generator=g)
    v = v + torch.randn(b, h, -(-lkv // 128), 128, generator=g).repeat_interleave(128, 2)[:, :, :lkv]
    return [x.to(dtype) for x in (q, k, v)]


def rows_of(out: torch.Tensor) -> int:
    """Rows of an output [B, H, Lq, 128], all heads together."""
    return out.shape[0] * out.shape[1] * out.shape[2]


def check_attention(folder, config, q, k, v, schedule="orderly", seed=0, labels=None, **options) -> None:
    """The kernel of `config` on images of the torch reference."""
    plan, dtype = plan_of(config), DTYPES[config.output]
    images = reference.prepare(q, k, v, plan, labels)
    library = on_torch.InterpretedLibrary(folder, schedule=schedule, seed=seed, **options)
    out = on_torch.attend(library, images, plan, dtype).to(torch.float64).transpose(1, 2)
    expected = attention_model.attention(images, config)
    assert attention_model.mismatch(out.flatten(0, 1).numpy(), expected, config.output) is None
    exact = torch.softmax(q.double() @ k.double().transpose(-2, -1) * 128**-0.5, -1) @ v.double()
    theirs = spec_attention(q, k, v, plan, labels).double()
    error, limit = ((x - exact).norm() / exact.norm().clamp_min(1e-30) for x in (out, theirs))
    # Below 0.004 the output type's own rounding is what is seen; few rows that few keys dominate say less.
    assert error <= max((1.1 if rows_of(out) >= 100 else 1.5) * limit, 4e-3)


#: (batch, heads, Lq, Lkv), schedule: ragged tails in both, one key, two mean groups, blocks that are not there.
CASES = [
    ((1, 1, 130, 600), "orderly"),
    ((1, 1, 5, 300), "random"),
    ((1, 1, 1, 1), "eager"),
    ((1, 1, 20, 1300), "random"),
    ((2, 2, 3, 129), "eager"),
]


@pytest.mark.parametrize("config", configs(), ids=lambda c: c.name)
def test_attention(ptx, config):
    # Both output types share everything but the last instruction: the second takes two of the cases.
    for n, (shape, schedule) in enumerate(CASES if config.output == "bf16" else CASES[1:3]):
        check_attention(ptx, config, *tensors(*shape, DTYPES[config.output], n), schedule, seed=n)


@pytest.mark.parametrize("config", [c for c in configs() if c.output == "bf16"], ids=lambda c: c.name)
def test_attention_on_hard_values(ptx, config):
    """Huge scores (one key takes all), an outlier token, a V of zeros, equal scores, and permuted tokens."""
    q, k, v = tensors(1, 1, 8, 257, torch.bfloat16, 9)
    outlier = v.clone()
    outlier[0, 0, 200] *= 300
    labels = torch.arange(257).remainder(5).to(torch.uint8)[None, None]
    same = torch.ones_like(k) * k[:, :, :1]
    grouped = labels if config.demean else None
    for n, case in enumerate(((30 * q, 30 * k, v), (q, k, outlier), (q, k, 0 * v), (q, same, v))):
        check_attention(ptx, config, *case, schedule="random", seed=n, labels=grouped)


@pytest.mark.parametrize("ulps", [-2, 2])
def test_attention_stands_the_error_of_its_exponential(ptx, ulps):
    """ex2.approx and rcp.approx err by up to 2 ulps on silicon."""
    for config in configs():
        if config.output == "bf16" and config.demean and not config.key_means:
            check_attention(ptx, config, *tensors(1, 1, 9, 300, torch.bfloat16, 2), approximation=ulps)


def layouts(x: torch.Tensor, kind: int) -> torch.Tensor:
    """`x` [B, H, L, 128] stored by heads, by tokens, or within a padded tensor of NaN."""
    if kind == 0:
        return x
    if kind == 1:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    b, h, length, _ = x.shape
    wide = torch.full((b, h, length + 3, 144), torch.nan, dtype=x.dtype)
    wide[:, :, 2 : length + 2, 8:136] = x
    return wide[:, :, 2 : length + 2, 8:136]


def check_images(ours, theirs, lkv: int) -> None:
    for name, (limit, share) in preparation_checks.LIMITS.items():
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None)
        if a is None:
            continue
        if name == "v":
            different, count, worst = preparation_checks.compare_v(ours, theirs, lkv)
        else:
            different, count, worst = preparation_checks.compare(name, a, b, lkv)
        assert different >= 0, name
        assert worst <= limit, name
        assert different <= max(share * count, 2), name


PLANS = [Plan(), Plan(key_means=True), Plan().without_smoothing(), Plan(demean=False, key_means=True)]
SHAPES = [(1, 1, 20, 129), (1, 2, 5, 200), (1, 1, 130, 40), (2, 1, 1, 1), (1, 1, 3, 1100)]
PREPARATIONS = list(itertools.product(PLANS, DTYPES, (False, True)))


@pytest.mark.parametrize(
    ("plan", "kind", "grouped"), PREPARATIONS, ids=lambda x: x.encode() if isinstance(x, Plan) else x
)
def test_preparation(ptx, plan, kind, grouped):
    """Every preparation kernel, on its own shape, layout and schedule; every byte of the images is written."""
    n = PREPARATIONS.index((plan, kind, grouped))
    b, h, lq, lkv = SHAPES[n % len(SHAPES)]
    q, k, v = (layouts(x, (n + m) % 3) for m, x in enumerate(tensors(b, h, lq, lkv, DTYPES[kind], n)))
    g = torch.Generator().manual_seed(n)
    labels = torch.randint(13, (b, h, lkv), generator=g).to(torch.uint8) if grouped else None
    library = on_torch.InterpretedLibrary(ptx, schedule=("orderly", "eager", "random")[n % 3], seed=n)
    ours = on_torch.prepare(library, q, k, v, plan, labels)
    used = labels if plan.demean or plan.key_means else None
    check_images(ours, reference.prepare(q, k, v, plan, used), lkv)


def test_sorting(ptx):
    check_sorting(ptx)


@pytest.mark.parametrize("kind", DTYPES)
def test_grouping(ptx, kind):
    check_grouping(ptx, DTYPES[kind])


def test_the_whole_call(ptx):
    """Grouping, preparation and attention on one another's results, tokens stored [B, L, H, D]."""
    plan = Plan(key_means=True)
    q, k, v = (layouts(x, 1) for x in tensors(1, 1, 110, 270, torch.bfloat16, 4))
    labels, _ = grouping(ptx, v, 5)
    library = on_torch.InterpretedLibrary(ptx, schedule="random", seed=2)
    images = on_torch.prepare(library, q, k, v, plan, labels)
    ours = on_torch.attend(library, images, plan, torch.bfloat16).transpose(1, 2).double()
    exact = torch.softmax(q.double() @ k.double().transpose(-2, -1) * 128**-0.5, -1) @ v.double()
    theirs = spec_attention(q, k, v, plan, labels).double()
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()
    assert np.isfinite(ours.numpy()).all()


def test_every_kernel_has_run(ptx, request):
    """After the tests above: no kernel is built that the interpreter has not executed."""
    names = {item.originalname for item in request.session.items if item.module is request.module}
    if not names >= {"test_attention", "test_preparation", "test_sorting", "test_grouping"}:
        pytest.skip("ptx: only some tests of this file were selected")
    launched = {name for arch, name in on_torch.InterpretedLibrary.launched if arch == "sm_90a"}
    assert launched >= set(on_torch.InterpretedLibrary(ptx).manifest.kernels)
