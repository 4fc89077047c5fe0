"""Capturing a call: the caller's own tensors, within a size, once a run, and no problem of a disk ends a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hook_cases import SIGMAS
from node_fakes import HEADS, FakePatcher, forward, options, run, self_attention, tokens
from safetensors import safe_open
from safetensors.torch import load_file
from vc_attention.kernels import FAST
from vc_attention.nodes import engine, files, host
from vc_attention.nodes.capture import Capture, CaptureOptions, Share, share
from vc_attention.nodes.hook import attach, session_of
from vc_attention.nodes.watch import watch
from vc_attention.tools import replay_main


@pytest.fixture(autouse=True)
def output(tmp_path, monkeypatch) -> Path:
    """An output folder, numbered as ComfyUI does it."""

    def numbered(prefix):
        folder = tmp_path / Path(prefix).parent
        if tmp_path not in (folder.resolve(), *folder.resolve().parents):
            raise Exception("outside")
        folder.mkdir(parents=True, exist_ok=True)
        return folder, Path(prefix).name, 1

    monkeypatch.setattr(host, "output_folder", lambda: tmp_path)
    monkeypatch.setattr(host, "numbered_file", numbered)
    return tmp_path


def capturing(**chosen):
    capture = Capture(CaptureOptions(**chosen))
    return watch(attach(FakePatcher(), options(plan=FAST)), capture), capture


def files_in(output: Path) -> list[str]:
    return sorted(path.name for path in output.rglob("*") if path.is_file())


def heads_first(t):
    return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_the_tensors_are_the_callers_before_grouping(layers, output, step, capsys):
    model, capture = capturing(layer="double:1", step=step)
    run(model, layers, SIGMAS)
    assert files_in(output) == ["capture_00001_.safetensors"]
    file = output / "vc_attention" / "capture_00001_.safetensors"
    stored = load_file(file)
    for name in "qkv":
        assert torch.equal(stored[name], heads_first(getattr(layers[1], name)))
    assert capture.text.startswith(f"Saved block double:1, step {step} (2 of 2 heads) to vc_attention/capture_00001_")
    with safe_open(file, framework="pt") as opened:
        facts = opened.metadata()
    assert json.loads(facts["shape_q"]) == [1, 2, 96, 64] and json.loads(facts["heads"]) == [0, 1]
    assert facts["phase"] == {1: "group", 2: "reuse", 5: "plain"}[step]
    assert float(facts["sigma"]) == pytest.approx(float(SIGMAS[step - 1]))
    assert facts["plan"] == FAST.encode() and facts["version"] == host.pack_version()
    content = file.read_bytes()
    assert str(output).encode() not in content and os.path.expanduser("~").encode() not in content
    request = {"case": str(file), "plan": "fast", "backend": "spec", "groups": 0, "out": None, "json": True}
    assert replay_main.main([json.dumps(request)]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["relative_l2"] < 0.1


def test_layout_dtype_and_scale_are_kept(output):
    q, k, v = (heads_first(tokens(96, 2, seed)).to(torch.float16) for seed in range(3))
    layer = self_attention(96, block=("single", 3), skip_reshape=True, skip_output_reshape=True, scale=0.05)
    layer.q, layer.k, layer.v = q, k.expand(2, -1, -1, -1), v[..., :]
    model, _ = capturing(layer="3")
    run(model, [layer], SIGMAS, uuids=("a", "b"))
    stored = load_file(output / "vc_attention" / "capture_00001_.safetensors")
    assert all(torch.equal(stored[name], t) for name, t in zip("qkv", (q, k, v), strict=True))
    assert stored["q"].dtype == torch.float16 and float(stored["scale"]) == 0.05


def test_a_model_that_reuses_its_memory_does_not_change_the_file(layers, output, monkeypatch):
    wanted = heads_first(layers[0].v).clone()
    real = engine.attention

    def attention(q, k, v, *rest):
        out = real(q, k, v, *rest)
        layers[0].v.zero_()
        return out

    monkeypatch.setattr(engine, "attention", attention)
    model, _ = capturing(layer="0")
    run(model, layers, SIGMAS)
    assert torch.equal(load_file(output / "vc_attention" / "capture_00001_.safetensors")["v"], wanted)


def test_once_a_run_and_never_over_another_file(layers, output):
    model, capture = capturing(layer="0", step=2)
    (output / "vc_attention").mkdir()
    (output / "vc_attention" / "capture_00001_.safetensors").write_bytes(b"mine")
    run(model, layers, SIGMAS, uuids=("a",))
    run(model, layers, SIGMAS, uuids=("a",))
    assert files_in(output) == [f"capture_0000{n}_.safetensors" for n in (1, 2, 3)]
    assert (output / "vc_attention" / "capture_00001_.safetensors").read_bytes() == b"mine"
    assert "capture_00003_" in capture.text


def test_a_step_of_several_passes_is_captured_once(layers, output):
    """Prompts that are not batched, and solvers of second order, come to a step more than once."""
    model, capture = capturing(layer="0")
    model.fire("on_pre_run")
    for uuid in ("a", "b", "a"):
        forward(model, layers, float(SIGMAS[0]), SIGMAS, uuids=(uuid,))
    model.fire("on_cleanup")
    assert files_in(output) == ["capture_00001_.safetensors"] and "capture_00001_" in capture.text


@pytest.mark.parametrize(
    ("batch", "heads", "most", "expected"),
    [
        (1, 40, 40_000, Share(1, tuple(range(40)))),
        (1, 40, 8_999, Share(1, (0, 5, 10, 15, 20, 25, 30, 35))),
        (2, 40, 8_000, Share(2, (0, 10, 20, 30))),
        (2, 40, 2_000, Share(2, (0,))),
        (2, 40, 1_999, Share(1, (0,))),
        (4, 3, 3_500, Share(1, (0, 1, 2))),
        (2, 40, 999, None),
    ],
)
def test_what_fits(batch, heads, most, expected):
    assert share(batch, heads, 1000, most) == expected


def test_heads_are_left_out_by_size_and_tokens_are_not(output):
    """One head of 1200 tokens of 64 fp32 channels, q, k and v: 0.92 MB."""
    layer = self_attention(1200)
    model, capture = capturing(max_mb=1)
    run(model, [layer], SIGMAS)
    stored = load_file(output / "vc_attention" / "capture_00001_.safetensors")
    assert stored["q"].shape == (1, 1, 1200, 64) and torch.equal(stored["q"], heads_first(layer.q)[:, :1])
    assert "(1 of 2 heads)" in capture.text
    model, capture = capturing(max_mb=1)
    run(model, [self_attention(2000)], SIGMAS)
    assert capture.text.startswith("Nothing was captured: one head of this call needs 2 MB, and max_mb is 1.")
    assert len(files_in(output)) == 1


def test_a_choice_that_never_comes(layers, output):
    for chosen in ({"layer": "9"}, {"layer": "single:0"}, {"layer": "0", "step": 99}):
        model, capture = capturing(**chosen)
        run(model, layers, SIGMAS)
        assert capture.text.startswith(
            f"Nothing was captured: VC-Attention accelerated no attention call of layer {chosen['layer']}"
        )
    assert files_in(output) == []


# -- problems -------------------------------------------------------------------------------------------------------


def same_as_without(model, layers):
    plain = run(attach(FakePatcher(), options(plan=FAST)), layers, SIGMAS)
    outs = run(model, layers, SIGMAS)
    assert all(torch.equal(a, b) for x, y in zip(outs, plain, strict=True) for a, b in zip(x, y, strict=True))
    assert session_of(model).stats.accelerated == 8 * len(layers)


def test_a_full_disk(layers, output, monkeypatch):
    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    model, capture = capturing(layer="0")
    same_as_without(model, layers)
    assert capture.text.startswith("Nothing was captured (no space left on device); the run went on.")
    assert files_in(output) == []


def test_the_librarys_own_error_for_a_full_disk(layers, output, monkeypatch):
    from safetensors import SafetensorError

    def full(*_):
        raise SafetensorError('Error while serializing: I/O error: No space left on device (os error 28), "/home/me"')

    monkeypatch.setattr(files, "save_file", full)
    model, capture = capturing(layer="0")
    same_as_without(model, layers)
    assert "(no space left on device)" in capture.text and "/home" not in capture.text and files_in(output) == []


@pytest.mark.parametrize("prefix", ["blocked/x", "../out/x"])
def test_a_folder_that_cannot_be_used(layers, output, prefix):
    (output / "blocked").write_text("a file where the folder should be")
    model, capture = capturing(layer="0", filename_prefix=prefix)
    same_as_without(model, layers)
    assert capture.text.startswith("Nothing was captured (") and str(output) not in capture.text
    assert files_in(output) == ["blocked"]


def test_no_memory_for_the_copy(layers, output, monkeypatch):
    def short(*_):
        raise torch.OutOfMemoryError("no")

    model, capture = capturing(layer="0")
    monkeypatch.setattr("vc_attention.nodes.capture._metadata", short)
    same_as_without(model, layers)
    assert capture.text.startswith("Nothing was captured (out of memory)")


def test_a_call_whose_kernel_fails_is_captured_all_the_same(layers, output, monkeypatch):
    """The call that breaks is the one a report needs."""

    def attention(*_):
        raise RuntimeError("a kernel's problem")

    monkeypatch.setattr(engine, "attention", attention)
    model, _ = capturing(layer="0")
    run(model, layers, SIGMAS)
    assert session_of(model).stats.accelerated == 0
    assert torch.equal(load_file(output / "vc_attention" / "capture_00001_.safetensors")["q"], heads_first(layers[0].q))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layer": ""}, "it names one block"),
        ({"layer": "0-1"}, "it names one block"),
        ({"layer": "x"}, "layer does not understand 'x'"),
        ({"step": 0}, "step must lie between 1"),
        ({"max_mb": 0}, "max_mb between 1"),
        ({"filename_prefix": " "}, "filename_prefix is empty"),
    ],
)
def test_wrong_values_are_sentences(values, words):
    with pytest.raises(ValueError, match=words):
        CaptureOptions(**values)
