"""A benchmark for people and for programs: the table, the JSON, and the bar chart."""

from __future__ import annotations

import json
from dataclasses import asdict

from . import host
from .benchmark import Benchmark, Row
from .plot import Figure
from .tables import columns

_OURS, _IN_USE, _OTHER = "#0072b2", "#d55e00", "#9aa3ad"


def table(found: Benchmark) -> str:
    """The text on the node: which call was timed, every row, and why others are missing."""
    lines = [_shape(found)] if found.tokens else []
    if found.problem:
        return "\n".join([*lines, found.problem])
    lines += [_fastest(found)] if found.rows else ["Nothing could be timed."]
    if found.rows:
        head = ("attention", "ms", "speed", "TFLOP/s", "error")
        lines += ["", *columns([head, *(_cells(found, row) for row in found.rows)]), ""]
    lines += [f"{name}: {why.rstrip('.')}." for name, why in found.missing.items()]
    return "\n".join(lines).rstrip()


def _shape(found: Benchmark) -> str:
    latent, patch = (" x ".join(str(side) for side in sides) for sides in (found.latent, found.patch))
    return (
        f"{found.family} on {found.device}: one self-attention call over {found.tokens:,} tokens (latent {latent}, cut "
        f"into patches of {patch}), {found.heads} heads of {found.head_dim}, {found.dtype}, batch 1, random data. "
        "Text, reference or audio tokens that a model adds are not counted."
    )


def _fastest(found: Benchmark) -> str:
    best, reference = min(found.rows, key=lambda row: row.ms), found.reference
    if reference is None:
        return f"Fastest: {best.name}, {_ms(best)} ms."
    if best is reference:
        return f"Fastest: {best.name}, {_ms(best)} ms, which ComfyUI uses now."
    return (
        f"Fastest: {best.name}, {_ms(best)} ms, {reference.ms / best.ms:.2f} times as fast as {reference.name}, which "
        "ComfyUI uses now."
    )


def _cells(found: Benchmark, row: Row) -> tuple[str, ...]:
    error = "not finite" if row.error is None else f"{100 * row.error:.3f} %"
    name = f"{row.name} (in use)" if row.in_use else row.name
    tflops = _tflops(found, row)
    return name, _ms(row), _speed(found, row), f"{tflops:,.0f}" if tflops >= 100 else f"{tflops:.3g}", error


def _ms(row: Row) -> str:
    return f"{row.ms:.3g}" if row.ms < 100 else f"{row.ms:.0f}"


def _speed(found: Benchmark, row: Row) -> str:
    reference = found.reference
    return "-" if reference is None else f"{reference.ms / row.ms:.2f}x"


def _tflops(found: Benchmark, row: Row) -> float:
    return found.work / row.ms / 1e9


def to_json(found: Benchmark) -> str:
    """Everything as one JSON object. error: relative L2 of sampled rows against exact attention, null if not finite."""
    reference = found.reference
    whole = {
        "format": "vc_attention_benchmark",
        "schema": 1,
        "version": host.pack_version(),
        **{name: value for name, value in asdict(found).items() if name not in ("rows", "problem")},
        "problem": found.problem or None,
        "rows": [
            {
                **asdict(row),
                "tflops": _tflops(found, row),
                "speed": None if reference is None else reference.ms / row.ms,
            }
            for row in found.rows
        ],
    }
    return json.dumps(whole, allow_nan=False)


def plot(found: Benchmark) -> Figure:
    """A bar for each row: milliseconds of one call, shorter is better."""
    figure = Figure(f"One attention call, {found.tokens:,} tokens, {found.heads} heads, on {found.device}: ms")
    if not found.rows:
        figure.sentence(found.problem or "Nothing could be timed; the table says why.")
        return figure
    figure.bars(
        [
            (
                row.name,
                row.ms,
                _OURS if row.ours else _IN_USE if row.in_use else _OTHER,
                f"{_ms(row)} ms" + ("" if found.reference is None else f", {_speed(found, row)}"),
            )
            for row in found.rows
        ]
    )
    legend = [(_OURS, "VC-Attention")] if any(row.ours for row in found.rows) else []
    legend += [(_IN_USE, "in use now")] if found.reference is not None else []
    figure.legend([*legend, (_OTHER, "other attention of this ComfyUI; x: speed against the one in use")])
    return figure
