"""The demo's recorder: errors against exact attention on known tensors."""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path

import pytest
import torch
from vc_attention import kernels
from vc_attention.kernels import EXACT, FAST
from vc_attention.nodes.stats import CallRecord

SOURCE = Path(__file__).resolve().parents[2] / "tools" / "demo" / "vc_demo_nodes" / "recorder.py"
spec = importlib.util.spec_from_file_location("vc_demo_recorder", SOURCE)  # its package needs a running ComfyUI
recorder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recorder)


def record(plan=FAST, phase="group", **more):
    fields = {
        "step": 1, "steps": 4, "phase": phase, "block_type": None, "block_index": None, "ordinal": 2, "lq": 256,
        "lkv": 256, "heads": 2, "plan": plan, "backend": "spec", "branches": ("a", "b"),
    }  # fmt: skip
    return CallRecord(**{**fields, **more})


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 256, 64, generator=generator) for _ in range(3))
    v += 3 * torch.randn(1, 2, 2, 64, generator=generator).repeat_interleave(128, dim=2)
    return q, k, v


def test_an_exact_call_has_no_error(tensors):
    watch = recorder.Recorder("high", kernels.attention)
    out = kernels.attention(*tensors, EXACT, None, None, "spec")
    watch(record(EXACT, "plain"), *tensors, out)
    (call,) = watch.calls
    assert call["error"] < 1e-5 and call["error_without_smoothing"] == call["error"]
    assert call["error_without_grouping"] is None
    assert (call["stage"], call["step"], call["layer"], call["branches"]) == ("high", 1, 2, 2)


def test_the_same_call_without_smoothing_is_computed_for_smoothed_calls(tensors):
    watch = recorder.Recorder("high", kernels.attention)
    watch(record(), *tensors, kernels.attention(*tensors, FAST, None, None, "spec"))
    (call,) = watch.calls
    plain = kernels.attention(*tensors, FAST.without_smoothing(), None, None, "spec")
    exact = torch.nn.functional.scaled_dot_product_attention(*tensors)
    assert call["error_without_smoothing"] == pytest.approx(float((plain - exact).norm() / exact.norm()))
    assert 0 < call["error"] < call["error_without_smoothing"]
    # this call was made without labels, so it is what the ungrouped control computes
    assert call["error_without_grouping"] == call["error"]


def test_the_layer_is_the_block_where_the_model_numbers_its_blocks(tensors):
    watch = recorder.Recorder("", kernels.attention)
    watch(record(EXACT, "plain", block_type="double", block_index=7), *tensors, tensors[2])
    assert (watch.calls[0]["layer"], watch.calls[0]["block_type"]) == (7, "double")


def test_relative_error():
    ones = torch.ones(4)
    assert recorder.relative_error(1.5 * ones, ones) == pytest.approx(0.5)
    assert recorder.relative_error(0 * ones, 0 * ones) == 0.0
    assert recorder.relative_error(ones, 0 * ones) == float("inf")


def test_the_pack_is_found_under_any_name(monkeypatch):
    hook, messages = types.ModuleType("x.y.nodes.hook"), types.ModuleType("x.y.nodes.messages")
    hook.session_of = None
    modules = {"x.y.nodes.hook": hook, "x.y.nodes.messages": messages}
    monkeypatch.setattr(recorder.sys, "modules", modules)
    assert recorder.pack_module("nodes.messages") is messages
    del modules["x.y.nodes.hook"]
    with pytest.raises(RuntimeError, match="pack is not loaded"):
        recorder.pack_module("nodes.messages")
