"""CuTe's own statement of who holds what in the warp-level MMAs of sm_120a, as JSON on stdout.

    CUTE_DSL_ARCH=sm_120a python tests/support/cute_layouts.py

For each MMA and operand: [lane][value] -> index into the column-major matrix (M or N first, then K or N), a list of 32
lists. Scales: [lane] -> row of A or column of B whose scale word the lane holds.
"""

from __future__ import annotations

import json
import math
import sys


def _flat(x):
    return [z for y in x for z in _flat(y)] if isinstance(x, tuple) else [x]


def _mode(shape, stride, index):
    """Offset of `index` in one mode, its first dimension fastest."""
    offset = 0
    for size, step in zip(_flat(shape), _flat(stride), strict=True):
        offset += index % size * step
        index //= size
    return offset


def _table(layout):
    """Offsets [thread][value] of a layout of two modes."""
    shape, stride = layout.shape, layout.stride
    threads, values = math.prod(_flat(shape[0])), math.prod(_flat(shape[1]))
    return [
        [_mode(shape[0], stride[0], t) + _mode(shape[1], stride[1], v) for v in range(values)] for t in range(threads)
    ]


if __name__ == "__main__":
    from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float32, cute
    from cutlass.cute.nvgpu import warp
    from cutlass.utils import blackwell_helpers

    found = {}

    def describe(name, op):
        mma = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
        found[name] = {
            "a": _table(mma.tv_layout_A_tiled),
            "b": _table(mma.tv_layout_B_tiled),
            "c": _table(mma.tv_layout_C_tiled),
        }
        return mma

    @cute.jit
    def trace():
        mma = describe("nvfp4", warp.MmaMXF4NVF4Op(Float4E2M1FN, Float32, Float8E4M3FN))
        for name, partition, rows in (("a", blackwell_helpers.thrfrg_SFA, 16), ("b", blackwell_helpers.thrfrg_SFB, 8)):
            layout = partition(cute.make_layout((rows, 64)), mma)
            thread = (layout.shape[0][0], layout.stride[0][0])
            found["nvfp4"][name + "_scales"] = [_mode(*thread, lane) for lane in range(32)]
        for k in (8, 16):
            describe(f"bf16_k{k}", warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, k)))

    cute.compile(trace)
    json.dump(found, sys.stdout)
