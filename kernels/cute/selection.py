"""Which attention kernel of an architecture computes a plan, and which images it reads: the one table of both.

Free of torch and of the compiler, as the launcher reads it. Kinds of images: "wgmma8" (`layouts`), "mma8"
(`layouts_mma8`), "nvfp4" (`layouts_nvfp4`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Selected:
    """kernel: name in the manifest. images: kind of images that it reads."""

    kernel: str
    images: str


@lru_cache(maxsize=256)
def select(arch: str, plan: Plan, output: str) -> Selected | None:
    """The kernel of `arch` that computes `plan` with outputs of type `output` ("bf16" or "fp16"); None if none does."""
    for images in IMAGES.get(arch, ()):
        found = _CONFIG_OF[images](plan, output)
        if found is not None:
            return Selected(found.name, images)
    return None
