"""Asynchronous copies from global to shared memory: cp.async.bulk with its mbarrier, multicast, and cp.async.

The bytes of a copy in flight are poisoned at once, so that nobody can be lucky, and arrive when the schedule says so.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .barriers import find_barrier
from .formats import U16, U32
from .machine import Copy, Fault
from .operands import opcode
from .parser import PtxError

_POISON = 0x5A


@opcode(
    r"cp\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes(\.multicast::cluster)?"
    r"(\.L2::cache_hint)?"
)
def bulk(c, i, m):
    """One copy of consecutive bytes for each active lane; with multicast to the same place in each CTA of a mask."""
    target, source = c.shared_address(i, i.operands[0]), c.global_address(i, i.operands[1])
    size, barrier = c.read(i, i.operands[2], U32), c.shared_address(i, i.operands[3])
    mask = c.read(i, i.operands[4], U16) if m[1] else None
    if len(i.operands) != 4 + bool(m[1]) + bool(m[2]):
        raise PtxError("the number of operands of this bulk copy is not modelled")

    def execute(warp):
        cluster = warp.cta.cluster
        targets, sources, sizes, barriers = target(warp), source(warp), size(warp), barrier(warp)
        for lane in warp.lanes():
            count, address = int(sizes[lane]), int(sources[lane])
            own, place = cluster.cta_of(int(targets[lane]), warp.cta)
            holder, signal = cluster.cta_of(int(barriers[lane]), warp.cta)
            if place % 16 or address % 16 or count % 16 or not count:
                raise Fault(f"bulk copy of {count} bytes from {address:#x} to {place:#x}: all must be multiples of 16")
            buffer, index = cluster.memory.find(np.array([address], np.uint64), count)
            # Reading at issue and not at arrival: global memory that changes between the two is a race, and found.
            data = cluster.memory.read(warp, buffer, int(index[0]) + np.arange(count)).copy()
            if mask is None:
                if holder is not own:
                    raise Fault("a bulk copy and its mbarrier lie in different CTAs")
                receivers = [own]
            else:
                bits = int(mask(warp)[lane])
                if bits >> cluster.size or not bits:
                    raise Fault(f"the multicast mask {bits:#b} does not fit a cluster of {cluster.size}")
                receivers = [cta for cta in cluster.ctas if bits >> cta.rank & 1]
            for cta in receivers:
                _start(warp, cta, place, data, find_barrier(warp, signal, cta), i)
        cluster.events += 1
        warp.release()

    return execute


def _start(warp, cta, place, data, barrier, instruction):
    """Begin a copy of `data` to `place` of `cta`, in pieces if the schedule is random."""
    cluster, shared = warp.cta.cluster, cta.shared
    if not barrier.fenced:
        raise Fault(f"the mbarrier at {barrier.address:#x} is given to the async proxy without fence.mbarrier_init")
    index, granules = shared.locate(np.array([place], np.int64), data.size, alignment=16)
    agent, time = cluster.copy_slot()
    shared.check_write(agent, time, warp.clock, granules, generic=False)
    if cta is not warp.cta:
        cta.touched.append((agent, time))
    shared.data[index[0]] = _POISON
    cta.decoded.clear()
    clock = warp.clock.copy()
    clock[agent] = time
    proxy = warp.proxy_clock.copy()
    options = cluster.options
    pieces = options.random.randint(1, 3) if options.schedule == "random" and data.size >= 64 else 1
    cuts = [data.size * n // pieces // 16 * 16 for n in range(pieces)] + [data.size]
    for start, end in pairwise(cuts):

        def deliver(start=start, end=end):
            shared.data[index[0][start:end]] = data[start:end]
            cta.decoded.clear()
            barrier.complete(end - start, clock, proxy)
            cluster.events += 1

        cluster.pending.append(Copy(deliver, f"PTX line {instruction.line}  [{instruction.text}]"))


@opcode(r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global(?:\.L2::(?:64|128|256)B)?")
def small(c, i, m):
    """4, 8 or 16 bytes for each lane, the tail beyond a source size filled with zeros. Arrives when waited for."""
    target, source = c.shared_address(i, i.operands[0]), c.global_address(i, i.operands[1])
    size = c.literal(i.operands[2])
    if size not in ((4, 8, 16) if m[1] == "ca" else (16,)):
        raise PtxError(f"cp.async.{m[1]} does not copy {size} bytes")
    filled = c.read(i, i.operands[3], U32) if len(i.operands) > 3 else None

    def execute(warp):
        active = warp.active()
        cluster, shared = warp.cta.cluster, warp.cta.shared
        index, granules = shared.locate(target(warp)[active].astype(np.int64), size)
        lengths = filled(warp)[active].astype(np.int64) if filled else np.full(len(index), size)
        data = np.zeros((len(index), size), np.uint8)
        addresses = source(warp)[active]
        if (lengths > size).any() or (addresses % np.uint64(size)).any():
            raise Fault(f"cp.async of more than {size} bytes or from an address that is no multiple of them")
        for length in np.unique(lengths[lengths > 0]):
            rows = lengths == length
            buffer, start = cluster.memory.find(addresses[rows], int(length))
            data[rows, :length] = cluster.memory.read(warp, buffer, start[:, None] + np.arange(length))
        agent, time = cluster.copy_slot()
        shared.check_write(agent, time, warp.clock, granules, generic=True)
        shared.data[index] = _POISON
        warp.cta.decoded.clear()

        def deliver():
            shared.data[index] = data
            warp.cta.decoded.clear()
            warp.clock[agent] = max(warp.clock[agent], time)

        warp.copy_group.append(deliver)
        warp.release()

    return execute


@opcode(r"cp\.async\.commit_group")
def commit(c, i, m):
    def execute(warp):
        warp.copy_groups.append(warp.copy_group)
        warp.copy_group = []

    return execute


@opcode(r"cp\.async\.(wait_group|wait_all)")
def await_groups(c, i, m):
    """All but the last n committed groups have arrived, for this warp's lanes; the others need a barrier."""
    keep = c.literal(i.operands[0]) if m[1] == "wait_group" else 0

    def execute(warp):
        if m[1] == "wait_all":
            warp.copy_groups.append(warp.copy_group)
            warp.copy_group = []
        over = warp.copy_groups[: len(warp.copy_groups) - keep] if keep else warp.copy_groups
        warp.copy_groups = warp.copy_groups[len(over) :]
        for deliver in (deliver for group in over for deliver in group):
            deliver()

    return execute
