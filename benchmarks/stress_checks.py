"""Random legal attention calls, and what a right answer to one of them may differ by from exact attention.

`benchmarks/stress_sm90.py` and the tests marked `gpu` share this file. A case is its seed: the same seed makes the same
call on the same kind of device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels import FAITHFUL, FAST, Plan
from . import preparation_checks as checks

PLANS = {
    "fast": FAST,
    "fast plain": FAST.without_smoothing(),
    "fast key means": Plan(key_means=True),
    "faithful": FAITHFUL,
    "faithful plain": FAITHFUL.without_smoothing(),
    "faithful key means": Plan(probability="exp2", key_means=True),
}
#: The kernels read the first four in place; of the others they make a copy.
LAYOUTS = (*checks.LAYOUTS, "odd offset", "channels apart")
LONGEST = 5000
#: Scores of one call at most: exact attention in fp64 holds a few matrices of them.
MOST_SCORES = 1 << 25

#: A backend's error may be this multiple of the specification's.
FACTOR = 1.1
#: Relative error of the output's own format, which is all that is left where the arithmetic is exact (one key, say).
FLOOR = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
#: Relative error that Hopper's FP8 tensor cores add where V keeps its means: they sum to 13 fraction bits of the
#: largest addend, and truncate. The specification sums in fp32. An emulation with 13 bits gives the error that was
#: measured (0.0025 where the specification has 0.0012); residuals are too small to show it.
ACCUMULATOR = 0.0025
#: Relative rms error of P (ExpCast's chord and code, or E4M3 alone) and of V's E4M3 residual, and the rms rounding of
#: an INT8 element of Q or K against its row's rms: of the estimate below, fitted to the specification on 400 cases.
P_NOISE = {"expcast_wide": 0.027, "exp2": 0.022}
V_NOISE = 0.025
SCORE_NOISE = 0.009
#: A case whose error is below this multiple of the estimate is not compared with the specification, which is slow.
CHEAP = 1.2

Attention = Callable[[Tensor, Tensor, Tensor, Plan, "Tensor | None", "float | None"], Tensor]


@dataclass(frozen=True)
class Case:
    """One random call. layouts: of q, k and v. labels: "none", "random" or "grouped" (by `kernels.group`)."""

    seed: int
    plan: str
    batch: int
    heads: int
    lq: int
    lkv: int
    dtype: torch.dtype
    layouts: tuple[str, str, str]
    labels: str
    groups: int
    scale: float | None

    @property
    def rows(self) -> int:
        """Query rows of the call, which is how many errors its relative error is the mean of."""
        return self.batch * self.heads * self.lq

    def __str__(self) -> str:
        scale = "default" if self.scale is None else f"{self.scale:.4g}"
        return (
            f"seed {self.seed}: {self.plan}, B {self.batch}, H {self.heads}, Lq {self.lq}, Lkv {self.lkv}, "
            f"{str(self.dtype)[6:]}, {'/'.join(self.layouts)}, labels {self.labels} ({self.groups}), scale {scale}"
        )


def make_case(seed: int, longest: int = LONGEST) -> Case:
    """The case of `seed`: lengths log-uniform in 1..longest, all else uniform."""
    r = random.Random(seed)
    lq, lkv = (round(math.exp(r.uniform(0, math.log(longest)))) for _ in range(2))
    batch, heads = r.randint(1, 3), r.randint(1, 8)
    while batch * heads * lq * lkv > MOST_SCORES and batch * heads > 1:
        batch, heads = max(1, batch // 2), max(1, heads // 2)
    return Case(
        seed,
        r.choice(list(PLANS)),
        batch,
        heads,
        lq,
        lkv,
        r.choice((torch.bfloat16, torch.float16)),
        (r.choice(LAYOUTS), r.choice(LAYOUTS), r.choice(LAYOUTS)),
        r.choice(("none", "random", "grouped")),
        r.choice((0, r.randint(1, 256))),
        # From nearly uniform attention to rows that a few keys decide.
        r.choice((None, 128**-0.5 * 2 ** r.uniform(-4, 1))),
    )


def make_tensors(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v and labels of `case`."""
    q, k, v = checks.tensors(case.batch, case.heads, case.lq, case.lkv, "heads", case.dtype, case.seed, device)
    q, k, v = (_in_layout(x, layout, n) for n, (x, layout) in enumerate(zip((q, k, v), case.layouts, strict=True)))
    if case.labels == "none":
        return q, k, v, None
    if case.labels == "grouped":
        return q, k, v, kernels.group(v, case.groups).labels
    g = torch.Generator(device).manual_seed(case.seed)
    labels = torch.randint(case.groups or 16, (case.batch, case.heads, case.lkv), device=device, generator=g)
    return q, k, v, labels.to(torch.uint8)


def _in_layout(x: Tensor, layout: str, n: int) -> Tensor:
    if layout == "odd offset":
        return torch.cat((x.new_full((5,), torch.nan), x.flatten()))[5:].view(x.shape)
    if layout == "channels apart":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    return checks.in_layout(x, layout, n)


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention in fp64: P [B, H, Lq, Lkv] and O [B, H, Lq, D]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    p = torch.softmax(q.double() @ k.double().mT * scale, -1)
    return p, p @ v.double()


def relative(a: Tensor, b: Tensor) -> Tensor:
    """Relative L2 error of a against b, left on the device."""
    return (a.double() - b).norm() / b.norm()


def estimate(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None, p: Tensor, o: Tensor) -> Tensor:
    """Relative error that roundings of P, V, Q and K should cause in this call if they are independent, on the device.

    p, o: of `exact`. With relative errors e_ij of P, O_i is off by sum_j p_ij e_ij (v_j - o_i). e_ij is P's own
    rounding and the error of its score, scale |q_i| |k_j| times the rounding of INT8; K without its channel mean.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    centre = v.float().mean(-2, keepdim=True)
    value, out = v.float() - centre, o.float() - centre
    square = p.float().square()
    spread = square @ value.square().sum(-1, keepdim=True)
    away = spread - 2 * ((square @ value) * out).sum(-1, keepdim=True)
    away = away + square.sum(-1, keepdim=True) * out.square().sum(-1, keepdim=True)
    keys = k.float() - k.float().mean(-2, keepdim=True)
    score = scale**2 * q.float().square().sum(-1, keepdim=True) * keys.square().sum(-1).mean(-1)[..., None, None]
    noise = P_NOISE[plan.probability] ** 2 + 2 * SCORE_NOISE**2 / q.shape[-1] * score
    # Without its means V is rounded with them.
    rounded = spread if plan.demean else square @ v.float().square().sum(-1, keepdim=True)
    total = (noise * away.clamp(min=0)).sum() + V_NOISE**2 * rounded.sum()
    return total.sqrt() / o.norm()


def allowed(spec: float, guess: float, rows: int, dtype: torch.dtype, plan: Plan) -> float:
    """Largest relative error of a right backend where the specification's is `spec` and the estimate is `guess`.

    1.1 times the specification's (with the accumulator's in quadrature, for a plan without means), and not less than
    the output's own rounding. Kernels take the row maximum over 256
    keys where the specification takes it over 128, so P is rounded elsewhere: two draws of the same noise, whose means
    over few rows differ. That is the last term; it vanishes as the rows grow (5 standard deviations of what was seen).
    """
    if not plan.demean:
        spec = math.hypot(spec, ACCUMULATOR)
    return max(FACTOR * spec, FLOOR[dtype]) + 2.5 * guess / math.sqrt(rows)


def spec_call(q: Tensor, k: Tensor, v: Tensor, plan: Plan, labels: Tensor | None, scale: float | None) -> Tensor:
    """The specification through the public door."""
    return kernels.attention(q, k, v, plan, labels, scale, backend="spec")


@contextmanager
def dirty_memory(byte: int) -> Iterator[list[int]]:
    """Fill the memory that `torch.empty` and `torch.empty_like` hand out on a GPU with `byte`, so that workspaces hold
    what no kernel expects. Yields a list that gets the bytes of each such tensor.

    Filling the allocator's pools before the calls would depend on which of its blocks it hands out.
    """
    filled: list[int] = []

    def dirty(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **options: Any) -> Tensor:
            tensor = make(*arguments, **options)
            if tensor.is_cuda and tensor.numel():
                storage = tensor.untyped_storage()
                originals[0](0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(byte)
                filled.append(storage.nbytes())
            return tensor

        return made

    originals = torch.empty, torch.empty_like
    torch.empty, torch.empty_like = map(dirty, originals)  # type: ignore[assignment]
    try:
        yield filled
    finally:
        torch.empty, torch.empty_like = originals  # type: ignore[assignment]


@dataclass
class Tally:
    """What came out for one plan. ours, theirs: squared errors of the backend and the specification over `rows`."""

    cases: int = 0
    compared: int = 0
    worst: float = 0.0
    rows: int = 0
    ours: float = 0.0
    theirs: float = 0.0

    @property
    def pooled(self) -> float:
        """Error of the sampled cases together over the specification's; 0 without any."""
        return math.sqrt(self.ours / self.theirs) if self.theirs else 0.0

    @property
    def within(self) -> bool:
        """Whether the pooled error is at most FACTOR times the specification's, with the term of `allowed` for rows."""
        return not self.rows or self.pooled <= FACTOR + 2.5 / math.sqrt(self.rows)


@dataclass
class Stress:
    """A run over many cases. failures: the cases that failed, each with what it was and what was allowed."""

    attention: Attention
    device: str
    every: int = 10
    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in PLANS})
    failures: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Cases that were run."""
        return sum(tally.cases for tally in self.tallies.values())

    def run(self, cases: Iterator[Case], batch: int = 64) -> None:
        """Run `cases`, waiting for the device once for each `batch` of them."""
        waiting: list[tuple[Case, Tensor]] = []
        for case in cases:
            try:
                waiting.append((case, self.measure(case, case.seed % self.every == 0)))
            except (kernels.UnsupportedError, ValueError) as error:
                self.tallies[case.plan].cases += 1
                self.failures.append(f"{case}: refused: {error}")
            if len(waiting) == batch:
                self.judge(waiting)
                waiting = []
        self.judge(waiting)

    def measure(self, case: Case, compare: bool) -> Tensor:
        """[error, estimate, the specification's error or -1] on the device."""
        q, k, v, labels = make_tensors(case, self.device)
        plan = PLANS[case.plan]
        out = self.attention(q, k, v, plan, labels, case.scale)
        p, o = exact(q, k, v, case.scale)
        guess = estimate(q, k, v, plan, case.scale, p, o).double()
        del p
        spec = o.new_tensor(-1.0)
        if compare:
            spec = relative(spec_call(q, k, v, plan, labels, case.scale), o)
        return torch.stack((relative(out, o), guess, spec))

    def judge(self, measured: list[tuple[Case, Tensor]]) -> None:
        """Read a batch back; compare those with the specification whose error is not plainly small enough."""
        if not measured:
            return
        try:
            rows = torch.stack([numbers for _, numbers in measured]).tolist()
        except RuntimeError as error:
            first, last = measured[0][0].seed, measured[-1][0].seed
            raise RuntimeError(f"The device failed in one of the cases of seeds {first} to {last}: {error}") from error
        for (case, _), (error, guess, spec) in zip(measured, rows, strict=True):
            tally = self.tallies[case.plan]
            tally.cases += 1
            sample = spec >= 0
            if not sample and error <= max(CHEAP * guess, FLOOR[case.dtype]):
                continue
            if not sample:
                spec = self.measure(case, True)[2].item()
            limit = allowed(spec, guess, case.rows, case.dtype, PLANS[case.plan])
            # Not `error > limit`: NaN must fail.
            if not error <= limit:
                self.failures.append(f"{case}: error {error:.5f}, specification {spec:.5f}, allowed {limit:.5f}")
            tally.compared += 1
            tally.worst = max(tally.worst, error / limit) if math.isfinite(error) else math.inf
            if sample:
                # Only the random sample: cases that were picked for a large error would move the mean.
                tally.rows += case.rows
                tally.ours += case.rows * error**2
                tally.theirs += case.rows * spec**2
