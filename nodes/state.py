"""Token groups kept between the steps of a run, within a budget. Losing any of it costs time or quality, never more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import Labels

#: Free memory that must remain after keeping a grouping: the sampler's own needs come first.
RESERVE_BYTES = 256 << 20


class Layer(NamedTuple):
    """One attention layer of the model, whatever the size of the clip. ordinal: as in `Key`."""

    block_type: Hashable
    block_index: Hashable
    ordinal: int

    @property
    def numbered(self) -> bool:
        """Whether the model says which block this is; older cores do not, for some models."""
        return self.block_index is not None

    @property
    def name(self) -> str:
        """The layer in words; a numbered block as the widgets take it."""
        if self.block_index is None:
            return f"self-attention call {self.ordinal + 1} of the pass"
        kind = "" if self.block_type is None else f"{self.block_type}:"
        again = f" (its call {self.ordinal + 1})" if self.ordinal else ""
        return f"block {kind}{self.block_index}{again}"


@dataclass(frozen=True)
class Key:
    """What one grouping belongs to.

    `ordinal` counts the calls of one block with the same lengths inside one forward pass (VACE runs two per block,
    older cores do not number blocks at all). `branch` is the conditioning's uuid, `scope` the context window and token
    layout. A wrong hit would cost quality only: permuting K and V together leaves full attention unchanged.
    """

    block_type: Hashable
    block_index: Hashable
    ordinal: int
    branch: Hashable
    scope: Hashable
    lq: int
    lkv: int
    heads: int
    device: torch.device

    @property
    def layer(self) -> Layer:
        """The layer that this call belongs to."""
        return Layer(self.block_type, self.block_index, self.ordinal)


@dataclass(frozen=True)
class Entry:
    """A kept grouping: labels uint8 [b, H, Lkv]; centroids bf16 [b, H, k, D], or None when no rebuild will follow.

    bf16 is exact enough to start the next search from, has fp32's range, and halves the largest part of the state.
    """

    period: int
    labels: Tensor
    centroids: Tensor | None

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self.labels.nbytes + (0 if self.centroids is None else self.centroids.nbytes)

    def warm_start(self) -> Labels | None:
        """The grouping as `kernels.group` takes it for its next search."""
        return None if self.centroids is None else Labels(self.labels, self.centroids.float())


class GroupState:
    """Groupings of one patched model, for each device, safe to use from several threads.

    budget_bytes: limit for each device. free_memory: asks how much is free on a device; None means "unknown", and the
    budget alone decides.
    """

    def __init__(self, budget_bytes: int, free_memory: Callable[[torch.device], int | None]) -> None:
        self.budget_bytes = budget_bytes
        self._free_memory = free_memory
        self._entries: dict[torch.device, dict[Key, Entry]] = {}
        self._bytes: dict[torch.device, int] = {}
        self._lock = threading.Lock()

    def get(self, key: Key, shape: tuple[int, ...]) -> Entry | None:
        """The grouping kept for `key`, or None when there is none with labels of `shape`."""
        with self._lock:
            entry = self._entries.get(key.device, {}).get(key)
        return entry if entry is not None and tuple(entry.labels.shape) == shape else None

    def keep(self, key: Key, period: int, grouping: Labels, centroids: bool) -> bool:
        """Keep `grouping` for later steps, its centroids too if `centroids`. Returns False when there is no room.

        Call it where allocations may outlive the block (`host.outside_malloc_graph`).
        """
        room = grouping.labels.nbytes + (grouping.centroids.numel() * 2 if centroids else 0)
        with self._lock:
            entries = self._entries.setdefault(key.device, {})
            held = self._bytes.get(key.device, 0)
            old = entries.get(key)
            freed = 0 if old is None else old.nbytes
            if held - freed + room > self.budget_bytes:
                self._drop(key)
                return False
        free = self._free_memory(key.device)
        if free is not None and free - room < RESERVE_BYTES:
            with self._lock:
                self._drop(key)
            return False
        kept = grouping.centroids.to(torch.bfloat16) if centroids else None
        entry = Entry(period, grouping.labels, kept)
        with self._lock:
            self._drop(key)
            self._entries.setdefault(key.device, {})[key] = entry
            self._bytes[key.device] = self._bytes.get(key.device, 0) + entry.nbytes
        return True

    def _drop(self, key: Key) -> None:
        entry = self._entries.get(key.device, {}).pop(key, None)
        if entry is not None:
            self._bytes[key.device] -= entry.nbytes

    def clear(self, device: torch.device | None = None) -> None:
        """Let go of everything, or of everything on `device`."""
        with self._lock:
            if device is None:
                self._entries.clear()
                self._bytes.clear()
            else:
                self._entries.pop(device, None)
                self._bytes.pop(device, None)

    def nbytes(self, device: torch.device | None = None) -> int:
        """Memory held, in bytes, on `device` or altogether."""
        with self._lock:
            return sum(self._bytes.values()) if device is None else self._bytes.get(device, 0)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(entries) for entries in self._entries.values())
