"""Grouping of V, assignment: the nearest centroid of each token, argmax of v . c - |c|^2 / 2, on the tensor cores.

V stays as it was read (16 bit), centroids are rounded to the same format and |c|^2 is that of the rounded centroid, so
the nearest of the rounded centroids is found; sums are fp32. A warp scores 32 tokens against all centroids.

Tokens are the B operand: two consecutive words of a 16-byte load are a B fragment as they stand, with the k index of
the product standing for channels as in `rotate`: k step 2 i + n of lane 4 g + x takes channels 32 i + 8 x + 4 n + 0..3.
Centroids are the A operand, kept in memory in fragment order.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_ptr

from . import simt

MAX_GROUPS = 256
#: Tokens that the CTA scores in one step.
STEP = 32 * simt.WARPS
#: Bytes of one head's centroid table, A fragments of 16 centroids in the order (tile, k step, lane, 4 words).
TABLE = MAX_GROUPS * 256
SHARED = TABLE + MAX_GROUPS * 4


def fragment_offset(group, quad):
    """Byte in the table of channels 4 quad, 4 quad + 1 of centroid `group`; the two channels after are 8 bytes on."""
    k_step = quad // 8 * 2 + quad % 2
    lane = group % 8 * 4 + quad % 8 // 2
    return ((group // 16 * 8 + k_step) * 32 + lane) * 16 + group % 16 // 8 * 4


class Strided:
    """Tokens i * length // count (i < count), in 32 bits for any length: count is at most 4096, or `length`."""

    def __init__(self, count, length):
        self.count = count
        self.whole = length // count
        self.rest = length - self.whole * count

    def __call__(self, i):
        return i * self.whole + simt.ptx("div.u32 {$w0}, {$r0}, {$r1};", Int32, [i * self.rest, self.count])


class Assign:
    """Kernel `group_assign`: grid (BH, CTAs), block 256, SHARED bytes of shared memory.

    packed: 16-bit centroids, TABLE bytes a head (`fragment_offset`). bias: fp32 [BH, 256], -|c|^2 / 2, and -inf beyond
    the last centroid.
    Tokens i * length // count (i < count) are scored, `steps` * 256 of them in a CTA; labels: uint8 [BH, count].
    """

    def __init__(self, fp16: bool):
        self.fp16 = fp16

    @cute.jit
    def __call__(
        self, v: cute.Pointer, packed: cute.Pointer, bias: cute.Pointer, labels: cute.Pointer, stride_b: Int64,
        stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32, count: Int32, groups: Int32, steps: Int32,
        grid_x: Int32, grid_y: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(
            v, packed, bias, labels, stride_b, stride_h, stride_l, heads, length, count, groups, steps
        ).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=2, preferred_smem_carveout=100,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, v: cute.Pointer, packed: cute.Pointer, bias: cute.Pointer, labels: cute.Pointer, stride_b: Int64,
        stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32, count: Int32, groups: Int32, steps: Int32,
    ):  # fmt: skip
        head, part, _ = cute.arch.block_idx()
        thread, warp, lane = simt.thread_position()
        table = simt.shared_memory(SHARED)
        rows = simt.Rows(v, head, heads, stride_b, stride_h, stride_l)
        strided = Strided(count, length)
        tiles = (groups + 15) // 16
        source = packed.toint() + head.to(Int64) * TABLE
        for unit in cutlass.range(thread, tiles * 256, simt.THREADS, unroll=4):
            simt.shared_store16(table + unit * 16, simt.load16(source + unit.to(Int64) * 16))
        value = simt.load_float(bias.toint() + head.to(Int64) * (MAX_GROUPS * 4) + thread.to(Int64) * 4)
        simt.shared_store(table + TABLE + thread * 4, value)
        cute.arch.sync_threads()
        best = cute.make_rmem_tensor(8, Float32)
        index = cute.make_rmem_tensor(8, Int32)
        for step in cutlass.range(steps, unroll=1):
            first = (part * steps + step) * STEP + warp * 32
            b = self.load(rows, strided, first + lane // 4, count, lane)
            best.fill(-Float32.inf)
            index.fill(0)
            for tile in cutlass.range(tiles, unroll=1):
                self.score(b, table, tile, best, index, lane)
            self.finish(labels.toint() + head.to(Int64) * count.to(Int64), best, index, first, count, lane)

    def load(self, rows, strided, first, count, lane):
        """B fragments of four times eight tokens (first + 0, 8, 16, 24), 16 words each."""
        out = []
        for n in range(4):
            token = strided(simt.smaller(first + 8 * n, count - 1))
            address = rows.address(token, (lane % 4) * 16)
            out.append([w for c in range(4) for w in simt.load16(address + 64 * c)])
        return out

    def score(self, b, table, tile, best, index, lane):
        """Score 16 centroids: 16 tile + g and + 8 of this lane, for tokens 8 n + 2 x and + 1."""
        group = tile * 16 + lane // 4
        low, high = (simt.shared_load(table + TABLE + group * 4 + 32 * r) for r in range(2))
        c = [[low, low, high, high] for _ in range(4)]
        at = table + (tile * 256 + lane) * 16
        for k in range(8):
            a = simt.shared_load16(at + k * 512)
            for n in range(4):
                c[n] = simt.mma16816(a, b[n][2 * k : 2 * k + 2], c[n], self.fp16)
        for r in range(2):
            for n in range(4):
                for column in range(2):
                    self.keep(best, index, 2 * n + column, c[n][2 * r + column], group + 8 * r)

    def keep(self, best, index, at, value, group):
        better = (
            "{.reg .pred p; setp.gt.f32 p, {$r0}, {$r1}; selp.f32 {$w0}, {$r0}, {$r1}, p; "
            "selp.s32 {$w1}, {$r2}, {$r3}, p;}"
        )
        best[at], index[at] = simt.ptx(better, [Float32, Int32], [value, best[at], group, index[at]])

    def finish(self, labels, best, index, first, count, lane):
        """The best over the lanes of one token (ties to the lower index), stored by the first of them."""
        closer = (
            "{.reg .pred p, q, e; setp.gt.f32 p, {$r0}, {$r1}; setp.eq.f32 e, {$r0}, {$r1}; "
            "setp.lt.and.s32 q, {$r2}, {$r3}, e; or.pred p, p, q; "
            "selp.f32 {$w0}, {$r0}, {$r1}, p; selp.s32 {$w1}, {$r2}, {$r3}, p;}"
        )
        for n in range(8):
            value, label = best[n], index[n]
            for mask in (4, 8, 16):
                other = [simt.shuffle_xor(value, mask), simt.shuffle_xor(label, mask)]
                value, label = simt.ptx(closer, [Float32, Int32], [other[0], value, other[1], label])
            i = first + 8 * (n // 2) + 2 * (lane % 4) + n % 2
            simt.store_byte(labels + i.to(Int64), label, simt.less(i, count) & simt.less(lane, 4))


def build(options="", fp16=False):
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    gmem = lambda t: make_ptr(t, 0, cute.AddressSpace.gmem, assumed_align=16)  # noqa: E731
    one = Int32(1)
    return cute.compile(
        Assign(fp16), gmem(kind), gmem(kind), gmem(Float32), gmem(cutlass.Uint8), Int64(1), Int64(1), Int64(1),
        one, one, one, one, one, one, one, cuda.CUstream(0), options=options,
    )  # fmt: skip
