"""The plot of a run: one panel for each shape, a bar for each row. Needs matplotlib, and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .results import Row, Run, Shape

NO_MATPLOTLIB = (
    "No plot was made: this Python has no matplotlib. Install it (python -m pip install matplotlib), or draw the plot "
    "from the JSON file with a Python that has it: python3 run.py bench --from FILE.json --plot FILE.png"
)
ALONE, WHOLE, PEER, INK, LINE = "#8fd0c4", "#0f766e", "#9aa3ad", "#1f2933", "#d5dae0"
BAR, MARGIN, WIDTH, COLUMNS = 0.27, 1.35, 7.6, 2


def draw(run: Run, path: Path) -> str:
    """Draw `run` into the PNG at `path`. Returns a sentence: that it was drawn, or why not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return NO_MATPLOTLIB
    shapes = [shape for shape in run.shapes if shape.rows]
    if not shapes:
        return "No plot was made: no row was timed."
    columns = min(COLUMNS, len(shapes))
    lines = [shapes[i : i + columns] for i in range(0, len(shapes), columns)]
    heights = [MARGIN + BAR * max(len(shape.rows) for shape in line) for line in lines]
    figure = Figure(figsize=(WIDTH * columns, sum(heights) + 0.5), layout="constrained")
    panels = figure.subplots(len(lines), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    for line, axes in zip(lines, panels, strict=True):
        for shape, axis in zip(line, axes, strict=False):
            panel(axis, shape)
        for axis in axes[len(line) :]:
            axis.set_axis_off()
    figure.suptitle(
        f"One attention call on {run.device['name']}, {run.date[:10]}, torch {run.software['torch']}",
        fontsize=12, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.savefig(path, dpi=130, format="png")
    return f"Plot: {path}"


def panel(axis: Any, shape: Shape) -> None:
    """The bars of one shape: TFLOP/s, labelled with the ratio to the reference."""
    rows = shape.rows
    fastest = max(row.tflops for row in rows)
    places = range(len(rows))
    axis.barh(places, [row.tflops for row in rows], color=[colour(row) for row in rows], height=0.72)
    for place, row in zip(places, rows, strict=True):
        axis.text(row.tflops + fastest / 80, place, label(shape, row), va="center", fontsize=8.5, color=INK)
    if shape.reference is not None:
        axis.axvline(shape.reference.tflops, color=INK, linewidth=0.9, linestyle=(0, (3, 3)), zorder=0)
    axis.set_yticks(list(places), [row.name for row in rows], fontsize=8.5)
    axis.margins(y=0.01)
    axis.invert_yaxis()
    axis.set_xlim(0, fastest * 1.2)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color=LINE, linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    against = f"; x: times {shape.reference.name}" if shape.reference else ""
    axis.set_xlabel(f"TFLOP/s{against}", fontsize=9, color=INK)
    axis.set_title(
        f"{shape.name}: {shape.tokens:,} tokens, {shape.heads} heads", loc="left", fontsize=10, fontweight="bold",
        color=INK,
    )  # fmt: skip


def label(shape: Shape, row: Row) -> str:
    """What stands behind the bar of `row`."""
    ratio = shape.ratio(row)
    return f"{ratio:.2f}x" if ratio else f"{row.tflops:.0f}"


def colour(row: Row) -> str:
    """Ours dark for whole calls and light for the kernel alone, peers grey."""
    if not row.ours:
        return PEER
    return WHOLE if row.whole_call else ALONE
