"""PSNR, SSIM and, if wanted, LPIPS of two clips, frame by frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import host
from .messages import LPIPS_ABSENT, NO_FRAMES, SSIM_ABSENT, frame_small, lpips_failed, other_counts, other_sizes

#: Taps of SSIM's Gaussian window (sigma 1.5), as in the paper that defines it (Wang et al., 2004).
WINDOW = 11
#: Smallest side that AlexNet's strides and pools leave something of.
LEAST_LPIPS = 64
#: Pixels of a frame whose SSIM is computed at once: some 25 maps of them are held, 300 MB on a CPU.
_AT_ONCE = 1 << 20
#: Free memory in bytes below which a card is left alone.
_ROOM = 2 << 30

Metric = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Frame:
    """One pair of frames. mse: of values in 0..1, nan where a frame is not finite. ssim, lpips: None if not taken."""

    mse: float
    ssim: float | None = None
    lpips: float | None = None

    @property
    def psnr(self) -> float:
        """In dB for a peak of 1; infinite where the two are equal, nan where a frame is not finite."""
        return psnr_of(self.mse)


@dataclass
class Comparison:
    """What was found. sizes: (frames, height, width) of both clips. problem: why nothing could be compared."""

    sizes: tuple[tuple[int, int, int], tuple[int, int, int]]
    labels: tuple[str, str] = ("A", "B")
    frames: list[Frame] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def finite(self) -> list[Frame]:
        """The frames that count in the overall numbers."""
        return [frame for frame in self.frames if math.isfinite(frame.mse)]

    @property
    def psnr(self) -> float | None:
        """Of all frames as one signal: from the mean of their squared errors. Infinite where all are equal."""
        found = self.finite
        return psnr_of(sum(frame.mse for frame in found) / len(found)) if found else None

    def mean(self, name: str) -> float | None:
        """The mean of "ssim" or "lpips" over the frames, None where it was not taken."""
        values = [value for frame in self.finite if (value := getattr(frame, name)) is not None]
        return sum(values) / len(values) if values else None

    @property
    def identical(self) -> bool:
        """Whether the compared frames are equal in every value."""
        return bool(self.frames) and all(frame.mse == 0 for frame in self.frames)

    @property
    def lowest(self) -> int | None:
        """The frame, from 0, with the lowest PSNR; None where all are equal or none could be measured."""
        different = [i for i, frame in enumerate(self.frames) if frame.mse > 0]
        return max(different, key=lambda i: self.frames[i].mse, default=None)


def psnr_of(mse: float) -> float:
    """10 log10(1 / mse), for values in 0..1."""
    return math.inf if mse == 0 else -10 * math.log10(mse) if math.isfinite(mse) else math.nan


def frames_of(a: Tensor, b: Tensor, metrics: dict[str, Metric], device: torch.device) -> Iterator[Frame]:
    """One `Frame` after the other. a, b: [N, H, W, C] of one size in H, W and C; as many frames as the shorter has.

    metrics: "ssim" and "lpips" -> function of two [C, H, W] fp32 tensors on `device`. Holds one pair of frames.
    """
    for one, other in zip(a, b, strict=False):
        x, y = (t.to(device, torch.float32).movedim(-1, 0) for t in (one, other))
        mse = float((x - y).square().mean(dtype=torch.float64))
        if not math.isfinite(mse):
            yield Frame(math.nan)
            continue
        yield Frame(mse, **{name: metric(x, y) for name, metric in metrics.items()})


def colours(images: Tensor) -> Tensor:
    """The red, green and blue of [N, H, W, C]; an alpha channel says nothing about the picture's likeness."""
    return images[..., :3]


def ssim_metric(height: int, width: int) -> Metric | str:
    """SSIM of two frames [C, H, W]: the mean over pixels and channels of kornia's map, or why there is none.

    Window and constants are the usual ones (11 taps, sigma 1.5, K 0.01 and 0.03), over the pixels whose whole window
    lies in the picture: scikit-image's `structural_similarity` with gaussian_weights and population covariance.
    """
    if min(height, width) < WINDOW:
        return frame_small("SSIM", WINDOW)
    try:
        from kornia.metrics import ssim as ssim_map
    # kornia is one of ComfyUI's optional packages, and a broken install of it fails in ways of its own.
    except Exception as error:
        host.log.info("VC-Attention Compare: kornia cannot be imported: %s", error)
        return SSIM_ABSENT
    rows = max(1, _AT_ONCE // width)

    def metric(x: Tensor, y: Tensor) -> float:
        if x.is_cuda:
            x, y = x.double(), y.double()  # a card's fp32 convolutions may run in TF32, with 10 bits
        total, count = 0.0, 0
        for top in range(0, height - WINDOW + 1, rows):
            part = slice(top, min(height, top + rows + WINDOW - 1))
            found = ssim_map(x[None, :, part], y[None, :, part], WINDOW, 1.0, 0.0, "valid")
            total, count = total + float(found.sum(dtype=torch.float64)), count + found.numel()
        return total / count

    return metric


def lpips_metric(height: int, width: int, device: torch.device) -> Metric | str:
    """LPIPS (AlexNet) of two frames [3, H, W], or why there is none. The package fetches AlexNet at its first use."""
    if min(height, width) < LEAST_LPIPS:
        return frame_small("LPIPS", LEAST_LPIPS)
    try:
        import lpips
    except ImportError:
        return LPIPS_ABSENT
    try:
        network = lpips.LPIPS(net="alex", verbose=False).to(device)  # in eval mode by itself
    # No network, no disk, another torchvision: it costs only this number.
    except Exception as error:
        host.log.warning("VC-Attention Compare: LPIPS cannot be used.", exc_info=error)
        return lpips_failed(error)

    def metric(x: Tensor, y: Tensor) -> float:
        with torch.no_grad():
            return float(network(x[None], y[None], normalize=True))

    return metric


def device_for(frame_bytes: int) -> torch.device:
    """ComfyUI's card if it is NVIDIA's or AMD's and has room beside the models on it, else the CPU."""
    device = host.compute_device()
    if device.type != "cuda":
        return torch.device("cpu")
    free = host.free_memory(device)
    return device if free is not None and free > _ROOM + 8 * frame_bytes else torch.device("cpu")


def start(
    a: Tensor, b: Tensor, labels: tuple[str, str], lpips: bool = False
) -> tuple[Comparison, Callable[[], Iterator[Frame]]]:
    """What two clips [N, H, W, C] have in common, with its notes, and what measures it frame by frame.

    Clips of different frame sizes are not compared: `problem` says so, and there is nothing to measure.
    """
    sizes = tuple((int(t.shape[0]), int(t.shape[1]), int(t.shape[2])) for t in (a, b))
    found = Comparison((sizes[0], sizes[1]), labels)
    if not min(sizes[0][0], sizes[1][0]):
        found.problem = NO_FRAMES
        return found, lambda: iter(())
    if sizes[0][1:] != sizes[1][1:]:
        found.problem = other_sizes(labels, sizes[0], sizes[1])
        return found, lambda: iter(())
    if sizes[0][0] != sizes[1][0]:
        found.notes.append(other_counts(labels, sizes[0][0], sizes[1][0]))
    a, b = colours(a), colours(b)
    if a.shape[-1] != b.shape[-1]:
        channels = min(a.shape[-1], b.shape[-1])
        a, b = a[..., :channels], b[..., :channels]
    height, width = sizes[0][1:]
    device = device_for(4 * height * width * a.shape[-1])
    wanted: dict[str, Metric | str] = {"ssim": ssim_metric(height, width)}
    if lpips:
        wanted["lpips"] = lpips_metric(height, width, device)
    found.notes += [metric for metric in wanted.values() if isinstance(metric, str)]
    metrics = {name: metric for name, metric in wanted.items() if not isinstance(metric, str)}
    return found, lambda: frames_of(a, b, metrics, device)
