"""What one attention call computes: formats, probability mode and smoothing, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

SCORES = ("int8", "fp8", "nvfp4", "exact")
VALUES = ("fp8", "nvfp4", "int8", "exact")
PROBABILITIES = ("expcast", "expcast_wide", "expcast_chord", "exp2")
SCORE_GROUPS = ("per_thread", "per_warp")

#: Tokens in one V-Smooth block, and in one key block of the score groups.
BLOCK = 128


@dataclass(frozen=True)
class Plan:
    """The arithmetic of one attention call. Every backend reads it; the specification in `kernels.spec` defines it.

    scores: format of Q and K in QK^T. "int8" (SageAttention2 style groups), "fp8" (E4M3, one scale per
        `score_groups` group), "nvfp4" (groups of 16 along the head dimension) or "exact" (not quantised).
    values: format of V (and of P, for "nvfp4"): "fp8" (E4M3, one fp32 scale per batch, head and channel), "nvfp4"
        (groups of 16 along tokens), "int8" (one scale per 128-token block and channel) or "exact".
    probability: how exp2(score - row max) becomes P. "exp2" evaluates it in fp32 and rounds to the format that V
        needs; "expcast" is ExpCast-FP8 as published (arXiv 2609.15810: row maximum at code 120, codes below 8 become
        0); "expcast_wide" puts the row maximum at code 126 (448) and keeps the subnormal codes 1..7, which buys 0.8
        binade of tail and costs nothing; "expcast_chord" also bends the chord below code 8, one instruction more.
        The ExpCast forms need values = "fp8".
    demean: subtract each 128-token block's mean from V before quantising and restore it inside the online softmax
        (V-Smooth).
    key_means: subtract each 128-token block's mean from K as well and add q . mean back to the scores.
    clip_means: form block means with the norm-clipped weights w = min(1, (2 median / |v|)^2), so that one huge token
        does not move its block's mean.
    score_groups: granularity of the INT8 / FP8 score scales. "per_thread" is SageAttention2's (4 query rows of a warp
        and 16 keys of a 64-key block); "per_warp" is 16 query rows and 128 keys, which a fast kernel can afford.
    adaptive_scales: a group of Q, K or V in NVFP4 may put its largest element on 4 instead of 6 (`formats.nvfp4`). Work
        for the preparation only; the attention kernel multiplies by whatever scale it finds. P keeps 6.
    """

    scores: str = "int8"
    values: str = "fp8"
    probability: str = "expcast_wide"
    demean: bool = True
    key_means: bool = False
    clip_means: bool = False
    score_groups: str = "per_warp"
    adaptive_scales: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("scores", SCORES),
            ("values", VALUES),
            ("probability", PROBABILITIES),
            ("score_groups", SCORE_GROUPS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"Plan.{name} is {value!r}; it must be one of {', '.join(allowed)}.")
        if self.probability != "exp2" and self.values != "fp8":
            raise ValueError(
                f"Plan.probability {self.probability!r} makes E4M3 codes, so it needs values='fp8', not "
                f"{self.values!r}."
            )

    def without_smoothing(self) -> Plan:
        """The same formats without block means: the plain low-bit kernel that the paper runs outside its window."""
        return replace(self, demean=False, key_means=False, clip_means=False)

    def encode(self) -> str:
        """A short stable string, the form in which the custom op and the cubin manifest carry a plan."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ",".join(f"{name}={int(v) if isinstance(v, bool) else v}" for name, v in values)

    @classmethod
    def decode(cls, text: str) -> Plan:
        """The inverse of `encode`. Raises ValueError on an unknown field or value."""
        values: dict[str, str | bool] = {}
        known = {f.name: isinstance(f.default, bool) for f in fields(cls)}
        for item in text.split(","):
            name, _, value = item.partition("=")
            if name not in known:
                raise ValueError(f"{name!r} is not a field of Plan; the fields are {', '.join(known)}.")
            values[name] = value == "1" if known[name] else value
        return cls(**values)  # type: ignore[arg-type]


FAST = Plan()
FAITHFUL = Plan(probability="exp2")
FOUR_BIT = Plan(scores="nvfp4", values="nvfp4", probability="exp2", adaptive_scales=True)
EXACT = Plan(scores="exact", values="exact", probability="exp2", demean=False)

#: Names of the presets as `run.py replay --plan` and the node use them.
PRESETS: dict[str, Plan] = {"fast": FAST, "faithful": FAITHFUL, "four_bit": FOUR_BIT, "exact": EXACT}
