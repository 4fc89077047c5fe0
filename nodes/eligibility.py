"""Which attention calls VC-Attention takes. Each refusal is a value with a reason."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels import Reason
from .call import Call
from .forward import Forward
from .messages import REASONS
from .options import PatchOptions
from .schedule import DENSE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 128)


def ineligible(
    call: Call | None,
    forward: Forward | None,
    options: PatchOptions,
    unsupported: Callable[[Call], Reason | None],
) -> Reason | None:
    """Why this call stays with ComfyUI's own attention, or None when it can go.

    forward: the record of the forward pass the call belongs to. unsupported: asks the kernels' registry, last, because
    its answer is about the machine and not about the call. q and k may differ in length. Reads no tensor's values.
    """
    if call is None:
        return REASONS["shape"]
    if forward is None:
        return REASONS["no_context"]
    keywords = call.keywords
    if call.mask is not None or keywords.get("is_causal"):
        return REASONS["mask"]
    if keywords.get("low_precision_attention", True) is False:
        return REASONS["low_precision"]
    if keywords.get("enable_gqa"):
        return REASONS["gqa"]
    reason = _shape(call)
    if reason is not None:
        return reason
    if call.lkv < options.min_tokens:
        return REASONS["short"]
    if call.head_dim not in HEAD_DIMS:
        return REASONS["head_dim"]
    if not (call.q.dtype in DTYPES and call.k.dtype in DTYPES and call.v.dtype in DTYPES):
        return REASONS["dtype"]
    scale = keywords.get("scale")
    if scale is not None and not isinstance(scale, (int, float)):
        return REASONS["scale"]
    if forward.phase == DENSE:
        return REASONS["step_range"]
    if options.blocks and (call.options.get("block_type"), call.options.get("block_index")) in options.blocks:
        return REASONS["dense_block"]
    if torch.is_grad_enabled() and (call.q.requires_grad or call.k.requires_grad or call.v.requires_grad):
        return REASONS["training"]
    if call.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return REASONS["capture"]
    return unsupported(call)


def _shape(call: Call) -> Reason | None:
    q, k, v, axes = call.q, call.k, call.v, 4 if call.skip_reshape else 3
    if not q.dim() == k.dim() == v.dim() == axes or not q.device == k.device == v.device:
        return REASONS["shape"]
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[-2] != v.shape[-2] or not (call.lq and call.lkv):
        return REASONS["shape"]
    if call.skip_reshape:
        if not q.shape[1] == k.shape[1] == v.shape[1] == call.heads:
            return REASONS["gqa"]
    elif q.shape[-1] % call.heads:
        return REASONS["shape"]
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return REASONS["shape"] if call.skip_reshape else REASONS["gqa"]
    return None
