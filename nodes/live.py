"""What the browser is told of a run, over ComfyUI's own websocket: the timeline on the node is filled from it.

Each message is the whole state of one run, so that one that is left out costs nothing. Its fields: node (id), prompt
(id), run (number, from 1), state ("ready" before the first run; "running", "done", "stopped"), steps, step (from 0),
phase (of that step), plan and ran (one letter a step: g group, r reuse, p plain, d 16 bit, and "." for a step that has
not run), counts of attention calls, declined (code, words, count), card, engine, notes and family.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ..kernels import Ok, Reason
from . import host
from .messages import SHORT
from .schedule import DENSE, GROUP, PLAIN, REUSE, Position, Schedule
from .stats import RunStats

EVENT = "vc_attention.run"
#: Seconds between two messages of a run; the first and the last are always sent.
INTERVAL = 0.2
#: Longer schedules have no plan in the messages: finding each step's place takes time with the square of their length.
LONGEST = 1000

_LETTERS = {GROUP: "g", REUSE: "r", PLAIN: "p", DENSE: "d"}


class Live:
    """Tells the browser of the runs of one session. node_id: the node that shows them; None tells nothing."""

    def __init__(self, node_id: str | None) -> None:
        self.node_id = node_id
        self.run = 0
        self._prompt: str | None = None
        self._plan = ""
        self._last = 0.0
        self._device = torch.device("cpu")

    def schedule(self, schedule: Schedule, again: bool = False) -> None:
        """A sampler brought its schedule: the plan of the run that begins, or of what follows in it (`again`)."""
        if self.node_id is None:
            return
        if not again:
            prompt = host.prompt_id()
            self.run = self.run + 1 if prompt == self._prompt else 1
            self._prompt = prompt
        self._last = -INTERVAL
        short = schedule.steps <= LONGEST
        self._plan = "".join(_LETTERS[schedule.locate(s).phase] for s in schedule.sigmas[:-1]) if short else ""

    def step(self, stats: RunStats, position: Position, device: torch.device) -> None:
        """A forward pass begins at `position`."""
        self._device = device
        now = time.monotonic()
        if self.node_id is None or now - self._last < INTERVAL:
            return
        self._last = now
        host.tell(EVENT, self._message(stats, "running", position.step, position.phase))

    def end(self, stats: RunStats) -> None:
        """The run has ended, finished or interrupted."""
        if self.node_id is None or not stats.steps:
            return
        step = max(stats.steps)
        state = "done" if step + 1 >= stats.step_count else "stopped"
        host.tell(EVENT, self._message(stats, state, step, stats.steps[step]))

    def _message(self, stats: RunStats, state: str, step: int, phase: str) -> dict[str, Any]:
        steps = stats.step_count
        # The step that begins has not run, unless a solver or a further branch comes back to it.
        seen = {i for i in stats.steps if state != "running" or i != step or i in stats.done}
        return {
            "node": self.node_id,
            "prompt": self._prompt,
            "run": self.run,
            "state": state,
            "steps": steps,
            "step": step,
            "phase": phase,
            "plan": self._plan.ljust(steps, "."),
            "ran": "".join(_LETTERS[stats.ran(i)] if i in seen else "." for i in range(steps)),
            "counts": {
                "accelerated": stats.accelerated,
                "grouped": stats.grouped,
                "reused": stats.reused,
                "plain": stats.plain,
                "declined": sum(stats.declined.values()),
            },
            "declined": [
                {"code": code, "words": SHORT.get(code, code), "count": count}
                for code, count in stats.declined.most_common()
            ],
            "card": card_name(self._device),
            "engine": stats.engine,
            "notes": list(stats.notes),
            "family": stats.family,
        }


def ready(node_id: str | None, device: torch.device, verdict: Ok | Reason, text: str) -> None:
    """The node ran: tell what this machine will do with it. text: the sentence on the node."""
    if node_id is None:
        return
    message = {
        "node": str(node_id),
        "prompt": host.prompt_id(),
        "state": "ready",
        "card": card_name(device),
        "engine": verdict.backend if isinstance(verdict, Ok) else "",
        "code": "" if isinstance(verdict, Ok) else verdict.code,
        "text": text,
    }
    host.tell(EVENT, message)


def card_name(device: torch.device) -> str:
    """The name of a device as its maker writes it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return {"cpu": "CPU", "mps": "Apple GPU", "xpu": "Intel GPU"}.get(device.type, device.type)
