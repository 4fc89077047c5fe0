"""Which kernels each architecture has: the one list that building, packing and releasing go by.

A new kernel file adds its `buildables` to the architectures that it is for; a new architecture is a new entry of
KERNELS. Reading the names of the architectures needs no compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from .buildable import Buildable
from .config_mma8 import LOADER_OF
from .selection import scores_of


def _sm_90a() -> list[Buildable]:
    from . import attention_sm90, preparation

    return [*attention_sm90.buildables(), *preparation.buildables()]


def _datacenter_blackwell(arch: str) -> list[Buildable]:
    """Attention by tcgen05 on the images of sm_90a, with preparation and grouping."""
    from . import attention_sm100, preparation

    return [*attention_sm100.buildables(arch), *preparation.buildables("wgmma8", scores_of(arch))]


def _mma8(arch: str) -> list[Buildable]:
    from . import attention_mma8

    return attention_mma8.buildables(arch)


def _eight_bit(arch: str) -> list[Buildable]:
    """8-bit attention by mma.sync, with preparation and grouping."""
    from . import preparation

    # fp16 accumulators stay a trial: what they cost in accuracy has not been seen on a card yet.
    attention = [kernel for kernel in _mma8(arch) if not kernel.name.startswith("attention_mma8_f16")]
    return [*attention, *preparation.buildables("mma8")]


def _rtx_blackwell(arch: str) -> list[Buildable]:
    from . import attention_nvfp4, preparation_nvfp4, probe_nvfp4

    four_bit = [*attention_nvfp4.buildables(), *preparation_nvfp4.buildables(), *probe_nvfp4.buildables()]
    return [*four_bit, *_eight_bit(arch)]


#: Architecture, as the compiler names it -> its kernels in the order of the manifest.
KERNELS: dict[str, Callable[[], list[Buildable]]] = {
    "sm_89": partial(_eight_bit, "sm_89"),
    "sm_90a": _sm_90a,
    "sm_100a": partial(_datacenter_blackwell, "sm_100a"),
    "sm_103a": partial(_datacenter_blackwell, "sm_103a"),
    "sm_120a": partial(_rtx_blackwell, "sm_120a"),
    "sm_121a": partial(_rtx_blackwell, "sm_121a"),
}


def _rtx_on_sm_90a() -> list[Buildable]:
    """Those of RTX Blackwell under their own names, with the instructions that only it has computed by others."""
    from . import attention_nvfp4, preparation_nvfp4, probe_nvfp4

    attention = [replace(x, name=x.name.removesuffix("_emulated")) for x in attention_nvfp4.buildables(emulated=True)]
    others = [*preparation_nvfp4.buildables(emulated=True), *probe_nvfp4.buildables(emulated=True)]
    return [*attention, *others, *_eight_bit("sm_90a")]


def _datacenter_preparation() -> list[Buildable]:
    """Preparation of B200 and B300, in both formats of Q and K."""
    from . import preparation

    return preparation.buildables("wgmma8", scores_of("sm_100a"))


#: Kernels that no wheel holds: to run them where they are not shipped, or alone. Name -> architecture -> its kernels.
TRIALS: dict[str, dict[str, Callable[[], list[Buildable]]]] = {
    "mma8": {arch: partial(_mma8, arch) for arch in LOADER_OF},
    "rtx": {"sm_90a": _rtx_on_sm_90a},
    "datacenter": {"sm_90a": _datacenter_preparation},
}


def buildables(arch: str, trial: str = "") -> list[Buildable]:
    """Every kernel of an architecture, or those of a trial. Raises LookupError where there are none."""
    if trial:
        if arch not in TRIALS.get(trial, {}):
            raise LookupError(f"There is no trial {trial} for {arch}.")
        return TRIALS[trial][arch]()
    if arch not in KERNELS:
        raise LookupError(f"There are no kernels for {arch} yet; there are some for {', '.join(KERNELS)}.")
    return KERNELS[arch]()
