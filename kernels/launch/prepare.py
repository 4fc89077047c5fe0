"""Preparation and grouping on the device: queues the kernels of `kernels.cute.preparation`, never synchronises.

Inputs are [B, H, L, 128] bf16 or fp16 with any strides, as long as channels are consecutive and rows start at multiples
of 16 bytes; anything else is copied once. Workspaces come from torch's allocator and are released in stream order.

Workspace of a call, in bytes, n = B H: K sums n ceil(Lkv / 1024) 512, K mean n 1024; with V means n ceil(Lkv / 128)
512; with labels n Lkv 4 (the token order) + n ceil(Lkv / 4096) 1024; V amax n 512; with NVFP4 Q and K amax n 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cute import layouts as lo
from ..cute.selection import images_of
from ..plan import Plan
from ..reasons import Reason
from ..spec.grouping import group_count
from .images import Images, allocate, key_blocks
from .loader import Library

#: Tile sizes of the kernels (`prep_k`, `sort`, `group_assign`), restated here because their files need the compiler.
SUM_CHUNK = 1024
SORT_CHUNK = 4096
ASSIGN_STEP = 256
MAX_GROUPS = 256
#: The specification's sample and Lloyd steps of a cold start.
SAMPLE = 4096
LLOYD_STEPS = 2
#: Steps of one assignment CTA over all tokens: its centroid table (64 KB) is read once for 1024 tokens (256 KB).
ASSIGN_STEPS = 4
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Refused(Exception):  # noqa: N818 - carries a Reason to the entry points of this file, nobody else sees it
    """A kernel could not be loaded or queued."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


@dataclass(frozen=True)
class Queue:
    """Kernels of one device, by name, launched on one stream (a CUstream as an integer)."""

    library: Library
    stream: int

    @classmethod
    def current(cls, library: Library) -> Queue:
        """On torch's current stream of the library's device, looked up once for all launches of a call."""
        stream = library.stream()
        if isinstance(stream, Reason):
            raise Refused(stream)
        return cls(library, stream)

    def __call__(self, name: str, grid: tuple[int, ...], *arguments: Tensor | int | float | None) -> None:
        kernel = self.library.kernel(name)
        full = (grid[0], grid[1] if len(grid) > 1 else 1, 1)
        reason = kernel if isinstance(kernel, Reason) else kernel.launch(full, arguments, self.stream)
        if reason is not None:
            raise Refused(reason)


def supported(q: Tensor, k: Tensor, v: Tensor, plan: Plan, arch: str) -> Reason | None:
    """Why the preparation kernels of an architecture cannot take this call, or None."""
    if images_of(arch, plan) is None or plan.clip_means:
        return Reason("plan", f"The preparation kernels do not make the operands of the plan {plan.encode()}.")
    if {q.dtype, k.dtype, v.dtype} - KINDS.keys():
        return Reason("dtype", f"The preparation kernels take bf16 and fp16, not {q.dtype}.")
    if {x.shape[-1] for x in (q, k, v)} != {lo.HEAD_DIM}:
        return Reason("head_dim", f"The preparation kernels have head dimension {lo.HEAD_DIM}, not {q.shape[-1]}.")
    return None


def rows_of(x: Tensor) -> Tensor:
    """`x` [B, H, L, 128] itself where the kernels can read its rows, else a contiguous copy."""
    steps = [s for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1]
    fits = x.stride(3) == 1 and x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in steps)
    # Not `contiguous()`: that returns a contiguous tensor as it is, and with it an address that is not aligned.
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _layout(x: Tensor) -> tuple[int, int, int, int, int]:
    """The kernels' stride and size arguments."""
    b, h, length, _ = x.stride()
    return b, h, length, x.shape[1], x.shape[2]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def prepare(
    library: Library,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    labels: Tensor | None = None,
    queue: Queue | None = None,
) -> Images | Reason:
    """The images of one call, queued on `queue` or the current stream. labels: uint8 [B, H, Lkv] or None.

    q: [B, H, Lq, 128], k, v: [B, H, Lkv, 128] on the device of `library`. Without means of V or K the order of the
    tokens does not matter to the product, so labels are then ignored.
    """
    arch = library.manifest.arch
    kind, reason = images_of(arch, plan), supported(q, k, v, plan, arch)
    if reason is not None or kind is None:
        return reason or Reason("plan", f"The kernels for {arch} have no images for the plan {plan.encode()}.")
    images = allocate(q.shape[0], q.shape[1], q.shape[2], k.shape[2], plan, q.device, kind)
    try:
        queue = Queue.current(library) if queue is None else queue
        order = None
        if labels is not None and (plan.demean or plan.key_means):
            order = _order(queue, labels)
        if kind == "nvfp4":
            _q4(queue, q, plan, images)
            _k4(queue, k, order, plan, images)
            _v4(queue, v, order, plan, images)
        else:
            _q(queue, q, plan, images)
            _k(queue, k, order, plan, images, kind)
            _v(queue, v, order, images, kind)
    except Refused as refused:
        return refused.reason
    return images


def _q(queue: Queue, q: Tensor, plan: Plan, images: Images) -> None:
    q = rows_of(q)
    name = "q" + "_fp8" * (plan.scores == "fp8") + f"_{KINDS[q.dtype]}" + "_means" * (images.qb is not None)
    grid = (q.shape[0] * q.shape[1], lo.query_tiles(q.shape[2]))
    queue(name, grid, q, images.q, images.qs, images.qb, *_layout(q))


def _k_mean(queue: Queue, k: Tensor) -> Tensor:
    """Channel means of K, and the addend of the rotation for them: fp32 [BH, 2, 128]."""
    n, length = k.shape[0] * k.shape[1], k.shape[2]
    chunks = _ceil(length, SUM_CHUNK)
    sums = torch.empty((n, chunks, lo.HEAD_DIM), dtype=torch.float32, device=k.device)
    mean = torch.empty((n, 2, lo.HEAD_DIM), dtype=torch.float32, device=k.device)
    queue(f"k_sum_{KINDS[k.dtype]}", (n, chunks), k, sums, *_layout(k))
    queue("k_mean", (n,), sums, mean, chunks, length)
    return mean


def _k(queue: Queue, k: Tensor, order: Tensor | None, plan: Plan, images: Images, kind: str) -> None:
    k = rows_of(k)
    mean = _k_mean(queue, k)
    name = "k" + "_fp8" * (plan.scores == "fp8") + f"_{KINDS[k.dtype]}"
    name += "_gather" * (order is not None) + "_means" * (images.km is not None)
    grid = (k.shape[0] * k.shape[1], key_blocks(k.shape[2], kind))
    queue(name, grid, k, order, mean, images.k, images.ks, images.km, *_layout(k))


def _v_stats(queue: Queue, v: Tensor, order: Tensor | None, demean: bool, name: str) -> tuple[Tensor | None, Tensor]:
    """Block means of V, fp32 [BH, blocks, 128] or None, and each channel's largest |V less them|, fp32 [BH, 128]."""
    n, blocks = v.shape[0] * v.shape[1], _ceil(v.shape[2], lo.BLOCK)
    amax = torch.zeros((n, lo.HEAD_DIM), dtype=torch.float32, device=v.device)
    means = torch.empty((n, blocks, lo.HEAD_DIM), dtype=torch.float32, device=v.device) if demean else None
    queue(name, (n, blocks), v, order, means, amax, *_layout(v))
    return means, amax


def _v(queue: Queue, v: Tensor, order: Tensor | None, images: Images, kind: str) -> None:
    v = rows_of(v)
    dtype, demean, gather = KINDS[v.dtype], images.mu is not None, "_gather" * (order is not None)
    # Without means the largest |v| is that of any order.
    means, amax = _v_stats(queue, v, order, demean, f"v_stats_{dtype}" + (gather + "_means") * demean)
    name = f"v_{dtype}" + gather + "_means" * demean
    grid = (v.shape[0] * v.shape[1], key_blocks(v.shape[2], kind))
    queue(name, grid, v, order, means, amax, images.v, images.sv, images.mu, *_layout(v))


def _q4(queue: Queue, q: Tensor, plan: Plan, images: Images) -> None:
    q = rows_of(q)
    kind, n = KINDS[q.dtype], q.shape[0] * q.shape[1]
    grid = (n, lo.query_tiles(q.shape[2]))
    amax = torch.zeros(n, dtype=torch.float32, device=q.device)
    queue(f"q4_amax_{kind}", grid, q, amax, *_layout(q))
    name = f"q4_{kind}" + "_means" * plan.key_means
    queue(name, grid, q, amax, images.q, images.qs, images.qb, *_layout(q), int(plan.adaptive_scales))


def _k4(queue: Queue, k: Tensor, order: Tensor | None, plan: Plan, images: Images) -> None:
    k = rows_of(k)
    mean, means = _k_mean(queue, k), "_means" * plan.key_means
    kind, n = KINDS[k.dtype], k.shape[0] * k.shape[1]
    grid = (n, key_blocks(k.shape[2], "nvfp4"))
    amax = torch.zeros(n, dtype=torch.float32, device=k.device)
    queue(f"k4_amax_{kind}{means}", grid, k, order, mean, amax, images.km, *_layout(k))
    outputs = (images.km, images.k, images.ks)
    queue(f"k4_{kind}{means}", grid, k, order, mean, amax, *outputs, *_layout(k), int(plan.adaptive_scales))


def _v4(queue: Queue, v: Tensor, order: Tensor | None, plan: Plan, images: Images) -> None:
    v = rows_of(v)
    kind, demean = KINDS[v.dtype], plan.demean
    means, amax = _v_stats(queue, v, order, demean, f"v4_stats_{kind}_means" if demean else f"v_stats_{kind}")
    grid = (v.shape[0] * v.shape[1], key_blocks(v.shape[2], "nvfp4"))
    outputs = (images.v, images.sv, images.mu)
    name = f"v4_{kind}" + "_means" * demean
    queue(name, grid, v, order, means, amax, *outputs, *_layout(v), int(plan.adaptive_scales))


def token_order(library: Library, labels: Tensor) -> Tensor | Reason:
    """The stable argsort of `labels` (uint8 [B, H, L]) as int32 [B, H, L], by counting."""
    try:
        return _order(Queue.current(library), labels)
    except Refused as refused:
        return refused.reason


def _order(queue: Queue, labels: Tensor) -> Tensor:
    labels = labels.contiguous()
    b, h, length = labels.shape
    chunks = _ceil(length, SORT_CHUNK)
    counts = torch.empty((b * h, chunks, MAX_GROUPS), dtype=torch.int32, device=labels.device)
    order = torch.empty((b, h, length), dtype=torch.int32, device=labels.device)
    queue("sort_count", (b * h, chunks), labels, counts, length)
    queue("sort_order", (b * h, chunks), labels, counts, order, length)
    return order


def group(
    library: Library, v: Tensor, groups: int = 0, previous: Tensor | None = None, refresh: bool = True
) -> tuple[Tensor, Tensor] | Reason:
    """`kernels.spec.grouping.group` on the device: labels uint8 [B, H, L] and centroids fp32 [B, H, groups, 128].

    v: [B, H, L, 128] bf16 or fp16. Centroids are rounded to v's format for the comparison, so near ties may fall
    differently from the specification's; magnitudes beyond 1e19 are not rescaled first. Raises its ValueErrors.
    """
    if v.dtype not in KINDS or v.shape[-1] != lo.HEAD_DIM:
        return Reason("dtype", f"The grouping kernels take bf16 and fp16 with head dimension 128, not {v.dtype}.")
    groups = group_count(v, groups, previous)
    try:
        return _group(Queue.current(library), rows_of(v), groups, previous, refresh)
    except Refused as refused:
        return refused.reason


def _group(queue: Queue, v: Tensor, groups: int, previous: Tensor | None, refresh: bool) -> tuple[Tensor, Tensor]:
    b, h, length, d = v.shape
    n, kind, device, layout = b * h, KINDS[v.dtype], v.device, _layout(v)
    count = min(length, SAMPLE)
    raw = torch.empty((n, MAX_GROUPS, d), dtype=torch.float32, device=device)
    packed = torch.empty((n, MAX_GROUPS, d), dtype=v.dtype, device=device)
    bias = torch.empty((n, MAX_GROUPS), dtype=torch.float32, device=device)
    labels = torch.empty((b, h, length), dtype=torch.uint8, device=device)
    update = (n, MAX_GROUPS // 8)
    if previous is None:
        sampled = torch.empty((n, count), dtype=torch.uint8, device=device)
        queue(f"group_seed_{kind}", update, v, raw, packed, bias, *layout, count, groups)
        for _ in range(LLOYD_STEPS):
            grid = (n, _ceil(count, ASSIGN_STEP))
            queue(f"group_assign_{kind}", grid, v, packed, bias, sampled, *layout, count, groups, 1)
            queue(f"group_update_{kind}", update, v, sampled, raw, packed, bias, *layout, count, groups, 0)
    else:
        source = rows_of(previous.to(torch.float32))
        source = source if source.is_contiguous() else source.contiguous()
        queue(f"group_place_{kind}", update, source, None, raw, packed, bias, groups, groups)
    scores = torch.empty((n, MAX_GROUPS, MAX_GROUPS), dtype=torch.float32, device=device)
    rank = torch.empty((n, MAX_GROUPS), dtype=torch.int32, device=device)
    chained = torch.empty_like(raw)
    queue(f"group_pairs_{kind}", (n, 2), packed, bias, scores, groups)
    queue("group_chain", (n,), scores, rank, groups)
    queue(f"group_place_{kind}_ranked", update, raw, rank, chained, packed, bias, groups, MAX_GROUPS)
    grid = (n, _ceil(length, ASSIGN_STEP * ASSIGN_STEPS))
    queue(f"group_assign_{kind}", grid, v, packed, bias, labels, *layout, length, groups, ASSIGN_STEPS)
    if previous is not None and refresh:
        queue(f"group_update_{kind}", update, v, labels, chained, packed, bias, *layout, count, groups, 1)
    return labels, chained.view(b, h, MAX_GROUPS, d)[:, :, :groups].contiguous()
