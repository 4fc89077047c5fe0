"""One slot for attention hooks, and the last writer wins: ours before, after and between those of other nodes."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from comfy_cases import (
    OVERRIDE,
    STEPS,
    TOLERANCE,
    attach_again,
    counted,
    distance,
    options,
    permutations,
    predict,
    watch,
)
from vc_attention.tools import tiny_models

pytestmark = pytest.mark.comfy

each_family = pytest.mark.parametrize("name", tiny_models.NAMES)


def sage_like(hits: Counter):
    """What KJNodes-style patch nodes put into the slot: a plain function that replaces every attention call."""

    def other_node(func, *arguments, **keywords):
        hits["calls"] += 1
        return func(*arguments, **keywords)

    return other_node


class CallableNode:
    """A hook that is an object: ComfyUI up to 0.3.75 deep-copies it in clone()."""

    hits: ClassVar[Counter] = Counter()

    def __call__(self, func, *arguments, **keywords):
        CallableNode.hits["calls"] += 1
        return func(*arguments, **keywords)


def put(model: Any, hook: Any) -> Any:
    """Another node: clone, write the slot."""
    changed = model.clone()
    changed.model_options["transformer_options"][OVERRIDE] = hook
    return changed


def sampled(patched: Any, name: str) -> tuple[Any, Any]:
    from vc_attention.nodes.hook import session_of

    with permutations() as orders:
        out = tiny_models.sample(patched, name, STEPS)
    assert any(not torch.equal(o, torch.arange(o.shape[-1]).expand_as(o)) for o in orders)
    return out, session_of(patched)


def reference(base: Any, name: str) -> tuple[Any, Counter]:
    watched, passes = watch(base)
    return tiny_models.sample(watched, name, STEPS), predict(base, passes, options(name))


@each_family
@pytest.mark.parametrize("order", ["before", "after", "both", "after and cloned"])
def test_plain_function(tiny, name, order):
    """The accelerated calls are ours in every order; the declined ones go to the other hook; the creator is told."""
    base, hits = tiny(name), Counter()
    expected_out, expected = reference(base, name)
    other = sage_like(hits)
    patched = {
        "before": lambda: attach_again(put(base, other), name),
        "after": lambda: put(attach_again(base, name), other),
        "both": lambda: put(attach_again(put(base, other), name), other),
        "after and cloned": lambda: put(attach_again(base, name), other).clone(),
    }[order]()
    out, session = sampled(patched, name)
    assert distance(out, expected_out) <= TOLERANCE
    assert counted(session.stats) == expected
    # one call of the other hook for each declined call of the model (which counts once a branch), none for ours
    branches = 1 if name == "minimax_h3" else 2
    assert hits["calls"] * branches == expected["declined"]
    if expected["declined"]:
        assert "other_node" in session.stats.summary()


def test_callable_object(tiny):
    name = "wan22_t2v"
    base = tiny(name)
    expected_out, expected = reference(base, name)
    CallableNode.hits.clear()
    for patched in (put(attach_again(base, name), CallableNode()), attach_again(put(base, CallableNode()), name)):
        out, session = sampled(patched.clone(), name)
        assert distance(out, expected_out) <= TOLERANCE
        assert counted(session.stats) == expected
    assert CallableNode.hits["calls"] == expected["declined"]


def test_two_of_our_nodes(tiny):
    """Patched twice, also with another hook in between: the later options count, and nothing is accelerated twice."""
    from vc_attention.nodes.hook import session_of

    name, hits = "wan22_t2v", Counter()
    base = tiny(name)
    expected_out, expected = reference(base, name)
    first = attach_again(base, name, group_fraction=0.25)
    for between in (first, put(first, sage_like(hits))):
        second = attach_again(between, name)
        assert session_of(second) is not session_of(first)
        out, session = sampled(second, name)
        assert distance(out, expected_out) <= TOLERANCE
        assert counted(session.stats) == expected
        assert session_of(first).stats.forwards == 0


def test_removing_the_node_restores_the_model(tiny):
    """The unpatched model that ours was cloned from stays exactly as it was; precision "off" takes ours out."""
    from vc_attention.nodes.hook import attach, session_of

    name = "wan22_t2v"
    base = tiny(name)
    before = tiny_models.sample(base, name, 2)
    patched = attach_again(base, name)
    tiny_models.sample(patched, name, 2)
    assert torch.equal(tiny_models.sample(base, name, 2), before)
    assert session_of(base) is None and OVERRIDE not in base.model_options["transformer_options"]
    off = attach(patched, options(name, plan=None, precision="off"))
    assert session_of(off) is None and OVERRIDE not in off.model_options["transformer_options"]
    assert torch.equal(tiny_models.sample(off, name, 2), before)


def test_nothing_global_is_patched(tiny):
    """Module functions, other models and the VAE see ComfyUI exactly as before, during a run as well."""
    import comfy.ldm.modules.attention as attention
    import comfy.ldm.modules.diffusionmodules.model as vae
    import comfy.ldm.wan.model as wan

    name = "wan22_t2v"
    modules = (attention, vae, wan)
    before = [dict(vars(module)) for module in modules]
    patched = attach_again(tiny(name), name)
    from vc_attention.nodes.hook import session_of

    during = []
    session_of(patched).observers.append(
        lambda *_: during.append([dict(vars(m)) == b for m, b in zip(modules, before, strict=True)])
    )
    tiny_models.sample(patched, name, 2)
    assert during and all(all(one) for one in during)
    assert [dict(vars(module)) for module in modules] == before


# -- ComfyUI's own Model Attention Backend node (0.33.0 and later) ---------------------------------------------------


def backend_node(model: Any) -> Any:
    """ComfyUI's node, choosing its PyTorch attention."""
    advanced = pytest.importorskip("comfy_extras.nodes_model_advanced")
    if not hasattr(advanced, "ModelAttentionBackend"):
        pytest.skip("comfy: this ComfyUI has no Model Attention Backend node")
    return advanced.ModelAttentionBackend().patch(model, "pytorch attention")[0]


@each_family
@pytest.mark.parametrize("order", ["before", "after", "both", "after and cloned", "before, then a plain function"])
def test_model_attention_backend(tiny, name, order):
    base, hits = tiny(name), Counter()
    patched = {
        "before": lambda: attach_again(backend_node(base), name),
        "after": lambda: backend_node(attach_again(base, name)),
        "both": lambda: backend_node(attach_again(backend_node(base), name)),
        "after and cloned": lambda: backend_node(attach_again(base, name)).clone(),
        "before, then a plain function": lambda: put(attach_again(backend_node(base), name), sage_like(hits)),
    }[order]()
    expected_out, expected = reference(base, name)
    out, session = sampled(patched, name)
    assert distance(out, expected_out) <= TOLERANCE
    assert counted(session.stats) == expected


@pytest.mark.parametrize("name", ["wan22_t2v", "minimax_h3"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_backend_that_takes_containers(tiny, name, order):
    """A stand-in for a container-taking backend: declined calls reach it, with their containers where there are any."""
    import comfy.ldm.modules.attention as attention

    if not hasattr(attention, "AttentionTensorContainer"):
        pytest.skip("comfy: this ComfyUI has no attention tensor containers")
    hits: ClassVar[Counter] = Counter()

    @attention.wrap_attn
    def backend(q, k, v, heads, **keywords):
        hits["tensors"] += 1
        return attention.attention_pytorch(q, k, v, heads, **keywords)

    def container_function(q, k, v, heads, **keywords):
        hits["containers"] += 1
        return attention.attention_pytorch(q.take(), k.take(), v.take(), heads, **keywords)

    backend.container_function = container_function
    base = tiny(name)
    model = base.clone()
    if order == "before":
        model.set_model_optimized_attention(backend)
    patched = attach_again(model, name, min_tokens=100_000)
    if order == "after":
        patched = patched.clone()
        patched.set_model_optimized_attention(backend)
    out = tiny_models.sample(patched, name, 3)
    assert distance(out, tiny_models.sample(base, name, 3)) <= TOLERANCE
    assert hits["containers" if name == "minimax_h3" else "tensors"] > 0
    assert hits["tensors" if name == "minimax_h3" else "containers"] == 0


def test_the_text_on_the_node_tells_of_the_other_hook(tiny, caplog):
    name, hits = "wan22_t2v", Counter()
    patched = put(attach_again(tiny(name), name), sage_like(hits))
    with caplog.at_level(logging.INFO):
        _, session = sampled(patched, name)
    assert "other_node" in session.stats.summary()
    assert "other_node" in caplog.text
