"""All kernels of the architecture that this process compiles for. A new kernel file adds its `buildables` here."""

from __future__ import annotations

from . import attention_sm90, preparation
from .buildable import Buildable


def buildables() -> list[Buildable]:
    """Every kernel, in the order of the manifest."""
    return [*attention_sm90.buildables(), *preparation.buildables()]
