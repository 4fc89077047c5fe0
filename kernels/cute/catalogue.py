"""All kernels of the architecture that this process compiles for. A new kernel file adds its `buildables` here."""

from __future__ import annotations

from . import attention_sm90, preparation
from .buildable import Buildable
from .config import SHIPPED, Tuning


def buildables(tuning: Tuning = SHIPPED) -> list[Buildable]:
    """Every kernel, in the order of the manifest. `tuning`: of the attention kernels."""
    return [*attention_sm90.buildables(tuning), *preparation.buildables()]
