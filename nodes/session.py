"""The run state of one patched model: options, schedule, kept groups, counts, and what went wrong."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import Ok, Plan, Reason, supports
from . import host
from .call import Call
from .guard import GuardError
from .live import Live
from .messages import REASONS, degraded, failed, non_finite, stopped
from .options import PatchOptions
from .schedule import NOWHERE, Position, Schedule
from .state import GroupState
from .stats import CallRecord, RunStats

Observer = Callable[[CallRecord, Tensor, Tensor, Tensor, Tensor], None]

HISTORY = 8


@dataclass(frozen=True)
class Route:
    """How calls of one kind run: arithmetic, number format given to the kernel, and the backend's name."""

    plan: Plan
    dtype: torch.dtype
    backend: str


class Session:
    """Shared by a patched model and all its clones; several devices may use it from several threads.

    stats: the current run, or the last one. runs: the runs before it. observers: called after each accelerated call
    with (record, q, k, v, out), tensors [B, H, L, D]; an empty list costs nothing.
    """

    def __init__(self, options: PatchOptions, node_id: str | None = None) -> None:
        self.options = options
        self.node_id = node_id
        self.stats = RunStats()
        self.runs: deque[RunStats] = deque(maxlen=HISTORY)
        self.observers: list[Observer] = []
        self.state = GroupState(options.budget_bytes, host.free_memory)
        #: Why the rest of this run stays on ComfyUI's own attention, once something went wrong.
        self.broken: Reason | None = None
        #: Largest sampled |output| of each device since it was last read: NaN or infinity shows up here.
        self.watch: dict[torch.device, Tensor] = {}
        #: Kinds of calls (device, phase, shapes) that the numeric guard has judged in this run.
        self.checked: set[Hashable] = set()
        #: Our overrides with another hook chained behind, made on first use.
        self.chains: deque[Callable[..., Any]] = deque(maxlen=HISTORY)
        self.lock = threading.RLock()
        self.live = Live(node_id)
        self._schedules: dict[torch.device, tuple[Any, Schedule]] = {}
        self._routes: dict[tuple[torch.device, int, torch.dtype], Route | Reason] = {}
        self._logged: set[str] = set()
        self._open = False
        self._managed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self  # cores up to 0.3.75 deep-copy model_options in clone(); clones share one run state

    # -- the run ------------------------------------------------------------------------------------------------

    def begin_run(self, *_: object, managed: bool = True) -> None:
        """A sampler starts (ON_PRE_RUN; once more for every extra GPU)."""
        with self.lock:
            if self.stats.forwards:
                self.runs.append(self.stats)
            self.stats = RunStats()
            self._open, self._managed = True, managed
            self._forget()

    def end_run(self, *_: object) -> None:
        """A sampler ends, finished or interrupted (ON_CLEANUP): free everything and show the counts on the node."""
        with self.lock:
            was_open, self._open, self._managed = self._open, False, False
            if was_open and self.broken is None and any(_not_finite(t) for t in self.watch.values()):
                self.stats.note(failed(ArithmeticError(non_finite(max(self.stats.steps, default=0), False))))
            self._forget()
            text = self.stats.summary()
        if was_open:
            self.live.end(self.stats)
        if was_open and text:
            host.show_text(text, self.node_id)
            host.log.info("VC-Attention: %s", "; ".join(line.rstrip(".") for line in text.splitlines()))

    def reset(self, *_: object) -> None:
        """Free everything that is kept between steps; the counts stay."""
        with self.lock:
            self._forget()

    def release(self, *_: object) -> None:
        """The model is unloaded (ON_DETACH)."""
        self.state.clear()

    def _forget(self) -> None:
        self.state.clear()
        self._schedules.clear()
        self._routes.clear()
        self._logged.clear()
        self.watch.clear()
        self.checked.clear()
        self.broken = None

    # -- one forward pass ---------------------------------------------------------------------------------------

    def locate(
        self,
        sample_sigmas: Tensor | None,
        sigma: float | None,
        device: torch.device,
        sampling: Any,
        copied: bool = False,
    ) -> Position:
        """Place a forward pass; frees the groups of `device` on leaving the window.

        sample_sigmas: the sampler's schedule; a new object is a new sampler run. copied: this core hands every pass a
        copy of it (extra GPUs), so the object says nothing. sampling: the running model's sampling object.
        """
        if sample_sigmas is None or sigma is None:
            return NOWHERE
        with self.lock:
            seen, schedule = self._schedules.get(device, (None, None))
            if schedule is None or (seen is not sample_sigmas and not copied):
                if not self._managed and not copied:
                    self.begin_run(managed=False)
                self.state.clear(device)
                schedule = _schedule(sample_sigmas, self.options, sampling)
                if seen is not None or not self._schedules:  # further GPUs of one run bring the same one
                    self.live.schedule(schedule, again=seen is not None)
                self._schedules[device] = (sample_sigmas, schedule)
            position = schedule.locate(sigma)
            self.enter(position, device)
        return position

    def enter(self, position: Position, device: torch.device) -> None:
        """Count the step of a forward pass at `position`, and free the groups of `device` where none are in use."""
        with self.lock:
            self.stats.step_count = max(self.stats.step_count, position.steps)
            self.stats.steps.setdefault(position.step, position.phase)
            if not position.grouping:
                self.state.clear(device)
            self.live.step(self.stats, position, device)

    def route(self, call: Call) -> Route | Reason:
        """The way for calls of this kind, asked of the kernels' registry once a run."""
        dtype = call.q.dtype
        if not dtype == call.k.dtype == call.v.dtype:
            dtype = torch.promote_types(dtype, torch.promote_types(call.k.dtype, call.v.dtype))
        key = (call.q.device, call.head_dim, dtype)
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = self._find_route(*key)
        return found

    def unsupported(self, call: Call) -> Reason | None:
        """The registry's refusal of calls of this kind, or None."""
        route = self.route(call)
        return route if isinstance(route, Reason) else None

    def _find_route(self, device: torch.device, head_dim: int, dtype: torch.dtype) -> Route | Reason:
        refusals: list[Reason] = []
        progress = host.progress(self.node_id)
        plans = self.options.plans(device)
        for plan in plans:
            # fp32 goes to the kernel as it is where there is one for it, and as bf16, with fp32's range, elsewhere.
            for number in (dtype, torch.bfloat16) if dtype == torch.float32 else (dtype,):
                verdict = supports(device, plan, head_dim, number, self.options.backend, progress)
                if isinstance(verdict, Ok):
                    if verdict.note:
                        self.note(verdict.note)
                    if plan is not plans[0]:
                        self.note(degraded(plans[0]))
                    return Route(plan, number, verdict.backend)
                refusals.append(verdict)
        return refusals[0]

    # -- counts, messages, problems -----------------------------------------------------------------------------

    def decline(self, reason: Reason, count: int = 1) -> None:
        """Count calls that stay with ComfyUI's own attention; log each reason once a run."""
        with self.lock:
            self.stats.declined[reason.code] += count
            new = reason.code not in self._logged
            self._logged.add(reason.code)
            if new and reason.code == "no_kernel":
                self.stats.note(reason.text)
        if new:
            host.log.info("VC-Attention: %s", reason.text)

    def note(self, sentence: str) -> None:
        """Put a sentence into the run's summary and log it, once."""
        with self.lock:
            new = self.stats.note(sentence)
        if new:
            host.log.warning("VC-Attention: %s", sentence)

    def fail(self, error: BaseException) -> None:
        """Our own path met `error`: the rest of the run goes to ComfyUI's own attention, or stops, as chosen.

        Raises RuntimeError with on_problem = stop (out of memory is raised as it is: ComfyUI has its own way with it).
        """
        out_of_memory = host.is_out_of_memory(error)
        self.state.clear()
        if self.options.on_problem == "stop":
            if out_of_memory:
                raise error
            raise RuntimeError(stopped(error)) from error
        with self.lock:
            code = "memory" if out_of_memory else "guard" if isinstance(error, GuardError) else "error"
            first, self.broken = self.broken is None, REASONS[code]
        if first:
            if isinstance(error, GuardError):
                sentence = error.sentence
            else:
                sentence = REASONS["memory"].text if out_of_memory else failed(error)
            self._logged.add(self.broken.code)
            self.note(sentence)
            host.log.debug("VC-Attention: the problem in full", exc_info=error)


def _not_finite(scalar: Tensor) -> bool:
    try:
        return not math.isfinite(scalar.item())
    except RuntimeError:  # the device itself is in trouble; ComfyUI reports that
        return False


def _schedule(sample_sigmas: Tensor, options: PatchOptions, sampling: Any) -> Schedule:
    """Read the schedule: one host copy for each sampler run."""
    top = getattr(sampling, "sigma_max", None)
    return Schedule(
        sample_sigmas.tolist(),
        options,
        getattr(sampling, "percent_to_sigma", None),
        None if top is None else float(top),
    )
