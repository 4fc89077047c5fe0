"""The numeric guard in real ComfyUI: a kernel that goes wrong in one layer, and a clip that is whole all the same."""

from __future__ import annotations

import pytest
import torch
from comfy_cases import STEPS, TOLERANCE, attach_again, distance, min_tokens, watch
from vc_attention.kernels import FAITHFUL
from vc_attention.nodes import engine
from vc_attention.tools import tiny_models

pytestmark = pytest.mark.comfy

REAL = engine.attention


def _model_outputs(model):
    """A clone, and the outputs of the model's forward passes, a repeated one twice (this wrapper is inside ours)."""
    import comfy.patcher_extension

    watched, outs = model.clone(), []

    def apply_model(executor, *arguments, **keywords):
        out = executor(*arguments, **keywords)
        outs.append(out.clone() if isinstance(out, torch.Tensor) else tiny_models.flat(out).clone())
        return out

    watched.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, "test_outputs", apply_model)
    return watched, outs


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_a_kernel_that_goes_wrong_in_one_layer_from_the_second_phase_on(tiny, name, monkeypatch):
    """K and V of one layer paired wrongly from the first reuse step on: that step is computed again, the rest of the
    run is ComfyUI's own, the clip is the plain model's, and the node names the layer."""
    from vc_attention.nodes.hook import session_of

    base = tiny(name)
    watched, passes = watch(base)
    reference = tiny_models.sample(watched, name, STEPS)
    plain, wanted = _model_outputs(base)
    tiny_models.sample(plain, name, STEPS)

    patched = attach_again(base, name)  # groups in steps 1 and 3, reused in 2 and 4, none from 5 on
    session = session_of(patched)
    seen: list[str] = []

    def attention(q, k, v, *rest):
        seen.append(session.stats.steps[max(session.stats.steps)])
        if seen.count("reuse") == 2:  # the second layer
            k = k.roll(5, -2)
        return REAL(q, k, v, *rest)

    monkeypatch.setattr(engine, "attention", attention)
    counted, outs = _model_outputs(patched)
    result = tiny_models.sample(counted, name, STEPS)

    assert distance(result, reference) <= TOLERANCE
    first = sum(one.sigma == passes[0].sigma for one in passes)  # passes of the first step
    refused = outs.pop(first)
    assert distance(refused, wanted[first]) > 1000 * TOLERANCE  # what the guard has kept out of the clip
    for out, want in zip(outs, wanted, strict=True):
        assert distance(out, want) <= TOLERANCE
    assert set(seen) == {"group", "reuse"}  # the refused pass was our last
    ours = [call for call in passes[0].calls if call[4] and not call[5] and call[3] >= min_tokens(name)]
    assert seen.count("reuse") == len(ours)  # one pass: its layers, once
    assert session.stats.declined["guard"] > 0
    text = session.stats.summary()
    numbered = ours[1][1] is not None
    assert ("in block " in text) == numbered and ("self-attention call " in text) != numbered
    assert "at step 2 (groups reused): agreement 0." in text and "this step was computed again" in text
    assert "failed the numeric check" in text


def test_a_sound_low_bit_kernel_is_never_refused(tiny):
    """Faithful 8 bit on the specification, through the guard in every phase."""
    from vc_attention.nodes.hook import session_of

    name = "wan22_t2v"
    patched = attach_again(tiny(name), name, plan=FAITHFUL)
    tiny_models.sample(patched, name, STEPS)
    assert "guard" not in session_of(patched).stats.declined and not session_of(patched).stats.notes
    assert session_of(patched).stats.accelerated == 2 * 2 * STEPS
