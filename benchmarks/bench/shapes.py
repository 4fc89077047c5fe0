"""The attention calls of the models that VC-Attention is for, and the tensors that stand in for theirs."""

from __future__ import annotations

import torch

from ...kernels.timing import stand_ins
from .results import HEAD_DIM

#: Name -> tokens, heads (batch 1, head dimension 128): Wan 720p, eight heads of it, Wan 480p, HunyuanVideo-1.5 720p,
#: MiniMax-H3.
SHAPES = {
    "wan720": (75_600, 40),
    "wan720x8": (75_600, 8),
    "wan480": (32_760, 40),
    "hv15": (111_600, 16),
    "h3": (37_710, 56),
}
#: One short clip, to see in seconds that everything runs; not what a video model spends its time on.
QUICK = {"quick": (8_190, 24)}


def tensors(length: int, heads: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as views [1, heads, length, 128] of [1, length, heads, 128] bf16: `timing.stand_ins`."""
    return stand_ins(length, heads, HEAD_DIM, device, torch.bfloat16)
