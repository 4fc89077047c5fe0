"""Plans and tensors that the tests of known failures share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from vc_attention import kernels
from vc_attention.kernels import EXACT, FAITHFUL, FAST, FOUR_BIT, Plan

PLANS: dict[str, Plan] = {
    "fast": FAST,
    "fast_paper": replace(FAST, probability="expcast"),
    "fast_key_means": replace(FAST, key_means=True),
    "fast_clipped": replace(FAST, clip_means=True),
    "fast_plain": FAST.without_smoothing(),
    "faithful": FAITHFUL,
    "fp8_scores": replace(FAST, scores="fp8"),
    "int8_values": Plan(values="int8", probability="exp2"),
    "four_bit": FOUR_BIT,
    "exact": EXACT,
    "exact_demeaned": replace(EXACT, demean=True),
}
#: Relative L2 error against fp32 on Gaussian data, 128 to 384 keys (measured, with a margin).
BOUND = dict.fromkeys(PLANS, 0.06) | {
    "fp8_scores": 0.09,
    "int8_values": 0.03,
    "four_bit": 0.28,
    "exact": 2e-6,
    "exact_demeaned": 2e-6,
}
#: Relative error of a value that every key shares (V's format alone): E4M3 rounds by up to 1/16, E2M1 by up to 1/4.
_STEP = {"fp8": 1 / 16, "nvfp4": 1 / 4, "int8": 1 / 127, "exact": 1e-6}
VALUE_STEP = {name: _STEP[plan.values] for name, plan in PLANS.items()}

each_plan = pytest.mark.parametrize("name", PLANS)


def qkv(lq: int = 16, lkv: int = 200, heads: int = 1, dim: int = 64, batch: int = 1, seed: int = 0) -> list[Tensor]:
    """Gaussian q [B, H, Lq, D], k and v [B, H, Lkv, D] in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, length, dim, generator=generator) for length in (lq, lkv, lkv)]


def run(q: Tensor, k: Tensor, v: Tensor, name: str, labels: Tensor | None = None, **options) -> Tensor:
    """The specification under the plan called `name`."""
    return kernels.attention(q, k, v, PLANS[name], labels, backend="spec", **options)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """fp32 attention by torch."""
    return torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())


def relative(a: Tensor, b: Tensor) -> float:
    """Relative L2 error of a against b."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def shuffled_labels(lkv: int, heads: int = 1, batch: int = 1, groups: int = 7, seed: int = 3) -> Tensor:
    """Random labels, which send the last tokens (the ragged tail) into every block."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(groups, (batch, heads, lkv), generator=generator).to(torch.uint8)
