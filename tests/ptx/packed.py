"""Arithmetic on pairs of float32 in 64-bit registers, which sm_100 has: each half as the instruction for one value."""

from __future__ import annotations

import numpy as np

from . import formats as fm
from .formats import F32, U64
from .operands import opcode

_FUNCTIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fm.fma}


@opcode(r"(add|sub|mul|fma)\.rn(\.ftz)?\.f32x2")
def pair_arithmetic(c, i, m):
    """The register's lower half is the first of the pair. Never contracted, as .rn says."""
    write = c.write(i, i.operands[0])
    reads = [c.read(i, name, U64) for name in i.operands[1:]]
    function, flush = _FUNCTIONS[m[1]], fm.flush if m[2] else lambda x: x

    def execute(warp):
        pairs = [flush(np.ascontiguousarray(read(warp)).view(F32)) for read in reads]
        write(warp, np.ascontiguousarray(flush(function(*pairs))).view(U64))

    return execute
