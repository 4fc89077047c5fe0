"""Which kernels each architecture has: the one list that building, packing and releasing go by.

A new kernel file adds its `buildables` to the architectures that it is for; a new architecture is a new entry of
KERNELS. Reading the names of the architectures needs no compiler.
"""

from __future__ import annotations

from collections.abc import Callable

from .buildable import Buildable


def _sm_90a() -> list[Buildable]:
    from . import attention_sm90, preparation

    return [*attention_sm90.buildables(), *preparation.buildables()]


#: Architecture, as the compiler names it -> its kernels in the order of the manifest.
KERNELS: dict[str, Callable[[], list[Buildable]]] = {"sm_90a": _sm_90a}


def buildables(arch: str) -> list[Buildable]:
    """Every kernel of an architecture. Raises LookupError for one that has none yet."""
    if arch not in KERNELS:
        raise LookupError(f"There are no kernels for {arch} yet; there are some for {', '.join(KERNELS)}.")
    return KERNELS[arch]()
