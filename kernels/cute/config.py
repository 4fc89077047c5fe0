"""Which attention kernels there are: the compile-time choices of each, its name, and the plan that asks for it.

Free of torch and of the compiler, as both the build and the launcher read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..plan import Plan

#: ExpCast's chord centre and the code of a row maximum (`spec.expcast` defines both; a test compares).
BETA = -0.35
TOP_LOG2 = math.log2(448.0)

OUTPUTS = ("bf16", "fp16")
_PROBABILITIES = ("expcast_wide", "exp2")


@dataclass(frozen=True)
class AttentionConfig:
    """Compile-time choices of one sm_90a attention kernel.

    probability: "expcast_wide" or "exp2". demean: restore V block means. key_means: add q . (K block mean) to the
    scores. output: element type written. stages: K and V tiles in flight.
    """

    probability: str
    demean: bool
    key_means: bool
    output: str = "bf16"

    @property
    def name(self) -> str:
        """Name of the kernel in the manifest."""
        means = "_".join(["v"] * self.demean + ["k"] * self.key_means) or "none"
        return f"attention_{self.probability}_means_{means}_{self.output}"

    @property
    def exact_sums(self) -> bool:
        """Whether r and l sum P before it is rounded, as the specification does for exp2.

        Rounding errors of a block's weight would multiply its mean (1.2 times the specification's error). ExpCast sums
        the decoded codes, which the ones rows of V^T give for nothing; so do the exp2 kernels without means.
        """
        return self.demean and self.probability == "exp2"

    @property
    def cluster(self) -> int:
        """CTAs (query tiles) that share each K and V tile by multicast.

        ExpCast: two, +2.5 % on an H200 at its power limit: half the traffic from L2. exp2 gains nothing.
        """
        return 2 if self.probability == "expcast_wide" else 1

    @property
    def stages(self) -> int:
        """K and V tiles in flight: three where shared memory holds them (1 % faster than two)."""
        return 2 if self.key_means else 3


def configs() -> list[AttentionConfig]:
    """Every kernel that is built. Key means come only with V means, as both belong to grouped steps."""
    return [
        AttentionConfig(probability, demean, key_means, output)
        for probability in _PROBABILITIES
        for demean, key_means in ((False, False), (True, False), (True, True))
        for output in OUTPUTS
    ]


def config_of(plan: Plan, output: str) -> AttentionConfig | None:
    """The kernel that computes `plan` with outputs of type `output` ("bf16" or "fp16"); None if there is none."""
    if plan.scores != "int8" or plan.values != "fp8" or plan.score_groups != "per_warp":
        return None
    config = AttentionConfig(plan.probability, plan.demean, plan.key_means, output)
    return config if config in configs() else None
