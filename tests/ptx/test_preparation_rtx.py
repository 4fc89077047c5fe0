"""The preparation kernels of sm_89 and sm_120a, executed by the project's own launchers: images against the references,
and whole calls, preparation and attention on one another's results, against the specification."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import nvfp4_model
import pytest
import torch
from ptx import on_torch, opcodes_sm120  # noqa: F401 - it fills the table
from ptx.grouping_checks import check_grouping, check_sorting
from vc_attention.benchmarks import preparation_checks
from vc_attention.kernels import FAITHFUL, FAST, FOUR_BIT, Plan
from vc_attention.kernels.cute import layouts_mma8, reference_mma8, reference_nvfp4
from vc_attention.kernels.launch.images import Images
from vc_attention.kernels.launch.manifest import Manifest, read_manifest
from vc_attention.kernels.spec.attention import attention as spec_attention
from vc_attention.kernels.spec.grouping import permutation

pytestmark = pytest.mark.xdist_group("cubins")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FOUR = {"none": FOUR_BIT.without_smoothing(), "v": FOUR_BIT, "v_k": replace(FOUR_BIT, key_means=True)}
EIGHT = {"none": FAST.without_smoothing(), "v": FAST, "v_k": Plan(key_means=True)}
#: What no attention kernel computes, and preparation kernels are there for: means of K alone.
EIGHT["k"] = replace(EIGHT["none"], key_means=True)
SHAPES = ((1, 2, 20, 129), (1, 2, 5, 200), (1, 1, 130, 40), (2, 1, 1, 1), (1, 1, 3, 1100), (1, 1, 40, 256))
SCHEDULES = ("orderly", "eager", "random")


def tensors(b: int, h: int, lq: int, lkv: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """q, k, v [B, H, L, 128], each in a memory layout of its own; K and V with channel offsets, V with block means."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(b, h, n, 128, generator=g) for n in (lq, lkv, lkv))
    k = k + 2 * torch.randn(b, h, 1, 128, generator=g)
    v = v + torch.randn(b, h, -(-lkv // 128), 128, generator=g).repeat_interleave(128, 2)[:, :, :lkv]
    layouts = preparation_checks.LAYOUTS
    return [
        preparation_checks.in_layout(x.to(dtype), layouts[(seed + n) % len(layouts)], n)
        for n, x in enumerate((q, k, v))
    ]


def labels_of(b: int, h: int, lkv: int, seed: int) -> torch.Tensor:
    return torch.randint(13, (b, h, lkv), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def library_of(folder, n: int) -> on_torch.InterpretedLibrary:
    return on_torch.InterpretedLibrary(folder, schedule=SCHEDULES[n % 3], seed=n)


def values_of(images, name: str) -> torch.Tensor:
    """The numbers [BH, rows, columns] that an NVFP4 image stands for, without the second level."""
    heads = [getattr(nvfp4_model.operands(replace(images, qs=one, ks=one), n), name) for n in range(len(images.q))
             for one in [torch.ones_like(images.qs)]]  # fmt: skip
    return torch.stack(heads)


def near(a: torch.Tensor, b: torch.Tensor, limit: float, share: float, what: str) -> None:
    """At most `limit` apart relative to |b| (1e-3 at least), and apart at all at `share` of the elements or two."""
    assert a.shape == b.shape and torch.isfinite(a.double()).all(), what
    apart = (a.double() - b.double()).abs() / b.double().abs().clamp_min(1e-3)
    assert apart.max() <= limit, (what, float(apart.max()))
    assert int((apart > 0).sum()) <= max(share * a.numel(), 2), (what, int((apart > 0).sum()), a.numel())


CASES = list(itertools.product(("none", "v", "v_k"), DTYPES, (False, True)))
#: Architectures whose kernels nobody has run; what they have in common is executed once.
RTX = ("sm_89", "sm_120a", "sm_121a")


@pytest.mark.parametrize(("plan", "kind", "grouped"), CASES)
def test_nvfp4_images(builds, plan, kind, grouped):
    """Every number is the reference's but for ties, padding and the rows of ones included; every byte is written."""
    n = CASES.index((plan, kind, grouped))
    b, h, lq, lkv = SHAPES[n % len(SHAPES)]
    q, k, v = tensors(b, h, lq, lkv, DTYPES[kind], n)
    labels = labels_of(b, h, lkv, n) if grouped else None
    form = replace(FOUR[plan], adaptive_scales=n % 4 != 3)
    ours = on_torch.prepare(library_of(builds["sm_120a"], n), q, k, v, form, labels)
    theirs = reference_nvfp4.prepare(q, k, v, form, labels if form.demean else None)
    for name in ("qs", "ks", "sv"):
        near(getattr(ours, name), getattr(theirs, name), 1e-5, 1, name)
    if form.key_means:
        assert torch.equal(ours.qb, theirs.qb)
        near(ours.km, theirs.km, 8e-3, 1, "km")
    if form.demean:
        near(ours.mu, theirs.mu, 8e-3, 1e-2, "mu")
    assert torch.equal(values_of(ours, "ones"), values_of(theirs, "ones"))
    for name in ("q", "k", "v"):
        a, c = values_of(ours, name), values_of(theirs, name)
        # Numbers, not bytes: one that 4 and 6 hold alike has two ways to be written. A scale of zeros must be a number.
        assert torch.isfinite(a).all(), name
        # A group whose choice between 4 and 6, or whose scale, is a tie changes as a whole: by half its largest step.
        assert (a - c).abs().max() <= c.abs().amax() / 3, name
        assert int((a != c).sum()) <= max(2e-3 * a.numel(), 34), (name, int((a != c).sum()), a.numel())


EIGHT_BIT_CASES = [*CASES, *itertools.product(("k",), DTYPES, (True,))]


@pytest.mark.parametrize(("plan", "kind", "grouped"), EIGHT_BIT_CASES)
def test_eight_bit_images(builds, plan, kind, grouped):
    """The images of `layouts_mma8` are the reference's but for ties of rounding."""
    n = EIGHT_BIT_CASES.index((plan, kind, grouped))
    b, h, lq, lkv = SHAPES[(n + 1) % len(SHAPES)]
    q, k, v = tensors(b, h, lq, lkv, DTYPES[kind], n)
    labels = labels_of(b, h, lkv, n) if grouped else None
    ours = on_torch.prepare(library_of(builds["sm_89"], n), q, k, v, EIGHT[plan], labels)
    theirs = _eight_bit_reference(q, k, v, EIGHT[plan], labels if plan != "none" else None)
    for name, (limit, share) in preparation_checks.LIMITS.items():
        a, c = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (c is None), name
        if a is None:
            continue
        if name in ("q", "k"):
            apart = (a.int() - c.int()).abs()
        elif name == "v":
            apart = preparation_checks.e4m3_steps(a, c)
            if ours.mu is not None:
                apart = torch.where(_rows(ours, lkv) == _rows(theirs, lkv), apart, 0)
        else:
            near(a, c, limit, share, name)
            continue
        assert apart.max() <= limit, name
        assert int((apart > 0).sum()) <= max(share * a.numel(), 2), name


def _eight_bit_reference(q, k, v, plan, labels):
    if plan.demean or not plan.key_means:
        return reference_mma8.prepare(q, k, v, plan, labels)
    order = permutation(labels)[..., None].expand_as(k)
    k, v = k.gather(-2, order), v.gather(-2, order)
    parts = {**reference_mma8.q_image(q, True), **reference_mma8.k_image(k, True), **reference_mma8.v_image(v, False)}
    return Images(q.shape[0], q.shape[1], q.shape[2], k.shape[2], **parts)


def _rows(images, lkv: int) -> torch.Tensor:
    """For each byte of a V^T image the stored mean of its channel and block: where these differ, residuals do."""
    lo = layouts_mma8
    tiles = images.v.shape[1]
    out = torch.zeros(images.v.shape, dtype=torch.float32)
    channel, token = torch.arange(lo.HEAD_DIM)[:, None], torch.arange(lo.BLOCK)[None]
    for tile in range(tiles):
        means = images.mu[:, tile // lo.MEAN_GROUP, lo.mu_offset(channel, tile % lo.MEAN_GROUP)].float()
        out[:, tile, lo.v_offset(channel, token)] = means.expand(-1, -1, lo.BLOCK)
    return out


CALLS = [
    ("sm_120a", FOUR["v_k"], "bf16", True),
    ("sm_120a", FOUR["v"], "fp16", False),
    ("sm_120a", FAST, "bf16", True),
    ("sm_89", FAITHFUL, "bf16", False),
]


@pytest.mark.parametrize(("arch", "plan", "kind", "grouped"), CALLS)
def test_the_whole_call(builds, arch, plan, kind, grouped):
    """Preparation and attention by `launch.prepare` and `launch.attend`, as near to exact attention as the plan is."""
    q, k, v = tensors(1, 1, 110, 270, DTYPES[kind], CALLS.index((arch, plan, kind, grouped)))
    labels = labels_of(1, 1, 270, 5) if grouped else None
    library = library_of(builds[arch], 2)
    images = on_torch.prepare(library, q, k, v, plan, labels)
    ours = on_torch.attend(library, images, plan, DTYPES[kind]).transpose(1, 2).double()
    exact = torch.softmax(q.double() @ k.double().transpose(-2, -1) * 128**-0.5, -1) @ v.double()
    theirs = spec_attention(q, k, v, plan, labels).double()
    assert torch.isfinite(ours).all()
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm() + 2.0**-10 * exact.norm()


def test_sorting(builds):
    check_sorting(builds["sm_120a"])


@pytest.mark.parametrize("kind", DTYPES)
def test_grouping(builds, kind):
    check_grouping(builds["sm_120a"], DTYPES[kind])


def _program(folder, name: str) -> str:
    """PTX of a kernel without the name of its target."""
    text = (folder / f"{name}.ptx").read_text(encoding="utf-8")
    text, count = re.subn(r"^\.target \w+$", ".target", text, flags=re.M)
    assert count == 1
    return text


def _manifest(folder) -> Manifest:
    found = read_manifest(folder)
    assert isinstance(found, Manifest)
    return found


def test_sm_121a_runs_the_programs_of_sm_120a(builds):
    """Every kernel: what the interpreter shows of one holds for the other. Launches are the same as well."""
    one, other = (_manifest(builds[arch]).kernels for arch in ("sm_120a", "sm_121a"))
    assert len(one) > 80 and one.keys() == other.keys()
    for name, entry in one.items():
        assert _program(builds["sm_121a"], name) == _program(builds["sm_120a"], name), name
        for what in ("arguments", "params", "block", "shared", "cluster"):
            assert getattr(entry, what) == getattr(other[name], what), (name, what)


def test_every_kernel_has_run(builds, request):
    """After the tests above: no preparation or grouping kernel is built for these architectures that the interpreter
    has not executed, itself or as the same program for another one.

    That every attention kernel is executed, `test_kernels_sm120` and `test_kernels_mma8` say of themselves; the probe
    has `test_probe_nvfp4`.
    """
    names = {item.originalname for item in request.session.items}
    wanted = {"test_nvfp4_images", "test_eight_bit_images", "test_grouping", "test_sorting", "test_preparation"}
    if not names >= wanted:
        pytest.skip("ptx: only some tests that run these kernels were selected")
    launched = on_torch.InterpretedLibrary.launched
    executed = {(name, _program(builds[arch], name)) for arch, name in launched}
    for arch in RTX:
        kernels = [name for name in _manifest(builds[arch]).kernels if not name.startswith(("attention", "probe"))]
        assert not [name for name in kernels if (name, _program(builds[arch], name)) not in executed], arch
