"""tcgen05.mma and tcgen05.commit: MMAs that one thread issues, with D (and A) in tensor memory and B in shared memory.

A product is computed when it is issued, and counts as in flight until an mbarrier has been waited for at which a later
tcgen05.commit of the same thread arrives; what touches its operands or its result before is a race. The MMAs of a
thread execute in the order of issue: PTX promises that for the same accumulator and shape, and here it is taken to hold
for all, as on silicon's one pipe. An MMA (one K step of 32 bytes) sums exactly and rounds once when D is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import k_major
from .barriers import find_barrier
from .formats import B1, F32, S32, U32, U64
from .machine import Copy, Fault
from .mma import ELEMENTS, accumulate
from .operands import opcode, vector
from .parser import PtxError
from .tmem import LANES, QUARTER, split, tensor_memory

#: Kind of MMA -> (element types by their code in the instruction descriptor, D type, code of D).
_KINDS = {
    "f8f6f4": ({0: "e4m3"}, F32, 1),
    "f16": ({0: "f16", 1: "bf16"}, F32, 1),
    "i8": ({1: "s8"}, S32, 2),
}
#: Swizzle field of a shared memory descriptor -> bytes of a swizzled row.
_WIDTHS = {0: 0, 2: 128, 4: 64, 6: 32}
#: More than any clock holds: an MMA comes after all earlier ones of its thread.
_ALWAYS = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Instruction:
    """What an instruction descriptor says: types of A and B, of D, whether an integer sum saturates, columns of D."""

    a: str
    b: str
    accumulator: np.dtype
    saturate: bool
    columns: int


@lru_cache(maxsize=64)
def instruction(kind: str, descriptor: int) -> Instruction:
    """Decode the 32-bit instruction descriptor of a dense MMA with 128 rows.

    Bits 0..1 sparsity selector, 2 sparse, 3 saturate, 4..5 type of D, 7..9 of A, 10..12 of B, 13 and 14 negate A and
    B, 15 and 16 transpose A and B, 17..22 N / 8, 24..28 M / 16, 30..31 shift of B; 6, 23 and 29 are reserved.
    """

    def field(first: int, count: int) -> int:
        return descriptor >> first & (1 << count) - 1

    types, accumulator, code = _KINDS[kind]
    for bit, count, what in (
        (0, 2, "a sparsity selector"), (2, 1, "sparsity"), (13, 1, "a negated A"), (14, 1, "a negated B"),
        (15, 1, "an MN-major A"), (16, 1, "an MN-major B"), (30, 2, "a shift of B"),
    ):  # fmt: skip
        if field(bit, count):
            raise Fault(f"the instruction descriptor {descriptor:#x} asks for {what}, which is not modelled")
    for bit in (6, 23, 29):
        if field(bit, 1):
            raise Fault(f"the reserved bit {bit} of the instruction descriptor {descriptor:#x} is set")
    if field(3, 1) and kind != "i8":
        raise Fault(f"the instruction descriptor {descriptor:#x} saturates, which only integers do")
    if field(4, 2) != code:
        raise Fault(f"D of type {field(4, 2)} in the instruction descriptor {descriptor:#x} of kind::{kind}")
    a, b = (types.get(field(bit, 3)) for bit in (7, 10))
    if a is None or b is None:
        raise Fault(f"types {field(7, 3)} and {field(10, 3)} of A and B of kind::{kind} are not modelled")
    rows, columns = 16 * field(24, 5), 8 * field(17, 6)
    if rows != LANES:
        raise Fault(f"an MMA of {rows} rows is not modelled")
    if not 8 <= columns <= 256 or (kind == "i8" and columns > 24 and columns % 16):
        raise Fault(f"kind::{kind} has no N of {columns}")
    return Instruction(a, b, accumulator, bool(field(3, 1)), columns)


@lru_cache(maxsize=512)
def operand_addresses(descriptor: int, rows: int) -> np.ndarray:
    """Shared addresses [rows, 32] of one K step of a K-major operand, from its 64-bit shared memory descriptor.

    Bits 0..13 start address / 16, 16..29 leading and 32..45 stride byte offset / 16, 46..48 the constant 1, 49..51 base
    offset, 52 mode of the leading offset, 53..60 zero, 61..63 swizzle: 0 none, 1 128 bytes in atoms of 32, 2 128 bytes,
    4 64 bytes, 6 32 bytes.
    """
    if descriptor >> 14 & 3 or descriptor >> 30 & 3 or descriptor >> 53 & 255:
        raise Fault(f"reserved bits of the shared memory descriptor {descriptor:#x} are set")
    if descriptor >> 46 & 7 != 1:
        raise Fault(f"bits 46..48 of the shared memory descriptor {descriptor:#x} are {descriptor >> 46 & 7}, not 1")
    if descriptor >> 49 & 7:
        raise Fault("a base offset in a shared memory descriptor is not modelled")
    if descriptor >> 52 & 1:
        raise Fault("an absolute leading address in a shared memory descriptor is not modelled")
    swizzle = descriptor >> 61
    if swizzle not in _WIDTHS:
        what = "with atoms of 32 bytes is not modelled" if swizzle == 1 else "does not exist"
        raise Fault(f"the swizzle {swizzle} of the shared memory descriptor {descriptor:#x} {what}")
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    return k_major.addresses(start, leading, stride, _WIDTHS[swizzle], rows)


def _decode(words: np.ndarray, element: str) -> np.ndarray:
    # 32 products of two int8 are below 2^20: float32 holds every partial sum, and multiplies faster. Those of two E4M3
    # are multiples of 2^-18 and sum to less than 2^23, which float64 holds; those of bf16 it holds but for rare ties.
    values = ELEMENTS[element][1](np.ascontiguousarray(words))
    return values.astype(F32) if element == "s8" else values


def _from_shared(warp, descriptor: int, rows: int, element: str) -> np.ndarray:
    """An operand [rows, K], with the read by the async proxy noted."""
    cta, shared = warp.cta, warp.cta.shared
    addresses = operand_addresses(descriptor, rows)
    low, high = int(addresses.min()), int(addresses.max())
    if low < shared.base or high >= shared.base + shared.size:
        raise Fault(f"an operand of an MMA lies out of bounds: {low:#x}..{high:#x}")
    index = addresses - shared.base
    granules = (index[:, ::4] >> shared.shift if shared.shift else index).ravel()
    shared.check_read(warp.tensor_agent("mma"), warp.committed + 1, warp.clock, granules, warp.proxy_clock)
    key = (descriptor, rows, element)
    if key not in cta.decoded:
        cta.decoded[key] = _decode(shared.data[index].view(U32), element)
    return cta.decoded[key]


def _tensor_columns(warp, address: int, count: int, what: str) -> slice:
    lane, first = split(address)
    if lane:
        raise Fault(f"{what} of an MMA of {LANES} rows begins at lane {lane}")
    return tensor_memory(warp).columns(first, count, what)


_ALL = slice(0, LANES // QUARTER)


@opcode(r"tcgen05\.mma\.cta_group::1\.kind::(f16|f8f6f4|i8)(?:\.collector::a::(?:discard|lastuse))?")
def multiply(c, i, m):
    """D [128, N] = A B (+ D), of one K step. A: `[tensor memory]` or a descriptor, four or two values in a column."""
    kind = m[1]
    if kind == "i8" and c.kernel.target.startswith("sm_103"):
        raise PtxError("sm_103 has no kind::i8")
    d, idesc = c.address(i, i.operands[0], U32), c.read(i, i.operands[3], U32)
    in_tensor_memory = i.operands[1].startswith("[")
    a = c.address(i, i.operands[1], U32) if in_tensor_memory else c.read(i, i.operands[1], U64)
    b, rest = c.read(i, i.operands[2], U64), i.operands[4:]
    disabled = [c.read(i, name, U32) for name in vector(rest.pop(0))] if rest[0].startswith("{") else []
    if len(rest) != 1 or len(disabled) not in (0, 4):
        raise PtxError("scale-input-d, or an MMA with this number of operands, is not modelled")
    enable = c.read(i, rest[0], B1)

    def execute(warp):
        lanes = warp.lanes()
        if len(lanes) != 1:
            raise Fault(f"{len(lanes)} lanes issue an MMA each")
        (lane,) = lanes
        if any(read(warp)[lane] for read in disabled):
            raise Fault("disabled output lanes are not modelled")
        shape, memory = instruction(kind, int(idesc(warp)[lane])), tensor_memory(warp)
        agent, time = warp.tensor_agent("mma"), warp.committed + 1
        clock = warp.tensor_clock.copy()
        clock[agent] = _ALWAYS
        target = _tensor_columns(warp, int(d(warp)[lane]), shape.columns, "D")
        if in_tensor_memory:
            source = _tensor_columns(warp, int(a(warp)[lane]), 8, "A")
            if source.start < target.stop and target.start < source.stop:
                raise Fault("A and D of an MMA overlap")
            memory.check_read(agent, time, clock, _ALL, source)
            left = _decode(memory.words[:, source], shape.a)
        else:
            left = _from_shared(warp, int(a(warp)[lane]), LANES, shape.a)
        right = _from_shared(warp, int(b(warp)[lane]), shape.columns, shape.b)
        # By quarters: OpenBLAS would start threads for the whole, which cost a hundred times as much on a busy machine.
        product = (left.reshape(LANES // QUARTER, QUARTER, -1) @ right.T).reshape(LANES, -1)
        addend = np.zeros(product.shape, shape.accumulator)
        if enable(warp)[lane]:
            memory.check_read(agent, time, clock, _ALL, target)
            addend = memory.words[:, target].view(shape.accumulator)
        memory.check_write(agent, time, clock, _ALL, target)
        total = accumulate(product, addend, "s32" if kind == "i8" else "f32", shape.saturate)
        memory.words[:, target] = total.view(U32)
        if warp.open_group and warp.mma_lane != lane:
            raise Fault(f"lane {lane} issues an MMA, and lane {warp.mma_lane} has one that it has not committed")
        warp.open_group, warp.last_mma, warp.mma_lane = True, time, lane

    return execute


@opcode(r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one(?:\.shared::cluster)?\.b64")
def commit(c, i, m):
    """One arrival at an mbarrier when all MMAs that this thread has issued are over."""
    address = c.shared_address(i, i.operands[0])

    def execute(warp):
        lanes, cluster = warp.lanes(), warp.cta.cluster
        if len(lanes) != 1:
            raise Fault(f"{len(lanes)} lanes commit, and each would arrive")
        if warp.open_group and warp.mma_lane != lanes[0]:
            raise Fault(f"lane {lanes[0]} commits, but lane {warp.mma_lane} issued the MMAs")
        barrier = find_barrier(warp, int(address(warp)[lanes[0]]))
        if not barrier.fenced:
            raise Fault(f"the mbarrier at {barrier.address:#x} is given to the async proxy without fence.mbarrier_init")
        warp.committed += 1
        warp.open_group = False
        # It implies fence::before_thread_sync. PTX does not say that it releases the thread's ordinary accesses.
        clock, proxy = np.maximum(warp.clock, warp.tensor_clock), warp.proxy_clock.copy()
        clock[warp.agent] -= 1
        clock[warp.tensor_agent("mma")] = warp.committed

        def deliver():
            try:
                barrier.arrive(1, clock, proxy)
            except Fault as fault:
                raise Fault(f"PTX line {i.line}: {fault}  [{i.text}]") from None
            cluster.events += 1

        cluster.pending.append(Copy(deliver, f"PTX line {i.line}  [{i.text}]", is_commit=True))
        cluster.events += 1
        warp.release()

    return execute


@opcode(r"tcgen05\.(cp|shift)\..*")
def move(c, i, m):
    raise PtxError(f"tcgen05.{m[1]} is not modelled")
