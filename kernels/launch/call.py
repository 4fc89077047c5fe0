"""One whole call on the prebuilt kernels: preparation and attention from q, k, v to the output, and grouping.

Everything is queued on torch's current stream; nothing waits for the device, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import Plan
from ..reasons import Reason, UnsupportedError
from . import attend, prepare
from .loader import Library


def kernels_for(device: torch.device) -> Library | Reason:
    """The kernels of `device`, loaded once for each device, or why there are none."""
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    return attend.library(device)


def refusal(device: torch.device, plan: Plan, head_dim: int, dtype: torch.dtype) -> Reason | None:
    """Why the prebuilt kernels cannot run `plan` on `device` for this head dimension and dtype; None if they can."""
    kernels = kernels_for(device)
    if isinstance(kernels, Reason):
        return kernels
    if plan.clip_means:
        return Reason("plan", "The prebuilt kernels have no norm-clipped means; ComfyUI's own attention runs.")
    return attend.supports(plan, dtype, head_dim, heads=1)


def attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, labels: Tensor | None, scale: float) -> Tensor:
    """`kernels.attention` on the prebuilt kernels. q [B, H, Lq, 128], k, v [B, H, Lkv, 128], bf16 or fp16.

    Returns [B, H, Lq, 128] stored as [B, Lq, H, 128]. Raises UnsupportedError when a kernel is missing or is refused.
    """
    library = _library(q.device)
    b, h, lq, d = q.shape
    if q.numel() == 0:
        return q.new_empty((b, lq, h, d)).transpose(1, 2)  # a launch of no blocks is an error to the driver
    images = prepare.prepare(library, q, k, v, plan, labels)
    if isinstance(images, Reason):
        raise UnsupportedError(images)
    out = torch.empty((b, lq, h, d), dtype=q.dtype, device=q.device)
    reason = attend.attend(images, plan, out, scale)
    if reason is not None:
        raise UnsupportedError(reason)
    return out.transpose(1, 2)


def group(v: Tensor, groups: int, previous: Tensor | None) -> tuple[Tensor, Tensor] | Reason:
    """`kernels.spec.grouping.group` on the prebuilt kernels, or why they cannot: v [B, H, L, 128], bf16 or fp16."""
    library = kernels_for(v.device)
    return library if isinstance(library, Reason) else prepare.group(library, v, groups, previous)


def _library(device: torch.device) -> Library:
    found = kernels_for(device)
    if isinstance(found, Reason):
        raise UnsupportedError(found)
    return found
