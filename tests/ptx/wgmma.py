"""wgmma: asynchronous warpgroup MMAs with operands in swizzled shared memory, and the hazards of their registers.

A product is computed when it is issued. What silicon would make of touching its operands too early is a fault instead:
accumulators may not be read or written, A registers not written, before wait_group; ordinary writes to either need
wgmma.fence before the MMA; and its reads of shared memory last until wait_group, for the race detector.
"""

from __future__ import annotations

import numpy as np

from . import k_major
from .formats import B1, F32, S32, U64
from .machine import Fault
from .mma import ELEMENTS, a_matrix, accumulate, c_matrix, c_registers, require_same
from .operands import opcode, vector
from .parser import PtxError

#: Swizzle field of a descriptor -> bytes of a swizzled row.
_WIDTHS = {0: 0, 1: 128, 2: 64, 3: 32}

_SHAPES = r"m64n(\d+)k(\d+)"
_INTEGER = rf"wgmma\.mma_async\.sync\.aligned\.{_SHAPES}(\.satfinite)?\.s32\.(s8)\.s8"
_FLOAT = rf"wgmma\.mma_async\.sync\.aligned\.{_SHAPES}()\.f32\.(e4m3|bf16|f16)\.(?:e4m3|bf16|f16)"


def operand_addresses(descriptor: int, rows: int) -> np.ndarray:
    """Shared addresses [rows, 32] of a K-major operand whose rows have 32 bytes (one K step), from its descriptor.

    Bits 0..13 start address / 16, 16..29 leading and 32..45 stride byte offset / 16, 49..51 base offset, 62..63
    swizzle: 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes. The swizzle XORs address bits 7... into bits 4...
    """
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise Fault("a base offset in a wgmma descriptor is not modelled")
    return k_major.addresses(start, leading, stride, _WIDTHS[descriptor >> 62 & 3], rows)


def _fetch(warp, descriptor: int, rows: int, first: int, count: int, element: str) -> np.ndarray:
    """Rows first .. first + count of an operand, float64 [count, K], with the read noted."""
    addresses = operand_addresses(descriptor, rows)[first : first + count]
    cta = warp.cta
    if addresses.min() < cta.shared.base or addresses.max() >= cta.shared.base + cta.shared.size:
        raise Fault(f"a wgmma operand lies out of bounds: {int(addresses.min()):#x}..{int(addresses.max()):#x}")
    index = addresses - cta.shared.base
    granules = (index[:, ::4] >> cta.shared.shift if cta.shared.shift else index).ravel()
    agent = cta.cluster.warp_total + warp.agent
    cta.shared.check_read(agent, warp.committed + 1, warp.clock, granules, warp.proxy_clock)
    key = (descriptor, rows, first, count, element)
    if key not in cta.decoded:
        cta.decoded[key] = ELEMENTS[element][1](np.ascontiguousarray(cta.shared.data[index]).view(np.uint32))
    return cta.decoded[key]


def truncated_sum(left: np.ndarray, right: np.ndarray, addend: np.ndarray, bits: int) -> np.ndarray:
    """addend + left right^T as Hopper's FP8 tensor cores form it: fp32 [M, N].

    left [M, K], right [N, K]: E4M3 values, float64; addend: fp32 [M, N]. The addend and all K products are cut, towards
    zero, to `bits` fraction bits of the largest exponent among them (a product's is the sum of its factors'), added
    exactly, and the sum is cut to `bits` fraction bits of its own. Found from outputs of an H200, of whose bits this
    gives all but one in ten thousand (NOTES.md); NVIDIA documents none of it.
    """
    products = left[:, None, :] * right[None, :, :]
    largest = (_exponents(left)[:, None, :] + _exponents(right)[None, :, :]).max(-1)
    unit = _unit(np.maximum(largest, _exponents(addend)), bits)
    total = (np.trunc(products / unit[..., None]).sum(-1) + np.trunc(addend / unit)) * unit
    unit = _unit(_exponents(total), bits)
    return (np.trunc(total / unit) * unit).astype(np.float32)


def _exponents(x: np.ndarray) -> np.ndarray:
    """floor(log2 |x|), far below all others where x is 0."""
    return np.where(x == 0, -1000, np.frexp(x)[1] - 1)


def _unit(exponents: np.ndarray, bits: int) -> np.ndarray:
    """What the last of `bits` fraction bits is worth."""
    return np.ldexp(1.0, np.maximum(exponents, -500) - bits)


def _uniform(read, warp, what):
    value = read(warp)
    if (value != value[0]).any():
        raise Fault(f"{what} differs between the lanes of a wgmma")
    return int(value[0])


def _check(operands: list[str], floats: bool, from_registers: bool, element: str) -> None:
    """The immediates after the scale predicate: negations +1, transposes (16-bit types only) 0."""
    expected = ["1", "1"] if floats else []
    if floats and element in ("bf16", "f16"):
        expected += ["0"] if from_registers else ["0", "0"]
    if operands != expected:
        raise PtxError(f"the immediates {', '.join(operands)} of a wgmma are not modelled")


@opcode(rf"{_INTEGER}|{_FLOAT}")
def multiply(c, i, m):
    columns, k, saturate, element = (m[1], m[2], m[3], m[4]) if m[1] else (m[5], m[6], "", m[8])
    columns, k, floats = int(columns), int(k), m[1] is None
    if k != 8 * ELEMENTS[element][0] or columns % 8 or not 8 <= columns <= 256 or not i.opcode.endswith(element):
        raise PtxError(f"wgmma has no shape m64n{columns}k{k} of {element}")
    names = vector(i.operands[0])
    if len(names) != columns // 2:
        raise PtxError(f"{len(names)} accumulators; {columns // 2} are needed")
    accumulators = c.slots(i, names)
    kind = F32 if floats else S32
    from_registers = i.operands[1].startswith("{")
    a_names = vector(i.operands[1]) if from_registers else []
    fragments = c.slots(i, a_names)
    if from_registers and len(fragments) != 4:
        raise PtxError("an A operand has 4 registers")
    a_descriptor = None if from_registers else c.read(i, i.operands[1], U64)
    b_descriptor, scale = c.read(i, i.operands[2], U64), c.read(i, i.operands[3], B1)
    _check(i.operands[4:], floats, from_registers, element)

    def execute(warp):
        warp.require_converged("wgmma")
        accumulated = bool(_uniform(scale, warp, "scale-d"))
        b = _uniform(b_descriptor, warp, "the descriptor of B")
        a = None if from_registers else _uniform(a_descriptor, warp, "the descriptor of A")
        _collective(warp, (i.line, a, b, accumulated))
        _require_fence(warp, accumulators, names)
        _require_fence(warp, fragments, a_names)
        right = _fetch(warp, b, columns, 0, columns, element)
        if from_registers:
            left = a_matrix(np.stack([_value(warp, slot) for slot in fragments]), element)
        else:
            left = _fetch(warp, a, 64, 16 * (warp.index % 4), 16, element)
        if accumulated:
            addend = c_matrix(np.stack([_value(warp, slot).view(kind) for slot in accumulators]))
        else:
            addend = np.zeros((16, columns), kind)
        bits = warp.cta.cluster.options.fp8_fraction_bits
        if bits is None or element != "e4m3":
            total = accumulate(left @ right.T, addend, "f32" if floats else "s32", bool(saturate))
        else:
            total = truncated_sum(left, right, addend, bits)
        result = c_registers(total)
        group = warp.committed + 1
        for slot, values in zip(accumulators, result, strict=True):
            warp.registers[slot] = values
            warp.fenced[slot] = values
            warp.accumulators[slot] = group
        for slot in fragments:
            warp.fragments[slot] = group
        warp.open_group = True
        warp.watch()

    return execute


def _value(warp, slot):
    value = warp.registers[slot]
    if value is None or slot in warp.partial:
        raise Fault("a wgmma reads a register that nobody has written")
    return value.view(np.uint32) if value.dtype != np.uint32 else value


def _require_fence(warp, slots, names):
    """Registers must be as the last fence saw them, or as an earlier wgmma left them.

    Copies and literals are let through: NVVM sinks them below the fence, and ptxas, which puts the fence of silicon
    (WARPGROUP.ARRIVE) where its own registers want it, is relied on there. Values computed after the fence are not.
    """
    if not warp.fenced:
        raise Fault("a wgmma without a wgmma.fence before it")
    seen: set[int] | None = None
    for slot, name in zip(slots, names, strict=True):
        value = warp.registers[slot]
        if value is warp.fenced[slot]:
            continue
        seen = seen or {id(old) for old in warp.fenced}  # the list keeps them alive, so that no id is used again
        if id(value) not in seen and id(value) not in warp.cta.cluster.constants:
            raise Fault(f"the register {name} was computed after the last wgmma.fence")


def _collective(warp, what):
    """All four warps of a warpgroup must issue the same MMAs in the same order."""
    key = (warp.index // 4, warp.issued)
    warp.issued += 1
    require_same(warp.cta.collective.setdefault(key, what), what, "line, descriptors and scale of a wgmma")


@opcode(r"wgmma\.fence\.sync\.aligned")
def fence(c, i, m):
    def execute(warp):
        warp.require_converged(i.opcode)
        warp.fenced = list(warp.registers)

    return execute


@opcode(r"wgmma\.commit_group\.sync\.aligned")
def commit(c, i, m):
    def execute(warp):
        warp.require_converged(i.opcode)
        warp.committed += 1
        warp.open_group = False

    return execute


@opcode(r"wgmma\.wait_group\.sync\.aligned")
def await_groups(c, i, m):
    """All but the last n committed groups are over: their registers and shared memory are free again."""
    keep = c.literal(i.operands[0])

    def execute(warp):
        warp.require_converged(i.opcode)
        over = warp.committed - keep
        warp.accumulators = {slot: n for slot, n in warp.accumulators.items() if n > over}
        warp.fragments = {slot: n for slot, n in warp.fragments.items() if n > over}
        warp.watch()
        agent = warp.cta.cluster.warp_total + warp.agent
        warp.clock[agent] = max(int(warp.clock[agent]), over)

    return execute
