"""Which kernels each architecture has: the one list that building, packing and releasing go by.

A new kernel file adds its `buildables` to the architectures that it is for; a new architecture is a new entry of
KERNELS. Reading the names of the architectures needs no compiler.
"""

from __future__ import annotations

from collections.abc import Callable

from .buildable import Buildable
from .config import SHIPPED, Tuning


def _sm_90a(tuning: Tuning) -> list[Buildable]:
    from . import attention_sm90, preparation

    return [*attention_sm90.buildables(tuning), *preparation.buildables()]


#: Architecture, as the compiler names it -> its kernels in the order of the manifest.
KERNELS: dict[str, Callable[[Tuning], list[Buildable]]] = {"sm_90a": _sm_90a}


def buildables(arch: str, tuning: Tuning = SHIPPED) -> list[Buildable]:
    """Every kernel of an architecture. `tuning`: of the attention kernels. Raises LookupError for one without any."""
    if arch not in KERNELS:
        raise LookupError(f"There are no kernels for {arch} yet; there are some for {', '.join(KERNELS)}.")
    return KERNELS[arch](tuning)
