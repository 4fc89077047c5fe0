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
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_ptr

from . import layouts as lo
from .buildable import Buildable
from .config import configs
from .pipeline import CONSUMERS, MU_ELEMENTS, THREADS, Barriers, initialise, produce, storage
from .ptx import high_bf16, low_bf16, pack_bf16, pack_fp16
from .softmax import MAGIC_BITS, fragment_view, quad_sum, softmax_tile

ROWS, DIM, KEYS = lo.WARPGROUP_ROWS, lo.HEAD_DIM, lo.KEY_TILE
_K_SW128 = warpgroup.SmemLayoutAtomKind.K_SW128
_K_SW32 = warpgroup.SmemLayoutAtomKind.K_SW32
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
SCALARS = ("lq", "tiles", "heads", "scale")


class Mmas:
    """The tiled MMAs, one for each value of ACCUMULATE, so that nothing is mutated inside a staged loop."""

    def __init__(self):
        k_major, registers = OperandMajorMode.K, warpgroup.OperandSource.RMEM
        smem = warpgroup.OperandSource.SMEM
        scores = warpgroup.MmaI8Op(Int8, Int8, Int32, (ROWS, KEYS, 32), smem, k_major, k_major)
        self.scores = self._tiled(scores, True)
        values = (Float8E4M3FN, Float8E4M3FN, Float32, (ROWS, lo.V_ROWS, 32), registers, k_major, k_major)
        self.values_first = self._tiled(warpgroup.MmaF8Op(*values), False)
        self.values = self._tiled(warpgroup.MmaF8Op(*values), True)
        means = warpgroup.MmaF16BF16Op(BFloat16, Float32, (ROWS, DIM, 16), registers, k_major, k_major)
        self.means = self._tiled(means, True)
        key_means = (BFloat16, Float32, (ROWS, lo.MEAN_GROUP, 16), smem, k_major, k_major)
        self.key_means_first = self._tiled(warpgroup.MmaF16BF16Op(*key_means), False)
        self.key_means = self._tiled(warpgroup.MmaF16BF16Op(*key_means), True)

    @staticmethod
    def _tiled(op, accumulate):
        mma = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma


class Fragments:
    """What one consumer thread holds: operand descriptors, accumulators, running maxima and sums."""

    def __init__(self, config, shared, mmas, thread, warpgroup_index, row_scale):
        def tiled(memory, kind, dtype, shape):
            layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, (0, 1, 2))
            return memory.get_tensor(layout.outer, swizzle=layout.inner)

        stages = config.stages
        self.mmas, self.thread, self.row_scale = mmas, thread, row_scale
        self.scores_thread, self.values_thread = mmas.scores.get_slice(thread), mmas.values.get_slice(thread)
        sQ = tiled(shared.q, _K_SW128, Int8, (ROWS, DIM, CONSUMERS))
        sK = tiled(shared.k, _K_SW128, Int8, (KEYS, DIM, stages))
        sV = tiled(shared.v, _K_SW128, Float8E4M3FN, (lo.V_ROWS, KEYS, stages))
        tSrQ = self.scores_thread.make_fragment_A(self.scores_thread.partition_A(sQ))
        self.tSrQ = tSrQ[None, None, None, warpgroup_index]
        self.tSrK = self.scores_thread.make_fragment_B(self.scores_thread.partition_B(sK))
        self.tOrV = self.values_thread.make_fragment_B(self.values_thread.partition_B(sV))
        self.tOrP = self.values_thread.make_fragment_A(self.values_thread.partition_shape_A((ROWS, KEYS)))
        self.p_words = cute.recast_tensor(self.tOrP, Uint32)
        self.acc = cute.make_rmem_tensor(lo.V_ROWS // 2, Float32)
        self.acc.fill(0.0)
        self.maximum = cute.make_rmem_tensor(2, Float32)
        self.maximum.fill(-Float32.inf)
        self.row_sum = cute.make_rmem_tensor(2, Float32)
        self.row_sum.fill(0.0)
        if config.demean:
            means = mmas.means.get_slice(thread)
            sMu = tiled(shared.mu, _K_SW32, BFloat16, (DIM, lo.MEAN_WIDTH, 2))
            self.tMrMu = means.make_fragment_B(means.partition_B(sMu))
            self.tMrR = means.make_fragment_A(means.partition_shape_A((ROWS, lo.MEAN_WIDTH)))
            self.r_words = cute.recast_tensor(self.tMrR, Uint32)
            self.r_words.fill(0)
            # The first 128 columns of O, as the accumulator of the mean MMA.
            layout = means.make_fragment_C(means.partition_shape_C((ROWS, DIM))).layout
            self.acc_means = cute.make_tensor(self.acc.iterator, layout)
        if config.key_means:
            key_means = mmas.key_means.get_slice(thread)
            sQb = tiled(shared.qb, _K_SW128, BFloat16, (ROWS, DIM, CONSUMERS))
            sKm = tiled(shared.km, _K_SW128, BFloat16, (lo.MEAN_GROUP, DIM, 2))
            self.tBrQ = key_means.make_fragment_A(key_means.partition_A(sQb))[None, None, None, warpgroup_index]
            self.tBrKm = key_means.make_fragment_B(key_means.partition_B(sKm))
            # q . (key mean) of this group's 8 blocks: blocks 2 i, 2 i + 1 in quad lane i.
            self.acc_bias = key_means.make_fragment_C(key_means.partition_shape_C((ROWS, lo.MEAN_GROUP)))


class AttentionSm90:
    """One attention kernel; `config` holds its compile-time choices."""

    def __init__(self, config):
        self.config = config
        self.expcast = config.probability == "expcast_wide"

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
        tiles: Int32,
        heads: Int32,
        scale: Float32,
        grid_x: Int32,
        grid_y: Int32,
        stream: cuda.CUstream,
    ):
        self.storage = storage(self.config)
        self.kernel(q, k, v, qs, ks, sv, mu, qb, km, out, lq, tiles, heads, scale).launch(
            grid=(grid_x, grid_y, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
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
        tiles: Int32,
        heads: Int32,
        scale: Float32,
    ):
        """Grid (query tiles, B H). `tiles`: key tiles; `heads`: H; `scale`: score scale times log2 e."""
        config = self.config
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
            initialise(bars, config.stages)
        cute.arch.mbarrier_init_fence()
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
                    tiles,
                )
        else:
            cute.arch.setmaxregister_increase(_CONSUMER_REGISTERS)
            self.consume(shared, bars, qs, ks, sv, out, lq, tiles, heads, scale, group_index - 1)

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
        tiles: Int32,
        heads: Int32,
        scale: Float32,
        warpgroup_index: Int32,
    ):
        """One consumer warpgroup: the loop over key tiles, then the output."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        query_tile, head, _ = cute.arch.block_idx()
        thread = thread % 128
        # This thread's rows within the head's padded rows: `row` and `row + 8`.
        row = query_tile * lo.QUERY_TILE + warpgroup_index * ROWS + (thread // 32) * 16 + (thread % 32) // 4
        gQs = cute.make_tensor(
            qs + (head * cute.arch.grid_dim()[0]).to(Int64) * lo.QUERY_TILE + row, cute.make_layout(2, stride=8)
        )
        row_scale = [gQs[r] * scale for r in range(2)]
        gKs = cute.make_tensor(ks + (head * tiles).to(Int64) * 2, cute.make_layout((2, 1 << 24), stride=(1, 2)))
        f = Fragments(config, shared, Mmas(), thread, warpgroup_index, row_scale)
        cute.arch.mbarrier_wait(bars.q_full, 0)
        if const_expr(config.demean):
            groups = (tiles + lo.TILES_PER_GROUP - 1) // lo.TILES_PER_GROUP
            for group in cutlass.range(groups, unroll=1):
                first = group * lo.TILES_PER_GROUP
                self.tile(f, bars, gKs, first, group, True, scale)
                for j in cutlass.range(first + 1, cutlass.min(first + lo.TILES_PER_GROUP, tiles), unroll=1):
                    self.tile(f, bars, gKs, j, group, False, scale)
            self.collect_row_sums(f)
            warpgroup.fence()
            self.restore_means(f, groups - 1)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        else:
            for j in cutlass.range(tiles, unroll=1):
                self.tile(f, bars, gKs, j, 0, False, scale)
            sums = fragment_view(f.acc, lo.V_ROWS)
            for r in cutlass.range_constexpr(2):
                f.row_sum[r] = sums[0, r, DIM // 8] + sums[1, r, DIM // 8]
        self.store(f, sv, out, lq, heads, head, row)

    def tile(self, f, bars, gKs, j, group, first, scale):
        """One key tile. `first`: of its mean group, which is when the previous group's means are restored."""
        config, mmas = self.config, f.mmas
        stage = j % config.stages
        phase = (j // config.stages) & 1
        key_scale = [gKs[h, j] for h in range(2)]
        if first:
            self.collect_row_sums(f)
        acc_scores = f.scores_thread.make_fragment_C(f.scores_thread.partition_shape_C((ROWS, KEYS)))
        acc_scores.fill(MAGIC_BITS)
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
        warpgroup.wait_group(0)
        self.release(bars.k_empty + stage)
        addend = None
        if config.key_means:
            lane = (f.thread % 32 & 28) + j % lo.TILES_PER_GROUP
            addend = [[cute.arch.shuffle_sync(f.acc_bias[2 * r + h], lane) * scale for h in range(2)] for r in range(2)]
        rescale = softmax_tile(self.expcast, acc_scores, f.p_words, f.maximum, f.row_scale, key_scale, addend)
        cute.arch.mbarrier_wait(bars.v_full + stage, phase)
        acc_tile = f.values_thread.make_fragment_C(f.values_thread.partition_shape_C((ROWS, lo.V_ROWS)))
        warpgroup.fence()
        for i in range(KEYS // 32):
            mma = mmas.values if i else mmas.values_first
            cute.gemm(mma, acc_tile, f.tOrP[None, None, i], f.tOrV[None, None, i, stage], acc_tile)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.release(bars.v_empty + stage)
        old, new = fragment_view(f.acc, lo.V_ROWS), fragment_view(acc_tile, lo.V_ROWS)
        for i in range(lo.V_ROWS // 8):
            for r in range(2):
                for b in range(2):
                    old[b, r, i] = old[b, r, i] * rescale[r] + new[b, r, i]
        if config.demean:
            for r in range(2):
                f.row_sum[r] = f.row_sum[r] * rescale[r]

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """This warp no longer reads the stage of `barrier`."""
        with cute.arch.elect_one():
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
                    y = [acc[b, r, i] * inverse * gSv[b, i] for b in range(2)]
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
            "query_tiles(lq), batch * heads, 1",
            arguments,
        )
        for config in configs()
    ]
