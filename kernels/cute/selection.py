"""Which images and which attention kernel an architecture has for a plan: the one table that the launcher goes by.

Free of torch and of the compiler. Kinds of images: "wgmma8" (`layouts`), "mma8" (`layouts_mma8`), "nvfp4"
(`layouts_nvfp4`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from ..plan import Plan
from . import config, config_mma8, config_nvfp4


class _Named(Protocol):
    @property
    def name(self) -> str: ...


#: Architecture -> the kinds of images that its kernels read.
IMAGES: dict[str, tuple[str, ...]] = {
    "sm_89": ("mma8",),
    "sm_90a": ("wgmma8",),
    "sm_120a": ("mma8", "nvfp4"),
    "sm_121a": ("mma8", "nvfp4"),
}
_CONFIG_OF: dict[str, Callable[[Plan, str], _Named | None]] = {
    "wgmma8": config.config_of,
    "mma8": config_mma8.config_of,
    "nvfp4": config_nvfp4.config_of,
}


def images_of(arch: str, plan: Plan) -> str | None:
    """The kind of images that kernels of `arch` read for the formats of `plan`; None if they have none."""
    formats = (plan.scores, plan.values)
    four_bit = formats == ("nvfp4", "nvfp4") and plan.probability == "exp2"
    eight_bit = formats == ("int8", "fp8") and plan.score_groups == "per_warp"
    for images in IMAGES.get(arch, ()):
        if four_bit if images == "nvfp4" else eight_bit:
            return images
    return None


@lru_cache(maxsize=256)
def kernel_of(arch: str, plan: Plan, output: str) -> str:
    """Manifest name of the kernel of `arch` that computes `plan` with outputs of type `output` ("bf16" or "fp16");
    empty if none does."""
    images = images_of(arch, plan)
    found = None if images is None else _CONFIG_OF[images](plan, output)
    return found.name if found else ""
