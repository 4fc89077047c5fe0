"""Warp-level matrix multiply: mma.sync and ldmatrix.

Every m16n8 shape has the same fragments. With e elements in a 32-bit register, g = lane // 4 and t = lane % 4:

    A register r: row g + 8 (r % 2), columns (r // 2) 4 e + t e ...      B register r: column g, rows r 4 e + t e ...
    C and D register r: row g + 8 (r // 2), column 2 t + r % 2

A product is summed exactly (float64 holds it for these formats) and rounded once when C is added. Hardware keeps fewer
bits; the last bits of a result are therefore not silicon's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import formats as fm
from .formats import F32, F64, S8, S32, U8, U16, U32
from .machine import Fault
from .operands import gather, opcode, vector
from .parser import PtxError


def decode_bf16(words):
    return fm.from_bf16(words.view(U16)).astype(F64)


def decode_f16(words):
    return fm.from_f16(words.view(U16)).astype(F64)


def decode_e4m3(words):
    return fm.E4M3[words.view(U8)]


def decode_s8(words):
    return words.view(S8).astype(F64)


def decode_e2m1(words):
    return fm.E2M1_PAIR[words.view(U8)].reshape(*words.shape[:-1], -1)


#: Operand type -> (elements in a register, decoder of uint32 [..., n] to float64 [..., n e]).
ELEMENTS = {
    "bf16": (2, decode_bf16),
    "f16": (2, decode_f16),
    "e4m3": (4, decode_e4m3),
    "s8": (4, decode_s8),
    "e2m1": (8, decode_e2m1),
}


@dataclass(frozen=True)
class Shape:
    """One kind of MMA: its K extent, operand and accumulator type."""

    k: int
    element: str
    accumulator: str


#: mma.sync without scales, by the opcode after "mma.sync.aligned.".
SHAPES = {
    "m16n8k16.row.col.f32.bf16.bf16.f32": Shape(16, "bf16", "f32"),
    "m16n8k16.row.col.f32.f16.f16.f32": Shape(16, "f16", "f32"),
    "m16n8k32.row.col.f32.e4m3.e4m3.f32": Shape(32, "e4m3", "f32"),
    "m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32": Shape(32, "e4m3", "f32"),
    "m16n8k32.row.col.s32.s8.s8.s32": Shape(32, "s8", "s32"),
    "m16n8k32.row.col.satfinite.s32.s8.s8.s32": Shape(32, "s8", "s32"),
}


def a_matrix(words, element):
    """uint32 [..., 4 registers, 32 lanes] to float64 [..., 16, K]."""
    e, decode = ELEMENTS[element]
    values = decode(np.ascontiguousarray(words)).reshape(-1, 2, 2, 8, 4, e)  # column half, row half, g, t, element
    return values.transpose(0, 2, 3, 1, 4, 5).reshape(*words.shape[:-2], 16, 8 * e)


def b_matrix(words, element):
    """uint32 [..., 2 registers, 32 lanes] to float64 [..., 8 columns, K]."""
    e, decode = ELEMENTS[element]
    values = decode(np.ascontiguousarray(words)).reshape(-1, 2, 8, 4, e)
    return values.transpose(0, 2, 1, 3, 4).reshape(*words.shape[:-2], 8, 8 * e)


def c_matrix(registers):
    """Accumulator registers [..., 4 n, 32] to matrices [..., 16, 8 n]."""
    n = registers.shape[-2] // 4
    values = registers.reshape(-1, n, 2, 2, 8, 4)  # column block, row half, column parity, g, t
    return values.transpose(0, 2, 4, 1, 5, 3).reshape(*registers.shape[:-2], 16, 8 * n)


def c_registers(matrix):
    """The inverse of `c_matrix`."""
    n = matrix.shape[-1] // 8
    values = matrix.reshape(-1, 2, 8, n, 4, 2).transpose(0, 3, 1, 5, 2, 4)
    return np.ascontiguousarray(values).reshape(*matrix.shape[:-2], 4 * n, 32)


def warps_of(registers):
    """[n, 32 W] to [W, n, 32]: those of each warp of a `gang`."""
    return registers.reshape(len(registers), -1, 32).swapaxes(0, 1)


def accumulate(product, addend, kind, saturate=False):
    """addend + product (float64, exact) as the accumulator type."""
    if kind == "f32":
        return (addend.astype(F64) + product).astype(F32)
    total = addend.astype(np.int64) + product.astype(np.int64)
    if saturate:
        return np.clip(total, -(2**31), 2**31 - 1).astype(S32)
    return total.astype(S32)


@opcode(r"mma\.sync\.aligned\.(m16n8k(?:16|32)\.row\.col\.(?:(?:kind::f8f6f4|satfinite)\.)?[fs]32\.\w+\.\w+\.\w+)")
def multiply(c, i, m):
    if m[1] not in SHAPES:
        raise PtxError(f"the shape and types {m[1]} are not modelled")
    shape = SHAPES[m[1]]
    kind = F32 if shape.accumulator == "f32" else S32
    d, a, b, add = _operands(c, i, kind)
    saturate = "satfinite" in m[1]

    def execute(warp):
        warp.require_converged(i.opcode)
        left = a_matrix(warps_of(gather(a, warp)), shape.element)
        right = b_matrix(warps_of(gather(b, warp)), shape.element)
        addend = c_matrix(warps_of(gather(add, warp)))
        _store(warp, d, accumulate(left @ right.swapaxes(1, 2), addend, shape.accumulator, saturate))

    return execute


@opcode(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f16\.e4m3\.e4m3\.f16")
def multiply_f16(c, i, m):
    """fp16 accumulators: columns 2 t and 2 t + 1 of a row in one register, the lower column in the lower half."""
    d, a, b, add = _operands(c, i, U32, accumulators=2)

    def execute(warp):
        warp.require_converged(i.opcode)
        left = a_matrix(gather(a, warp), "e4m3")
        right = b_matrix(gather(b, warp), "e4m3")
        words = np.ascontiguousarray(gather(add, warp), U32)
        addend = c_matrix(words.view(np.float16).reshape(2, 32, 2).transpose(0, 2, 1).reshape(4, 32).astype(F64))
        total = c_registers((addend + left @ right.T).astype(np.float16))
        words = np.ascontiguousarray(total.reshape(2, 2, 32).transpose(0, 2, 1)).view(U32)[..., 0]
        for write, values in zip(d, words, strict=True):
            write(warp, values)

    return execute


def _operands(c, i, kind, accumulators=4):
    d, a, b, add = (vector(text) for text in i.operands[:4])
    if (len(d), len(a), len(b), len(add)) != (accumulators, 4, 2, accumulators):
        raise PtxError(f"this MMA has {accumulators}, 4, 2 and {accumulators} registers")
    return (
        [c.write(i, name) for name in d],
        [c.read(i, name, U32) for name in a],
        [c.read(i, name, U32) for name in b],
        [c.read(i, name, kind) for name in add],
    )


def _store(warp, writes, matrix):
    for write, values in zip(writes, c_registers(matrix).swapaxes(0, 1), strict=True):
        write(warp, values.reshape(-1))


@opcode(
    r"mma\.sync\.aligned\.m16n8k64\.row\.col\.kind::mxf4nvf4\.block_scale\.scale_vec::4X\.f32\.e2m1\.e2m1\.f32\.ue4m3"
)
def multiply_scaled(c, i, m):
    """E2M1 with one UE4M3 scale for 16 elements along K: byte n of a scale word belongs to elements 16 n ...

    Scales of A row g are in lane 4 g + 2 a of its word, those of row g + 8 in lane 4 g + 2 a + 1, where a (0 or 1) is
    the thread selector of A; scales of B column g in lane 4 g + b, b being the one of B. The byte selector must be 0.
    """
    d, a, b, add = _operands(c, i, F32)
    a_scale, b_scale = c.read(i, i.operands[4], U32), c.read(i, i.operands[6], U32)
    (a_byte, a_thread), (b_byte, b_thread) = ([c.literal(x) for x in vector(i.operands[n])] for n in (5, 7))
    if a_byte or b_byte or a_thread not in (0, 1) or b_thread not in (0, 1, 2, 3):
        raise PtxError(f"the scale selectors {i.operands[5]} and {i.operands[7]} do not exist for scale_vec::4X")
    row = np.arange(16)
    a_lane, b_lane = 4 * (row % 8) + 2 * a_thread + row // 8, 4 * np.arange(8) + b_thread

    def execute(warp):
        warp.require_converged(i.opcode)
        left = a_matrix(warps_of(gather(a, warp)), "e2m1").reshape(-1, 16, 4, 16)
        right = b_matrix(warps_of(gather(b, warp)), "e2m1").reshape(-1, 8, 4, 16)
        left = left * _scales(a_scale(warp).reshape(-1, 32)[:, a_lane])
        right = right * _scales(b_scale(warp).reshape(-1, 32)[:, b_lane])
        product = left.reshape(-1, 16, 64) @ right.reshape(-1, 8, 64).swapaxes(1, 2)
        addend = c_matrix(warps_of(gather(add, warp)))
        _store(warp, d, accumulate(product, addend, "f32"))

    return execute


def _scales(words):
    return fm.UE4M3[np.ascontiguousarray(words).view(U8)].reshape(*words.shape, 4, 1)


@opcode(r"ldmatrix\.sync\.aligned\.m8n8\.x(1|2|4)(\.trans)?\.shared(?:::cta)?\.b16")
def load_matrix(c, i, m):
    """8x8 matrices of 16-bit elements: lanes 8 n ... 8 n + 7 give the row addresses of matrix n."""
    count = int(m[1])
    writes = [c.write(i, name) for name in vector(i.operands[0])]
    if len(writes) != count:
        raise PtxError(f"{count} destinations are needed")
    address = c.shared_address(i, i.operands[1])

    def execute(warp):
        warp.require_converged(i.opcode)
        shared = warp.cta.shared
        index, granules = shared.locate(address(warp)[: 8 * count].astype(np.int64), 16)
        shared.check_read(warp.agent, warp.clock[warp.agent], warp.clock, granules)
        matrices = shared.data[index].view(U16).reshape(count, 8, 8)
        if m[2]:
            matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
        for write, matrix in zip(writes, matrices, strict=True):
            write(warp, np.ascontiguousarray(matrix).view(U32).reshape(32))

    return execute


def require_same(expected, found, what):
    """Fault unless warps of a collective instruction agree."""
    if expected != found:
        raise Fault(f"the warps of a warpgroup disagree on {what}")
