"""VC-Attention Quality and VC-Attention Capture in real ComfyUI: replay's numbers, and the clip is untouched."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import comfy_cases
import pytest
import torch
from comfy_cases import STEPS
from safetensors import safe_open
from vc_attention.kernels import FAST
from vc_attention.nodes import engine
from vc_attention.tools import replay_main, tiny_models

pytestmark = pytest.mark.comfy

FAMILIES = ("wan22_t2v", "hunyuan_video", "wan_vace", "minimax_h3")


@pytest.fixture
def output(tmp_path, monkeypatch) -> Path:
    """ComfyUI's output folder for the time of a test."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path


def patch(tiny, name: str, **chosen: Any):
    """The tiny model in 8 bit, as the node's own defaults would run it on a card."""
    from vc_attention.nodes.hook import attach

    return attach(tiny(name), comfy_cases.options(name, plan=FAST, **chosen))


def measured(model: Any, **chosen: Any):
    """`model` with VC-Attention Quality, and its watcher."""
    from vc_attention.nodes.quality import Quality, QualityOptions
    from vc_attention.nodes.watch import watch

    quality = Quality(QualityOptions(**chosen))
    return watch(model, quality), quality


def capturing(model: Any, **chosen: Any):
    from vc_attention.nodes.capture import Capture, CaptureOptions
    from vc_attention.nodes.watch import watch

    capture = Capture(CaptureOptions(**chosen))
    return watch(model, capture), capture


def blocks(tiny, name: str) -> list[str]:
    """The layers of a pass as the widgets take them; this ComfyUI numbers its blocks or it does not."""
    watched, passes = comfy_cases.watch(tiny(name))
    tiny_models.sample(watched, name, 1)
    least = comfy_cases.min_tokens(name)
    calls = [call for call in passes[0].calls if call[3] >= least and call[4] and not call[5]]
    return [str(i + 1) if index is None else f"{kind}:{index}" for i, (kind, index, *_) in enumerate(calls)]


def replayed(file: Path, capsys, groups: int | None) -> dict[str, Any]:
    """What `run.py replay FILE --rows sampled --json` prints."""
    request = {"case": str(file), "plan": "fast", "backend": "spec", "groups": groups, "rows": "sampled"}
    assert replay_main.main([json.dumps({**request, "out": None, "json": True})]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", FAMILIES)
def test_measuring_changes_no_bit_of_the_clip(tiny, output, name):
    """Both watchers on, and nothing but numbers comes out."""
    model = patch(tiny, name)
    plain = tiny_models.sample(model, name, STEPS)
    watched, quality = measured(model)
    watched, capture = capturing(watched, layer=blocks(tiny, name)[0])
    seen = tiny_models.sample(watched, name, STEPS)
    assert torch.equal(tiny_models.flat(seen), tiny_models.flat(plain))
    (run,) = quality.results()
    assert len({m.step for m in run.measurements}) == STEPS and capture.text.startswith("Saved ")
    # the model before the node is not watched
    tiny_models.sample(model, name, 1)
    assert quality.results() == [run]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("step", "phase", "groups"), [(1, "group", 0), (6, "plain", None)])
def test_the_numbers_are_those_of_replay_on_the_captured_tensors(tiny, output, capsys, name, step, phase, groups):
    layer = blocks(tiny, name)[1]
    watched, quality = measured(patch(tiny, name), layers=layer, steps=str(step))
    watched, _ = capturing(watched, layer=layer, step=step)
    tiny_models.sample(watched, name, STEPS)
    (file,) = (output / "vc_attention").glob("*.safetensors")
    (run,) = quality.results()
    first = run.measurements[0]
    assert first.phase == phase and first.step == step - 1
    # VACE runs two calls in a block: a number names both, and the first one is captured
    assert {m.layer[:2] for m in run.measurements} == {first.layer[:2]}
    again = replayed(file, capsys, groups)
    batch = 1 if name == "minimax_h3" else 2  # H3 never puts both prompts into one call
    assert again["shape_q"][0] == batch and len(first.heads) == again["shape_q"][1]
    assert first.relative_l2 > 1e-3
    for key in ("relative_l2", "cosine"):
        assert getattr(first, key) == pytest.approx(again[key], abs=1e-6), key
    assert first.psnr_db == pytest.approx(again["psnr_db"], abs=1e-4)  # dB; 1e-6 of its value
    with safe_open(file, framework="pt") as stored:
        facts = stored.metadata()
    assert facts["layer"] == first.layer.name and facts["phase"] == phase and facts["plan"] == FAST.encode()
    assert float(facts["sigma"]) == pytest.approx(first.sigma) and int(facts["step"]) == step


@pytest.mark.parametrize(("name", "bad"), [("wan22_t2v", 0), ("wan22_t2v", 1), ("hunyuan_video", 1)])
def test_exactly_the_bad_layer_goes_to_16_bit(tiny, name, bad, monkeypatch):
    """One layer of each pass loses a tenth of its output; the others keep their 8 bit to the end."""
    layers = len(blocks(tiny, name))
    calls, damaged = [], []
    real = engine.attention

    def attention(q, k, v, *rest):
        out = real(q, k, v, *rest)
        place = len(calls) % layers if not damaged else None
        calls.append(q.shape)
        if place == bad:
            damaged.append(len(calls))
            return out * 0.9
        return out

    monkeypatch.setattr(engine, "attention", attention)
    model = patch(tiny, name)
    watched, quality = measured(model, budget_db=35.0)
    tiny_models.sample(watched, name, STEPS)
    (run,) = quality.results()
    assert len(damaged) == 1, "the layer came back"
    assert [layer.ordinal if layer.block_index is None else layer.block_index for layer in run.dense] == [bad]
    ((layer, decision),) = run.dense.items()
    assert decision.step == 0 and decision.psnr_db < 35
    counts = {one: total.count for one, total in run.layers.items()}
    assert counts[layer] == 1 and {count for one, count in counts.items() if one != layer} == {STEPS}
    from vc_attention.nodes.hook import session_of

    stats = session_of(watched).stats
    assert stats.declined["budget"] == 2 * (STEPS - 1)  # two branches
    assert f"{2 * (STEPS - 1)} below the quality budget" in stats.summary()
    from vc_attention.nodes.quality_report import table

    assert f"In 16 bit: {layer.name} after step 1" in table([run])
    # the next run begins without that decision: it is of a run, unless a profile keeps it
    tiny_models.sample(watched, name, 1)
    assert quality.results()[-1].dense == {}


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_apart_in_windows_and_in_two_samplers(tiny, name, monkeypatch):
    """Branches apart, overlapping context windows, and two samplers of one model: every pass is measured."""
    import comfy.context_windows as windows

    model, quality = measured(patch(tiny, name))
    windowed = model.clone()
    windowed.model_options["context_handler"] = windows.IndexListContextHandler(
        context_schedule=windows.get_matching_context_schedule("standard_static"),
        fuse_method=windows.get_matching_fuse_method("pyramid"),
        context_length=5,
        context_overlap=2,
        context_stride=1,
        closed_loop=False,
        dim=2,
    )
    latent = tiny_models.empty_latent(name, frames=9)
    try:
        tiny_models.sample(windowed, name, 2, latent=latent)
    except Exception as error:
        pytest.skip(f"comfy: ComfyUI cannot cut {name} into context windows: {type(error).__name__} {error}")
    (run,) = quality.results()
    count = {m.layer: sum(n.layer == m.layer for n in run.measurements) for m in run.measurements}
    assert len(set(count.values())) == 1 and min(count.values()) >= 3 * 2
    # prompts of different lengths: the branches come one by one
    uneven = tiny_models.conditioning(name, 20, 1), tiny_models.conditioning(name, 33, 2)
    tiny_models.sample(model, name, 2, positive=uneven[0], negative=uneven[1])
    (run,) = quality.results()
    assert {m.branches for m in run.measurements} == {1}
    assert {sum(n.layer == m.layer for n in run.measurements) for m in run.measurements} == {4}
    # two samplers in one prompt
    from vc_attention.nodes import host

    monkeypatch.setattr(host, "prompt_id", lambda: "a prompt")
    first = tiny_models.sample(model, name, steps=4, last_step=2)
    tiny_models.sample(
        model, name, 4, latent=first, noise=torch.zeros_like(first), disable_noise=True, start_step=2,
        force_full_denoise=True,
    )  # fmt: skip
    runs = quality.results()
    assert [run.steps for run in runs] == [2, 2] and all(run.finished for run in runs)
    from vc_attention.nodes.quality_report import plot, table

    assert table(runs).count("calls measured") == 2 and plot(runs).tensor().shape[-1] == 3


def test_an_interrupted_run_leaves_nothing_broken(tiny, output):
    import comfy.model_management
    import comfy.patcher_extension

    name = "wan22_t2v"
    model, quality = measured(patch(tiny, name), budget_db=10.0)
    model, capture = capturing(model, layer=blocks(tiny, name)[0], step=6)
    clean = tiny_models.sample(model, name, STEPS)
    passes = []

    def stop(executor, *arguments, **keywords):
        passes.append(1)
        if len(passes) == 3:
            raise comfy.model_management.InterruptProcessingException
        return executor(*arguments, **keywords)

    stopped = model.clone()
    stopped.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, "test_stop", stop)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        tiny_models.sample(stopped, name, STEPS)
    assert "Nothing was captured" in capture.text
    (run,) = quality.results()
    assert {m.step for m in run.measurements} == {0, 1} and run.finished
    again = tiny_models.sample(model, name, STEPS)
    assert torch.equal(again, clean)
    assert {m.step for m in quality.results()[0].measurements} == set(range(STEPS))
    assert sorted(path.name for path in (output / "vc_attention").iterdir()) == [
        "capture_00001_.safetensors",
        "capture_00002_.safetensors",
    ]


def test_the_nodes_from_the_patch_to_the_report(tiny, output):
    """As a workflow runs them: measure with a budget, save the profile, run with the profile."""
    from vc_attention.nodes.measuring import VCAttentionQuality, VCAttentionQualityReport

    name = "hunyuan_video"
    base = patch(tiny, name)
    (model,) = VCAttentionQuality.execute(base, layers="", steps="1-2", budget_db=46.0, profile="").result
    latent = {"samples": tiny_models.sample(model, name, 4)}
    node = VCAttentionQualityReport.execute(latent, model, save_profile="night run")
    passed, image, text = node.result
    assert passed is latent
    report = json.loads(text)
    (run,) = report["runs"]
    dense = [entry["layer"] for entry in run["layers"] if entry["in_16_bit"] == "budget"]
    assert 0 < len(dense) < len(run["layers"]) and {call["step"] for call in run["calls"]} <= {1, 2}
    assert image.shape[0] == 1 and image.shape[3] == 3 and 0 <= float(image.min()) < float(image.max()) <= 1
    shown = node.ui.as_dict()["text"][0]
    assert "Saved as profile night run" in shown and all(entry["layer"] in shown for entry in run["layers"])
    assert str(output) not in shown + text

    (model,) = VCAttentionQuality.execute(base, layers="", steps="", budget_db=0.0, profile="night run").result
    tiny_models.sample(model, name, 4)
    (run,) = json.loads(VCAttentionQualityReport.execute(latent, model).result[2])["runs"]
    assert [entry["layer"] for entry in run["layers"] if entry["in_16_bit"] == "profile"] == dense
    assert not set(dense) & {call["layer"] for call in run["calls"]}
    from vc_attention.nodes.hook import session_of

    assert session_of(model).stats.declined["budget"] == 2 * 4 * len(dense)


def test_a_missing_damaged_or_foreign_profile_is_a_sentence(tiny, output):
    from vc_attention.nodes.measuring import VCAttentionQuality, VCAttentionQualityReport
    from vc_attention.nodes.profile import Profile, ProfileLayer, path_of, save
    from vc_attention.nodes.state import Layer

    base = patch(tiny, "wan22_t2v")
    plain = tiny_models.sample(base, "wan22_t2v", 2)
    layers = (ProfileLayer(Layer(None, None, 0), True),)
    save(Profile("Wan", 40, layers), path_of("14B"))
    save(Profile("HunyuanVideo", 2, layers), path_of("other family"))
    (output / "vc_attention" / "profiles" / "cut.safetensors").write_bytes(path_of("14B").read_bytes()[:-20])
    for name, words in (
        ("nowhere", "is not in vc_attention/profiles"),
        ("cut", "is damaged"),
        ("other family", "the family HunyuanVideo"),
        ("14B", "40 attention heads"),
    ):
        (model,) = VCAttentionQuality.execute(base, layers="", steps="", budget_db=0.0, profile=name).result
        out = tiny_models.sample(model, "wan22_t2v", 2)
        assert torch.equal(out, plain), name
        node = VCAttentionQualityReport.execute({"samples": out}, model)
        assert words in node.ui.as_dict()["text"][0] and "goes on without it" in node.ui.as_dict()["text"][0]


def test_without_the_patch_the_model_passes_through(tiny, output, monkeypatch):
    from vc_attention.nodes import host
    from vc_attention.nodes.measuring import VCAttentionCapture, VCAttentionQuality, VCAttentionQualityReport

    said = []
    monkeypatch.setattr(host, "show_text", lambda text, node: said.append(text))
    base = tiny("wan22_t2v")
    (model,) = VCAttentionQuality.execute(base, layers="", steps="", budget_db=0.0, profile="").result
    (again,) = VCAttentionCapture.execute(model, layer="0", step=1, max_mb=1, filename_prefix="x").result
    assert model is base and again is base
    assert len(said) == 2 and all("put this node behind VC-Attention Patch" in text for text in said)
    _, image, text = VCAttentionQualityReport.execute({"samples": None}, base, save_profile="never").result
    assert json.loads(text)["runs"] == [] and image.shape[0] == 1 and math.isfinite(float(image.sum()))
    assert not (output / "vc_attention").exists()


def test_the_definitions_are_the_same_on_every_machine():
    from vc_attention.nodes.measuring import VCAttentionCapture, VCAttentionQuality, VCAttentionQualityReport

    for node, widgets in (
        (VCAttentionQuality, {"layers": "", "steps": "", "budget_db": 0.0, "profile": ""}),
        (VCAttentionQualityReport, {"save_profile": ""}),
        (VCAttentionCapture, {"layer": "0", "step": 1, "max_mb": 512, "filename_prefix": "vc_attention/capture"}),
    ):
        required = node.GET_NODE_INFO_V1()["input"]["required"]
        values = {name: spec[1]["default"] for name, spec in required.items() if "default" in spec[1]}
        assert values == widgets and list(values) == list(widgets), node.__name__
    assert VCAttentionQuality.validate_inputs(layers="3-1") is not True
    assert VCAttentionQuality.validate_inputs(steps="0") is not True
    assert VCAttentionQuality.validate_inputs(profile="../x") is not True
    assert VCAttentionQualityReport.validate_inputs(save_profile="a/b") is not True
    assert VCAttentionCapture.validate_inputs(layer="1-2") is not True
    assert VCAttentionQuality.validate_inputs(layers="0-2, single:3", steps="1", profile="a") is True
