"""The numeric guard in a run: which passes it looks at, what happens when it refuses one, and how it says so."""

from __future__ import annotations

import logging

import pytest
import torch
from node_fakes import (
    HEADS,
    FakePatcher,
    FlowSampling,
    Layer,
    forward,
    options,
    plain_attention,
    run,
    self_attention,
    tokens,
)
from vc_attention.benchmarks import hook_overhead
from vc_attention.kernels import FAITHFUL, FAST, FOUR_BIT
from vc_attention.nodes import engine, guard
from vc_attention.nodes.hook import attach, session_of

SIGMAS = FlowSampling().simple(8)  # two steps of the window (group, reuse), then six plain ones
REAL = engine.attention


@pytest.fixture
def layers():
    return [self_attention(96, seed=i, block=("double", i)) for i in range(3)]


def exact(layer):
    return plain_attention(layer.q, layer.k, layer.v, HEADS)


def breaking(monkeypatch, fault, when):
    """Our attention with `fault(out, q, k, v, real)` instead of its output in the calls whose number `when` accepts."""
    calls = []

    def attention(q, k, v, *rest):
        calls.append(tuple(q.shape))
        if not when(len(calls) - 1):
            return REAL(q, k, v, *rest)
        return fault(q, k, v, rest)

    monkeypatch.setattr(engine, "attention", attention)
    return calls


def wrong_order(q, k, v, rest):
    return REAL(q, k.roll(7, -2), v, *rest)


def wrong_scale(q, k, v, rest):
    plan, labels, _, backend = rest
    return REAL(q, k, v, plan, labels, 1.0, backend)


def lost_keys(q, k, v, rest):
    plan, _, scale, backend = rest
    return REAL(q, k[:, :, :-32], v[:, :, :-32], plan, None, scale, backend)


def lost_queries(q, k, v, rest):
    out = REAL(q, k, v, *rest)
    out[:, :, -9:] = 0
    return out


def stale_labels(q, k, v, rest):
    """K in the order of other labels than V."""
    labels = torch.arange(k.shape[2]).remainder(5).argsort(stable=True)
    return REAL(q, k[:, :, labels], v, *rest)


def too_long(q, k, v, rest):
    return REAL(q, k, v, *rest) * 2


FAULTS = (wrong_order, wrong_scale, lost_keys, lost_queries, stale_labels, too_long)


# -- a refused pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("plan", [FAST, FAITHFUL])
def test_a_broken_kernel_is_caught_in_the_first_pass(layers, monkeypatch, fault, plan):
    breaking(monkeypatch, fault, lambda n: True)
    model = attach(FakePatcher(), options(plan=plan))
    for outs in run(model, layers, SIGMAS):
        assert all(torch.equal(out, exact(layer)) for out, layer in zip(outs, layers, strict=True))
    stats = session_of(model).stats
    assert stats.accelerated == 3 and dict(stats.declined) == {"guard": 24}
    assert "did not agree with exact attention in block double:0 at step 1" in stats.summary()


@pytest.mark.parametrize(("pass_", "phase"), [(0, "tokens grouped"), (1, "groups reused"), (2, "no groups")])
def test_a_fault_of_one_phase_in_one_layer_is_named(layers, monkeypatch, caplog, pass_, phase):
    calls = breaking(monkeypatch, wrong_order, lambda n: n == 3 * pass_ + 1)
    model = attach(FakePatcher(), options())
    with caplog.at_level(logging.WARNING, "vc_attention"):
        outs = run(model, layers, SIGMAS)
    assert len(calls) == 3 * (pass_ + 1)  # the refused pass is our last
    for step in range(8):
        for out, layer in zip(outs[step], layers, strict=True):
            if step < pass_:
                torch.testing.assert_close(out, exact(layer), rtol=0, atol=2e-6)
            else:
                assert torch.equal(out, exact(layer))
    (message,) = [r.getMessage() for r in caplog.records]
    assert f"in block double:1 at step {pass_ + 1} ({phase}): agreement 0." in message
    assert "at least 0.9 is expected. ComfyUI's own attention runs for the rest of this run" in message
    assert "this step was computed again" in message and "run.py doctor" in message
    assert "add double:1 to dense_blocks" in message
    stats = session_of(model).stats
    assert message.removeprefix("VC-Attention: ") in stats.summary()
    assert f"{3 * (8 - pass_)} failed the numeric check" in stats.summary()


def test_the_next_run_checks_afresh(layers, monkeypatch):
    model = attach(FakePatcher(), options())
    with monkeypatch.context() as patch:
        breaking(patch, wrong_order, lambda n: True)
        run(model, layers, SIGMAS)
    session = session_of(model)
    assert session.stats.accelerated == 3
    run(model, layers, SIGMAS)
    assert session.stats.accelerated == 24 and not session.stats.declined and not session.stats.notes
    breaking(monkeypatch, wrong_order, lambda n: True)
    run(model, layers, SIGMAS)
    assert dict(session.stats.declined) == {"guard": 24}


def test_stop_ends_the_run_with_the_finding(layers, monkeypatch):
    breaking(monkeypatch, wrong_order, lambda n: n == 4)
    model = attach(FakePatcher(), options(on_problem="stop"))
    with pytest.raises(
        RuntimeError, match=r"stopped this run.*in block double:1 at step 2 .*is expected\. Set"
    ) as caught:
        run(model, layers, SIGMAS)
    assert isinstance(caught.value.__cause__, guard.GuardError) and len(session_of(model).state) == 0


def test_several_refused_layers_are_counted_and_the_first_is_named(layers, monkeypatch):
    breaking(monkeypatch, wrong_order, lambda n: n > 0)
    model = attach(FakePatcher(), options())
    run(model, layers, SIGMAS)
    text = session_of(model).stats.summary()
    assert "in block double:1" in text and "(2 of 3 calls disagree)" in text
    assert "dense_blocks" not in text and "until then set precision to off" in text


@pytest.mark.parametrize(
    ("block", "named"),
    [
        (("double", 4), "block double:4 (its call 2) at"),
        ((None, 4), "block 4 (its call 2) at"),
        ((None, None), "self-attention call 2 of the pass at"),
    ],
)
def test_layers_are_named_as_well_as_the_core_allows(monkeypatch, block, named):
    breaking(monkeypatch, wrong_order, lambda n: n == 1)
    model = attach(FakePatcher(), options())
    forward(model, [self_attention(96, seed=i, block=block) for i in range(2)], 1.0, SIGMAS)
    text = session_of(model).stats.summary()
    assert named in text
    hint = {"double": "add double:4 to", None: "add 4 to"}[block[0]]
    assert (hint in text) == (block[1] is not None)


def test_the_hint_of_the_text_works(layers, monkeypatch):
    """The block in dense_blocks: the others stay accelerated."""
    breaking(monkeypatch, lambda q, k, v, rest: wrong_order(q, k, v, rest) if q[0, 0, 0, 0] == layers[1].q[0, 0, 0]
             else REAL(q, k, v, *rest), lambda n: True)  # fmt: skip
    model = attach(FakePatcher(), options(dense_blocks="double:1"))
    run(model, layers, SIGMAS)
    assert session_of(model).stats.accelerated == 16 and dict(session_of(model).stats.declined) == {"dense_block": 8}


def test_a_pass_with_a_controlnet_is_not_repeated(layers, monkeypatch):
    """Its residuals are used up; but the rest of the run falls back, and the text does not claim a rescue."""
    breaking(monkeypatch, wrong_order, lambda n: n == 0)
    model = attach(FakePatcher(), options())
    passes = []
    layers.append(Layer(*(tokens(8),) * 3, attention=lambda q, k, v, heads, **kwargs: passes.append(1) or q))
    for sigma in SIGMAS[:3]:
        outs = _controlled(model, layers, float(sigma))
    assert len(passes) == 3 and torch.equal(outs[0], exact(layers[0]))
    text = session_of(model).stats.summary()
    assert "may be damaged" in text and "computed again" not in text


def test_numbers_that_are_not_finite_under_a_controlnet_end_our_part_of_the_run(layers, monkeypatch):
    breaking(monkeypatch, lambda q, k, v, rest: REAL(q, k, v, *rest) * float("nan"), lambda n: n == 0)
    model = attach(FakePatcher(), options())
    _controlled(model, layers, 1.0)
    outs = _controlled(model, layers, float(SIGMAS[1]))
    assert torch.equal(outs[0], exact(layers[0])) and session_of(model).stats.declined["error"] == 3


def _controlled(model, layers, sigma):
    """A pass whose ControlNet residuals are at hand: `control` as a keyword, as later cores pass it."""
    wrapper = model.model_options["transformer_options"]["wrappers"]["apply_model"]["vc_attention"][0]
    given = {**model.model_options["transformer_options"], "sigmas": torch.tensor([sigma]), "uuids": ["a"]}
    given["sample_sigmas"] = SIGMAS

    class Executor:
        class_obj = model.model

        def __call__(self, *args, transformer_options, control, **kwargs):
            outs = []
            for layer in layers:
                transformer_options["block_type"], transformer_options["block_index"] = layer.block
                outs.append(layer.attention(layer.q, layer.k, layer.v, HEADS, transformer_options=transformer_options))
            return outs

    return wrapper(Executor(), torch.zeros(1), None, transformer_options=given, control={"input": []})


def test_the_layer_that_is_not_finite_is_named(layers, monkeypatch):
    breaking(monkeypatch, lambda q, k, v, rest: REAL(q, k, v, *rest) * float("nan"), lambda n: n == 2)
    model = attach(FakePatcher(), options())
    outs = run(model, layers, SIGMAS)
    assert torch.equal(outs[0][2], exact(layers[2]))
    assert "not finite at step 1 in block double:2; the step was computed again" in session_of(model).stats.summary()


# -- sound kernels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [FAST, FAITHFUL, FOUR_BIT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(96, 96), (129, 129), (1, 96), (60, 300)])
def test_sound_kernels_pass(plan, dtype, lengths):
    lq, lkv = lengths
    layers = [
        Layer(*(tokens(n, 2, i + s).to(dtype) for s, n in enumerate((lq, lkv, lkv))), ("double", i)) for i in range(2)
    ]
    model = attach(FakePatcher(), options(plan=plan))
    run(model, layers, SIGMAS, uuids=("c", "u"))
    stats = session_of(model).stats
    assert stats.accelerated == 32 and not stats.declined and not stats.notes


def test_the_callers_scale_is_the_guards(layers):
    layers[0].given["scale"] = 0.9
    model = attach(FakePatcher(), options())
    run(model, layers, SIGMAS)
    assert not session_of(model).stats.declined


# -- which calls are looked at, and what it costs -------------------------------------------------------------------


@pytest.fixture
def looked_at(monkeypatch):
    """(tokens of the queries, of the keys, turn) of every guarded call."""
    seen = []
    real = guard.agreement

    def agreement(q, k, v, out, scale, turn):
        seen.append((q.shape[2], k.shape[2], turn))
        return real(q, k, v, out, scale, turn)

    monkeypatch.setattr(guard, "agreement", agreement)
    return seen


def test_every_layer_of_each_phases_first_pass_once_a_run(layers, looked_at):
    model = attach(FakePatcher(), options())
    for _ in range(2):
        run(model, layers, SIGMAS)
    # other heads in each layer, and in one layer's next phase
    assert [turn for *_, turn in looked_at] == [0, 1, 2, 1, 2, 3, 2, 3, 4] * 2


def test_a_new_shape_is_looked_at_on_its_own(layers, looked_at):
    model = attach(FakePatcher(), options())
    longer = [self_attention(160, seed=7)]
    for some in (layers, longer, layers, longer, [self_attention(96, batch=2)]):
        forward(model, some, 0.01, SIGMAS)
    assert [lq for lq, *_ in looked_at] == [96, 96, 96, 160, 96]


def test_two_shapes_in_one_pass(looked_at):
    model = attach(FakePatcher(), options())
    layers = [Layer(tokens(n, seed=1), tokens(96, seed=2), tokens(96, seed=3), ("double", n)) for n in (48, 200)]
    forward(model, layers, 0.01, SIGMAS)
    forward(model, [*layers, self_attention(64)], 0.01, SIGMAS)
    assert [pair[:2] for pair in looked_at] == [(48, 96), (200, 96), (64, 64)]


def test_one_read_for_a_guarded_pass_and_none_in_its_layers(layers):
    model = attach(FakePatcher(), options())
    forward(model, layers, 1.0, SIGMAS)  # the schedule is read once a run
    inside = []
    attention = layers[0].attention

    def counted(*args, **kwargs):
        with hook_overhead.MethodReads() as methods, hook_overhead.OperationReads() as operations:
            out = attention(*args, **kwargs)
        inside.append(methods.seen + operations.seen)
        return out

    for layer in layers:
        layer.attention = counted
    reads = []
    for sigma in SIGMAS[1:5].tolist():
        with hook_overhead.MethodReads() as methods:
            forward(model, layers, sigma, SIGMAS)
        reads.append(len(methods.seen))
    # sigma with what the last pass left, and once more after the first pass of "reuse" and of "plain"
    assert reads == [2, 2, 1, 1]
    assert inside == [[]] * 12


def test_calls_that_we_decline_are_not_looked_at(looked_at):
    model = attach(FakePatcher(), options())
    forward(model, [self_attention(96, mask=torch.zeros(1, 1, 96, 96)), Layer(*(tokens(8),) * 3)], 1.0, SIGMAS)
    assert looked_at == []


def test_nothing_is_kept_after_the_pass(layers):
    model = attach(FakePatcher(), options())
    run(model, layers, SIGMAS)
    session = session_of(model)
    assert not session.checked and not session.watch
