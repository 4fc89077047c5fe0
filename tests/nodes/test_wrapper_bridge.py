"""The bridge to WanVideoWrapper, on the fakes of `fake_wrapper`: same results, every shape, steps, branches, runs."""

from __future__ import annotations

import fake_wrapper
import pytest
import torch
from fake_wrapper import CALLS, sample, sampling, wan_model
from node_fakes import options
from vc_attention.kernels import FAITHFUL
from vc_attention.nodes import engine, host
from vc_attention.nodes.wrapper_hook import attach_bridge, bridge_session
from wrapper_cases import counts, same, self_attentions


@pytest.fixture(autouse=True)
def _fresh_calls():
    CALLS.clear()


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
