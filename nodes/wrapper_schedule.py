"""Where a pass of WanVideoWrapper's samplers stands in the denoising: they tell its step, and no schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .options import PatchOptions
from .schedule import DENSE, GROUP, PLAIN, REUSE, Position

#: A sampler whose first noise level is at least this begins at the top. Shifted schedules begin within 0.001 of 1.
TOP_SIGMA = 0.998


class WrapperSchedule:
    """The passes of one sampler run, placed one after the other.

    Every pass says its step (`current_step`, from 0), the step's share of this sampler's steps
    (`current_step_percentage`, step / steps) and its noise level; the number of steps follows from the second one on.
    start_percent and end_percent are compared with the share, as the wrapper's own nodes do. The first steps are those
    whose share is below group_fraction, which are the first ceil(group_fraction * steps), in a sampler that begins at
    the top; one that begins further down (the second of two, video to video) has none.
    """

    def __init__(self, options: PatchOptions) -> None:
        self.options = options
        self._restart()

    def _restart(self) -> None:
        self._step = -1
        self._steps = 0
        self._top = 0.0
        self._passes: Counter[str] = Counter()
        self._crowded = False

    def begins(self, step: int) -> bool:
        """Whether a pass at `step` starts over: the first of the run, or of its next round over all steps."""
        return self._step < 0 or step < self._step

    def place(self, given: Mapping[str, Any], sigma: float | None) -> tuple[Position, str]:
        """The position of the next pass, and its branch: "cond" or "uncond", and which pass of that kind in its step.

        given: the keywords of the transformer's call. sigma: its noise level, from 1 to 0.
        """
        step, share = int(given.get("current_step", 0)), float(given.get("current_step_percentage", 0.0))
        if self.begins(step):
            self._restart()
            self._top = 1.0 if sigma is None else sigma
        if step != self._step:
            # Several passes of one kind in a step are context windows, which move from step to step: kept groups are
            # those of other frames, so each step finds its own.
            self._crowded = self._step >= 0 and max(self._passes.values(), default=0) > 1
            self._passes.clear()
            self._step = step
        if given.get("last_step"):
            self._steps = step + 1
        elif share > 0:
            self._steps = round(step / share)
        kind = "uncond" if given.get("is_uncond") else "cond"
        branch = f"{kind} {self._passes[kind]}"
        self._passes[kind] += 1
        return self._position(step, share), branch

    def _position(self, step: int, share: float) -> Position:
        options, steps = self.options, max(self._steps, step + 1)
        if not options.start_percent <= share <= options.end_percent:
            return Position(step, steps, DENSE)
        if options.grouping == "all steps":
            fraction = 1.0
        elif options.grouping == "first steps" and self._top >= TOP_SIGMA:
            fraction = options.group_fraction
        else:
            fraction = 0.0
        if share >= fraction - 1e-9:
            return Position(step, steps, PLAIN)
        if self._crowded:
            return Position(step, steps, GROUP, step, step + 1 >= fraction * steps - 1e-9)
        period, offset = divmod(step, options.reuse_steps)
        # Before the number of steps is known, a further grouping is expected.
        last = self._steps > 0 and (period + 1) * options.reuse_steps >= fraction * self._steps - 1e-9
        return Position(step, steps, REUSE if offset else GROUP, period, last)
