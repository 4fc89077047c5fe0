"""What a creator sees: the nodes, and behind them the hook, the schedule, the kept groups and eligibility.

Imports go one way: extension -> patch, wrapper, wrapper_measuring -> measuring -> wrapper_hook -> hook, quality,
capture -> engine, eligibility -> watch -> session, forward -> schedule, state, stats -> options, messages -> kernels.
ComfyUI is touched in `extension`, `patch`, `measuring` and the wrapper's two nodes' files (node API), and in `host`
(everything else).
"""

from __future__ import annotations

from typing import Any

__all__ = ["VCAttentionExtension"]


def __getattr__(name: str) -> Any:
    # The node API exists only inside ComfyUI, and everything else in here works without it.
    if name == "VCAttentionExtension":
        from .extension import VCAttentionExtension

        return VCAttentionExtension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
