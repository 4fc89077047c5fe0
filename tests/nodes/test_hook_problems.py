"""Exceptions, out of memory, Cancel and numbers that are not finite: the run goes on, or stops, as chosen."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from hook_cases import REAL, SIGMAS, same_runs
from node_fakes import HEADS, FakePatcher, forward, options, plain_attention, run, self_attention
from vc_attention.nodes import engine
from vc_attention.nodes.hook import attach, session_of


def failing(error, after=0):
    count = [0]

    def attention(*args, **kwargs):
        count[0] += 1
        if count[0] > after:
            raise error
        return REAL(*args, **kwargs)

    return attention


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


def test_a_spoiled_last_row_is_seen(monkeypatch):
    def attention(q, k, v, *rest):
        out = REAL(q, k, v, *rest)
        out[:, :, -1] = float("nan")
        return out

    monkeypatch.setattr(engine, "attention", attention)
    layer = self_attention(200)
    (out,) = forward(attach(FakePatcher(), options()), [layer], 1.0, SIGMAS)
    assert torch.equal(out, plain_attention(layer.q, layer.k, layer.v, HEADS))
