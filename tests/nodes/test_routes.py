"""Which plan a call runs with: the card's own for a preset, and what runs instead where a kernel is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from node_fakes import FakePatcher
from vc_attention.kernels import FAITHFUL, FAST, FOUR_BIT, PRESETS, Ok, Plan, Reason
from vc_attention.nodes import options, session
from vc_attention.nodes.hook import attach, session_of
from vc_attention.nodes.messages import DEGRADED, KEYLESS
from vc_attention.nodes.options import PatchOptions

DEVICE = torch.device("cuda", 0)
FP8 = replace(FAST, scores="fp8")


def route(monkeypatch, chosen: PatchOptions, has, presets: dict[str, Plan] | None = None):
    """(route or reason, notes) on a card whose kernels compute the plans that `has` says."""
    monkeypatch.setattr(options, "preset", lambda name, device: {**PRESETS, **(presets or {})}[name])

    def supports(device, plan, *rest):
        assert device == DEVICE
        return Ok("cubin") if has(plan) else Reason("no_kernel", f"No kernel computes {plan.encode()}.")

    monkeypatch.setattr(session, "supports", supports)
    model = attach(FakePatcher(), chosen)
    found = session_of(model)._find_route(DEVICE, 128, torch.bfloat16)
    return found, session_of(model).stats.notes


@pytest.mark.parametrize("quality", ["fast", "faithful"])
def test_a_preset_is_what_the_card_is_best_at(monkeypatch, quality):
    plan = replace(PRESETS[quality], scores="fp8")
    found, notes = route(monkeypatch, PatchOptions(quality=quality), lambda p: p.scores == "fp8", {quality: plan})
    assert found.plan == plan and notes == []


def test_the_device_is_asked_about(monkeypatch):
    asked = []
    monkeypatch.setattr(options, "preset", lambda name, device: asked.append((name, device)) or FP8)
    assert PatchOptions().plans(DEVICE) == (FP8,) and PatchOptions(quality="faithful").plans() == (FP8,)
    assert asked == [("fast", DEVICE), ("faithful", None)]


@pytest.mark.parametrize(
    ("chosen", "plan", "sentence"),
    [
        (PatchOptions(precision="4-bit"), FP8, DEGRADED),
        (PatchOptions(plan=replace(FP8, key_means=True)), FP8, KEYLESS),
        (PatchOptions(plan=replace(FAITHFUL, key_means=True)), None, None),
        (PatchOptions(plan=FOUR_BIT), None, None),
    ],
)
def test_what_runs_instead_is_named(monkeypatch, chosen, plan, sentence):
    found, notes = route(monkeypatch, chosen, lambda p: p == FP8, {"fast": FP8})
    if plan is None:
        # The plan that was asked for is the one that the reason is about.
        assert isinstance(found, Reason) and chosen.plan.encode() in found.text and notes == []
    else:
        assert found.plan == plan and notes == [sentence]


def test_key_means_run_where_there_is_a_kernel(monkeypatch):
    keyed = replace(FAST, key_means=True)
    found, notes = route(monkeypatch, PatchOptions(plan=keyed), lambda p: True)
    assert found.plan == keyed and notes == []
