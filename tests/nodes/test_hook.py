"""The hook between a fake ComfyUI above and the kernels below: layouts, branches, phases, chains, problems."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import uuid
from types import SimpleNamespace

import pytest
import torch
from node_fakes import (
    DIM,
    HEADS,
    OVERRIDE,
    FakePatcher,
    FlowSampling,
    Layer,
    forward,
    options,
    plain_attention,
    run,
    self_attention,
    tokens,
    wrapped,
)
from vc_attention.kernels import EXACT, FAITHFUL
from vc_attention.nodes import engine, hook
from vc_attention.nodes.hook import attach, session_of

SIGMAS = FlowSampling().simple(8)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def same_runs(patched, plain):
    for outs, wanted in zip(patched, plain, strict=True):
        for a, b in zip(outs, wanted, strict=True):
            close(a, b)


@pytest.fixture
def layers():
    return [self_attention(96, seed=i, block=("double", i)) for i in range(2)]


# -- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layout_dtype_and_scale(skip_reshape, skip_output_reshape, dtype):
    layer = self_attention(96, batch=2, scale=0.2, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape)
    layer.q, layer.k, layer.v = (t.to(dtype) for t in (layer.q, layer.k, layer.v))
    if skip_reshape:
        layer.q, layer.k, layer.v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in (layer.q, layer.k, layer.v))
    model = attach(FakePatcher(), options())
    (out,) = forward(model, [layer], 1.0, SIGMAS)
    (wanted,) = forward(FakePatcher(), [layer], 1.0, SIGMAS)
    assert out.shape == wanted.shape and out.dtype == dtype
    assert out.shape == ((2, HEADS, 96, DIM) if skip_output_reshape else (2, 96, HEADS * DIM))
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-6 if dtype == torch.float32 else 2e-2)
    assert session_of(model).stats.accelerated == 1


def test_mixed_dtypes_are_cast_and_the_query_decides_the_output():
    layer = self_attention(96)
    layer.q, layer.v = layer.q.bfloat16(), layer.v.half()
    model = attach(FakePatcher(), options())
    (out,) = forward(model, [layer], 1.0, SIGMAS)
    assert out.dtype == torch.bfloat16 and session_of(model).stats.accelerated == 1
    torch.testing.assert_close(
        out.float(), plain_attention(layer.q.float(), layer.k, layer.v.float(), HEADS), rtol=0, atol=2e-2
    )


def test_inputs_are_never_written_to(layers):
    before = [(layer.q.clone(), layer.k.clone(), layer.v.clone()) for layer in layers]
    run(attach(FakePatcher(), options(plan=FAITHFUL)), layers, SIGMAS)
    for layer, (q, k, v) in zip(layers, before, strict=True):
        assert torch.equal(layer.q, q) and torch.equal(layer.k, k) and torch.equal(layer.v, v)


def test_permutation_only_leaves_every_phase_unchanged(layers):
    model = attach(FakePatcher(), options(group_fraction=0.5, reuse_steps=2))
    same_runs(run(model, layers, SIGMAS), run(FakePatcher(), layers, SIGMAS))
    stats = session_of(model).stats
    assert (stats.grouped, stats.reused, stats.plain, stats.accelerated) == (4, 4, 8, 16)
    assert list(stats.steps.values()) == ["group", "reuse", "group", "reuse", *["plain"] * 4]


def test_declined_calls_reach_the_function_bit_for_bit_with_every_argument():
    seen = []

    def func(q, k, v, heads, *rest, **kwargs):
        seen.append((q, k, v, heads, rest, kwargs))
        return plain_attention(q, k, v, heads, *rest, **{k: v for k, v in kwargs.items() if k == "skip_reshape"})

    mask = torch.zeros(1, 1, 96, 96)
    layer = self_attention(96, mask=mask, invented=SEEN, scale=0.3)
    layer.attention = wrapped(func)
    model = attach(FakePatcher(), options())
    forward(model, [layer], 1.0, SIGMAS)
    ((q, k, v, heads, rest, kwargs),) = seen
    assert q is layer.q and k is layer.k and v is layer.v and (heads, rest) == (HEADS, ())
    assert kwargs["mask"] is mask and kwargs["invented"] is SEEN and kwargs["scale"] == 0.3
    assert kwargs["_inside_attn_wrapper"] is True
    assert dict(session_of(model).stats.declined) == {"mask": 1}


SEEN = object()


def test_an_unknown_keyword_does_not_matter_to_an_eligible_call(layers):
    layers[0].given["invented_by_a_newer_core"] = SEEN
    model = attach(FakePatcher(), options())
    close(forward(model, layers, 1.0, SIGMAS)[0], forward(FakePatcher(), layers, 1.0, SIGMAS)[0])
    assert session_of(model).stats.accelerated == 2


def test_a_short_query_against_a_long_memory_is_accelerated_without_groups():
    """Grouping asks for Lq >= Lkv / 2."""
    layers = [Layer(tokens(n, seed=1), tokens(96, seed=2), tokens(96, seed=3), ("double", n)) for n in (47, 48, 200)]
    model = attach(FakePatcher(), options())
    for out, wanted in zip(*(forward(m, layers, 1.0, SIGMAS) for m in (model, FakePatcher())), strict=True):
        close(out, wanted)
    stats = session_of(model).stats
    assert (stats.plain, stats.grouped) == (1, 2)


# -- plans and phases -----------------------------------------------------------------------------------------------


def record_attention(monkeypatch):
    calls = []
    real = engine.attention

    def attention(q, k, v, plan, labels, scale, backend):
        calls.append((plan, None if labels is None else labels.clone()))
        return real(q, k, v, plan, labels, scale, backend)

    monkeypatch.setattr(engine, "attention", attention)
    return calls


def test_labels_in_the_window_and_sequence_order_after_it(layers, monkeypatch):
    calls = record_attention(monkeypatch)
    run(attach(FakePatcher(), options(plan=FAITHFUL)), layers[:1], SIGMAS)
    assert [plan for plan, _ in calls] == [FAITHFUL] * 8
    assert [labels is None for _, labels in calls] == [False] * 2 + [True] * 6
    assert torch.equal(calls[0][1], calls[1][1]) and calls[0][1].dtype == torch.uint8


def test_grouping_off_never_groups(layers, monkeypatch):
    calls = record_attention(monkeypatch)
    run(attach(FakePatcher(), options(plan=FAITHFUL, grouping="off")), layers, SIGMAS)
    assert {plan for plan, _ in calls} == {FAITHFUL} and all(labels is None for _, labels in calls)


def test_rebuild_starts_from_the_kept_centroids(layers, monkeypatch):
    starts = []
    real = engine.group

    def group(v, groups, previous):
        starts.append(previous)
        return real(v, groups, previous)

    monkeypatch.setattr(engine, "group", group)
    model = attach(FakePatcher(), options(group_fraction=0.5, reuse_steps=2))
    run(model, layers[:1], SIGMAS)
    assert starts[0] is None and len(starts) == 2
    assert starts[1].centroids.dtype == torch.float32 and starts[1].centroids.shape == (1, HEADS, 4, DIM)


def test_groups_are_freed_on_leaving_the_window_and_on_cleanup(layers):
    model = attach(FakePatcher(), options(group_fraction=0.25))
    state = session_of(model).state
    model.fire("on_pre_run")
    held = []
    for sigma in SIGMAS[:-1]:
        forward(model, layers, float(sigma), SIGMAS)
        held.append(len(state))
    assert held == [2, 2, 0, 0, 0, 0, 0, 0]
    forward(model, layers, 1.0, SIGMAS)
    assert len(state) == 2
    model.fire("on_cleanup")
    assert len(state) == 0 and state.nbytes() == 0


@pytest.mark.parametrize("event", ["on_pre_run", "on_cleanup", "on_detach_after"])
def test_groups_are_freed_by_every_event(layers, event):
    model = attach(FakePatcher(), options())
    forward(model, layers, 1.0, SIGMAS)
    assert len(session_of(model).state) == 2
    model.fire(event, *([True] if event == "on_detach_after" else []))
    assert len(session_of(model).state) == 0


def test_a_new_schedule_object_is_a_new_run_even_without_callbacks(layers):
    """A clone that lost its callbacks: the second sampler groups anew and is counted anew."""
    model = attach(FakePatcher(), options(grouping="all steps", reuse_steps=64))
    model.callbacks.clear()
    session = session_of(model)
    for sigmas in (SIGMAS, SIGMAS.clone()):
        for sigma in sigmas[:3]:
            forward(model, layers, float(sigma), sigmas)
        assert (session.stats.grouped, session.stats.reused) == (2, 4)
    assert [s.grouped for s in session.runs] == [2]


def test_the_same_cached_model_twice(layers):
    model = attach(FakePatcher(), options())
    first, second = run(model, layers, SIGMAS), run(model, layers, SIGMAS)
    same_runs(first, second)
    session = session_of(model)
    assert session.stats == session.runs[-1] and session.stats.grouped == 2


def test_an_interrupted_run_leaves_nothing_behind(layers):
    class InterruptError(Exception):
        pass

    def stop(*args, **kwargs):
        raise InterruptError

    model = attach(FakePatcher(), options())
    broken = [*layers, Layer(*(tokens(8),) * 3, attention=stop)]
    with pytest.raises(InterruptError):
        run(model, broken, SIGMAS)
    session = session_of(model)
    assert len(session.state) == 0 and session.stats.accelerated == 2 and session.broken is None
    same_runs(run(model, layers, SIGMAS), run(FakePatcher(), layers, SIGMAS))
    assert session.stats.grouped == 2


def test_budget_refusal_uses_the_labels_once_and_is_counted(layers):
    model = attach(FakePatcher(), options(state_budget_gb=0.0))
    same_runs(run(model, layers, SIGMAS), run(FakePatcher(), layers, SIGMAS))
    stats = session_of(model).stats
    assert (stats.grouped, stats.reused, stats.unkept) == (4, 0, 4)
    assert "not kept" in stats.summary()


# -- branches, windows, layouts -------------------------------------------------------------------------------------


def halves(layer: Layer) -> list[Layer]:
    return [Layer(*(t[i : i + 1] for t in (layer.q, layer.k, layer.v)), layer.block) for i in (0, 1)]


def test_a_batch_of_two_equals_two_batches_of_one():
    layers = [self_attention(96, batch=2, seed=i, block=("double", i)) for i in range(2)]
    chosen = options(plan=FAITHFUL, group_fraction=0.5, reuse_steps=2)
    batched, single = attach(FakePatcher(), chosen), attach(FakePatcher(), chosen)
    together = run(batched, layers, SIGMAS, uuids=("c", "u"))
    single.fire("on_pre_run")
    for step, sigma in enumerate(SIGMAS[:-1]):
        for i, branch in enumerate(("c", "u")):
            outs = forward(single, [halves(layer)[i] for layer in layers], float(sigma), SIGMAS, uuids=(branch,))
            for out, both in zip(outs, together[step], strict=True):
                assert torch.equal(out, both[i : i + 1])
    a, b = session_of(batched).stats, session_of(single).stats
    assert (
        (a.accelerated, a.grouped, a.reused, a.plain) == (b.accelerated, b.grouped, b.reused, b.plain) == (32, 8, 8, 16)
    )


def test_branches_keep_their_groups_when_order_and_batching_change(monkeypatch):
    calls = record_attention(monkeypatch)
    layer = self_attention(96, batch=2)
    one, two = halves(layer)
    swapped = Layer(*(t.flip(0) for t in (layer.q, layer.k, layer.v)), layer.block)
    ids = [uuid.uuid4(), uuid.uuid4()]
    model = attach(FakePatcher(), options())
    forward(model, [layer], 1.0, SIGMAS, uuids=ids)
    forward(model, [swapped], 1.0, SIGMAS, uuids=ids[::-1])
    forward(model, [one], 1.0, SIGMAS, uuids=ids[:1])
    forward(model, [two], 1.0, SIGMAS, uuids=ids[1:])
    labels = [labels for _, labels in calls]
    assert torch.equal(labels[1], labels[0].flip(0))
    assert torch.equal(torch.cat(labels[2:]), labels[0])
    stats = session_of(model).stats
    assert (stats.grouped, stats.reused) == (2, 4)


def test_a_batch_that_does_not_split_is_accelerated_without_groups():
    model = attach(FakePatcher(), options())
    layer = self_attention(96, batch=3)
    close(forward(model, [layer], 1.0, SIGMAS, uuids=("c", "u"))[0], plain_attention(layer.q, layer.k, layer.v, HEADS))
    assert (session_of(model).stats.plain, session_of(model).stats.grouped) == (1, 0)


def test_several_clips_of_one_conditioning_share_a_branch():
    model = attach(FakePatcher(), options())
    layer = self_attention(96, batch=4)
    close(forward(model, [layer], 1.0, SIGMAS, uuids=("c", "u"))[0], plain_attention(layer.q, layer.k, layer.v, HEADS))
    assert session_of(model).stats.grouped == 2


def test_context_windows_have_their_own_groups(layers):
    model = attach(FakePatcher(), options())
    for frames in ([0, 1, 2], [2, 3, 4], [0, 1, 2], [2, 3, 4]):
        forward(model, layers, 1.0, SIGMAS, context_window=SimpleNamespace(index_list=frames))
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (4, 4)


def test_token_layouts_of_the_payload_have_their_own_groups(layers):
    """MiniMax-H3 in 0.33: the layout is a keyword of apply_model. Key frames change segments, not the signature."""
    layouts = [SimpleNamespace(signature=(1,), segments=[(0, n, "text"), (n, 96, "video")]) for n in (8, 16, 8)]
    model = attach(FakePatcher(), options())
    for layout in layouts:
        forward(model, layers, 1.0, SIGMAS, model_minimax_payload={"layout": layout})
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (4, 2)


def test_calls_without_block_numbers_are_told_apart_by_order():
    layers = [self_attention(96, seed=i, block=(None, None)) for i in range(3)]
    model = attach(FakePatcher(), options())
    run(model, layers, SIGMAS)
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (3, 3)


def test_dense_blocks_without_block_numbers_say_so():
    model = attach(FakePatcher(), options(dense_blocks="0"))
    forward(model, [self_attention(96, block=(None, None))], 1.0, SIGMAS)
    assert "does not number its blocks" in session_of(model).stats.summary()


def test_dense_blocks_stay_with_the_function(layers):
    model = attach(FakePatcher(), options(dense_blocks="double:1"))
    outs = forward(model, layers, 1.0, SIGMAS)
    assert torch.equal(outs[1], plain_attention(layers[1].q, layers[1].k, layers[1].v, HEADS))
    assert dict(session_of(model).stats.declined) == {"dense_block": 1}


# -- the slot -------------------------------------------------------------------------------------------------------


def other_hook(hits, previous=None):
    def other(func, *args, **kwargs):
        hits.append(kwargs.get("mask") is not None)
        return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)

    return other


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


# -- problems -------------------------------------------------------------------------------------------------------


def failing(error, after=0):
    count = [0]

    def attention(*args, **kwargs):
        count[0] += 1
        if count[0] > after:
            raise error
        return REAL(*args, **kwargs)

    return attention


REAL = engine.attention


def test_any_exception_falls_back_for_the_rest_of_the_run(layers, monkeypatch, caplog):
    monkeypatch.setattr(engine, "attention", failing(ValueError("something\nin two lines"), after=3))
    model = attach(FakePatcher(), options())
    with caplog.at_level(logging.WARNING, "vc_attention"):
        same_runs(run(model, layers, SIGMAS), run(FakePatcher(), layers, SIGMAS))
    stats = session_of(model).stats
    assert stats.accelerated == 3 and dict(stats.declined) == {"error": 13}
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(messages) == 1 and "ValueError: something" in messages[0] and "\n" not in messages[0]
    assert "ValueError: something" in stats.summary()
    monkeypatch.setattr(engine, "attention", REAL)
    run(model, layers, SIGMAS)
    assert session_of(model).stats.accelerated == 16  # the next run starts afresh


def test_stop_raises_with_the_cause(layers, monkeypatch):
    cause = ValueError("broken kernel")
    monkeypatch.setattr(engine, "attention", failing(cause))
    model = attach(FakePatcher(), options(on_problem="stop"))
    with pytest.raises(RuntimeError, match=r"stopped this run because on_problem.*broken kernel") as caught:
        run(model, layers, SIGMAS)
    assert caught.value.__cause__ is cause and len(session_of(model).state) == 0


@pytest.mark.parametrize("on_problem", ["fall back", "stop"])
def test_out_of_memory_frees_our_state_and_comfyui_keeps_its_own_way(layers, monkeypatch, on_problem):
    monkeypatch.setattr(engine, "attention", failing(torch.OutOfMemoryError("out of memory"), after=2))
    model = attach(FakePatcher(), options(on_problem=on_problem))
    model.fire("on_pre_run")
    forward(model, layers, 1.0, SIGMAS)
    assert len(session_of(model).state) == 2
    if on_problem == "stop":
        with pytest.raises(torch.OutOfMemoryError):
            forward(model, layers, 1.0, SIGMAS)
    else:
        outs = forward(model, layers, 1.0, SIGMAS)
        assert torch.equal(outs[0], plain_attention(layers[0].q, layers[0].k, layers[0].v, HEADS))
        assert dict(session_of(model).stats.declined) == {"memory": 2}
    assert len(session_of(model).state) == 0


def test_comfyuis_cancel_passes_through(layers, monkeypatch):
    class InterruptProcessingException(Exception):  # noqa: N818 - ComfyUI's own name
        pass

    fake = SimpleNamespace(InterruptProcessingException=InterruptProcessingException)
    monkeypatch.setitem(sys.modules, "comfy.model_management", fake)
    monkeypatch.setattr(engine, "attention", failing(InterruptProcessingException()))
    model = attach(FakePatcher(), options())
    with pytest.raises(InterruptProcessingException):
        run(model, layers, SIGMAS)
    assert session_of(model).stats.declined == {}


def spoiled(after):
    count = [0]

    def attention(q, k, v, *rest):
        count[0] += 1
        out = REAL(q, k, v, *rest)
        return out * float("nan") if count[0] > after else out

    return attention


def test_non_finite_numbers_of_the_first_pass_are_rescued(layers, monkeypatch):
    monkeypatch.setattr(engine, "attention", spoiled(after=0))
    model = attach(FakePatcher(), options())
    same_runs(run(model, layers, SIGMAS), run(FakePatcher(), layers, SIGMAS))
    stats = session_of(model).stats
    assert stats.declined["error"] == 16 and "computed again" in stats.summary()


def test_non_finite_numbers_later_end_our_part_of_the_run(layers, monkeypatch):
    monkeypatch.setattr(engine, "attention", spoiled(after=7))  # 2 layers a step: the last call of step 3
    model = attach(FakePatcher(), options())
    outs = run(model, layers, SIGMAS)
    assert outs[3][1].isnan().all()
    same_runs(outs[4:], run(FakePatcher(), layers, SIGMAS)[4:])
    stats = session_of(model).stats
    assert stats.declined["error"] == 8 and "at step 4" in stats.summary() and "damaged" in stats.summary()


def test_non_finite_numbers_of_the_last_step_are_told(layers, monkeypatch):
    monkeypatch.setattr(engine, "attention", spoiled(after=15))
    model = attach(FakePatcher(), options())
    run(model, layers, SIGMAS)
    assert "not finite at step 8" in session_of(model).stats.summary()


def test_non_finite_numbers_stop_the_run_when_asked(layers, monkeypatch):
    monkeypatch.setattr(engine, "attention", spoiled(after=0))
    with pytest.raises(RuntimeError, match="not finite at step 1"):
        run(attach(FakePatcher(), options(on_problem="stop")), layers, SIGMAS)


# -- what the creator sees ------------------------------------------------------------------------------------------


@pytest.fixture
def shown(monkeypatch):
    texts = []
    server = SimpleNamespace(send_progress_text=lambda text, node: texts.append((node, text)))
    fake = SimpleNamespace(PromptServer=SimpleNamespace(instance=server))
    monkeypatch.setitem(sys.modules, "server", fake)
    return texts


def test_the_node_shows_the_counts_after_each_run(layers, shown):
    layers.append(Layer(tokens(96), tokens(8), tokens(8), ("double", 0)))
    model = attach(FakePatcher(), options(), node_id="12")
    run(model, layers, SIGMAS)
    model.fire("on_cleanup")  # a second GPU's clean-up: nothing new
    ((node, text),) = shown
    assert node == "12"
    assert "16 attention calls accelerated (exact arithmetic on spec): 2 grouped, 2 reused, 12 plain" in text
    assert "8 declined: 8 text or image cross-attention" in text and "8 steps" in text


def test_a_machine_without_a_kernel_says_so_in_one_sentence(layers, shown):
    model = attach(FakePatcher(), options(plan=None, backend="auto"), node_id="3")
    outs = run(model, layers, SIGMAS)
    assert torch.equal(outs[0][0], plain_attention(layers[0].q, layers[0].k, layers[0].v, HEADS))
    ((_, text),) = shown
    assert dict(session_of(model).stats.declined) == {"no_kernel": 16}
    assert "CPU" in text and "No attention call was accelerated." in text


def test_a_model_whose_hook_is_lost_says_so(layers, shown):
    deaf = Layer(*(tokens(96),) * 3, attention=lambda q, k, v, heads, **kwargs: q)
    model = attach(FakePatcher(), options(), node_id="3")
    run(model, [deaf], SIGMAS)
    assert "reached VC-Attention" in shown[0][1]


@pytest.mark.parametrize("server", [None, SimpleNamespace(), SimpleNamespace(PromptServer=SimpleNamespace())])
def test_no_server_is_no_problem(layers, monkeypatch, server):
    monkeypatch.setitem(sys.modules, "server", server)
    run(attach(FakePatcher(), options(), node_id="3"), layers, SIGMAS)


def test_a_server_that_fails_is_no_problem(layers, monkeypatch):
    def broken(text, node):
        raise ConnectionError("gone")

    fake = SimpleNamespace(PromptServer=SimpleNamespace(instance=SimpleNamespace(send_progress_text=broken)))
    monkeypatch.setitem(sys.modules, "server", fake)
    run(attach(FakePatcher(), options(), node_id="3"), layers, SIGMAS)


def test_each_refusal_is_logged_once_a_run(layers, caplog):
    layers.append(Layer(tokens(96), tokens(8), tokens(8), ("double", 0)))
    model = attach(FakePatcher(), options())
    with caplog.at_level(logging.INFO, "vc_attention"):
        for _ in range(2):
            run(model, layers, SIGMAS)
    assert sum("min_tokens" in r.getMessage() for r in caplog.records) == 2


def test_observers_see_heads_first_tensors_and_the_record(layers):
    seen = []
    model = attach(FakePatcher(), options())
    session_of(model).observers.append(lambda record, q, k, v, out: seen.append((record, q, k, v, out)))
    run(model, layers, SIGMAS, uuids=("c",))
    assert [r.phase for r, *_ in seen] == ["group"] * 2 + ["reuse"] * 2 + ["plain"] * 12
    record, q, k, v, out = seen[3]
    assert (record.step, record.steps, record.block_type, record.block_index) == (1, 8, "double", 1)
    assert (record.ordinal, record.lq, record.lkv, record.heads, record.backend) == (0, 96, 96, HEADS, "spec")
    assert record.branches == ("c",) and record.plan == EXACT
    assert q.shape == k.shape == v.shape == out.shape == (1, HEADS, 96, DIM)
    close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))


# -- several GPUs ---------------------------------------------------------------------------------------------------


def test_copies_of_the_schedule_on_extra_devices_do_not_restart_the_run(layers):
    """From 0.33, each extra GPU's pass gets its own copy of sample_sigmas."""
    model = attach(FakePatcher(), options(grouping="all steps", reuse_steps=64))
    model.fire("on_pre_run")
    for sigma in SIGMAS[:3]:
        forward(model, layers, float(sigma), SIGMAS.clone(), multigpu_thread_device="cuda:1")
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (2, 4)


def test_clones_in_threads(layers):
    model = attach(FakePatcher(), options(grouping="all steps", reuse_steps=2))
    model.fire("on_pre_run")
    wanted = forward(FakePatcher(), layers, 1.0, SIGMAS)
    problems = []

    def work(branch):
        try:
            clone = model.clone()
            for sigma in SIGMAS[:-1]:
                for out, want in zip(
                    forward(clone, layers, float(sigma), SIGMAS, uuids=(branch,)), wanted, strict=True
                ):
                    close(out, want)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(f"branch {i}",)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert problems == []
    assert session_of(model).stats.accelerated == 4 * 2 * 8 and session_of(model).stats.forwards == 32


def test_the_override_is_a_function_so_that_clone_keeps_it():
    override = attach(FakePatcher(), options()).model_options["transformer_options"][OVERRIDE]
    assert copy.deepcopy(override) is override and callable(override.container_function)
    assert hook.session_of(FakePatcher()) is None


# -- details that a wrong guess would hide --------------------------------------------------------------------------


def test_centroids_are_not_kept_when_no_rebuild_follows(layers):
    model = attach(FakePatcher(), options(group_fraction=0.5, reuse_steps=2))
    session = session_of(model)
    held = []
    for sigma in SIGMAS[:4]:
        forward(model, layers[:1], float(sigma), SIGMAS)
        ((entry,),) = [list(entries.values()) for entries in session.state._entries.values()]
        held.append(entry.centroids is not None)
    assert held == [True, True, False, False]


def test_a_spoiled_last_row_is_seen(monkeypatch):
    def attention(q, k, v, *rest):
        out = REAL(q, k, v, *rest)
        out[:, :, -1] = float("nan")
        return out

    monkeypatch.setattr(engine, "attention", attention)
    layer = self_attention(200)
    (out,) = forward(attach(FakePatcher(), options()), [layer], 1.0, SIGMAS)
    assert torch.equal(out, plain_attention(layer.q, layer.k, layer.v, HEADS))


def test_mixed_dtypes_meet_in_one_that_holds_them_all():
    layer = self_attention(96)
    layer.q, layer.k, layer.v = layer.q.half(), layer.k.half(), (layer.v * 3e4).bfloat16()
    seen = []
    model = attach(FakePatcher(), options())
    session_of(model).observers.append(lambda record, q, k, v, out: seen.append((q.dtype, v.abs().max().item())))
    forward(model, [layer], 1.0, SIGMAS)
    assert seen[0][0] == torch.float32 and 65504 < seen[0][1] < float("inf")  # more than fp16 holds


def test_a_new_schedule_object_inside_one_run_groups_anew(layers):
    """A sampler that samples twice between PRE_RUN and CLEANUP."""
    model = attach(FakePatcher(), options(grouping="all steps", reuse_steps=64))
    model.fire("on_pre_run")
    for sigmas in (SIGMAS, SIGMAS.clone()):
        forward(model, layers, 1.0, sigmas)
        forward(model, layers, float(sigmas[1]), sigmas)
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (4, 4)
    assert not session_of(model).runs


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
