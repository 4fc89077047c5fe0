"""What the tests of the bridge to WanVideoWrapper ask of a model."""

from __future__ import annotations

import torch
from fake_wrapper import sample
from vc_attention.nodes.wrapper_hook import bridge_session

METHODS = ("forward", "forward_ip", "forward_split")


def self_attentions(model):
    transformer = model.model.diffusion_model
    return [block.self_attn for block in [*transformer.blocks, *getattr(transformer, "vace_blocks", ())]]


def untouched(model) -> bool:
    return not any(name in module.__dict__ for module in self_attentions(model) for name in METHODS)


def hooks(model) -> int:
    transformer = model.model.diffusion_model
    return len(transformer._forward_pre_hooks) + len(transformer._forward_hooks)


def counts(model) -> tuple[int, int, int, int]:
    stats = bridge_session(model).stats
    return stats.accelerated, stats.grouped, stats.reused, stats.plain


def same(patched, plain, **given) -> None:
    for a, b in zip(sample(patched, **given), sample(plain, **given), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
