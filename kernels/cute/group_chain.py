"""Grouping of V, order: the greedy chain of nearest centroids that renumbers the groups.

Two kernels. `group_pairs` scores every centroid against every other on the tensor cores, c_i . c_j - |c_j|^2 / 2 of the
rounded centroids: for one i the largest is the nearest. `group_chain` walks: one warp a head, from centroid 0 to the
nearest unused one, ties to the lower index.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr

from . import simt
from .group_assign import MAX_GROUPS, SHARED, TABLE

#: Key of a used or missing centroid; the keys of others are clamped above it.
USED = -0x80000000
#: Columns that a lane of the walk looks at.
COLUMNS = MAX_GROUPS // 32


class Pairs:
    """Kernel `group_pairs`: grid (BH, 2), block 256, SHARED bytes of shared memory.

    packed, bias: as `group_assign` reads them -> scores fp32 [BH, 256, 256]; rows and columns beyond the last tile of
    16 centroids are not written.
    """

    def __init__(self, fp16: bool):
        self.fp16 = fp16

    @cute.jit
    def __call__(
        self, packed: cute.Pointer, bias: cute.Pointer, scores: cute.Pointer, groups: Int32, grid_x: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(packed, bias, scores, groups).launch(
            grid=(grid_x, 2, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, packed: cute.Pointer, bias: cute.Pointer, scores: cute.Pointer, groups: Int32):
        head, part, _ = cute.arch.block_idx()
        thread, warp, lane = simt.thread_position()
        table = simt.shared_memory(SHARED)
        tiles = (groups + 15) // 16
        source = packed.toint() + head.to(Int64) * TABLE
        for unit in cutlass.range(thread, tiles * 256, simt.THREADS, unroll=4):
            simt.shared_store16(table + unit * 16, simt.load16(source + unit.to(Int64) * 16))
        value = simt.load_float(bias.toint() + head.to(Int64) * (MAX_GROUPS * 4) + thread.to(Int64) * 4)
        simt.shared_store(table + TABLE + thread * 4, value)
        cute.arch.sync_threads()
        row = part * simt.WARPS + warp
        out = scores.toint() + (head * MAX_GROUPS + row * 16 + lane // 4).to(Int64) * (MAX_GROUPS * 4)
        if row < tiles:
            a = [simt.shared_load16(table + (row * 256 + k * 32 + lane) * 16) for k in range(8)]
            for tile in cutlass.range(tiles, unroll=1):
                self.score(a, table, tile, out, lane)

    def score(self, a, table, tile, out, lane):
        """16 columns: a fragment of A holds both halves of the B fragments of columns g (words 0, 2) and g + 8."""
        columns = [tile * 16 + 8 * n + lane % 4 * 2 for n in range(2)]
        c = []
        for column in columns:
            pair = simt.ptx(
                "ld.shared.v2.f32 {{$w0},{$w1}}, [{$r0}];", [Float32, Float32], [table + TABLE + column * 4]
            )
            c.append([*pair, *pair])
        for k in range(8):
            b = simt.shared_load16(table + (tile * 256 + k * 32 + lane) * 16)
            for n in range(2):
                c[n] = simt.mma16816(a[k], [b[n], b[n + 2]], c[n], self.fp16)
        for n in range(2):
            for r in range(2):
                at = out + (columns[n] * 4).to(Int64) + r * 8 * MAX_GROUPS * 4
                simt.effect("st.global.v2.f32 [{$r0}], {{$r1},{$r2}};", [at, c[n][2 * r], c[n][2 * r + 1]])


class Chain:
    """Kernel `group_chain`: grid (BH), block 32. scores fp32 [BH, 256, 256] -> rank int32 [BH, 256] in the chain.

    Centroids that do not exist keep their index as rank.
    """

    @cute.jit
    def __call__(self, scores: cute.Pointer, rank: cute.Pointer, groups: Int32, grid_x: Int32, stream: cuda.CUstream):
        self.kernel(scores, rank, groups).launch(
            grid=(grid_x, 1, 1), block=(32, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, scores: cute.Pointer, rank: cute.Pointer, groups: Int32):
        head, _, _ = cute.arch.block_idx()
        lane, _, _ = cute.arch.thread_idx()
        # Lanes beyond the tiles that `group_pairs` wrote read another lane's columns; theirs count as used.
        reader = simt.smaller(lane, (groups + 15) // 16 * (16 // COLUMNS) - 1)
        base = scores.toint() + head.to(Int64) * (MAX_GROUPS * MAX_GROUPS * 4) + (reader * (COLUMNS * 4)).to(Int64)
        ranks = rank.toint() + (head * MAX_GROUPS).to(Int64) * 4
        state = cute.make_rmem_tensor(2, Int32)  # current centroid; used columns of this lane, one bit each
        state[0] = Int32(0)
        state[1] = self.first(ranks, groups, lane)
        for step in cutlass.range(1, groups, unroll=1):
            self.step(base, ranks, state, step, lane)

    def first(self, ranks, groups, lane):
        """Give the lane's columns their own index as rank; returns the bits of missing columns and of centroid 0."""
        used = Int32(0)
        for n in range(COLUMNS):
            column = lane * COLUMNS + n
            simt.store_int(ranks + (column * 4).to(Int64), column)
            missing = 1 - simt.less(column, groups)
            used = used | (missing << n)
        return used | (1 - simt.less(0, lane))

    def step(self, base, ranks, state, step, lane):
        scores = simt.load_floats(base + (state[0] * (MAX_GROUPS * 4)).to(Int64), COLUMNS)
        best, at = Int32(USED), Int32(0)
        for n in range(COLUMNS):
            # Signed integers in the order of the floats.
            key = simt.ptx(
                "{.reg .s32 b, s; mov.b32 b, {$r0}; shr.s32 s, b, 31; and.b32 s, s, 0x7fffffff; xor.b32 b, b, s; "
                "max.s32 {$w0}, b, -0x7fffffff;}",
                Int32,
                [scores[n]],
            )
            key = simt.select(state[1] & (1 << n), Int32(USED), key)
            better = simt.less(best, key)
            best, at = simt.select(better, key, best), simt.select(better, Int32(n), at)
        top = simt.ptx("redux.sync.max.s32 {$w0}, {$r0}, 0xffffffff;", Int32, [best])
        votes = simt.ptx(
            "{.reg .pred p; setp.eq.s32 p, {$r0}, {$r1}; vote.sync.ballot.b32 {$w0}, p, 0xffffffff;}",
            Uint32,
            [best, top],
        )
        winner = simt.ptx("{.reg .b32 t; brev.b32 t, {$r0}; clz.b32 {$w0}, t;}", Int32, [votes])
        current = winner * COLUMNS + cute.arch.shuffle_sync(at, winner)
        mine = simt.select(winner ^ lane, Int32(0), Int32(1))
        state[0] = current
        state[1] = state[1] | (mine << at)
        simt.effect(
            "{.reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.global.b32 [{$r0}], {$r1};}",
            [ranks + (current * 4).to(Int64), step, mine],
        )


def _gmem(kind):
    return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=16)


def build_pairs(options="", fp16=False):
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    return cute.compile(
        Pairs(fp16), _gmem(kind), _gmem(Float32), _gmem(Float32), Int32(1), Int32(1), cuda.CUstream(0),
        options=options,
    )  # fmt: skip


def build(options=""):
    return cute.compile(Chain(), _gmem(Float32), _gmem(Int32), Int32(1), Int32(1), cuda.CUstream(0), options=options)
