"""A comparison for people and for programs: the table, the JSON, and the plot."""

from __future__ import annotations

import json
import math
from typing import Any

from . import host
from .compare import Comparison, Frame
from .messages import not_finite_frames
from .plot import Figure
from .tables import columns, count

#: Frames in the table, lowest PSNR first.
ROWS = 12
_LINE, _LOWEST = "#0072b2", "#d55e00"


def words(frame: Frame) -> str:
    """One frame's numbers for the strip."""
    parts = [_db(frame.psnr)]
    parts += [] if frame.ssim is None else [f"SSIM {frame.ssim:.4f}"]
    return "   ".join(parts)


def table(found: Comparison) -> str:
    """The text on the node: the overall numbers, notes, and the frames with the lowest PSNR."""
    if found.problem:
        return found.problem
    lines = [_first_line(found), *_notes(found)]
    different = [i for i, frame in enumerate(found.frames) if frame.mse > 0]
    shown = sorted(different, key=lambda i: -found.frames[i].mse)[:ROWS]
    if found.identical or not shown:
        return "\n".join(lines)
    taken = _taken(found)
    overall = ["overall", _db(found.psnr), *(_number(found.mean(name)) for name in taken)]
    body = [
        [f"frame {i + 1}", _db(found.frames[i].psnr), *(_number(getattr(found.frames[i], name)) for name in taken)]
        for i in shown
    ]
    lines += ["", *columns([["", "PSNR", *(name.upper() for name in taken)], overall, *body])]
    rest = len(found.frames) - len(shown)
    if rest:
        lines.append(f"and {count(rest, 'frame')} more")
    return "\n".join(lines)


def _first_line(found: Comparison) -> str:
    frames = count(len(found.frames), "frame")
    if found.identical:
        return f"{frames} compared: {found.labels[0]} and {found.labels[1]} are identical."
    if found.psnr is None:
        return f"{frames} looked at, and none could be measured."
    numbers = [f"PSNR {_db(found.psnr)}"]
    numbers += [
        f"{name.upper()} {_number(mean)}" for name in ("ssim", "lpips") if (mean := found.mean(name)) is not None
    ]
    lowest = found.lowest
    where = "" if lowest is None else f" Lowest PSNR: {_db(found.frames[lowest].psnr)} in frame {lowest + 1}."
    return f"{frames} compared: {', '.join(numbers)}.{where}"


def _taken(found: Comparison) -> list[str]:
    return [name for name in ("ssim", "lpips") if found.mean(name) is not None]


def _notes(found: Comparison) -> list[str]:
    odd = [i for i, frame in enumerate(found.frames) if not math.isfinite(frame.mse)]
    return [*found.notes, *([not_finite_frames(len(odd), odd[0] + 1)] if odd else [])]


def _db(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "not finite"
    return "identical" if value == math.inf else f"{value:.2f} dB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def to_json(found: Comparison) -> str:
    """Everything as one JSON object; frames count from 1.

    psnr_db is null where two frames are identical and, with "finite": false beside it, where one is not finite.
    """
    (frames_a, height_a, width_a), (frames_b, height_b, width_b) = found.sizes
    psnr = found.psnr
    whole = {
        "format": "vc_attention_compare",
        "schema": 1,
        "version": host.pack_version(),
        "a": {"label": found.labels[0], "frames": frames_a, "height": height_a, "width": width_a},
        "b": {"label": found.labels[1], "frames": frames_b, "height": height_b, "width": width_b},
        "problem": found.problem or None,
        "notes": _notes(found),
        "frames_compared": len(found.frames),
        "identical": found.identical,
        "psnr_db": None if psnr is None or psnr == math.inf else psnr,
        "ssim": found.mean("ssim"),
        "lpips": found.mean("lpips"),
        "lowest_frame": None if found.lowest is None else found.lowest + 1,
        "frames": [{"frame": i + 1, **_frame(frame)} for i, frame in enumerate(found.frames)],
    }
    return json.dumps(whole, allow_nan=False)


def _frame(frame: Frame) -> dict[str, Any]:
    finite = math.isfinite(frame.mse)
    psnr = frame.psnr if finite and frame.mse else None
    return {"psnr_db": psnr, "ssim": frame.ssim, "lpips": frame.lpips, "finite": finite}


def plot(found: Comparison) -> Figure:
    """PSNR and SSIM of every frame, one panel each; the frame with the lowest PSNR is marked."""
    figure = Figure(f"{_short(found.labels[0])} and {_short(found.labels[1])}")
    series = [(i + 1, frame.psnr) for i, frame in enumerate(found.frames) if math.isfinite(frame.psnr)]
    if not series:
        figure.sentence(found.problem or _first_line(found))
        return figure
    values = [psnr for _, psnr in series]
    across = (0.5, len(found.frames) + 0.5)
    low, high = math.floor(min(values) / 5) * 5, math.ceil(max(values) / 5 + 1e-9) * 5
    panel = figure.panel("PSNR in dB, frame by frame", across, (low, max(high, low + 5)))
    panel.line(series, _LINE)
    labels = [(float(i), str(i)) for i in range(1, len(found.frames) + 1)]
    panel.labels(labels)
    lowest = found.lowest
    if lowest is not None:
        panel.mark(lowest + 1, found.frames[lowest].psnr, _LOWEST)
    similar = [(i + 1, frame.ssim) for i, frame in enumerate(found.frames) if frame.ssim is not None]
    if similar:
        floor = math.floor(min(value for _, value in similar) * 20 - 1e-9) / 20
        second = figure.panel("SSIM, frame by frame", across, (floor, 1.0))
        second.line(similar, _LINE)
        second.labels(labels)
        ssim = None if lowest is None else found.frames[lowest].ssim
        if lowest is not None and ssim is not None:
            second.mark(lowest + 1, ssim, _LOWEST)
    figure.legend([(_LINE, "each frame"), (_LOWEST, "lowest PSNR")])
    return figure


def _short(label: str) -> str:
    return label if len(label) <= 24 else f"{label[:22]}..."
