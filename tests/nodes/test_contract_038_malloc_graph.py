"""Contract of ComfyUI 0.38: what outlives a block is made while the allocation recording is paused. With fakes."""

from __future__ import annotations

import sys

import pytest
from fakes_038 import MallocGraph
from node_fakes import FakePatcher, FlowSampling, forward, options, self_attention
from vc_attention.nodes import guard
from vc_attention.nodes.hook import attach, session_of

pytestmark = pytest.mark.fakes

SIGMAS = FlowSampling().simple(8)


def kept_tensors(model):
    session = session_of(model)
    entries = [entry for device in session.state._entries.values() for entry in device.values()]
    tensors = [t for e in entries for t in (e.labels, e.centroids) if t is not None]
    return tensors + list(session.watch.values())


@pytest.fixture
def graph(monkeypatch):
    made = MallocGraph()
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", made.module())
    return made


def test_everything_kept_is_made_outside_the_recording(graph):
    model = attach(FakePatcher(), options(group_fraction=0.5, reuse_steps=2))
    layers = [self_attention(96, batch=2, seed=i, block=("double", i)) for i in range(2)]
    for sigma in SIGMAS[:3]:
        with graph:
            forward(model, layers, float(sigma), SIGMAS, uuids=("c", "u"))
        kept = kept_tensors(model)
        assert len(kept) >= 4 and graph.leaked(kept) == []
    assert graph.paused == 0


def test_what_the_guard_leaves_for_the_end_of_the_pass_is_made_outside_the_recording(graph, monkeypatch):
    found = []
    real = guard.agreement
    monkeypatch.setattr(guard, "agreement", lambda *given: found.append(real(*given)) or found[-1])
    model = attach(FakePatcher(), options())
    with graph:
        forward(model, [self_attention(96, seed=i, block=("double", i)) for i in range(2)], 1.0, SIGMAS)
    assert len(found) == 2 and graph.leaked(found) == []


def test_the_fake_would_notice(graph):
    with graph:
        made = self_attention(8).q + 1
    assert graph.leaked([made]) == [made]


def test_the_output_itself_stays_in_the_recording(graph):
    """It is handed to the block, which frees it: an allocation outside the recording would be foreign there."""
    model = attach(FakePatcher(), options())
    with graph:
        outs = forward(model, [self_attention(96)], 1.0, SIGMAS)
    assert graph.leaked(outs) == outs
