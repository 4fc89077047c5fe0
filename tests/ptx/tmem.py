"""Tensor memory: allocation, tcgen05.ld and .st, their waits, and the fences between tcgen05 and the threads' barriers.

A CTA sees 128 lanes of 512 columns of 32 bits, addressed as lane << 16 | column. What happens to it is asynchronous,
except for allocation: loads and stores are over when their warp has waited for them, MMAs when an mbarrier that a
tcgen05.commit arrives at has been waited for. Two clocks of a warp say who may rely on that. `clock` is what barriers
hand on; tcgen05.fence::before_thread_sync puts the warp's own finished loads and stores into it. `tensor_clock` is what
the warp's next asynchronous tcgen05 operation is ordered after; tcgen05.fence::after_thread_sync puts into it what
`clock` has heard. Waits act on the warp's own `tensor_clock` at once. A load or store that lacks one of these is
therefore a race, in every schedule.
"""

from __future__ import annotations

import numpy as np

from .formats import U32
from .machine import BLOCKED, Fault
from .memory import MemoryFault
from .operands import opcode, vector
from .parser import PtxError

LANES, COLUMNS = 128, 512
#: Lanes that the race detector tells apart: what one warp of each four may touch.
QUARTER = 32
_EVERY_QUARTER = slice(0, LANES // QUARTER)


class TensorMemory:
    """Tensor memory of one CTA: its words [lane, column], who owns which columns, and who touched what last."""

    def __init__(self, cta) -> None:
        self.races = cta.cluster.options.races
        self.words = np.zeros((LANES, COLUMNS), U32)
        shape = (LANES // QUARTER, COLUMNS)
        self.written = np.zeros(shape, bool)
        self.writer, self.writer_time = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
        readers = [warp.tensor_agent(kind) for kind in ("mma", "ld") for warp in cta.warps]
        self.readers = np.array(readers)
        self._row = {agent: row for row, agent in enumerate(readers)}
        self.reader_time = np.zeros((len(readers), *shape), np.int32)
        #: first column -> number of columns
        self.allocations: dict[int, int] = {}
        self.free = np.ones(COLUMNS, bool)
        self.relinquished = False

    def place(self, count: int, cluster) -> int | None:
        """A place for `count` columns: the first that is free, or with a random schedule any."""
        places = [at for at in range(0, COLUMNS, count) if self.free[at : at + count].all()]
        if not places:
            return None
        return cluster.options.random.choice(places) if cluster.options.schedule == "random" else places[0]

    def columns(self, first: int, count: int, what: str) -> slice:
        """Columns first ... of one allocation."""
        for at, size in self.allocations.items():
            if at <= first < at + size:
                if first + count > at + size:
                    break
                return slice(first, first + count)
        owned = ", ".join(f"{at}..{at + size - 1}" for at, size in sorted(self.allocations.items())) or "none"
        raise MemoryFault(f"{what} columns {first}..{first + count - 1} of tensor memory; allocated: {owned}")

    def check_read(self, agent: int, time: int, clock: np.ndarray, quarters: slice, columns: slice) -> None:
        """Note a read by `agent`, and fault on what it may not see yet. clock: what the reader is ordered after."""
        if not self.written[quarters, columns].all():
            raise MemoryFault(f"read of tensor memory that nobody has written, in columns {_span(columns)}")
        self._check_writer(clock, quarters, columns, "read")
        self.reader_time[self._row[agent], quarters, columns] = time

    def check_write(self, agent: int, time: int, clock: np.ndarray, quarters: slice, columns: slice) -> None:
        """Note a write by `agent`, and fault on accesses that it is not ordered after."""
        self._check_writer(clock, quarters, columns, "write")
        self.check_readers(clock, quarters, columns, "write")
        self.writer[quarters, columns], self.writer_time[quarters, columns] = agent, time
        self.written[quarters, columns] = True

    def _check_writer(self, clock, quarters, columns, what: str) -> None:
        writers = self.writer[quarters, columns]
        late = (writers >= 0) & (self.writer_time[quarters, columns] > clock[writers])
        if self.races and late.any():
            raise MemoryFault(
                f"DATA RACE: {what} of tensor memory, columns {_span(columns)}, is not ordered after its last write: "
                "commit or wait::st, fences and barrier"
            )

    def check_readers(self, clock, quarters, columns, what: str) -> None:
        """Fault unless all reads of these places are over for one who has seen `clock`."""
        if self.races and (self.reader_time[:, quarters, columns] > clock[self.readers][:, None, None]).any():
            raise MemoryFault(
                f"DATA RACE: {what} of tensor memory, columns {_span(columns)}, is not ordered after a read: commit or "
                "wait::ld, fences and barrier"
            )

    def release(self, columns: slice, clock: np.ndarray) -> None:
        """Forget what freed columns held; everything that touched them must be over."""
        self._check_writer(clock, _EVERY_QUARTER, columns, "deallocation")
        self.check_readers(clock, _EVERY_QUARTER, columns, "deallocation")
        self.written[:, columns], self.writer[:, columns] = False, -1
        self.reader_time[:, :, columns] = 0


def _span(columns: slice) -> str:
    return f"{columns.start}..{columns.stop - 1}"


def tensor_memory(warp) -> TensorMemory:
    """The tensor memory of a warp's CTA, which has allocated some."""
    if warp.cta.tensor_memory is None:
        raise Fault("there is no allocated tensor memory")
    return warp.cta.tensor_memory


def split(address: int) -> tuple[int, int]:
    """Lane and column of an address."""
    return address >> 16, address & 0xFFFF


def _uniform(values: np.ndarray, what: str) -> int:
    if (values != values[0]).any():
        raise Fault(f"{what} differs between the lanes of the warp")
    return int(values[0])


@opcode(r"tcgen05\.alloc\.cta_group::1\.sync\.aligned(?:\.shared::cta)?\.b32")
def allocate(c, i, m):
    """Columns for this CTA, whose address goes to shared memory. Waits until there are enough."""
    target, count = c.shared_address(i, i.operands[0]), c.read(i, i.operands[1], U32)

    def execute(warp):
        warp.require_converged(i.opcode)
        cta, shared = warp.cta, warp.cta.shared
        columns, place = _uniform(count(warp), "the number of columns"), _uniform(target(warp), "the address")
        if columns & (columns - 1) or not 32 <= columns <= COLUMNS:
            raise Fault(f"{columns} columns: an allocation has a power of two of them, from 32 to {COLUMNS}")
        memory = cta.tensor_memory = cta.tensor_memory or TensorMemory(cta)
        if memory.relinquished:
            raise Fault("an allocation after relinquish_alloc_permit")
        index, granules = shared.locate(np.array([place], np.int64), 4)

        def ready():
            first = memory.place(columns, cta.cluster)
            if first is None:
                return False
            memory.allocations[first] = columns
            memory.free[first : first + columns] = False
            shared.check_write(warp.agent, warp.clock[warp.agent], warp.clock, granules, generic=True)
            shared.data[index] = np.array([[first]], U32).view(np.uint8)
            cta.decoded.clear()
            cta.cluster.events += 1
            return True

        if ready():
            return None
        warp.waiting, warp.ready = f"{columns} free columns of tensor memory", ready
        return BLOCKED

    return execute


@opcode(r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32")
def deallocate(c, i, m):
    address, count = c.read(i, i.operands[0], U32), c.read(i, i.operands[1], U32)

    def execute(warp):
        warp.require_converged(i.opcode)
        memory = tensor_memory(warp)
        lane, first = split(_uniform(address(warp), "the address"))
        columns = _uniform(count(warp), "the number of columns")
        if lane or memory.allocations.get(first) != columns:
            raise Fault(f"{columns} columns from {lane}, {first} on are freed, which is no allocation")
        # It is synchronous: what its warp has heard counts without a fence.
        memory.release(slice(first, first + columns), np.maximum(warp.clock, warp.tensor_clock))
        del memory.allocations[first]
        memory.free[first : first + columns] = True
        warp.cta.cluster.events += 1

    return execute


@opcode(r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned")
def relinquish(c, i, m):
    def execute(warp):
        warp.require_converged(i.opcode)
        tensor_memory(warp).relinquished = True

    return execute


def _own_lanes(warp, address: int, count: int, what: str) -> tuple[slice, slice, slice]:
    """Lanes, quarter and columns of an access of all 32 lanes of `warp`."""
    lane, first = split(address)
    own = QUARTER * (warp.index % 4)
    if lane != own:
        raise Fault(f"{what} lanes {lane}..{lane + 31} by warp {warp.index}, which may only touch {own}..{own + 31}")
    columns = tensor_memory(warp).columns(first, count, what)
    return slice(own, own + QUARTER), slice(own // QUARTER, own // QUARTER + 1), columns


@opcode(r"tcgen05\.ld\.sync\.aligned\.32x32b\.(x1|x2|x4|x8|x16|x32|x64|x128)\.b32")
def load(c, i, m):
    """Lane n of the warp gets columns of lane n of its quarter. The registers are filled once they are waited for."""
    count = int(m[1][1:])
    names = vector(i.operands[0])
    slots = c.slots(i, names)
    if len(slots) != count:
        raise PtxError(f"{count} destinations are needed")
    address = c.address(i, i.operands[1], U32)

    def execute(warp):
        warp.require_converged(i.opcode)
        where = _uniform(address(warp), "the address of a tcgen05.ld")
        lanes, quarter, columns = _own_lanes(warp, where, count, "a load from")
        memory, agent = tensor_memory(warp), warp.tensor_agent("ld")
        memory.check_read(agent, warp.waits["ld"] + 1, warp.tensor_clock, quarter, columns)
        values = np.ascontiguousarray(memory.words[lanes, columns].T)
        for slot, name, value in zip(slots, names, values, strict=True):
            if slot in warp.accumulators or slot in warp.fragments or warp.loading.get(slot):
                raise Fault(f"write to the register {name}, which an operation in flight uses")
            warp.registers[slot] = value
            warp.partial.pop(slot, None)
            warp.loading[slot] = True
        warp.open_waits["ld"] = True
        warp.watched = True

    return execute


@opcode(r"tcgen05\.st\.sync\.aligned\.32x32b\.(x1|x2|x4|x8|x16|x32|x64|x128)\.b32")
def store(c, i, m):
    """The inverse of tcgen05.ld."""
    count = int(m[1][1:])
    address = c.address(i, i.operands[0], U32)
    reads = [c.read(i, name, U32) for name in vector(i.operands[1])]
    if len(reads) != count:
        raise PtxError(f"{count} sources are needed")

    def execute(warp):
        warp.require_converged(i.opcode)
        where = _uniform(address(warp), "the address of a tcgen05.st")
        lanes, quarter, columns = _own_lanes(warp, where, count, "a store to")
        memory, agent = tensor_memory(warp), warp.tensor_agent("st")
        values = np.stack([read(warp) for read in reads], 1)
        memory.check_write(agent, warp.waits["st"] + 1, warp.tensor_clock, quarter, columns)
        memory.words[lanes, columns] = values
        warp.open_waits["st"] = True

    return execute


@opcode(r"tcgen05\.wait::(ld|st)\.sync\.aligned")
def await_own(c, i, m):
    """All loads or stores of this warp are over, for itself; others need fences and a barrier besides."""
    kind = m[1]

    def execute(warp):
        warp.require_converged(i.opcode)
        warp.waits[kind] += 1
        warp.open_waits[kind] = False
        warp.tensor_clock[warp.tensor_agent(kind)] = warp.waits[kind]
        if kind == "ld":
            warp.loading.clear()
            warp.watch()

    return execute


@opcode(r"tcgen05\.fence::(before|after)_thread_sync")
def fence(c, i, m):
    def execute(warp):
        if m[1] == "before":
            warp.clock = np.maximum(warp.clock, warp.tensor_clock)
        else:
            warp.tensor_clock = np.maximum(warp.tensor_clock, warp.clock)

    return execute
