"""Preparation of Q: rotate, 8 bit with one scale for 16 rows, tile image; optionally the bf16 rows for key means.

One CTA makes one 128-row tile, one warp 16 rows of it. Nothing but the image and the scales reaches memory. Where the
bytes go is a layout module's matter: `layouts` or `layouts_mma8`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_ptr

from . import layouts, simt
from .rotate import NORMALISE, rotate, signs

#: A scale at or below this quantises to zeros with scale 1 (the specification's rule, at its tiny value).
TINY = 1.1754943508222875e-38


@dataclass(frozen=True)
class ScoreFormat:
    """An 8-bit format of Q and K (`Plan.scores`). top: largest code. pack: four Float32 as codes of one word."""

    top: float
    pack: Callable

    def scale(self, amax):
        """(scale, reciprocal) of unnormalised rotated values whose largest magnitude is `amax`."""
        scale = simt.divide(amax * NORMALISE, Float32(self.top))
        usable = simt.ptx(
            "{.reg .pred p; setp.gt.f32 p, {$r0}, {$r1}; selp.s32 {$w0}, 1, 0, p;}", Int32, [scale, Float32(TINY)]
        )
        return simt.select(usable, scale, Float32(1.0)), simt.select(
            usable, simt.divide(Float32(self.top), amax), Float32(0.0)
        )


SCORES = {"int8": ScoreFormat(127.0, simt.int8x4), "fp8": ScoreFormat(448.0, simt.e4m3x4)}


def load_rows(rows, length, tile, row, x):
    """Rows `row` and `row` + 8 of query tile `tile` as quad lane `x` has them for `rotate`; zeros beyond `length`."""
    raw = []
    for r in range(2):
        token = tile * layouts.QUERY_TILE + row + 8 * r
        valid = simt.less(token, length)
        address = rows.address(simt.smaller(token, length - 1), x * 16)
        raw.append([w for i in range(4) for w in simt.load16(address + 64 * i, valid)])
    return raw


def store_rows(layout, base, raw, row, x, fp16):
    """The bf16 rows for key means, as they were read, into the qb tile at `base`."""
    for r in range(2):
        for i in range(4):
            offset = layout.qb_offset(row + 8 * r, 32 * i + 8 * x) * 2
            simt.store16(base + offset.to(Int64), simt.to_bf16(raw[r][4 * i : 4 * i + 4], fp16))


class PrepareQ:
    """Kernel `q`: grid (BH, nq), block 256, no dynamic shared memory. layout: module that states the images.

    scores: "int8" or "fp8".
    """

    def __init__(self, fp16: bool, means: bool, layout=layouts, scores: str = "int8"):
        self.fp16, self.means, self.layout, self.format = fp16, means, layout, SCORES[scores]

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        q_image: cute.Pointer,
        q_scale: cute.Pointer,
        q_rows: cute.Pointer,
        stride_b: Int64,
        stride_h: Int64,
        stride_l: Int64,
        heads: Int32,
        length: Int32,
        grid_x: Int32,
        grid_y: Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(q, q_image, q_scale, q_rows, stride_b, stride_h, stride_l, heads, length).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=2 if self.means else 3,
            preferred_smem_carveout=50,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        q_image: cute.Pointer,
        q_scale: cute.Pointer,
        q_rows: cute.Pointer,
        stride_b: Int64,
        stride_h: Int64,
        stride_l: Int64,
        heads: Int32,
        length: Int32,
    ):
        head, tile, _ = cute.arch.block_idx()
        _, tiles, _ = cute.arch.grid_dim()
        rows = simt.Rows(q, head, heads, stride_b, stride_h, stride_l)
        self.body(rows, q_image, q_scale, q_rows, length, head, tile, tiles)

    def body(self, rows, image, scales, rows16, length, head, tile, tiles):
        layout = self.layout
        _, warp, lane = simt.thread_position()
        g, x = lane // 4, lane % 4
        row = warp * 16 + g
        raw = load_rows(rows, length, tile, row, x)
        y = rotate(raw[0], raw[1], signs(lane, self.fp16), self.fp16)
        amax = Float32(0.0)
        for v in y[0] + y[1]:
            amax = simt.max_abs(amax, v)
        scale, inverse = self.format.scale(simt.warp_max(amax))
        at = (head * tiles + tile).to(Int64)
        base = image.toint() + at * (layout.QUERY_TILE * 128)
        for r in range(2):
            for i in range(4):
                codes = [v * inverse for v in y[r][8 * i : 8 * i + 8]]
                words = [self.format.pack(codes[4 * n : 4 * n + 4]) for n in range(2)]
                simt.store8(base + layout.q_offset(row + 8 * r, 32 * i + 8 * x).to(Int64), words)
        slot = scales.toint() + (at * layout.QUERY_TILE + (warp * 16 + lane % 16).to(Int64)) * 4
        simt.store_float(slot, scale)
        if self.means:
            store_rows(layout, rows16.toint() + at * (layout.QUERY_TILE * 256), raw, row, x, self.fp16)


def build(options="", fp16=False, means=False, layout=layouts, scores="int8"):
    """Compile for the current target; the cubin is kept where `options` says."""
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    gmem = lambda t, align=16: make_ptr(t, 0, cute.AddressSpace.gmem, assumed_align=align)  # noqa: E731
    return cute.compile(
        PrepareQ(fp16, means, layout, scores), gmem(kind), gmem(cutlass.Int8), gmem(Float32), gmem(cutlass.BFloat16),
        Int64(1), Int64(1), Int64(1), Int32(1), Int32(1), Int32(1), Int32(1), cuda.CUstream(0), options=options,
    )  # fmt: skip
