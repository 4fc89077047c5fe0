"""The picture of a template in ComfyUI's template browser: its graph in small, and what VC-Attention does at each step.

Drawn from the workflow itself, so it shows what the file holds. The browser shows squares and crops anything else.
"""

from __future__ import annotations

from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ...nodes.options import PatchOptions
from ...nodes.schedule import GROUP, PLAIN, REUSE, Schedule
from .catalogue import Template

SIDE = 512
#: Drawn this much larger and scaled down: Pillow's own edges are hard.
_OVERSAMPLE = 3
_PAPER, _INK, _SOFT = "#1b1b20", "#f2f2f5", "#a5a5b2"
_NODE, _BAR, _OWN, _OWN_BAR = "#3a3a42", "#4b4b55", "#7a5ea8", "#a98be0"
_WIRES = {
    "MODEL": "#b39ddb",
    "WANVIDEOMODEL": "#b39ddb",
    "CLIP": "#e0c34c",
    "CONDITIONING": "#e0975c",
    "LATENT": "#e07fc0",
    "VAE": "#e06c6c",
    "IMAGE": "#64a9e0",
    "VIDEO": "#64a9e0",
}
#: As on the node's timeline, in the dark theme.
_CELLS = {GROUP: "#56b4e9", REUSE: "#2fb592", PLAIN: "#a9a9a9"}
_NAMES = {GROUP: "group", REUSE: "reuse", PLAIN: "plain"}
_GRAPH = (24, 112, SIDE - 24, 372)  # left, top, right, bottom of the graph in small
_STRIP = (24, 414, SIDE - 24, 446)  # of the row of steps
_HIDDEN = ("MarkdownNote",)


def phases(steps: int) -> list[str]:
    """What VC-Attention does at each of `steps` steps at its defaults, by the pack's own schedule."""
    sigmas = [1 - i / steps for i in range(steps + 1)]
    schedule = Schedule(sigmas, PatchOptions(), lambda percent: 1.0 - percent, 1.0)
    return [schedule.locate(sigma).phase for sigma in sigmas[:-1]]


def thumbnail(template: Template, workflow: dict[str, Any]) -> Image.Image:
    """The picture, RGB, SIDE x SIDE pixels."""
    page = _Page()
    page.text(24, 44, template.title, 36, _INK)
    page.text(24, 84, template.detail, 20, _SOFT)
    _graph(page, workflow)
    _steps(page, phases(template.steps))
    return page.image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


class _Page:
    def __init__(self) -> None:
        self.image = Image.new("RGB", (SIDE * _OVERSAMPLE, SIDE * _OVERSAMPLE), _PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def text(self, x: float, y: float, text: str, size: int, colour: str, anchor: str = "lm") -> None:
        font = ImageFont.load_default(size * _OVERSAMPLE)
        self.draw.text((x * _OVERSAMPLE, y * _OVERSAMPLE), text, fill=colour, font=font, anchor=anchor)

    def box(self, left: float, top: float, right: float, bottom: float, colour: str, radius: float = 3) -> None:
        corners = [value * _OVERSAMPLE for value in (left, top, right, bottom)]
        self.draw.rounded_rectangle(corners, radius * _OVERSAMPLE, fill=colour)

    def wire(self, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        """A curve that leaves and arrives level, as the editor draws links."""
        bend = max(abs(end[0] - start[0]) / 2, 12)
        points = []
        for i in range(25):
            t = i / 24
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
            xs = (start[0], start[0] + bend, end[0] - bend, end[0])
            ys = (start[1], start[1], end[1], end[1])
            points.append(
                tuple(_OVERSAMPLE * sum(w * v for w, v in zip(weights, values, strict=True)) for values in (xs, ys))
            )
        self.draw.line(points, fill=colour, width=_OVERSAMPLE * 3 // 2, joint="curve")


def _graph(page: _Page, workflow: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in workflow["nodes"] if node["type"] not in _HIDDEN}
    left = min(node["pos"][0] for node in nodes.values())
    top = min(node["pos"][1] for node in nodes.values()) - 30
    right = max(node["pos"][0] + node["size"][0] for node in nodes.values())
    bottom = max(node["pos"][1] + node["size"][1] for node in nodes.values())
    # The two ways differ in scale: a graph is wide, the picture square, and its shape is what tells templates apart.
    across, down = (_GRAPH[2] - _GRAPH[0]) / (right - left), (_GRAPH[3] - _GRAPH[1]) / (bottom - top)

    def place(x: float, y: float) -> tuple[float, float]:
        return _GRAPH[0] + (x - left) * across, _GRAPH[1] + (y - top) * down

    for _, origin, slot, target, entry, kind in workflow["links"]:
        start, end = nodes[origin], nodes[target]
        page.wire(
            place(start["pos"][0] + start["size"][0], start["pos"][1] + 15 + 20 * slot),
            place(end["pos"][0], end["pos"][1] + 15 + 20 * min(entry, 4)),
            _WIRES.get(kind, "#8a8a96"),
        )
    for node in nodes.values():
        own = node["type"].startswith("VCAttention")
        x, y = node["pos"]
        page.box(*place(x, y - 30), *place(x + node["size"][0], y + node["size"][1]), _OWN if own else _NODE)
        bar = place(x + node["size"][0], y)
        page.box(*place(x, y - 30), bar[0], max(bar[1], place(x, y - 30)[1] + 6), _OWN_BAR if own else _BAR)


def _steps(page: _Page, cells: list[str]) -> None:
    left, top, right, bottom = _STRIP
    width = (right - left) / len(cells)
    for i, phase in enumerate(cells):
        page.box(left + i * width, top, left + (i + 1) * width - 3, bottom, _CELLS[phase], 4)
    page.text(left, 398, f"{len(cells)} steps", 17, _SOFT)
    x = float(left)
    for phase in dict.fromkeys(cells):
        page.box(x, 468, x + 16, 484, _CELLS[phase], 3)
        page.text(x + 24, 476, _NAMES[phase], 17, _SOFT)
        x += 100
    page.text(right, 476, "VC-Attention", 18, _OWN_BAR, "rm")
