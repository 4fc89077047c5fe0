"""Which 8-bit mma.sync attention kernels there are: the compile-time choices of each, its name, its plan.

Free of torch and of the compiler, as both the build and the launcher read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Plan

OUTPUTS = ("bf16", "fp16")
ACCUMULATORS = ("f32", "f16")
_PROBABILITIES = ("expcast_wide", "exp2")
#: Architecture -> how tiles reach shared memory: "bulk" copies of a producer warp, or "async" copies by all threads.
#: On sm_90a, which has faster kernels, those of sm_89 are built for trials: ptxas makes fp16 MMAs of the E4M3 ones.
LOADER_OF = {"sm_89": "async", "sm_120a": "bulk", "sm_121a": "bulk", "sm_90a": "async"}


@dataclass(frozen=True)
class Mma8Config:
    """Compile-time choices of one 8-bit mma.sync attention kernel.

    probability: "expcast_wide" or "exp2". demean: restore V block means. key_means: add q . (K block mean) to the
    scores. output: element type written. accumulate: type in which the MMAs of P V^T add up one tile, "f32" or "f16":
    GeForce cards of sm_89 and sm_120 do the latter twice as fast. "f16" needs V^T images whose largest value is
    `layouts_mma8.VALUE_TOP["f16"]`, so that no sum leaves the range.
    """

    probability: str
    demean: bool
    key_means: bool
    output: str = "bf16"
    accumulate: str = "f32"

    @property
    def name(self) -> str:
        """Name of the kernel in the manifest."""
        means = "_".join(["v"] * self.demean + ["k"] * self.key_means) or "none"
        half = "_f16" * (self.accumulate == "f16")
        return f"attention_mma8{half}_{self.probability}_means_{means}_{self.output}"

    @property
    def exact_sums(self) -> bool:
        """Whether r and l sum P before it is rounded, as the specification does for exp2.

        Rounding errors of a block's weight would multiply its mean. ExpCast sums the decoded codes, which the ones
        rows of V^T give for nothing; so do the exp2 kernels without means.
        """
        return self.demean and self.probability == "exp2"


def configs() -> list[Mma8Config]:
    """Every kernel that is built. Key means come only with V means, as both belong to grouped steps."""
    return [
        Mma8Config(probability, demean, key_means, output, accumulate)
        for accumulate in ACCUMULATORS
        for probability in _PROBABILITIES
        for demean, key_means in ((False, False), (True, False), (True, True))
        for output in OUTPUTS
    ]


def config_of(plan: Plan, output: str, accumulate: str = "f32") -> Mma8Config | None:
    """The kernel that computes `plan` with outputs of type `output` ("bf16" or "fp16"); None if there is none."""
    if plan.scores != "int8" or plan.values != "fp8" or plan.score_groups != "per_warp":
        return None
    config = Mma8Config(plan.probability, plan.demean, plan.key_means, output, accumulate)
    return config if config in configs() else None
