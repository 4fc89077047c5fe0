"""Small charts as images, drawn with Pillow, which ComfyUI brings; a plotting library it does not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

WIDTH, HEIGHT = 1200, 900
_MARGIN_LEFT, _MARGIN_RIGHT, _TOP, _BOTTOM = 80, 30, 60, 60
_GAP = 70
_PAPER, _INK, _GRID = "#ffffff", "#222222", "#dddddd"
#: Everything is drawn this much larger and scaled down: Pillow's own lines have hard edges.
_OVERSAMPLE = 2
_FONT = 18
#: Distances of the grid's lines.
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000)


class Figure:
    """A page with a title, panels one below the other (two fit), and a legend. Draws at once; `tensor` ends it."""

    def __init__(self, title: str) -> None:
        size = (WIDTH * _OVERSAMPLE, HEIGHT * _OVERSAMPLE)
        self.image = Image.new("RGB", size, _PAPER)
        self.draw = ImageDraw.Draw(self.image)
        self._panels = 0
        self.text(WIDTH / 2, 26, title, _FONT + 4, "mm")

    def text(self, x: float, y: float, text: str, size: int = _FONT, anchor: str = "mm", colour: str = _INK) -> None:
        """Write `text` at (x, y) in pixels of the finished image; anchor as Pillow names it."""
        font = ImageFont.load_default(size * _OVERSAMPLE)
        self.draw.text((x * _OVERSAMPLE, y * _OVERSAMPLE), text, fill=colour, font=font, anchor=anchor)

    def rectangle(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        """Fill a rectangle, corners in any order; at least one pixel each way."""
        x, y = sorted((left, right)), sorted((top, bottom))
        box = [x[0], y[0], max(x[1], x[0] + 1), max(y[1], y[0] + 1)]
        self.draw.rectangle([value * _OVERSAMPLE for value in box], fill=colour)

    def polyline(self, points: Sequence[tuple[float, float]], colour: str, width: int = 2) -> None:
        """A line through `points`; a dot at each."""
        scaled = [(x * _OVERSAMPLE, y * _OVERSAMPLE) for x, y in points]
        self.draw.line(scaled, fill=colour, width=width * _OVERSAMPLE, joint="curve")

    def sentence(self, text: str) -> None:
        """A sentence in place of the panels, in lines of a readable length."""
        lines: list[str] = [""]
        for word in text.split():
            if len(lines[-1]) + len(word) > 80:
                lines.append("")
            lines[-1] = f"{lines[-1]} {word}".strip()
        for i, line in enumerate(lines):
            self.text(WIDTH / 2, HEIGHT / 2 + 30 * (i - len(lines) / 2), line)

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """(colour, words) in one row at the foot."""
        x = float(_MARGIN_LEFT)
        for colour, words in entries:
            self.rectangle(x, HEIGHT - 32, x + 18, HEIGHT - 16, colour)
            self.text(x + 26, HEIGHT - 24, words, _FONT - 2, "lm")
            x += 60 + 8.5 * len(words)

    def bars(self, entries: Sequence[tuple[str, float, str, str]]) -> None:
        """Bars from the left, one below the other, on the whole page: (name, length, colour, words behind the bar)."""
        longest = max((length for _, length, _, _ in entries), default=0.0)
        left, right = 380, WIDTH - 220
        pitch = min(64.0, (HEIGHT - _TOP - _BOTTOM - 20) / max(len(entries), 1))
        for i, (name, length, colour, words) in enumerate(entries):
            middle = _TOP + 20 + (i + 0.5) * pitch
            end = left + (right - left) * (length / longest if longest else 0.0)
            self.text(left - 12, middle, name, anchor="rm")
            self.rectangle(left, middle - 0.36 * pitch, end, middle + 0.36 * pitch, colour)
            self.text(end + 10, middle, words, anchor="lm")

    def panel(self, name: str, x: tuple[float, float], y: tuple[float, float]) -> Panel:
        """The next panel. name: of the horizontal axis; x, y: the ranges of the axes."""
        height = (HEIGHT - _TOP - _BOTTOM - 2 * _GAP) / 2
        top = _TOP + self._panels * (height + _GAP)
        self._panels += 1
        return Panel(self, name, x, y, top, top + height)

    def tensor(self) -> Tensor:
        """The finished image as ComfyUI takes it: fp32 [1, HEIGHT, WIDTH, 3] in 0..1."""
        image = self.image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
        return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)[None]


class Panel:
    """One pair of axes with its grid; made by `Figure.panel`. Coordinates are those of the axes."""

    def __init__(
        self, figure: Figure, name: str, x: tuple[float, float], y: tuple[float, float], top: float, bottom: float
    ) -> None:
        self.figure = figure
        self.x, self.y, self.top, self.bottom = x, y, top, bottom
        step = next((size for size in _STEPS if (y[1] - y[0]) / size <= 8), _STEPS[-1])
        for line in range(math.ceil(y[0] / step - 1e-9), math.floor(y[1] / step + 1e-9) + 1):
            self.level(line * step, _GRID, 1)
            figure.text(_MARGIN_LEFT - 10, self._y(line * step), f"{line * step:g}", anchor="rm")
        figure.text((_MARGIN_LEFT + WIDTH - _MARGIN_RIGHT) / 2, bottom + 44, name)

    def _x(self, value: float) -> float:
        width = WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT
        return _MARGIN_LEFT + (value - self.x[0]) / (self.x[1] - self.x[0]) * width

    def _y(self, value: float) -> float:
        return self.bottom - (value - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - self.top)

    def bar(self, left: float, right: float, top: float, colour: str, bottom: float | None = None) -> None:
        """A bar from `bottom` (the axis if None) to `top`."""
        bottom = self.y[0] if bottom is None else bottom
        self.figure.rectangle(self._x(left), self._y(top), self._x(right), self._y(bottom), colour)

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A line through `points`, with a mark at each."""
        placed = [(self._x(x), self._y(y)) for x, y in points]
        self.figure.polyline(placed, colour)
        for x, y in placed:
            self.figure.rectangle(x - 3, y - 3, x + 3, y + 3, colour)

    def mark(self, x: float, y: float, colour: str) -> None:
        """A mark at (x, y), larger than those of a line."""
        left, top = self._x(x), self._y(y)
        self.figure.rectangle(left - 6, top - 6, left + 6, top + 6, colour)

    def level(self, value: float, colour: str, width: int = 2) -> None:
        """A line across at `value`."""
        self.figure.polyline([(_MARGIN_LEFT, self._y(value)), (WIDTH - _MARGIN_RIGHT, self._y(value))], colour, width)

    def labels(self, entries: Sequence[tuple[float, str]]) -> None:
        """(place, words) below the axis: as many as fit, evenly chosen."""
        widest = max((len(words) for _, words in entries), default=1)
        fits = max(1, int((WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT) / (11 * widest + 12)))
        stride = -(-len(entries) // fits)
        for place, words in entries[::stride]:
            self.figure.text(self._x(place), self.bottom + 18, words, _FONT - 2)
