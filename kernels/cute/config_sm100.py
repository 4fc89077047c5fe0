"""Which attention kernels B200 (sm_100a) and B300 (sm_103a) have: the choices of each, its name, its plan.

Free of torch and of the compiler, as both the build and the launcher read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import Plan

OUTPUTS = ("bf16", "fp16")
_PROBABILITIES = ("expcast_wide", "exp2")
#: Formats of Q and K whose products the tensor cores of an architecture form. sm_103a has no integer MMA.
SCORES_OF = {"sm_100a": ("fp8", "int8"), "sm_103a": ("fp8",)}


@dataclass(frozen=True)
class Sm100Config:
    """Compile-time choices of one tcgen05 attention kernel.

    scores: format of Q and K, "fp8" (E4M3) or "int8" (sm_100a only). probability: "expcast_wide" or "exp2". demean:
    restore V block means. key_means: add q . (K block mean) to the scores. output: element type written.
    """

    scores: str
    probability: str
    demean: bool
    key_means: bool
    output: str = "bf16"

    @property
    def name(self) -> str:
        """Name of the kernel in the manifest."""
        means = "_".join(["v"] * self.demean + ["k"] * self.key_means) or "none"
        return f"attention_sm100_{self.scores}_{self.probability}_means_{means}_{self.output}"

    @property
    def exact_sums(self) -> bool:
        """Whether r and l sum P before it is rounded, as the specification does for exp2.

        Rounding errors of a block's weight would multiply its mean. ExpCast sums the decoded codes, which the ones
        rows of V^T give; so do the exp2 kernels without means.
        """
        return self.demean and self.probability == "exp2"

    @property
    def stages(self) -> int:
        """K and V tiles of 128 keys in flight: what shared memory holds. Key means need 64 KB for Q in bf16."""
        return 2 if self.key_means else 4


def configs(arch: str) -> list[Sm100Config]:
    """Every kernel that is built for `arch`. Key means come only with V means, as both belong to grouped steps."""
    return [
        Sm100Config(scores, probability, demean, key_means, output)
        for scores in SCORES_OF[arch]
        for probability in _PROBABILITIES
        for demean, key_means in ((False, False), (True, False), (True, True))
        for output in OUTPUTS
    ]


def config_of(plan: Plan, output: str) -> Sm100Config | None:
    """The kernel that computes `plan` with outputs of type `output` ("bf16" or "fp16"); None if there is none.

    INT8 scores have one on sm_100a alone (`SCORES_OF`).
    """
    if plan.values != "fp8" or plan.score_groups != "per_warp":
        return None
    config = Sm100Config(plan.scores, plan.probability, plan.demean, plan.key_means, output)
    return config if config in configs("sm_100a") else None
