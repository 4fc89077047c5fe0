"""The sm_120a NVFP4 attention kernels, executed: their PTX in the interpreter against the specification and a model on
matrices, and broken copies of them, which must be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import nvfp4_kernels
import nvfp4_model
import pytest
import torch
from ptx.nvfp4_mutants import MUTANTS, Mutant
from ptx.parser import PtxError
from torch import Tensor
from vc_attention.benchmarks import nvfp4_on_sm90
from vc_attention.kernels import FOUR_BIT
from vc_attention.kernels.cute.config_nvfp4 import config_of, configs
from vc_attention.kernels.cute.reference_nvfp4 import prepare
from vc_attention.kernels.launch.images import Images
from vc_attention.kernels.spec.attention import attention as spec_attention

pytestmark = pytest.mark.xdist_group("nvfp4")

PLANS = {"none": FOUR_BIT.without_smoothing(), "v": FOUR_BIT, "v_k": replace(FOUR_BIT, key_means=True)}
#: Against the model, which is rounded like the output: relative L2, and any element in standard deviations.
NEAR, NEAR_ANY = 0.003, 0.05


@dataclass(frozen=True)
class Case:
    """One call. change: what to do to Gaussian q, k, v [B, H, L, 128] in place. v is shifted by a mean a channel."""

    name: str
    lq: int
    lkv: int
    plans: tuple[str, ...]
    heads: int = 1
    batch: int = 1
    output: str = "bf16"
    schedule: str = "random"
    grouped: bool = False
    change: Callable[[Tensor, Tensor, Tensor], None] | None = None


def _outlier_token(q, k, v):
    k[..., 77, :] *= 12.0
    v[..., 77, :] *= 60.0


def _zero_values(q, k, v):
    v.zero_()


def _zero_queries(q, k, v):
    q.zero_()


def _huge_scores(q, k, v):
    q *= 100.0
    k *= 10.0


def _tiny(q, k, v):
    q *= 1e-18
    k *= 1e-18
    v *= 1e-18


def _rising_scores(q, k, v):
    # Every block brings a larger maximum, so that everything is rescaled every time.
    q[..., 0] = 8.0
    k[..., 0] = torch.arange(k.shape[-2]) / 40.0


def _block_means(q, k, v):
    blocks = torch.arange(k.shape[-2]) // 128
    generator = torch.Generator().manual_seed(5)
    v += 4 * torch.randn(int(blocks[-1]) + 1, 128, generator=generator)[blocks]
    k += torch.randn(int(blocks[-1]) + 1, 128, generator=generator)[blocks]


ALL = ("none", "v", "v_k")
CASES = (
    Case("one key", 1, 1, ALL),
    Case("one block", 128, 128, ("none", "v"), schedule="orderly"),
    Case("ragged rows and keys", 37, 129, ALL),
    Case("two query tiles, three blocks", 130, 300, ("v",), schedule="eager"),
    Case("a whole group of blocks", 16, 1024, ("v_k",)),
    Case("two groups of blocks, the second ragged", 16, 1130, ("v", "v_k")),
    Case("many blocks", 5, 2200, ("v_k",), schedule="orderly"),
    Case("an outlier token", 64, 250, ALL, change=_outlier_token),
    Case("zero V", 20, 200, ALL, change=_zero_values),
    Case("zero Q", 20, 200, ("none", "v_k"), change=_zero_queries),
    Case("huge scores", 64, 300, ALL, change=_huge_scores),
    Case("tiny numbers", 16, 140, ("v",), change=_tiny),
    Case("rising maxima", 16, 700, ("v", "v_k"), change=_rising_scores),
    Case("block means", 16, 900, ("v", "v_k"), change=_block_means),
    Case("batches and heads", 17, 33, ("v", "v_k"), heads=3, batch=2),
    Case("grouped tokens, fp16", 40, 260, ALL, heads=2, output="fp16", grouped=True),
)


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and labels of a case; V has a channel mean, as video models' have."""
    generator = torch.Generator().manual_seed(case.lq * 10007 + case.lkv)
    shape = (case.batch, case.heads)
    q, k, v = (torch.randn(*shape, n, 128, generator=generator) for n in (case.lq, case.lkv, case.lkv))
    v = v + torch.randn(*shape, 1, 128, generator=generator)
    if case.change is not None:
        case.change(q, k, v)
    labels = torch.randint(7, (*shape, case.lkv), generator=generator).to(torch.uint8) if case.grouped else None
    return q, k, v, labels


def far(out: Tensor, model: Tensor) -> str:
    """How `out` misses the model, or nothing."""
    difference, reference = out.double() - model.double(), model.double()
    norm, largest = float(difference.norm()), float(difference.abs().max())
    if not torch.isfinite(out).all():
        return "not finite"
    if norm > NEAR * float(reference.norm()):
        return f"relative L2 {norm / float(reference.norm()):.4f}"
    if largest > NEAR_ANY * float(reference.std(correction=0)):
        return f"one element by {largest / float(reference.std(correction=0)):.3f} standard deviations"
    return ""


@pytest.mark.parametrize(("case", "name"), [pytest.param(c, n, id=f"{c.name}-{n}") for c in CASES for n in c.plans])
def test_kernel_against_model_and_specification(case: Case, name: str):
    plan, scale = PLANS[name], 128**-0.5
    q, k, v, labels = inputs(case)
    images = prepare(q, k, v, plan, labels)
    out = nvfp4_kernels.execute(images, plan, case.output, schedule=case.schedule, seed=len(case.name))
    dtype = nvfp4_kernels.OUTPUTS[case.output]
    assert not far(out, nvfp4_model.attention(images, scale, dtype))
    exact = torch.softmax(q.double() @ k.double().transpose(2, 3) * scale, -1) @ v.double()
    spec = spec_attention(q, k, v, plan, labels).to(dtype)
    error, spec_error = (float((x.double() - exact).norm()) for x in (out, spec))
    # The second term: one rounding to the output's type, which may fall worse than the specification's.
    assert error <= 1.1 * spec_error + 2.0**-10 * float(exact.norm())


def test_every_kernel_is_among_the_cases():
    assert {config_of(PLANS[name], case.output) for case in CASES for name in case.plans} == set(configs())


def test_repeated_runs_agree_whatever_the_schedule():
    q, k, v, _ = inputs(Case("schedules", 24, 600, ("v",)))
    images = prepare(q, k, v, FOUR_BIT)
    runs = [("orderly", 0), ("eager", 0), ("random", 1), ("random", 2)]
    outs = [nvfp4_kernels.execute(images, FOUR_BIT, schedule=schedule, seed=seed) for schedule, seed in runs]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_error_of_the_special_functions_does_not_matter():
    q, k, v, _ = inputs(Case("approximation", 24, 300, ("v",)))
    images = prepare(q, k, v, FOUR_BIT)
    model = nvfp4_model.attention(images, 128**-0.5)
    for ulps in (-2, 2):
        assert not far(nvfp4_kernels.execute(images, FOUR_BIT, approximation=ulps), model)


def test_rows_do_not_depend_on_each_other():
    q, k, v, _ = inputs(Case("rows", 40, 200, ("v",)))
    whole = nvfp4_kernels.execute(prepare(q, k, v, FOUR_BIT), FOUR_BIT)
    images = prepare(q, k, v, FOUR_BIT)
    part = replace(prepare(q[..., :9, :], k, v, FOUR_BIT), qs=images.qs, q=images.q)
    assert torch.equal(nvfp4_kernels.execute(part, FOUR_BIT), whole[..., :9, :])


@pytest.mark.parametrize("name", ["none", "v_k"])
def test_emulation_for_sm_90_gives_the_same_bits(name: str):
    """What runs on a card without these MMAs is the same kernel: same source, same results but for their widths."""
    case = Case("emulated", 20, 140, (name,), change=_outlier_token)
    q, k, v, _ = inputs(case)
    images = prepare(q, k, v, PLANS[name])
    emulated = nvfp4_kernels.execute(images, PLANS[name], emulated=True, schedule="random", seed=2)
    assert torch.equal(emulated, nvfp4_kernels.execute(images, PLANS[name]))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_broken_kernel_is_noticed(mutant: Mutant):
    plan = PLANS[mutant.plan]
    q, k, v, _ = inputs(Case("mutants", 40, mutant.keys, (mutant.plan,)))
    # Scores of some size and means that differ, or a fault in them would not show.
    _block_means(q, k, v)
    images = prepare(1.5 * q, k, v, plan)
    config = config_of(plan, "bf16")
    assert config is not None
    text = nvfp4_kernels.ptx_text(config.name)
    if mutant.text is not None:
        text = mutant.text(text)
    shared = nvfp4_kernels.manifest().kernels[config.name].shared - mutant.less_shared
    changed = images if mutant.images is None else mutant.images(images)
    model = nvfp4_model.attention(images, 128**-0.5)
    try:
        out = nvfp4_kernels.execute(changed, plan, text=text, shared=shared, schedule="random", seed=3)
    except PtxError as fault:
        assert mutant.caught == "fault", fault
        return
    found = far(out, model)
    if mutant.caught == "equivalent":
        assert not found
        assert torch.equal(out, nvfp4_kernels.execute(images, plan))
    else:
        assert mutant.caught == "wrong"
        assert found


def test_the_check_on_an_h200_with_the_interpreter_in_its_place(tmp_path):
    """`benchmarks/nvfp4_on_sm90.py` draws sound cases and finds a wrong result; what it saves can be run again."""

    def interpreted(images, plan, output):
        return nvfp4_kernels.execute(images, plan, output)

    rows = [nvfp4_on_sm90.compare(interpreted, "cpu", seed, longest=200) for seed in range(3)]
    assert all(row["within"] for row in rows), rows
    assert not nvfp4_on_sm90.compare(lambda *call: 0.8 * interpreted(*call), "cpu", 0, longest=200)["within"]
    saved = [{**row, **row["saved"]} for row in rows if "saved" in row]
    torch.save(saved[:1], tmp_path / "saved.pt")
    found = torch.load(tmp_path / "saved.pt")[0]
    again = interpreted(Images(**found["images"]), nvfp4_on_sm90.PLANS[found["plan"]], found["output"])
    assert torch.equal(again, found["out"])
