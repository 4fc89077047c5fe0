"""Groups over the steps of a run: plans, labels, rebuilds, what is freed, a new run, the memory budget."""

from __future__ import annotations

import pytest
import torch
from hook_cases import SIGMAS, record_attention, same_runs
from node_fakes import DIM, HEADS, FakePatcher, Layer, forward, options, run, tokens
from vc_attention.kernels import FAITHFUL
from vc_attention.nodes import engine
from vc_attention.nodes.hook import attach, session_of


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


def test_centroids_are_not_kept_when_no_rebuild_follows(layers):
    model = attach(FakePatcher(), options(group_fraction=0.5, reuse_steps=2))
    session = session_of(model)
    held = []
    for sigma in SIGMAS[:4]:
        forward(model, layers[:1], float(sigma), SIGMAS)
        ((entry,),) = [list(entries.values()) for entries in session.state._entries.values()]
        held.append(entry.centroids is not None)
    assert held == [True, True, False, False]


def test_a_new_schedule_object_inside_one_run_groups_anew(layers):
    """A sampler that samples twice between PRE_RUN and CLEANUP."""
    model = attach(FakePatcher(), options(grouping="all steps", reuse_steps=64))
    model.fire("on_pre_run")
    for sigmas in (SIGMAS, SIGMAS.clone()):
        forward(model, layers, 1.0, sigmas)
        forward(model, layers, float(sigmas[1]), sigmas)
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (4, 4)
    assert not session_of(model).runs
