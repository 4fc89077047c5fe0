"""Contract of ComfyUI 0.38: MiniMax-H3 states its token layout in transformer_options. With fakes."""

from __future__ import annotations

import pytest
from fakes_038 import layout
from node_fakes import FakePatcher, FlowSampling, Layer, forward, optimized_attention, options, self_attention
from vc_attention.nodes.hook import attach, session_of

pytestmark = pytest.mark.fakes

SIGMAS = FlowSampling().simple(8)
TEXT_8 = layout((0, 8, "text"), (8, 96, "video"))
TEXT_16 = layout((0, 16, "text"), (16, 96, "video"))


def h3(state: dict, index: int) -> Layer:
    """A layer of a model that writes the layout into transformer_options inside its own forward pass."""

    def attention(q, k, v, heads, transformer_options):
        transformer_options["minimax_h3_layout"] = state["layout"]
        return optimized_attention(q, k, v, heads, transformer_options=transformer_options)

    layer = self_attention(96, seed=index, block=(None, index))
    layer.attention = attention
    return layer


def test_each_layout_has_its_own_groups():
    state: dict = {}
    layers = [h3(state, i) for i in range(2)]
    model = attach(FakePatcher(), options())
    for state["layout"] in (TEXT_8, TEXT_16, TEXT_8, layout(*TEXT_8.segments)):
        forward(model, layers, 1.0, SIGMAS)
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (4, 4)


def test_the_layout_of_the_call_wins_over_the_payload_of_the_pass():
    """The model rebuilds a layout that does not fit its tokens; the payload then still holds the old one."""
    state = {"layout": TEXT_16}
    model = attach(FakePatcher(), options())
    for payload in (TEXT_8, TEXT_16):
        forward(model, [h3(state, 0)], 1.0, SIGMAS, model_minimax_payload={"layout": payload})
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (1, 1)


def test_segments_and_not_the_signature_tell_layouts_apart():
    same_signature = [layout((0, 8, "text"), (8, n, "cond"), (n, 96, "video")) for n in (20, 30)]
    assert same_signature[0].signature == same_signature[1].signature
    state: dict = {}
    model = attach(FakePatcher(), options())
    for state["layout"] in same_signature:
        forward(model, [h3(state, 0)], 1.0, SIGMAS)
    assert session_of(model).stats.grouped == 2
