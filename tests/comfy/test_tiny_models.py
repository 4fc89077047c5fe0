"""The tiny models are what the other tests stand on: detected as their family, finite, and sensitive to attention."""

from __future__ import annotations

import pytest
import torch
from vc_attention.tools import tiny_models

pytestmark = pytest.mark.comfy


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_attention_decides_the_latent(tiny, name):
    base = tiny(name)
    reference = tiny_models.flat(tiny_models.sample(base, name))
    assert torch.isfinite(reference).all()

    calls = []

    def zero(func, q, k, v, heads, skip_reshape=False, **options):
        out = func(q, k, v, heads, skip_reshape=skip_reshape, **options)
        if k.shape[2 if skip_reshape else 1] < tiny_models.FAMILIES[name].tokens:
            return out
        calls.append(k.shape)
        return out * 0

    patched = base.clone()
    patched.model_options["transformer_options"]["optimized_attention_override"] = zero
    moved = (tiny_models.flat(tiny_models.sample(patched, name)) - reference).abs().max() / reference.abs().max()
    assert calls
    assert moved > 0.3
