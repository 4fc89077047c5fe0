"""Where a forward pass stands in the denoising, and what is due there: group, reuse, plain, or 16 bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .options import PatchOptions

GROUP = "group"  # the groups of the value tokens are computed in this step
REUSE = "reuse"  # the groups of an earlier step serve
PLAIN = "plain"  # low-bit attention without groups: block means over the tokens in their own order
DENSE = "dense"  # 16 bit, outside start_percent to end_percent

#: Sigmas are fp32 on one side and computed in double on the other; neighbouring steps differ by far more than this.
_RELATIVE = 1e-5


@dataclass(frozen=True)
class Position:
    """One forward pass in its schedule.

    step: index of the step, from 0; steps: how many this sampler runs. period: which grouping of the window serves
    here. last: no further grouping follows in this window, so centroids need not be kept for a warm start.
    """

    step: int
    steps: int
    phase: str
    period: int = 0
    last: bool = True

    @property
    def grouping(self) -> bool:
        """Whether groups are in use here."""
        return self.phase in (GROUP, REUSE)


NOWHERE = Position(0, 0, PLAIN)


class Schedule:
    """The schedule of one sampler run, read once at its first forward pass.

    sigmas: the sampler's own slice of noise levels (length steps + 1), falling for denoising, rising for inversion.
    percent_to_sigma: of the running model's sampling object, or None where it has none. sigma_max: its largest sigma.

    A full schedule (from sigma_max down to 0) counts steps: the window is its first ceil(fraction * steps). A part of
    one (two samplers in a row, denoise < 1) sees only its own slice, so there the window is where sigma is strictly
    above percent_to_sigma(fraction): the same steps, told by their noise level.
    """

    def __init__(
        self,
        sigmas: Sequence[float],
        options: PatchOptions,
        percent_to_sigma: Callable[[float], float] | None = None,
        sigma_max: float | None = None,
    ) -> None:
        self.sigmas = [float(s) for s in sigmas]
        self.steps = max(len(self.sigmas) - 1, 0)
        self.rising = self.steps > 0 and self.sigmas[-1] > self.sigmas[0]
        self.reuse_steps = options.reuse_steps
        self.full = self._is_full(sigma_max)
        to_sigma = None if percent_to_sigma is None else _number(percent_to_sigma)
        #: Above this sigma, and below the other, the run stays in 16 bit.
        self.highest = math.inf if to_sigma is None or options.start_percent <= 0 else to_sigma(options.start_percent)
        self.lowest = -math.inf if to_sigma is None or options.end_percent >= 1 else to_sigma(options.end_percent)
        #: The window: `window` steps from the first, and for part of a schedule only where sigma > `cut`.
        self.cut = -math.inf
        if options.grouping == "off" or (options.grouping == "first steps" and options.group_fraction <= 0):
            self.window = 0
        elif options.grouping == "all steps":
            self.window = self.steps
        elif self.full or to_sigma is None:
            self.window = min(self.steps, math.ceil(options.group_fraction * self.steps - 1e-9))
        else:
            self.cut = to_sigma(options.group_fraction) * (1 + _RELATIVE)
            self.window = sum(s > self.cut for s in self.sigmas[:-1])

    def _is_full(self, sigma_max: float | None) -> bool:
        if not self.steps or self.rising:
            return False
        return abs(self.sigmas[-1]) < 1e-6 and (sigma_max is None or self.sigmas[0] >= sigma_max * 0.999)

    def step_of(self, sigma: float) -> int:
        """The last step whose sigma is not below `sigma`: solvers evaluate between their entries, too."""
        if self.rising:
            return max(sum(s <= sigma * (1 + _RELATIVE) for s in self.sigmas[:-1]) - 1, 0)
        return max(sum(s >= sigma * (1 - _RELATIVE) for s in self.sigmas[:-1]) - 1, 0)

    def locate(self, sigma: float) -> Position:
        """Place a forward pass at noise level `sigma`."""
        step = self.step_of(sigma)
        if sigma > self.highest * (1 + _RELATIVE) or sigma < self.lowest * (1 - _RELATIVE):
            return Position(step, self.steps, DENSE)
        # Inversion runs the window's noise levels last, so there the count of steps says nothing and sigma decides.
        inside = sigma > self.cut and (step < self.window or (self.rising and self.window > 0))
        if not inside:
            return Position(step, self.steps, PLAIN)
        period, offset = divmod(step, self.reuse_steps)
        last = not self.rising and (period + 1) * self.reuse_steps >= self.window
        return Position(step, self.steps, REUSE if offset else GROUP, period, last)


def _number(percent_to_sigma: Callable[[float], float]) -> Callable[[float], float]:
    return lambda percent: float(percent_to_sigma(percent))
