"""The one slot for attention hooks: chains, order, attaching twice, what clones share."""

from __future__ import annotations

import copy

import pytest
import torch
from hook_cases import SIGMAS, other_hook, same_runs
from node_fakes import (
    HEADS,
    OVERRIDE,
    FakePatcher,
    Layer,
    forward,
    options,
    plain_attention,
    run,
    self_attention,
    tokens,
)
from vc_attention.nodes import hook
from vc_attention.nodes.hook import attach, session_of


@pytest.mark.parametrize("order", ["before", "after", "after, well behaved"])
def test_another_hook_is_chained_behind(layers, order):
    hits = []
    layers.append(self_attention(96, seed=5, block=("double", 2), mask=torch.zeros(1, 1, 96, 96)))
    base = FakePatcher()
    if order == "before":
        base.model_options["transformer_options"][OVERRIDE] = other_hook(hits)
    model = attach(base, options()).clone()
    slot = model.model_options["transformer_options"]
    if order != "before":
        slot[OVERRIDE] = other_hook(hits, slot[OVERRIDE] if "well" in order else None)
    same_runs(run(model, layers, SIGMAS), run(FakePatcher(), layers, SIGMAS))
    stats = session_of(model).stats
    assert hits == [True] * 8  # once for each declined call, never for an accelerated one
    assert stats.accelerated == 16 and dict(stats.declined) == {"mask": 8}
    assert "Another attention hook" in stats.summary() and "other" in stats.summary()


def test_the_slot_and_the_record_do_not_outlive_the_forward_pass(layers):
    model = attach(FakePatcher(), options())
    seen = {}
    forward(model, layers, 1.0, SIGMAS, between=lambda o: (o.update({OVERRIDE: SEEN_HOOK}), seen.update(o=o)))
    assert seen["o"][OVERRIDE] is SEEN_HOOK and "vc_attention" not in seen["o"]


SEEN_HOOK = other_hook([])


def test_the_chained_override_is_the_same_object_in_every_step(layers):
    """Compiled code is guarded by the function in the slot: a new one each step would recompile each step."""
    slots = []
    spy = Layer(*(tokens(8),) * 3, attention=lambda q, k, v, heads, transformer_options: slots.append(
        transformer_options[OVERRIDE]) or q)  # fmt: skip
    model = attach(FakePatcher(), options())
    model.model_options["transformer_options"][OVERRIDE] = other_hook([])
    run(model, [spy], SIGMAS)
    assert len(slots) == 8 and len(set(map(id, slots))) == 1


def test_attaching_twice_replaces(layers):
    first = attach(FakePatcher(), options(grouping="off"))
    second = attach(first, options(dense_blocks="0-9"))
    run(second, layers, SIGMAS)
    assert session_of(second) is not session_of(first)
    assert dict(session_of(second).stats.declined) == {"dense_block": 16}
    assert session_of(first).stats.forwards == 0
    assert [len(keys["vc_attention"]) for keys in second.callbacks.values()] == [1, 1, 1]


def test_attaching_twice_with_a_hook_in_between(layers):
    """The first of ours cannot be taken out of the foreign chain, so it steps aside."""
    hits = []
    first = attach(FakePatcher(), options())
    slot = first.model_options["transformer_options"]
    slot[OVERRIDE] = other_hook(hits, slot[OVERRIDE])
    second = attach(first, options(dense_blocks="0"))
    same_runs(run(second, layers, SIGMAS), run(FakePatcher(), layers, SIGMAS))
    assert session_of(first).stats.forwards == session_of(first).stats.accelerated == 0
    assert not session_of(first).stats.declined
    assert session_of(second).stats.accelerated == 8 and len(hits) == 8


def test_off_takes_us_out_and_leaves_the_others(layers):
    hits = []
    base = FakePatcher()
    base.model_options["transformer_options"][OVERRIDE] = other_hook(hits)
    off = attach(attach(base, options()), options(precision="off", plan=None))
    assert session_of(off) is None
    assert off.model_options["transformer_options"][OVERRIDE] is base.model_options["transformer_options"][OVERRIDE]
    assert not any("vc_attention" in keys for keys in off.callbacks.values())
    run(off, layers, SIGMAS)
    assert len(hits) == 16
    assert (
        OVERRIDE
        not in attach(attach(FakePatcher(), options()), options(precision="off", plan=None)).model_options[
            "transformer_options"
        ]
    )


def test_the_original_model_is_untouched(layers):
    base = FakePatcher()
    attach(base, options())
    assert base.model_options == {"transformer_options": {}} and base.callbacks == {}


def test_clones_and_deep_copies_share_one_session(layers):
    model = attach(FakePatcher(), options())
    clone = model.clone().clone()
    session = session_of(model)
    assert session_of(clone) is session and copy.deepcopy(session) is session
    run(clone, layers, SIGMAS)
    assert session.stats.accelerated == 16


def test_a_call_from_outside_the_model_is_left_alone(layers):
    """A ControlNet gets the same transformer_options before the model runs."""
    model = attach(FakePatcher(), options())
    tower = {**model.model_options["transformer_options"]}
    layer = layers[0]
    out = layer.attention(layer.q, layer.k, layer.v, HEADS, transformer_options=tower)
    assert torch.equal(out, plain_attention(layer.q, layer.k, layer.v, HEADS))
    assert dict(session_of(model).stats.declined) == {"no_context": 1}


def test_the_override_is_a_function_so_that_clone_keeps_it():
    override = attach(FakePatcher(), options()).model_options["transformer_options"][OVERRIDE]
    assert copy.deepcopy(override) is override and callable(override.container_function)
    assert hook.session_of(FakePatcher()) is None


def test_an_older_override_of_ours_inside_the_pass_steps_aside(layers):
    """A hook that a wrapper further in put into the slot, with our first override behind it."""
    first = attach(FakePatcher(), options())
    old = other_hook([], first.model_options["transformer_options"][OVERRIDE])
    second = attach(first, options())
    inner = layers[0].attention

    def attention(q, k, v, heads, transformer_options):
        transformer_options[OVERRIDE] = old
        return inner(q, k, v, heads, transformer_options=transformer_options)

    layers[0].attention = attention
    (out,) = forward(second, layers[:1], 1.0, SIGMAS)
    assert torch.equal(out, plain_attention(layers[0].q, layers[0].k, layers[0].v, HEADS))
    assert session_of(first).stats.accelerated == session_of(second).stats.accelerated == 0
