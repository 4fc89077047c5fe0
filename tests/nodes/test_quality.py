"""Measuring a run: the numbers, who is measured, the budget, and problems that must not reach the run."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hook_cases import SIGMAS
from node_fakes import FakePatcher, forward, options, run, self_attention
from vc_attention import kernels
from vc_attention.kernels import FAST
from vc_attention.nodes import engine, host, quality, quality_run
from vc_attention.nodes.hook import attach, session_of
from vc_attention.nodes.quality import Quality, QualityOptions
from vc_attention.nodes.quality_report import live, plot, table, to_json
from vc_attention.nodes.quality_run import QualityRun
from vc_attention.nodes.state import Layer
from vc_attention.nodes.watch import Watcher, watch, watchers_of

REAL = engine.attention


def measured(**chosen):
    watcher = Quality(QualityOptions(**chosen))
    return watch(attach(FakePatcher(), options(plan=FAST)), watcher), watcher


# -- the numbers ----------------------------------------------------------------------------------------------------


def test_the_measures_by_their_definitions():
    generator = torch.Generator().manual_seed(3)
    exact = torch.randn(2, 3, 50, 64, generator=generator)
    out = exact + 0.01 * torch.randn(exact.shape, generator=generator)
    got = kernels.measures(kernels.error_sums(out, exact).tolist())
    o, e = out.double(), exact.double()
    assert got["relative_l2"] == pytest.approx(float((o - e).norm() / e.norm()), rel=1e-12)
    cosine = torch.nn.functional.cosine_similarity(o.flatten(), e.flatten(), 0)
    assert got["cosine"] == pytest.approx(float(cosine), abs=1e-12)
    mean_square = float((o - e).square().mean())
    assert got["psnr_db"] == pytest.approx(10 * math.log10(float(e.abs().max()) ** 2 / mean_square), abs=1e-9)
    parts = [kernels.error_sums(out[:, i], exact[:, i]) for i in range(3)]
    together = kernels.measures(kernels.add_sums(parts).tolist())
    assert together == pytest.approx(got, rel=1e-12)


@pytest.mark.parametrize(
    ("out", "exact", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], (0.0, 1.0, None)),
        ([0.0, 0.0], [0.0, 0.0], (0.0, 1.0, None)),
        ([1.0, 0.0], [0.0, 0.0], (None, 0.0, None)),
        ([math.nan, 0.0], [1.0, 0.0], (math.inf, 0.0, -math.inf)),
        ([math.inf, 0.0], [1.0, 0.0], (math.inf, 0.0, -math.inf)),
        ([1e300, 0.0], [1.0, 0.0], (math.inf, 0.0, -math.inf)),
    ],
)
def test_the_measures_at_their_ends(out, exact, expected):
    sums = kernels.error_sums(torch.tensor(out, dtype=torch.float64), torch.tensor(exact, dtype=torch.float64))
    got = kernels.measures(sums.tolist())
    assert (got["relative_l2"], got["cosine"], got["psnr_db"]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("turn", [0, 1, 5])
def test_sampled_rows_of_other_heads_at_each_turn(turn):
    """20 heads: every third one, from another first one at each turn; the rows are computed here in fp64."""
    generator = torch.Generator().manual_seed(turn)
    q, k, v = (torch.randn(2, 20, 90, 64, generator=generator) for _ in range(3))
    out = kernels.attention(q, k, v, FAST, backend="spec")
    rows = kernels.sample_rows(90, q.device)
    heads = list(range(turn % 3, 20, 3))
    exact = torch.softmax(q[:, heads][:, :, rows].double() @ k[:, heads].double().mT * 0.2, -1) @ v[:, heads].double()
    expected = kernels.measures(kernels.error_sums(out[:, heads][:, :, rows], exact).tolist())
    got = kernels.measures(kernels.sampled_sums(q, k, v, out, 0.2, turn).tolist())
    assert got == pytest.approx(expected, rel=1e-6)
    assert got["relative_l2"] > 1e-3


# -- who is measured ------------------------------------------------------------------------------------------------


def test_chosen_layers_and_steps(layers):
    model, watcher = measured(layers="double:1", steps="2-3, 8")
    run(model, layers, SIGMAS)
    (found,) = watcher.results()
    assert [(m.layer, m.step) for m in found.measurements] == [(Layer("double", 1, 0), step) for step in (1, 2, 7)]
    assert [m.phase for m in found.measurements] == ["reuse", "plain", "plain"]
    assert found.finished and found.steps == 8 and found.shape == (96, 96, 2)


def test_calls_of_blocks_without_numbers_are_counted_from_1():
    model, watcher = measured(layers="2", steps="1")
    run(model, [self_attention(96, seed=i, block=(None, None)) for i in range(3)], SIGMAS)
    assert [m.layer for m in watcher.results()[0].measurements] == [Layer(None, None, 1)]


def test_a_clone_made_before_is_not_watched_and_one_made_after_is(layers):
    before = attach(FakePatcher(), options(plan=FAST))
    watcher = Quality(QualityOptions())
    after = watch(before, watcher)
    run(before, layers, SIGMAS)
    assert watcher.results() == [] and watchers_of(before, Quality) == []
    later = after.clone()
    assert watchers_of(later, Quality) == [watcher]
    run(later, layers, SIGMAS)
    assert len(watcher.results()[0].measurements) == 16


def test_the_runs_of_one_prompt_belong_together(layers, monkeypatch):
    model, watcher = measured()
    prompts = iter(["a", "b", "b"])
    monkeypatch.setattr(host, "prompt_id", lambda: next(prompts))
    for _ in range(3):
        run(model, layers, SIGMAS)
    assert [found.prompt for found in watcher.results()] == ["b", "b"]
    assert table(watcher.results()).startswith("Sampler 1. 16 calls measured")


def test_a_long_run_keeps_its_totals_and_a_bounded_number_of_single_calls(layers, monkeypatch):
    monkeypatch.setattr(quality, "MOST_MEASUREMENTS", 5)
    model, watcher = measured()
    run(model, layers, SIGMAS)
    (found,) = watcher.results()
    assert len(found.measurements) == 5 and found.dropped == 11
    assert sum(total.count for total in found.layers.values()) == 16
    for _ in range(quality.HISTORY + 3):
        run(model, layers, SIGMAS)
    assert len(watcher.runs) == quality.HISTORY


def test_other_heads_at_each_step(layers, monkeypatch):
    """One head a call: step by step they take turns, and the numbers are those of the head that is named."""
    monkeypatch.setattr(kernels.guard, "HEADS", 1)
    seen = []
    real = engine.attention

    def attention(q, k, v, *rest):
        out = real(q, k, v, *rest)
        seen.append((q, k, v, out))
        return out

    monkeypatch.setattr(engine, "attention", attention)
    model, watcher = measured()
    run(model, layers, SIGMAS)
    found = watcher.results()[0].measurements
    assert [m.heads for m in found] == [(step % 2,) for step in range(8) for _ in layers]
    rows = kernels.sample_rows(96, torch.device("cpu"))
    for one, (q, k, v, out) in zip(found, seen, strict=True):
        (head,) = one.heads
        exact = torch.softmax(q[:, head, rows].double() @ k[:, head].double().mT / 8, -1) @ v[:, head].double()
        expected = kernels.measures(kernels.error_sums(out[:, head, rows], exact).tolist())
        assert one.relative_l2 == pytest.approx(expected["relative_l2"], rel=1e-5)


def test_the_exact_result_has_the_models_own_scale():
    """A model may scale its scores otherwise than by 1 / sqrt(head_dim)."""
    layer = self_attention(96, seed=4, scale=0.3)
    model, watcher = measured(steps="1")
    run(model, [layer], SIGMAS)
    (found,) = watcher.results()[0].measurements
    assert 1e-3 < found.relative_l2 < 0.1  # at the usual scale of 0.125 the two would have little in common


# -- the budget -----------------------------------------------------------------------------------------------------


def worse(monkeypatch, when, damage=lambda out: out * 0.9):
    calls = []

    def attention(q, k, v, *rest):
        calls.append(q)
        out = REAL(q, k, v, *rest)
        return damage(out) if when(len(calls) - 1) else out

    monkeypatch.setattr(engine, "attention", attention)
    return calls


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("numbered", [True, False])
def test_exactly_the_bad_layer_goes_back(monkeypatch, bad, numbered):
    """Also where only the order of the calls tells the layers apart: the one in 16 bit still counts."""
    three = [self_attention(96, seed=i, block=("double", i) if numbered else (None, None)) for i in range(3)]
    calls = worse(monkeypatch, lambda n: n == bad)
    model, watcher = measured(budget_db=38.0)
    run(model, three, SIGMAS)
    (found,) = watcher.results()
    layer = Layer("double", bad, 0) if numbered else Layer(None, None, bad)
    assert list(found.dense) == [layer] and found.dense[layer].step == 0
    assert len(calls) == 3 + 7 * 2
    assert {one: total.count for one, total in found.layers.items() if one != layer} == dict.fromkeys(
        [one for one in found.layers if one != layer], 8
    )
    assert dict(session_of(model).stats.declined) == {"budget": 7}
    assert f"In 16 bit: {layer.name} after step 1" in table([found])
    assert "Below the budget, in 16 bit from now on: 1 layer" in live(found, 1)
    (entry,) = [e for e in json.loads(to_json([found], 38.0))["runs"][0]["layers"] if e["in_16_bit"]]
    assert entry["layer"] == layer.name and entry["in_16_bit_after_step"] == 1 and entry["calls"] == 1


def test_without_a_budget_nothing_goes_back(layers, monkeypatch):
    worse(monkeypatch, lambda n: True)
    model, watcher = measured()
    run(model, layers, SIGMAS)
    assert watcher.results()[0].dense == {} and dict(session_of(model).stats.declined) == {}


def test_a_result_that_is_not_finite_is_below_every_budget(layers, monkeypatch):
    """A NaN in the third pass of two layers, after the guard has judged the first phases."""

    def nan(out):
        return torch.full_like(out, math.nan)

    worse(monkeypatch, lambda n: n == 4, nan)
    model, watcher = measured(budget_db=1.0)
    run(model, layers, SIGMAS)
    found = watcher.results()[0]
    assert Layer("double", 0, 0) in found.dense
    report = json.loads(to_json([found]))["runs"][0]
    assert [call["finite"] for call in report["calls"]].count(False) == 1
    assert "not finite" in table([found]) and plot([found]).tensor().isfinite().all()


def test_inputs_that_are_not_finite_are_not_measured():
    layer = self_attention(96, seed=0)
    layer.v[0, 5] = math.inf
    model, watcher = measured(budget_db=30.0)
    run(model, [layer, self_attention(96, seed=1, block=("double", 1))], SIGMAS)
    found = watcher.results()[0]
    assert found.skipped >= 1 and Layer("double", 0, 0) not in found.layers and found.dense == {}
    assert "inputs that are not finite" in table([found])


# -- problems -------------------------------------------------------------------------------------------------------


def test_a_problem_of_measuring_never_reaches_the_run(layers, monkeypatch):
    plain = run(attach(FakePatcher(), options(plan=FAST)), layers, SIGMAS)
    real, calls = quality.sampled_sums, []

    def short_of_memory(*args):
        calls.append(args)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no room for 9 GB")
        return real(*args)

    monkeypatch.setattr(quality, "sampled_sums", short_of_memory)
    model, watcher = measured()
    outs = run(model, layers, SIGMAS)
    assert all(torch.equal(a, b) for x, y in zip(outs, plain, strict=True) for a, b in zip(x, y, strict=True))
    stats = session_of(model).stats
    assert stats.accelerated == 16 and not stats.declined
    assert len(calls) == 4, "it is not tried again in this run"
    (found,) = watcher.results()
    assert "Measuring stopped in the middle of this run (no room for 9 GB)" in table([found])
    assert len(found.measurements) == 2
    run(model, layers, SIGMAS)
    assert len(watcher.results()[0].measurements) == 16, "the next run measures again"


def test_what_a_failing_watcher_held_is_let_go_at_once(layers):
    """It may be a captured call of several hundred MB, and the pass goes on for seconds."""
    seen = []

    class Holder(Watcher):
        def after(self, forward, *_):
            forward.kept.setdefault(self, []).append("a large tensor")
            if len(seen) == 1:
                raise ValueError("broken")

    class Looker(Watcher):
        def after(self, forward, *_):
            seen.append(holder in forward.kept)

    holder = Holder()
    model = watch(watch(attach(FakePatcher(), options(plan=FAST)), holder), Looker())
    run(model, layers, SIGMAS)
    assert seen[:2] == [True, False] and holder.problem == "broken"


def test_cancel_passes_through(layers, monkeypatch):
    class CancelError(Exception):
        pass

    def cancel(*_):
        raise CancelError

    monkeypatch.setattr(quality, "sampled_sums", cancel)
    monkeypatch.setattr(host, "is_interrupt", lambda error: isinstance(error, CancelError))
    model, watcher = measured()
    with pytest.raises(CancelError):
        run(model, layers, SIGMAS)
    assert watcher.problem is None and watcher.results()[0].finished


def test_a_failed_pass_leaves_no_half_measurement(layers):
    """Another node's error in the middle of a pass: what was queued in it is gone, and the next run is whole."""
    model, watcher = measured()
    broken = [*layers, self_attention(96, block=("double", 9))]

    def error(*_, **__):
        raise RuntimeError("another node")

    broken[-1].attention = error
    with pytest.raises(RuntimeError, match="another node"):
        run(model, broken, SIGMAS)
    assert watcher.results()[0].measurements == [] and watcher.results()[0].finished
    run(model, layers, SIGMAS)
    assert len(watcher.results()[0].measurements) == 16


def test_a_sampler_that_announces_nothing_is_measured_too(layers):
    model, watcher = measured()
    for sigma in SIGMAS[:-1]:
        forward(model, layers, float(sigma), SIGMAS)
    (found,) = watcher.results()
    assert len(found.measurements) == 16 and not found.finished


def test_nothing_measured_says_why(layers):
    model, watcher = measured(layers="77")
    run(model, layers, SIGMAS)
    text = table(watcher.results())
    assert text.startswith("Nothing was measured:")
    assert plot(watcher.results(), 0.0, text).tensor().shape == (1, 900, 1200, 3)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layers": "a"}, "layers does not understand 'a'"),
        ({"layers": "3-1"}, "layers has the range '3-1'"),
        ({"steps": "0"}, "counted from 1"),
        ({"steps": "single:1"}, "counted from 1"),
        ({"budget_db": -1.0}, "budget_db is -1.0"),
        ({"budget_db": math.nan}, "budget_db is nan"),
        ({"profile": "../up"}, "cannot be called"),
    ],
)
def test_wrong_values_are_sentences(values, words):
    with pytest.raises(ValueError, match=words):
        QualityOptions(**values)


def test_an_empty_report():
    assert json.loads(to_json([]))["runs"] == [] and table([]) == ""
    assert table([QualityRun()]) == "" and plot([QualityRun()]).tensor().shape[0] == 1
    assert quality_run.LayerTotal().measures == {"relative_l2": None, "cosine": None, "psnr_db": None}
