"""Launch compiled PTX on the CPU: `load` a kernel once, `launch` it on numpy arrays."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

import numpy as np

from . import (  # noqa: F401 - they fill the table
    access,
    arithmetic,
    barriers,
    convert,
    copies,
    lanes,
    mma,
    packed,
    tcgen05,
    tmem,
    wgmma,
)
from .contraction import contract
from .gang import Stretches
from .machine import SHARED_BASE, Cluster, Cta, Launch, Options, Warp
from .memory import Buffer, GlobalMemory, SharedMemory
from .operands import Compiler, Execute, build
from .parser import Kernel, PtxError, parse
from .scheduler import run_cluster

#: Registers and threads of an SM of every architecture that is modelled.
_REGISTERS = 65536


@dataclass(frozen=True)
class Report:
    """What a launch did. instructions: of warps. unwritten: names of output buffers with bytes nobody has written."""

    instructions: int
    contracted: int
    unwritten: list[str]


class Loaded:
    """A parsed kernel, whose launches share the parse."""

    def __init__(self, text: str, name: str | None = None, fmad: bool = True) -> None:
        self.kernel: Kernel = parse(text, name)
        self.contracted = contract(self.kernel) if fmad else 0
        #: Built programs and the ids of their literals, by what they depend on.
        self._programs: dict[tuple, tuple[list[Execute], set[int], Stretches]] = {}

    def launch(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...] | None,
        params: list,
        shared_bytes: int = 0,
        cluster: int = 1,
        schedule: str = "orderly",
        seed: int = 0,
        races: bool = True,
        approximation: int = 0,
        memory: GlobalMemory | None = None,
        fp8_fraction_bits: int | None = None,
    ) -> Report:
        """Run the kernel; raises PtxError on anything that is wrong.

        grid, block: up to three sizes; block None takes the kernel's own. params: in the order of the signature; a
        numpy array or a `Buffer` is passed as its address, None as a null pointer, int and float as numbers.
        shared_bytes: dynamic shared memory. cluster: CTAs along x that run together. schedule, seed, races,
        approximation, fp8_fraction_bits: `machine.Options`. memory: global memory whose buffers integer params may
        point into.
        """
        if schedule not in ("orderly", "eager", "random"):
            raise ValueError(f"there is no schedule {schedule!r}")
        grid3, block3 = _three(grid), _three(block or self.kernel.block or ())
        if self.kernel.block not in (None, block3):
            raise PtxError(f"the kernel requires a block of {self.kernel.block}, not {block3}")
        if grid3[0] % cluster:
            raise PtxError(f"{grid3[0]} blocks are not whole clusters of {cluster}")
        options = Options(schedule, seed, races, approximation, fp8_fraction_bits, random=random.Random(seed))
        memory = memory or GlobalMemory()
        memory.races = races
        values = [self._parameter(memory, value, index) for index, value in enumerate(params)]
        if len(values) != len(self.kernel.parameters):
            raise PtxError(f"{len(values)} parameters; the kernel has {len(self.kernel.parameters)}")
        names = [name for name, _ in self.kernel.parameters]
        launch = Launch(self.kernel, grid3, block3, dict(zip(names, values, strict=True)))
        symbols, end = self._layout(shared_bytes)
        program, constants, stretches = self._program(symbols, approximation)
        for buffer in memory.buffers:
            buffer.forget_accesses()
        steps = 0
        with np.errstate(all="ignore"):
            for number, position in enumerate(_positions(grid3, cluster)):
                group = self._cluster(number, position, cluster, memory, launch, options, end)
                group.launch, group.constants = launch, constants
                steps += run_cluster(group, self.kernel, program, stretches)
        unwritten = [buffer.name for buffer in memory.buffers if not buffer.written.all()]
        return Report(steps, self.contracted, unwritten)

    def _program(self, symbols: dict[str, int], approximation: int) -> tuple[list[Execute], set[int], Stretches]:
        key = (*symbols.items(), approximation)
        if key not in self._programs:
            compiler = Compiler(self.kernel, symbols, approximation)
            program = [build(compiler, instruction) for instruction in self.kernel.program]
            stretches = Stretches(self.kernel, symbols, approximation)
            self._programs[key] = (program, compiler.constants, stretches)
        return self._programs[key]

    def _parameter(self, memory: GlobalMemory, value, index: int) -> int:
        if index >= len(self.kernel.parameters):
            raise PtxError(f"there are more parameters than the kernel's {len(self.kernel.parameters)}")
        if value is None:
            return 0
        if isinstance(value, np.ndarray):
            value = Buffer(value, f"parameter {index}")
        if isinstance(value, Buffer):
            return memory.map(value)
        if isinstance(value, float):
            return struct.unpack("<I", struct.pack("<f", value))[0]
        return int(value) & (1 << 64) - 1

    def _layout(self, shared_bytes: int) -> tuple[dict[str, int], int]:
        """Addresses of the shared symbols, the dynamic one last, and where they end."""
        at, symbols = SHARED_BASE, {}
        for name, (alignment, size, extern) in sorted(self.kernel.shared.items(), key=lambda item: item[1][2]):
            at = (at + alignment - 1) // alignment * alignment
            symbols[name] = at
            at += shared_bytes if extern else size
        return symbols, at

    def _cluster(self, number, position, size, memory, launch, options, end) -> Cluster:
        threads = int(np.prod(launch.block))
        warps = (threads + 31) // 32
        cluster = Cluster(number, size, warps, memory, options)
        granule = 1 if any(_sub_word(i.opcode) for i in self.kernel.program) else 4
        # What the compiler may use at this block size and occupancy; setmaxnreg moves it between warps.
        registers = min(_REGISTERS // (threads * self.kernel.blocks_per_sm) // 8 * 8, 256)
        for rank in range(size):
            x, y, z = position
            cta = Cta(cluster, rank, (x + rank, y, z), threads)
            first = rank * warps
            readers = [
                *range(first, first + warps),
                *range(cluster.warp_total + first, cluster.warp_total + first + warps),
            ]
            cta.shared = SharedMemory(SHARED_BASE, end - SHARED_BASE, granule, readers, options.races)
            for index in range(warps):
                live = index * 32 + np.arange(32) < threads
                warp = Warp(cta, index, live, self.kernel.slots, cluster.agents)
                warp.register_count = registers
                cta.warps.append(warp)
            cluster.ctas.append(cta)
        return cluster


def launch(
    ptx_text: str,
    kernel_name: str | None,
    grid: tuple[int, ...],
    block: tuple[int, ...] | None,
    params: list,
    shared_bytes: int = 0,
    cluster: int = 1,
    **options,
) -> Report:
    """`Loaded.launch` of a kernel that is run once."""
    return Loaded(ptx_text, kernel_name).launch(grid, block, params, shared_bytes, cluster, **options)


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z


def _positions(grid: tuple[int, int, int], cluster: int):
    return [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(0, grid[0], cluster)]


def _sub_word(opcode: str) -> bool:
    return opcode.startswith(("ld.shared", "st.shared")) and opcode.endswith(("8", "16"))
