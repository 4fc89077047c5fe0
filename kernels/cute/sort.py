"""Counting sort of labels on the device: uint8 labels -> the stable token order (int32), deterministic, no host sync.

Two kernels over chunks of 4096 tokens: `sort_count` counts each chunk's labels, `sort_order` places the tokens. Atomic
operations act on integers only, and ranks inside a chunk follow the token order, so the result is the stable argsort.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr

from . import simt

#: Tokens of one CTA: 8 warps of 16 steps of 32.
CHUNK = 4096
STEPS = CHUNK // simt.THREADS
LABELS = 256


class Chunk:
    """The labels of one CTA's chunk in registers, warp by warp in token order, and a counter table in shared memory."""

    SHARED = simt.WARPS * LABELS * 4

    def load(self, labels, head, chunk, length, warp, lane):
        first = chunk * CHUNK + warp * (STEPS * 32) + lane
        base = labels.toint() + head.to(Int64) * length.to(Int64)
        out = []
        for n in range(STEPS):
            token = first + 32 * n
            valid = simt.less(token, length)
            out.append((token, valid, simt.load_byte(base + simt.smaller(token, length - 1).to(Int64), valid)))
        return out

    def clear(self, shared, thread):
        for w in range(simt.WARPS):
            simt.shared_store(shared + w * (LABELS * 4) + thread * 4, Int32(0))
        cute.arch.sync_threads()

    def count(self, items, table):
        for _, valid, label in items:
            simt.shared_add(table + label * 4, Int32(1), valid)
        cute.arch.sync_threads()


class SortCount(Chunk):
    """Kernel `sort_count`: grid (BH, chunks), block 256. labels uint8 [BH, L] -> counts int32 [BH, chunks, 256]."""

    @cute.jit
    def __call__(
        self, labels: cute.Pointer, counts: cute.Pointer, length: Int32, grid_x: Int32, grid_y: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(labels, counts, length).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, labels: cute.Pointer, counts: cute.Pointer, length: Int32):
        head, chunk, _ = cute.arch.block_idx()
        _, chunks, _ = cute.arch.grid_dim()
        thread, warp, lane = simt.thread_position()
        shared = simt.shared_memory(self.SHARED)
        items = self.load(labels, head, chunk, length, warp, lane)
        self.clear(shared, thread)
        self.count(items, shared + warp * (LABELS * 4))
        self.total(shared, counts, head * chunks + chunk, thread)

    def total(self, shared, counts, at, thread):
        value = simt.shared_load(shared + thread * 4, Int32)
        for w in range(1, simt.WARPS):
            value = value + simt.shared_load(shared + w * (LABELS * 4) + thread * 4, Int32)
        simt.store_int(counts.toint() + (at.to(Int64) * LABELS + thread.to(Int64)) * 4, value)


class SortOrder(Chunk):
    """Kernel `sort_order`: grid (BH, chunks), block 256. labels, counts -> order int32 [BH, L]."""

    SHARED = Chunk.SHARED + 64

    @cute.jit
    def __call__(
        self, labels: cute.Pointer, counts: cute.Pointer, order: cute.Pointer, length: Int32, grid_x: Int32,
        grid_y: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(labels, counts, order, length).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, labels: cute.Pointer, counts: cute.Pointer, order: cute.Pointer, length: Int32):
        head, chunk, _ = cute.arch.block_idx()
        _, chunks, _ = cute.arch.grid_dim()
        thread, warp, lane = simt.thread_position()
        shared = simt.shared_memory(self.SHARED)
        items = self.load(labels, head, chunk, length, warp, lane)
        self.clear(shared, thread)
        self.count(items, shared + warp * (LABELS * 4))
        # Thread = label: tokens of this label in earlier chunks of the head, and in all of them.
        sums = cute.make_rmem_tensor(2, Int32)
        sums.fill(0)
        base = counts.toint() + ((head * chunks).to(Int64) * LABELS + thread.to(Int64)) * 4
        for c in cutlass.range(0, chunks, 4, unroll=1):
            for n in cutlass.range_constexpr(4):
                value = simt.load_int(
                    base + simt.smaller(c + n, chunks - 1).to(Int64) * (LABELS * 4), simt.less(c + n, chunks)
                )
                sums[0] = sums[0] + simt.select(simt.less(c + n, chunk), value, Int32(0))
                sums[1] = sums[1] + value
        start = self.exclusive_scan(sums[1], shared + Chunk.SHARED, warp, lane) + sums[0]
        self.place(items, start, order.toint() + head.to(Int64) * length.to(Int64) * 4, shared, thread, warp, lane)

    def exclusive_scan(self, value, slots, warp, lane):
        """Sum of `value` over the lower threads of the CTA."""
        total = value
        for step in (1, 2, 4, 8, 16):
            other = cute.arch.shuffle_sync(total, (lane - step) & 31)
            total = total + simt.select(simt.less(lane, step), Int32(0), other)
        simt.shared_store(slots + warp * 4, cute.arch.shuffle_sync(total, 31))
        cute.arch.sync_threads()
        before = total - value
        for w in range(simt.WARPS - 1):
            before = before + simt.select(simt.less(w, warp), simt.shared_load(slots + 4 * w, Int32), Int32(0))
        return before

    def place(self, items, start, order, shared, thread, warp, lane):
        position = start
        for w in range(simt.WARPS):
            at = shared + w * (LABELS * 4) + thread * 4
            count = simt.shared_load(at, Int32)
            simt.shared_store(at, position)
            position = position + count
        cute.arch.sync_threads()
        table = shared + warp * (LABELS * 4)
        for token, valid, label in items:
            # Lanes past the end form a class of their own.
            key = simt.select(valid, label, Int32(LABELS))
            peers = simt.ptx("match.any.sync.b32 {$w0}, {$r0}, 0xffffffff;", Uint32, [key])
            below = simt.ptx(
                "{.reg .b32 m; shl.b32 m, 1, {$r1}; sub.s32 m, m, 1; and.b32 m, m, {$r0}; popc.b32 {$w0}, m;}",
                Int32,
                [peers, lane],
            )
            total = simt.ptx("popc.b32 {$w0}, {$r0};", Int32, [peers])
            at = table + label * 4
            first = simt.shared_load(at, Int32)
            simt.effect(
                "{.reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.global.b32 [{$r0}], {$r1};}",
                [order + (first + below).to(Int64) * 4, token, valid],
            )
            simt.sync_warp()
            leader = valid & simt.less(below, 1)
            simt.shared_add(at, total, leader)
            simt.sync_warp()


def _gmem(kind):
    return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=16)


def build_count(options=""):
    return cute.compile(
        SortCount(), _gmem(cutlass.Uint8), _gmem(Int32), Int32(1), Int32(1), Int32(1), cuda.CUstream(0),
        options=options,
    )  # fmt: skip


def build_order(options=""):
    return cute.compile(
        SortOrder(), _gmem(cutlass.Uint8), _gmem(Int32), _gmem(Int32), Int32(1), Int32(1), Int32(1), cuda.CUstream(0),
        options=options,
    )  # fmt: skip
