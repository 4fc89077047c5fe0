"""The tcgen05 attention kernels, their PTX executed on the CPU by the project's own launcher: against a model of the
same codes, against the specification, and broken on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kernel_backends
import pytest
import torch
from ptx import attention_model, attention_model_sm100, on_torch
from ptx.mutants_sm100 import MUTANTS
from ptx.parser import PtxError
from sm100_kernels import compiled
from vc_attention.kernels import Plan
from vc_attention.kernels.cute.config_sm100 import Sm100Config, config_of
from vc_attention.kernels.cute.reference import prepare
from vc_attention.kernels.spec.attention import attention as spec_attention

pytestmark = pytest.mark.xdist_group("sm100")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plan_of(config: Sm100Config) -> Plan:
    return Plan(scores=config.scores, probability=config.probability, demean=config.demean, key_means=config.key_means)


def tensors(batch: int, heads: int, lq: int, lkv: int, dtype: torch.dtype, what: str = "", seed: int = 0):
    """q, k, v [B, H, L, 128]: Gaussian, K with channel offsets, K and V with means of their blocks."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, n, 128, generator=g) for n in (lq, lkv, lkv))
    k = k + 2 * torch.randn(batch, heads, 1, 128, generator=g)
    blocks = torch.randn(2, batch, heads, -(-lkv // 128), 128, generator=g).repeat_interleave(128, 3)[..., :lkv, :]
    k, v = k + 0.3 * blocks[0], v + blocks[1]
    if what == "huge scores":
        q, k = 30 * q, 30 * k
    elif what == "equal keys":
        k = k[:, :, :1].expand_as(k)
    elif what == "zero v":
        v = torch.zeros_like(v)
    elif what == "outlier":
        v[:, :, lkv // 2] *= 100
    elif what == "rising scores":
        # Every tile has a larger maximum than those before it: all of O is rescaled for each.
        k = k * torch.linspace(0.2, 3, lkv)[:, None]
    return [x.to(dtype) for x in (q, k, v)]


NONE, V, V_K = (False, False), (True, False), (True, True)
CASES = [
    # scores, probability, (V means, K means), output, (batch, heads, Lq, Lkv), schedule, what is special
    ("fp8", "expcast_wide", V, "bf16", (1, 1, 130, 600), "orderly", ""),
    ("fp8", "expcast_wide", V, "bf16", (1, 1, 20, 2049), "random", ""),
    ("fp8", "expcast_wide", NONE, "fp16", (1, 2, 140, 300), "random", ""),
    ("fp8", "exp2", V, "bf16", (1, 1, 20, 1100), "random", ""),
    ("fp8", "exp2", NONE, "fp16", (1, 1, 300, 128), "eager", ""),
    ("int8", "expcast_wide", V, "fp16", (2, 2, 3, 129), "eager", ""),
    ("int8", "expcast_wide", NONE, "bf16", (1, 1, 128, 255), "random", ""),
    ("int8", "exp2", V, "bf16", (1, 1, 110, 300), "random", "rising scores"),
    ("int8", "exp2", NONE, "bf16", (1, 1, 129, 400), "random", "outlier"),
    ("fp8", "exp2", V, "bf16", (1, 1, 1, 1), "eager", ""),
    ("fp8", "expcast_wide", V, "bf16", (1, 1, 100, 400), "random", "rising scores"),
    ("fp8", "expcast_wide", V, "bf16", (1, 1, 100, 257), "random", "huge scores"),
    ("fp8", "exp2", V, "fp16", (1, 1, 100, 200), "eager", "huge scores"),
    ("int8", "expcast_wide", V, "bf16", (1, 1, 100, 140), "random", "huge scores"),
    ("fp8", "expcast_wide", V, "bf16", (1, 1, 100, 200), "eager", "equal keys"),
    ("fp8", "expcast_wide", V, "fp16", (1, 1, 100, 130), "random", "zero v"),
    ("fp8", "expcast_wide", V_K, "bf16", (1, 1, 130, 2100), "random", ""),
    ("fp8", "exp2", V_K, "fp16", (1, 1, 20, 1100), "eager", ""),
    ("int8", "expcast_wide", V_K, "bf16", (1, 2, 20, 200), "orderly", "rising scores"),
    ("int8", "exp2", V_K, "bf16", (1, 1, 300, 100), "random", "outlier"),
    ("fp8", "expcast_wide", V_K, "fp16", (1, 1, 100, 140), "random", "huge scores"),
]


def check(
    text: str | None,
    config: Sm100Config,
    shape,
    schedule: str,
    what: str = "",
    seed: int = 0,
    arch: str = "sm_100a",
    **options,
) -> str | None:
    """What is wrong with the output of a kernel (of PTX `text`, if any) on images of the torch reference, or None."""
    plan, dtype = plan_of(config), DTYPES[config.output]
    q, k, v = tensors(*shape, dtype, what, seed)
    images = prepare(q, k, v, plan)
    library = on_torch.InterpretedLibrary(compiled(arch), schedule=schedule, seed=seed, **options)
    if text is not None:
        library.replaced[config.name] = text
    out = on_torch.attend(library, images, plan, dtype, complete=False)
    missing = library.storages.unwritten(out)
    if missing:
        return f"{missing} bytes not written"
    found = out.to(torch.float64).transpose(1, 2)
    expected = attention_model_sm100.attention(images, config)
    wrong = attention_model.mismatch(found.flatten(0, 1).numpy(), expected, config.output)
    exact = torch.softmax(q.double() @ k.double().transpose(-2, -1) * 128**-0.5, -1) @ v.double()
    theirs = spec_attention(q, k, v, plan).double()
    error, limit = (float((x - exact).norm() / exact.norm().clamp_min(1e-30)) for x in (found, theirs))
    # Below 0.004 the output type's own rounding is what is seen; few rows that few keys dominate say less.
    if error > max((1.1 if shape[0] * shape[1] * shape[2] >= 100 else 1.5) * limit, 4e-3):
        return f"error {error:.4f}, of the specification {limit:.4f}" + (f"; {wrong}" if wrong else "")
    return wrong


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x) for x in c))
def test_attention(case):
    scores, probability, means, output, shape, schedule, what = case
    config = Sm100Config(scores, probability, *means, output)
    assert check(None, config, shape, schedule, what, seed=CASES.index(case)) is None


@pytest.mark.parametrize("ulps", [-2, 2])
def test_attention_stands_the_error_of_its_exponential(ulps):
    """ex2.approx and rcp.approx err by up to 2 ulps on silicon."""
    for probability in ("expcast_wide", "exp2"):
        config = Sm100Config("fp8", probability, *V)
        assert check(None, config, (1, 1, 100, 300), "random", seed=2, approximation=ulps) is None


@pytest.mark.parametrize("means", [NONE, V, V_K])
def test_exponentials_of_b300(means):
    """B300 has no polynomials among them; all else is the same PTX (`tests/kernels/test_preparation.py`)."""
    config = Sm100Config("fp8", "exp2", *means)
    assert check(None, config, (1, 1, 110, 200), "random", "rising scores", seed=3, arch="sm_103a") is None


def test_plans_have_kernels():
    plan = Plan(scores="fp8")
    assert config_of(plan, "bf16") == Sm100Config("fp8", "expcast_wide", *V, "bf16")
    assert config_of(Plan(probability="exp2", demean=False), "fp16") == Sm100Config("int8", "exp2", *NONE, "fp16")
    assert config_of(Plan(key_means=True), "bf16") == Sm100Config("int8", "expcast_wide", *V_K, "bf16")
    for other in (
        Plan(demean=False, key_means=True),
        Plan(scores="nvfp4", values="nvfp4", probability="exp2"),
        Plan(probability="expcast"),
        Plan(score_groups="per_thread"),
    ):
        assert config_of(other, "bf16") is None
    assert config_of(plan, "") is None


@pytest.fixture(scope="module")
def mutants(tmp_path_factory) -> Path:
    """Folder with the PTX of every mutant of the sources, all compiled in one process."""
    if not kernel_backends.has_compiler():
        pytest.skip(kernel_backends.NO_COMPILER)
    folder = tmp_path_factory.mktemp("mutants")
    command = [sys.executable, str(Path(__file__).parent / "mutants_sm100.py"), str(folder)]
    done = subprocess.run(command, env={**os.environ, "CUTE_DSL_ARCH": "sm_100a"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[m.fault for m in MUTANTS])
def test_mutants_are_caught(mutants, number):
    mutant = MUTANTS[number]
    text = (mutants / f"{number}.ptx").read_text(encoding="utf-8")
    config = Sm100Config(*mutant.config)
    assert text != (compiled("sm_100a") / f"{config.name}.ptx").read_text(encoding="utf-8")
    try:
        found = check(text, config, mutant.shape, "random", "rising scores", seed=1)
    except PtxError:
        return
    assert found is not None
