"""How far a result is from exact attention: relative L2 error, cosine and PSNR. The one place that defines them.

`run.py replay` applies them to every row of a captured call, the node VC-Attention Quality to sampled rows of each
call of a run. Both go through sums that add up over calls, so that a layer's number is that of all its rows together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .guard import sampled

#: Places in the sums: |o - e|^2, |e|^2, |o|^2, o . e, max |e|, elements; o the result, e the exact one.
ERROR, EXACT, FOUND, PRODUCT, PEAK, COUNT = range(6)
#: Elements that are held in fp64 at once: a whole call has hundreds of millions.
_AT_ONCE = 1 << 24


def error_sums(out: Tensor, exact: Tensor) -> Tensor:
    """The sums behind the measures: fp64 [6] on `out`'s device, in the order of the constants above.

    out, exact: one shape, floating. Nothing waits for the device.
    """
    pieces = zip(out.flatten().split(_AT_ONCE), exact.flatten().split(_AT_ONCE), strict=True)
    return add_sums([_sums(_double(o), _double(e)) for o, e in pieces])


def _sums(o: Tensor, e: Tensor) -> Tensor:
    peak = e.abs().amax()
    parts = ((o - e).square().sum(), e.square().sum(), o.square().sum(), (o * e).sum(), peak)
    return torch.stack((*parts, torch.full_like(peak, o.numel())))


def add_sums(parts: Sequence[Tensor]) -> Tensor:
    """The sums of several results as those of one: everything adds up, and the peak is the largest."""
    stacked = torch.stack(tuple(parts))
    total = stacked.sum(0)
    total[PEAK] = stacked[:, PEAK].amax()
    return total


def sampled_sums(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float | None = None, turn: int = 0) -> Tensor:
    """`error_sums` of sampled query rows of one call against exact attention in fp32: fp64 [6] on q's device.

    q: [B, H, Lq, D]; k, v: [B, H, Lkv, D]; out: [B, H, Lq, D]. The rows of `sample_rows` in the heads of
    `sample_heads` at `turn`; time and memory are bounded as `guard` says. Nothing waits for the device.
    """
    return add_sums([error_sums(got, exact) for got, exact, _ in sampled(q, k, v, out, scale, turn)])


def measures(sums: Sequence[float]) -> dict[str, float | None]:
    """relative_l2, cosine, and psnr_db (peak: the largest magnitude of the exact result) from `error_sums`.

    PSNR is None where the two are equal, the relative error where only the exact result is zero. Two zeros: error 0,
    cosine 1. A result with NaN or infinity: infinite error, cosine 0, PSNR minus infinity.
    """
    peak, count = sums[PEAK], sums[COUNT]
    if not math.isfinite(sums[ERROR]):
        return {"relative_l2": math.inf, "cosine": 0.0, "psnr_db": -math.inf}
    error, norm, own = (math.sqrt(sums[place]) for place in (ERROR, EXACT, FOUND))
    relative = error / norm if norm else (None if error else 0.0)
    cosine = sums[PRODUCT] / (norm * own) if norm and own else float(norm == own)
    psnr = 10 * math.log10(peak**2 * count / error**2) if error and peak else None
    return {"relative_l2": relative, "cosine": cosine, "psnr_db": psnr}


def _double(x: Tensor) -> Tensor:
    # Apple's GPUs have no fp64; there the few sampled rows are summed on the CPU.
    return (x.cpu() if x.device.type == "mps" else x).double()
