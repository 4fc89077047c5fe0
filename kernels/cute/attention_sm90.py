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
from .pipeline import CONSUMERS, MU_ELEMENTS, THREADS, Barriers, initialise, produce, storage
from .ptx import as_int, high_bf16, low_bf16, pack_bf16, pack_fp16
from .softmax import MAGIC_BITS, fragment_view, quad_sum, softmax_tile

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


def await_turn(warpgroup_index):
    """Wait until the other warpgroup has passed the turn to this one (named barriers 1 and 2, one a warpgroup)."""
    cute.arch.barrier(barrier_id=1 + warpgroup_index, number_of_threads=128 * CONSUMERS)


def pass_turn(warpgroup_index):
    """Let the other warpgroup have the tensor cores."""
    cute.arch.barrier_arrive(barrier_id=2 - warpgroup_index, number_of_threads=128 * CONSUMERS)


class AttentionSm90:
    """One attention kernel; `config` holds its compile-time choices."""

    def __init__(self, config):
        self.config = config
        self.expcast = config.probability == "expcast_wide"
        # exp2: a token over P V .. next Q K^T keeps one warpgroup's EX2 under the other's MMAs (+11 %). ExpCast loses
        # 12 % by it: its softmax is short, and the kernel stands at the power limit.
        self.take_turns = not self.expcast

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
            self.collect_row_sums(f)
            warpgroup.fence()
            self.restore_means(f, groups - 1)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        else:
            for j in cutlass.range(tiles, unroll=1):
                self.tile(f, bars, gKs, j, lkv, 0, False, scale)
            sums = fragment_view(f.acc, lo.V_ROWS)
            for r in cutlass.range_constexpr(2):
                f.row_sum[r] = sums[0, r, DIM // 8] + sums[1, r, DIM // 8]
        if const_expr(self.take_turns):  # noqa: SIM102 - compile time and run time
            if warpgroup_index == 0:
                pass_turn(warpgroup_index)
        self.store(f, sv, out, lq, heads, head, row)

    def tile(self, f, bars, gKs, j, lkv, group, first, scale):
        """One key tile. `first`: of its mean group, which is when the previous group's means are restored."""
        config, mmas = self.config, f.mmas
        stage = j % config.stages
        phase = (j // config.stages) & 1
        key_scale = [gKs[h, j] for h in range(2)]
        if first:
            self.collect_row_sums(f)
        acc_scores = f.scores_thread.make_fragment_C(f.scores_thread.partition_shape_C((ROWS, KEYS)))
        self.start_scores(f, acc_scores)
        if not self.take_turns:
            cute.arch.mbarrier_wait(bars.k_full + stage, phase)
        warpgroup.fence()
        if first:
            self.restore_means(f, group + 1)
            if config.key_means:
                for i in range(DIM // 16):
                    mma = mmas.key_means if i else mmas.key_means_first
                    cute.gemm(mma, f.acc_bias, f.tBrQ[None, None, i], f.tBrKm[None, None, i, group & 1], f.acc_bias)
        for i in range(DIM // 32):
            cute.gemm(mmas.scores, acc_scores, f.tSrQ[None, None, i], f.tSrK[None, None, i, stage], acc_scores)
        warpgroup.commit_group()
        if self.take_turns:
            pass_turn(f.warpgroup_index)
        warpgroup.wait_group(0)
        self.release(bars.k_empty + stage)
        addend = None
        if config.key_means:
            lane = (f.thread % 32 & 28) + j % lo.TILES_PER_GROUP
            addend = [[cute.arch.shuffle_sync(f.acc_bias[2 * r + h], lane) * scale for h in range(2)] for r in range(2)]
        rescale, sums, last = softmax_tile(
            self.expcast, acc_scores, f.p_words, f.maximum, f.row_scale, key_scale, addend
        )
        if self.take_turns:
            # The next K tile is waited for here, where it costs nothing, and not inside the turn.
            later = cutlass.min(j + 1, (lkv - 1) // KEYS)
            cute.arch.mbarrier_wait(bars.k_full + later % config.stages, (later // config.stages) & 1)
        cute.arch.mbarrier_wait(bars.v_full + stage, phase)
        if self.take_turns:
            await_turn(f.warpgroup_index)
        acc_tile = f.values_thread.make_fragment_C(f.values_thread.partition_shape_C((ROWS, mmas.columns)))
        warpgroup.fence()
        for i in range(KEYS // 32):
            mma = mmas.values if i else mmas.values_first
            cute.gemm(mma, acc_tile, f.tOrP[None, None, i], f.tOrV[None, None, i, stage], acc_tile)
        warpgroup.commit_group()
        if config.exact_sums:
            block_sums = self.block_sums(f, sums, last, j, lkv)
        warpgroup.wait_group(0)
        self.release(bars.v_empty + stage)
        old, new = fragment_view(f.acc, lo.V_ROWS), fragment_view(acc_tile, mmas.columns)
        for i in range(lo.V_ROWS // 8):
            for r in range(2):
                for b in range(2):
                    gain = block_sums[r][b] if config.exact_sums and i == DIM // 8 else new[b, r, i]
                    old[b, r, i] = old[b, r, i] * rescale[r] + gain
        if config.demean:
            for r in range(2):
                f.row_sum[r] = f.row_sum[r] * rescale[r]

    def block_sums(self, f, sums, last, j, lkv):
        """Row sums [row][block] of tile `j` over its valid keys, in the quad lane that feeds them to the mean MMA; 0 in
        the others.

        Keys beyond `lkv` in the last valid block repeat one real key, so each of them has the P of the block's last
        column: they are subtracted by number, which needs no mask. A block without a valid key counts 0.
        """
        mine = f.thread % 4 == j % lo.TILES_PER_GROUP
        result = []
        for r in range(2):
            row = []
            for h in range(2):
                missing = cutlass.max(j * KEYS + (h + 1) * lo.BLOCK - lkv, 0)
                padding = cute.arch.shuffle_sync(last[r][h], f.thread % 32 | 3)
                total = quad_sum(sums[r][h]) - Float32(missing) * padding
                row.append(cutlass.select_(mine & (missing < lo.BLOCK), total, Float32(0.0)))
            result.append(row)
        return result

    def start_scores(self, f, acc_scores):
        """S := MAGIC. Inside a turn half of it by FMAs on O (times zero), so that two pipes share the 128 writes."""
        if self.take_turns:
            for i in range(cute.size(acc_scores)):
                acc_scores[i] = as_int(f.acc[i // 2] * f.zero + f.magic) if i % 2 == 0 else Int32(MAGIC_BITS)
        else:
            acc_scores.fill(MAGIC_BITS)

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """This warp no longer reads the stage of `barrier`: told to every CTA that writes to it."""
        with cute.arch.elect_one():
            if const_expr(self.config.cluster > 1):
                for rank in cutlass.range_constexpr(self.config.cluster):
                    cute.arch.mbarrier_arrive(barrier, rank)
            else:
                cute.arch.mbarrier_arrive(barrier)

    def collect_row_sums(self, f):
        """Move the row sums of the last 8 blocks into the A fragment of the mean MMA, and start them again at zero.

        Each sum becomes two bf16, of which the second meets a copy of the mean. With one bf16 the exp2 kernels had up
        to 1.2 times the specification's error. l adds the same rounded values: two roundings would not cancel.
        """
        sums = fragment_view(f.acc, lo.V_ROWS)
        for r in range(2):
            exact = [sums[b, r, DIM // 8] for b in range(2)]
            high = pack_bf16(exact[0], exact[1])
            rounded = [low_bf16(high), high_bf16(high)]
            low = pack_bf16(exact[0] - rounded[0], exact[1] - rounded[1])
            f.r_words[r] = high
            f.r_words[2 + r] = low
            f.row_sum[r] = f.row_sum[r] + ((rounded[0] + low_bf16(low)) + (rounded[1] + high_bf16(low)))
            for b in range(2):
                sums[b, r, DIM // 8] = Float32(0.0)

    def restore_means(self, f, group):
        """Queue O += r mu^T with the means in the buffer of `group` modulo 2."""
        cute.gemm(f.mmas.means, f.acc_means, f.tMrR[None, None, 0], f.tMrMu[None, None, 0, group & 1], f.acc_means)

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


def buildables():
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
        for config in configs()
    ]
