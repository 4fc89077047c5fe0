"""What was measured, for people and for programs: the table, the JSON, and the plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from . import host
from .plot import Figure
from .quality_run import BUDGET, LayerTotal, QualityRun, order
from .state import Layer
from .tables import columns, count

#: Colours of the plot: readable in print and to the colour-blind (after Okabe and Ito).
_MEASURED, _DENSE, _BUDGET, _BAND = "#0072b2", "#d55e00", "#6b6b6b", "#a6cee3"


def live(run: QualityRun, step: int) -> str:
    """The text while the sampler runs: where it stands, and the worst layer so far."""
    done = f"Step {step + 1} of {run.steps}: {count(len(run.layers), 'layer')} measured"
    worst = _worst_first(run)[:1]
    lines = [done, *(f"Lowest: {layer.name}, {_db(total.worst_db)}" for layer, total in worst)]
    found = sum(decision.why == BUDGET for decision in run.dense.values())
    if found:
        lines.append(f"Below the budget, in 16 bit from now on: {count(found, 'layer')}")
    return "\n".join(lines)


def table(runs: Sequence[QualityRun], rows: int | None = None) -> str:
    """The table of one or several sampler runs. rows: of the lowest only; all, in order, if None."""
    return "\n\n".join(_table(run, rows, f"Sampler {i + 1}. " if len(runs) > 1 else "") for i, run in enumerate(runs))


def _table(run: QualityRun, rows: int | None, title: str) -> str:
    lines = []
    if run.layers:
        calls = sum(total.count for total in run.layers.values())
        layer, total = _worst_first(run)[0]
        lines.append(
            f"{title}{count(calls, 'call')} measured in {count(len(run.layers), 'layer')}; lowest PSNR "
            f"{_db(total.worst_db)} in {layer.name} at step {total.worst_step + 1}."
        )
    elif title:
        lines.append(title.strip())
    dense = sorted(run.dense, key=order)
    if dense:
        lines.append("In 16 bit: " + "; ".join(_decision(run, layer) for layer in dense) + ".")
    lines.extend(run.notes)
    if run.skipped:
        lines.append(f"{count(run.skipped, 'call')} had inputs that are not finite and could not be measured.")
    if not run.layers:
        return "\n".join(lines)
    shown = (
        _worst_first(run)[:rows] if rows is not None else sorted(run.layers.items(), key=lambda item: order(item[0]))
    )
    head = ("layer", "calls", "error", "cosine", "PSNR", "lowest PSNR", "then")
    body = [
        (
            layer.name,
            str(total.count),
            _percent(total.measures["relative_l2"]),
            _cosine(total.measures["cosine"]),
            _db(total.measures["psnr_db"]),
            f"{_db(total.worst_db)} (step {total.worst_step + 1})",
            "16 bit" if layer in run.dense else "",
        )
        for layer, total in shown
    ]
    lines += ["", *columns([head, *body])]
    if len(shown) < len(run.layers):
        lines.append(f"and {len(run.layers) - len(shown)} more with a higher PSNR")
    return "\n".join(lines)


def _worst_first(run: QualityRun) -> list[tuple[Layer, LayerTotal]]:
    return sorted(run.layers.items(), key=lambda item: (item[1].worst_db, order(item[0])))


def _decision(run: QualityRun, layer: Layer) -> str:
    found = run.dense[layer]
    if found.why == BUDGET:
        return f"{layer.name} after step {found.step + 1} ({_db(found.psnr_db)})"
    return f"{layer.name} from the start (profile)"


def _db(value: float | None) -> str:
    if value is None or value == math.inf:
        return "equal"
    return "not finite" if not math.isfinite(value) else f"{value:.1f} dB"


def _percent(value: float | None) -> str:
    return "-" if value is None else "not finite" if not math.isfinite(value) else f"{100 * value:.3f} %"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


# -- JSON ---------------------------------------------------------------------------------------------------------


def to_json(runs: Sequence[QualityRun], budget_db: float = 0.0) -> str:
    """Everything that was measured, as one JSON object. Steps count from 1.

    A number that is not finite is null with "finite": false beside it; a psnr_db that is null with "finite": true means
    that the two were equal.
    """
    whole = {
        "format": "vc_attention_quality",
        "schema": 1,
        "version": host.pack_version(),
        "budget_db": budget_db or None,
        "runs": [_run(run) for run in runs],
    }
    return json.dumps(whole, allow_nan=False)


def _run(run: QualityRun) -> dict[str, Any]:
    lq, lkv, heads = run.shape
    layers = sorted({*run.layers, *run.dense}, key=order)
    return {
        "family": run.family,
        "plan": run.plan,
        "backend": run.backend,
        "device": run.device,
        "steps": run.steps,
        "finished": run.finished,
        "query_tokens": lq,
        "key_tokens": lkv,
        "heads": heads,
        "notes": run.notes,
        "calls_not_kept_one_by_one": run.dropped,
        "calls_with_inputs_not_finite": run.skipped,
        "layers": [{**_place(layer), **_total(run, layer)} for layer in layers],
        "calls": [
            {
                **_place(one.layer),
                "step": one.step + 1,
                "phase": one.phase,
                "sigma": one.sigma,
                "branches": one.branches,
                "heads": list(one.heads),
                **_numbers({"relative_l2": one.relative_l2, "cosine": one.cosine, "psnr_db": one.psnr_db}),
            }
            for one in run.measurements
        ],
    }


def _place(layer: Layer) -> dict[str, Any]:
    kind = None if layer.block_type is None else str(layer.block_type)
    return {"layer": layer.name, "block_type": kind, "block_index": layer.block_index, "call": layer.ordinal + 1}


def _total(run: QualityRun, layer: Layer) -> dict[str, Any]:
    total = run.layers.get(layer)
    decision = run.dense.get(layer)
    measured: dict[str, Any] = {"calls": 0}
    if total is not None:
        lowest = None if total.worst_db == math.inf else total.worst_db
        numbers = _numbers({**total.measures, "lowest_psnr_db": lowest})
        measured = {"calls": total.count, **numbers, "lowest_at_step": total.worst_step + 1}
    return {
        **measured,
        "in_16_bit": None if decision is None else decision.why,
        "in_16_bit_after_step": decision.step + 1 if decision is not None and decision.why == BUDGET else None,
    }


def _numbers(values: dict[str, float | None]) -> dict[str, Any]:
    finite = all(value is None or math.isfinite(value) for value in values.values())
    clean = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
    return {**clean, "finite": finite}


# -- the plot ----------------------------------------------------------------------------------------------------


def plot(runs: Sequence[QualityRun], budget_db: float = 0.0, sentence: str = "") -> Figure:
    """Two panels: the lowest PSNR of each layer, and the PSNR of every step (median of the layers, and their range).

    sentence: what to say where there is nothing to draw.
    """
    figure = Figure("VC-Attention Quality: PSNR against exact attention, in dB")
    measured = [run for run in runs if run.layers]
    values = [m.psnr_db for run in measured for m in run.measurements if m.psnr_db is not None]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        figure.sentence(sentence or "There are no numbers to draw; the table says why.")
        return figure
    levels = [*finite, budget_db] if budget_db else finite
    low, high = math.floor(min(levels) / 5) * 5 - 5, math.ceil(max(levels) / 5) * 5 + 5
    layers = sorted({layer for run in measured for layer in run.layers}, key=order)
    bars = figure.panel("layer (in the model's order)", (0, len(layers)), (low, high))
    for place, layer in enumerate(layers):
        found = [run.layers[layer].worst_db for run in measured if layer in run.layers]
        worst = min(max(min(found), low), high)
        bars.bar(place + 0.15, place + 0.85, worst, _DENSE if any(layer in run.dense for run in runs) else _MEASURED)
    bars.labels([(place + 0.5, _short(layer)) for place, layer in enumerate(layers)])
    total = sum(run.steps for run in measured)
    steps = figure.panel("step", (0.5, max(total, 1) + 0.5), (low, high))
    before = 0
    for run in measured:
        by_step: dict[int, list[float]] = {}
        for m in run.measurements:
            if m.psnr_db is not None and math.isfinite(m.psnr_db):
                by_step.setdefault(m.step, []).append(m.psnr_db)
        points = [(before + step + 1, sorted(found)) for step, found in sorted(by_step.items())]
        for x, found in points:
            steps.bar(x - 0.3, x + 0.3, found[-1], _BAND, found[0])
        steps.line([(x, found[len(found) // 2]) for x, found in points], _MEASURED)
        before += run.steps
    steps.labels([(x, str(x)) for x in range(1, total + 1)])
    if budget_db:
        bars.level(budget_db, _BUDGET)
        steps.level(budget_db, _BUDGET)
    legend = [(_MEASURED, "lowest of a layer; median of a step"), (_BAND, "range of a step's layers")]
    legend += [(_DENSE, "in 16 bit afterwards")] if any(run.dense for run in runs) else []
    figure.legend(legend + ([(_BUDGET, f"budget, {budget_db:g} dB")] if budget_db else []))
    return figure


def _short(layer: Layer) -> str:
    number = layer.block_index if layer.numbered else layer.ordinal + 1
    kind = "" if layer.block_type is None else str(layer.block_type)[:1]
    return f"{kind}{number}" + (f".{layer.ordinal + 1}" if layer.numbered and layer.ordinal else "")
