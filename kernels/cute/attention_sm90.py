"""Attention for sm_90a: INT8 Q K^T, FP8 P V, ExpCast or exp2, V-Smooth means and key block means inside the recurrence.

A CTA computes 128 query rows of one head: two consumer warpgroups of 64 rows and one producer warp. For each 256-key
tile a consumer does

    S = MAGIC + Q K^T          IGMMA on an accumulator that starts at MAGIC: the fp32 scores are there without a convert
    P = bytes(a S + b)         one FMA and half a packing instruction per element
    T = P V^T                  QGMMA; 136 columns, of which 8 are the row sums of 8 key blocks (rows of ones in V^T)
    O = alpha O + T            two-level accumulation: FP8 wgmma keeps about 14 bits, so T must start from zero

Row sums of 8 blocks, in two bf16 each, are the A fragment of one bf16 MMA with the 8 block means. It is queued in
front of the next group's first Q K^T and completes under the same wait, so restoring the means is nearly free.

What ptxas needs to keep the MMAs asynchronous (it serialises them with warning C7510 ff. otherwise): no branch between
a wgmma and its wait, no ordinary write to an accumulator in flight, nothing in flight at a loop's end. The inner loop
has no branch, hence the loop over groups with its first tile outside the inner one.
"""

from __future__ import annotations

from functools import partial

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int8, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_ptr

from . import layouts as lo
from .buildable import Buildable
from .config import configs
from .fragments import DIM, KEYS, ROWS, Fragments, Mmas
from .key_tile import KeyTiles, await_turn, pass_turn
from .pipeline import MU_ELEMENTS, THREADS, Barriers, initialise, produce, storage
from .ptx import pack_bf16, pack_fp16
from .softmax import fragment_view, quad_sum

#: Registers of a producer and of a consumer thread: 128 * 24 + 256 * 240 fit the 65536 of an SM.
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 24, 240

#: Kernel parameters in order, with their element types; the pointers first.
POINTERS = (
    ("q", Int8, 128),
    ("k", Int8, 128),
    ("v", Float8E4M3FN, 128),
    ("qs", Float32, 4),
    ("ks", Float32, 4),
    ("sv", Float32, 16),
    ("mu", BFloat16, 128),
    ("qb", BFloat16, 128),
    ("km", BFloat16, 128),
    ("out", Uint32, 16),
)
SCALARS = ("lq", "lkv", "heads", "scale")


class AttentionSm90(KeyTiles):
    """One attention kernel; `config` holds its compile-time choices."""

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        qs: cute.Pointer,
        ks: cute.Pointer,
        sv: cute.Pointer,
        mu: cute.Pointer,
        qb: cute.Pointer,
        km: cute.Pointer,
        out: cute.Pointer,
        lq: Int32,
        lkv: Int32,
        heads: Int32,
        scale: Float32,
        grid_x: Int32,
        grid_y: Int32,
        stream: cuda.CUstream,
    ):
        self.storage = storage(self.config)
        self.kernel(q, k, v, qs, ks, sv, mu, qb, km, out, lq, lkv, heads, scale).launch(
            grid=(grid_x, grid_y, 1),
            block=(THREADS, 1, 1),
            cluster=(self.config.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        qs: cute.Pointer,
        ks: cute.Pointer,
        sv: cute.Pointer,
        mu: cute.Pointer,
        qb: cute.Pointer,
        km: cute.Pointer,
        out: cute.Pointer,
        lq: Int32,
        lkv: Int32,
        heads: Int32,
        scale: Float32,
    ):
        """Grid (query tiles, B H). `lq`, `lkv`: lengths; `heads`: H; `scale`: score scale times log2 e."""
        config = self.config
        tiles = (lkv + KEYS - 1) // KEYS
        thread, _, _ = cute.arch.thread_idx()
        query_tile, head, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        group_index = cute.arch.make_warp_uniform(thread // 128)
        shared = cutlass.memory.SmemAllocator().allocate(self.storage)
        bars = Barriers(shared)
        if const_expr(config.demean):
            # Buffer 1 is multiplied by zero row sums before a group has arrived there: it must not spell NaN.
            words = cute.make_tensor(
                cute.recast_ptr(shared.mu.data_ptr() + MU_ELEMENTS, dtype=Int32), cute.make_layout(MU_ELEMENTS // 2)
            )
            for i in cutlass.range(thread, MU_ELEMENTS // 2, THREADS, unroll=1):
                words[i] = Int32(0)
            cute.arch.fence_view_async_shared()
        if thread == 0:
            initialise(bars, config.stages, config.cluster)
        cute.arch.mbarrier_init_fence()
        if const_expr(config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if group_index == 0:
            cute.arch.setmaxregister_decrease(_PRODUCER_REGISTERS)
            if warp == 0:
                produce(
                    config,
                    shared,
                    bars,
                    {"q": q, "k": k, "v": v, "mu": mu, "qb": qb, "km": km},
                    head,
                    query_tile,
                    cute.arch.grid_dim()[0]
                    if const_expr(config.cluster == 1)
                    else (lq + lo.QUERY_TILE - 1) // lo.QUERY_TILE,
                    tiles,
                )
        else:
            cute.arch.setmaxregister_increase(_CONSUMER_REGISTERS)
            self.consume(shared, bars, qs, ks, sv, out, lq, lkv, heads, scale, group_index - 1)
        if const_expr(config.cluster > 1):
            # No CTA may leave while another still writes to its shared memory or signals its barriers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def consume(
        self,
        shared: cutlass.Constexpr,
        bars: cutlass.Constexpr,
        qs: cute.Pointer,
        ks: cute.Pointer,
        sv: cute.Pointer,
        out: cute.Pointer,
        lq: Int32,
        lkv: Int32,
        heads: Int32,
        scale: Float32,
        warpgroup_index: Int32,
    ):
        """One consumer warpgroup: the loop over key tiles, then the output."""
        config = self.config
        tiles = (lkv + KEYS - 1) // KEYS
        thread, _, _ = cute.arch.thread_idx()
        query_tile, head, _ = cute.arch.block_idx()
        thread = thread % 128
        # This thread's rows within the head's padded rows: `row` and `row + 8`.
        row = query_tile * lo.QUERY_TILE + warpgroup_index * ROWS + (thread // 32) * 16 + (thread % 32) // 4
        # A CTA that only fills up its cluster computes the last query tile once more.
        alone = config.cluster == 1
        query_tiles = cute.arch.grid_dim()[0] if const_expr(alone) else (lq + lo.QUERY_TILE - 1) // lo.QUERY_TILE
        beyond = 0 if const_expr(alone) else cutlass.max(query_tile - (query_tiles - 1), 0)
        known = row - beyond * lo.QUERY_TILE
        gQs = cute.make_tensor(
            qs + (head * query_tiles).to(Int64) * lo.QUERY_TILE + known, cute.make_layout(2, stride=8)
        )
        row_scale = [gQs[r] * scale for r in range(2)]
        gKs = cute.make_tensor(ks + (head * tiles).to(Int64) * 2, cute.make_layout((2, 1 << 24), stride=(1, 2)))
        f = Fragments(config, shared, Mmas(config), thread, warpgroup_index, row_scale)
        cute.arch.mbarrier_wait(bars.q_full, 0)
        if const_expr(self.take_turns):
            cute.arch.mbarrier_wait(bars.k_full, 0)
            if warpgroup_index == 1:
                pass_turn(warpgroup_index)
            await_turn(warpgroup_index)
        if const_expr(config.demean):
            groups = (tiles + lo.TILES_PER_GROUP - 1) // lo.TILES_PER_GROUP
            for group in cutlass.range(groups, unroll=1):
                first = group * lo.TILES_PER_GROUP
                self.tile(f, bars, gKs, first, lkv, group, True, scale)
                for j in cutlass.range(first + 1, cutlass.min(first + lo.TILES_PER_GROUP, tiles), unroll=1):
                    self.tile(f, bars, gKs, j, lkv, group, False, scale)
            if const_expr(config.tuning.split):
                self.merge(f, f.acc_tile, f.rescale)
            self.collect_row_sums(f)
            warpgroup.fence()
            self.restore_means(f, groups - 1)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        else:
            for j in cutlass.range(tiles, unroll=1):
                self.tile(f, bars, gKs, j, lkv, 0, False, scale)
            if const_expr(config.tuning.split):
                self.merge(f, f.acc_tile, f.rescale)
            sums = fragment_view(f.acc, lo.V_ROWS)
            for r in cutlass.range_constexpr(2):
                f.row_sum[r] = sums[0, r, DIM // 8] + sums[1, r, DIM // 8]
        if const_expr(self.take_turns):  # noqa: SIM102 - compile time and run time
            if warpgroup_index == 0:
                pass_turn(warpgroup_index)
        self.store(f, sv, out, lq, heads, head, row)

    @cute.jit
    def store(
        self,
        f: cutlass.Constexpr,
        sv: cute.Pointer,
        out: cute.Pointer,
        lq: Int32,
        heads: Int32,
        head: Int32,
        row: Int32,
    ):
        """Write O sv / l of rows below `lq` to out [B, Lq, H, 128]. A row without weight becomes 0."""
        pack = pack_bf16 if const_expr(self.config.output == "bf16") else pack_fp16
        acc = fragment_view(f.acc, lo.V_ROWS)
        pair = (f.thread % 4) * 2
        gSv = cute.make_tensor(sv + (head * DIM + pair), cute.make_layout((2, DIM // 8), stride=(1, 8)))
        # All loads come before the first store, which they could not pass.
        channel_scale = [[gSv[b, i] for b in range(2)] for i in range(DIM // 8)]
        batch = head // heads
        for r in cutlass.range_constexpr(2):
            total = quad_sum(f.row_sum[r])
            inverse = Float32(0.0)
            if total > 0.0:
                inverse = cute.arch.rcp_approx(total)
            if row + 8 * r < lq:
                line = (batch.to(Int64) * lq + (row + 8 * r)) * heads + head % heads
                gOut = cute.make_tensor(out + (line * (DIM // 2) + f.thread % 4), cute.make_layout(DIM // 8, stride=4))
                for i in cutlass.range_constexpr(DIM // 8):
                    y = [acc[b, r, i] * inverse * channel_scale[i][b] for b in range(2)]
                    gOut[i] = pack(y[0], y[1])


def _compile(config, options):
    pointers = [make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align) for _, dtype, align in POINTERS]
    numbers = [Int32(1), Int32(1), Int32(1), Float32(1.0), Int32(1), Int32(1)]
    return cute.compile(AttentionSm90(config), *pointers, *numbers, cuda.CUstream(0), options=options)


def buildables(tuning):
    """Every sm_90a attention kernel."""
    arguments = tuple(name for name, _, _ in POINTERS) + SCALARS
    return [
        Buildable(
            config.name,
            partial(_compile, config),
            storage(config).size_in_bytes(),
            "query_tiles(lq) rounded up to whole clusters, batch * heads, 1",
            arguments,
            config.cluster,
        )
        for config in configs(tuning)
    ]
