"""Operands of an instruction as closures over a warp, and the table of the instructions that are modelled.

An instruction is compiled once: its builder returns a function of a warp that executes it for the active lanes. The
opcode with all its modifiers must match a pattern of the table in full; anything else is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from . import machine
from .formats import B1, TYPES, U32, U64, UNSIGNED
from .machine import LANES, Fault, Warp
from .parser import Instruction, Kernel, PtxError

Execute = Callable[[Warp], "str | None"]
Read = Callable[[Warp], np.ndarray]
Write = Callable[[Warp, np.ndarray], None]

_BUILDERS: list[tuple[re.Pattern[str], Callable]] = []
#: What a register holds in lanes that have not written it.
_JUNK = 0xA5A5A5A5A5A5A5A5


def opcode(pattern: str):
    """Register a builder (compiler, instruction, match) -> Execute for all opcodes that match `pattern` in full."""

    def register(builder):
        _BUILDERS.append((re.compile(pattern), builder))
        return builder

    return register


def build(compiler: Compiler, instruction: Instruction) -> Execute:
    """The function that executes `instruction`, its guard included."""
    for pattern, builder in _BUILDERS:
        match = pattern.fullmatch(instruction.opcode)
        if match:
            try:
                execute = builder(compiler, instruction, match)
            except PtxError as error:
                raise PtxError(f"PTX line {instruction.line}: {error}  [{instruction.text}]") from None
            guarded = instruction.guard and not instruction.opcode.startswith("bra")
            return _guard(compiler, instruction, execute) if guarded else execute
    raise PtxError(f"PTX line {instruction.line}: {_unknown(instruction.opcode)}  [{instruction.text}]")


def _unknown(text: str) -> str:
    """Which part of an opcode is not modelled."""
    name, *modifiers = text.split(".")
    patterns = [pattern for pattern, _ in _BUILDERS if re.search(rf"(^|[|(:]){name}\b", pattern.pattern)]
    if not patterns:
        return f"the instruction {text} is not modelled"
    known = {word for pattern in patterns for word in re.findall(r"\w+(?:::\w+)*", pattern.pattern.replace("\\.", " "))}
    for i, modifier in enumerate(modifiers):
        shorter = ".".join([name, *modifiers[:i], *modifiers[i + 1 :]])
        if modifier not in known or any(pattern.fullmatch(shorter) for pattern in patterns):
            return f"the modifier .{modifier} of {text} is not modelled"
    return f"the instruction {text} is not modelled with these modifiers"


def _guard(compiler: Compiler, instruction: Instruction, execute: Execute) -> Execute:
    name, negated = instruction.guard  # type: ignore[misc]
    predicate = compiler.read(instruction, name, B1)

    def guarded(warp):
        active = warp.active()
        lanes = (predicate(warp) ^ negated) & active
        if not lanes.any():
            return None
        if (lanes == active).all():
            return execute(warp)
        outer, warp.mask = warp.mask, lanes
        result = execute(warp)
        warp.mask = outer
        if result == machine.EXIT:
            raise Fault("a return that only some of the lanes take is not modelled")
        return result

    return guarded


class Compiler:
    """Reads and writes of operands, for one kernel with its shared symbols laid out.

    What it builds serves every launch of that layout: parameters, grid and block are looked up when it runs.
    approximation: of `machine.Options`. lanes: of a warp, or of several that run as one (`gang`).
    """

    def __init__(self, kernel: Kernel, symbols: dict[str, int], approximation: int, lanes: int = 32) -> None:
        self.kernel, self.symbols, self.approximation, self.lanes = kernel, symbols, approximation, lanes
        #: ids of the arrays of literal operands; the closures keep them alive.
        self.constants: set[int] = set()

    def read(
        self,
        instruction: Instruction,
        name: str,
        dtype: np.dtype,
        widen: bool = False,
        as_is: bool = False,
        unfilled: bool = False,
    ) -> Read:
        """Closure for a source operand seen as `dtype`. widen: the register may be wider, its low bytes count.
        as_is: the register's own array, whatever its type, so that a copy can be told from a new value. unfilled: it
        may be what a tcgen05.ld has not filled yet (see `copies`).
        """
        found = self.kernel.slot(instruction.scope, name)
        if found is not None:
            slot, kind = found
            size = TYPES[kind].itemsize
            if (kind == "pred") != (dtype == B1) or (size != dtype.itemsize and not (widen and size > dtype.itemsize)):
                raise PtxError(f"the operand {name} is of type {kind}, which does not fit {dtype}")
            return _read_register(slot, name, dtype, size, as_is, unfilled)
        if name.startswith("%"):
            return self._read_special(name, dtype)
        value = self.constant(name)
        if value is None:
            raise PtxError(f"{name} is not an operand that is modelled")
        if dtype == B1:
            constant = np.full(self.lanes, bool(value))
        else:
            constant = np.full(self.lanes, value & (256**dtype.itemsize - 1), UNSIGNED[dtype.itemsize]).view(dtype)
        self.constants.add(id(constant))
        return lambda warp: constant

    def constant(self, name: str) -> int | None:
        """Value of a literal or of a shared symbol's address; None for anything else."""
        if name in self.symbols:
            return self.symbols[name]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", name):
            return int(name[2:], 16)
        if re.fullmatch(r"-?(\d+|0[xX][0-9a-fA-F]+)U?", name):
            return int(name.rstrip("U"), 0)
        return None

    def literal(self, name: str) -> int:
        """A literal operand that must be known when the kernel is compiled."""
        value = self.constant(name)
        if value is None:
            raise PtxError(f"{name} must be a literal")
        return value

    def _read_special(self, name: str, dtype: np.dtype) -> Read:
        found = re.fullmatch(r"%(tid|ntid|ctaid|nctaid)\.([xyz])", name)
        if dtype.itemsize != 4:
            raise PtxError(f"{name} is a 32-bit register")
        axis = "xyz".index(found[2]) if found else 0
        values: dict[str, Callable[[Warp], object]] = {
            "%tid": lambda warp: _thread(warp, warp.cta.cluster.launch.block, axis),
            "%ntid": lambda warp: warp.cta.cluster.launch.block[axis],
            "%ctaid": lambda warp: warp.cta.position[axis],
            "%nctaid": lambda warp: warp.cta.cluster.launch.grid[axis],
            "%laneid": lambda warp: LANES,
            "%warpid": lambda warp: warp.index,
            "%cluster_ctarank": lambda warp: warp.cta.rank,
            "%cluster_nctarank": lambda warp: warp.cta.cluster.size,
        }
        read = values.get(f"%{found[1]}" if found else name)
        if read is None or (found is None and name in ("%tid", "%ntid", "%ctaid", "%nctaid")):
            raise PtxError(f"the special register {name} is not modelled")
        return lambda warp: np.broadcast_to(np.asarray(read(warp), U32), 32).copy().view(dtype)

    def write(self, instruction: Instruction, name: str, extend: str | None = None) -> Write:
        """Closure that stores 32 lanes, of which the active ones count. extend: "u" or "s" lets a register be wider."""
        if name == "_":
            return lambda warp, values: None
        found = self.kernel.slot(instruction.scope, name)
        if found is None:
            raise PtxError(f"{name} is not a destination that is modelled")
        slot, kind = found
        return _write_register(slot, name, TYPES[kind], extend)

    def copies(self, instruction: Instruction, targets: list[str], sources: list[str]) -> Callable[[Warp], None]:
        """To be called after a move, while `warp.loading` holds anything: copies of unfilled registers are unfilled.

        NVVM moves registers between a tcgen05.ld and its wait; ptxas knows what depends on what, and is relied on.
        """
        to, of = (
            [found[0] for name in names if (found := self.kernel.slot(instruction.scope, name)) is not None]
            for names in (targets, sources)
        )

        def note(warp):
            if any(slot in warp.loading for slot in of):
                for slot in to:
                    warp.loading.setdefault(slot, False)

        return note

    def slots(self, instruction: Instruction, names: list[str]) -> list[int]:
        """Register slots of 32-bit operands, for instructions that handle registers themselves."""
        found = []
        for name in names:
            register = self.kernel.slot(instruction.scope, name)
            if register is None or TYPES[register[1]].itemsize != 4:
                raise PtxError(f"{name} must be a 32-bit register")
            found.append(register[0])
        return found

    def address(self, instruction: Instruction, text: str, dtype: np.dtype) -> Read:
        """Closure for `[register+offset]`: U32 for shared addresses, U64 for global ones."""
        found = re.fullmatch(r"\[\s*([^\]+]+?)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        if found is None:
            raise PtxError(f"the address {text} is not modelled")
        base = self.read(instruction, found[1], dtype)
        if found[2] is None:
            return base
        offset = np.array(self.literal(found[2]) & (256**dtype.itemsize - 1), dtype)
        return lambda warp: base(warp) + offset

    def shared_address(self, instruction: Instruction, text: str) -> Read:
        return self.address(instruction, text, U32)

    def global_address(self, instruction: Instruction, text: str) -> Read:
        return self.address(instruction, text, U64)


def _thread(warp: Warp, block: tuple[int, int, int], axis: int) -> np.ndarray:
    """Index along one axis of each lane's thread in its block."""
    x, y, _ = block
    return (warp.index * 32 + LANES) // (1, x, x * y)[axis] % block[axis]


def gather(reads: list[Read], warp: Warp) -> np.ndarray:
    """[len(reads), lanes] of operands of one type."""
    return np.concatenate([read(warp) for read in reads]).reshape(len(reads), -1)


def vector(text: str) -> list[str]:
    """Names in a `{a, b}` operand; a single operand is a list of one."""
    return [name.strip() for name in text[1:-1].split(",")] if text.startswith("{") else [text]


def _read_register(slot: int, name: str, dtype: np.dtype, size: int, as_is: bool, unfilled: bool) -> Read:
    ratio = size // dtype.itemsize if dtype != B1 else 1

    def read(warp):
        value = warp.registers[slot]
        if value is None:
            raise Fault(f"read of the register {name}, which nobody has written")
        if warp.watched:
            _check_read(warp, slot, name)
            if slot in warp.loading and not unfilled:
                raise Fault(f"read of the register {name}, which a tcgen05.ld fills: wait::ld is missing")
        if value.dtype is dtype or as_is:
            return value
        value = value.view(dtype)
        return value if ratio == 1 else value[::ratio]

    return read


def _check_read(warp: Warp, slot: int, name: str) -> None:
    written = warp.partial.get(slot)
    if written is not None and (warp.active() & ~written).any():
        raise Fault(f"read of the register {name} in lanes that have not written it")
    if slot in warp.accumulators:
        raise Fault(f"read of the register {name}, an accumulator of a wgmma that has not been waited for")


def _write_register(slot: int, name: str, dtype: np.dtype, extend: str | None) -> Write:
    junk = np.full(32, _JUNK & (256**dtype.itemsize - 1), UNSIGNED[dtype.itemsize]) if dtype != B1 else None
    size = dtype.itemsize

    def write(warp, values):
        if extend and values.dtype.itemsize != size:
            values = _extend(values, size, extend)
        if warp.watched:
            if slot in warp.accumulators or slot in warp.fragments:
                raise Fault(f"write to the register {name}, an operand of a wgmma that has not been waited for")
            if warp.loading.pop(slot, False):
                raise Fault(f"write to the register {name}, which a tcgen05.ld has not filled yet")
            if warp.mask is None and warp.partial.pop(slot, None) is not None:
                warp.watch()
        if values.dtype.itemsize != size:
            raise Fault(f"{values.dtype} does not fit the register {name}")
        if warp.mask is None:
            warp.registers[slot] = values
            return
        old = warp.registers[slot]
        if old is None:
            warp.partial[slot] = warp.mask | ~warp.live
            old = np.zeros(32, bool) if junk is None else junk
        elif slot in warp.partial:
            warp.partial[slot] = warp.partial[slot] | warp.mask
        if slot in warp.partial and warp.partial[slot].all():
            del warp.partial[slot]
        warp.watch()
        warp.registers[slot] = np.where(warp.mask, values, old.view(values.dtype))

    return write


def _extend(values: np.ndarray, size: int, kind: str) -> np.ndarray:
    narrow = np.dtype(f"{'i' if kind == 's' else 'u'}{values.dtype.itemsize}")
    wide = np.dtype(f"{'i' if kind == 's' else 'u'}{size}")
    if size < values.dtype.itemsize:
        raise Fault(f"{values.dtype} does not fit a register of {size} bytes")
    return values.view(narrow).astype(wide)
