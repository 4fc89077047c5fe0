"""Timing of calls that take turns: medians of device events, so that heat and the power limit meet all rows alike.

`run.py bench` and the node VC-Attention Benchmark measure with it.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Call = Callable[[], Any]

#: Timings of a row in a round, at least and at most.
LEAST, MOST = 5, 200
#: Device clock cycles (about 10 ms) that the device waits before a series, so that the host queues ahead of it: a
#: launch costs the host up to 20 us, which is longer than some passes take.
LEAD = 20_000_000
#: Clusters in the stand-in for a model's tensors.
CLUSTERS = 64


def stand_ins(
    length: int, heads: int, head_dim: int, device: torch.device | str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v as views [1, heads, length, head_dim] of [1, length, heads, head_dim], the same each time.

    Noise around 64 clusters in K and V, in random order: grouping has something to find, as in a video.
    """
    g = torch.Generator(device).manual_seed(0)
    member = torch.randint(0, CLUSTERS, (length,), device=device, generator=g)

    def make(scale: float) -> Tensor:
        x = torch.randn(1, length, heads, head_dim, device=device, generator=g, dtype=dtype)
        centres = scale * torch.randn(CLUSTERS, heads, head_dim, device=device, generator=g, dtype=dtype)
        return x.add_(centres[member]).transpose(1, 2)

    return make(0.0), make(0.4), make(1.0)


@dataclass(frozen=True)
class Series:
    """Calls back to back: ms of each, and the SM clock and the power while they ran (None where nothing tells)."""

    ms: list[float]
    mhz: float | None = None
    watts: float | None = None


class Device(Protocol):
    """What `take_turns` needs of a device."""

    def series(self, call: Call, count: int) -> Series:
        """Queue `call` once untimed and `count` times timed, and wait."""


class Cuda:
    """The current CUDA device. `watch`: read clock and power in each series."""

    def __init__(self, watch: bool = True) -> None:
        self.watch = watch

    def series(self, call: Call, count: int) -> Series:
        """See `Device`. Calls follow each other on the current stream without a gap, as a model queues them."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda._sleep(LEAD)
        call()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        mhz, watts = self._during(events[2 * count // 3]) if self.watch else (None, None)
        events[-1].synchronize()
        return Series([events[i].elapsed_time(events[i + 1]) for i in range(count)], mhz, watts)

    def _during(self, event: torch.cuda.Event) -> tuple[float | None, float | None]:
        while not event.query():
            time.sleep(0.002)
        return clock_and_power()


class Clock:
    """Any other device, by the host's clock around each call: a CPU, or a device of another make.

    wait: returns once the device has done what was queued.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self.wait = wait

    def series(self, call: Call, count: int) -> Series:
        """See `Device`."""
        call()
        self.wait()
        found = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            self.wait()
            found.append(1000 * (time.perf_counter() - start))
        return Series(found)


def clock_and_power() -> tuple[float | None, float | None]:
    """SM clock in MHz and power in W now, None where torch cannot say (it asks through nvidia-ml-py)."""
    try:
        return float(torch.cuda.clock_rate()), torch.cuda.power_draw() / 1000
    # The management library has errors of its own, one class for each code, and may not be importable here.
    except Exception:
        return None, None


@dataclass
class Timing:
    """All timings of one row: ms of each round, and the clock and power in it."""

    rounds: list[list[float]] = field(default_factory=list)
    mhz: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)

    def add(self, series: Series) -> None:
        """One more round."""
        self.rounds.append(series.ms)
        for kept, value in ((self.mhz, series.mhz), (self.watts, series.watts)):
            if value is not None:
                kept.append(value)

    @property
    def values(self) -> list[float]:
        """Every timing, in ms."""
        return [ms for one in self.rounds for ms in one]

    @property
    def ms(self) -> float:
        """The median of all timings."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile of all timings."""
        values = self.values
        if len(values) < 2:
            return values[0], values[0]
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return low, high


def take_turns(
    calls: dict[str, Call],
    device: Device,
    seconds: float,
    rounds: int,
    show: Callable[[str], None] = lambda text: None,
    least: int = LEAST,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time every call in each of `rounds` rounds, for about `seconds` and at least `least` times a round.

    One series that is not counted says first how long each call takes. The order changes from round to round, so that
    no row always follows the same neighbour. Returns the timings, and why a call that failed has none.
    """
    counts: dict[str, int] = {}
    timings: dict[str, Timing] = {name: Timing() for name in calls}
    failed: dict[str, str] = {}
    order = random.Random(0)
    for number in range(rounds + 1):
        names = [name for name in calls if name not in failed]
        order.shuffle(names)
        for name in names:
            show(f"round {number} of {rounds}: {name}" if number else f"warming up: {name}")
            try:
                series = device.series(calls[name], counts.get(name, 1))
            except RuntimeError as error:  # out of memory, or a kernel that the device refused
                failed[name] = one_line(error)
                continue
            if number:
                timings[name].add(series)
            else:
                needed = math.ceil(1000 * seconds / max(series.ms[0], 1e-3))
                counts[name] = min(MOST, max(least, needed))
    return {name: timing for name, timing in timings.items() if name not in failed}, failed


def one_line(error: BaseException) -> str:
    """An error as part of a sentence."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
