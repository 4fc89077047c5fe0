"""What is kept between steps is bounded, and let go: on leaving the window, on cleanup, on unload, after a failure."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from comfy_cases import STEPS, TOLERANCE, attach_again, distance, permutations
from vc_attention.nodes import host
from vc_attention.nodes.hook import session_of
from vc_attention.tools import tiny_models

pytestmark = pytest.mark.comfy

NAME = "wan22_t2v"


def _held_after_each_pass(model) -> tuple:
    """A clone, and the list of (entries, bytes) kept after each of its forward passes."""
    import comfy.patcher_extension

    watched, held = model.clone(), []
    session = session_of(model)

    def apply_model(executor, *arguments, **keywords):
        out = executor(*arguments, **keywords)
        held.append((len(session.state), session.state.nbytes()))
        return out

    watched.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, "test_held", apply_model)
    return watched, held


def test_groups_are_freed_on_leaving_the_window(tiny):
    watched, held = _held_after_each_pass(attach_again(tiny(NAME), NAME))
    tiny_models.sample(watched, NAME, STEPS)
    # 2 layers x 2 branches in the 4 steps of the window, then nothing
    assert [entries for entries, _ in held] == [4] * 4 + [0] * 4
    assert all(size > 0 for _, size in held[:4])
    assert all(size == 0 for _, size in held[4:])


def test_labels_are_one_byte_a_token_once_no_rebuild_follows(tiny):
    watched, held = _held_after_each_pass(attach_again(tiny(NAME), NAME, reuse_steps=4))
    tiny_models.sample(watched, NAME, STEPS)
    assert held[0][1] == 2 * 2 * 2 * 72  # layers, branches, heads, tokens


def _resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def test_five_runs_leave_nothing_behind(tiny):
    """Live tensors after each run are the same number; resident memory is flat."""
    patched = attach_again(tiny(NAME), NAME)
    session = session_of(patched)
    tensors, resident = [], []
    for seed in range(6):
        tiny_models.sample(patched, NAME, 4, seed=seed)
        gc.collect()
        tensors.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
        if Path("/proc/self/statm").exists():
            resident.append(_resident_kib())
        assert len(session.state) == 0 and session.state.nbytes() == 0
        assert not session.watch and not session.checked
    assert len(set(tensors[1:])) == 1
    assert len(session.runs) <= 8
    if resident:
        assert resident[-1] - resident[1] < 4096  # KiB; one kept run of this model's groups would be small: see tensors


def test_history_is_bounded(tiny):
    patched = attach_again(tiny(NAME), NAME)
    for _ in range(12):
        tiny_models.sample(patched, NAME, 1, cfg=1.0)
    assert len(session_of(patched).runs) == 8


def test_unloading_the_model_frees_the_groups(tiny, monkeypatch):
    """ON_DETACH in the middle of a run: nothing stays, and the run goes on."""
    import comfy.patcher_extension

    patched = attach_again(tiny(NAME), NAME)
    session, left = session_of(patched), []
    watched = patched.clone()
    passes = Counter()

    def apply_model(executor, *arguments, **keywords):
        passes["n"] += 1
        if passes["n"] == 2:
            kept = len(session.state)
            for callback in patched.get_all_callbacks(comfy.patcher_extension.CallbacksMP.ON_DETACH):
                callback(patched, True)
            left.append((kept, len(session.state)))
        return executor(*arguments, **keywords)

    watched.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, "test_unload", apply_model)
    out = tiny_models.sample(watched, NAME, STEPS)
    assert left == [(4, 0)]
    assert distance(out, tiny_models.sample(tiny(NAME), NAME, STEPS)) <= TOLERANCE


@pytest.mark.parametrize("why", ["no budget", "no free memory"])
def test_no_room_for_groups_costs_time_and_nothing_else(tiny, monkeypatch, why):
    """Budget 0, or a full card: every grouped step builds again, the latent is right, the node says so."""
    if why == "no free memory":
        monkeypatch.setattr(host, "free_memory", lambda device: 0)
    patched = attach_again(tiny(NAME), NAME, state_budget_gb=0.0 if why == "no budget" else 1.0)
    watched, held = _held_after_each_pass(patched)
    with permutations() as orders:
        out = tiny_models.sample(watched, NAME, STEPS)
    stats = session_of(patched).stats
    assert held == [(0, 0)] * STEPS
    assert (stats.grouped, stats.reused, stats.unkept) == (16, 0, 16)
    assert "state_budget_gb" in stats.summary()
    assert orders
    assert distance(out, tiny_models.sample(tiny(NAME), NAME, STEPS)) <= TOLERANCE


def test_a_failing_kernel_frees_everything_and_the_clip_is_whole(tiny, monkeypatch):
    """on_problem = fall back: ComfyUI's attention takes the rest of the run over; stop: one clear error."""
    from vc_attention.nodes import engine

    real, calls = engine.attention, Counter()

    def fails_later(*arguments, **keywords):
        calls["n"] += 1
        if calls["n"] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(*arguments, **keywords)

    monkeypatch.setattr(engine, "attention", fails_later)
    patched = attach_again(tiny(NAME), NAME)
    watched, held = _held_after_each_pass(patched)
    out = tiny_models.sample(watched, NAME, STEPS)
    stats = session_of(patched).stats
    assert distance(out, tiny_models.sample(tiny(NAME), NAME, STEPS)) <= TOLERANCE
    assert stats.declined["memory"] > 0 and calls["n"] == 4
    assert held[1:] == [(0, 0)] * (STEPS - 1)

    calls.clear()
    stopping = attach_again(tiny(NAME), NAME, on_problem="stop")
    with pytest.raises(torch.OutOfMemoryError):
        tiny_models.sample(stopping, NAME, STEPS)
    assert len(session_of(stopping).state) == 0
