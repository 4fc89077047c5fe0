"""What the browser is told of a run: messages as ComfyUI's server would get them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hook_cases import REAL, SIGMAS
from node_fakes import FakePatcher, forward, options, run
from vc_attention.kernels import Ok, Reason
from vc_attention.nodes import engine, live
from vc_attention.nodes.hook import attach, session_of


class Browser:
    """The server's side of one browser: `got` are the messages of our event."""

    def __init__(self) -> None:
        self.got: list[dict] = []
        self.client_id = "the tab that queued"

    def send_sync(self, event, data, sid=None):
        assert event == live.EVENT and sid == self.client_id
        self.got.append(data)

    def send_progress_text(self, text, node_id):
        pass


@pytest.fixture
def browser(monkeypatch):
    found = Browser()
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace(instance=found)))
    monkeypatch.setattr(live, "INTERVAL", 0.0)
    return found


def sample(model, layers, sigmas=SIGMAS):
    """One sampler run, as ComfyUI brackets it."""
    model.fire("on_pre_run")
    for sigma in sigmas[:-1].tolist():
        forward(model, layers, sigma, sigmas)
    model.fire("on_cleanup")


def test_a_run_is_told_step_by_step(layers, browser):
    sample(attach(FakePatcher(), options(), "7"), layers)
    assert [m["state"] for m in browser.got] == ["running"] * 8 + ["done"]
    assert [m["step"] for m in browser.got] == [*range(8), 7]
    assert [m["phase"] for m in browser.got[:3]] == ["group", "reuse", "plain"]
    assert {m["plan"] for m in browser.got} == {"grpppppp"}
    # the step that begins has run nothing yet
    assert [m["ran"] for m in browser.got[:3]] == ["........", "g.......", "gr......"]
    last = browser.got[-1]
    assert last["ran"] == "grpppppp" and last["steps"] == 8 and last["node"] == "7" and last["run"] == 1
    assert last["counts"] == {"accelerated": 16, "grouped": 2, "reused": 2, "plain": 12, "declined": 0}
    assert last["card"] == "CPU" and last["declined"] == []


def test_a_step_of_several_passes_says_what_ran_in_it(layers, browser):
    """Solvers of second order, and prompts that are not batched, come to a step twice."""
    model = attach(FakePatcher(), options(), "7")
    model.fire("on_pre_run")
    for sigma in SIGMAS[[0, 0, 1, 1]].tolist():
        forward(model, layers, sigma, SIGMAS)
    assert [m["ran"] for m in browser.got] == ["........", "g.......", "g.......", "gr......"]


def test_what_was_declined_and_what_really_ran(layers, browser):
    sample(attach(FakePatcher(), options(min_tokens=4096), "7"), layers)
    last = browser.got[-1]
    assert last["plan"] == "grpppppp" and last["ran"] == "dddddddd"
    assert last["declined"] == [{"code": "short", "words": "text or image cross-attention", "count": 16}]


def test_a_problem_in_the_middle(layers, browser, monkeypatch):
    calls = [0]

    def attention(*args, **kwargs):
        calls[0] += 1
        if calls[0] > 6:
            raise ValueError("broken")
        return REAL(*args, **kwargs)

    monkeypatch.setattr(engine, "attention", attention)
    sample(attach(FakePatcher(), options(), "7"), layers)
    last = browser.got[-1]
    assert last["plan"] == "grpppppp" and last["ran"] == "grpddddd"
    assert "ValueError: broken" in last["notes"][0] and last["declined"][0]["code"] == "error"


def test_a_step_that_was_computed_again_in_16_bit_counts_as_that(layers, browser, monkeypatch):
    def attention(q, *args, **kwargs):
        return torch.zeros_like(q)  # sampled rows do not agree with exact attention

    monkeypatch.setattr(engine, "attention", attention)
    sample(attach(FakePatcher(), options(), "7"), layers)
    assert browser.got[-1]["ran"] == "dddddddd"
    assert browser.got[-1]["declined"][0]["code"] == "guard"


def test_an_interrupted_run_is_stopped(layers, browser):
    model = attach(FakePatcher(), options(), "7")
    model.fire("on_pre_run")
    for sigma in SIGMAS[:3].tolist():
        forward(model, layers, sigma, SIGMAS)
    model.fire("on_cleanup")
    assert browser.got[-1]["state"] == "stopped" and browser.got[-1]["ran"] == "grp....."


def test_two_samplers_of_one_prompt_are_two_runs(layers, browser, monkeypatch):
    prompt = ["a"]
    monkeypatch.setattr(live.host, "prompt_id", lambda: prompt[0])
    model = attach(FakePatcher(), options(), "7")
    sample(model, layers, SIGMAS[:4])
    sample(model, layers, SIGMAS[3:])
    prompt[0] = "b"
    sample(model, layers)
    done = [m for m in browser.got if m["state"] == "done"]
    assert [(m["prompt"], m["run"], m["steps"]) for m in done] == [("a", 1, 3), ("a", 2, 5), ("b", 1, 8)]


def test_messages_are_throttled_and_the_last_is_always_sent(layers, browser, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(live, "INTERVAL", 0.2)
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    model = attach(FakePatcher(), options(), "7")
    model.fire("on_pre_run")
    for sigma in SIGMAS[:-1].tolist():
        forward(model, layers, sigma, SIGMAS)
        now[0] += 0.0625  # exact in binary: steps 0, 4
    model.fire("on_cleanup")
    assert [(m["state"], m["step"]) for m in browser.got] == [("running", 0), ("running", 4), ("done", 7)]


def test_the_last_message_is_sent_however_soon_it_comes(layers, browser, monkeypatch):
    monkeypatch.setattr(live, "INTERVAL", 3600.0)
    sample(attach(FakePatcher(), options(), "7"), layers)
    assert [(m["state"], m["step"]) for m in browser.got] == [("running", 0), ("done", 7)]


def test_a_very_long_schedule_has_no_plan_in_its_messages(layers, browser, monkeypatch):
    """Finding each step's place takes time with the square of the steps; what ran is told all the same."""
    monkeypatch.setattr(live, "LONGEST", 7)
    sample(attach(FakePatcher(), options(), "7"), layers)
    assert {m["plan"] for m in browser.got} == {"." * 8} and browser.got[-1]["ran"] == "grpppppp"


def test_nobody_is_told_without_a_node_a_browser_or_a_server(layers, browser, monkeypatch):
    sample(attach(FakePatcher(), options()), layers)
    browser.client_id = None
    sample(attach(FakePatcher(), options(), "7"), layers)
    monkeypatch.delitem(sys.modules, "server")
    sample(attach(FakePatcher(), options(), "7"), layers)
    assert browser.got == []


def test_a_server_in_trouble_does_not_end_the_run(layers, browser, monkeypatch):
    def broken(*args):
        raise RuntimeError("no loop")

    monkeypatch.setattr(browser, "send_sync", broken)
    model = attach(FakePatcher(), options(), "7")
    sample(model, layers)
    assert session_of(model).stats.accelerated == 16


def test_without_a_schedule_nothing_is_told(layers, browser):
    model = attach(FakePatcher(), options(), "7")
    model.fire("on_pre_run")
    forward(model, layers, 1.0, None)
    model.fire("on_cleanup")
    assert browser.got == []


@pytest.mark.parametrize(
    ("verdict", "engine_name", "code"),
    [(Ok("spec"), "spec", ""), (Reason("no_kernel", "No kernel for this."), "", "no_kernel")],
)
def test_ready_tells_card_path_and_reason(browser, verdict, engine_name, code):
    live.ready("7", torch.device("cpu"), verdict, "A sentence.")
    (message,) = browser.got
    assert (message["state"], message["card"]) == ("ready", "CPU")
    assert (message["engine"], message["code"], message["text"]) == (engine_name, code, "A sentence.")


def test_runs_of_the_fakes_agree(layers):
    """`sample` brackets a run as `run` does: the same counts."""
    first, second = attach(FakePatcher(), options()), attach(FakePatcher(), options())
    sample(first, layers)
    run(second, layers, SIGMAS)
    assert session_of(first).stats.summary() == session_of(second).stats.summary()
