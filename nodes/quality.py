"""Measuring a run while it runs: sampled query rows of chosen layers and steps against exact attention.

Each measured call leaves six sums on its device; they are read together at the end of the pass, one wait for a measured
pass. With a budget, a layer whose PSNR falls below it stays in 16 bit from the next pass on.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import measures, sample_heads, sampled_sums
from . import host
from .call import Call
from .forward import Forward
from .messages import NOTHING_MEASURED, PROFILE_OTHER_PLAN, not_measured, profile_not_for
from .options import BlockList, parse_blocks, parse_steps
from .profile import Profile, ProfileLayer, check_name
from .quality_report import live, table
from .quality_run import BUDGET, PROFILE, Decision, LayerTotal, Measurement, QualityRun, device_name, order
from .state import Layer
from .stats import CallRecord
from .watch import Watcher

MAX_BUDGET_DB = 120.0
#: Single measurements that a run keeps for the JSON; the layers' totals hold all of them.
MOST_MEASUREMENTS = 10_000
#: Runs that are remembered: the samplers of one prompt, and some before.
HISTORY = 8


@dataclass(frozen=True)
class QualityOptions:
    """One field for each widget, in the widgets' order. Raises ValueError, in a sentence, on a value out of range.

    layers: blocks to measure, empty for all; where the model does not number its blocks, calls of the pass from 1.
    steps: from 1, empty for all. budget_db: PSNR below which a layer goes back to 16 bit, 0 for none. profile: name
    of a saved profile, empty for none.
    """

    layers: str = ""
    steps: str = ""
    budget_db: float = 0.0
    profile: str = ""
    blocks: BlockList = field(init=False, repr=False, compare=False)
    chosen_steps: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.budget_db <= MAX_BUDGET_DB:
            raise ValueError(f"budget_db is {self.budget_db}; it must lie between 0 and {MAX_BUDGET_DB:g}.")
        if self.profile.strip():
            check_name(self.profile)
        object.__setattr__(self, "blocks", parse_blocks(self.layers, "layers"))
        object.__setattr__(self, "chosen_steps", parse_steps(self.steps))

    def measures(self, layer: Layer) -> bool:
        """Whether `layer` is among those that are measured."""
        number = layer.block_index if layer.numbered else layer.ordinal + 1
        return not self.blocks or (layer.block_type, number) in self.blocks


class _Pending(NamedTuple):
    record: CallRecord
    heads: tuple[int, ...]
    device: torch.device
    sums: Tensor


class Quality(Watcher):
    """The watcher of the node "VC-Attention Quality". show(text) puts a text on that node.

    profile: decisions that were loaded. family: of the model, for the profile that is saved.
    """

    def __init__(
        self,
        options: QualityOptions,
        node_id: str | None = None,
        profile: Profile | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.options = options
        self.node_id = node_id
        self.profile = profile
        self.notes = tuple(notes)
        self.runs: deque[QualityRun] = deque(maxlen=HISTORY)
        self.lock = threading.RLock()
        self._run: QualityRun | None = None
        self._applies = False

    # -- the run ------------------------------------------------------------------------------------------------

    def begin_run(self, *_: object) -> None:
        """A sampler starts; once more for every extra GPU, before any pass."""
        with self.lock:
            super().begin_run()
            self._begin()

    def _begin(self) -> QualityRun:
        run = self._run = QualityRun(prompt=host.prompt_id(), notes=list(self.notes))
        self._applies = self.profile is not None
        if self.profile is not None:
            dense = (entry for entry in self.profile.layers if entry.dense)
            run.dense.update((entry.layer, Decision(PROFILE, 0, entry.psnr_db)) for entry in dense)
        return run

    def end_run(self, *_: object) -> None:
        """A sampler ends, finished or interrupted: what was measured until then is the result."""
        with self.lock:
            run, self._run = self._run, None
            if run is None or run.finished:
                return
            run.finished = True
            if self.problem is not None:
                run.note(not_measured(self.problem))
            elif not run.layers:
                run.note(NOTHING_MEASURED)
            self.runs.append(run)
        text = table([run], rows=12)
        host.show_text(text, self.node_id)
        host.log.info("VC-Attention Quality: %s", text.splitlines()[0])

    def results(self) -> list[QualityRun]:
        """The runs of the latest prompt, oldest first; a run that is still going on comes last."""
        with self.lock:
            runs = [*self.runs, *([] if self._run is None else [self._run])]
        if not runs or runs[-1].prompt is None:
            return runs[-1:]
        return [run for run in runs if run.prompt == runs[-1].prompt]

    # -- one pass -----------------------------------------------------------------------------------------------

    def keeps(self, forward: Forward, layer: Layer, call: Call) -> bool:
        """Whether `layer` is below the budget, in this run or in the loaded profile."""
        run = self._run or self._begin()
        run.steps = max(run.steps, forward.position.steps)
        run.family = run.family or forward.session.stats.family
        if self._applies and self.profile is not None and self.profile.heads not in (0, call.heads):
            with self.lock:
                self._applies = False
                run.dense = {key: found for key, found in run.dense.items() if found.why != PROFILE}
                run.note(profile_not_for(f"{self.profile.heads} attention heads", f"{call.heads}"))
        return layer in run.dense

    def after(self, forward: Forward, record: CallRecord, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Queue the measurement of one call, if its layer and step were chosen. Never waits for the device."""
        other = self._applies and self.profile is not None and self.profile.plan not in ("", record.plan.encode())
        if other and self._run is not None:
            self._run.note(PROFILE_OTHER_PLAN)
        options = self.options
        if options.chosen_steps and record.step + 1 not in options.chosen_steps:
            return
        if not options.measures(record.layer):
            return
        # Other heads at each step: a few steps see all of them.
        with host.outside_malloc_graph():
            sums = sampled_sums(q, k, v, out, record.scale, record.step)
        heads = tuple(range(*sample_heads(q.shape[1], record.step).indices(q.shape[1])))
        forward.kept.setdefault(self, []).append(_Pending(record, heads, q.device, sums))

    def end_pass(self, forward: Forward) -> None:
        """Read what the pass queued, in one wait, and decide about the layers."""
        pending: list[_Pending] = forward.kept.pop(self, [])
        if not pending:
            return
        values = torch.stack([p.sums.to(pending[0].sums.device) for p in pending]).cpu()
        with self.lock:
            run = self._run or self._begin()
            for one, sums in zip(pending, values, strict=True):
                self._take(run, one, sums)
            text = live(run, pending[0].record.step)
        host.show_text(text, self.node_id)

    def _take(self, run: QualityRun, one: _Pending, sums: Tensor) -> None:
        record, layer = one.record, one.record.layer
        run.plan, run.backend, run.device = record.plan.encode(), record.backend, device_name(one.device)
        run.shape = (record.lq, record.lkv, record.heads)
        if not math.isfinite(sums[4]):  # the exact result is not finite either: there is nothing to compare with
            run.skipped += 1
            return
        found = measures(sums.tolist())
        psnr = found["psnr_db"]
        run.layers.setdefault(layer, LayerTotal()).add(sums, psnr, record.step)
        if len(run.measurements) < MOST_MEASUREMENTS:
            run.measurements.append(
                Measurement(
                    layer,
                    record.step,
                    record.phase,
                    record.sigma,
                    len(record.branches),
                    one.heads,
                    found["relative_l2"],
                    found["cosine"],
                    psnr,
                )
            )
        else:
            run.dropped += 1
        if self.options.budget_db and psnr is not None and psnr < self.options.budget_db:
            run.dense.setdefault(layer, Decision(BUDGET, record.step, psnr))

    # -- the profile --------------------------------------------------------------------------------------------

    def to_profile(self) -> Profile:
        """What the latest prompt's runs decided and measured, with what a loaded profile had decided before."""
        runs = self.results()
        layers: dict[Layer, ProfileLayer] = {}
        if self.profile is not None and self._applies:
            layers.update((entry.layer, entry) for entry in self.profile.layers)
        for run in runs:
            for layer, total in run.layers.items():
                error = total.measures["relative_l2"]
                dense = layer in run.dense or (layer in layers and layers[layer].dense)
                error = math.nan if error is None else error
                layers[layer] = ProfileLayer(layer, dense, total.worst_db, error)
            for layer, decision in run.dense.items():
                layers.setdefault(layer, ProfileLayer(layer, True, decision.psnr_db))
        last = runs[-1] if runs else QualityRun()
        measured = {
            "steps": sorted({m.step + 1 for run in runs for m in run.measurements}),
            "of_steps": last.steps,
            "calls": sum(total.count for run in runs for total in run.layers.values()),
            "query_tokens": last.shape[0],
            "key_tokens": last.shape[1],
            "rows": "sampled query rows of sampled heads against exact attention in fp32",
            "backend": last.backend,
            "device": last.device,
        }
        ordered = tuple(sorted(layers.values(), key=lambda entry: order(entry.layer)))
        return Profile(last.family, last.shape[2], ordered, last.plan, self.options.budget_db, measured)
