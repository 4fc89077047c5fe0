"""The numeric self-test of attention kernels on a card: small checks whose right answers are known.

1. Uniform attention: with K = 0 every output row is the mean of V, at lengths that end inside a block.
2. Golden probabilities: Q and K whose 8-bit codes are exact, so that each score is known to a millionth, and a V that
   shows the probability of one key in each output channel. A probability one code off (6 % and more) is seen.
3. A random case with grouping labels against exact attention, within what the format is known to cost.
4. NVFP4 in place of 2, as its 4-bit codes are too coarse for known scores: the same random case against the
   specification, much nearer than the format is to exact attention.

`attention` is any function with the arguments of `kernels.spec.attention.attention`, so the test itself is tested on
the specification and on functions with planted faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ..plan import FAITHFUL, FAST, FOUR_BIT, Plan
from ..spec.attention import attention as specification
from ..spec.expcast import TOP_LOG2, expcast
from ..spec.formats import E4M3_MAX, e4m3, e4m3_decode

#: Raised when a check changes: remembered verdicts of another version are not taken.
VERSION = 4

#: (q, k, v, plan, labels, scale) -> output [B, H, Lq, D].
Attention = Callable[[Tensor, Tensor, Tensor, Plan, "Tensor | None", "float | None"], Tensor]

HEAD_DIM = 128
#: Families of plans: words for them, and the relative L2 error of the specification in the worst head of the random
#: case (measured; bf16 and fp16 differ by 2 %). A kernel may have ERROR_MARGIN times that.
FAMILIES: tuple[tuple[str, Plan, float], ...] = (
    ("fast", FAST, 0.0114),
    ("fast with key means", Plan(key_means=True), 0.0111),
    ("fast without smoothing", FAST.without_smoothing(), 0.0118),
    ("faithful", FAITHFUL, 0.0102),
    ("faithful with key means", Plan(probability="exp2", key_means=True), 0.0101),
    ("faithful without smoothing", FAITHFUL.without_smoothing(), 0.0115),
    ("fast with FP8 scores", replace(FAST, scores="fp8"), 0.0173),
    ("fast with FP8 scores and key means", replace(FAST, scores="fp8", key_means=True), 0.0167),
    ("fast with FP8 scores, without smoothing", replace(FAST, scores="fp8").without_smoothing(), 0.0177),
    ("faithful with FP8 scores", replace(FAITHFUL, scores="fp8"), 0.0169),
    ("faithful with FP8 scores and key means", replace(FAITHFUL, scores="fp8", key_means=True), 0.0161),
    ("faithful with FP8 scores, without smoothing", replace(FAITHFUL, scores="fp8").without_smoothing(), 0.0174),
    ("four_bit", FOUR_BIT, 0.0581),
    ("four_bit with key means", replace(FOUR_BIT, key_means=True), 0.0547),
    ("four_bit without smoothing", FOUR_BIT.without_smoothing(), 0.0589),
)
ERROR_MARGIN = 1.2
DTYPES = (torch.bfloat16, torch.float16)

#: Keys (and as many queries plus three) of uniform attention: one, inside and past a block, past a 256-key tile.
UNIFORM_LENGTHS = (1, 65, 129, 391)
#: Relative L2 error of a row. V's values are powers of two, which E4M3 holds exactly, so only the output's own rounding
#: remains (0.0017); the residuals of a smoothed V are rounded (0.0065, measured).
UNIFORM_BOUND, UNIFORM_BOUND_SMOOTHED = 0.0025, 0.009
#: NVFP4: a power of two beside a 32 in its group of 16 is rounded (by the specification: 0.014, residuals 0.0214).
UNIFORM_BOUND_4, UNIFORM_BOUND_4_SMOOTHED = 0.017, 0.026
#: Relative L2 distance of an NVFP4 kernel from the specification in a head of the random case. A score on the other
#: side of a rounding boundary moves a probability by a code: 0.006 in the executed PTX.
SPECIFIED_BOUND = 0.02

#: Golden case: 64 keys that are seen, 64 that get little or no weight. Rows of Q come in groups of 16 that share a
#: scale.
_SEEN = 64
_ROW_FACTORS = (3, 5, 7)
#: Format of Q and K -> (level of the row maximum, score step of one level for factor 1, in powers of two). With these
#: no score comes nearer than a tenth of a code to a rounding boundary of ExpCast, nor a probability nearer than 0.17 %
#: of a step to one of E4M3.
_GOLDEN = {"int8": (190, 1 / 32), "fp8": (448, 1 / 128)}
_PROBABILITY_TOLERANCE = 0.015
#: Kernels without block means sum exp2's probabilities as E4M3 rounded them: each is off by a sixteenth at most, and
#: the 64 of a row average out.
_ROUNDED_SUM_TOLERANCE = 0.035
#: How far a kernel's score may be from the exact one, in powers of two. An integer score that an FMA reads as a float
#: 12582912 + s carries that offset times its scale, up to 21,700 here, whose ulp is 0.002, and is rounded twice. The
#: smallest step of E4M3 is 0.087, so a probability within a seventeenth of a step of a boundary may fall on either
#: side (seen on an H200).
_SCORE_SLACK = 0.005

_RANDOM_SHAPE = (2, 3, 200, 391)
_GROUPS = 7


@dataclass(frozen=True)
class Case:
    """One kernel to test: words for its plan, the plan, the output type, the error it may have on the random case."""

    name: str
    plan: Plan
    dtype: torch.dtype
    error: float

    def __str__(self) -> str:
        return f"{self.name} in {str(self.dtype)[6:]}"


def cases(present: Callable[[Plan, torch.dtype], bool]) -> list[Case]:
    """The families, in both 16-bit types, that `present` says are there."""
    return [
        Case(name, plan, dtype, error * ERROR_MARGIN)
        for name, plan, error in FAMILIES
        for dtype in DTYPES
        if present(plan, dtype)
    ]


def problem(attention: Attention, tested: Sequence[Case], device: torch.device | str) -> str | None:
    """The first thing that `attention` gets wrong on `device`, in a sentence; None when all checks pass.

    Waits for the device. Raises what `attention` raises. Inputs and references are made on the CPU, once for all cases,
    in fp32 or better: they owe nothing to the card.
    """
    try:
        for case in tested:
            second = _specified if case.plan.values == "nvfp4" else _golden
            for check in (_uniform, second, _random):
                found = check(attention, case, torch.device(device))
                if found is not None:
                    return f"{case}: {found}."
        return None
    finally:
        for made in (_uniform_case, _levels, _golden_case, _golden_outputs, _random_case, _specified_case):
            made.cache_clear()


def _call(
    attention: Attention,
    case: Case,
    device: torch.device,
    tensors: tuple[Tensor, Tensor, Tensor],
    labels: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The output in fp32 on the CPU."""
    q, k, v = (x.to(device) for x in tensors)
    return attention(q, k, v, case.plan, None if labels is None else labels.to(device), scale).cpu().float()


# -- 1. uniform attention -------------------------------------------------------------------------------------------


def _uniform(attention: Attention, case: Case, device: torch.device) -> str | None:
    for length in UNIFORM_LENGTHS:
        tensors, want = _uniform_case(length, case.dtype)
        got = _call(attention, case, device, tensors)
        off = ((got - want).norm(dim=-1) / want.norm(dim=-1)).amax().item()
        if not math.isfinite(off):
            return f"uniform attention over {length} tokens gives numbers that are not finite"
        bounds = (UNIFORM_BOUND, UNIFORM_BOUND_SMOOTHED)
        if case.plan.values == "nvfp4":
            bounds = (UNIFORM_BOUND_4, UNIFORM_BOUND_4_SMOOTHED)
        if off > bounds[case.plan.demean]:
            return f"uniform attention over {length} tokens is {off:.1%} away from the mean of V"
    return None


@cache
def _uniform_case(length: int, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """q [1, 2, length + 3, 128], k of zeros and v [1, 2, length, 128] of powers of two, the last token's large; and
    the mean of v.
    """
    g = torch.Generator().manual_seed(length)
    q = torch.randn(1, 2, length + 3, HEAD_DIM, generator=g)
    v = 2.0 ** torch.randint(-1, 3, (1, 2, length, HEAD_DIM), generator=g)
    # A last token that is lost or counted twice moves these channels far.
    v[..., -1, ::4] = 32.0
    return (q.to(dtype), torch.zeros_like(v, dtype=dtype), v.to(dtype)), v.mean(-2, keepdim=True)


# -- 2. golden probabilities ----------------------------------------------------------------------------------------


def _golden(attention: Attention, case: Case, device: torch.device) -> str | None:
    plan = case.plan
    tensors, _ = _golden_case(case.dtype, plan.scores)
    scale = _GOLDEN[plan.scores][1] / (HEAD_DIM * math.log2(math.e))
    got = _call(attention, case, device, tensors, None, scale)
    want = _golden_outputs(plan.probability, plan.scores)
    if not math.isfinite(got.abs().sum().item()):
        return "attention with known scores gives numbers that are not finite"
    # As a share of the output at the row maximum, where the probability is known: that leaves only probabilities.
    top = got[..., :1]
    rounded = plan.probability == "exp2" and not plan.demean
    if ((top / want[..., :1] - 1).abs() > (_ROUNDED_SUM_TOLERANCE if rounded else _PROBABILITY_TOLERANCE)).any():
        return "the sum of the probabilities is not that of the specification"
    got, want = got / top, want / want[..., :1]
    wrong = torch.ones_like(got, dtype=torch.bool)
    for slack in (0.0, -_SCORE_SLACK, _SCORE_SLACK):
        near = _golden_outputs(plan.probability, plan.scores, slack)
        near = near / near[..., :1]
        wrong &= (got - near).abs() > _PROBABILITY_TOLERANCE * near.abs() + 1e-6
    if wrong.any():
        _, head, row, channel = wrong.nonzero()[0].tolist()
        return (
            f"a key's probability (head {head}, row {row}, channel {channel}) is "
            f"{got[0, head, row, channel].item():.3g} of the largest instead of "
            f"{want[0, head, row, channel].item():.3g}"
        )
    return None


def _shown(shift: int) -> Tensor:
    """The key that each of the first 64 channels shows. Channel 0 always shows that of the row maximum; the heads
    differ in the rest.
    """
    return torch.cat((torch.zeros(1).long(), 1 + (torch.arange(_SEEN - 1) + shift) % (_SEEN - 1)))


@cache
def _levels(scores: str) -> Tensor:
    """The score level of each key, int64 [128], the row maximum's first: exact codes of the format once K is smoothed.

    int8: their mean is 63 and the largest distance from it 127. fp8: their mean is 0, and all are E4M3 numbers.
    """
    levels = torch.zeros(2 * _SEEN, dtype=torch.int64)
    if scores == "int8":
        # 62 .. 190 around 126; with the 64 zeros the mean is 63.
        seen = torch.linspace(_GOLDEN[scores][0], 62, _SEEN).round().long()
        seen[_SEEN // 2 :] = 252 - seen[: _SEEN // 2].flip(0)
        levels[:_SEEN] = seen
        return levels
    # The 38 E4M3 numbers that are multiples of 4, zero, and 25 negative ones: their sum is 64 * 56.
    positive = [x for x in e4m3_decode(torch.arange(1, 127, dtype=torch.uint8)).tolist() if x % 4 == 0]
    levels[:_SEEN] = torch.tensor([*reversed(positive), 0, *(-x for x in positive[:24]), -224])
    levels[_SEEN:] = -56
    return levels


@cache
def _golden_case(dtype: torch.dtype, scores: str = "int8") -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """q [1, 2, 48, 128], k, v [1, 2, 128, 128], and the score level of each key [128].

    Every row of q and k is constant over the channels, so the Hadamard rotation leaves one channel that holds the
    block's largest magnitude: its codes are exact. Channel j of V is +64 at a key that is seen and -64 at one that is
    not: its mean is zero and its E4M3 codes are exact, so the output there is 64 times the difference of their
    probabilities.
    """
    levels = _levels(scores)
    rows = torch.tensor(_ROW_FACTORS).repeat_interleave(16).to(dtype)
    q = rows[:, None].expand(-1, HEAD_DIM).expand(1, 2, -1, -1)
    k = levels.to(dtype)[:, None].expand(-1, HEAD_DIM).expand(1, 2, -1, -1)
    v = torch.zeros(1, 2, 2 * _SEEN, HEAD_DIM, dtype=dtype)
    index = torch.arange(_SEEN)
    for head in (0, 1):
        for first, sign in ((0, 64.0), (_SEEN, -64.0)):
            v[0, head, _shown(head), first + index] = sign
            v[0, head, _SEEN + _shown(head), first + index] = -sign
    return (q.contiguous(), k.contiguous(), v), levels


@cache
def _golden_outputs(probability: str, scores: str, slack: float = 0.0) -> Tensor:
    """What the specification's rounding of known probabilities gives: fp32 [1, 2, 48, 128]. slack: added to scores."""
    rows = torch.tensor(_ROW_FACTORS).repeat_interleave(16).float()
    top, step = _GOLDEN[scores]
    u = rows[:, None] * (_levels(scores).float() - top) * step
    if probability == "exp2":
        p = e4m3(torch.exp2(u + slack) * E4M3_MAX) / E4M3_MAX
        row_sum = torch.exp2(u).sum(-1)
    else:
        p = expcast(u + slack, probability) * 2.0 ** -TOP_LOG2[probability]
        row_sum = p.sum(-1)
    values = 64 * (p[:, :_SEEN] - p[:, _SEEN:]) / row_sum[:, None]
    heads = [values[:, _shown(head)] for head in (0, 1)]
    return torch.stack([torch.cat((shown, -shown), -1) for shown in heads])[None]


# -- 2. of NVFP4: the specification --------------------------------------------------------------------------------


def _specified(attention: Attention, case: Case, device: torch.device) -> str | None:
    tensors, labels, exact = _random_case(case.dtype)
    got = _call(attention, case, device, tensors, labels if case.plan.demean else None)
    want = _specified_case(case.plan, case.dtype)
    off = ((got - want).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).amax().item()
    if not math.isfinite(off):
        return "a random case gives numbers that are not finite"
    if off > SPECIFIED_BOUND:
        return f"a random case differs from the specification by {off:.2%}, more than {SPECIFIED_BOUND:.0%}"
    return None


@cache
def _specified_case(plan: Plan, dtype: torch.dtype) -> Tensor:
    tensors, labels, _ = _random_case(dtype)
    return specification(*tensors, plan, labels if plan.demean else None).float()


# -- 3. a random case -----------------------------------------------------------------------------------------------


def _random(attention: Attention, case: Case, device: torch.device) -> str | None:
    tensors, labels, exact = _random_case(case.dtype)
    got = _call(attention, case, device, tensors, labels if case.plan.demean else None)
    # For each head by itself, so that one wrong head is not averaged away.
    error = ((got - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).amax().item()
    if not math.isfinite(error):
        return "a random case gives numbers that are not finite"
    if error > case.error:
        return (
            f"a random case differs from exact attention by {error:.2%}, more than the {case.error:.2%} of its format"
        )
    return None


@cache
def _random_case(dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """q [2, 3, 200, 128], k, v [2, 3, 391, 128] with clusters in k and v, labels uint8 that know them, and the exact
    attention of the tensors as `dtype` holds them: rounding the inputs to 16 bit is not a kernel's error.
    """
    b, h, lq, lkv = _RANDOM_SHAPE
    g = torch.Generator().manual_seed(7)
    labels = torch.randint(_GROUPS, (b, h, lkv), generator=g)
    centres = torch.randn(2, _GROUPS, HEAD_DIM, generator=g)
    q = torch.randn(b, h, lq, HEAD_DIM, generator=g).to(dtype)
    k = (torch.randn(b, h, lkv, HEAD_DIM, generator=g) + 0.4 * centres[0][labels]).to(dtype)
    v = (torch.randn(b, h, lkv, HEAD_DIM, generator=g) + centres[1][labels]).to(dtype)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double()).float()
    return (q, k, v), labels.to(torch.uint8), exact
