"""What comes out of the hook: layouts, dtypes, scale, untouched inputs, declined calls bit for bit."""

from __future__ import annotations

import pytest
import torch
from hook_cases import SIGMAS, close, same_runs
from node_fakes import (
    DIM,
    HEADS,
    FakePatcher,
    Layer,
    forward,
    options,
    plain_attention,
    run,
    self_attention,
    tokens,
    wrapped,
)
from vc_attention.kernels import FAITHFUL
from vc_attention.nodes.hook import attach, session_of


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layout_dtype_and_scale(skip_reshape, skip_output_reshape, dtype):
    layer = self_attention(96, batch=2, scale=0.2, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape)
    layer.q, layer.k, layer.v = (t.to(dtype) for t in (layer.q, layer.k, layer.v))
    if skip_reshape:
        layer.q, layer.k, layer.v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in (layer.q, layer.k, layer.v))
    model = attach(FakePatcher(), options())
    (out,) = forward(model, [layer], 1.0, SIGMAS)
    (wanted,) = forward(FakePatcher(), [layer], 1.0, SIGMAS)
    assert out.shape == wanted.shape and out.dtype == dtype
    assert out.shape == ((2, HEADS, 96, DIM) if skip_output_reshape else (2, 96, HEADS * DIM))
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-6 if dtype == torch.float32 else 2e-2)
    assert session_of(model).stats.accelerated == 1


def test_mixed_dtypes_are_cast_and_the_query_decides_the_output():
    layer = self_attention(96)
    layer.q, layer.v = layer.q.bfloat16(), layer.v.half()
    model = attach(FakePatcher(), options())
    (out,) = forward(model, [layer], 1.0, SIGMAS)
    assert out.dtype == torch.bfloat16 and session_of(model).stats.accelerated == 1
    torch.testing.assert_close(
        out.float(), plain_attention(layer.q.float(), layer.k, layer.v.float(), HEADS), rtol=0, atol=2e-2
    )


def test_inputs_are_never_written_to(layers):
    before = [(layer.q.clone(), layer.k.clone(), layer.v.clone()) for layer in layers]
    run(attach(FakePatcher(), options(plan=FAITHFUL)), layers, SIGMAS)
    for layer, (q, k, v) in zip(layers, before, strict=True):
        assert torch.equal(layer.q, q) and torch.equal(layer.k, k) and torch.equal(layer.v, v)


def test_permutation_only_leaves_every_phase_unchanged(layers):
    model = attach(FakePatcher(), options(group_fraction=0.5, reuse_steps=2))
    same_runs(run(model, layers, SIGMAS), run(FakePatcher(), layers, SIGMAS))
    stats = session_of(model).stats
    assert (stats.grouped, stats.reused, stats.plain, stats.accelerated) == (4, 4, 8, 16)
    assert list(stats.steps.values()) == ["group", "reuse", "group", "reuse", *["plain"] * 4]


def test_declined_calls_reach_the_function_bit_for_bit_with_every_argument():
    seen = []

    def func(q, k, v, heads, *rest, **kwargs):
        seen.append((q, k, v, heads, rest, kwargs))
        return plain_attention(q, k, v, heads, *rest, **{k: v for k, v in kwargs.items() if k == "skip_reshape"})

    mask = torch.zeros(1, 1, 96, 96)
    layer = self_attention(96, mask=mask, invented=SEEN, scale=0.3)
    layer.attention = wrapped(func)
    model = attach(FakePatcher(), options())
    forward(model, [layer], 1.0, SIGMAS)
    ((q, k, v, heads, rest, kwargs),) = seen
    assert q is layer.q and k is layer.k and v is layer.v and (heads, rest) == (HEADS, ())
    assert kwargs["mask"] is mask and kwargs["invented"] is SEEN and kwargs["scale"] == 0.3
    assert kwargs["_inside_attn_wrapper"] is True
    assert dict(session_of(model).stats.declined) == {"mask": 1}


SEEN = object()


def test_an_unknown_keyword_does_not_matter_to_an_eligible_call(layers):
    layers[0].given["invented_by_a_newer_core"] = SEEN
    model = attach(FakePatcher(), options())
    close(forward(model, layers, 1.0, SIGMAS)[0], forward(FakePatcher(), layers, 1.0, SIGMAS)[0])
    assert session_of(model).stats.accelerated == 2


def test_a_short_query_against_a_long_memory_is_accelerated_without_groups():
    """Grouping asks for Lq >= Lkv / 2."""
    layers = [Layer(tokens(n, seed=1), tokens(96, seed=2), tokens(96, seed=3), ("double", n)) for n in (47, 48, 200)]
    model = attach(FakePatcher(), options())
    for out, wanted in zip(*(forward(m, layers, 1.0, SIGMAS) for m in (model, FakePatcher())), strict=True):
        close(out, wanted)
    stats = session_of(model).stats
    assert (stats.plain, stats.grouped) == (1, 2)


def test_mixed_dtypes_meet_in_one_that_holds_them_all():
    layer = self_attention(96)
    layer.q, layer.k, layer.v = layer.q.half(), layer.k.half(), (layer.v * 3e4).bfloat16()
    seen = []
    model = attach(FakePatcher(), options())
    session_of(model).observers.append(lambda record, q, k, v, out: seen.append((q.dtype, v.abs().max().item())))
    forward(model, [layer], 1.0, SIGMAS)
    assert seen[0][0] == torch.float32 and 65504 < seen[0][1] < float("inf")  # more than fp16 holds
