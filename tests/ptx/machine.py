"""What exists while a kernel runs: warps with their registers and lanes, CTAs with their memory, and their cluster.

Time is kept by vector clocks, one entry for each agent of the cluster that can touch memory:

    warps                 0 .. W-1          their ordinary accesses
    warps' MMAs           W .. 2 W-1        accesses by wgmma or tcgen05.mma in flight, counted in committed groups
    copies in flight      2 W .. 2 W+SLOTS  a bulk copy or cp.async group; slots are used again, with a higher count
    warps' tcgen05.ld     2 W+SLOTS ...     reads of tensor memory, counted in tcgen05.wait::ld
    warps' tcgen05.st     3 W+SLOTS ...     writes of tensor memory, counted in tcgen05.wait::st

An access of agent a at its time t happened before an event whose clock c has c[a] >= t. Barriers join clocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .memory import GlobalMemory, SharedMemory
from .parser import Kernel, PtxError

LANES = np.arange(32, dtype=np.uint32)
NO_LANES = np.zeros(32, bool)
#: Copies in flight whose order the race detector can tell apart.
SLOTS = 512
#: Each CTA of a cluster has a window of this size in the shared::cluster addresses; window 0 is one's own.
WINDOW_BITS = 24
SHARED_BASE = 1024

#: What an instruction may return: the warp has ended; it failed a try_wait and yields; it is blocked.
EXIT, SPIN, BLOCKED = "exit", "spin", "blocked"


class Fault(PtxError):  # noqa: N818 - a fault, as hardware has them
    """Something that silicon would do wrongly or not report. The message names PTX line, warp and instruction."""


@dataclass
class Group:
    """Lanes of a warp that are elsewhere in the program."""

    pc: int
    mask: np.ndarray
    spun: bool = False


class Warp:
    """32 lanes with one program counter while they are together. `mask` None means all lanes."""

    def __init__(self, cta: Cta, index: int, live: np.ndarray, slots: int, agents: int) -> None:
        self.cta, self.index = cta, index
        self.agent = cta.rank * cta.warp_count + index
        self.registers: list[np.ndarray | None] = [None] * slots
        #: slot -> lanes that have written it, for registers that only some lanes have written
        self.partial: dict[int, np.ndarray] = {}
        #: slot -> number of the wgmma group that has it: accumulators in flight, and A fragments (may be read)
        self.accumulators: dict[int, int] = {}
        self.fragments: dict[int, int] = {}
        #: slots that a tcgen05.ld has not filled yet: its own destinations (True) and copies of them (False)
        self.loading: dict[int, bool] = {}
        self.watched = False  # whether any of these dictionaries holds something
        self.pc, self.live = 0, live.copy()
        self.mask: np.ndarray | None = None if live.all() else live.copy()
        self.groups: list[Group] = []
        self.clock = np.zeros(agents, np.int32)
        self.clock[self.agent] = 1
        #: Like `clock`, for ordinary writes that have passed a proxy fence: what the async proxy may read.
        self.proxy_clock = np.zeros(agents, np.int32)
        self.done = False
        # Whether the warp waits for others at the start of a stretch (`gang`), and the start of one it must run alone.
        self.parked, self.alone = False, -1
        self.steps = 0
        self.waiting: str | None = None  # what a failed try_wait or a block waits for, in words
        self.ready: Callable[[], bool] | None = None  # asked again before a blocked warp runs on
        self.register_count = 0
        # wgmma: groups committed, whether the open group holds anything, registers at the last fence, MMAs issued
        self.committed, self.open_group, self.issued = 0, False, 0
        self.fenced: list[np.ndarray | None] = []
        # tcgen05: what its asynchronous operations are ordered after, which takes a fence besides what `clock` has
        # heard; waits for ld and for st so far; the group and lane of the last MMA
        self.tensor_clock = np.zeros(agents, np.int32)
        self.waits = {"ld": 0, "st": 0}
        self.open_waits = {"ld": False, "st": False}
        self.last_mma, self.mma_lane = 0, 0
        # cp.async: the open group and the committed ones that have not been waited for
        self.copy_group: list[Callable[[], None]] = []
        self.copy_groups: list[list[Callable[[], None]]] = []
        self.cluster_arrived = False

    def active(self) -> np.ndarray:
        """Lanes that execute the present instruction."""
        return self.live if self.mask is None else self.mask

    def lanes(self) -> list[int]:
        """Numbers of the active lanes."""
        return [int(i) for i in np.flatnonzero(self.active())]

    def watch(self) -> None:
        """To be called after any change of `partial`, `accumulators`, `fragments` or `loading`."""
        self.watched = bool(self.partial or self.accumulators or self.fragments or self.loading)

    def release(self) -> None:
        """What follows is later than what has been released to others."""
        self.clock[self.agent] += 1

    def tensor_agent(self, kind: str) -> int:
        """Agent of this warp's "mma", "ld" or "st"."""
        cluster = self.cta.cluster
        row = {"mma": 1, "ld": 2, "st": 3}[kind]
        return row * cluster.warp_total + (SLOTS if row > 1 else 0) + self.agent

    def require_converged(self, what: str) -> None:
        """Fault unless all lanes are here."""
        if self.mask is not None:
            here = ", ".join(str(i) for i in self.lanes())
            raise Fault(f"{what} needs the whole warp, but only lanes {here} are here")


@dataclass
class Copy:
    """A piece of an asynchronous copy, or the arrival of a tcgen05.commit, that has not come yet."""

    deliver: Callable[[], None]
    text: str
    is_commit: bool = False


class Cta:
    """One thread block: its shared memory, mbarriers, named barriers and registers to spare."""

    def __init__(self, cluster: Cluster, rank: int, position: tuple[int, int, int], threads: int) -> None:
        self.cluster, self.rank, self.position = cluster, rank, position
        self.warp_count = (threads + 31) // 32
        self.shared: SharedMemory
        self.barriers: dict[int, object] = {}
        self.named: dict[int, object] = {}
        self.warps: list[Warp] = []
        self.spare_registers = 0
        #: (warpgroup, number of the MMA) -> what its first warp issued, which the others must repeat
        self.collective: dict[tuple[int, int], tuple] = {}
        #: (agent, time) of what other CTAs did to this one, which must happen before its last warp leaves
        self.touched: list[tuple[int, int]] = []
        #: operands of MMAs decoded since shared memory last changed
        self.decoded: dict[tuple, np.ndarray] = {}
        #: its tensor memory, a `tmem.TensorMemory`, from the first allocation on
        self.tensor_memory: Any = None


class Cluster:
    """CTAs that run together. A launch runs its clusters one after another."""

    def __init__(self, number: int, size: int, warps_of_cta: int, memory: GlobalMemory, options: Options) -> None:
        self.number, self.size, self.memory, self.options = number, size, memory, options
        self.ctas: list[Cta] = []
        self.warp_total = size * warps_of_cta
        self.agents = 4 * self.warp_total + SLOTS
        self.pending: list[Copy] = []
        self.copies = 0
        self.events = 0  # anything that another warp could be waiting for
        self.barrier = None
        self.launch: Launch
        self.constants: set[int] = set()  # ids of the arrays that literal operands are

    def copy_slot(self) -> tuple[int, int]:
        """Agent and time of a new copy."""
        if len(self.pending) >= SLOTS:
            raise Fault(f"more than {SLOTS} copies are in flight")
        number = self.copies
        self.copies += 1
        return 2 * self.warp_total + number % SLOTS, number // SLOTS + 1

    def cta_of(self, address: int, own: Cta) -> tuple[Cta, int]:
        """The CTA that a shared::cluster address points into, and the address within it."""
        window, local = address >> WINDOW_BITS, address & ((1 << WINDOW_BITS) - 1)
        if window == 0:
            return own, local
        if window > self.size:
            raise Fault(f"the address {address:#x} lies in no CTA of the cluster")
        return self.ctas[window - 1], local


@dataclass
class Options:
    """How a launch runs.

    schedule: "orderly" (each warp runs until it must wait, copies arrive last), "eager" (copies arrive at once) or
    "random" (slices, copies and their pieces in an order drawn from `seed`). races: whether accesses are checked.
    approximation: units in the last place by which ex2.approx and rcp.approx err, always the same way.
    fp8_fraction_bits: fraction bits that the sums of FP8 wgmma keep (`wgmma.truncated_sum`), None for exact sums.
    """

    schedule: str = "orderly"
    seed: int = 0
    races: bool = True
    approximation: int = 0
    fp8_fraction_bits: int | None = None
    max_steps: int = 50_000_000
    random: random.Random = field(default_factory=random.Random)


@dataclass
class Launch:
    """Grid, block and parameter values (unsigned integers) of a launch."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: dict[str, int]
