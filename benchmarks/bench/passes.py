"""The launches of a preparation or a grouping one by one: time, bytes and achieved bandwidth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, empty_like

from ...kernels import Reason, UnsupportedError
from ...kernels.cute import selection
from ...kernels.launch import prepare as prep
from ...kernels.launch.loader import Library
from ...kernels.timing import Call, Device, take_turns
from .results import Pass

COPY = "copy"
#: The row of a call as a whole.
ALL = "all"
#: Time on each pass in each round: they are short, and MOST timings are soon reached.
SECONDS = 0.02
_SAMPLED = ("group_seed", "group_update", "group_assign")


def must(value: Any) -> Any:
    """`value`, unless it is a Reason: that is raised as UnsupportedError."""
    if isinstance(value, Reason):
        raise UnsupportedError(value)
    return value


def recorded(call: Callable[[], Any]) -> list[tuple[str, tuple[Any, ...], Call]]:
    """The launches that `call` queues, in order: name, arguments, and a function that queues it again.

    The arguments keep the workspaces of the call alive.
    """
    launches: list[tuple[str, tuple[Any, ...], Call]] = []
    plain = prep.Queue.__call__

    def record(self: prep.Queue, name: str, grid: tuple[int, ...], *arguments: Any) -> None:
        launches.append((name, arguments, lambda: plain(self, name, grid, *arguments)))
        plain(self, name, grid, *arguments)

    prep.Queue.__call__ = record  # type: ignore[method-assign]
    try:
        must(call())
    finally:
        prep.Queue.__call__ = plain  # type: ignore[method-assign]
    return launches


def launch_bytes(name: str, arguments: Sequence[Any]) -> int:
    """Bytes that a launch of `prepare` must move: each tensor that it is given once, read or written.

    Two kinds do not touch all they are given: `v_stats` without gathering ignores the token order, and passes over a
    sample of V read only its rows (and labels).
    """
    total = sum(a.nbytes for a in arguments if isinstance(a, Tensor))
    if name.startswith("v_stats") and "gather" not in name and arguments[1] is not None:
        total -= arguments[1].nbytes
    if name.startswith(_SAMPLED):
        v = arguments[0]
        heads, row = v.shape[0] * v.shape[1], v.shape[3] * v.itemsize
        if name.startswith("group_assign"):
            tokens = arguments[3].numel() // heads
        elif name.startswith("group_update"):
            tokens = arguments[-3]
            total -= arguments[1].nbytes - heads * tokens
        else:
            tokens = arguments[-1]
        total -= v.nbytes - heads * tokens * row
    return total


def calls_of(library: Library, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """Every kind of preparation and grouping on these tensors. q, k, v: [B, H, L, 128], bf16 or fp16."""
    labels, centroids = must(prep.group(library, v))
    fast = selection.preset(library.manifest.arch, "fast")
    keyed, bare = replace(fast, key_means=True), fast.without_smoothing()
    calls = {
        "preparation, reuse step": lambda: prep.prepare(library, q, k, v, fast, labels),
        "preparation, plain step": lambda: prep.prepare(library, q, k, v, fast),
        "preparation, reuse step with key means": lambda: prep.prepare(library, q, k, v, keyed, labels),
        "preparation without means": lambda: prep.prepare(library, q, k, v, bare),
        "grouping, cold": lambda: prep.group(library, v),
        "grouping, warm": lambda: prep.group(library, v, 0, centroids),
        "grouping, warm, centroids kept": lambda: prep.group(library, v, 0, centroids, False),
    }
    if fast.key_means:  # the first is that already
        del calls["preparation, reuse step with key means"]
    return calls


def measure(
    library: Library,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    device: Device,
    rounds: int,
    show: Callable[[str], None] = lambda text: None,
) -> tuple[Pass, list[Pass]]:
    """A copy of q's size, and each call of `calls_of` as a whole followed by those of its launches that are new.

    Times are the device's own: launches are queued ahead of it.
    """
    # A view of [B, L, H, D] memory is copied as such; any layout is as good for a copy that keeps it.
    source = q.transpose(1, 2) if q.transpose(1, 2).is_contiguous() else q.contiguous()
    target = empty_like(source)
    calls: dict[str, Call] = {COPY: lambda: target.copy_(source)}
    facts: dict[str, tuple[str, str, int, int]] = {}
    seen: set[tuple[str, int]] = set()
    for title, call in calls_of(library, q, k, v).items():
        launches = recorded(call)
        sizes = [launch_bytes(name, arguments) for name, arguments, _ in launches]
        facts[title] = (title, ALL, 1, sum(sizes))
        calls[title] = call
        counts = Counter((name, size) for (name, _, _), size in zip(launches, sizes, strict=True))
        for (name, _, again), size in zip(launches, sizes, strict=True):
            if (name, size) not in seen:
                seen.add((name, size))
                key = f"{title}: {name}, {size} bytes"
                facts[key], calls[key] = (title, name, counts[name, size], size), again
    timings, failed = take_turns(calls, device, SECONDS, rounds, show)
    if failed:
        raise RuntimeError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    copied = Pass(COPY, COPY, 1, timings[COPY].ms, 2 * source.nbytes)
    found = [Pass(of, name, launches, timings[key].ms, size) for key, (of, name, launches, size) in facts.items()]
    return copied, found
