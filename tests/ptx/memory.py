"""Global and shared memory with bounds, alignment, unwritten reads and races; addresses are what the kernel sees.

Races: for each granule of memory the last writer and the last time of each reader (shared) or the last reader (global)
are kept; an access that a conflicting one did not happen before is a race, whatever the schedule was. Ordinary writes
that leave the bytes as they are do not conflict with each other: our kernels let two warps compute the same table.
"""

from __future__ import annotations

import bisect

import numpy as np

from .parser import PtxError

#: Readers of a byte of global memory: none yet in this launch, or clusters more than one.
_NONE, _SEVERAL = -1, -2


class MemoryFault(PtxError):  # noqa: N818 - a fault, as hardware has them
    """An access that silicon would get wrong silently."""


def differing_stores(addresses: np.ndarray, values: np.ndarray) -> bool:
    """Whether lanes of one instruction store different `values` [n, size] to one of `addresses` [n]."""
    if (np.diff(addresses) > 0).all():
        return False
    _, first, inverse = np.unique(addresses, return_index=True, return_inverse=True)
    return bool((values != values[first][inverse]).any())


class Buffer:
    """One allocation of global memory: the bytes of `array`, in place.

    written: whether its bytes count as initialised (True, False, or a bool for each byte). writable: whether the kernel
    may store to it.
    """

    def __init__(self, array: np.ndarray, name: str, written: bool | np.ndarray = True, writable: bool = True) -> None:
        if not array.flags.c_contiguous:
            raise ValueError(f"the buffer {name} is not contiguous")
        self.name, self.writable = name, writable
        self.data = array.reshape(-1).view(np.uint8)
        if not array.size:
            self.data = np.zeros(0, np.uint8)
        self.written = np.full(self.data.size, written) if isinstance(written, bool) else written
        self.base = 0
        #: Whether a kernel may read bytes that nobody has written; it must then not use them.
        self.junk_allowed = False
        self.forget_accesses()

    def forget_accesses(self) -> None:
        """A new launch: everything before it is ordered."""
        size = self.data.size if self.writable else 0
        self.writer = np.full(size, -1, np.int32)  # agent; -1: nobody in this launch
        self.writer_time = np.zeros(size, np.int32)
        self.writer_cluster = np.full(size, -1, np.int32)
        #: Pairs of (what the last write that was not atomic left, the last write of any kind).
        self.plain = [(x.copy(), x) for x in (self.writer, self.writer_time, self.writer_cluster)]
        self.reader = np.full(size, -1, np.int32)
        self.reader_time = np.zeros(size, np.int32)
        self.reader_cluster = np.full(size, _NONE, np.int32)


class GlobalMemory:
    """Buffers at made-up addresses, with unmapped room between them."""

    def __init__(self, races: bool = True) -> None:
        self.buffers: list[Buffer] = []
        self.races = races
        self._bases: list[int] = []
        self._next = 0x7F0000000000

    def map(self, buffer: Buffer) -> int:
        """Give `buffer` an address, a multiple of 512."""
        buffer.base = self._next
        self.buffers.append(buffer)
        self._bases.append(buffer.base)
        self._next = (buffer.base + buffer.data.size + 4096 + 511) // 512 * 512
        return buffer.base

    def find(self, addresses: np.ndarray, size: int) -> tuple[Buffer, np.ndarray]:
        """The buffer that holds `size` bytes at each of `addresses` (uint64), and their offsets in it."""
        low, high = int(addresses.min()), int(addresses.max())
        index = bisect.bisect_right(self._bases, low) - 1
        buffer = self.buffers[index] if index >= 0 else None
        if buffer is None or high + size > buffer.base + buffer.data.size:
            near = f"; the nearest buffer is {buffer.name}, {buffer.base:#x}+{buffer.data.size}" if buffer else ""
            raise MemoryFault(f"global access out of bounds at {low:#x}..{high + size:#x}{near}")
        return buffer, (addresses - np.uint64(buffer.base)).astype(np.int64)

    def locate(self, addresses: np.ndarray, size: int) -> tuple[Buffer, np.ndarray]:
        """`find`, and byte indices [lanes, size]; addresses must be multiples of `size`."""
        odd = addresses % np.uint64(size)
        if odd.any():
            raise MemoryFault(f"misaligned {size}-byte global access at {int(addresses[odd != 0][0]):#x}")
        buffer, offsets = self.find(addresses, size)
        return buffer, offsets[:, None] + np.arange(size)

    def read(self, warp, buffer: Buffer, index: np.ndarray) -> np.ndarray:
        """Bytes at `index`, checked."""
        if not buffer.junk_allowed and not buffer.written[index].all():
            where = int(index[~buffer.written[index]].min())
            raise MemoryFault(f"read of global memory that nobody has written: {buffer.name}, byte {where}")
        if buffer.writable and self.races:
            self._check_writer(warp, buffer, index, "read")
            buffer.reader[index] = warp.agent
            buffer.reader_time[index] = warp.clock[warp.agent]
            known = buffer.reader_cluster[index]
            own = warp.cta.cluster.number
            buffer.reader_cluster[index] = np.where((known == _NONE) | (known == own), own, _SEVERAL)
        return buffer.data[index]

    def write(self, warp, buffer: Buffer, index: np.ndarray, values: np.ndarray, atomic: bool = False) -> None:
        """Store bytes `values` at `index`, checked. Lanes of one instruction must not collide unless `atomic`."""
        if not buffer.writable:
            raise MemoryFault(f"store to the read-only buffer {buffer.name}")
        if not atomic and differing_stores(index[:, 0], values):
            raise MemoryFault(f"two lanes store different values to the same address of {buffer.name}")
        if self.races:
            self._check_writer(warp, buffer, index, "write", atomic, None if atomic else values)
            cluster, agents = buffer.reader_cluster[index], buffer.reader[index]
            foreign = (cluster != _NONE) & (cluster != warp.cta.cluster.number)
            late = (cluster == warp.cta.cluster.number) & (buffer.reader_time[index] > warp.clock[agents])
            if (foreign | late).any():
                raise MemoryFault(f"DATA RACE: write to {buffer.name} is not ordered after a read of another warp")
            buffer.writer[index] = warp.agent
            buffer.writer_time[index] = warp.clock[warp.agent]
            buffer.writer_cluster[index] = warp.cta.cluster.number
            if not atomic:
                for kept, last in buffer.plain:
                    kept[index] = last[index]
        buffer.data[index] = values
        buffer.written[index] = True

    def _check_writer(self, warp, buffer: Buffer, index: np.ndarray, what: str, atomic=False, values=None) -> None:
        # Atomic accesses need an order only against the last one that was not.
        agents, times, clusters = (pair[0 if atomic else 1][index] for pair in buffer.plain)
        foreign = (clusters >= 0) & (clusters != warp.cta.cluster.number)
        late = (clusters == warp.cta.cluster.number) & (times > warp.clock[agents])
        bad = foreign | late
        if values is not None and bad.any():
            bad &= values != buffer.data[index]
        if bad.any():
            where = int(index[bad].min())
            raise MemoryFault(f"DATA RACE: {what} of {buffer.name}, byte {where}, is not ordered after another write")


class SharedMemory:
    """Shared memory of one CTA, addressed from `base`.

    granule: bytes that the race detector tells apart. readers: agents that may read, as entries of the clocks.
    """

    def __init__(self, base: int, size: int, granule: int, readers: list[int], races: bool) -> None:
        self.base, self.size, self.races = base, size, races
        self.data = np.zeros((size + 15) // 16 * 16, np.uint8)
        self.shift = granule.bit_length() - 1
        granules = (size >> self.shift) + 1
        self.writer = np.full(granules, -1, np.int16)
        self.writer_time = np.zeros(granules, np.int32)
        #: Whether the last write was an ordinary one, which the async proxy sees only after a proxy fence.
        self.generic = np.zeros(granules, bool)
        self.plain_writer, self.plain_time = self.writer.copy(), self.writer_time.copy()
        self.readers = np.array(readers)
        self._row = {agent: row for row, agent in enumerate(readers)}
        self.reader_time = np.zeros((len(readers), granules), np.int32)
        #: Granules that hold an mbarrier object.
        self.barrier = np.zeros(granules, bool)

    def locate(self, addresses: np.ndarray, size: int, alignment: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Byte indices [n, size] and granules of accesses of `size` bytes at `addresses` (int64)."""
        odd = addresses % (alignment or size)
        if odd.any():
            raise MemoryFault(f"misaligned {size}-byte shared access at {int(addresses[odd != 0][0]):#x}")
        if addresses.min() < self.base or addresses.max() + size > self.base + self.size:
            raise MemoryFault(
                f"shared access out of bounds at {int(addresses.min()):#x}..{int(addresses.max()) + size:#x}; the CTA "
                f"has {self.base:#x}..{self.base + self.size:#x}"
            )
        start = addresses - self.base
        granules = (start[:, None] >> self.shift) + np.arange(max(size >> self.shift, 1))
        return start[:, None] + np.arange(size), granules.ravel()

    def check_read(self, agent: int, time: int, clock: np.ndarray, granules, proxy_clock=None) -> None:
        """Note a read of `granules` by `agent`, and fault on what it may not see yet.

        clock: of the reading warp. proxy_clock: given when the async proxy reads.
        """
        writers = self.writer[granules]
        if writers.min() < 0:
            raise MemoryFault(f"read of shared memory that nobody has written, at {self._at(granules, writers < 0)}")
        if self.barrier[granules].any():
            raise MemoryFault(f"ordinary read of the mbarrier at {self._at(granules, self.barrier[granules])}")
        if not self.races:
            return
        times = self.writer_time[granules]
        late = times > clock[writers]
        if late.any():
            raise MemoryFault(
                f"DATA RACE: read of shared memory at {self._at(granules, late)} is not ordered after its write"
            )
        if proxy_clock is not None:
            unfenced = self.generic[granules] & (times > proxy_clock[writers])
            if unfenced.any():
                raise MemoryFault(
                    f"fence.proxy.async is missing between an ordinary write at {self._at(granules, unfenced)} and its "
                    "read by the async proxy"
                )
        self.reader_time[self._row[agent], granules] = time

    def check_write(
        self, agent: int, time: int, clock: np.ndarray, granules, generic: bool, atomic=False, change=None
    ) -> None:
        """Note a write of `granules` by `agent` and fault on accesses that it is not ordered after.

        change: byte indices and values of an ordinary write, [n, size] each, to see whether it changes anything.
        """
        if self.barrier[granules].any():
            raise MemoryFault(f"write over the mbarrier at {self._at(granules, self.barrier[granules])}")
        if self.races:
            # Atomic accesses need an order only against the last one that was not.
            last, times = (self.plain_writer, self.plain_time) if atomic else (self.writer, self.writer_time)
            writers = last[granules]
            late = (writers >= 0) & (times[granules] > clock[writers])
            if change is not None and late.any():
                index, values = change
                same = (self.data[index] == values).reshape(len(granules), -1).all(1)
                late &= ~(same & self.generic[granules])
            if late.any():
                raise MemoryFault(
                    f"DATA RACE: write to shared memory at {self._at(granules, late)} is not ordered after an earlier "
                    "write"
                )
            reads = self.reader_time[:, granules] > clock[self.readers][:, None]
            if reads.any():
                raise MemoryFault(
                    f"DATA RACE: write to shared memory at {self._at(granules, reads.any(0))} is not ordered after its "
                    "read"
                )
        self.writer[granules] = agent
        self.writer_time[granules] = time
        self.generic[granules] = generic
        if not atomic:
            self.plain_writer[granules], self.plain_time[granules] = agent, time

    def _at(self, granules, where) -> str:
        return hex(int(np.asarray(granules)[where][0]) * (1 << self.shift) + self.base)
