"""The bridge to WanVideoWrapper, on the fakes of `fake_wrapper`: same results, every shape, and nothing left behind."""

from __future__ import annotations

import gc

import fake_wrapper
import pytest
import torch
from fake_wrapper import CALLS, sample, sampling, wan_model
from node_fakes import options
from vc_attention.kernels import FAITHFUL
from vc_attention.nodes import engine, host
from vc_attention.nodes.messages import FULLGRAPH, NOT_THE_WRAPPERS
from vc_attention.nodes.wrapper_hook import KEY, attach_bridge, bridge_session, obstacle

METHODS = ("forward", "forward_ip", "forward_split")


@pytest.fixture(autouse=True)
def _fresh_calls():
    CALLS.clear()


def self_attentions(model):
    transformer = model.model.diffusion_model
    return [block.self_attn for block in [*transformer.blocks, *getattr(transformer, "vace_blocks", ())]]


def untouched(model) -> bool:
    return not any(name in module.__dict__ for module in self_attentions(model) for name in METHODS)


def hooks(model) -> int:
    transformer = model.model.diffusion_model
    return len(transformer._forward_pre_hooks) + len(transformer._forward_hooks)


def counts(model) -> tuple[int, int, int, int]:
    stats = bridge_session(model).stats
    return stats.accelerated, stats.grouped, stats.reused, stats.plain


def same(patched, plain, **given) -> None:
    for a, b in zip(sample(patched, **given), sample(plain, **given), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


# -- the same clip --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [True, False])
@pytest.mark.parametrize("grouping", ["first steps", "all steps", "off"])
def test_permutation_only_leaves_the_clip_unchanged(cfg, grouping):
    plain = wan_model()
    patched = attach_bridge(plain, options(grouping=grouping, group_fraction=0.5, reuse_steps=2))
    same(patched, plain, steps=8, cfg=cfg)
    branches = 2 if cfg else 1
    grouped, reused = {"first steps": (2, 2), "all steps": (4, 4), "off": (0, 0)}[grouping]
    calls = 2 * branches
    assert counts(patched) == (8 * calls, grouped * calls, reused * calls, (8 - grouped - reused) * calls)
    stats = bridge_session(patched).stats
    assert not stats.declined and (stats.forwards, stats.step_count) == (8 * branches, 8)
    assert stats.family == "Wan in WanVideoWrapper"


@pytest.mark.parametrize(
    ("num_cond", "frames", "calls"),
    [(0, 4, [(96, 96)]), (1, 4, [(72, 96), (24, 24)]), (2, 6, [(96, 144), (24, 24), (24, 24)])],
)
def test_longcat_has_fewer_queries_than_keys(num_cond, frames, calls):
    """No, one, and two conditioning frames: noise queries over conditioning and noise keys."""
    plain = wan_model(is_longcat=True)
    seen = []
    patched = attach_bridge(plain, options())
    bridge_session(patched).observers.append(lambda record, *_: seen.append((record.lq, record.lkv)))
    same(patched, plain, num_cond=num_cond, frames=frames)
    assert seen[: len(calls)] == calls
    assert counts(patched)[0] == len(calls) * 2 * 2 * 4
    assert bridge_session(patched).stats.family == "LongCat-Video"


def test_longcats_conditioning_frame_alone_is_short():
    patched = attach_bridge(wan_model(is_longcat=True), options(min_tokens=32))
    sample(patched, num_cond=1)
    stats = bridge_session(patched).stats
    assert (stats.accelerated, dict(stats.declined)) == (16, {"short": 16})


def test_groups_of_longcat_are_those_of_all_its_keys(monkeypatch):
    found = []
    real = engine.attention

    def attention(q, k, v, plan, labels, *rest):
        found.append((q.shape, k.shape, None if labels is None else labels.shape))
        return real(q, k, v, plan, labels, *rest)

    monkeypatch.setattr(engine, "attention", attention)
    sample(attach_bridge(wan_model(layers=1, is_longcat=True), options()), num_cond=1, cfg=False)
    assert found[0] == ((1, 2, 72, 64), (1, 2, 96, 64), (1, 2, 96))


def test_low_bits_stay_close_and_are_not_the_same():
    plain = wan_model(is_longcat=True)
    a, b = sample(attach_bridge(plain, options(plan=FAITHFUL)), num_cond=1)[-1], sample(plain, num_cond=1)[-1]
    assert not torch.equal(a, b)
    assert ((a - b).norm() / b.norm()).item() < 0.02


@pytest.mark.parametrize("given", [{"seq_chunks": 2}, {"ref_frames": 1}])
def test_several_prompts_and_stand_in_take_the_wrappers_own_ways(given):
    """Two calls in each layer, by forward_split and forward_ip, which give no transformer_options to attention."""
    plain = wan_model()
    patched = attach_bridge(plain, options())
    same(patched, plain, **given)
    assert counts(patched)[0] == 2 * 2 * 2 * 4


def test_vace_blocks_are_named_apart():
    plain = wan_model(vace_layers=1)
    patched = attach_bridge(plain, options(dense_blocks="vace:0, 1"))
    same(patched, plain)
    assert counts(patched)[0] == 8 and dict(bridge_session(patched).stats.declined) == {"dense_block": 16}


# -- what is not taken ----------------------------------------------------------------------------------------------


def test_cross_attention_is_never_touched():
    patched = attach_bridge(wan_model(), options(min_tokens=0))
    sample(patched)
    assert {lkv for _, lkv, _ in CALLS} == {fake_wrapper.TEXT} and len(CALLS) == 2 * 2 * 4
    assert not bridge_session(patched).stats.declined


def test_masked_calls_reach_the_wrappers_attention_as_they_came():
    plain = wan_model()
    mask = torch.zeros(96, 96)
    self_attentions(plain)[0].mask = mask
    patched = attach_bridge(plain, options())
    same(patched, plain, steps=1, cfg=False)
    assert dict(bridge_session(patched).stats.declined) == {"mask": 1} and counts(patched)[0] == 1
    lq, lkv, given = CALLS[0]
    assert (lq, lkv) == (96, 96) and given["attn_mask"] is mask
    assert given["k_lens"].tolist() == [96] and given["attention_mode"] == "sdpa"


def test_short_calls_and_steps_outside_the_percents_are_the_wrappers_bit_for_bit():
    plain = wan_model()
    short = attach_bridge(plain, options(min_tokens=4096))
    assert all(map(torch.equal, sample(short), sample(plain)))
    assert dict(bridge_session(short).stats.declined) == {"short": 16}
    ranged = attach_bridge(plain, options(start_percent=0.25, end_percent=0.5))
    same(ranged, plain)
    stats = bridge_session(ranged).stats
    assert dict(stats.declined) == {"step_range": 8} and list(stats.steps.values()) == [
        "dense",
        "plain",
        "plain",
        "dense",
    ]


# -- steps, branches, runs ------------------------------------------------------------------------------------------


def test_cond_and_uncond_have_their_own_groups(monkeypatch):
    labels = []
    real = engine.attention

    def attention(q, k, v, plan, given, *rest):
        labels.append(None if given is None else given.clone())
        return real(q, k, v, plan, given, *rest)

    monkeypatch.setattr(engine, "attention", attention)
    # One layer sees the same values in both passes; the second layer's differ by the prompt.
    sample(attach_bridge(wan_model(), options(group_fraction=0.5)))
    cond, uncond = labels[1], labels[3]
    assert not torch.equal(cond, uncond)
    assert torch.equal(labels[5], cond) and torch.equal(labels[7], uncond)
    assert labels[8:] == [None] * 8


def test_a_sampler_that_begins_further_down_is_past_the_first_steps():
    second = attach_bridge(wan_model(), options())
    sample(second, top=0.9)
    assert counts(second) == (16, 0, 0, 16)
    everywhere = attach_bridge(wan_model(), options(grouping="all steps"))
    sample(everywhere, top=0.9)
    assert counts(everywhere) == (16, 4, 12, 0)


@pytest.mark.parametrize(("steps", "fraction"), [(1, 0.25), (3, 0.34), (4, 0.25), (5, 0.25), (8, 0.25), (20, 0.3)])
def test_the_first_steps_are_as_many_as_in_comfyuis_samplers(steps, fraction):
    patched = attach_bridge(wan_model(layers=1), options(group_fraction=fraction, reuse_steps=1))
    sample(patched, steps=steps, cfg=False)
    phases = list(bridge_session(patched).stats.steps.values())
    first = -(-fraction * steps // 1)
    assert phases == ["group"] * int(first) + ["plain"] * (steps - int(first))


def test_context_windows_find_groups_in_each_step():
    """They move from step to step, and nothing tells which frames a pass holds."""
    patched = attach_bridge(wan_model(layers=1), options(grouping="all steps"))
    sample(patched, windows=2, cfg=False)
    assert counts(patched) == (8, 8, 0, 0)


def test_a_second_round_from_step_0_begins_anew():
    patched = attach_bridge(wan_model(layers=1), options())
    sample(patched, rounds=2, cfg=False)
    assert counts(patched) == (8, 2, 0, 6)


def test_kept_groups_are_freed_after_the_window_and_after_the_run():
    patched = attach_bridge(wan_model(), options(group_fraction=0.5))
    session = bridge_session(patched)
    held = []
    for _ in sampling(patched, 4):
        held.append(session.state.nbytes())
    assert held[0] > 0 and held[1] > 0 and held[2:] == [0, 0]
    everywhere = attach_bridge(patched, options(grouping="all steps"))
    session = bridge_session(everywhere)
    run = sampling(everywhere, 4)
    next(run)
    assert session.state.nbytes() > 0
    run.close()  # cancelled after the first step
    assert session.state.nbytes() == 0


def test_each_run_is_counted_and_shown_when_its_sampler_returns(monkeypatch):
    shown = []
    monkeypatch.setattr(host, "show_text", lambda text, node_id: shown.append((node_id, text)))
    patched = attach_bridge(wan_model(), options(), "7")
    session = bridge_session(patched)
    sample(patched)
    first = session.stats
    sample(patched, cfg=False)
    assert list(session.runs) == [first]
    assert (first.accelerated, session.stats.accelerated) == (16, 8)
    assert shown[-1] == ("7", session.stats.summary()) and ("7", first.summary()) in shown
    assert "8 attention calls accelerated" in shown[-1][1] and "Wan in WanVideoWrapper, 4 steps" in shown[-1][1]


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
