"""What the tests of the hook share: a schedule, comparisons, a recording kernel, another node's hook."""

from __future__ import annotations

import torch
from node_fakes import FlowSampling
from vc_attention.nodes import engine

SIGMAS = FlowSampling().simple(8)
#: Our attention before a test replaces it.
REAL = engine.attention


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def same_runs(patched, plain):
    for outs, wanted in zip(patched, plain, strict=True):
        for a, b in zip(outs, wanted, strict=True):
            close(a, b)


def record_attention(monkeypatch):
    calls = []
    real = engine.attention

    def attention(q, k, v, plan, labels, scale, backend):
        calls.append((plan, None if labels is None else labels.clone()))
        return real(q, k, v, plan, labels, scale, backend)

    monkeypatch.setattr(engine, "attention", attention)
    return calls


def other_hook(hits, previous=None):
    def other(func, *args, **kwargs):
        hits.append(kwargs.get("mask") is not None)
        return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)

    return other
