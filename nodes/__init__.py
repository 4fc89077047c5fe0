"""What a creator sees: the nodes, and behind them the hook, the schedule, the kept groups and eligibility.

Imports go one way: patch -> hook -> engine, eligibility -> session, forward -> schedule, state, stats -> options,
messages -> kernels. ComfyUI is touched in `patch` (node API) and `host` (everything else).
"""

from __future__ import annotations

from typing import Any

__all__ = ["VCAttentionExtension"]


def __getattr__(name: str) -> Any:
    # The node API exists only inside ComfyUI, and everything else in here works without it.
    if name == "VCAttentionExtension":
        from .patch import VCAttentionExtension

        return VCAttentionExtension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
