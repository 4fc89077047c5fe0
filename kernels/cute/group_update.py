"""Grouping of V, centroids: first centroids, means of the sampled tokens of each group, renumbering.

All write centroids twice: fp32 [BH, 256, 128] for the next update, and as `group_assign` reads them (16 bit, with the
bias -|c|^2 / 2 of the rounded values). Rows beyond the last centroid hold zeros and the bias -inf.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr

from . import simt
from .group_assign import MAX_GROUPS, TABLE, Strided, fragment_offset

#: Tokens that an update looks at, at most (the specification's SAMPLE).
SAMPLE = 4096
#: Rows in flight while a centroid's tokens are added up.
FLIGHT = 8


def as_word(value):
    return simt.ptx("mov.b32 {$w0}, {$r0};", Uint32, [value])


class Centroids:
    """One warp for each centroid, four channels in each lane; grid (BH, 256 / 8), block 256."""

    def store(self, values, exists, head, group, lane, centroids, packed, bias):
        """Four fp32 channels of centroid `group` to all three arrays; zeros and -inf where `exists` is 0."""
        at = head * MAX_GROUPS + group
        values = [simt.select(exists, v, Float32(0.0)) for v in values]
        simt.store16(centroids.toint() + at.to(Int64) * 512 + (lane * 16).to(Int64), [as_word(v) for v in values])
        words = [simt.half2(values[0], values[1], self.fp16), simt.half2(values[2], values[3], self.fp16)]
        out = packed.toint() + head.to(Int64) * TABLE + fragment_offset(group, lane).to(Int64)
        simt.store_int(out, words[0])
        simt.store_int(out + 8, words[1])
        total = Float32(0.0)
        for word in words:
            for v in simt.unpack2(word, self.fp16):
                total = total + v * v
        for mask in (16, 8, 4, 2, 1):
            total = total + simt.shuffle_xor(total, mask)
        value = simt.select(exists, total * -0.5, -Float32.inf)
        simt.store_float(bias.toint() + at.to(Int64) * 4, value)


class Seed(Centroids):
    """Kernel `group_seed`: centroid j is sampled token j * count // groups, of tokens i * length // count."""

    def __init__(self, fp16: bool):
        self.fp16 = fp16

    @cute.jit
    def __call__(
        self, v: cute.Pointer, centroids: cute.Pointer, packed: cute.Pointer, bias: cute.Pointer, stride_b: Int64,
        stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32, count: Int32, groups: Int32, grid_x: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(v, centroids, packed, bias, stride_b, stride_h, stride_l, heads, length, count, groups).launch(
            grid=(grid_x, MAX_GROUPS // simt.WARPS, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, v: cute.Pointer, centroids: cute.Pointer, packed: cute.Pointer, bias: cute.Pointer, stride_b: Int64,
        stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32, count: Int32, groups: Int32,
    ):  # fmt: skip
        head, part, _ = cute.arch.block_idx()
        _, warp, lane = simt.thread_position()
        group = part * simt.WARPS + warp
        exists = simt.less(group, groups)
        token = Strided(count, length)(Strided(groups, count)(simt.smaller(group, groups - 1)))
        rows = simt.Rows(v, head, heads, stride_b, stride_h, stride_l)
        words = simt.load8(rows.address(token, lane * 8), exists)
        values = simt.unpack2(words[0], self.fp16) + simt.unpack2(words[1], self.fp16)
        self.store(values, exists, head, group, lane, centroids, packed, bias)


class Update(Centroids):
    """Kernel `group_update`: grid (BH, 256 / 8), block 256, SHARED bytes of shared memory.

    Centroid = mean of the sampled tokens that carry its label, added in token order; without tokens it stays.
    labels: uint8, of all tokens [BH, length] (`all_labels` 1) or of the sample [BH, count].
    """

    SHARED = SAMPLE + simt.WARPS * SAMPLE * 2

    def __init__(self, fp16: bool):
        self.fp16 = fp16

    @cute.jit
    def __call__(
        self, v: cute.Pointer, labels: cute.Pointer, centroids: cute.Pointer, packed: cute.Pointer, bias: cute.Pointer,
        stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32, count: Int32, groups: Int32,
        all_labels: Int32, grid_x: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(
            v, labels, centroids, packed, bias, stride_b, stride_h, stride_l, heads, length, count, groups, all_labels
        ).launch(
            grid=(grid_x, MAX_GROUPS // simt.WARPS, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, v: cute.Pointer, labels: cute.Pointer, centroids: cute.Pointer, packed: cute.Pointer, bias: cute.Pointer,
        stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32, count: Int32, groups: Int32,
        all_labels: Int32,
    ):  # fmt: skip
        head, part, _ = cute.arch.block_idx()
        thread, warp, lane = simt.thread_position()
        shared = simt.shared_memory(self.SHARED)
        group = part * simt.WARPS + warp
        exists = simt.less(group, groups)
        width = simt.select(all_labels, length, count)
        base = labels.toint() + head.to(Int64) * width.to(Int64)
        strided = Strided(count, length)
        for i in cutlass.range(thread, SAMPLE, simt.THREADS, unroll=4):
            inside = simt.less(i, count)
            at = simt.smaller(i, count - 1)
            at = simt.select(all_labels, strided(at), at)
            label = simt.load_byte(base + at.to(Int64), inside)
            simt.effect("st.shared.u8 [{$r0}], {$r1};", [shared + i, label])
        cute.arch.sync_threads()
        listed = shared + SAMPLE + warp * (SAMPLE * 2)
        found = cute.make_rmem_tensor(1, Int32)
        found.fill(0)
        for start in cutlass.range(0, count, 32, unroll=4):
            self.collect(shared, listed, found, start + lane, count, group, lane)
        simt.sync_warp()
        total = cute.make_rmem_tensor(4, Float32)
        total.fill(0.0)
        rows = simt.Rows(v, head, heads, stride_b, stride_h, stride_l)
        size = found[0]
        for start in cutlass.range(0, size, FLIGHT, unroll=1):
            self.add(rows, strided, listed, total, start, size, lane)
        at = (head * MAX_GROUPS + group).to(Int64) * 512 + (lane * 16).to(Int64)
        old = simt.load_floats(centroids.toint() + at, 4)
        number = simt.select(size, size, Int32(1)).to(Float32)
        values = [simt.select(size, simt.divide(total[n], number), old[n]) for n in range(4)]
        self.store(values, exists, head, group, lane, centroids, packed, bias)

    def collect(self, shared, listed, found, i, count, group, lane):
        """Append sampled tokens i (one in each lane) that carry label `group` to the warp's list."""
        label = simt.ptx("ld.shared.u8 {$w0}, [{$r0}];", Int32, [shared + simt.smaller(i, count - 1)])
        mine = simt.less(i, count) & simt.select(label - group, Int32(0), Int32(1))
        votes = simt.ptx(
            "{.reg .pred p; setp.ne.s32 p, {$r0}, 0; vote.sync.ballot.b32 {$w0}, p, 0xffffffff;}", Uint32, [mine]
        )
        below = simt.ptx(
            "{.reg .b32 m; shl.b32 m, 1, {$r1}; sub.s32 m, m, 1; and.b32 m, m, {$r0}; popc.b32 {$w0}, m;}",
            Int32,
            [votes, lane],
        )
        simt.effect(
            "{.reg .pred p; .reg .b16 h; setp.ne.s32 p, {$r2}, 0; cvt.u16.u32 h, {$r1}; @p st.shared.u16 [{$r0}], h;}",
            [listed + (found[0] + below) * 2, i, mine],
        )
        found[0] = found[0] + simt.ptx("popc.b32 {$w0}, {$r0};", Int32, [votes])

    def add(self, rows, strided, listed, total, start, size, lane):
        words = []
        for n in range(FLIGHT):
            at = listed + simt.smaller(start + n, size - 1) * 2
            i = simt.ptx("{.reg .b16 h; ld.shared.u16 h, [{$r0}]; cvt.u32.u16 {$w0}, h;}", Int32, [at])
            token = strided(i)
            words.append(simt.load8(rows.address(token, lane * 8), simt.less(start + n, size)))
        for pair in words:
            values = simt.unpack2(pair[0], self.fp16) + simt.unpack2(pair[1], self.fp16)
            for n in range(4):
                total[n] = total[n] + values[n]


class Place(Centroids):
    """Kernel `group_place`: grid (BH, 256 / 8), block 256: centroid i of `source` becomes centroid rank[i], or i.

    source: fp32, `source_rows` rows of 128 a head. rank: int32 [BH, 256] (unused without `ranked`).
    """

    def __init__(self, fp16: bool, ranked: bool):
        self.fp16, self.ranked = fp16, ranked

    @cute.jit
    def __call__(
        self, source: cute.Pointer, rank: cute.Pointer, centroids: cute.Pointer, packed: cute.Pointer,
        bias: cute.Pointer, groups: Int32, source_rows: Int32, grid_x: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(source, rank, centroids, packed, bias, groups, source_rows).launch(
            grid=(grid_x, MAX_GROUPS // simt.WARPS, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, source: cute.Pointer, rank: cute.Pointer, centroids: cute.Pointer, packed: cute.Pointer,
        bias: cute.Pointer, groups: Int32, source_rows: Int32,
    ):  # fmt: skip
        head, part, _ = cute.arch.block_idx()
        _, warp, lane = simt.thread_position()
        group = part * simt.WARPS + warp
        row = head * source_rows + simt.smaller(group, groups - 1)
        values = simt.load_floats(source.toint() + row.to(Int64) * 512 + (lane * 16).to(Int64), 4)
        target = self.target(rank, head, group)
        self.store(values, simt.less(group, groups), head, target, lane, centroids, packed, bias)

    def target(self, rank, head, group):
        if not self.ranked:
            return group
        return simt.load_int(rank.toint() + (head * MAX_GROUPS + group).to(Int64) * 4)


def _gmem(kind):
    return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=16)


def build_seed(options="", fp16=False):
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    one = Int32(1)
    return cute.compile(
        Seed(fp16), _gmem(kind), _gmem(Float32), _gmem(kind), _gmem(Float32), Int64(1), Int64(1), Int64(1), one, one,
        one, one, one, cuda.CUstream(0), options=options,
    )  # fmt: skip


def build(options="", fp16=False):
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    one = Int32(1)
    return cute.compile(
        Update(fp16), _gmem(kind), _gmem(cutlass.Uint8), _gmem(Float32), _gmem(kind), _gmem(Float32), Int64(1),
        Int64(1), Int64(1), one, one, one, one, one, one, cuda.CUstream(0), options=options,
    )  # fmt: skip


def build_place(options="", fp16=False, ranked=True):
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    return cute.compile(
        Place(fp16, ranked), _gmem(Float32), _gmem(Int32), _gmem(Float32), _gmem(kind), _gmem(Float32), Int32(1),
        Int32(1), Int32(1), cuda.CUstream(0), options=options,
    )  # fmt: skip
