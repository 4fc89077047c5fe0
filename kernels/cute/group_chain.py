"""Grouping of V, order: centroids renumbered along a greedy chain of nearest neighbours.

One CTA for each head, two threads for each centroid with 64 channels each in registers. Each step reads the current
centroid (the same addresses in all threads of a half); the nearest unused one is found by an integer minimum over keys
in the order of the distances, ties to the lower index.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_ptr

from . import simt
from .group_assign import MAX_GROUPS, TABLE, fragment_offset
from .group_update import as_word

#: Key of a used or missing centroid; the keys of others are clamped below it.
USED = 0x7FFFFFFF


class Chain:
    """Kernel `group_chain`: grid (BH), block 512, 256 bytes of shared memory.

    source fp32 [BH, groups, 128] (a stride of `source_rows` rows between heads) -> centroids fp32 [BH, 256, 128],
    packed and bias as `group_assign` reads them: bias fp32 [BH, 256]. source and centroids must not overlap.
    """

    SHARED = 256
    THREADS = 2 * MAX_GROUPS

    def __init__(self, fp16: bool):
        self.fp16 = fp16

    @cute.jit
    def __call__(
        self, source: cute.Pointer, centroids: cute.Pointer, packed: cute.Pointer, bias: cute.Pointer, groups: Int32,
        source_rows: Int32, grid_x: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(source, centroids, packed, bias, groups, source_rows).launch(
            grid=(grid_x, 1, 1), block=(self.THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, source: cute.Pointer, centroids: cute.Pointer, packed: cute.Pointer, bias: cute.Pointer, groups: Int32,
        source_rows: Int32,
    ):  # fmt: skip
        head, _, _ = cute.arch.block_idx()
        thread, warp, _ = simt.thread_position()
        shared = simt.shared_memory(self.SHARED)
        base = source.toint() + (head * source_rows).to(Int64) * 512
        group, half = thread // 2, thread % 2
        exists = simt.less(group, groups)
        base = base + (half * 256).to(Int64)
        mine = simt.load_floats(base + simt.smaller(group, groups - 1).to(Int64) * 512, 64)
        mine = [simt.select(exists, v, Float32(0.0)) for v in mine]
        norm = Float32(0.0)
        for v in mine:
            norm = norm + v * v
        norm = norm + simt.shuffle_xor(norm, 1)
        state = cute.make_rmem_tensor(3, Int32)             # current centroid, rank of mine, whether mine is used
        state[0] = Int32(0)
        state[1] = group
        state[2] = 1 - (exists & simt.less(0, group))
        for step in cutlass.range(1, groups, unroll=1):
            self.step(base, mine, norm, state, step, shared + (step & 1) * 128, group, warp)
        self.store(mine, exists, head, state[1], half, centroids, packed, bias)

    def step(self, base, mine, norm, state, step, slots, group, warp):
        row = base + state[0].to(Int64) * 512
        dots = [Float32(0.0)] * 4
        for n in range(16):
            values = simt.load_floats(row + 16 * n, 4)
            dots = [d + a * b for d, a, b in zip(dots, values, mine[4 * n : 4 * n + 4], strict=True)]
        dot = (dots[0] + dots[1]) + (dots[2] + dots[3])
        distance = norm - (dot + simt.shuffle_xor(dot, 1)) * 2.0
        # Signed integers in the order of the floats.
        key = simt.ptx(
            "{.reg .s32 b, s; mov.b32 b, {$r0}; shr.s32 s, b, 31; and.b32 s, s, 0x7fffffff; xor.b32 b, b, s; "
            "min.s32 {$w0}, b, 0x7ffffffe;}",
            Int32,
            [distance],
        )
        key = simt.select(state[2], Int32(USED), key)
        least = simt.ptx("redux.sync.min.s32 {$w0}, {$r0}, 0xffffffff;", Int32, [key])
        candidate = simt.select(key ^ least, Int32(USED), group)
        first = simt.ptx("redux.sync.min.s32 {$w0}, {$r0}, 0xffffffff;", Int32, [candidate])
        simt.effect("st.shared.v2.b32 [{$r0}], {{$r1},{$r2}};", [slots + warp * 8, least, first])
        cute.arch.sync_threads()
        best, index = Int32(USED), Int32(0)
        for w in range(self.THREADS // 32):
            other = simt.ptx("ld.shared.v2.b32 {{$w0},{$w1}}, [{$r0}];", [Int32, Int32], [slots + w * 8])
            closer = simt.less(other[0], best)
            best, index = simt.select(closer, other[0], best), simt.select(closer, other[1], index)
        taken = simt.select(index ^ group, Int32(0), Int32(1))
        state[0] = index
        state[1] = simt.select(taken, step, state[1])
        state[2] = state[2] | taken

    def store(self, mine, exists, head, rank, half, centroids, packed, bias):
        at = head * MAX_GROUPS + rank
        out = centroids.toint() + at.to(Int64) * 512 + (half * 256).to(Int64)
        for n in range(16):
            simt.store16(out + 16 * n, [as_word(v) for v in mine[4 * n : 4 * n + 4]])
        total = Float32(0.0)
        for n in range(16):
            words = [simt.half2(mine[4 * n + 2 * m], mine[4 * n + 2 * m + 1], self.fp16) for m in range(2)]
            out = packed.toint() + head.to(Int64) * TABLE + fragment_offset(rank, half * 16 + n).to(Int64)
            simt.store_int(out, words[0])
            simt.store_int(out + 8, words[1])
            for word in words:
                for v in simt.unpack2(word, self.fp16):
                    total = total + v * v
        total = total + simt.shuffle_xor(total, 1)
        value = simt.select(exists, total * -0.5, -Float32.inf)
        simt.store_float(bias.toint() + at.to(Int64) * 4, value)


def build(options="", fp16=False):
    gmem = lambda t: make_ptr(t, 0, cute.AddressSpace.gmem, assumed_align=16)  # noqa: E731
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    return cute.compile(
        Chain(fp16), gmem(Float32), gmem(Float32), gmem(kind), gmem(Float32), Int32(1), Int32(1), Int32(1),
        cuda.CUstream(0), options=options,
    )  # fmt: skip
