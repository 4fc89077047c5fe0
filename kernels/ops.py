"""`vc_attention::attention` as a torch custom op, so that torch.compile and export see one opaque, typed call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from .launch import call
from .plan import Plan
from .reasons import Reason, UnsupportedError
from .registry import supports
from .spec.attention import attention as spec_attention

# A run has a handful of plans and thousands of calls.
_decode = lru_cache(maxsize=64)(Plan.decode)


#: Name of the op: torch.ops.vc_attention.attention.
OP = "attention"
_SCHEMA = "(Tensor q, Tensor k, Tensor v, Tensor? labels, str plan, float scale, str backend) -> Tensor"
_NAMESPACE = "vc_attention"


def _run(q: Tensor, k: Tensor, v: Tensor, labels: Tensor | None, plan: str, scale: float, backend: str) -> Tensor:
    """See `kernels.attention`; `plan` is `Plan.encode()`."""
    decoded = _decode(plan)
    verdict = supports(q.device, decoded, q.shape[-1], q.dtype, backend)
    if isinstance(verdict, Reason):
        raise UnsupportedError(verdict)
    if verdict.backend != "spec":
        return call.attention(q, k, v, decoded, labels, scale, verdict.backend)
    return spec_attention(q, k, v, decoded, labels, scale)


def _fake(q: Tensor, k: Tensor, v: Tensor, labels: Tensor | None, plan: str, scale: float, backend: str) -> Tensor:
    b, h, lq, d = q.shape
    return q.new_empty((b, lq, h, d)).transpose(1, 2)


def _register() -> tuple[torch.library.Library, Callable[..., Tensor]]:
    """The op, and the library object that keeps it registered.

    By the dispatcher's own means: the first call of a `torch.library.custom_op` imports torch's compiler, 2 to 5
    seconds. A second copy of the pack in one process gets a name of its own.
    """
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    taken = getattr(torch.ops, _NAMESPACE)
    numbered = (f"{OP}_{i}" for i in itertools.count(2))
    name = next(n for n in itertools.chain((OP,), numbered) if not hasattr(taken, n))
    library.define(name + _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", _fake, lib=library)
    return library, getattr(taken, name)


_library, attention_op = _register()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    labels: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(q k^T scale) v in the arithmetic of `plan`, on the best backend of this machine.

    q: [B, H, Lq, D]; k, v: [B, H, Lkv, D]; any strides; fp32, bf16 or fp16, one dtype for all three. labels: uint8
    [B, H, Lkv], the V-Smooth group of each token (`kernels.group`), or None for sequence order. scale: 1 / sqrt(D) if
    None. Non-causal, without a mask. Inputs are not modified.
    Returns [B, H, Lq, D] in q's dtype, stored as [B, Lq, H, D].
    Raises ValueError when shapes, dtypes or devices do not fit, UnsupportedError (with its reason) when no backend can
    serve the call.
    """
    _check(q, k, v, labels)
    return attention_op(q, k, v, labels, plan.encode(), q.shape[-1] ** -0.5 if scale is None else scale, backend)


def _check(q: Tensor, k: Tensor, v: Tensor, labels: Tensor | None) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k and v must be [batch, heads, tokens, dim]; they have {q.dim()}, {k.dim()} and {v.dim()} axes."
        )
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must agree in batch, heads and head "
            "dimension, and k and v in tokens."
        )
    if k.shape[-2] == 0:
        raise ValueError("k and v have no tokens to attend to.")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must share one dtype and device; they are {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, "
            f"{k.device}, {v.device}."
        )
    if labels is None:
        return
    if labels.shape != k.shape[:3] or labels.dtype != torch.uint8 or labels.device != k.device:
        raise ValueError(
            f"labels must be uint8 of shape {tuple(k.shape[:3])} (batch, heads, tokens of k) on {k.device}; they are "
            f"{str(labels.dtype)[6:]} of shape {tuple(labels.shape)} on {labels.device}."
        )
