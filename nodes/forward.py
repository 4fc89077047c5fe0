"""The record of one forward pass of the model: made once, read by every attention call in it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch

from .call import Call
from .schedule import Position
from .state import Key

if TYPE_CHECKING:
    from .guard import Check
    from .session import Session


class Forward:
    """Where the pass stands (`position`), whose conditionings it carries (`branches`), and its running counts.

    window: the context window's frame indices. layout: the token layout that came with the pass (MiniMax-H3 before
    0.38; later cores put it into transformer_options). nested: another node's hook, which may end in ours again, is
    running. checks: what the numeric guard has queued in this pass. Used by one thread.
    """

    __slots__ = (
        "_layout_seen",
        "_scope",
        "branches",
        "checks",
        "device",
        "layout",
        "nested",
        "ordinals",
        "position",
        "session",
        "window",
    )

    def __init__(
        self,
        session: Session,
        position: Position,
        device: torch.device,
        branches: tuple[str, ...] = (),
        window: Hashable = None,
        layout: Any = None,
    ) -> None:
        self.session = session
        self.position = position
        self.device = device
        self.branches = branches or ("none",)
        self.window = window
        self.layout = layout
        self.nested = False
        self.ordinals: dict[Hashable, int] = {}
        self.checks: list[Check] = []
        self._layout_seen: Any = None
        self._scope: Hashable = window

    @property
    def phase(self) -> str:
        """ "group", "reuse", "plain" or "dense"."""
        return self.position.phase

    def branches_of(self, call: Call) -> tuple[str, ...] | None:
        """The branches that the batch of `call` splits into evenly, or None when it does not."""
        return self.branches if call.q.shape[0] % len(self.branches) == 0 else None

    def key(self, call: Call) -> Key:
        """A key for `call` without its branch, counting the call among its equals in this pass."""
        options = call.options
        block = (options.get("block_type"), options.get("block_index"), call.lq, call.lkv, call.heads)
        ordinal = self.ordinals.get(block, 0)
        self.ordinals[block] = ordinal + 1
        return Key(block[0], block[1], ordinal, None, self.scope(options), call.lq, call.lkv, call.heads, call.q.device)

    def scope(self, options: dict[str, Any]) -> Hashable:
        """Context window and token layout: groupings of one are of no use in another."""
        layout = options.get("minimax_h3_layout", self.layout)
        if layout is not None and layout is not self._layout_seen:
            self._layout_seen = layout
            segments = getattr(layout, "segments", None)
            self._scope = (self.window, None if segments is None else tuple(map(tuple, segments)))
        return self._scope
