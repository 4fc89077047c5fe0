"""What the NVFP4 attention kernel and its emulation need beyond the other kernels: lg2.approx, the bf16 MMA of eight
columns, products of fp16 pairs."""

from __future__ import annotations

import numpy as np

from . import formats as fm
from .formats import F32, F64, U16, U32
from .mma import accumulate, c_matrix, c_registers, decode_bf16
from .operands import gather, opcode, vector
from .parser import PtxError


@opcode(r"lg2\.approx(\.ftz)?\.f32")
def logarithm(c, i, m):
    """Correctly rounded, then moved by the launch's `approximation`."""
    write, x = c.write(i, i.operands[0]), c.read(i, i.operands[1], F32)
    ulps, ftz = c.approximation, m[1] is not None

    def execute(warp):
        value = x(warp)
        write(warp, fm.move_ulps(np.log2((fm.flush(value) if ftz else value).astype(F64)).astype(F32), ulps))

    return execute


@opcode(r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.bf16\.bf16\.f32")
def multiply_k8(c, i, m):
    """A register r: row g + 8 r, columns 2 t, 2 t + 1; the one B register: column g, rows 2 t, 2 t + 1."""
    d, a, b, add = (vector(text) for text in i.operands[:4])
    if (len(d), len(a), len(b), len(add)) != (4, 2, 1, 4):
        raise PtxError("an m16n8k8 MMA has 4, 2, 1 and 4 registers")
    writes = [c.write(i, name) for name in d]
    reads = [[c.read(i, name, kind) for name in names] for names, kind in ((a, U32), (b, U32), (add, F32))]

    def execute(warp):
        warp.require_converged(i.opcode)
        left, right, addend = (gather(group, warp) for group in reads)
        product = decode_bf16(left).reshape(16, 8) @ decode_bf16(right).reshape(8, 8).T
        result = c_registers(accumulate(product, c_matrix(addend), "f32"))
        for write, values in zip(writes, result, strict=True):
            write(warp, values)

    return execute


@opcode(r"mul\.rn\.f16x2")
def multiply_halves(c, i, m):
    write = c.write(i, i.operands[0])
    reads = [c.read(i, name, U32) for name in i.operands[1:]]

    def execute(warp):
        a, b = (fm.from_f16(np.ascontiguousarray(read(warp)).view(U16)) for read in reads)
        write(warp, fm.to_f16(a * b).view(U32))

    return execute
