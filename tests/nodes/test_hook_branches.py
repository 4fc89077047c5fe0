"""Whose groups are whose: conditionings, batches, context windows, token layouts, blocks."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

import torch
from hook_cases import SIGMAS, close, record_attention
from node_fakes import HEADS, FakePatcher, Layer, forward, options, plain_attention, run, self_attention
from vc_attention.kernels import FAITHFUL
from vc_attention.nodes.hook import attach, session_of


def halves(layer: Layer) -> list[Layer]:
    return [Layer(*(t[i : i + 1] for t in (layer.q, layer.k, layer.v)), layer.block) for i in (0, 1)]


def test_a_batch_of_two_equals_two_batches_of_one():
    layers = [self_attention(96, batch=2, seed=i, block=("double", i)) for i in range(2)]
    chosen = options(plan=FAITHFUL, group_fraction=0.5, reuse_steps=2)
    batched, single = attach(FakePatcher(), chosen), attach(FakePatcher(), chosen)
    together = run(batched, layers, SIGMAS, uuids=("c", "u"))
    single.fire("on_pre_run")
    for step, sigma in enumerate(SIGMAS[:-1]):
        for i, branch in enumerate(("c", "u")):
            outs = forward(single, [halves(layer)[i] for layer in layers], float(sigma), SIGMAS, uuids=(branch,))
            for out, both in zip(outs, together[step], strict=True):
                assert torch.equal(out, both[i : i + 1])
    a, b = session_of(batched).stats, session_of(single).stats
    assert (
        (a.accelerated, a.grouped, a.reused, a.plain) == (b.accelerated, b.grouped, b.reused, b.plain) == (32, 8, 8, 16)
    )


def test_branches_keep_their_groups_when_order_and_batching_change(monkeypatch):
    calls = record_attention(monkeypatch)
    layer = self_attention(96, batch=2)
    one, two = halves(layer)
    swapped = Layer(*(t.flip(0) for t in (layer.q, layer.k, layer.v)), layer.block)
    ids = [uuid.uuid4(), uuid.uuid4()]
    model = attach(FakePatcher(), options())
    forward(model, [layer], 1.0, SIGMAS, uuids=ids)
    forward(model, [swapped], 1.0, SIGMAS, uuids=ids[::-1])
    forward(model, [one], 1.0, SIGMAS, uuids=ids[:1])
    forward(model, [two], 1.0, SIGMAS, uuids=ids[1:])
    labels = [labels for _, labels in calls]
    assert torch.equal(labels[1], labels[0].flip(0))
    assert torch.equal(torch.cat(labels[2:]), labels[0])
    stats = session_of(model).stats
    assert (stats.grouped, stats.reused) == (2, 4)


def test_a_batch_that_does_not_split_is_accelerated_without_groups():
    model = attach(FakePatcher(), options())
    layer = self_attention(96, batch=3)
    close(forward(model, [layer], 1.0, SIGMAS, uuids=("c", "u"))[0], plain_attention(layer.q, layer.k, layer.v, HEADS))
    assert (session_of(model).stats.plain, session_of(model).stats.grouped) == (1, 0)


def test_several_clips_of_one_conditioning_share_a_branch():
    model = attach(FakePatcher(), options())
    layer = self_attention(96, batch=4)
    close(forward(model, [layer], 1.0, SIGMAS, uuids=("c", "u"))[0], plain_attention(layer.q, layer.k, layer.v, HEADS))
    assert session_of(model).stats.grouped == 2


def test_context_windows_have_their_own_groups(layers):
    model = attach(FakePatcher(), options())
    for frames in ([0, 1, 2], [2, 3, 4], [0, 1, 2], [2, 3, 4]):
        forward(model, layers, 1.0, SIGMAS, context_window=SimpleNamespace(index_list=frames))
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (4, 4)


def test_token_layouts_of_the_payload_have_their_own_groups(layers):
    """MiniMax-H3 in 0.33: the layout is a keyword of apply_model. Key frames change segments, not the signature."""
    layouts = [SimpleNamespace(signature=(1,), segments=[(0, n, "text"), (n, 96, "video")]) for n in (8, 16, 8)]
    model = attach(FakePatcher(), options())
    for layout in layouts:
        forward(model, layers, 1.0, SIGMAS, model_minimax_payload={"layout": layout})
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (4, 2)


def test_calls_without_block_numbers_are_told_apart_by_order():
    layers = [self_attention(96, seed=i, block=(None, None)) for i in range(3)]
    model = attach(FakePatcher(), options())
    run(model, layers, SIGMAS)
    assert (session_of(model).stats.grouped, session_of(model).stats.reused) == (3, 3)


def test_dense_blocks_without_block_numbers_say_so():
    model = attach(FakePatcher(), options(dense_blocks="0"))
    forward(model, [self_attention(96, block=(None, None))], 1.0, SIGMAS)
    assert "does not number its blocks" in session_of(model).stats.summary()


def test_dense_blocks_stay_with_the_function(layers):
    model = attach(FakePatcher(), options(dense_blocks="double:1"))
    outs = forward(model, layers, 1.0, SIGMAS)
    assert torch.equal(outs[1], plain_attention(layers[1].q, layers[1].k, layers[1].v, HEADS))
    assert dict(session_of(model).stats.declined) == {"dense_block": 1}
