"""Attention for sm_120a: NVFP4 Q K^T and P V, two-level P, V block means and key block means inside the recurrence.

A CTA computes 128 query rows of one head: eight consumer warps of 16 rows and one producer warp. For each 128-key tile
a consumer does

    S = Q K^T            32 block-scaled MMAs, m16n8k64; K's columns are permuted so that S already is the A fragment
    P = two-level exp2   E4M3 scales of 16 keys, elements in units of the rounded scale (`softmax_nvfp4`)
    T = P V^T            34 MMAs; the last n8 tile multiplies rows of ones, whose products are the row sums of 8 blocks
    O = alpha O + T      two-level accumulation: an FMA in place of the rescale multiply, and no more than two MMAs ever
                         add to one accumulator, so that its width inside the tensor core hardly matters

P V and the row sums see the same codes, so l is exactly the sum of the P that multiplied V. The row sums of 8 blocks,
rounded to bf16, are the A fragment of one m16n8k8 bf16 MMA a channel tile with the 8 block means; l adds the same
rounded sums. (Multiplying by FMAs instead takes 64 and the loads of the means for every block, this 2.)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr
from cutlass.cute.runtime import make_ptr

from . import emulated_sm120, ptx_sm120
from . import layouts_nvfp4 as lo
from .buildable import Buildable
from .config_nvfp4 import configs
from .pipeline_nvfp4 import (
    K_WORDS,
    PRODUCER_THREADS,
    STAGES,
    THREADS,
    V_WORDS,
    Barriers,
    await_tile,
    initialise,
    produce,
    storage,
)
from .ptx import high_bf16, low_bf16, pack_bf16, pack_fp16
from .ptx_sm120 import lane_index, mma_bf16_k8, mma_bf16_k16, register
from .softmax_nvfp4 import Quad, softmax_tile

#: Registers of a producer and of a consumer thread: 128 * 24 + 256 * 240 fit the 65536 of an SM.
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 24, 240
#: n8 tiles of the scores, and of the output with its row sums.
_SCORE_TILES, _DIM_TILES = lo.BLOCK // 8, lo.HEAD_DIM // 8
#: Four E4M3 ones: the scales of the row-sum rows.
_ONES = lo.E4M3_ONE * 0x01010101

#: Kernel parameters in order, with their element types; the pointers first.
POINTERS = (
    ("q", Uint32, 128),
    ("k", Uint32, 128),
    ("v", Uint32, 128),
    ("qs", Float32, 4),
    ("ks", Float32, 4),
    ("sv", Float32, 4),
    ("mu", BFloat16, 128),
    ("qb", Uint32, 128),
    ("km", BFloat16, 128),
    ("out", Uint32, 16),
)
SCALARS = ("lq", "lkv", "heads", "scale")


def _words(pointer, index):
    """Four consecutive words, number `index` of them from `pointer` on, by one load."""
    registers = cute.make_rmem_tensor(4, Uint32)
    cute.autovec_copy(cute.make_tensor(pointer + 4 * index, cute.make_layout(4)), registers)
    return [registers[i] for i in range(4)]


class Fragments:
    """What one consumer thread holds: query fragments, accumulators, running maxima and sums."""

    def __init__(self, shared, warp, lane, scale, bias_scale):
        self.shared, self.warp, self.lane = shared, warp, lane
        self.scale, self.bias_scale = scale, bias_scale
        self.quad = Quad(lane)
        self.acc = cute.make_rmem_tensor(4 * _DIM_TILES, Float32)
        self.acc.fill(0.0)
        #: The accumulator of the row-sum rows: rows g and g + 8, blocks 2 t and 2 t + 1 of the group.
        self.sums = cute.make_rmem_tensor(4, Float32)
        self.sums.fill(0.0)
        self.maximum = cute.make_rmem_tensor(1, Float32)
        self.maximum.fill(-Float32.inf)
        #: l of the own row (`softmax_nvfp4`), of which two lanes hold a part each.
        self.row_sum = cute.make_rmem_tensor(1, Float32)
        self.row_sum.fill(0.0)

    def load_queries(self, q, tile):
        """The warp's fragments for two k64 MMAs and their scale words, from the image in global memory."""
        codes = cute.make_tensor(
            q + tile.to(cutlass.Int64) * (lo.Q_BYTES // 4) + (self.warp * 64 + self.lane) * 4,
            cute.make_layout((4, 2), stride=(1, 128)),
        )
        row = self.warp * lo.WARP_ROWS + self.lane // 4 + 8 * (self.lane % 2)
        scales = cute.make_tensor(
            q + tile.to(cutlass.Int64) * (lo.Q_BYTES // 4) + (lo.CODE_BYTES // 4 + row * 2), cute.make_layout(2)
        )
        self.queries = [[codes[i, k] for i in range(4)] for k in range(2)]
        self.query_scales = [scales[k] for k in range(2)]


class AttentionNvfp4:
    """One attention kernel; `config` holds its compile-time choices."""

    def __init__(self, config):
        self.config = config
        #: Where the instructions come from that only sm_120 has.
        self.native = emulated_sm120 if config.emulated else ptx_sm120

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
        lkv: Int32,
        heads: Int32,
        scale: Float32,
    ):
        """Grid (query tiles, B H). `lq`, `lkv`: lengths; `heads`: H; `scale`: score scale times log2 e."""
        config = self.config
        tiles = (lkv + lo.BLOCK - 1) // lo.BLOCK
        thread, _, _ = cute.arch.thread_idx()
        _, head, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = cutlass.memory.SmemAllocator().allocate(self.storage)
        bars = Barriers(shared)
        if thread == 0:
            initialise(bars)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < PRODUCER_THREADS // 32:
            cute.arch.setmaxregister_decrease(_PRODUCER_REGISTERS)
            if warp == 0:
                produce(config, shared, bars, {"k": k, "v": v, "mu": mu, "km": km}, head, tiles)
        else:
            cute.arch.setmaxregister_increase(_CONSUMER_REGISTERS)
            self.consume(shared, bars, q, qb, qs, ks, sv, out, lq, tiles, heads, scale, warp - PRODUCER_THREADS // 32)

    @cute.jit
    def consume(
        self,
        shared: cutlass.Constexpr,
        bars: cutlass.Constexpr,
        q: cute.Pointer,
        qb: cute.Pointer,
        qs: cute.Pointer,
        ks: cute.Pointer,
        sv: cute.Pointer,
        out: cute.Pointer,
        lq: Int32,
        tiles: Int32,
        heads: Int32,
        scale: Float32,
        warp: Int32,
    ):
        """One consumer warp: the loop over key tiles, then the output."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        query_tile, head, _ = cute.arch.block_idx()
        lane = thread % 32
        second = (
            cute.make_tensor(qs + head, cute.make_layout(1))[0] * cute.make_tensor(ks + head, cute.make_layout(1))[0]
        )
        f = Fragments(shared, warp, lane, second * scale, scale)
        tile = head * cute.arch.grid_dim()[0] + query_tile
        f.load_queries(q, tile)
        # Two loops: a branch around the means would cost copies of all accumulators for every tile.
        if const_expr(config.demean):
            for group in cutlass.range((tiles + lo.MEAN_GROUP - 1) // lo.MEAN_GROUP, unroll=1):
                first = group * lo.MEAN_GROUP
                if const_expr(config.key_means):
                    await_tile(bars, first)
                    self.load_bias(f, qb, tile, group)
                # Counted within the group: stages and phases repeat after 2 STAGES tiles, which divide a group.
                for i in cutlass.range(cutlass.min(tiles - first, lo.MEAN_GROUP), unroll=1):
                    self.tile(f, bars, i)
                self.restore_means(f, group)
        else:
            for j in cutlass.range(tiles, unroll=1):
                self.tile(f, bars, j)
            mine, other = f.quad.own([f.sums[2 * r] + f.sums[2 * r + 1] for r in range(2)])
            f.row_sum[0] = mine + other
        self.store(f, sv, out, lq, heads, head, query_tile * lo.QUERY_TILE + warp * lo.WARP_ROWS)

    def tile(self, f, bars, j):
        """One key tile."""
        stage = j % STAGES
        await_tile(bars, j)
        keys = f.shared.k.data_ptr() + stage * K_WORDS
        values = f.shared.v.data_ptr() + stage * V_WORDS
        zero = [Float32(0.0)] * 4
        scores = []
        for n in range(0, _SCORE_TILES, 2):
            scores += self.multiply(f, keys, lo.CODE_BYTES, n, f.queries, f.query_scales)
        addend = self.bias(f, j) if self.config.key_means else None
        p, p_scales, own_rescale = softmax_tile(scores, f.maximum, f.scale, addend, f.quad, self.native.pack_e2m1)
        rescale = f.quad.both(own_rescale)
        ones, scales = _words(values, _DIM_TILES * 32 + f.lane), register(_ONES)
        gain = self.native.mma_nvfp4(p[0], p_scales[0], ones[:2], scales, zero)
        gain = self.native.mma_nvfp4(p[1], p_scales[1], ones[2:], scales, gain)
        for i in range(4):
            f.sums[i] = f.sums[i] * rescale[i // 2] + gain[i]
        for n in range(0, _DIM_TILES, 2):
            gain = self.multiply(f, values, lo.V_CODE_BYTES, n, p, p_scales)
            for i in range(8):
                f.acc[4 * n + i] = f.acc[4 * n + i] * rescale[i % 4 // 2] + gain[i]
        # One lane arrives for all, whose reads must come before. The MMAs keep them together in fact, not by the rules.
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars.empty + stage)
        if self.config.demean:
            f.row_sum[0] = f.row_sum[0] * own_rescale

    def multiply(self, f, tile, code_bytes, n, a, a_scales):
        """Accumulators (8 Float32) of n8 tiles `n` and `n + 1`: fragments `a` times the B operand tile at `tile`."""
        scales = _words(tile + code_bytes // 4, n // 2 * 8 + f.lane // 4)
        b = [_words(tile, (n + i) * 32 + f.lane) for i in range(2)]
        acc = [[Float32(0.0)] * 4 for _ in range(2)]
        for k in range(2):
            for i in range(2):
                acc[i] = self.native.mma_nvfp4(a[k], a_scales[k], b[i][2 * k : 2 * k + 2], scales[2 * i + k], acc[i])
        return acc[0] + acc[1]

    def load_bias(self, f, qb, tile, group):
        """q . (key mean) of the 8 blocks of `group`, a bf16 product.

        The query rows come from global memory each time: shared memory has no room for them, nor have the registers.
        """
        acc = [Float32(0.0)] * 4
        means = f.shared.km.data_ptr() + (group & 1) * (lo.KM_ELEMENTS // 2)
        queries = qb + tile.to(cutlass.Int64) * (lo.QB_ELEMENTS // 2)
        lane = lane_index()
        for k in range(lo.HEAD_DIM // 32):
            b = _words(means, k * 32 + lane)
            for i in range(2):
                a = _words(queries, (f.warp * 8 + 2 * k + i) * 32 + lane)
                acc = mma_bf16_k16(a, b[2 * i : 2 * i + 2], acc)
        biases = self.biases_of(f)
        cute.arch.sync_warp()
        for i in range(4):
            biases[i // 2, lane // 4, 2 * (lane % 4) + i % 2] = acc[i] * f.bias_scale
        cute.arch.sync_warp()

    def biases_of(self, f):
        """This warp's q . (key mean) in log2 units, in shared memory: [row half r, g, block of the group].

        Four registers would hold them, but they are the ones that ptxas then spills.
        """
        return cute.make_tensor(
            f.shared.bias.data_ptr() + f.warp * (lo.WARP_ROWS * lo.MEAN_GROUP),
            cute.make_layout((2, 8, lo.MEAN_GROUP), stride=(1, 2, lo.WARP_ROWS)),
        )

    def bias(self, f, j):
        """That of the lane's own row (`softmax_nvfp4`) and of block `j`."""
        return self.biases_of(f)[f.lane % 2, f.lane // 4, j % lo.MEAN_GROUP]

    def restore_means(self, f, group):
        """O += r mu^T with the row sums r of the blocks of `group`, as bf16; l adds the same values. Then r = 0."""
        a = [pack_bf16(f.sums[2 * r], f.sums[2 * r + 1]) for r in range(2)]
        mine, other = f.quad.own([low_bf16(word) + high_bf16(word) for word in a])
        f.row_sum[0] = f.row_sum[0] + (mine + other)
        lane = lane_index()
        means = f.shared.mu.data_ptr() + (group & 1) * (lo.MU_ELEMENTS // 2)
        for n in range(0, _DIM_TILES, 4):
            b = _words(means, n // 4 * 32 + lane)
            for i in range(4):
                # Added by hand: as accumulators of these MMAs the outputs would have to move into aligned registers.
                gain = mma_bf16_k8(a, b[i], [Float32(0.0)] * 4)
                for x in range(4):
                    f.acc[4 * (n + i) + x] = f.acc[4 * (n + i) + x] + gain[x]
        f.sums.fill(0.0)

    @cute.jit
    def store(
        self,
        f: cutlass.Constexpr,
        sv: cute.Pointer,
        out: cute.Pointer,
        lq: Int32,
        heads: Int32,
        head: Int32,
        first_row: Int32,
    ):
        """Write O sv / l of rows below `lq` to out [B, Lq, H, 128]. A row without weight becomes 0."""
        pack = pack_bf16 if const_expr(self.config.output == "bf16") else pack_fp16
        second = cute.make_tensor(sv + head, cute.make_layout(1))[0]
        batch = head // heads
        lane = lane_index()
        row = first_row + lane // 4
        total = f.row_sum[0] + cute.arch.shuffle_sync_bfly(f.row_sum[0], 2)
        own = Float32(0.0)
        if total > 0.0:
            own = cute.arch.rcp_approx(total) * second
        factor = f.quad.both(own)
        for r in cutlass.range_constexpr(2):
            if row + 8 * r < lq:
                line = (batch.to(cutlass.Int64) * lq + (row + 8 * r)) * heads + head % heads
                place = cute.make_tensor(
                    out + (line * (lo.HEAD_DIM // 2) + lane % 4), cute.make_layout(_DIM_TILES, stride=4)
                )
                for n in cutlass.range_constexpr(_DIM_TILES):
                    place[n] = pack(f.acc[4 * n + 2 * r] * factor[r], f.acc[4 * n + 2 * r + 1] * factor[r])


def _compile(config, options):
    pointers = [make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align) for _, dtype, align in POINTERS]
    numbers = [Int32(1), Int32(1), Int32(1), Float32(1.0), Int32(1), Int32(1)]
    return cute.compile(AttentionNvfp4(config), *pointers, *numbers, cuda.CUstream(0), options=options)


def buildables(emulated=False):
    """Every NVFP4 attention kernel. emulated: those that a card without block-scaled MMAs runs."""
    arguments = tuple(name for name, _, _ in POINTERS) + SCALARS
    return [
        Buildable(
            config.name,
            partial(_compile, config),
            storage(config).size_in_bytes(),
            "query_tiles(lq), batch * heads, 1",
            arguments,
        )
        for config in (replace(config, emulated=emulated) for config in configs())
    ]
