"""How far each accelerated attention call is from exact attention, on the very tensors that the model made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def pack_module(name: str) -> ModuleType:
    """Module `name` of the VC-Attention pack, such as "nodes.hook", under whatever package name ComfyUI loaded it.

    Raises RuntimeError when the pack is not loaded.
    """
    for loaded, module in list(sys.modules.items()):
        if loaded.endswith(".nodes.hook") and hasattr(module, "session_of"):
            return sys.modules[f"{loaded.removesuffix('.nodes.hook')}.{name}"]
    raise RuntimeError("The VC-Attention pack is not loaded in this ComfyUI.")


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """|out - exact| / |exact| in the L2 norm over all elements; 0 when both are zero."""
    norm = float(exact.norm())
    difference = float((out.float() - exact).norm())
    return difference / norm if norm else (0.0 if difference == 0.0 else float("inf"))


class Recorder:
    """An observer of a session. `calls` holds one plain dictionary for each accelerated call.

    attention: the pack's own attention, to compute what the same call would be without grouping and smoothing.
    """

    def __init__(self, stage: str, attention: Callable[..., torch.Tensor]) -> None:
        self.stage = stage
        self.attention = attention
        self.calls: list[dict[str, Any]] = []

    def __call__(self, record: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """record: a CallRecord. q, k, v, out: [B, H, L, D]."""
        exact = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
        error = relative_error(out, exact)
        plan = record.plan.without_smoothing()
        without = relative_error(self.attention(q, k, v, plan, None, None, record.backend), exact)
        ungrouped = None
        if record.phase != "plain":
            ungrouped = relative_error(self.attention(q, k, v, record.plan, None, None, record.backend), exact)
        self.calls.append(
            {
                "stage": self.stage,
                "step": record.step,
                "steps": record.steps,
                "phase": record.phase,
                "layer": record.ordinal if record.block_index is None else int(record.block_index),
                "block_type": None if record.block_type is None else str(record.block_type),
                "lq": record.lq,
                "lkv": record.lkv,
                "heads": record.heads,
                "branches": len(record.branches),
                "plan": record.plan.encode(),
                "backend": record.backend,
                "error": error,
                "error_without_smoothing": without,
                "error_without_grouping": ungrouped,
            }
        )
