"""Each rule of eligibility gives its own reason, and what breaks no rule goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from node_fakes import DIM, HEADS, tokens
from vc_attention.kernels import Reason
from vc_attention.nodes.call import read_call
from vc_attention.nodes.eligibility import ineligible
from vc_attention.nodes.forward import Forward
from vc_attention.nodes.messages import REASONS, SHORT
from vc_attention.nodes.options import PatchOptions
from vc_attention.nodes.schedule import DENSE, PLAIN, Position
from vc_attention.nodes.session import Session

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = PatchOptions(min_tokens=64, dense_blocks="7, single:2", backend="spec")


def code(*args, forward="plain", options=OPTIONS, unsupported=lambda call: None, **keywords):
    """The reason's code for a call with these arguments, or None when it goes."""
    record = forward
    if isinstance(forward, str):
        record = Forward(Session(options), Position(0, 4, DENSE if forward == "dense" else PLAIN), torch.device("cpu"))
    reason = ineligible(read_call(args, keywords), record, options, unsupported)
    return None if reason is None else reason.code


def qkv(lq=96, lkv=96, batch=1, dtype=torch.float32):
    return tokens(lq, batch, 1).to(dtype), tokens(lkv, batch, 2).to(dtype), tokens(lkv, batch, 3).to(dtype)


def heads_first(*tensors):
    return [t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in tensors]


def block(index, kind="double"):
    return {"transformer_options": {"block_type": kind, "block_index": index}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_self_attention_goes(dtype):
    q, k, v = qkv(dtype=dtype)
    assert code(q, k, v, HEADS) is None
    assert code(q, k, v, heads=HEADS, mask=None, scale=0.1, invented="x", **block(3)) is None
    assert code(*heads_first(q, k, v), HEADS, skip_reshape=True) is None
    assert code(q=q, k=k, v=v, heads=HEADS, enable_gqa=False, low_precision_attention=True) is None


def test_query_and_key_lengths_may_differ():
    assert code(*qkv(20, 96), HEADS) is None
    assert code(*qkv(500, 64), HEADS) is None


def test_mixed_dtypes_go_and_are_cast_later():
    q, k, v = qkv()
    assert code(q.bfloat16(), k, v.half(), HEADS) is None


def grown(tensor):
    return tensor.clone().requires_grad_()


Q, K, V = qkv()
CASES = {
    "no_context": lambda: code(Q, K, V, HEADS, forward=None),
    "mask": lambda: code(Q, K, V, HEADS, torch.zeros(1, 1, 96)),
    "low_precision": lambda: code(Q, K, V, HEADS, low_precision_attention=False),
    "gqa": lambda: code(Q, K, V, HEADS, enable_gqa=True),
    "shape": lambda: code(Q, K, V[:, :-1], HEADS),
    "short": lambda: code(*qkv(96, 63), HEADS),
    "head_dim": lambda: code(Q, K, V, 4),
    "dtype": lambda: code(Q.double(), K, V, HEADS),
    "scale": lambda: code(Q, K, V, HEADS, scale=torch.tensor(0.1)),
    "step_range": lambda: code(Q, K, V, HEADS, forward="dense"),
    "dense_block": lambda: code(Q, K, V, HEADS, **block(7)),
    "training": lambda: code(grown(Q), K, V, HEADS),
    "no_kernel": lambda: code(Q, K, V, HEADS, unsupported=lambda call: Reason("no_kernel", "no")),
}
#: Given elsewhere: by the hook after a problem, and inside a CUDA graph.
NOT_FROM_A_CALL = {"budget", "error", "guard", "memory", "capture"}


@pytest.mark.parametrize("expected", CASES)
def test_reason(expected):
    assert CASES[expected]() == expected


def test_every_reason_is_covered_here():
    assert set(CASES) | NOT_FROM_A_CALL == set(REASONS)


@pytest.mark.parametrize(
    ("expected", "make"),
    [
        ("mask", lambda: code(Q, K, V, HEADS, mask=torch.ones(1, 96, dtype=torch.bool))),
        ("mask", lambda: code(Q, K, V, HEADS, is_causal=True)),
        (
            "gqa",
            lambda: code(*heads_first(Q, K, V)[:1], *(t[:, :1] for t in heads_first(K, V)), HEADS, skip_reshape=True),
        ),
        ("gqa", lambda: code(Q, K[..., :DIM], V[..., :DIM], HEADS)),
        ("shape", lambda: code(Q, K, V)),
        ("shape", lambda: code(Q, K, V, HEADS, None, None, False, False, "a ninth argument")),
        ("shape", lambda: code(Q, None, V, HEADS)),
        ("shape", lambda: code(Q, K, V, 3)),
        ("shape", lambda: code(Q, K, V, HEADS, skip_reshape=True)),
        ("shape", lambda: code(*heads_first(Q, K, V), HEADS)),
        ("shape", lambda: code(*qkv(0, 96), HEADS)),
        ("shape", lambda: code(Q, K.expand(2, -1, -1), V.expand(2, -1, -1), HEADS)),
        ("shape", lambda: code(Q, K.to("meta"), V, HEADS)),
        ("dtype", lambda: code(Q, K, V.to(torch.float8_e4m3fn), HEADS)),
        ("dense_block", lambda: code(Q, K, V, HEADS, **block(2, "single"))),
        (None, lambda: code(Q, K, V, HEADS, **block(2, "double"))),
    ],
)
def test_further_forms(expected, make):
    assert make() == expected


def test_no_gradient_is_no_obstacle_in_sampling():
    with torch.no_grad():
        assert code(grown(Q), K, V, HEADS) is None


def test_inside_a_cuda_graph(monkeypatch):
    class OnCard(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert code(Q.as_subclass(OnCard), K, V, HEADS) == "capture"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert code(Q.as_subclass(OnCard), K, V, HEADS) is None


def test_the_machine_is_asked_last():
    asked = []
    assert code(*qkv(96, 63), HEADS, unsupported=lambda call: asked.append(call)) == "short"
    assert asked == []


@pytest.mark.parametrize("reason", REASONS.values(), ids=lambda r: r.code)
def test_each_reason_is_a_sentence_with_an_entry_in_the_help_page(reason):
    assert reason.text.endswith(".") and ("ComfyUI" in reason.text or "16 bit" in reason.text)
    assert reason.code in SHORT
    page = (ROOT / "web" / "docs" / "VCAttentionPatch.md").read_text(encoding="utf-8")
    assert f"`{reason.code}`" in page and SHORT[reason.code] in page
