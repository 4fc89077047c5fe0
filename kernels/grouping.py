"""Grouping of value tokens for V-Smooth, on the best backend of this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import call
from .reasons import Reason
from .spec.grouping import auto_groups
from .spec.grouping import group as spec_group

__all__ = ["Labels", "auto_groups", "group"]


@dataclass(frozen=True)
class Labels:
    """The groups of one attention layer: `labels` uint8 [B, H, L], `centroids` fp32 [B, H, groups, D]."""

    labels: Tensor
    centroids: Tensor

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self.labels.nbytes + self.centroids.nbytes


def group(v: Tensor, groups: int = 0, previous: Labels | None = None) -> Labels:
    """Group the rows of `v` [B, H, L, D] (floating, any strides) by k-means into `groups` clusters for each head.

    groups: 1..256, or 0 for the automatic choice (`auto_groups`). previous: labels of an earlier step of the same
    layer; its centroids start the search, and one assignment pass then recovers the quality of a fresh grouping.
    Deterministic. Raises ValueError when `groups` is out of range.
    """
    start = None if previous is None else previous.centroids
    if v.is_cuda and torch.version.hip is None:
        found = call.group(v, groups, start)
        if not isinstance(found, Reason):
            return Labels(*found)
    # Plain torch runs on any device; on a card without our kernels it is slower, not wrong.
    return Labels(*spec_group(v, groups, start))
