"""Preparation of one operand on the interpreter, with a kernel replaced, and what is wrong with its images.

The calls are chosen so that the kernels meet no tie which torch, with its other order of sums, resolves otherwise:
their images are then the references' byte by byte, and a fault that moves a single code shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from vc_attention.benchmarks import preparation_checks
from vc_attention.kernels import FOUR_BIT, Plan
from vc_attention.kernels.cute import layouts_nvfp4, reference_mma8, reference_nvfp4
from vc_attention.kernels.launch import prepare as launch
from vc_attention.kernels.launch.images import Images, allocate

from . import on_torch

#: Images that are compared, and which operand they are of.
IMAGES = {"q": ("q", "qs", "qb"), "k": ("k", "ks", "km"), "v": ("v", "sv", "mu")}
#: Largest relative difference of the fp32 scales: the order of sums and maxima. Everything else is the same bytes.
SCALES = {"qs": 1e-6, "ks": 1e-5, "sv": 1e-6}

#: Bytes of E2M1 codes at the start of a tile.
_CODES = {"q": 128 * 64, "k": 128 * 64, "v": layouts_nvfp4.V_ROWS * 64}

_FOUR, _EIGHT = "nvfp4", "mma8"
PLANS = {
    (_FOUR, True): replace(FOUR_BIT, key_means=True),
    (_FOUR, False): FOUR_BIT.without_smoothing(),
    (_EIGHT, True): Plan(key_means=True),
    (_EIGHT, False): Plan().without_smoothing(),
}


@dataclass(frozen=True)
class Call:
    """q [1, 2, Lq, 128], k and v [1, 2, Lkv, 128] in memory layouts of their own, and labels [1, 2, Lkv].

    change: what to do to Gaussian tensors in place. adaptive: `Plan.adaptive_scales` of the NVFP4 images. ties: bytes
    of an image that may differ; for a long call no seed was found without any.
    """

    name: str
    lq: int
    lkv: int
    seed: int
    adaptive: bool = True
    change: Callable[[Tensor, Tensor, Tensor], None] | None = None
    ties: int = 0
    _references: dict = field(default_factory=dict, compare=False)

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        q, k, v = (torch.randn(1, 2, n, 128, generator=g) for n in (self.lq, self.lkv, self.lkv))
        k = k + 2 * torch.randn(1, 2, 1, 128, generator=g)
        labels = torch.randint(13, (1, 2, self.lkv), generator=g).to(torch.uint8)
        centres = torch.randn(2, 2, 13, 128, generator=g)
        own = labels[0].long()[..., None].expand(-1, -1, 128)
        k, v = k + centres[0].gather(1, own), v + centres[1].gather(1, own)
        if self.change is not None:
            self.change(q, k, v)
        laid = [
            preparation_checks.in_layout(x.bfloat16(), layout, n)
            for n, (x, layout) in enumerate(zip((q, k, v), preparation_checks.LAYOUTS, strict=False))
        ]
        return (*laid, labels)

    def plan(self, kind: str, means: bool) -> Plan:
        plan = PLANS[kind, means]
        return replace(plan, adaptive_scales=self.adaptive) if kind == _FOUR else plan

    def reference(self, kind: str, means: bool) -> Images:
        if (kind, means) not in self._references:
            *qkv, labels = self.tensors
            prepare = {_FOUR: reference_nvfp4, _EIGHT: reference_mma8}[kind].prepare
            self._references[kind, means] = prepare(*qkv, self.plan(kind, means), labels if means else None)
        return self._references[kind, means]


def _edges(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Head 0: groups of 16 whose scale is the smallest or rounds to zero. Head 1: too small for a scale, or zeros."""
    a = 1.3125 * 2.0**-115
    q[:, 0] = 0.0
    q[:, 0, 0] = a  # rotated: 128 a in channel 0
    # Rotated: one number, whose group has the scale 2^-9; 1 / (2^-9 times the second level) is infinite.
    q[:, 0, 3] = 2.0**-133 * _rotated_to(37)
    q[:, 1] = 2.0**-130
    k[:, 1] = 5.0
    v[:, 0, :, 64:] *= 2.0**-24  # scales of zero beside numbers that are not
    v[:, 1] = 0.0
    v[:, 1, ::2, 3] = 2.0**-131


def _rotated_to(channel: int) -> Tensor:
    """The row of +-1 whose rotation has one number only, in `channel`."""
    return torch.tensor([(-1.0) ** bin(channel & c).count("1") for c in range(128)])


def _spikes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The largest magnitude of Q is negative, in the second half of a CTA's warps, and a lane's sixth number."""
    q[:, 0, 100] -= 4 * _rotated_to(21)
    q[:, 1, 70] -= 5 * _rotated_to(13)


CALLS = (
    Call("plain", 150, 172, 1, change=_spikes),
    Call("six", 20, 140, 2, adaptive=False),
    Call("edges", 20, 200, 3, change=_edges),
    Call("long", 20, 1100, 4, ties=64),
)


def of_kernel(name: str) -> tuple[str, str, bool]:
    """(operand, kind of images, whether with means) that the kernel `name` is exercised by."""
    kind = _FOUR if "4_" in name else _EIGHT
    if name == "k_mean":  # what it rotates is for images without block means
        return "k", kind, False
    if name.startswith(("k_sum", "sort")):
        return "k", kind, True
    return name[0], kind, "means" in name or "amax" in name


def run(folder: Path, call: Call, operand: str, kind: str, means: bool, replaced: dict[str, str], **options) -> Images:
    """Images of one operand; the others' tensors stay unwritten. replaced: PTX to run in place of a kernel's own."""
    library = on_torch.InterpretedLibrary(folder, **options)
    library.replaced.update(replaced)
    *qkv, labels = call.tensors
    plan = call.plan(kind, means)
    x = qkv["qkv".index(operand)]
    with library.in_use():
        images = allocate(1, 2, call.lq, call.lkv, plan, x.device, kind)
        queue = launch.Queue.current(library)
        order = launch._order(queue, labels) if means and operand != "q" else None
        if kind == _FOUR:
            steps = {"q": (launch._q4, plan), "k": (launch._k4, order, plan), "v": (launch._v4, order, plan)}
            function, *more = steps[operand]
            function(queue, x, *more, images)
        elif operand == "q":
            launch._q(queue, x, plan, images)
        elif operand == "k":
            launch._k(queue, x, order, plan, images, kind)
        else:
            launch._v(queue, x, order, images, kind)
    for name in IMAGES[operand]:
        tensor = getattr(images, name)
        if tensor is not None and library.storages.unwritten(tensor):
            raise Unwritten(f"{library.storages.unwritten(tensor)} bytes of {name} are not written")
    return images


class Unwritten(Exception):  # noqa: N818 - of numbers, not of this program
    """An image that is not complete."""


def difference(ours: Images, theirs: Images, operand: str, ties: int = 0) -> str | None:
    """What is wrong with the images of `operand`, or None. ties: bytes of each that may differ."""
    for name in IMAGES[operand]:
        a, b = getattr(ours, name), getattr(theirs, name)
        if (a is None) != (b is None):
            return f"{name} is missing"
        if a is None:
            continue
        if name in SCALES:
            apart = (a.double() - b.double()).abs() / b.double().abs()
            if not apart.max() <= SCALES[name]:
                return f"{name} differs by {float(apart.max()):.2g}"
            continue
        different = int((_bytes(a, name, ours) != _bytes(b, name, theirs)).sum())
        if different > ties:
            return f"{different} bytes of {name} differ"
    return None


def _bytes(image: Tensor, name: str, images: Images) -> Tensor:
    """The bytes of an image, in which an E2M1 code of -0 counts as 0: under a scale of zero the kernels keep signs."""
    image = image.view(torch.uint8)
    if images.q.dtype != torch.uint8 or name not in _CODES:
        return image
    codes, scales = image[..., : _CODES[name]], image[..., _CODES[name] :]
    codes = torch.where(codes & 15 == 8, codes & 0xF0, codes)
    codes = torch.where(codes >> 4 == 8, codes & 0x0F, codes)
    return torch.cat((codes, scales), -1)
