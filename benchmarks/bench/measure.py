"""Measures one shape: errors first, then memory, then every row in turns, then the passes."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels import UnsupportedError
from ...kernels.timing import Call, Cuda, Device, Timing, one_line, take_turns
from . import ours, passes, peers
from .results import HEAD_DIM, Memory, Row, Run, Shape
from .shapes import tensors

#: Query rows whose error is taken, in the first and in the last head.
ROWS = 256


def errors(
    calls: dict[str, Call], q: Tensor, k: Tensor, v: Tensor, show: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, float], dict[str, str]]:
    """Relative L2 error of each call on sampled rows against fp32, and why the others did not run."""
    rows = torch.randperm(q.shape[2], generator=torch.Generator().manual_seed(1))[:ROWS].to(q.device)
    heads = sorted({0, q.shape[1] - 1})
    sampled, keys, values = q[:, heads][:, :, rows].float(), k[:, heads].float(), v[:, heads].float()
    exact = torch.softmax(sampled @ keys.mT * q.shape[3] ** -0.5, -1) @ values
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        show(f"error of {name}")
        try:
            got = call()
            if got.shape != q.shape:
                raise ValueError(f"the output has shape {tuple(got.shape)}, not {tuple(q.shape)}")
            found[name] = float((got[:, heads][:, :, rows].float() - exact).norm() / exact.norm())
        # A peer that does not run here, for whatever reason of its own, costs its row and not the run.
        except Exception as error:
            failed[name] = one_line(error)
    return found, failed


def memory_of(call: Call, q: Tensor) -> Memory:
    """What one call takes on top of what is allocated, its output included. Loads and compiles must be over."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return Memory(torch.cuda.max_memory_allocated() - before, 3 * q.numel(), q.numel() * q.itemsize)


def rows_of(
    timings: dict[str, Timing], error: dict[str, float], mine: dict[str, Call], tokens: int, heads: int
) -> list[Row]:
    """The rows of a shape from what was timed, in the order of `timings`. Work: 4 H L^2 d operations."""
    found = []
    for name, timing in timings.items():
        low, high = timing.quartiles
        found.append(
            Row(
                name=name,
                ours=name in mine,
                whole_call=not name.endswith(ours.ALONE),
                ms=timing.ms,
                low=low,
                high=high,
                timings=len(timing.values),
                rounds=[statistics.median(one) for one in timing.rounds],
                tflops=4 * heads * tokens**2 * HEAD_DIM / timing.ms / 1e9,
                error=error[name],
                mhz=_median(timing.mhz),
                watts=_median(timing.watts),
            )
        )
    return found


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def measure(
    run: Run,
    shape: tuple[str, int, int],
    seconds: float,
    rounds: int,
    device: Device | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> Shape:
    """Measure one shape (name, tokens, heads) on the current CUDA device; notes in `run` which peers are there."""
    name, tokens, heads = shape
    device = device or Cuda()
    q, k, v = tensors(tokens, heads)
    mine: dict[str, Call] = {}
    failed: dict[str, str] = {}
    if not run.ours_absent:
        try:
            mine = ours.rows(q, k, v)
        except UnsupportedError as error:
            failed["every row of ours"] = one_line(error)
    found = peers.find(q, k, v, torch.cuda.get_device_capability())
    run.peers.update(found.versions)
    run.missing.update(found.missing)
    calls = mine | found.calls
    relative, refused = errors(calls, q, k, v, show)
    calls = {row: call for row, call in calls.items() if row in relative}
    memory = memory_of(calls[ours.TYPICAL], q) if ours.TYPICAL in calls else None
    timings, broken = take_turns(calls, device, seconds, rounds, show)
    rows = rows_of(timings, relative, mine, tokens, heads)
    copied, launches = None, []
    if mine:
        # The rows' own operands are of no use to the passes, and take as much memory as the call itself.
        mine.clear()
        calls.clear()
        try:
            copied, launches = passes.measure(ours.library(), q, k, v, Cuda(watch=False), rounds, show)
        except RuntimeError as error:  # the rows are worth having without their passes
            failed["the passes"] = one_line(error)
    return Shape(name, tokens, heads, rows, failed | refused | broken, launches, copied, memory)
