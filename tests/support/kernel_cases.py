"""Plans, their error bounds and exact attention, for the tests that compare every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
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


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """fp32 attention by torch, fp64 on a GPU, whose fast fp32 paths are not exact enough to be the reference."""
    wide = torch.float64 if q.is_cuda else torch.float32
    return torch.nn.functional.scaled_dot_product_attention(q.to(wide), k.to(wide), v.to(wide), scale=scale)


def relative(a: Tensor, b: Tensor) -> float:
    """Relative L2 error of a against b."""
    return float((a.float() - b.float()).norm() / b.float().norm())
