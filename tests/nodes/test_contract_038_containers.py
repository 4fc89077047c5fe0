"""Contract of ComfyUI 0.38 (and, executed elsewhere, 0.33): containers and preferred_attention. With fakes."""

from __future__ import annotations

import pytest
import torch
from fakes_038 import Attention, Container, attention_backend_node
from node_fakes import DIM, HEADS, FakePatcher, FlowSampling, Layer, forward, options, plain_attention, run, tokens
from vc_attention.nodes import engine, host
from vc_attention.nodes.hook import attach, session_of

pytestmark = pytest.mark.fakes

SIGMAS = FlowSampling().simple(8)


@pytest.fixture
def attention(monkeypatch):
    made = Attention()
    monkeypatch.setattr(host, "default_attention", lambda: made)
    return made


def heads_first(length, seed):
    """[1, H, L, D] as a view of [1, L, H, D] storage, as MiniMax-H3 passes it."""
    return tokens(length, seed=seed).unflatten(-1, (HEADS, DIM)).transpose(1, 2)


class Boxed(Layer):
    """A call with containers; fresh ones each time, as the model makes them."""

    def __init__(self, attention, length=96, block=("double", 0), **given):
        self.tensors = [heads_first(length, seed) for seed in (1, 2, 3)]
        self.boxes = []
        super().__init__(*self.tensors, block, {"skip_reshape": True, **given})
        self.attention = self.call
        self.inner = attention

    def call(self, q, k, v, heads, **given):
        boxes = [Container(t) for t in (q, k, v)]
        self.boxes.append(boxes)
        return self.inner(*boxes, heads, **given)

    def wanted(self, **given):
        return plain_attention(*self.tensors, HEADS, skip_reshape=True, **given)


def test_an_accelerated_call_takes_each_container_once(attention):
    layer = Boxed(attention, preferred_attention=pytest.fail)
    model = attach(FakePatcher(), options())
    for outs in run(model, [layer], SIGMAS):
        torch.testing.assert_close(outs[0], layer.wanted(), rtol=0, atol=2e-6)
    assert session_of(model).stats.accelerated == 8 and attention.log == []
    assert {box.takes for boxes in layer.boxes for box in boxes} == {1}


@pytest.mark.parametrize("own_containers", [False, True])
def test_a_declined_call_hands_its_containers_on_untouched(attention, own_containers):
    attention.own_containers = own_containers
    layer = Boxed(attention, 8, invented="kept")
    model = attach(FakePatcher(), options())
    (out,) = forward(model, [layer], 1.0, SIGMAS)
    assert torch.equal(out, layer.wanted())
    assert attention.log == ["containers" if own_containers else "function"]
    assert attention.keywords[0]["invented"] == "kept" and attention.keywords[0]["_inside_attn_wrapper"] is True
    assert [box.takes for box in layer.boxes[0]] == [1, 1, 1]
    assert dict(session_of(model).stats.declined) == {"short": 1}


def test_a_declined_call_goes_to_the_chosen_backend_with_its_containers(attention):
    chosen = Attention(own_containers=True)
    layer = Boxed(attention, 8)
    for model in (
        attach(attention_backend_node(FakePatcher(), chosen), options()),
        attention_backend_node(attach(FakePatcher(), options()), chosen),
    ):
        chosen.log.clear()
        (out,) = forward(model, [layer], 1.0, SIGMAS)
        assert torch.equal(out, layer.wanted())
        assert chosen.log == ["containers"] and attention.log == []


def test_a_declined_call_goes_to_an_older_hook_with_its_tensors(attention):
    seen = []

    def older(func, q, k, v, heads, **kwargs):
        seen.append(type(q))
        return func(q, k, v, heads, **kwargs)

    base = FakePatcher()
    base.model_options["transformer_options"]["optimized_attention_override"] = older
    layer = Boxed(attention, 8)
    (out,) = forward(attach(base, options()), [layer], 1.0, SIGMAS)
    assert torch.equal(out, layer.wanted()) and seen == [torch.Tensor] and attention.log == ["function"]


@pytest.mark.parametrize("own_containers", [False, True])
def test_after_a_problem_the_fallback_gets_full_containers(attention, monkeypatch, own_containers):
    def broken(*args):
        raise ValueError("broken kernel")

    monkeypatch.setattr(engine, "attention", broken)
    attention.own_containers = own_containers
    layer = Boxed(attention)
    model = attach(FakePatcher(), options())
    for outs in run(model, [layer], SIGMAS):
        assert torch.equal(outs[0], layer.wanted())
    assert attention.log == ["containers" if own_containers else "function"] * 8
    assert session_of(model).stats.declined == {"error": 8}


def test_skip_output_reshape_with_containers(attention):
    layer = Boxed(attention, skip_output_reshape=True)
    (out,) = forward(attach(FakePatcher(), options()), [layer], 1.0, SIGMAS)
    assert out.shape == (1, HEADS, 96, DIM)
    torch.testing.assert_close(out, layer.wanted(skip_output_reshape=True), rtol=0, atol=2e-6)


def test_preferred_attention_is_not_seen_and_not_used(attention):
    """The wrapper removes it while an override is set; a declined call then runs the default function."""
    layer = Layer(*(tokens(8, seed=i) for i in range(3)), given={"preferred_attention": pytest.fail})
    layer.attention = attention
    (out,) = forward(attach(FakePatcher(), options()), [layer], 1.0, SIGMAS)
    assert torch.equal(out, plain_attention(layer.q, layer.k, layer.v, HEADS))
    assert attention.log == ["function"] and "preferred_attention" not in attention.keywords[0]


def test_without_the_wrappers_mark_a_declined_call_does_not_come_back_to_us(attention):
    model = attach(FakePatcher(), options())
    override = model.model_options["transformer_options"]["optimized_attention_override"]
    boxes = [Container(heads_first(8, seed)) for seed in (1, 2, 3)]
    override.container_function(
        *boxes, HEADS, skip_reshape=True, transformer_options=model.model_options["transformer_options"]
    )
    assert attention.log == ["function"] and session_of(model).stats.declined == {"no_context": 1}
