"""Which attention kernels there are: the compile-time choices of each, its name, and the plan that asks for it.

Free of torch and of the compiler, as both the build and the launcher read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from ..plan import Plan

#: ExpCast's chord centre and the code of a row maximum (`spec.expcast` defines both; a test compares).
BETA = -0.35
TOP_LOG2 = math.log2(448.0)

OUTPUTS = ("bf16", "fp16")
_PROBABILITIES = ("expcast_wide", "exp2")


@dataclass(frozen=True)
class Tuning:
    """Other ways to compute the same numbers, chosen at build time (`build.py --tuning`).

    The defaults are what is shipped; the rest waits for a measurement (`benchmarks/NOTES.md`).

    split: Q K^T as two products of 128 keys. The tile before is merged under the first, whose own maxima are taken
        under the second. 1: the first starts at zero, and the start value is added to its result; 2: both do; 3: none.
    halves: with split: P V of one half is under way while the other half's P is computed. 1: always; 2: not in the
        first tile of a mean group, where registers are short. Kernels with key means have too few and ignore it.
    chunk: 4-element groups of P that the compiler may not leave unpacked for more than one further such chunk.
    poly: how many of 16 exponentials are polynomials on the FMA pipe (exp2).
    shift: added to the bits that scores start from, to keep small scores of both signs from flipping all high bits.
    wide_fill: scores start from results of FP64 FMAs, two in one instruction.
    cluster: query tiles that share K and V; 0: the kernel's own choice.
    turns: pass the MMA section between the warpgroups; 0: the kernel's own choice, 1: yes, 2: no.
    """

    split: int = 0
    halves: int = 0
    chunk: int = 0
    poly: int = 0
    shift: int = 0
    wide_fill: int = 0
    cluster: int = 0
    turns: int = 0

    @classmethod
    def parse(cls, text: str) -> Tuning:
        """The tuning that "name=number,name=number" spells. Raises ValueError for a name that there is none of."""
        known = {f.name for f in fields(cls)}
        chosen = dict(item.split("=") for item in text.split(",") if item)
        if unknown := sorted(set(chosen) - known):
            raise ValueError(f"There is no tuning {', '.join(unknown)}; there are {', '.join(sorted(known))}.")
        return cls(**{name: int(value, 0) for name, value in chosen.items()})


@dataclass(frozen=True)
class AttentionConfig:
    """Compile-time choices of one sm_90a attention kernel.

    probability: "expcast_wide" or "exp2". demean: restore V block means. key_means: add q . (K block mean) to the
    scores. output: element type written. stages: K and V tiles in flight. tuning: how, not what; not part of the name.
    """

    probability: str
    demean: bool
    key_means: bool
    output: str = "bf16"
    tuning: Tuning = field(default=Tuning(), compare=False)

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
        return self.tuning.cluster or (2 if self.probability == "expcast_wide" else 1)

    @property
    def take_turns(self) -> bool:
        """Whether the warpgroups pass a token over P V .. next Q K^T.

        exp2: it keeps one warpgroup's EX2 under the other's MMAs (+11 %). ExpCast loses 12 % by it: its softmax is
        short, and the kernel stands at the power limit.
        """
        return self.tuning.turns == 1 or (self.tuning.turns == 0 and self.probability == "exp2")

    @property
    def halves(self) -> int:
        """`Tuning.halves`, where registers allow it."""
        return 0 if self.key_means else self.tuning.halves

    @property
    def stages(self) -> int:
        """K and V tiles in flight: three where shared memory holds them (1 % faster than two)."""
        return 2 if self.key_means else 3


#: What is shipped.
SHIPPED = Tuning()


def configs(tuning: Tuning = SHIPPED) -> list[AttentionConfig]:
    """Every kernel that is built. Key means come only with V means, as both belong to grouped steps."""
    return [
        AttentionConfig(probability, demean, key_means, output, tuning)
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
