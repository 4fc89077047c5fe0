"""The numeric self-test of attention kernels on a card: three small checks whose right answers are known.

1. Uniform attention: with K = 0 every output row is the mean of V, at lengths that end inside a block.
2. Golden probabilities: Q and K whose 8-bit codes are exact, so that each score is known to a millionth, and a V that
   shows the probability of one key in each output channel. A probability one code off (6 % and more) is seen.
3. A random case with grouping labels against exact attention, within what the format is known to cost.

`attention` is any function with the arguments of `kernels.spec.attention.attention`, so the test itself is tested on
the specification and on functions with planted faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import FAITHFUL, FAST, Plan
from ..spec.expcast import TOP_LOG2, expcast
from ..spec.formats import E4M3_MAX, e4m3

#: Raised when a check changes: remembered verdicts of another version are not taken.
VERSION = 1

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
)
ERROR_MARGIN = 1.2
DTYPES = (torch.bfloat16, torch.float16)

#: Keys (and as many queries plus three) of uniform attention: one, inside and past a block, past a 256-key tile.
UNIFORM_LENGTHS = (1, 65, 129, 391)
#: Relative L2 error of a row. V's values are powers of two, which E4M3 holds exactly, so only the output's own rounding
#: remains (0.0017); the residuals of a smoothed V are rounded (0.0065, measured).
UNIFORM_BOUND, UNIFORM_BOUND_SMOOTHED = 0.0025, 0.009

#: Golden case: 64 keys that are seen, 64 that get no weight. Rows of Q come in groups of 16 that share a scale.
_SEEN = 64
_ROW_FACTORS = (3, 5, 7)
_LEVELS = 190
#: Score step between neighbouring levels for factor 1, in powers of two. With it no score comes nearer than a tenth of
#: a code to a rounding boundary of ExpCast, nor a probability nearer than 0.2 % of a step to one of E4M3.
_STEP = 1 / 32
_PROBABILITY_TOLERANCE = 0.015

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

    Waits for the device. Raises what `attention` raises.
    """
    for case in tested:
        for check in (_uniform, _golden, _random):
            found = check(attention, case, torch.device(device))
            if found is not None:
                return f"{case}: {found}."
    return None


# -- 1. uniform attention -------------------------------------------------------------------------------------------


def _uniform(attention: Attention, case: Case, device: torch.device) -> str | None:
    for length in UNIFORM_LENGTHS:
        q, v = _uniform_inputs(length)
        want = v.double().mean(-2, keepdim=True)
        got = _call(attention, case, device, q, torch.zeros_like(v), v, None, None)
        if not torch.isfinite(got).all():
            return f"uniform attention over {length} tokens gives numbers that are not finite"
        off = ((got - want).norm(dim=-1) / want.norm(dim=-1)).amax().item()
        if off > (UNIFORM_BOUND_SMOOTHED if case.plan.demean else UNIFORM_BOUND):
            return f"uniform attention over {length} tokens is {off:.1%} away from the mean of V"
    return None


def _uniform_inputs(length: int) -> tuple[Tensor, Tensor]:
    """q [1, 2, length + 3, 128] and v [1, 2, length, 128] of powers of two, the last token's large."""
    g = torch.Generator().manual_seed(length)
    q = torch.randn(1, 2, length + 3, HEAD_DIM, generator=g)
    v = 2.0 ** torch.randint(-1, 3, (1, 2, length, HEAD_DIM), generator=g)
    # A last token that is lost or counted twice moves these channels far.
    v[..., -1, ::4] = 32.0
    return q, v


# -- 2. golden probabilities ----------------------------------------------------------------------------------------


def _golden(attention: Attention, case: Case, device: torch.device) -> str | None:
    q, k, v, levels = _golden_inputs()
    scale = _STEP / (HEAD_DIM * math.log2(math.e))
    got = _call(attention, case, device, q, k, v, None, scale)
    want = _golden_outputs(case.plan, levels)
    if not torch.isfinite(got).all():
        return "attention with known scores gives numbers that are not finite"
    # As a share of the output at the row maximum, where the probability is known: that leaves only probabilities.
    top = got[..., :1]
    if ((top / want[..., :1] - 1).abs() > _PROBABILITY_TOLERANCE).any():
        return "the sum of the probabilities is not that of the specification"
    wrong = (got / top - want / want[..., :1]).abs() > _PROBABILITY_TOLERANCE * (want / want[..., :1]).abs() + 1e-6
    if wrong.any():
        _, head, row, channel = wrong.nonzero()[0].tolist()
        return (
            f"a key's probability (head {head}, row {row}, channel {channel}) is "
            f"{(got / top)[0, head, row, channel].item():.3g} of the largest instead of "
            f"{(want / want[..., :1])[0, head, row, channel].item():.3g}"
        )
    return None


def _golden_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [1, 2, 48, 128], k, v [1, 2, 128, 128], and the score level of each key [128], 190 at the row maximum.

    Every row of q and k is constant over the channels, so the Hadamard rotation leaves one channel that holds the
    block's largest magnitude: its codes are exact. The levels' mean is 63 and the largest distance from it 127, so K
    without its mean still has integer codes. Channel j of V is +64 at key j and -64 at a key without weight: its mean
    is zero and its E4M3 codes are exact, so the output there is 64 times the probability of key j.
    """
    levels = torch.zeros(2 * _SEEN, dtype=torch.int64)
    # 62 .. 190 around 126, the largest first; with the 64 zeros the mean is 63.
    seen = torch.linspace(_LEVELS, 62, _SEEN).round().long()
    seen[_SEEN // 2 :] = 252 - seen[: _SEEN // 2].flip(0)
    levels[:_SEEN] = seen
    rows = torch.tensor(_ROW_FACTORS).repeat_interleave(16).float()
    q = rows[:, None].expand(-1, HEAD_DIM).expand(1, 2, -1, -1)
    k = levels.float()[:, None].expand(-1, HEAD_DIM).expand(1, 2, -1, -1)
    v = torch.zeros(1, 2, 2 * _SEEN, HEAD_DIM)
    index = torch.arange(_SEEN)
    for head, shift in enumerate((0, 1)):
        # The heads show their keys in different channels. Channel 0 always shows the key of the row maximum.
        key = torch.cat((index[:1], 1 + (index[1:] - 1 + shift) % (_SEEN - 1)))
        for first, sign in ((0, 64.0), (_SEEN, -64.0)):
            v[0, head, key, first + index] = sign
            v[0, head, _SEEN + key, first + index] = -sign
    return q, k, v, levels


def _golden_outputs(plan: Plan, levels: Tensor) -> Tensor:
    """What the specification's rounding of known probabilities gives: fp64 [1, 2, 48, 128]."""
    rows = torch.tensor(_ROW_FACTORS).repeat_interleave(16).float()
    u = rows[:, None] * (levels.float() - _LEVELS) * _STEP
    if plan.probability == "exp2":
        p = e4m3(torch.exp2(u) * E4M3_MAX).double() / E4M3_MAX
        row_sum = torch.exp2(u.double()).sum(-1)
    else:
        p = expcast(u, plan.probability).double() * 2.0 ** -TOP_LOG2[plan.probability]
        row_sum = p.sum(-1)
    shown = 64 * (p[:, :_SEEN] - p[:, _SEEN:]) / row_sum[:, None]
    heads = []
    for shift in (0, 1):
        key = torch.cat((torch.zeros(1).long(), 1 + (torch.arange(_SEEN - 1) + shift) % (_SEEN - 1)))
        heads.append(torch.cat((shown[:, key], -shown[:, key]), -1))
    return torch.stack(heads)[None]


# -- 3. a random case -----------------------------------------------------------------------------------------------


def _random(attention: Attention, case: Case, device: torch.device) -> str | None:
    q, k, v, labels = _random_inputs()
    # Against what the kernel is given: rounding the inputs to 16 bit is not its error.
    qe, ke, ve = (x.to(case.dtype).double() for x in (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(qe, ke, ve)
    got = _call(attention, case, device, q, k, v, labels if case.plan.demean else None, None)
    if not torch.isfinite(got).all():
        return "a random case gives numbers that are not finite"
    # For each head by itself, so that one wrong head is not averaged away.
    error = ((got - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).amax().item()
    if error > case.error:
        return (
            f"a random case differs from exact attention by {error:.2%}, more than the {case.error:.2%} of its format"
        )
    return None


def _random_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [2, 3, 200, 128], k, v [2, 3, 391, 128] with clusters in k and v, and labels uint8 that know them."""
    b, h, lq, lkv = _RANDOM_SHAPE
    g = torch.Generator().manual_seed(7)
    labels = torch.randint(_GROUPS, (b, h, lkv), generator=g)
    centres = torch.randn(2, _GROUPS, HEAD_DIM, generator=g)
    q = torch.randn(b, h, lq, HEAD_DIM, generator=g)
    k = torch.randn(b, h, lkv, HEAD_DIM, generator=g) + 0.4 * centres[0][labels]
    v = torch.randn(b, h, lkv, HEAD_DIM, generator=g) + centres[1][labels]
    return q, k, v, labels.to(torch.uint8)


def _call(
    attention: Attention,
    case: Case,
    device: torch.device,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    labels: Tensor | None,
    scale: float | None,
) -> Tensor:
    """The output in fp64 on the CPU: the reference there owes nothing to the card."""
    q, k, v = (x.to(device, case.dtype) for x in (q, k, v))
    out = attention(q, k, v, case.plan, None if labels is None else labels.to(device), scale)
    return out.cpu().double()
