"""What was measured in one sampler run, as data: single calls, the layers' totals, and the layers in 16 bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import add_sums, measures
from .state import Layer

#: Why a layer stays in 16 bit.
BUDGET = "budget"
PROFILE = "profile"


class Measurement(NamedTuple):
    """One measured call. step: from 0. heads: those sampled, of `of_heads`. branches: conditionings in the batch.

    relative_l2: None when only the exact result is zero. psnr_db: None when the two are equal.
    """

    layer: Layer
    step: int
    phase: str
    sigma: float | None
    branches: int
    heads: tuple[int, ...]
    relative_l2: float | None
    cosine: float | None
    psnr_db: float | None


@dataclass
class LayerTotal:
    """All measured calls of one layer in a run. worst_db: the lowest PSNR of one call (infinite when all were equal).

    sums: as `kernels.error_sums`, fp64 [6].
    """

    count: int = 0
    sums: Tensor | None = None
    worst_db: float = math.inf
    worst_step: int = 0

    def add(self, sums: Tensor, psnr: float | None, step: int) -> None:
        """Take one more call in."""
        self.count += 1
        self.sums = sums if self.sums is None else add_sums((self.sums, sums))
        if psnr is not None and psnr < self.worst_db:
            self.worst_db, self.worst_step = psnr, step

    @property
    def measures(self) -> dict[str, float | None]:
        """relative_l2, cosine and psnr_db of all rows together."""
        if self.sums is None:
            return {"relative_l2": None, "cosine": None, "psnr_db": None}
        return measures(self.sums.tolist())


@dataclass(frozen=True)
class Decision:
    """Why a layer stays in 16 bit: "budget" or "profile". step: the one (from 0) that was measured below the budget."""

    why: str
    step: int = 0
    psnr_db: float = math.nan


@dataclass
class QualityRun:
    """What was measured in one sampler run. dense: the layers in 16 bit, in the order in which they went there.

    prompt: ComfyUI's id of the prompt. finished: the sampler has ended. skipped: calls whose inputs were not finite.
    dropped: measurements beyond those that are kept one by one. shape: (Lq, Lkv, heads) of the last measured call.
    """

    prompt: str | None = None
    family: str = ""
    plan: str = ""
    backend: str = ""
    device: str = ""
    steps: int = 0
    shape: tuple[int, int, int] = (0, 0, 0)
    measurements: list[Measurement] = field(default_factory=list)
    layers: dict[Layer, LayerTotal] = field(default_factory=dict)
    dense: dict[Layer, Decision] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dropped: int = 0
    skipped: int = 0
    finished: bool = False

    def note(self, sentence: str) -> None:
        """Add a sentence to the report, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)


def order(layer: Layer) -> tuple[str, int, int]:
    """The order of layers in tables: by type, block and call."""
    index = layer.block_index if isinstance(layer.block_index, int) else -1
    return ("" if layer.block_type is None else str(layer.block_type), index, layer.ordinal)


def device_name(device: torch.device) -> str:
    """The device in words: a card's name, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
