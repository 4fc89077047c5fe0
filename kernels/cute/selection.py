"""Which images and which attention kernel an architecture has for a plan: the one table that the launcher goes by.

Free of torch and of the compiler. Kinds of images: "wgmma8" (`layouts`), "mma8" (`layouts_mma8`), "nvfp4"
(`layouts_nvfp4`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

from ..plan import PRESETS, Plan
from . import config, config_mma8, config_nvfp4, config_sm100


class _Named(Protocol):
    @property
    def name(self) -> str: ...


#: Architecture -> the kinds of images that its kernels read.
IMAGES: dict[str, tuple[str, ...]] = {
    "sm_89": ("mma8",),
    "sm_90a": ("wgmma8",),
    "sm_100a": ("wgmma8",),
    "sm_103a": ("wgmma8",),
    "sm_120a": ("mma8", "nvfp4"),
    "sm_121a": ("mma8", "nvfp4"),
}
#: Architectures with tcgen05, whose attention kernels are `config_sm100`'s: two query tiles a block.
TCGEN05 = tuple(config_sm100.SCORES_OF)
#: Architecture -> what its 8-bit presets have that is not their own. FP8 scores have 1.5 times INT8's error, or 2.5
#: times where K is clustered like V, which key means repair (benchmarks/NOTES.md): so they are taken only where there
#: is no INT8 product, and never without key means.
_PRESET_CHANGES: dict[str, dict[str, Any]] = {"sm_103a": {"scores": "fp8", "key_means": True}}
_CONFIG_OF: dict[str, Callable[[Plan, str], _Named | None]] = {
    "wgmma8": config.config_of,
    "tcgen05": config_sm100.config_of,
    "mma8": config_mma8.config_of,
    "nvfp4": config_nvfp4.config_of,
}


def scores_of(arch: str) -> tuple[str, ...]:
    """Formats of Q and K that the 8-bit kernels of `arch` take, the faster first."""
    return config_sm100.SCORES_OF.get(arch, ("int8",))


def query_tiles_of_block(arch: str) -> int:
    """Query tiles (of 128 rows) that one block of an attention kernel of `arch` computes."""
    return 2 if arch in TCGEN05 else 1


def preset(arch: str | None, name: str) -> Plan:
    """What the preset `name` (of `plan.PRESETS`) computes on cards of `arch`, or where there are no kernels (None).

    A plan is exact about its formats, a preset is what a creator chose: on B300, which multiplies no integers, "fast"
    and "faithful" have FP8 scores with key means.
    """
    plan = PRESETS[name]
    return replace(plan, **_PRESET_CHANGES.get(arch or "", {})) if plan.scores == "int8" else plan


def images_of(arch: str, plan: Plan) -> str | None:
    """The kind of images that kernels of `arch` read for the formats of `plan`; None if they have none."""
    four_bit = (plan.scores, plan.values, plan.probability) == ("nvfp4", "nvfp4", "exp2")
    eight_bit = plan.scores in scores_of(arch) and plan.values == "fp8" and plan.score_groups == "per_warp"
    for images in IMAGES.get(arch, ()):
        if four_bit if images == "nvfp4" else eight_bit:
            return images
    return None


@lru_cache(maxsize=256)
def kernel_of(arch: str, plan: Plan, output: str) -> str:
    """Manifest name of the kernel of `arch` that computes `plan` with outputs of type `output` ("bf16" or "fp16");
    empty if none does."""
    images = images_of(arch, plan)
    if images is None:
        return ""
    found = _CONFIG_OF["tcgen05" if arch in TCGEN05 else images](plan, output)
    return found.name if found else ""
