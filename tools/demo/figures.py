"""The report's plots, as SVG that takes its colours from the page and so follows its light or dark theme."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

#: Colours that matplotlib writes -> custom properties of the page's style sheet.
PAGE_COLOURS = {
    "#010203": "var(--ink)",
    "#010204": "var(--faint)",
    "#010205": "var(--line)",
    "#010206": "var(--ours)",
    "#010207": "var(--other)",
    "#010208": "var(--third)",
    "#010209": "var(--group)",
    "#01020a": "var(--reuse)",
}
INK, FAINT, LINE, OURS, OTHER, THIRD, GROUP, REUSE = PAGE_COLOURS
PHASE_COLOURS = {"group": GROUP, "reuse": REUSE}
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
}

Calls = list[dict[str, Any]]


def errors(calls: Calls, layers: int, steps: int, switches: list[int]) -> str:
    """One panel per layer: relative error of each step's call, and of the same call without grouping and smoothing.

    calls: with a "number" (of the step, from 1) each. switches: steps behind which the next model takes over.
    """
    columns = min(layers, 2)
    rows = math.ceil(layers / columns)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "errors"}):
        figure = Figure(figsize=(9.4, 2.35 * rows + 0.5), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        top = 118.0 * max([max(call["error"], call["error_without_smoothing"]) for call in calls] or [0.01])
        for layer, axes in zip(range(layers), grid.flat, strict=False):
            own = sorted((call for call in calls if call["layer"] == layer), key=lambda call: call["number"])
            _phases(axes, own)
            for step in switches:
                axes.axvline(step + 0.5, color=FAINT, linewidth=0.9, linestyle=(0, (2, 3)))
            numbers = [call["number"] for call in own]
            axes.plot(
                numbers,
                [100 * call["error_without_smoothing"] for call in own],
                color=OTHER, linestyle=(0, (3, 2)), marker="o", markersize=3.5, label="the same call without V-Smooth",
            )  # fmt: skip
            axes.plot(
                numbers, [100 * call["error"] for call in own],
                color=OURS, marker="o", markersize=4.5, label="VC-Attention",
            )  # fmt: skip
            axes.set_title(f"Layer {layer + 1}")
            axes.set_xlim(0.5, steps + 0.5)
            axes.set_ylim(0, top)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
            axes.grid(axis="x", visible=False)
        for axes in grid.flat[layers:]:
            axes.set_visible(False)
        for axes in grid[-1]:
            axes.set_xlabel("step")
        grid[0][0].set_ylabel("relative error")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside upper right", ncols=2, frameon=False)
        return _svg(figure, "Relative error of each attention call, by layer and step")


def _phases(axes: Axes, calls: Calls) -> None:
    for call in calls:
        colour = PHASE_COLOURS.get(call["phase"])
        if colour:
            axes.axvspan(call["number"] - 0.5, call["number"] + 0.5, color=colour, linewidth=0)


def frames(series: dict[str, tuple[float, ...]]) -> str:
    """PSNR of each frame against the plain clip, one line per run. Frames that are equal have no point."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "frames"}):
        figure = Figure(figsize=(9.4, 2.9), layout="constrained")
        axes = figure.subplots()
        for (label, values), colour in zip(series.items(), (OURS, OTHER, THIRD), strict=False):
            shown = [value if math.isfinite(value) else math.nan for value in values]
            axes.plot(range(1, len(shown) + 1), shown, color=colour, marker="o", markersize=3, label=label)
        axes.set_xlabel("frame")
        axes.set_ylabel("PSNR, dB")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="x", visible=False)
        figure.legend(loc="outside upper right", ncols=len(series), frameon=False)
        return _svg(figure, "PSNR of each frame against the clip with ComfyUI's own attention")


def _svg(figure: Figure, description: str) -> str:
    text = io.StringIO()
    empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", transparent=True, metadata=empty)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([^;\"]*?)'[^;\"]*", r"font: \1system-ui, sans-serif", svg)
    for colour, name in PAGE_COLOURS.items():
        svg = svg.replace(colour, name)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{description}" ', 1)
