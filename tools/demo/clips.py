"""Clips as pixels: reading them, comparing them, and the strip that shows the difference."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageSequence
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

#: By how much the strip's third row magnifies the difference.
GAIN = 8
STRIP_FRAMES = 6
SSIM_WINDOW = 7  # pixels, scikit-image's default


@dataclass(frozen=True)
class Comparison:
    """How far a clip is from another. psnr in dB (inf: the same pixels), ssim up to 1, largest in steps of 255."""

    psnr: float
    ssim: float
    largest: int
    changed: float
    psnr_of_frames: tuple[float, ...]


def read_clip(path: Path) -> np.ndarray:
    """The frames of an animated image, uint8 [frames, height, width, 3].

    The writer merges equal neighbouring frames into one of longer duration; here they are apart again.
    """
    frames: list[np.ndarray] = []
    lengths: list[int] = []
    with Image.open(path) as image:
        for frame in ImageSequence.Iterator(image):
            frames.append(np.asarray(frame.convert("RGB")))
            lengths.append(int(frame.info.get("duration", 0)))
    unit = math.gcd(*lengths) or 1
    counts = [max(length // unit, 1) for length in lengths]
    return np.repeat(np.stack(frames), counts, axis=0)


def compare(clip: np.ndarray, reference: np.ndarray) -> Comparison:
    """PSNR over all pixels, SSIM averaged over the frames. Raises ValueError when the shapes differ."""
    if clip.shape != reference.shape:
        raise ValueError(f"The clips differ in size: {clip.shape} and {reference.shape}.")
    difference = np.abs(clip.astype(np.int16) - reference.astype(np.int16))
    ssim = [
        structural_similarity(a, b, channel_axis=-1, data_range=255, win_size=min(SSIM_WINDOW, *a.shape[:2]))
        for a, b in zip(reference, clip, strict=True)
    ]
    return Comparison(
        psnr=_psnr(reference, clip),
        ssim=float(np.mean(ssim)),
        largest=int(difference.max()),
        changed=float((difference.max(axis=-1) > 0).mean()),
        psnr_of_frames=tuple(_psnr(a, b) for a, b in zip(reference, clip, strict=True)),
    )


def _psnr(reference: np.ndarray, clip: np.ndarray) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # equal images: a division by zero, and the answer is inf
        return float(peak_signal_noise_ratio(reference, clip, data_range=255))


def magnified(clip: np.ndarray, reference: np.ndarray, gain: int = GAIN) -> np.ndarray:
    """clip - reference, times `gain`, around mid grey; uint8."""
    difference = clip.astype(np.int16) - reference.astype(np.int16)
    return np.clip(128 + gain * difference, 0, 255).astype(np.uint8)


def strip(reference: np.ndarray, clip: np.ndarray, names: tuple[str, str]) -> Image.Image:
    """A picture of three rows over time: the reference, the clip, and the magnified difference."""
    chosen = np.unique(np.linspace(0, len(reference) - 1, STRIP_FRAMES).round().astype(int))
    rows = (reference[chosen], clip[chosen], magnified(clip[chosen], reference[chosen]))
    labels = (*names, f"Difference x {GAIN}  (grey: none)")
    _, height, width, _ = reference.shape
    gap, bar = 4, 22
    size = (len(chosen) * (width + gap) + gap, 3 * (bar + height) + gap + 18)
    picture = Image.new("RGB", size, (24, 26, 30))
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(15)
    for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
        top = i * (bar + height)
        draw.text((gap + 2, top + 2), label, fill=(226, 228, 232), font=font)
        for j, frame in enumerate(row):
            picture.paste(Image.fromarray(frame), (gap + j * (width + gap), top + bar))
    for j, number in enumerate(chosen):
        draw.text((gap + j * (width + gap) + 2, size[1] - 18), f"frame {number + 1}", fill=(150, 154, 162), font=font)
    return picture
