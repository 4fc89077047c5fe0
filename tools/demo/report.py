"""The demo's results from its recorded runs: `python -m tools.demo.report RUN_DIR OUT_DIR`.

RUN_DIR holds facts.json, records_*.json and one clip per run; OUT_DIR gets both clips, difference.png, report.html
(nothing outside the file is loaded) and numbers.json.
"""

from __future__ import annotations

import base64
import html
import json
import math
import platform
import shutil
import string
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import figures
from .clips import GAIN, Comparison, compare, read_clip, strip
from .substitute import FOUR_BIT, NO_ATTENTION, PATCHED, PLAIN

PAGE = Path(__file__).with_name("page.html")
NAMES = {
    PATCHED: "VC-Attention",
    FOUR_BIT: "4-bit attention, without grouping",
    NO_ATTENTION: "no self-attention at all",
}
EMULATION = ", and nothing about speed: on this machine the readable specification computes every call"
DECLINED = '<span class="call"><span class="key declined"></span>declined</span>'
PHASES = {
    "grouped": (
        "group",
        "Early steps: the tokens of a layer were sorted by value (k-means of V), and each block's mean was taken off "
        "before quantising.",
    ),
    "reused": ("reuse", "Early steps: the groups of an earlier step served again, with fresh block means."),
    "plain": (
        "plain",
        "Later steps, where the picture no longer moves much: low-bit attention with block means over the tokens in "
        "their own order.",
    ),
}


@dataclass(frozen=True)
class Run:
    """What the recorder wrote, with the steps of the chained samplers counted on."""

    facts: dict[str, Any]
    stages: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    layers: int
    steps: int
    switches: list[int]


def load(folder: Path) -> Run:
    """Read facts.json and records_*.json. Raises ValueError when there is nothing to report."""
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    stages = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("records_*.json"))]
    calls, switches, before = [], [], 0
    for stage in stages:
        calls += [{**call, "number": before + call["step"] + 1} for call in stage["calls"]]
        before += stage["steps"]
        switches.append(before)
    if not calls:
        said = " ".join(line for stage in stages for line in stage["summary"].splitlines())
        raise ValueError(f"No attention call was accelerated, so there is nothing to compare. The node says: {said}")
    return Run(facts, stages, calls, max(call["layer"] for call in calls) + 1, before, switches[:-1])


def smoothing_gain(calls: Iterable[dict[str, Any]], plain: bool = False) -> tuple[float, float] | None:
    """Mean error of the grouped and reused calls, or of the plain ones, (with, without) smoothing; None without any."""
    chosen = [call for call in calls if (call["phase"] == "plain") == plain]
    if not chosen:
        return None
    return (
        sum(call["error"] for call in chosen) / len(chosen),
        sum(call["error_without_smoothing"] for call in chosen) / len(chosen),
    )


def ungrouped_error(calls: Iterable[dict[str, Any]]) -> float | None:
    """Mean error that the grouped and reused calls would have with the block means of the sequence's own order."""
    chosen = [call["error_without_grouping"] for call in calls if call.get("error_without_grouping") is not None]
    return sum(chosen) / len(chosen) if chosen else None


def totals(stages: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Counts of all stages together: accelerated, grouped, reused, plain, unkept, declined."""
    names = ("accelerated", "grouped", "reused", "plain", "unkept")
    counts = {name: sum(stage["counts"][name] for stage in stages) for name in names}
    return {**counts, "declined": sum(sum(stage["declined"].values()) for stage in stages)}


def write(folder: Path, out: Path) -> None:
    """Make every file of the result in `out`."""
    run = load(folder)
    clips = {name: read_clip(folder / f"{name}.webp") for name in run.facts["runs"]}
    compared = {name: compare(clips[name], clips[PLAIN]) for name in clips if name != PLAIN}
    for name in (PLAIN, PATCHED):
        shutil.copy2(folder / f"{name}.webp", out / f"{name}.webp")
    picture = strip(clips[PLAIN], clips[PATCHED], ("ComfyUI's own attention", "VC-Attention"))
    picture.save(out / "difference.png", optimize=True)
    page = string.Template(PAGE.read_text(encoding="utf-8")).substitute(_parts(run, compared, out))
    (out / "report.html").write_text(page, encoding="utf-8")
    numbers = {
        "clips": {name: _finite(asdict(value)) for name, value in compared.items()},
        "calls": totals(run.stages),
        "attention": run.calls,
        **run.facts,
    }
    (out / "numbers.json").write_text(json.dumps(numbers, indent=1, allow_nan=False), encoding="utf-8")


def _parts(run: Run, compared: dict[str, Comparison], out: Path) -> dict[str, str]:
    settings = run.facts["settings"]
    gain = smoothing_gain(run.calls)
    return {
        "lead": _lead(compared[PATCHED], totals(run.stages)),
        "tiles": _tiles(run, compared[PATCHED], gain),
        "workflow": f"<code>{html.escape(run.facts['workflow'])}</code>",
        "plain_clip": _data(out / f"{PLAIN}.webp", "image/webp"),
        "patched_clip": _data(out / f"{PATCHED}.webp", "image/webp"),
        "width": str(settings["width"]),
        "height": str(settings["height"]),
        "engine": html.escape(next((stage["engine"] for stage in run.stages if stage["engine"]), "")),
        "strip": _data(out / "difference.png", "image/png"),
        "gain": str(GAIN),
        "scale": _scale(compared),
        "frames_plot": figures.frames({NAMES[name]: value.psnr_of_frames for name, value in compared.items()}),
        "grouping_sentence": _grouping_sentence(gain, ungrouped_error(run.calls)),
        "plain_sentence": _plain_sentence(smoothing_gain(run.calls, plain=True)),
        "switch_sentence": " The dotted line marks the step at which Wan2.2's second model takes over."
        if run.switches
        else "",
        "errors_plot": figures.errors(run.calls, run.layers, run.steps, run.switches),
        "heat": _heat(run),
        "calls": _calls(run.stages),
        "kept": _kept(totals(run.stages)["unkept"]),
        "changes": _table(
            ("node", "in the workflow", "in the demo", "why"),
            [[_wrap(change[key]) for key in ("node", "shipped", "demo", "why")] for change in run.facts["changes"]],
        ),
        "speed": EMULATION if settings["backend"] == "spec" else "",
        "details": _details(run),
    }


def _lead(compared: Comparison, counts: dict[str, int]) -> str:
    share = f"{counts['accelerated']} attention calls of the run went through VC-Attention"
    if math.isinf(compared.psnr):
        return f"{share}, and the clip is the same to the last pixel."
    steps = "one step" if compared.largest == 1 else f"{compared.largest} steps"
    return (
        f"{share}, and no pixel of the clip moved by more than {steps} of 255: "
        f"PSNR {_decibel(compared.psnr)}, SSIM {_ssim(compared.ssim)}."
    )


def _tiles(run: Run, compared: Comparison, gain: tuple[float, float] | None) -> str:
    counts = totals(run.stages)
    tiles = [
        (_decibel(compared.psnr), "PSNR of the clip (above 40 dB a difference is hard to see)"),
        (_ssim(compared.ssim), "SSIM of the clip (1 is the same)"),
        (
            str(counts["accelerated"]),
            f"calls accelerated: {counts['grouped']} grouped, {counts['reused']} reused, {counts['plain']} plain; "
            f"{counts['declined']} left alone",
        ),
    ]
    if gain is not None:
        text = f"attention error in the grouped steps, {_percent(gain[1])} without smoothing"
        tiles.insert(2, (_percent(gain[0]), text))
    return "".join(f'<div class="tile"><b>{value}</b><span>{text}</span></div>' for value, text in tiles)


def _grouping_sentence(gain: tuple[float, float] | None, ungrouped: float | None) -> str:
    if gain is None:
        return "No step of this run was grouped."
    if gain[0] >= gain[1]:
        return f"Smoothing did not help in this run: {_percent(gain[0])} with it, {_percent(gain[1])} without."
    alone = ""
    if ungrouped is not None:
        alone = f"; block means without groups would leave {_percent(ungrouped)}"
        if ungrouped < (gain[0] + gain[1]) / 2:
            alone += ", because neighbouring tokens of this tiny model are much alike"
    return (
        f"In the early steps value smoothing takes the error from {_percent(gain[1])} to {_percent(gain[0])} "
        f"({100 * (1 - gain[0] / gain[1]):.0f} % less){alone}."
    )


def _plain_sentence(gain: tuple[float, float] | None) -> str:
    if gain is None:
        return "This run had no such step."
    return f"Their means still take it from {_percent(gain[1])} to {_percent(gain[0])}."


def _scale(compared: dict[str, Comparison]) -> str:
    rows = [
        [
            html.escape(NAMES[name][0].upper() + NAMES[name][1:]),
            _decibel(value.psnr),
            _ssim(value.ssim),
            f"{value.largest} of 255",
            f"{100 * value.changed:.1f} %",
        ]
        for name, value in compared.items()
    ]
    heads = ("run", "PSNR", "SSIM", "largest difference", "pixels that differ")
    return _table(heads, rows, numbers=(1, 2, 3, 4))


def _heat(run: Run) -> str:
    """Error of every layer and step as a table with tinted cells."""
    found = {(call["layer"], call["number"]): call for call in run.calls}
    worst = max(call["error"] for call in run.calls) or 1.0
    phases = {call["number"]: call["phase"] for call in run.calls}
    head = "".join(
        f'<th>{number}<br><span class="key {phases.get(number, "declined")}" style="margin:0"></span></th>'
        for number in range(1, run.steps + 1)
    )
    rows = []
    for layer in range(run.layers):
        cells = []
        for number in range(1, run.steps + 1):
            call = found.get((layer, number))
            if call is None:
                cells.append("<td>-</td>")
                continue
            tint = 0.06 + 0.5 * call["error"] / worst
            title = f"layer {layer + 1}, step {number}: {call['phase']}, {call['lkv']} tokens, {call['plan']}"
            cells.append(
                f'<td style="background:rgba(var(--heat),{tint:.2f})" title="{html.escape(title)}">'
                f"{100 * call['error']:.2f}</td>"
            )
        rows.append(f"<tr><th>layer {layer + 1}</th>{''.join(cells)}</tr>")
    caption = '<tr><th class="faint">error in %, step</th>' + head + "</tr>"
    return f'<table class="heat"><thead>{caption}</thead><tbody>{"".join(rows)}</tbody></table>'


def _calls(stages: Sequence[dict[str, Any]]) -> str:
    rows: list[list[str]] = []
    for stage in stages:
        name = html.escape(stage["stage"])
        for word, (key, why) in PHASES.items():
            if stage["counts"][word]:
                shown = f'<span class="call"><span class="key {key}"></span>{word}</span>'
                rows.append([name, shown, str(stage["counts"][word]), why])
                name = ""
        for code, count in sorted(stage["declined"].items(), key=lambda item: -item[1]):
            why = html.escape(stage.get("reasons", {}).get(code, code))
            rows.append([name, DECLINED, str(count), why])
            name = ""
        for note in stage["notes"]:
            rows.append([name, "note", "", html.escape(note)])
            name = ""
    return _table(("node", "calls", "count", "why"), rows, numbers=(2,))


def _kept(unkept: int) -> str:
    return f"{unkept} groupings were not kept between steps for lack of room." if unkept else ""


def _details(run: Run) -> str:
    facts, settings = run.facts, run.facts["settings"]
    seconds = ", ".join(f"{NAMES.get(name, 'plain')} {value:.0f} s" for name, value in facts["seconds"].items())
    plans = sorted({call["plan"] for call in run.calls})
    rows = [
        ["ComfyUI", html.escape(facts["comfyui"])],
        ["device", html.escape(facts["device"])],
        ["backend", f"<code>{html.escape(', '.join(sorted({call['backend'] for call in run.calls})))}</code>"],
        ["clip", f"{settings['width']} x {settings['height']}, {settings['length']} frames, seed {settings['seed']}"],
        ["attention", f"{settings['tokens']:,} tokens, {run.calls[0]['heads']} heads, {run.layers} layers"],
        ["arithmetic", "<br>".join(f"<code>{_wrap(plan.replace(',', ', '))}</code>" for plan in plans)],
        ["time of the runs", html.escape(seconds) + " (VC-Attention with the recorder)"],
        ["Python", platform.python_version()],
    ]
    return _table(("", ""), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already."""

    def cell(tag: str, i: int, text: str) -> str:
        return f"<{tag}{' class=' + chr(34) + 'n' + chr(34) if i in numbers else ''}>{text}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(heads)) if any(heads) else ""
    body = "".join("<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows)
    return f"<table>{'<thead><tr>' + head + '</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def _wrap(text: str) -> str:
    """Escaped text in which a browser may break long file names."""
    return html.escape(text).replace("_", "_<wbr>")


def _data(path: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _decibel(value: float) -> str:
    return "identical" if math.isinf(value) else f"{value:.1f} dB"


def _ssim(value: float) -> str:
    return "1" if value == 1.0 else f"{min(value, 0.99999):.5f}" if value > 0.999 else f"{value:.3f}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity; null says that the frames are equal."""
    return {
        key: [None if math.isinf(x) else x for x in value]
        if isinstance(value, tuple)
        else None
        if isinstance(value, float) and math.isinf(value)
        else value
        for key, value in values.items()
    }


if __name__ == "__main__":
    try:
        write(Path(sys.argv[1]), Path(sys.argv[2]))
    except ValueError as error:
        raise SystemExit(str(error)) from error
