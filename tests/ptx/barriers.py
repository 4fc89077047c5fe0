"""mbarriers with phases and transaction counts, named and cluster barriers, fences, setmaxnreg."""

from __future__ import annotations

import numpy as np

from .formats import B1, U32, U64
from .machine import BLOCKED, EXIT, NO_LANES, SPIN, Fault, Group, Warp
from .operands import opcode
from .parser import PtxError, find_label

_SHARED = r"\.shared(?:::cta)?"


class MBarrier:
    """One mbarrier object. `clock` joins what the arrivals of the present phase release, `done` that of past ones."""

    def __init__(self, address: int, count: int, warp: Warp) -> None:
        self.address, self.count, self.pending = address, count, count
        self.transactions, self.phase = 0, 0
        self.clock = np.zeros_like(warp.clock)
        self.proxy = np.zeros_like(warp.clock)
        self.done, self.done_proxy = self.clock.copy(), self.proxy.copy()
        self.initialiser, self.time = warp.agent, int(warp.clock[warp.agent])
        self.fenced = False  # fence.mbarrier_init has made it visible to the async proxy and the cluster

    def state(self) -> str:
        """Where it stands, in words."""
        return (
            f"mbarrier {self.address:#x} in phase {self.phase}: {self.pending} of {self.count} arrivals pending, "
            f"{self.transactions} bytes expected"
        )

    def arrive(self, count: int, clock, proxy) -> None:
        """`count` arrivals that release what `clock` has seen."""
        if count > self.pending:
            raise Fault(f"more arrivals than its count: {self.state()}")
        self.pending -= count
        self._join(clock, proxy)

    def complete(self, size: int, clock, proxy) -> None:
        """`size` bytes have arrived."""
        self.transactions -= size
        self._join(clock, proxy)

    def _join(self, clock, proxy) -> None:
        self.clock, self.proxy = np.maximum(self.clock, clock), np.maximum(self.proxy, proxy)
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.count
            self.done, self.done_proxy = np.maximum(self.done, self.clock), np.maximum(self.done_proxy, self.proxy)
            self.clock, self.proxy = np.zeros_like(self.clock), np.zeros_like(self.proxy)


def find_barrier(warp: Warp, address: int, cta=None) -> MBarrier:
    """The mbarrier at a shared or shared::cluster address, ordered after its initialisation."""
    if cta is None:
        cta, address = warp.cta.cluster.cta_of(address, warp.cta)
    barrier = cta.barriers.get(address)
    if barrier is None:
        raise Fault(f"there is no initialised mbarrier at {address:#x}")
    if warp.cta.cluster.options.races and barrier.time > warp.clock[barrier.initialiser]:
        raise Fault(f"the mbarrier at {address:#x} is used without being ordered after its initialisation")
    if cta is not warp.cta and not barrier.fenced:
        raise Fault(f"the mbarrier at {address:#x} of another CTA is used without fence.mbarrier_init")
    if cta is not warp.cta:
        cta.touched.append((warp.agent, int(warp.clock[warp.agent])))
    return barrier


@opcode(rf"mbarrier\.init{_SHARED}\.b64")
def initialise(c, i, m):
    address, count = c.shared_address(i, i.operands[0]), c.read(i, i.operands[1], U32)

    def execute(warp):
        where, counts, shared = address(warp), count(warp), warp.cta.shared
        for lane in warp.lanes():
            at = int(where[lane])
            _, granules = shared.locate(np.array([at], np.int64), 8)
            if at in warp.cta.barriers:
                raise Fault(f"the mbarrier at {at:#x} is initialised twice")
            if not 1 <= counts[lane] < 1 << 20:
                raise Fault(f"an mbarrier cannot count {counts[lane]} arrivals")
            shared.check_write(warp.agent, warp.clock[warp.agent], warp.clock, granules, generic=True)
            shared.barrier[granules] = True
            warp.cta.barriers[at] = MBarrier(at, int(counts[lane]), warp)
        warp.cta.cluster.events += 1
        warp.release()

    return execute


@opcode(rf"mbarrier\.arrive(\.expect_tx)?(?:\.release)?(?:\.cta|\.cluster)?(?:{_SHARED}|(\.shared::cluster))\.b64")
def arrive(c, i, m):
    """Arrival, with a count or with the bytes that the phase expects besides. Remote ones return no state."""
    if m[2] and i.operands[0] != "_":
        raise PtxError("an arrival at another CTA's mbarrier has no state to return")
    write, address = c.write(i, i.operands[0]), c.shared_address(i, i.operands[1])
    amount = c.read(i, i.operands[2], U32) if len(i.operands) > 2 else None

    def execute(warp):
        where, amounts, state = address(warp), amount(warp) if amount else None, np.zeros(32, U64)
        for lane in warp.lanes():
            barrier = find_barrier(warp, int(where[lane]))
            state[lane] = barrier.phase
            if m[1]:
                barrier.transactions += int(amounts[lane])
            barrier.arrive(1 if m[1] or amounts is None else int(amounts[lane]), warp.clock, warp.proxy_clock)
        warp.cta.cluster.events += 1
        warp.release()
        write(warp, state)

    return execute


@opcode(rf"mbarrier\.(?:try|test)_wait\.parity(?:\.acquire)?(?:\.cta|\.cluster)?{_SHARED}\.b64")
def wait(c, i, m):
    """Whether the phase of a parity is over. A failed one also yields to the other warps."""
    write, address, parity = (
        c.write(i, i.operands[0]),
        c.shared_address(i, i.operands[1]),
        c.read(i, i.operands[2], U32),
    )

    def execute(warp):
        where, parities, over = address(warp), parity(warp), np.zeros(32, bool)
        missing = None
        lanes = warp.lanes()
        for at, bit in {(int(where[lane]), int(parities[lane])) for lane in lanes}:
            barrier = find_barrier(warp, at)
            if bit > 1:
                raise Fault(f"{bit} is not a parity")
            if barrier.phase & 1 != bit:
                over |= (where == at) & (parities == bit)
                warp.clock = np.maximum(warp.clock, barrier.done)
                warp.proxy_clock = np.maximum(warp.proxy_clock, barrier.done_proxy)
            else:
                missing = f"{barrier.state()}, waited for with parity {bit}"
        write(warp, over)
        warp.waiting = missing
        return SPIN if missing else None

    return execute


class NamedBarrier:
    """Arrivals at one of a CTA's sixteen barriers until it opens."""

    def __init__(self, warp: Warp) -> None:
        self.threads, self.expected = 0, 0
        self.clock, self.proxy = np.zeros_like(warp.clock), np.zeros_like(warp.clock)
        self.waiting: list[Warp] = []


def _live_threads(cta) -> int:
    return sum(int(warp.live.sum()) for warp in cta.warps if not warp.done)


@opcode(r"(?:bar|barrier(?:\.cta)?)\.(sync|arrive)(?:\.aligned)?")
def named_barrier(c, i, m):
    """bar.sync and bar.arrive, with a number of threads or for the whole CTA. A named barrier orders shared memory."""
    which = c.read(i, i.operands[0], U32)
    threads = c.read(i, i.operands[1], U32) if len(i.operands) > 1 else None
    sync = m[1] == "sync"

    def execute(warp):
        warp.require_converged(i.opcode)
        number, cta = int(which(warp)[0]), warp.cta
        if (which(warp) != number).any() or number > 15:
            raise Fault(f"barrier {number} of a CTA, or one that differs between lanes")
        expected = int(threads(warp)[0]) if threads else _live_threads(cta)
        barrier = cta.named.get(number) or NamedBarrier(warp)
        if barrier.threads and barrier.expected != expected:
            raise Fault(f"barrier {number} is awaited for {barrier.expected} and for {expected} threads")
        if expected % 32 or barrier.threads + 32 > expected:
            raise Fault(f"barrier {number} of {expected} threads has {barrier.threads} and 32 more arrive")
        cta.named[number] = barrier
        barrier.expected = expected
        barrier.threads += 32
        barrier.clock = np.maximum(barrier.clock, warp.clock)
        barrier.proxy = np.maximum(barrier.proxy, warp.proxy_clock)
        warp.release()
        cta.cluster.events += 1
        if sync:
            barrier.waiting.append(warp)
        if barrier.threads == expected:
            del cta.named[number]
            for other in barrier.waiting:
                other.clock = np.maximum(other.clock, barrier.clock)
                other.proxy_clock = np.maximum(other.proxy_clock, barrier.proxy)
        if not sync:
            return None
        warp.waiting = f"barrier {number} of {expected} threads"
        warp.ready = lambda: cta.named.get(number) is not barrier
        return BLOCKED

    return execute


class ClusterBarrier:
    """barrier.cluster: phases of all threads of all CTAs."""

    def __init__(self, agents: int) -> None:
        self.arrived, self.phase = 0, 0
        self.clock, self.proxy = np.zeros(agents, np.int32), np.zeros(agents, np.int32)
        self.done, self.done_proxy = self.clock.copy(), self.proxy.copy()


@opcode(r"barrier\.cluster\.(arrive|wait)(\.release|\.relaxed|\.acquire)?(?:\.aligned)?")
def cluster_barrier(c, i, m):
    relaxed = m[2] == ".relaxed"

    def execute(warp):
        warp.require_converged(i.opcode)
        cluster = warp.cta.cluster
        barrier = cluster.barrier = cluster.barrier or ClusterBarrier(cluster.agents)
        if m[1] == "arrive":
            if warp.cluster_arrived:
                raise Fault("a second arrival at the cluster barrier without a wait between")
            warp.cluster_arrived = True
            warp.cluster_phase = barrier.phase
            if not relaxed:
                barrier.clock = np.maximum(barrier.clock, warp.clock)
                barrier.proxy = np.maximum(barrier.proxy, warp.proxy_clock)
            warp.release()
            barrier.arrived += 1
            cluster.events += 1
            if barrier.arrived == cluster.warp_total:
                barrier.arrived = 0
                barrier.phase += 1
                barrier.done = np.maximum(barrier.done, barrier.clock)
                barrier.done_proxy = np.maximum(barrier.done_proxy, barrier.proxy)
            return None
        if not warp.cluster_arrived:
            raise Fault("a wait at the cluster barrier without an arrival")
        phase = warp.cluster_phase

        def ready():
            if barrier.phase == phase:
                return False
            warp.cluster_arrived = False
            warp.clock = np.maximum(warp.clock, barrier.done)
            warp.proxy_clock = np.maximum(warp.proxy_clock, barrier.done_proxy)
            cluster.events += 1
            return True

        warp.waiting, warp.ready = "the cluster barrier", ready
        return BLOCKED

    return execute


@opcode(
    r"fence\.proxy\.async(?:\.shared::cta|\.global)?|fence\.mbarrier_init\.release\.cluster"
    r"|fence\.(?:acq_rel|sc)\.(?:cta|gpu|cluster)|membar\.(?:cta|gl)"
)
def fence(c, i, m):
    """A proxy fence lets the async proxy see this thread's earlier writes; fence.mbarrier_init its barriers. Others
    only strengthen an order that the race detector wants from barriers."""

    def execute(warp):
        if i.opcode.startswith("fence.proxy.async") and "global" not in i.opcode:
            warp.proxy_clock = np.maximum(warp.proxy_clock, warp.clock)
            warp.release()
        elif "mbarrier_init" in i.opcode:
            for barrier in warp.cta.barriers.values():
                barrier.fenced = barrier.fenced or barrier.initialiser == warp.agent

    return execute


@opcode(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def set_registers(c, i, m):
    """Registers of a warpgroup's threads: given back to the CTA, or taken, which waits until there are enough."""
    count = c.literal(i.operands[0])
    if count % 8 or not 24 <= count <= 256:
        raise PtxError(f"{count} is not a number of registers that setmaxnreg takes")

    def execute(warp):
        warp.require_converged(i.opcode)
        cta, more = warp.cta, (count - warp.register_count) * 32
        if (more > 0) != (m[1] == "inc") and more:
            raise Fault(f"setmaxnreg.{m[1]} from {warp.register_count} to {count} registers")

        def ready():
            if cta.spare_registers < more:
                return False
            cta.spare_registers -= more
            warp.register_count = count
            cta.cluster.events += 1
            return True

        if ready():
            return None
        warp.waiting, warp.ready = f"{more} more registers, of which the CTA has {cta.spare_registers}", ready
        return BLOCKED

    return execute


@opcode(r"griddepcontrol\.(?:wait|launch_dependents)|nanosleep\.u32")
def nothing(c, i, m):
    """Launch order and sleeping are not modelled: a launch here begins after the one before has ended."""
    return lambda warp: None


@opcode(r"bra(?:\.uni)?")
def branch(c, i, m):
    """Lanes that part go on one group at a time, the one with the lowest address first, and meet there again."""
    target = find_label(i, i.operands[0])
    if i.guard is None:

        def jump(warp):
            warp.pc = target

        return jump
    predicate, negated = c.read(i, i.guard[0], B1), i.guard[1]

    def execute(warp):
        active = warp.active()
        taken = (predicate(warp) ^ negated) & active
        if not taken.any():
            return
        if (taken == active).all():
            warp.pc = target
        elif m[0] == "bra.uni":
            raise Fault("bra.uni parts the lanes of its warp")
        else:
            warp.groups.append(Group(target, taken))
            warp.mask = active & ~taken

    return execute


@opcode(r"ret|exit")
def leave(c, i, m):
    def execute(warp):
        warp.live = warp.live & ~warp.active()
        warp.cta.cluster.events += 1
        if warp.groups:
            warp.mask, warp.pc = NO_LANES, 1 << 30
            return None
        warp.done = True
        return EXIT

    return execute
