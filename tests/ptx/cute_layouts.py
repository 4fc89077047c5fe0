"""Fragment layouts as CuTe states them, printed as JSON. Run as a script: CuTe takes its target from the environment.

    CUTE_DSL_ARCH=sm_90a python cute_layouts.py

A layout is a pair of nested shape and stride; a thread-value layout maps (lane, value) to row + rows * column, and
those of shared memory carry their swizzle.
"""

from __future__ import annotations

import json
import os
import re
import sys


def main() -> None:
    import cutlass as c
    from cutlass import cute
    from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

    found: dict[str, list] = {}

    def note(name, op):
        atom = cute.make_mma_atom(op)
        found[name] = [str(x) for x in (atom.tv_layout_A, atom.tv_layout_B, atom.tv_layout_C)]

    def blackwell():
        from cutlass.utils import blackwell_helpers

        op = warp.MmaMXF4NVF4Op(c.Float4E2M1FN, c.Float32, c.Float8E4M3FN)
        note("e2m1", op)
        tiled = cute.make_tiled_mma(op, cute.make_layout((1, 1, 1)), permutation_mnk=(16, 8, 64))
        scales = (blackwell_helpers.get_layoutSFA_TV(tiled), blackwell_helpers.get_layoutSFB_TV(tiled))
        found["e2m1 scales"] = [str(x) for x in scales]

    def hopper():
        note("bf16", warp.MmaF16BF16Op(c.BFloat16, c.Float32, (16, 8, 16)))
        note("f16", warp.MmaF16BF16Op(c.Float16, c.Float32, (16, 8, 16)))
        note("e4m3", warp.MmaFP8Op(c.Float8E4M3FN, c.Float32, (16, 8, 32)))
        k_major, registers = OperandMajorMode.K, warpgroup.OperandSource.RMEM
        shared = warpgroup.OperandSource.SMEM
        f8 = (c.Float8E4M3FN, c.Float8E4M3FN, c.Float32)
        note("wgmma s8 256", warpgroup.MmaI8Op(c.Int8, c.Int8, c.Int32, (64, 256, 32), shared, k_major, k_major))
        note("wgmma e4m3 136", warpgroup.MmaF8Op(*f8, (64, 136, 32), registers, k_major, k_major))
        bf16 = (c.BFloat16, c.Float32, (64, 128, 16))
        note("wgmma bf16 128", warpgroup.MmaF16BF16Op(*bf16, registers, k_major, k_major))
        kinds = warpgroup.SmemLayoutAtomKind
        for kind in ("K_SW128", "K_SW64", "K_SW32", "K_INTER"):
            found[kind] = [str(warpgroup.make_smem_layout_atom(getattr(kinds, kind), c.Int8))]

    def datacentre_blackwell():
        from cutlass.cute.nvgpu import tcgen05
        from cutlass.utils import blackwell_helpers

        k_major, kinds = OperandMajorMode.K, tcgen05.SmemLayoutAtomKind
        for kind in ("K_SW128", "K_SW64", "K_SW32", "K_INTER"):
            found[f"tcgen05 {kind}"] = [str(tcgen05.make_smem_layout_atom(getattr(kinds, kind), c.Int8))]
        group, source = tcgen05.CtaGroup.ONE, tcgen05.OperandSource.TMEM
        for name, op, kind in (
            ("e4m3", tcgen05.MmaF8F6F4Op, (c.Float8E4M3FN, c.Float8E4M3FN, c.Float32)),
            ("bf16", tcgen05.MmaF16BF16Op, (c.BFloat16, c.Float32)),
        ):
            k = 256 // kind[0].width
            tiled = cute.make_tiled_mma(op(*kind, (128, 64, k), group, source, k_major, k_major))
            d = tiled.make_fragment_C(tiled.partition_shape_C((128, 64)))
            staged = blackwell_helpers.make_smem_layout_a(tiled, (128, 64, k), kind[0], 1)
            pointer = cute.make_ptr(kind[0], 0, cute.AddressSpace.tmem)
            a = tiled.make_fragment_A(cute.make_tensor(pointer, staged.outer))
            found[f"tcgen05 {name}"] = [str(d.layout), str(a.layout)]

    looks = {"sm_120a": blackwell, "sm_100a": datacentre_blackwell, "sm_90a": hopper}
    look = looks[os.environ["CUTE_DSL_ARCH"]]

    @cute.jit
    def trace():
        look()

    trace()
    sys.stdout.write(json.dumps(found))


def parse_layout(text: str) -> tuple:
    """(shape, stride) of a layout's text, without its swizzle."""
    shape, stride = text.split(" o ")[-1].split(":")
    return json.loads(shape.replace("(", "[").replace(")", "]")), json.loads(stride.replace("(", "[").replace(")", "]"))


def parse_swizzle(text: str) -> tuple[int, int, int]:
    """(bits, base, shift) of a swizzled layout's text."""
    found = re.match(r"S<(\d+),(\d+),(\d+)>", text)
    if found is None:
        raise ValueError(f"{text} has no swizzle")
    bits, base, shift = (int(n) for n in found.groups())
    return bits, base, shift


def offset(shape, stride, index: int) -> int:
    """What a mode of a layout maps an index to; the first part of a nested mode varies fastest."""
    if isinstance(shape, int):
        return index % shape * stride if shape else 0
    total = 0
    for part, step in zip(shape, stride, strict=True):
        size = _size(part)
        total += offset(part, step, index % size)
        index //= size
    return total


def _size(shape) -> int:
    if isinstance(shape, int):
        return shape
    size = 1
    for part in shape:
        size *= _size(part)
    return size


def positions(text: str, rows: int, lanes: int, values: int) -> list[list[tuple[int, int]]]:
    """(row, column) that each value of each lane stands for."""
    (lane_shape, value_shape), (lane_stride, value_stride) = parse_layout(text)
    found = []
    for lane in range(lanes):
        at = [offset(lane_shape, lane_stride, lane) + offset(value_shape, value_stride, v) for v in range(values)]
        found.append([(x % rows, x // rows) for x in at])
    return found


def image_offset(layout: str, row: int, byte: int, rows: int) -> int:
    """Byte of (row, byte) in shared memory: CuTe's atom, stacked along rows first, then along K."""
    shape, stride = parse_layout(layout)
    height, width = shape
    bits, base, shift = parse_swizzle(layout)
    at = offset(shape, stride, row % height + height * (byte % width))
    at += (row // height + byte // width * (rows // height)) * height * width
    return at ^ ((at >> shift) & ((1 << bits) - 1) << base)


def place(image, layout: str, matrix, start: int) -> None:
    """Write a matrix of bytes [rows, K] to an image."""
    rows = len(matrix)
    for row in range(rows):
        for byte in range(matrix.shape[1]):
            image[start + image_offset(layout, row, byte, rows)] = matrix[row, byte]


if __name__ == "__main__":
    main()
