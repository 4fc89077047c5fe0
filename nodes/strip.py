"""Two clips side by side, with a line of words above each frame."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_INK, _PAPER = "#ffffff", "#202020"
#: Pixels between the two pictures.
_GAP = 4


class Strip:
    """`tensor`: fp32 [count, bar + height, width, 3] in 0..1, made at once and filled frame by frame.

    sizes: (height, width) of each clip; the shorter one stands at the top. labels: the words above each.
    """

    def __init__(self, count: int, sizes: tuple[tuple[int, int], tuple[int, int]], labels: tuple[str, str]) -> None:
        (height_a, width_a), (height_b, width_b) = sizes
        height, self.width = max(height_a, height_b), width_a + _GAP + width_b
        # video encoders want an even height
        self.bar = max(24, height // 18) // 2 * 2 + height % 2
        self.starts, self.widths = (0, width_a + _GAP), (width_a, width_b)
        self.labels = labels
        self.font = ImageFont.load_default(0.6 * self.bar)
        self.tensor = torch.full((count, self.bar + height, self.width, 3), 32 / 255)

    def put(self, place: int, a: Tensor, b: Tensor, words: str = "") -> None:
        """Frame `place`: a, b [H, W, C] in 0..1; words: at the right of the second label, where there is room."""
        row = self.tensor[place]
        row[: self.bar] = self._bar(words)
        for start, picture in zip(self.starts, (a, b), strict=True):
            height, width, channels = picture.shape
            target = row[self.bar : self.bar + height, start : start + width]
            # one channel is grey; NaN would turn into garbage in whatever encodes the strip
            target[:] = picture[..., :3] if channels >= 3 else picture[..., :1]
            target.nan_to_num_(0.0, 1.0, 0.0).clamp_(0, 1)

    def _bar(self, words: str) -> Tensor:
        image = Image.new("RGB", (self.width, self.bar), _PAPER)
        draw = ImageDraw.Draw(image)
        margin, middle = self.bar // 4, self.bar / 2
        for start, width, label in zip(self.starts, self.widths, self.labels, strict=True):
            draw.text((start + margin, middle), self._fit(label, width - 2 * margin), _INK, self.font, "lm")
        room = self.widths[1] - 3 * margin - self.font.getlength(self.labels[1])
        if words and self.font.getlength(words) <= room:
            draw.text((self.width - margin, middle), words, _INK, self.font, "rm")
        return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)

    def _fit(self, label: str, room: float) -> str:
        """`label`, cut to `room` pixels."""
        label = " ".join(label.split())
        while label and self.font.getlength(label) > room:
            label = label[:-1]
        return label
