"""Which NVFP4 attention kernels for sm_120a there are: the compile-time choices of each, its name, its plan.

Free of torch and of the compiler, as both the build and the launcher read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Plan

OUTPUTS = ("bf16", "fp16")
#: Architectures of the block-scaled E2M1 MMA that these kernels use.
ARCHITECTURES = ("sm_120a", "sm_121a")


@dataclass(frozen=True)
class Nvfp4Config:
    """Compile-time choices of one NVFP4 attention kernel.

    demean: restore V block means. key_means: add q . (K block mean) to the scores. output: element type written.
    emulated: for a card without block-scaled MMAs (`emulated_sm120`); tests only.
    """

    demean: bool
    key_means: bool
    output: str = "bf16"
    emulated: bool = False

    @property
    def name(self) -> str:
        """Name of the kernel in the manifest."""
        means = "_".join(["v"] * self.demean + ["k"] * self.key_means) or "none"
        return f"attention_nvfp4_means_{means}_{self.output}" + "_emulated" * self.emulated


def configs() -> list[Nvfp4Config]:
    """Every kernel that is built. Key means come only with V means, as both belong to grouped steps."""
    return [
        Nvfp4Config(demean, key_means, output)
        for demean, key_means in ((False, False), (True, False), (True, True))
        for output in OUTPUTS
    ]


def config_of(plan: Plan, output: str) -> Nvfp4Config | None:
    """The kernel that computes `plan` with outputs of type `output` ("bf16" or "fp16"); None if there is none."""
    if (plan.scores, plan.values, plan.probability) != ("nvfp4", "nvfp4", "exp2"):
        return None
    config = Nvfp4Config(plan.demean, plan.key_means, output)
    return config if config in configs() else None
