"""MiniMax-H3 (ComfyUI 0.33.0 and later): tensor containers, batch 1, strided views, the layout in the payload."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from call_bench import Bench, attention, flat_qkv, headed
from comfy_cases import STEPS, TOLERANCE, attach_again, distance, options, run_case
from vc_attention.tools import tiny_models

pytestmark = pytest.mark.comfy

NAME = "minimax_h3"
TEXT, AUDIO, VIDEO = 20, 2 * 37, 7 * 4 * 6


@pytest.fixture
def base(tiny):
    return tiny(NAME)


def test_keyframes(base):
    """A conditioning frame adds tokens to one branch and not to the other: two lengths, two layouts, one latent."""
    positive = tiny_models.conditioning(NAME, 20, 1, keyframe=True)
    outcome = run_case(base, NAME, positive=positive)
    outcome.check()
    lengths = {call[3] for one in outcome.passes for call in one.calls}
    frame = 4 * 6
    assert lengths == {TEXT + AUDIO + VIDEO, TEXT + frame + AUDIO + VIDEO} | ({TEXT} & lengths)


def test_calls_are_batch_one_strided_views(base):
    """What reaches the kernels: q and k as views into the fused projection, with three times the row stride."""
    from vc_attention.nodes.hook import session_of

    seen = []
    patched = attach_again(base, NAME)
    session_of(patched).observers.append(lambda record, q, k, v, out: seen.append((q, k, v)))
    tiny_models.sample(patched, NAME, 1)
    assert seen
    for q, k, v in seen:
        assert q.shape[0] == 1
        assert q.stride(2) == k.stride(2) == 3 * 2 * 128
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()


def test_every_container_is_taken_once(base, monkeypatch):
    """Accelerated or declined, a container is emptied exactly once; taking twice is an error of ComfyUI's."""
    import comfy.ldm.modules.attention as core

    made, taken = Counter(), Counter()
    real = core.AttentionTensorContainer

    class Counting(real):
        __slots__ = ()

        def __init__(self, tensor):
            made["n"] += 1
            super().__init__(tensor)

        def take(self):
            taken["n"] += 1
            return super().take()

    import comfy.ldm.minimax.model as h3

    monkeypatch.setattr(h3, "AttentionTensorContainer", Counting)
    reference = tiny_models.sample(base, NAME, 3)
    for min_tokens in (64, 100_000):
        made.clear()
        taken.clear()
        out = tiny_models.sample(attach_again(base, NAME, min_tokens=min_tokens), NAME, 3)
        assert made["n"] == taken["n"] > 0
        assert distance(out, reference) <= TOLERANCE


def test_a_failing_kernel_gives_the_containers_back(base, monkeypatch):
    """Our path fails after taking the tensors: ComfyUI's attention still gets them, and the clip is unharmed."""
    from vc_attention.nodes import engine
    from vc_attention.nodes.hook import session_of

    def broken(*_: Any, **__: Any):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine, "attention", broken)
    patched = attach_again(base, NAME)
    out = tiny_models.sample(patched, NAME, 2)
    assert distance(out, tiny_models.sample(base, NAME, 2)) == 0
    assert session_of(patched).stats.declined["error"] > 0
    assert "illegal memory access" in session_of(patched).stats.summary()


def test_groups_are_keyed_by_the_layout_in_the_payload(base):
    """0.33.0 puts the layout into APPLY_MODEL's payload; `signature` ignores keyframes, so `segments` is the key."""
    from vc_attention.nodes.hook import session_of

    patched = attach_again(base, NAME)
    session = session_of(patched)
    keys = []
    keep = session.state.keep

    def spy(key, *rest):
        keys.append(key)
        return keep(key, *rest)

    session.state.keep = spy
    positive = tiny_models.conditioning(NAME, 20, 1, keyframe=True)
    tiny_models.sample(patched, NAME, STEPS, positive=positive)
    kinds = {tuple(kind for _, _, kind in key.scope[1]) for key in keys}
    assert kinds == {("text", "audio", "video"), ("text", "cond", "audio", "video")}


def test_the_same_length_in_another_layout_does_not_share_groups(base):
    """Two layouts of one length and one branch: the second pass must not reuse the first one's groups."""

    class Layout:
        signature = (1, 2, 3)

        def __init__(self, *segments):
            self.segments = list(segments)

    bench = Bench(base, options(NAME))
    if not hasattr(bench.model.model.diffusion_model, "blocks"):
        pytest.fail("the tiny H3 has no blocks")
    tensors = headed(flat_qkv())

    def body(to):
        return attention(*tensors, 2, skip_reshape=True, transformer_options=to)

    layouts = Layout((0, 20, "text"), (20, 96, "video")), Layout((0, 10, "text"), (10, 96, "video"))
    for layout in layouts:
        bench.forward(body, minimax_payload={"layout": layout})
    assert (bench.session.stats.grouped, bench.session.stats.reused) == (2, 0)
    for layout in layouts:
        bench.forward(body, step=1, minimax_payload={"layout": layout})
    assert (bench.session.stats.grouped, bench.session.stats.reused) == (2, 2)


@pytest.mark.parametrize("mask", [False, True])
def test_containers_at_the_hook(base, mask):
    """Declined (masked) containers reach ComfyUI's backend; accelerated ones give its result."""
    import comfy.ldm.modules.attention as core

    bench = Bench(base, options(NAME))
    tensors = headed(flat_qkv())
    keywords = {"skip_reshape": True, "mask": torch.zeros(1, 1, 96, 96) if mask else None}
    plain = attention(*tensors, 2, **keywords)
    containers = [core.AttentionTensorContainer(x) for x in tensors]
    out = bench.forward(lambda to: attention(*containers, 2, transformer_options=to, **keywords))
    if mask:
        assert torch.equal(out, plain)
        assert bench.session.stats.declined == {"mask": 1}
    else:
        torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
        assert bench.session.stats.grouped == 1
    assert all(container.tensor is None for container in containers)
