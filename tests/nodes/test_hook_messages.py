"""What the creator sees after a run, in the log and through an observer."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from hook_cases import SIGMAS, close
from node_fakes import DIM, HEADS, FakePatcher, Layer, options, plain_attention, run, tokens
from vc_attention.kernels import EXACT
from vc_attention.nodes.hook import attach, session_of


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
