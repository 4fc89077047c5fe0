"""One whole call on the cubins: preparation and attention from q, k, v to the output, and grouping.

Everything is queued on torch's current stream; nothing waits for the device, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ..plan import Plan
from ..reasons import Reason, UnsupportedError
from . import attend, chain, prepare
from .compile import Progress
from .loader import Library


def choose(
    device: torch.device, backend: str = "auto", may_compile: bool = True, progress: Progress | None = None
) -> chain.Chosen | Reason:
    """The kernels that serve `device`, checked once for each device, or why there are none (`chain.choose`)."""
    return chain.choose(_indexed(device), attention_on, backend, may_compile, progress)


def kernels_for(device: torch.device, backend: str = "auto") -> Library | Reason:
    """The same, without what else `choose` knows."""
    chosen = choose(device, backend)
    return chosen if isinstance(chosen, Reason) else chosen.kernels


def attempts(device: torch.device, self_test: bool = False) -> list[chain.Attempt]:
    """Every candidate on `device` and how far it got (`chain.attempts`)."""
    return chain.attempts(_indexed(device), attention_on, self_test)


def refusal(
    device: torch.device, plan: Plan, head_dim: int, dtype: torch.dtype, backend: str = "auto"
) -> Reason | None:
    """Why the kernels of `device` cannot run `plan` for this head dimension and dtype; None if they can."""
    kernels = kernels_for(device, backend)
    return kernels if isinstance(kernels, Reason) else lacks(kernels, plan, head_dim, dtype)


def lacks(kernels: Library, plan: Plan, head_dim: int, dtype: torch.dtype) -> Reason | None:
    """The same of given kernels."""
    if plan.clip_means:
        return Reason("plan", "VC-Attention's kernels have no norm-clipped means.")
    arch = kernels.manifest.arch
    reason = attend.supports(plan, dtype, head_dim, 1, arch)
    if reason is None and attend.kernel_name(plan, dtype, arch) not in kernels.manifest.kernels:
        return Reason(
            "plan",
            f"The kernels in {kernels.manifest.folder} lack the one for the plan {plan.encode()} with "
            f"{str(dtype)[6:]}; they were built in part.",
        )
    return reason


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, labels: Tensor | None, scale: float, backend: str = "auto"
) -> Tensor:
    """`kernels.attention` on the kernels of `backend`. q [B, H, Lq, 128], k, v [B, H, Lkv, 128], bf16 or fp16.

    Returns [B, H, Lq, 128] stored as [B, Lq, H, 128]. Raises UnsupportedError when a kernel is missing or is refused.
    """
    kernels = kernels_for(q.device, backend)
    if isinstance(kernels, Reason):
        raise UnsupportedError(kernels)
    return attention_on(kernels, q, k, v, plan, labels, scale)


def attention_on(
    kernels: Library, q: Tensor, k: Tensor, v: Tensor, plan: Plan, labels: Tensor | None, scale: float | None
) -> Tensor:
    """`attention` on given kernels, whatever the self-test says of them."""
    b, h, lq, d = q.shape
    if q.numel() == 0:
        return q.new_empty((b, lq, h, d)).transpose(1, 2)  # a launch of no blocks is an error to the driver
    with _current(q.device):
        try:
            queue = prepare.Queue.current(kernels)
        except prepare.Refused as refused:
            raise UnsupportedError(refused.reason) from refused
        images = prepare.prepare(kernels, q, k, v, plan, labels, queue)
        if isinstance(images, Reason):
            raise UnsupportedError(images)
        out = torch.empty((b, lq, h, d), dtype=q.dtype, device=q.device)
        reason = attend.attend(images, plan, out, scale, kernels=kernels, stream=queue.stream)
    if reason is not None:
        raise UnsupportedError(reason)
    return out.transpose(1, 2)


def group(v: Tensor, groups: int, previous: Tensor | None) -> tuple[Tensor, Tensor] | Reason:
    """`kernels.spec.grouping.group` on the kernels of this card, or why not: v [B, H, L, 128], bf16 or fp16.

    Compiles nothing: plain torch groups, too, on a machine whose kernels are not there yet.
    """
    chosen = choose(v.device, may_compile=False)
    if isinstance(chosen, Reason):
        return chosen
    with _current(v.device):
        return prepare.group(chosen.kernels, v, groups, previous)


def _indexed(device: torch.device) -> torch.device:
    """`device` with its number."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which `device` is torch's current one: launches go to the current context of the thread."""
    if torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)
