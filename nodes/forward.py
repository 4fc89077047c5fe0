"""The record of one forward pass of the model: made once, read by every attention call in it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .call import Call
from .schedule import Position
from .state import Key, Layer

if TYPE_CHECKING:
    from .guard import Check
    from .session import Session
    from .watch import Watcher


class Forward:
    """Where the pass stands (`position`), whose conditionings it carries (`branches`), and its running counts.

    window: the context window's frame indices. layout: the token layout that came with the pass (MiniMax-H3 before
    0.38; later cores put it into transformer_options). nested: another node's hook, which may end in ours again, is
    running. checks: what the numeric guard has queued in this pass. sigma: the noise level. watchers: what other nodes
    added to this model (`watch`), and `kept`: what each holds until the pass ends. Used by one thread.
    """

    __slots__ = (
        "_layout_seen",
        "_scope",
        "branches",
        "checks",
        "device",
        "kept",
        "layout",
        "nested",
        "ordinals",
        "position",
        "session",
        "sigma",
        "watchers",
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
        sigma: float | None = None,
        watchers: Sequence[Watcher] = (),
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
        self.sigma = sigma
        self.watchers = watchers
        self.kept: dict[Watcher, list[Any]] = {}
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
        block = self._block(call)
        ordinal = self.ordinals.get(block, 0)
        self.ordinals[block] = ordinal + 1
        scope = self.scope(call.options)
        return Key(block[0], block[1], ordinal, None, scope, call.lq, call.lkv, call.heads, call.q.device)

    def layer(self, call: Call) -> Layer:
        """The layer of a call that has not been counted yet."""
        block = self._block(call)
        return Layer(block[0], block[1], self.ordinals.get(block, 0))

    @staticmethod
    def _block(call: Call) -> tuple[Hashable, ...]:
        options = call.options
        return options.get("block_type"), options.get("block_index"), call.lq, call.lkv, call.heads

    def scope(self, options: dict[str, Any]) -> Hashable:
        """Context window and token layout: groupings of one are of no use in another."""
        layout = options.get("minimax_h3_layout", self.layout)
        if layout is not None and layout is not self._layout_seen:
            self._layout_seen = layout
            segments = getattr(layout, "segments", None)
            self._scope = (self.window, None if segments is None else tuple(map(tuple, segments)))
        return self._scope
