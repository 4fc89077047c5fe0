"""Which warp runs when and when copies arrive; deadlocks; what must be over when a kernel ends."""

from __future__ import annotations

import numpy as np

from .barriers import MBarrier
from .gang import Stretches
from .machine import BLOCKED, EXIT, NO_LANES, SPIN, Cluster, Fault, Group, Warp
from .operands import Execute
from .parser import Kernel, PtxError

_LONG_SLICE = 100_000


def run_cluster(cluster: Cluster, kernel: Kernel, program: list[Execute], stretches: Stretches) -> int:
    """Run all warps of `cluster` to their end; returns the number of warp instructions."""
    options, warps = cluster.options, [warp for cta in cluster.ctas for warp in cta.warps]
    shuffled = options.schedule == "random"
    idle = 0
    while live := [warp for warp in warps if not warp.done]:
        before = cluster.events
        if shuffled:
            options.random.shuffle(live)
        for warp in live:
            if warp.parked:
                continue
            if warp.ready is not None:
                if not warp.ready():
                    continue
                warp.ready = warp.waiting = None
            _slice(warp, kernel, program, stretches, options.random.randint(1, 400) if shuffled else _LONG_SLICE)
            if options.schedule == "eager":
                while cluster.pending:
                    cluster.pending.pop(0).deliver()
            elif shuffled and cluster.pending and options.random.random() < 0.3:
                cluster.pending.pop(options.random.randrange(len(cluster.pending))).deliver()
        # Random schedules also let warps of a stretch go on that others could still have joined.
        patient = not shuffled or (stretches.some and options.random.random() < 0.5)
        joined = [stretches.run(cta, patient) for cta in cluster.ctas]
        if cluster.events != before or any(joined):
            idle = 0
        elif all(warp.waiting for warp in warps if not warp.done):
            idle += 1
            if idle > 1 and cluster.pending:
                number = options.random.randrange(len(cluster.pending)) if shuffled else 0
                cluster.pending.pop(number).deliver()
                idle = 0
            elif idle > 2:
                raise Fault(_deadlock(warps, kernel))
        if sum(warp.steps for warp in warps) > options.max_steps:
            raise Fault(f"more than {options.max_steps} instructions")
    _check_end(cluster)
    return sum(warp.steps for warp in warps)


def _slice(warp: Warp, kernel: Kernel, program: list[Execute], stretches: Stretches, budget: int) -> None:
    """Run `warp` until it yields, blocks, ends or waits for others to join it, at most `budget` instructions."""
    warp.waiting = None
    for group in warp.groups:
        group.spun = False
    steps, starts = 0, stretches.at
    try:
        while steps < budget:
            if warp.groups and not _choose(warp):
                break
            at = warp.pc
            if starts[at] is not None and warp.mask is None and not (warp.groups or warp.watched):
                if warp.alone != at:
                    warp.parked = True
                    break
                warp.alone = -1
            warp.pc = at + 1
            steps += 1
            result = program[at](warp)
            if result is None:
                continue
            if result == SPIN:
                if not warp.groups:
                    break
                # Other lanes may go on meanwhile.
                warp.groups.append(Group(warp.pc, warp.active().copy(), spun=True))
                warp.mask = NO_LANES
            elif result in (BLOCKED, EXIT):
                break
    except PtxError as error:
        place = kernel.program[at]
        raise Fault(f"PTX line {place.line}, {_name(warp)}: {error}  [{place.text}]") from None
    finally:
        warp.steps += steps


def _choose(warp: Warp) -> bool:
    """Let the lanes with the lowest program counter run, joined with all that are at the same place. False if every
    group has just failed a wait."""
    groups = warp.groups
    if warp.mask is None or warp.mask.any():
        groups.append(Group(warp.pc, warp.active()))
    runnable = [group for group in groups if not group.spun]
    if not runnable:
        last = groups.pop()
        warp.pc, warp.mask = last.pc, last.mask
        return False
    warp.pc = min(group.pc for group in runnable)
    together = [group for group in runnable if group.pc == warp.pc]
    warp.groups = [group for group in groups if group.spun or group.pc != warp.pc]
    mask = np.logical_or.reduce([group.mask for group in together])
    warp.mask = None if mask.all() else mask
    return True


def _name(warp: Warp) -> str:
    cta = warp.cta
    rank = f", rank {cta.rank} of its cluster" if cta.cluster.size > 1 else ""
    return f"warp {warp.index} of block {cta.position}{rank}"


def _deadlock(warps: list[Warp], kernel: Kernel) -> str:
    lines = []
    for warp in warps:
        if not warp.done:
            line = kernel.program[warp.pc - 1].line if warp.pc <= len(kernel.program) else "?"
            lines.append(f"{_name(warp)}, PTX line {line}, waits for {warp.waiting}")
    return "DEADLOCK: " + "; ".join(lines)


def _check_end(cluster: Cluster) -> None:
    # Nobody waits for some commits, as a later one of the same MMAs' thread is enough.
    for signal in [copy for copy in cluster.pending if copy.is_commit]:
        cluster.pending.remove(signal)
        signal.deliver()
    if cluster.pending:
        copy = cluster.pending[0]
        raise Fault(f"the kernel ends with {len(cluster.pending)} copies in flight, the first of {copy.text}")
    for cta in cluster.ctas:
        left = np.maximum.reduce([warp.clock for warp in cta.warps])
        if cluster.options.races and any(time > left[agent] for agent, time in cta.touched):
            raise Fault(f"the block of rank {cta.rank} may have left before another one used its shared memory")
        for barrier in cta.barriers.values():
            assert isinstance(barrier, MBarrier)
            if barrier.transactions:
                raise Fault(f"the kernel ends with bytes outstanding: {barrier.state()}")
        for number in cta.named:
            raise Fault(f"the kernel ends with arrivals at the named barrier {number} that nobody collected")
        for warp in cta.warps:
            if warp.accumulators:
                raise Fault(f"{_name(warp)} ends with a wgmma that has not been waited for")
            if warp.last_mma > left[warp.tensor_agent("mma")]:
                raise Fault(f"{_name(warp)} ends with a tcgen05.mma that nobody has waited for")
            for kind, open_wait in warp.open_waits.items():
                if open_wait:
                    raise Fault(f"{_name(warp)} ends with a tcgen05.{kind} that has not been waited for")
            if warp.copy_group or warp.copy_groups:
                raise Fault(f"{_name(warp)} ends with a cp.async that has not been waited for")
        if cta.tensor_memory is not None and cta.tensor_memory.allocations:
            raise Fault(f"the block of rank {cta.rank} ends with tensor memory that it has not freed")
