"""The bridge to WanVideoWrapper, on the fakes of `fake_wrapper`: nothing is left behind, and problems stay ours."""

from __future__ import annotations

import gc

import fake_wrapper
import pytest
import torch
from fake_wrapper import CALLS, sample, sampling, wan_model
from node_fakes import options
from vc_attention.nodes import engine
from vc_attention.nodes.messages import FULLGRAPH, NOT_THE_WRAPPERS
from vc_attention.nodes.wrapper_hook import KEY, attach_bridge, bridge_session, obstacle
from wrapper_cases import counts, hooks, same, self_attentions, untouched


@pytest.fixture(autouse=True)
def _fresh_calls():
    CALLS.clear()


# -- undone cleanly -------------------------------------------------------------------------------------------------


def test_nothing_is_exchanged_outside_a_pass_of_the_patched_model():
    plain = wan_model()
    before = fake_wrapper.attention
    patched = attach_bridge(plain, options())
    assert untouched(plain)
    run = sampling(patched, 2)
    next(run)
    assert untouched(plain)
    CALLS.clear()
    sample(plain, steps=1, cfg=False)  # between two steps of the patched clone
    assert [lkv for _, lkv, _ in CALLS] == [96, 12, 96, 12]
    next(run)
    assert untouched(plain) and fake_wrapper.attention is before and bridge_session(patched).stats.forwards == 4


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_an_error_in_the_model_passes_through_and_leaves_it_untouched(error):
    plain = wan_model()
    want = sample(plain)
    patched = attach_bridge(plain, options())
    transformer = plain.model.diffusion_model
    transformer.interrupt = error
    with pytest.raises(type(error)):
        sample(patched)
    transformer.interrupt = None
    assert untouched(plain) == isinstance(error, RuntimeError)  # torch runs no hooks after Ctrl+C
    assert all(map(torch.equal, sample(plain), want)) and untouched(plain)
    sample(patched)
    assert untouched(plain) and counts(patched)[0] == 16


def test_removing_the_node_removes_its_hooks():
    plain = wan_model()
    gc.disable()
    try:
        patched = attach_bridge(plain, options())
        sample(patched)
        clone = patched.clone()  # what a LoRA node behind ours makes
        del patched
        assert hooks(plain) == 2
        sample(clone)
        assert counts(clone)[0] == 16
        del clone
        assert hooks(plain) == 0
    finally:
        gc.enable()


def test_two_nodes_on_one_loader_do_not_meet():
    plain = wan_model()
    one, two = attach_bridge(plain, options()), attach_bridge(plain, options(grouping="off"))
    same(one, plain)
    same(two, plain)
    assert counts(one) == (16, 4, 0, 12) and counts(two) == (16, 0, 0, 16)
    sample(plain)
    assert counts(one)[0] == counts(two)[0] == 16 and untouched(plain)


def test_a_second_node_in_a_row_replaces_the_first():
    plain = wan_model()
    one = attach_bridge(plain, options())
    two = attach_bridge(one, options(grouping="off"))
    same(two, plain)
    assert counts(two) == (16, 0, 0, 16) and counts(one) == (0, 0, 0, 0)
    off = attach_bridge(two, options(plan=None, precision="off"))
    assert KEY not in off.model_options["transformer_options"] and bridge_session(off) is None
    assert all(map(torch.equal, sample(off), sample(plain)))


def test_another_packs_method_on_a_block_is_left_alone():
    plain = wan_model()
    module = self_attentions(plain)[0]
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs)
    theirs = module.forward
    patched = attach_bridge(plain, options())
    same(patched, plain)
    assert module.__dict__["forward"] is theirs and counts(patched)[0] == 8
    assert "Another node replaced the self-attention" in bridge_session(patched).stats.summary()


def test_a_replaced_attention_function_is_followed(monkeypatch):
    """Another pack may exchange the wrapper's `attention`: declined calls go to the one of the moment."""
    patched = attach_bridge(wan_model(), options(min_tokens=4096))
    sample(patched, steps=1)
    seen = []
    real = fake_wrapper.attention

    def other(*args, **kwargs):
        seen.append(args[1].shape[1])
        return real(*args, **kwargs)

    monkeypatch.setattr(fake_wrapper, "attention", other)
    sample(patched, steps=1, cfg=False)
    assert seen == [96, 12, 96, 12]


# -- problems -------------------------------------------------------------------------------------------------------


def wrong(monkeypatch, times: int | None = None):
    real, left = engine.attention, [times]

    def attention(*args):
        if left[0] == 0:
            return real(*args)
        left[0] = None if left[0] is None else left[0] - 1
        return -real(*args)

    monkeypatch.setattr(engine, "attention", attention)


def test_a_pass_that_fails_the_numeric_check_is_computed_again(monkeypatch):
    plain = wan_model()
    want = sample(plain)
    patched = attach_bridge(plain, options())
    wrong(monkeypatch)
    assert all(map(torch.equal, sample(patched), want))
    session = bridge_session(patched)
    assert "this step was computed again" in session.stats.summary() and dict(session.stats.declined) == {"guard": 14}
    monkeypatch.undo()
    same(patched, plain)  # the next run begins with a clean slate
    assert not bridge_session(patched).stats.declined


def test_with_teacache_a_failed_pass_stays_and_says_so(monkeypatch):
    """A second pass would read what the first one left in the cache."""
    plain = wan_model()
    plain.model.diffusion_model.enable_teacache = True
    patched = attach_bridge(plain, options())
    wrong(monkeypatch)
    sample(patched, steps=2)
    assert "this step stays as it is and may be damaged" in bridge_session(patched).stats.summary()
    assert plain.model.diffusion_model.runs == 2  # the second step came from the cache


def test_teacache_keeps_its_way():
    plain = wan_model()
    plain.model.diffusion_model.enable_teacache = True
    patched = attach_bridge(plain, options(grouping="all steps"))
    same(patched, plain, steps=6)
    assert counts(patched)[0] == 2 * 2 * 3  # every other step is computed


def test_an_error_of_ours_falls_back_or_stops(monkeypatch):
    def broken(*args):
        raise ValueError("no such kernel")

    plain = wan_model()
    want = sample(plain)
    monkeypatch.setattr(engine, "attention", broken)
    patched = attach_bridge(plain, options())
    assert all(map(torch.equal, sample(patched), want))
    assert dict(bridge_session(patched).stats.declined) == {"error": 16}
    with pytest.raises(RuntimeError, match="on_problem is set to stop"):
        sample(attach_bridge(plain, options(on_problem="stop")))
    assert untouched(plain)


def test_numbers_that_are_not_finite_end_our_part_of_the_run(monkeypatch):
    """After the guarded passes only samples of the output are looked at, in the next pass."""
    real, seen = engine.attention, []

    def attention(*args):
        seen.append(None)
        return real(*args) * (float("nan") if len(seen) > 4 else 1.0)  # from step 3 on

    plain = wan_model(layers=1)
    monkeypatch.setattr(engine, "attention", attention)
    patched = attach_bridge(plain, options(grouping="off"))
    sample(patched, steps=4)
    stats = bridge_session(patched).stats
    assert "not finite at step 3" in stats.summary() and dict(stats.declined) == {"error": 3}
    seen.clear()
    with pytest.raises(RuntimeError) as stopped:
        sample(attach_bridge(plain, options(grouping="off", on_problem="stop")))
    assert str(stopped.value).count("stopped this run") == 1 and "not finite" in str(stopped.value)
    assert untouched(plain)


def test_models_that_cannot_be_patched_say_why():
    assert obstacle(wan_model()) is None
    assert obstacle(wan_model(compile_args={"fullgraph": False})) is None
    assert obstacle(wan_model(compile_args={"fullgraph": True})) == FULLGRAPH
    other = wan_model()
    other.model.diffusion_model = torch.nn.Linear(2, 2)
    assert obstacle(other) == NOT_THE_WRAPPERS


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_models_are_patched_and_restored(whole):
    plain = wan_model()
    want = sample(plain)
    transformer = plain.model.diffusion_model
    torch._dynamo.reset()
    patched = attach_bridge(plain, options())
    if whole:  # the sampler compiles its own reference of the transformer
        compiled = plain.clone(), patched.clone()
        for model in compiled:
            model.model = type(plain.model)(**vars(plain.model))
            model.model.diffusion_model = torch.compile(transformer, backend="eager")
    else:
        compiled = plain, patched
        for i, block in enumerate(transformer.blocks):
            transformer.blocks[i] = torch.compile(block, backend="eager")
    for model in (*compiled, *compiled):
        for a, b in zip(sample(model), want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    assert counts(patched) == (16, 4, 0, 12)
    assert untouched(plain)
