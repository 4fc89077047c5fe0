"""Measuring and capturing on the bridge to WanVideoWrapper, on the fakes of `fake_wrapper`."""

from __future__ import annotations

import gc
import json

import fake_wrapper
import pytest
import torch
from fake_wrapper import sample, sampling, wan_model
from node_fakes import options
from safetensors import safe_open
from safetensors.torch import load_file
from vc_attention.kernels import FAST, measures, sampled_sums
from vc_attention.nodes import engine, host
from vc_attention.nodes.capture import Capture, CaptureOptions
from vc_attention.nodes.profile import Profile, ProfileLayer
from vc_attention.nodes.quality import Quality, QualityOptions
from vc_attention.nodes.quality_report import table
from vc_attention.nodes.state import Layer
from vc_attention.nodes.watch import Watcher, watchers_of
from vc_attention.nodes.wrapper_hook import attach_bridge, bridge_session, watch_bridge
from vc_attention.tools import replay_main
from wrapper_cases import hooks

REAL = engine.attention


def patched(model=None, **chosen):
    return attach_bridge(model or wan_model(), options(plan=FAST, **chosen))


def measured(model, profile=None, **chosen):
    quality = Quality(QualityOptions(**chosen), profile=profile)
    return watch_bridge(model, quality), quality


@pytest.fixture
def output(tmp_path, monkeypatch):
    """An output folder, numbered as ComfyUI does it."""
    counter = iter(range(1, 9))
    monkeypatch.setattr(host, "output_folder", lambda: tmp_path)
    monkeypatch.setattr(host, "numbered_file", lambda prefix: (tmp_path, prefix.rpartition("/")[2], next(counter)))
    return tmp_path


def test_every_layer_step_and_prompt_is_measured_and_no_bit_changes():
    base = patched()
    plain = sample(base)
    model, quality = measured(base)
    assert all(map(torch.equal, sample(model), plain))
    (run,) = quality.results()
    assert run.finished and run.steps == 4 and run.family == "Wan in WanVideoWrapper" and run.shape == (96, 96, 2)
    # two prompts, four steps, two layers: a pass for each prompt
    assert [(m.layer, m.step) for m in run.measurements] == [
        (Layer(None, block, 0), step) for step in range(4) for _ in range(2) for block in range(2)
    ]
    assert all(0 < m.relative_l2 < 0.1 for m in run.measurements) and {m.branches for m in run.measurements} == {1}
    assert [m.phase for m in run.measurements[::4]] == ["group", "plain", "plain", "plain"]
    assert table([run]).startswith("16 calls measured in 2 layers")


def test_the_numbers_are_those_of_longcats_noise_tokens(monkeypatch):
    """Fewer queries than keys: the rows are those of the call as the kernel got it."""
    calls = []

    def attention(q, k, v, *rest):
        out = REAL(q, k, v, *rest)
        calls.append((q.clone(), k.clone(), v.clone(), out.clone()))
        return out

    monkeypatch.setattr(engine, "attention", attention)
    model, quality = measured(patched(wan_model(is_longcat=True), min_tokens=32), layers="1", steps="2-3")
    sample(model, num_cond=1)
    (run,) = quality.results()
    assert run.shape == (72, 96, 2) and run.family == "LongCat-Video"
    wanted = [
        measures(sampled_sums(*call, None, step).tolist()) for step in (1, 2) for call in calls[4 * step + 1 :: 2][:2]
    ]
    assert [m.relative_l2 for m in run.measurements] == pytest.approx([w["relative_l2"] for w in wanted], rel=1e-6)
    assert [m.psnr_db for m in run.measurements] == pytest.approx([w["psnr_db"] for w in wanted], rel=1e-6)


@pytest.mark.parametrize("bad", [0, 1])
def test_exactly_the_bad_layer_goes_back_to_the_wrapper(monkeypatch, bad):
    """From the next pass on, which is that of the other prompt in the same step."""
    calls = []

    def attention(q, k, v, *rest):
        calls.append(q)
        return REAL(q, k, v, *rest) * (0.9 if len(calls) - 1 == bad else 1.0)

    monkeypatch.setattr(engine, "attention", attention)
    model, quality = measured(patched(), budget_db=35.0)
    sample(model)
    (run,) = quality.results()
    assert list(run.dense) == [Layer(None, bad, 0)] and run.dense[Layer(None, bad, 0)].step == 0
    assert len(calls) == 2 + 7
    assert dict(bridge_session(model).stats.declined) == {"budget": 7}
    # the next run decides anew
    sample(model, steps=1)
    assert quality.results()[-1].dense == {}


def test_a_profile_keeps_its_layers_with_the_wrapper_from_the_first_step():
    profile = Profile(
        "LongCat-Video", 2, (ProfileLayer(Layer(None, 1, 0), True), ProfileLayer(Layer(None, 0, 0), False))
    )
    model, quality = measured(patched(wan_model(is_longcat=True)), profile)
    sample(model, num_cond=1)
    (run,) = quality.results()
    assert {m.layer for m in run.measurements} == {Layer(None, 0, 0)}
    assert bridge_session(model).stats.declined["budget"] == 2 * 2 * 4  # noise and conditioning calls
    saved = quality.to_profile()
    assert saved.family == "LongCat-Video" and list(saved.dense) == [Layer(None, 1, 0)]


def test_the_captured_call_is_the_wrappers_and_replays(output, capsys):
    """The tensors of the wrapper's own call, heads first, before grouping; replay computes the same call again."""
    seen = []
    base = patched(wan_model(is_longcat=True), min_tokens=32)
    bridge_session(base).observers.append(
        lambda record, q, k, v, out: seen.append((record, q.clone(), k.clone(), v.clone()))
    )
    capture = Capture(CaptureOptions(layer="1", step=2))
    model = watch_bridge(base, capture)
    sample(model, num_cond=1)
    (file,) = output.glob("*.safetensors")
    assert capture.text.startswith("Saved block 1, step 2 (2 of 2 heads) to capture_00001_")
    _, *tensors = next(entry for entry in seen if entry[0].block_index == 1 and entry[0].step == 1)
    stored = load_file(file)
    assert all(torch.equal(stored[name], t) for name, t in zip("qkv", tensors, strict=True))
    with safe_open(file, framework="pt") as opened:
        facts = opened.metadata()
    assert facts["family"] == "LongCat-Video" and json.loads(facts["shape_q"]) == [1, 2, 72, 64]
    assert json.loads(facts["shape_kv"]) == [1, 2, 96, 64] and facts["steps"] == "4"
    assert float(facts["sigma"]) == pytest.approx(0.75)
    request = {"case": str(file), "plan": "fast", "backend": "spec", "groups": None, "out": None, "json": True}
    assert replay_main.main([json.dumps(request)]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["relative_l2"] < 0.1


def test_each_run_of_a_sampler_is_a_run_of_the_watchers(output):
    model, quality = measured(patched())
    capture = Capture(CaptureOptions(layer="0"))
    model = watch_bridge(model, capture)
    sample(model)
    sample(model, cfg=False)
    assert [sum(t.count for t in run.layers.values()) for run in quality.runs] == [16, 8]
    assert len(list(output.glob("*.safetensors"))) == 2
    sample(model, rounds=2, cfg=False)  # FreeInit: one run of two rounds
    assert len(quality.runs) == 3 and sum(t.count for t in quality.runs[-1].layers.values()) == 16


def test_a_cancelled_run_keeps_what_it_measured_and_says_what_was_not_captured():
    model, quality = measured(patched())
    capture = Capture(CaptureOptions(layer="0", step=4))
    model = watch_bridge(model, capture)
    run = sampling(model, 4)
    next(run)
    next(run)
    assert not quality.runs
    run.close()
    (found,) = quality.results()
    assert found.finished and {m.step for m in found.measurements} == {0, 1}
    assert capture.text.startswith(
        "Nothing was captured: VC-Attention accelerated no attention call of layer 0 at step 4"
    )


def test_only_the_clone_is_watched_and_nothing_holds_it():
    plain = wan_model()
    base = patched(plain)
    model, quality = measured(base)
    assert watchers_of(base, Quality) == [] and watchers_of(model.clone(), Quality) == [quality]
    sample(base)
    assert quality.results() == []
    gc.disable()
    try:
        later = model.clone()
        del model
        sample(later)
        assert len(quality.runs) == 1 and hooks(plain) == 2
        del later, base
        assert hooks(plain) == 0
    finally:
        gc.enable()


def test_a_problem_of_a_watcher_never_reaches_the_run():
    class Broken(Watcher):
        ended = 0

        def after(self, *_):
            raise ValueError("broken")

        def end_run(self, *_):
            self.ended += 1

    base = patched()
    plain = sample(base)
    broken = Broken()
    model = watch_bridge(base, broken)
    assert all(map(torch.equal, sample(model), plain))
    assert bridge_session(model).stats.accelerated == 16 and broken.problem == "broken" and broken.ended == 1


def test_an_error_in_the_model_ends_the_watchers_run_and_leaves_no_half_pass():
    plain = wan_model()
    model, quality = measured(patched(plain))
    transformer = plain.model.diffusion_model
    transformer.interrupt = RuntimeError("another node")
    with pytest.raises(RuntimeError, match="another node"):
        sample(model)
    transformer.interrupt = None
    assert quality.results()[-1].measurements == []
    sample(model)
    assert len(quality.results()[-1].measurements) == 16


def test_a_pass_that_fails_the_numeric_check_is_measured_and_then_the_wrappers(monkeypatch):
    """What was wrong is in the report; the repetition on the wrapper's attention is not."""
    monkeypatch.setattr(engine, "attention", lambda *args: -REAL(*args))
    model, quality = measured(patched())
    fake_wrapper.CALLS.clear()
    sample(model)
    (run,) = quality.results()
    assert len(run.measurements) == 2 and all(m.psnr_db < 10 for m in run.measurements)
    assert "this step was computed again" in bridge_session(model).stats.summary()
