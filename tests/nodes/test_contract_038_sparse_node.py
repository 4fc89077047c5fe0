"""Contract of ComfyUI 0.38: the sparse attention node writes the same slot, again in every step. With fakes."""

from __future__ import annotations

import copy

import pytest
import torch
from fakes_038 import SparseNode
from node_fakes import FakePatcher, FlowSampling, Layer, forward, options, self_attention, tokens
from vc_attention.nodes.hook import attach, session_of

pytestmark = pytest.mark.fakes

SIGMAS = FlowSampling().simple(8)


def run(model, layers):
    """A run in which ON_PREPARE_STATE fires before each pass, on the run's own copy of model_options."""
    running = model.clone()
    running.model_options = {"transformer_options": copy.copy(model.model_options["transformer_options"])}
    running.fire("on_pre_run")
    outs = []
    for sigma in SIGMAS[:-1]:
        running.fire("on_prepare_state", sigma, running.model_options)
        outs.append(forward(running, layers, float(sigma), SIGMAS))
    running.fire("on_cleanup")
    return outs


@pytest.fixture
def layers():
    """Two self-attention calls for us, a longer cross-attention for the sparse node, a short one for nobody."""
    return [
        *(self_attention(96, seed=i, block=("double", i)) for i in range(2)),
        Layer(tokens(200, seed=7), tokens(8, seed=8), tokens(8, seed=9), ("double", 2)),
        Layer(tokens(10, seed=7), tokens(8, seed=8), tokens(8, seed=9), ("double", 2)),
    ]


@pytest.mark.parametrize("ours_first", [True, False])
def test_both_orders_compose(layers, ours_first):
    sparse = SparseNode(tokens=150)
    if ours_first:
        model = sparse.apply(attach(FakePatcher(), options()))
    else:
        model = attach(sparse.apply(FakePatcher()), options())
    outs, wanted = run(model, layers), run(FakePatcher(), layers)
    for out, want in zip(outs, wanted, strict=True):
        for a, b in zip(out, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    stats = session_of(model).stats
    assert stats.accelerated == 16 and dict(stats.declined) == {"short": 16}
    assert sparse.ran == 8  # the sparse node gets the calls that we decline, each once
    assert len(sparse.installed) <= 3  # and does not pile up, step after step
    assert "Another attention hook" in stats.summary() and "sparse" in stats.summary()


def test_our_part_can_be_switched_off_by_steps(layers):
    sparse = SparseNode()
    model = attach(sparse.apply(FakePatcher()), options(start_percent=0.5))
    run(
        model,
        layers[:2],
    )
    stats = session_of(model).stats
    assert (stats.accelerated, dict(stats.declined), sparse.ran) == (8, {"step_range": 8}, 8)
