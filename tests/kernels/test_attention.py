"""Attention: properties that must hold for every plan, and its error on data it is made for.

`backend.rounding` in a tolerance is the rounding of inputs and outputs to 16 bit, which the kernels have and the
specification, run on fp32 tensors, has not.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_backends import SPEC
from kernel_cases import exact, relative
from vc_attention import kernels
from vc_attention.kernels import EXACT, FAITHFUL, FAST, FOUR_BIT, Plan

ROOT = Path(__file__).resolve().parents[2]
PLANS = {
    "fast": FAST,
    "fast_per_thread": replace(FAST, score_groups="per_thread"),
    "fast_key_means": replace(FAST, key_means=True),
    "expcast": replace(FAST, probability="expcast"),
    "faithful": FAITHFUL,
    "plain": FAST.without_smoothing(),
    "fp8_scores": replace(FAST, scores="fp8"),
    "four_bit": FOUR_BIT,
    "fp8_nvfp4": Plan(scores="fp8", values="nvfp4", probability="exp2"),
    "int8_values": Plan(values="int8", probability="exp2"),
    "exact": EXACT,
    "exact_demeaned": replace(EXACT, demean=True),
}
#: Relative L2 error against fp32 that a plan may have on Gaussian data (measured, with a margin of a quarter).
BOUND = dict.fromkeys(PLANS, 0.052) | {
    "fp8_scores": 0.072,
    "fp8_nvfp4": 0.18,
    "four_bit": 0.25,
    "int8_values": 0.025,
    "exact": 2e-6,
    "exact_demeaned": 2e-6,
}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def qkv(backend, lq=200, lkv=300, heads=2, **options):
    return backend.qkv(lq, lkv, heads, **options)


def labels_for(backend, v, groups=16):
    return backend.group(v, groups)[0]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("grouped", [False, True], ids=["sequence", "grouped"])
def test_error_against_fp32(backend, name, grouped):
    q, k, v = qkv(backend, lq=260, lkv=700)
    reference = exact(q, k, v)
    out = backend.run(q, k, v, PLANS[name], labels_for(backend, v) if grouped else None)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert relative(out, reference) < BOUND[name] + backend.rounding


@each_plan
def test_permuting_keys_and_values_together_changes_only_rounding(backend, plan):
    q, k, v = qkv(backend, lkv=384)
    labels = labels_for(backend, v)
    order = torch.randperm(384, generator=torch.Generator().manual_seed(2))
    reference = exact(q, k, v)
    a = backend.run(q, k, v, plan, labels)
    b = backend.run(q, k[:, :, order], v[:, :, order], plan, labels[:, :, order])
    assert relative(a, b) < (2e-6 if plan == EXACT else 1.6 * max(relative(a, reference), 1e-6))


@each_plan
def test_shifting_all_keys_changes_nothing_but_rounding(backend, plan):
    q, k, v = qkv(backend)
    shift = torch.randn(1, 2, 1, k.shape[-1], generator=torch.Generator().manual_seed(3)).to(k)
    # On a grid of 1/16 the sum is exact in bf16 too: it is the shift that is tested, not the rounding of shifted keys.
    k, shift = (k * 16).round() / 16, (shift * 16).round() / 16
    error = relative(backend.run(q, k + shift, v, plan), backend.run(q, k, v, plan))
    assert error < (0.03 if plan.key_means else 2e-2 if plan.scores != "exact" else 1e-5)


@each_plan
def test_shifting_all_values_shifts_the_output(backend, plan):
    q, k, v = qkv(backend)
    shift = torch.linspace(3.0, 7.0, v.shape[-1]).to(v)
    moved = backend.run(q, k, v + shift, plan).float() - shift
    if plan.demean:
        # The block means carry the shift: what is left is the 16-bit rounding of the means.
        assert float((moved - backend.run(q, k, v, plan)).norm() / v.norm()) < 0.05
    else:
        assert relative(moved + shift, backend.run(q, k, v, plan) + shift) < 0.05


@each_plan
@pytest.mark.parametrize("power", [-6, 5])
def test_power_of_two_scaling_of_values_is_exact(backend, plan, power):
    q, k, v = qkv(backend)
    labels = labels_for(backend, v)
    scaled = backend.run(q, k, v * 2.0**power, plan, labels)
    assert torch.equal(scaled, backend.run(q, k, v, plan, labels) * 2.0**power)


@each_plan
def test_rows_are_independent(backend, plan):
    q, k, v = qkv(backend, lq=96)
    # Rows share a scale inside their score group of 16 or 32 rows, and NVFP4's second level spans the head: 32 rows are
    # whole groups, and the row with the head's largest elements is among them.
    q[:, :, 40] *= 4
    labels = labels_for(backend, v)
    whole = backend.run(q, k, v, plan, labels)
    part = backend.run(q[:, :, 32:64], k, v, plan, labels)
    torch.testing.assert_close(part, whole[:, :, 32:64], rtol=2e-5 + backend.rounding, atol=2e-6)


@each_plan
def test_uniform_attention_returns_the_mean_of_the_values(backend, plan):
    for lkv in (1, 63, 64, 127, 128, 129, 200, 257):
        q, k, v = qkv(backend, lq=3, lkv=lkv, heads=1)
        v[:, :, -1] = 30.0
        out = backend.run(q * 0, k * 0, v, plan, labels_for(backend, v, 2))
        # Every probability is the same code, so only V's format errs.
        assert relative(out, v.mean(-2, keepdim=True).expand_as(out)) < (0.13 if plan.values == "nvfp4" else 0.03)


@each_plan
def test_zero_values_give_exactly_zero(backend, plan):
    q, k, v = qkv(backend)
    assert torch.equal(backend.run(q, k, v * 0, plan), torch.zeros_like(q))


@each_plan
def test_inputs_are_not_modified(backend, plan):
    q, k, v = qkv(backend)
    before = [t.clone() for t in (q, k, v)]
    backend.run(q, k, v, plan, labels_for(backend, v))
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=False))


@each_plan
def test_batch_of_two_equals_two_batches_of_one(backend, plan):
    q, k, v = qkv(backend, batch=2)
    labels = labels_for(backend, v)
    both = backend.run(q, k, v, plan, labels)
    for i in range(2):
        one = slice(i, i + 1)
        assert torch.equal(backend.run(q[one], k[one], v[one], plan, labels[one]), both[one])


@pytest.mark.parametrize("layout", ["nhd", "fused", "expanded", "offset"])
@each_plan
def test_strides_do_not_matter(backend, plan, layout):
    q, k, v = qkv(backend, lq=64, lkv=160, batch=2)
    views = {
        "nhd": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "fused": lambda t: torch.stack((t, t, t), -2).select(-2, 1),
        "expanded": lambda t: t[:1].expand(2, -1, -1, -1),
        "offset": lambda t: torch.cat((t.new_zeros(3), t.flatten()))[3:].view_as(t),
    }[layout]
    a, b, c = views(q), views(k), views(v)
    expected = backend.run(a.contiguous(), b.contiguous(), c.contiguous(), plan)
    assert torch.equal(backend.run(a, b, c, plan), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_output_keeps_dtype_and_storage_order(backend, dtype):
    q, k, v = (t.to(dtype) for t in qkv(backend))
    out = backend.run(q, k, v, FAST)
    assert out.dtype == dtype and out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", PLANS)
def test_scale_is_honoured(backend, name):
    q, k, v = qkv(backend)
    out = backend.run(q, k, v, PLANS[name], scale=0.05)
    assert relative(out, exact(q, k, v, scale=0.05)) < BOUND[name] + backend.rounding
    assert torch.equal(out, backend.run(q * 4, k, v, PLANS[name], scale=0.05 / 4))


def test_infinitely_negative_scores_give_zero_rows(backend):
    q, k, v = qkv(backend, lq=4)
    q[:, :, 1] = torch.inf
    k = torch.full_like(k, -1.0)
    out = backend.run(q, k, v, EXACT)
    assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1])) and torch.isfinite(out).all()


@pytest.mark.parametrize("probability", ["expcast", "expcast_wide", "exp2"])
def test_row_sums_must_be_those_of_the_codes(backend, probability):
    """Restoring means with sums of another P than l's is far worse once V has a mean; no backend may do it."""
    q, k, v = qkv(backend, lkv=512)
    v = v + 20.0
    out = backend.run(q, k, v, replace(FAST, probability=probability))
    assert relative(out, exact(q, k, v)) < 3e-3 + backend.rounding


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_plan_survives_its_text_form(plan):
    assert Plan.decode(plan.encode()) == plan


def test_plan_refuses_what_does_not_exist():
    with pytest.raises(ValueError, match="must be one of"):
        Plan(scores="int4")
    with pytest.raises(ValueError, match="needs values='fp8'"):
        Plan(values="nvfp4", probability="expcast")
    with pytest.raises(ValueError, match="not a field"):
        Plan.decode("colour=red")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v, None), "axes"),
        (lambda q, k, v: (q, k, v[:, :, :-1], None), "must agree"),
        (lambda q, k, v: (q, k[:, :1], v[:, :1], None), "must agree"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0], None), "no tokens"),
        (lambda q, k, v: (q.half(), k, v, None), "share one dtype"),
        (lambda q, k, v: (q, k, v, torch.zeros(1, 2, 300, dtype=torch.int32)), "uint8"),
        (lambda q, k, v: (q, k, v, torch.zeros(1, 2, 299, dtype=torch.uint8)), "uint8"),
        (lambda q, k, v: (q, k, v, torch.zeros(1, 2, 300, dtype=torch.uint8, device="meta")), "on meta"),
    ],
)
def test_bad_arguments_are_named(backend, change, message):
    q, k, v, labels = change(*qkv(backend))
    with pytest.raises(ValueError, match=message):
        backend.run(q, k, v, FAST, labels)


def test_no_queries_give_an_empty_output(backend):
    q, k, v = qkv(backend, lq=0)
    assert backend.run(q, k, v, FAST).shape == q.shape


def test_no_backend_is_a_reason_and_not_a_crash():
    q, k, v = qkv(SPEC)
    with pytest.raises(kernels.UnsupportedError) as error:
        kernels.attention(q, k, v, FAST)
    assert error.value.reason.code == "no_kernel" and "ComfyUI's own attention" in str(error.value)


def test_custom_op_passes_torch_checks(backend):
    q, k, v = qkv(backend, lq=32, lkv=64)
    arguments = (q, k, v, labels_for(backend, v, 2), FAST.encode(), 0.125, backend.name)
    torch.library.opcheck(torch.ops.vc_attention.attention, arguments)


def test_compiled_equals_eager(backend):
    q, k, v = qkv(backend, lq=32, lkv=64)

    def layer(q, k, v):
        return kernels.attention(q, k, v, FAST, backend=backend.name).transpose(1, 2).flatten(2)

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), layer(q, k, v))


def test_the_first_call_does_not_import_the_compiler(tmp_path):
    """torch's compiler takes 2 to 5 seconds to import, which the first step of a clip would wait for."""
    program = tmp_path / "first_call.py"
    program.write_text(
        "import importlib.util, sys, torch\n"
        f"spec = importlib.util.spec_from_file_location('pack', {str(ROOT / 'tools' / 'pack.py')!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.load_pack()\n"
        "from vc_attention import kernels\n"
        "q = torch.randn(1, 1, 8, 64)\n"
        "kernels.attention(q, q, q, kernels.FAST, backend='spec')\n"
        "assert 'torch._dynamo' not in sys.modules, 'the compiler was imported'\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
