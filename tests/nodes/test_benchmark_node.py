"""VC-Attention Benchmark: which size, which rows, in which words. tests/comfy has it in real ComfyUI."""

from __future__ import annotations

import functools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from vc_attention import kernels
from vc_attention.kernels import FAITHFUL, FAST, FOUR_BIT, Ok, Reason, timing
from vc_attention.nodes import benchmark, benchmark_report, host
from vc_attention.nodes.benchmark import Benchmark, Row
from vc_attention.nodes.families import AttentionSize, attention_size, latent_cell
from vc_attention.nodes.options import PatchOptions


def patcher(device: str = "cpu", latent_format: object = None, dtype=torch.float32, cast=None, **attributes):
    """A ModelPatcher as far as the benchmark looks at it."""
    attributes = attributes or {"num_heads": 2, "dim": 256, "patch_size": (1, 2, 2)}
    model = SimpleNamespace(
        diffusion_model=SimpleNamespace(**attributes),
        latent_format=latent_format,
        manual_cast_dtype=cast,
        get_dtype=lambda: dtype,
    )
    return SimpleNamespace(model=model, load_device=torch.device(device))


class Wan21:
    """A latent format of ComfyUI 0.3.75, which does not tell its cells."""


class Telling:
    temporal_downscale_ratio, spacial_downscale_ratio = 8, 32


PIXELS = (832, 480, 81)


def backends(q, k, v, **more):
    """Instead of ComfyUI's list: torch's attention, in use, and others."""
    flat = [t.transpose(1, 2).flatten(2) for t in (q, k, v)]

    def sdpa():
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    rows = {"PyTorch SDPA": sdpa}
    rows.update({name: functools.partial(call, sdpa, flat) for name, call in more.items()})
    return rows, "PyTorch SDPA"


def measured(monkeypatch, tokens: int = 200, options: PatchOptions | None = None, show=lambda *_: None, **more):
    monkeypatch.setattr(benchmark, "backends", functools.partial(backends, **more))
    found = benchmark.prepare(patcher(), {"samples": torch.zeros(1, 16, 2, 20, 20)}, PIXELS)
    assert found.tokens == 200 and not found.problem
    benchmark.measure(found, patcher(), options or PatchOptions(), 0.002, show)
    return found


# -- the size ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ({"num_heads": 40, "dim": 5120, "patch_size": (1, 2, 2)}, AttentionSize(40, 128, (1, 2, 2))),
        ({"num_heads": 24, "hidden_size": 3072, "patch_size": [1, 1, 1]}, AttentionSize(24, 128, (1, 1, 1))),
        ({"num_heads": 24, "hidden_size": 3072, "patch_size": 2}, AttentionSize(24, 128, (1, 2, 2))),
        (
            {
                "hidden_size": 5376,
                "patch_size": (1, 2, 2),
                "blocks": [SimpleNamespace(attn=SimpleNamespace(heads=56, head_dim=128))],
            },
            AttentionSize(56, 128, (1, 2, 2)),
        ),
        ({"num_heads": 7, "dim": 256, "patch_size": (1, 2, 2)}, None),
        ({"num_heads": 2, "dim": 256}, None),
        ({"num_heads": 2, "dim": 256, "patch_size": (1, 2, 2, 2)}, None),
        ({"patch_size": (1, 2, 2)}, None),
    ],
)
def test_heads_and_patches_are_those_that_the_model_states(attributes, size):
    assert attention_size(SimpleNamespace(**attributes)) == size
    assert attention_size(SimpleNamespace(_orig_mod=SimpleNamespace(**attributes))) == size


def test_tokens_count_the_patches_that_are_filled_up():
    size = AttentionSize(40, 128, (1, 2, 2))
    assert size.tokens(21, 60, 104) == 32_760 and size.tokens(21, 90, 160) == 75_600
    assert size.tokens(1, 3, 5) == 6


@pytest.mark.parametrize(
    ("latent_format", "latent"), [(Wan21(), (21, 60, 104)), (Telling(), (11, 15, 26)), (object(), None)]
)
def test_widgets_become_a_latent_by_the_models_own_format(latent_format, latent):
    assert (latent_cell(latent_format) is None) == (latent is None)
    found = benchmark.latent_size(None, SimpleNamespace(latent_format=latent_format), PIXELS)
    assert found == (latent or benchmark.NO_PIXELS)


STREAMS = [torch.zeros(1, 24, 7, 8, 12), torch.zeros(1, 32, 2, 37)]


@pytest.mark.parametrize(
    ("samples", "size"),
    [
        (torch.zeros(1, 16, 3, 8, 12), (3, 8, 12)),
        (torch.zeros(2, 4, 8, 12), (1, 8, 12)),
        (SimpleNamespace(is_nested=True, unbind=lambda: STREAMS), (7, 8, 12)),
    ],
)
def test_a_latent_that_is_connected_counts(samples, size):
    assert benchmark.latent_size({"samples": samples}, SimpleNamespace(latent_format=Wan21()), PIXELS) == size


def test_what_has_no_size_is_a_sentence():
    assert benchmark.prepare(patcher(patch_size=2), None, PIXELS).problem == benchmark.NO_ATTENTION_SIZE
    assert benchmark.prepare(patcher(), None, PIXELS).problem == benchmark.NO_PIXELS


def test_a_cpu_is_not_asked_for_a_whole_clip():
    found = benchmark.prepare(patcher(latent_format=Wan21()), None, PIXELS)
    assert "ComfyUI runs on CPU here" in found.problem and "32,760 tokens" in found.problem and not found.rows
    assert not benchmark.prepare(patcher(latent_format=Wan21()), None, (256, 256, 9)).problem


def test_room_is_asked_for_before_anything_is_made(monkeypatch):
    asked = []
    monkeypatch.setattr(host, "make_room", lambda needed, device: asked.append(needed) or 1 << 20)
    monkeypatch.setattr(timing, "stand_ins", lambda *_: pytest.fail("tensors were made"))
    found = benchmark.prepare(patcher(latent_format=Wan21()), None, (256, 256, 9))
    assert asked == [2 * 768 * 128 * 30 + (256 << 20)]
    assert "needs about 0.3 GB on CPU, and 0.0 GB are free" in found.problem
    assert benchmark_report.table(found).startswith("unknown family")


def test_out_of_memory_is_a_sentence(monkeypatch):
    def none_left(*_):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(timing, "stand_ins", none_left)
    found = benchmark.prepare(patcher(latent_format=Wan21()), None, (256, 256, 9))
    benchmark.measure(found, patcher(), PatchOptions(), 0.01, lambda *_: None)
    assert found.problem.startswith("Nothing was timed: this size needs")


@pytest.mark.parametrize(
    ("dtype", "cast", "name"),
    [
        (torch.float16, None, "fp16"),
        (torch.float8_e4m3fn, torch.bfloat16, "bf16"),
        (torch.float8_e4m3fn, None, "fp32"),  # on a CPU
    ],
)
def test_the_number_format_is_the_one_that_attention_gets(dtype, cast, name):
    assert benchmark.prepare(patcher(dtype=dtype, cast=cast), None, PIXELS).dtype == name


# -- the rows ------------------------------------------------------------------------------------------------------


def test_every_row_is_timed_and_its_error_is_against_exact_attention(monkeypatch):
    shown = []
    found = measured(monkeypatch, show=lambda *step: shown.append(step), other=lambda sdpa, flat: 1.1 * sdpa())
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["PyTorch SDPA", "other"]
    assert rows["PyTorch SDPA"].in_use and not rows["other"].in_use and not rows["other"].ours
    assert rows["PyTorch SDPA"].error < 1e-5 and rows["other"].error == pytest.approx(0.1, rel=1e-3)
    assert all(0 < row.low <= row.ms <= row.high and row.timings >= benchmark.ROUNDS * 2 for row in found.rows)
    # a bar that only grows, and ends at its end
    dones, totals = [done for done, _, _ in shown[1:]], {total for _, total, _ in shown[1:]}
    assert totals == {(benchmark.ROUNDS + 2) * 2} and dones == list(range(10))
    assert "VC-Attention: CPU: VC-Attention's kernels are for NVIDIA GPUs" in benchmark_report.table(found)


def test_the_three_kinds_of_steps_of_ours(monkeypatch):
    """On the specification, as a CPU has no kernels: each kind of step, in the model's layout."""
    monkeypatch.setattr(benchmark, "supports", lambda *_, **__: Ok("spec"))
    plans, grouped = [], []

    def attention(q, k, v, plan, labels=None):
        plans.append((plan, labels is not None))
        return kernels.attention(q, k, v, plan, labels, backend="spec")

    monkeypatch.setattr(benchmark, "attention", attention)
    monkeypatch.setattr(benchmark, "group", lambda v, groups: grouped.append(groups) or kernels.group(v, groups))
    found = measured(monkeypatch, options=PatchOptions(quality="faithful", groups=7))
    names = [f"VC-Attention 8-bit faithful, {kind} step" for kind in ("plain", "reuse", "grouping")]
    assert [row.name for row in found.rows] == [*names, "PyTorch SDPA"]
    assert [row.ours for row in found.rows] == [True, True, True, False]
    assert all(1e-4 < row.error < 0.1 for row in found.rows[:3]) and not found.missing
    assert {plan for plan, _ in plans} == {FAITHFUL} and set(grouped) == {7}
    runs = {row.name: row.timings for row in found.rows}
    assert sum(labelled for _, labelled in plans) > runs[names[1]] + runs[names[2]]
    assert len(grouped) - 1 > runs[names[2]]  # once for the labels that are reused, then in every grouping step


def test_the_first_plan_that_the_card_can_run_is_timed(monkeypatch):
    asked = []

    def supports(device, plan, head_dim, dtype, progress):
        asked.append((plan, dtype))
        return Ok("cubin") if plan == FAST and dtype == torch.bfloat16 else Reason("no_kernel", "Not here.")

    monkeypatch.setattr(benchmark, "supports", supports)
    made = []
    monkeypatch.setattr(benchmark, "_steps", lambda plan, options, dtype, *_: made.append((plan, dtype)) or {})
    q = torch.zeros(1, 2, 8, 128)
    assert benchmark.ours(Benchmark(), PatchOptions(precision="4-bit"), q, q, q) == {}
    assert made == [(FAST, torch.bfloat16)]
    assert asked == [(plan, dtype) for plan in (FOUR_BIT, FAST) for dtype in (torch.float32, torch.bfloat16)]


def test_a_backend_that_quietly_runs_torchs_attention_gets_no_time(monkeypatch):
    found = measured(monkeypatch, **{"SageAttention": lambda sdpa, flat: sdpa()})
    assert [row.name for row in found.rows] == ["PyTorch SDPA"]
    assert "gave the call on to PyTorch's attention" in found.missing["SageAttention"]


def test_a_backend_that_fails_costs_its_row_only(monkeypatch):
    def broken(sdpa, flat):
        raise ValueError("head dim 128 is not for me\nmore")

    calls = []

    def later(sdpa, flat):
        calls.append(0)
        if len(calls) > 1:
            raise RuntimeError("the second time")
        return sdpa()

    found = measured(monkeypatch, broken=broken, later=later)
    assert [row.name for row in found.rows] == ["PyTorch SDPA"]
    assert found.missing["broken"] == "ValueError: head dim 128 is not for me"
    assert found.missing["later"] == "RuntimeError: the second time"
    text = benchmark_report.table(found)
    assert "broken: ValueError: head dim 128 is not for me." in text


def test_a_result_that_is_not_finite_says_so(monkeypatch):
    found = measured(monkeypatch, nan=lambda sdpa, flat: sdpa() * math.nan)
    assert {row.name: row.error for row in found.rows}["nan"] is None
    assert "not finite" in benchmark_report.table(found)
    assert [row["error"] for row in json.loads(benchmark_report.to_json(found))["rows"]][1] is None


@pytest.mark.parametrize("where", ["show", "call"])
def test_cancel_passes_through_from_everywhere(monkeypatch, where):
    class Cancelled(BaseException):
        """As newer cores have it."""

    calls = []

    def cancel(*_):
        calls.append(0)
        if len(calls) > 4:
            raise Cancelled

    if where == "call":
        monkeypatch.setattr(host, "stop_if_cancelled", cancel)
    with pytest.raises(Cancelled):
        measured(monkeypatch, show=cancel if where == "show" else lambda *_: None)
    assert len(calls) == 5


def test_an_older_cores_cancel_inside_a_first_call_is_not_taken_for_a_problem_of_the_row(monkeypatch):
    class CancelledError(Exception):
        """As 0.3.75 has it."""

    def raises(sdpa, flat):
        raise CancelledError

    monkeypatch.setattr(host, "is_interrupt", lambda error: isinstance(error, CancelledError))
    with pytest.raises(CancelledError):
        measured(monkeypatch, other=raises)


# -- the texts -----------------------------------------------------------------------------------------------------


def example() -> Benchmark:
    rows = [
        Row("VC-Attention 8-bit fast, reuse step", True, False, 10.0, 9.9, 10.1, 30, 0.02),
        Row("PyTorch SDPA", False, True, 25.0, 24.0, 26.0, 30, 0.001),
    ]
    return Benchmark("Wan", "A card", "bf16", 40, 128, 32_760, (21, 60, 104), (1, 2, 2), rows, {"x": "It is not here."})


def test_the_table_says_what_was_timed_and_what_came_out():
    lines = benchmark_report.table(example()).splitlines()
    assert lines[0].startswith(
        "Wan on A card: one self-attention call over 32,760 tokens (latent 21 x 60 x 104, cut into patches of 1 x 2 x "
        "2), 40 heads of 128, bf16"
    )
    assert lines[1] == (
        "Fastest: VC-Attention 8-bit fast, reuse step, 10 ms, 2.50 times as fast as PyTorch SDPA, which ComfyUI uses "
        "now."
    )
    # 4 * 40 * 32760^2 * 128 operations in 10 ms
    assert lines[4].split()[-5:] == ["10", "2.50x", "2,198", "2.000", "%"]
    assert lines[5].startswith("PyTorch SDPA (in use)") and lines[-1] == "x: It is not here."


def test_the_json_holds_all_of_it():
    told = json.loads(benchmark_report.to_json(example()))
    assert told["format"] == "vc_attention_benchmark" and told["latent"] == [21, 60, 104] and told["problem"] is None
    assert [row["speed"] for row in told["rows"]] == [2.5, 1.0]
    assert told["rows"][0]["tflops"] == pytest.approx(4 * 40 * 32_760**2 * 128 / 0.010 / 1e12)


def test_the_bars_are_as_long_as_the_times():
    image = benchmark_report.plot(example()).tensor()[0]
    blue, orange = (
        (image - torch.tensor(colour) / 255).abs().amax(-1) < 0.02 for colour in ((0, 114, 178), (213, 94, 0))
    )
    widths = [int(mask[: 900 - 60].sum(1).max()) for mask in (blue, orange)]
    assert widths[1] == pytest.approx(600, abs=4) and widths[0] / widths[1] == pytest.approx(0.4, abs=0.01)
    nothing = benchmark_report.plot(Benchmark(problem="It is too large.")).tensor()[0]
    assert nothing[400:500].min() < 0.5  # the sentence


# -- the timing ----------------------------------------------------------------------------------------------------


def test_the_hosts_clock_waits_for_the_device_and_leaves_the_first_call_out(monkeypatch):
    now, log = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call():
        log.append("call")
        now[0] += 9.0 if len(log) == 1 else 0.001

    def wait():
        log.append("wait")
        now[0] += 0.002

    series = timing.Clock(wait).series(call, 3)
    assert series.ms == pytest.approx([3.0, 3.0, 3.0]) and log == ["call", "wait"] * 4


def test_stand_ins_are_the_same_each_time_and_have_something_to_group():
    q, k, v = timing.stand_ins(300, 2, 64, "cpu", torch.float32)
    assert q.shape == k.shape == v.shape == (1, 2, 300, 64) and v.transpose(1, 2).is_contiguous()
    assert all(
        torch.equal(x, y) for x, y in zip((q, k, v), timing.stand_ins(300, 2, 64, "cpu", torch.float32), strict=True)
    )
    # noise of variance 1 around centres of variance 1 in V, 0.16 in K, none in Q
    assert [float(t.var()) for t in (q, k, v)] == pytest.approx([1.0, 1.16, 2.0], abs=0.1)


# -- a card --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_card_the_rows_are_right_and_memory_is_what_was_asked_for(monkeypatch, dtype):
    """16 heads and 14,040 tokens; beside torch's attention the card's own kernels, where it has some."""
    monkeypatch.setattr(benchmark, "backends", backends)
    card = patcher("cuda", dtype=dtype, num_heads=16, dim=2048, patch_size=(1, 2, 2))
    found = benchmark.prepare(card, {"samples": torch.zeros(1, 16, 9, 60, 104)}, PIXELS)
    assert found.tokens == 14_040 and not found.problem
    verdict = kernels.supports("cuda", FAST, 128, dtype)  # loads, tests or compiles: not a part of the call's memory
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    benchmark.measure(found, card, PatchOptions(), 0.02, lambda *_: None)
    peak = torch.cuda.max_memory_allocated() - before
    assert not found.problem and peak <= benchmark.needed_bytes(found, 2), f"{peak / 1e6:.0f} MB"
    rows = {row.name: row for row in found.rows}
    assert rows["PyTorch SDPA"].error < 0.01 and all(row.low <= row.ms <= row.high for row in found.rows)
    if isinstance(verdict, Ok):
        mine = [row for row in found.rows if row.ours]
        assert len(mine) == 3 and all(row.error < 0.15 for row in mine), benchmark_report.table(found)
    else:
        assert found.missing["VC-Attention"] == verdict.text
    assert torch.cuda.memory_allocated() - before < 64 << 20
