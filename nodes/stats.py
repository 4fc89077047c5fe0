"""What happened in one run, as numbers, and as the text on the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from ..kernels import Plan
from .messages import NO_CALLS, NOT_KEPT, SHORT
from .schedule import DENSE, GROUP, PLAIN, REUSE
from .state import Layer


@dataclass(frozen=True)
class CallRecord:
    """One attention call that VC-Attention computed.

    phase: "group" (groups were computed for at least one branch), "reuse" or "plain". ordinal: which call of its block
    with these lengths. plan: the arithmetic that ran. branches: uuids of the conditionings in the batch.
    scale: of the scores, None for 1 / sqrt(head_dim). sigma: the pass's noise level.
    """

    step: int
    steps: int
    phase: str
    block_type: Hashable
    block_index: Hashable
    ordinal: int
    lq: int
    lkv: int
    heads: int
    plan: Plan
    backend: str
    branches: tuple[str, ...]
    scale: float | None = None
    sigma: float | None = None

    @property
    def layer(self) -> Layer:
        """The layer that this call belongs to."""
        return Layer(self.block_type, self.block_index, self.ordinal)


@dataclass
class RunStats:
    """Counts of one sampling run.

    A call counts once for each conditioning branch in its batch, so that a batched run counts as an unbatched one:
    accelerated = plain + grouped + reused. declined: by reason code. steps: planned phase of each step seen. done:
    phases of the calls that were accelerated in each step. unkept: groupings computed but not kept for lack of room.
    """

    family: str = ""
    engine: str = ""
    forwards: int = 0
    accelerated: int = 0
    grouped: int = 0
    reused: int = 0
    plain: int = 0
    unkept: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    steps: dict[int, str] = field(default_factory=dict)
    done: dict[int, set[str]] = field(default_factory=dict)
    step_count: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> bool:
        """Add a sentence to the summary. Returns False when it is already there."""
        if sentence in self.notes:
            return False
        self.notes.append(sentence)
        return True

    def count(self, step: int, grouped: int, reused: int, plain: int) -> None:
        """Count the branches of one accelerated call."""
        self.accelerated += grouped + reused + plain
        self.grouped += grouped
        self.reused += reused
        self.plain += plain
        phases = self.done.setdefault(step, set())
        phases.update(phase for phase, n in ((GROUP, grouped), (REUSE, reused), (PLAIN, plain)) if n)

    def ran(self, step: int) -> str:
        """What `step` was in the end: the phase that most distinguishes it, or 16 bit when no call was accelerated."""
        phases = self.done.get(step, ())
        return next((phase for phase in (GROUP, REUSE, PLAIN) if phase in phases), DENSE)

    def summary(self) -> str:
        """The text on the node after the run."""
        lines = []
        if self.accelerated:
            lines.append(
                f"{self.accelerated} attention calls accelerated ({self.engine}): {self.grouped} grouped, "
                f"{self.reused} reused, {self.plain} plain"
            )
        elif self.forwards:
            lines.append("No attention call was accelerated.")
        if self.declined:
            why = ", ".join(f"{count} {SHORT.get(code, code)}" for code, count in self.declined.most_common())
            lines.append(f"{sum(self.declined.values())} declined: {why}")
        if self.unkept:
            lines.append(NOT_KEPT)
        if self.forwards and not self.accelerated and not self.declined:
            lines.append(NO_CALLS)
        lines.extend(self.notes)
        if self.family:
            lines.append(f"{self.family}, {self.step_count} steps")
        return "\n".join(lines)
