"""Stretches of a program that touch registers alone, executed for several warps of a CTA at once.

Such a stretch has no effect that another warp could see, so it does not matter when a warp runs it: warps that stand at
its start wait there for the others of their CTA and then run it as one warp of many lanes. A fault in it is found again
by each warp alone, so that its message names the warp. Kernels with wgmma run without: its checks follow single arrays.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .contraction import label_positions
from .machine import Cta, Warp
from .operands import Compiler, Execute, build
from .parser import Instruction, Kernel, PtxError

#: Shorter ones cost more than they bring.
_SHORTEST = 8
_PURE = re.compile(
    r"(mov|add|sub|mul|mad|fma|max|min|neg|abs|and|or|xor|not|shl|shr|bfe|setp|selp|prmt|cvt|ex2|rcp|lg2)\..*|"
    r"div\.rn\.f32|shfl\.sync\.\w+\.b32|mma\.sync\.aligned\.m16n8k(?:16|32|64)\..*\.(?:f32|s32|ue4m3)"
)
_NAME = re.compile(r"[%\w$.]+")


@dataclass(frozen=True)
class Stretch:
    """Program positions start ... end - 1. reads: slots that it needs. writes: those that others need of it."""

    start: int
    end: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Gang:
    """What the builders' closures see of several warps: registers of all their lanes, all of which are active."""

    mask = None
    watched = False
    #: A warp with registers that a tcgen05.ld has not filled yet runs alone.
    loading: ClassVar[dict[int, bool]] = {}

    def __init__(self, slots: int) -> None:
        self.registers: list[np.ndarray | None] = [None] * slots

    def require_converged(self, what: str) -> None:
        """Every lane is here."""


class Stretches:
    """The stretches of a kernel by their start, and their programs for each number of warps."""

    def __init__(self, kernel: Kernel, symbols: dict[str, int], approximation: int) -> None:
        self.kernel = kernel
        self._compiler = (kernel, symbols, approximation)
        self._programs: dict[tuple[int, int], list[Execute]] = {}
        #: For each position of the program the stretch that starts there, or None.
        self.at: list[Stretch | None] = [None] * (len(kernel.program) + 1)
        if not any(instruction.opcode.startswith("wgmma") for instruction in kernel.program):
            for stretch in _find(kernel, Compiler(kernel, symbols, approximation)):
                self.at[stretch.start] = stretch
        #: Whether there are any.
        self.some = any(self.at)

    def run(self, cta: Cta, patient: bool) -> bool:
        """Run what warps of `cta` wait for; whether any did. patient: only when no other warp could still join."""
        parked = [warp for warp in cta.warps if warp.parked]
        if not parked or (patient and any(not (w.parked or w.done or w.ready or w.waiting) for w in cta.warps)):
            return False
        together: dict[int, list[Warp]] = defaultdict(list)
        for warp in parked:
            warp.parked = False
            together[warp.pc].append(warp)
        for start, warps in together.items():
            stretch = self.at[start]
            assert stretch is not None
            if len(warps) == 1 or not self._run(stretch, warps):
                for warp in warps:
                    warp.alone = start
        return True

    def _run(self, stretch: Stretch, warps: list[Warp]) -> bool:
        gang = Gang(self.kernel.slots)
        for slot in stretch.reads:
            parts = [warp.registers[slot] for warp in warps]
            if any(part is None for part in parts):
                return False
            kind = parts[0].dtype
            gang.registers[slot] = np.concatenate([p if p.dtype is kind else p.view(kind) for p in parts])
        try:
            for execute in self._program(stretch, len(warps)):
                execute(gang)  # type: ignore[arg-type]
        except PtxError:
            return False
        for slot in stretch.writes:
            values = gang.registers[slot]
            for n, warp in enumerate(warps):
                warp.registers[slot] = values[32 * n : 32 * n + 32]
        for warp in warps:
            warp.pc = stretch.end
            warp.steps += stretch.end - stretch.start
        return True

    def _program(self, stretch: Stretch, warps: int) -> list[Execute]:
        key = (stretch.start, warps)
        if key not in self._programs:
            compiler = Compiler(*self._compiler, lanes=32 * warps)
            instructions = self.kernel.program[stretch.start : stretch.end]
            self._programs[key] = [build(compiler, instruction) for instruction in instructions]
        return self._programs[key]


def _find(kernel: Kernel, compiler: Compiler) -> list[Stretch]:
    labels = label_positions(kernel)
    pure = [_is_pure(kernel, compiler, instruction) for instruction in kernel.program]
    bounds, start = [], None
    for position in range(len(kernel.program) + 1):
        inside = position < len(kernel.program) and pure[position]
        if start is not None and (not inside or position in labels):
            bounds.append((start, position))
            start = None
        if inside and start is None:
            start = position
    bounds = [(a, b) for a, b in bounds if b - a >= _SHORTEST]
    home = {position: n for n, (a, b) in enumerate(bounds) for position in range(a, b)}
    uses = [_slots(kernel, instruction) for instruction in kernel.program]
    #: Stretches that read a slot; None is every instruction outside of them.
    readers: dict[int, set[int | None]] = defaultdict(set)
    for position, (reads, _) in enumerate(uses):
        for slot in reads:
            readers[slot].add(home.get(position))
    found = []
    for n, (a, b) in enumerate(bounds):
        needed, written = set(), set()
        for reads, writes in uses[a:b]:
            needed |= reads - written
            written |= writes
        wanted = {slot for slot in written if readers[slot] - {n} or slot in needed}
        found.append(Stretch(a, b, tuple(sorted(needed)), tuple(sorted(wanted))))
    return found


def _is_pure(kernel: Kernel, compiler: Compiler, instruction: Instruction) -> bool:
    if instruction.guard or not _PURE.fullmatch(instruction.opcode):
        return False
    if instruction.opcode.startswith("shfl"):
        return "|" not in instruction.operands[0] and None not in map(compiler.constant, instruction.operands[2:5])
    # Special registers differ between warps.
    names = [name for text in instruction.operands for name in _NAME.findall(text) if name.startswith("%")]
    return all(kernel.slot(instruction.scope, name) is not None for name in names)


def _slots(kernel: Kernel, instruction: Instruction) -> tuple[set[int], set[int]]:
    """Slots that an instruction reads and that it writes. Unless it is pure, all that it names count as both."""
    named = []
    for text in instruction.operands:
        slots = (kernel.slot(instruction.scope, name) for name in _NAME.findall(text))
        named.append({found[0] for found in slots if found is not None})
    guard = kernel.slot(instruction.scope, instruction.guard[0]) if instruction.guard else None
    if guard is None and _PURE.fullmatch(instruction.opcode):
        return set().union(*named[1:]), named[0]
    every = set().union(*named, {guard[0]} if guard else set())
    return every, every
