"""The attention call on prepared images: picks the kernel of a plan and queues it."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..cute import layouts as lo
from ..cute.selection import kernel_of, query_tiles_of_block
from ..plan import Plan
from ..reasons import Reason
from .images import Images
from .loader import Library, load_library

#: Where kernels that were built by hand lie, one folder for each architecture, and those that install.py unpacks.
#: Read each time, so that a benchmark can point it elsewhere.
PREBUILT = Path(__file__).resolve().parent.parent / "prebuilt"
_OUTPUTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_LARGEST_GRID_Y = 65535


@lru_cache(maxsize=16)
def library(folder: Path, device: torch.device) -> Library | Reason:
    """The kernels in `folder` for `device`, loaded once, as they are: the self-test is `chain`'s."""
    return load_library(folder, device)


def supports(plan: Plan, dtype: torch.dtype, head_dim: int, heads: int, arch: str) -> Reason | None:
    """Why the kernels of `arch` cannot take a call of `heads` (batch times heads) with this plan; None if they can."""
    if head_dim != lo.HEAD_DIM:
        return Reason(
            "head_dim",
            f"VC-Attention's kernels have head dimension {lo.HEAD_DIM}; this call has {head_dim}.",
        )
    if not kernel_name(plan, dtype, arch):
        return Reason(
            "plan",
            f"VC-Attention's kernels for this card ({arch}) do not compute the plan {plan.encode()} with "
            f"{str(dtype)[6:]}. Choose the preset fast or faithful.",
        )
    if heads > _LARGEST_GRID_Y:
        return Reason(
            "heads",
            f"Batch times heads is {heads}, more than the {_LARGEST_GRID_Y} that one call can take.",
        )
    return None


def kernel_name(plan: Plan, dtype: torch.dtype, arch: str) -> str:
    """Manifest name of the kernel of `arch` that computes `plan` with outputs of `dtype`; empty if there is none."""
    return kernel_of(arch, plan, _OUTPUTS.get(dtype, ""))


def attend(
    images: Images,
    plan: Plan,
    out: Tensor,
    scale: float | None = None,
    folder: Path | None = None,
    kernels: Library | None = None,
    stream: int | None = None,
) -> Reason | None:
    """Attention of prepared `images` into `out`, queued on torch's current stream; no host synchronisation.

    images: on one device, made for `plan` by preparation kernels of the same architecture. out: contiguous
    [B, Lq, H, 128], bf16 or fp16. scale: of the scores, 1 / sqrt(128) if None. kernels: whose kernel runs; else those
    in `folder`, else the ones that `call.kernels_for` finds. stream: the one that `kernels.stream()` gave, where the
    caller has it. Returns None, or the reason why nothing was queued.
    """
    expected = (images.batch, images.lq, images.heads, lo.HEAD_DIM)
    if out.shape != expected or not out.is_contiguous() or out.device != images.q.device:
        raise ValueError(
            f"out must be a contiguous tensor of shape {expected} on {images.q.device}; it is {tuple(out.shape)} on "
            f"{out.device}."
        )
    if kernels is None:
        found = library(folder, out.device) if folder is not None else _chosen(out.device)
        if isinstance(found, Reason):
            return found
        kernels = found
    arch = kernels.manifest.arch
    reason = supports(plan, out.dtype, lo.HEAD_DIM, images.batch * images.heads, arch)
    if reason is not None:
        return reason
    kernel = kernels.kernel(kernel_name(plan, out.dtype, arch))
    if isinstance(kernel, Reason):
        return kernel
    if images.lq == 0 or images.batch * images.heads == 0:
        return None
    scale = lo.HEAD_DIM**-0.5 if scale is None else scale
    # Whole clusters: a block beyond the last query tile computes that tile again and writes nothing.
    cluster = kernel.entry.cluster
    blocks = -(-lo.query_tiles(images.lq) // query_tiles_of_block(arch))
    grid = (-(-blocks // cluster) * cluster, images.batch * images.heads, 1)
    given = {"out": out, "scale": scale * math.log2(math.e)}
    arguments = [given[name] if name in given else getattr(images, name) for name in kernel.entry.arguments]
    return kernel.launch(grid, arguments, stream)


def _chosen(device: torch.device) -> Library | Reason:
    from .call import kernels_for  # `call` is built on this file

    return kernels_for(device)
