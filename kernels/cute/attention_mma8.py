"""8-bit attention by mma.sync: sm_89 and sm_120a. INT8 Q K^T, FP8 P V, ExpCast or exp2, block means inside the
recurrence.

A CTA computes 128 query rows of one head, 16 a warp. For each 128-key tile a warp does

    S = MAGIC + Q K^T          IMMA whose accumulators start from MAGIC: the fp32 scores are there without a convert
    P = bytes(a S + b)         ExpCast: one FMA and half a packing instruction per element
    T = P V^T                  QMMA, four n8 tiles at a time; a 17th n8 tile has the row sums (rows of ones in V^T)
    O = alpha O + T            two-level accumulation: FP8 MMAs keep about 14 bits, so T must start from zero

T is fp32, or fp16 (twice the rate of fp32 on GeForce cards) with images of V^T that keep its sums in range.

Row sums of 8 blocks, in two bf16 each, are the A fragment of 16 bf16 MMAs with the 8 block means: 2 % of the tensor
time, against 116 other instructions a tile for restoring each block's mean by FMAs.
"""

from __future__ import annotations

from functools import partial

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int8, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_ptr

from . import layouts_mma8 as lo
from . import mma8
from .buildable import Buildable
from .config_mma8 import LOADER_OF, configs
from .pipeline_mma8 import LOADERS, STAGES, THREADS, WARPS, initialise, produce, storage
from .ptx import high_bf16, low_bf16, pack_bf16, pack_fp16
from .simt import unpack2
from .softmax import MAGIC_BITS, quad_sum
from .softmax_mma8 import softmax_tile

DIM = lo.HEAD_DIM
#: n8 tiles of a key tile, and of O without and with the row sums.
_KEY_TILES, _VALUE_TILES, _SUMS = lo.BLOCK // 8, DIM // 8, DIM // 8
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


def _key_tiles(lkv):
    """`layouts_mma8.key_tiles` by a shift: the division is for negative numbers too, and its result gets spilled."""
    return (lkv + lo.BLOCK - 1) >> (lo.BLOCK.bit_length() - 1)


class _State:
    """What one consumer thread keeps from tile to tile, in registers."""

    def __init__(self, lane, row_scale, queries):
        #: Fragments of the four MMA steps of Q K^T, and the scale of this warp's rows in log2 units.
        self.lane, self.row_scale, self.queries = lane, row_scale, queries
        #: O and the row sums: n8 tile i, element 2 r + b is row lane // 4 + 8 r, column 8 i + 2 (lane % 4) + b.
        self.acc = cute.make_rmem_tensor(4 * (_VALUE_TILES + 1), Float32)
        self.acc.fill(0.0)
        self.maximum = cute.make_rmem_tensor(2, Float32)
        self.maximum.fill(-Float32.inf)
        self.row_sum = cute.make_rmem_tensor(2, Float32)
        self.row_sum.fill(0.0)
        #: q . (key mean) of this group's 8 blocks, an n8 accumulator.
        self.bias = cute.make_rmem_tensor(4, Float32)
        self.bias.fill(0.0)


class AttentionMma8:
    """One attention kernel; `config` holds its compile-time choices, `loader` is "bulk" or "async"."""

    def __init__(self, config, loader):
        self.config, self.loader = config, loader
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
        lkv: Int32,
        heads: Int32,
        scale: Float32,
        grid_x: Int32,
        grid_y: Int32,
        stream: cuda.CUstream,
    ):
        self.storage = storage(self.config, self.loader)
        self.kernel(q, k, v, qs, ks, sv, mu, qb, km, out, lq, lkv, heads, scale).launch(
            grid=(grid_x, grid_y, 1), block=(THREADS[self.loader], 1, 1), min_blocks_per_mp=1, stream=stream
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
        thread, _, _ = cute.arch.thread_idx()
        _, head, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = cutlass.memory.SmemAllocator().allocate(self.storage)
        tensors = {"k": k, "v": v, "mu": mu, "km": km}
        loader = LOADERS[self.loader](self.config, shared, tensors, head, _key_tiles(lkv))
        if const_expr(self.loader == "bulk"):
            if thread == 0:
                initialise(loader)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            if warp >= WARPS:
                cute.arch.setmaxregister_decrease(_PRODUCER_REGISTERS)
                if warp == WARPS:
                    produce(loader)
            else:
                cute.arch.setmaxregister_increase(_CONSUMER_REGISTERS)
                self.consume(loader, q, qs, ks, sv, qb, out, lq, lkv, heads, scale, warp)
        else:
            loader.start()
            self.consume(loader, q, qs, ks, sv, qb, out, lq, lkv, heads, scale, warp)

    @cute.jit
    def consume(
        self,
        loader: cutlass.Constexpr,
        q: cute.Pointer,
        qs: cute.Pointer,
        ks: cute.Pointer,
        sv: cute.Pointer,
        qb: cute.Pointer,
        out: cute.Pointer,
        lq: Int32,
        lkv: Int32,
        heads: Int32,
        scale: Float32,
        warp: Int32,
    ):
        """One warp's 16 rows: the loop over key tiles, then the output."""
        tiles = _key_tiles(lkv)
        thread, _, _ = cute.arch.thread_idx()
        query_tile, head, _ = cute.arch.block_idx()
        lane = thread % 32
        query = head * cute.arch.grid_dim()[0] + query_tile
        first_row = warp * lo.WARP_ROWS
        gQs = cute.make_tensor(qs + (query.to(Int64) * lo.QUERY_TILE + first_row), cute.make_layout(1))
        gKs = cute.make_tensor(ks + head.to(Int64) * tiles, cute.make_layout(1 << 24))
        sixteen = query.to(Int64) * WARPS + warp
        gQ = mma8.panels(q, 4, lane, sixteen)
        chunks = [mma8.load_words(gQ[None, i]) for i in range(4)]
        queries = [step for pair in range(2) for step in mma8.a_fragments(chunks[pair], chunks[2 + pair])]
        f = _State(lane, gQs[0] * scale, queries)
        rows = mma8.panels(qb, 8, lane, sixteen)
        if const_expr(self.config.demean):
            groups = (tiles + lo.MEAN_GROUP - 1) // lo.MEAN_GROUP
            for group in cutlass.range(groups, unroll=1):
                first = group * lo.MEAN_GROUP
                if const_expr(self.config.key_means):
                    self.multiply_key_means(f, loader, rows, group)
                for j in cutlass.range(first, cutlass.min(first + lo.MEAN_GROUP, tiles), unroll=1):
                    self.tile(f, loader, gKs, j, lkv, scale)
                self.restore_means(f, loader, group)
        else:
            for j in cutlass.range(tiles, unroll=1):
                self.tile(f, loader, gKs, j, lkv, scale)
            for r in cutlass.range_constexpr(2):
                f.row_sum[r] = f.acc[4 * _SUMS + 2 * r] + f.acc[4 * _SUMS + 2 * r + 1]
        row = query_tile * lo.QUERY_TILE + first_row + lane // 4
        self.store(f, sv, out, lq, heads, head, row)

    def tile(self, f, loader, gKs, j, lkv, scale):
        """One key tile."""
        config, shared = self.config, loader.shared
        stage = j % STAGES
        loader.await_keys(j)
        key_scale = gKs[j]
        keys = mma8.panels(shared.k.data_ptr(), 2 * _KEY_TILES, f.lane, stage)
        scores = mma8.product(mma8.mma_int8, f.queries, keys, range(_KEY_TILES), Int32(MAGIC_BITS))
        loader.release_keys(j)
        addend = None
        if config.key_means:
            lane = (f.lane & 28) + j % lo.MEAN_GROUP // 2
            mine = [cutlass.select_(j % 2 == 1, f.bias[2 * r + 1], f.bias[2 * r]) for r in range(2)]
            addend = [cute.arch.shuffle_sync(x, lane) * scale for x in mine]
        chunks, rescale, sums, last = softmax_tile(self.expcast, scores, f.maximum, f.row_scale * key_scale, addend)
        if config.exact_sums:
            self.merge(f, _SUMS, rescale, self.block_sums(f, sums, last, j, lkv))
        probabilities = [step for half in chunks for step in mma8.a_fragments(*half)]
        loader.await_values(j)
        values = mma8.panels(shared.v.data_ptr(), 2 * (_VALUE_TILES + 1), f.lane, stage)
        if config.exact_sums and self.loader == "async":
            self.multiply_values_apart(f, values, probabilities, rescale)
        else:
            self.multiply_values(f, values, probabilities, rescale)
        loader.release_values(j)
        if config.demean:
            for r in range(2):
                f.row_sum[r] = f.row_sum[r] * rescale[r]

    @cute.jit
    def multiply_values_apart(
        self,
        f: cutlass.Constexpr,
        values: cutlass.Constexpr,
        probabilities: cutlass.Constexpr,
        rescale: cutlass.Constexpr,
    ):
        """`multiply_values` in a loop of one turn, a number that the compiler does not know.

        Across a loop ptxas neither brings the loads of V^T forward nor puts the exponentials off, for which there are
        no registers: exp2 with exact sums spills 26 without it. A wait on a barrier does the same for bulk copies.
        """
        for _ in cutlass.range(cute.arch.grid_dim()[2], unroll=1):
            self.multiply_values(f, values, probabilities, rescale)

    def multiply_values(self, f, values, probabilities, rescale):
        """O = alpha O + P V^T, and the row sums with it where the ones rows give them."""
        half = self.config.accumulate == "f16"
        if not self.config.exact_sums:
            gain = mma8.product(mma8.mma_e4m3, probabilities, values, range(_SUMS, _SUMS + 1), Float32(0.0))[_SUMS]
            self.merge(f, _SUMS, rescale, gain)
        for first in range(0, _VALUE_TILES, mma8.INTERLEAVE):
            tiles = range(first, first + mma8.INTERLEAVE)
            mma = mma8.mma_e4m3_f16 if half else mma8.mma_e4m3
            for i, gain in mma8.product(mma, probabilities, values, tiles, Float32(0.0)).items():
                self.merge(f, i, rescale, [x for word in gain for x in unpack2(word, True)] if half else gain)

    @staticmethod
    def merge(f, i, rescale, gain):
        """n8 tile `i` of O, or the row sums: alpha times what there is, plus `gain` (4)."""
        for e in range(4):
            f.acc[4 * i + e] = f.acc[4 * i + e] * rescale[e // 2] + gain[e]

    def block_sums(self, f, sums, last, j, lkv):
        """Row sums of tile `j` over its valid keys as an n8 accumulator: in the column of the block, 0 elsewhere.

        Keys beyond `lkv` repeat one real key, so each of them has the P of the block's last key: they are subtracted
        by number, which needs no mask.
        """
        missing = cutlass.max((j + 1) * lo.BLOCK - lkv, 0)
        column = j % lo.MEAN_GROUP - 2 * (f.lane % 4)
        result = []
        for r in range(2):
            padding = cute.arch.shuffle_sync(last[r], f.lane | 3)
            total = quad_sum(sums[r]) - Float32(missing) * padding
            result += [cutlass.select_(column == b, total, Float32(0.0)) for b in range(2)]
        return result

    def restore_means(self, f, loader, group):
        """O += r mu^T for the blocks of `group`, whose row sums start again at zero.

        Each sum becomes two bf16, high and low, that meet the same mean: one bf16 is too coarse once P is exact (1.2
        times the specification's error on sm_90). l adds the same rounded values: two roundings would not cancel.
        """
        high, low = [], []
        for r in range(2):
            exact = [f.acc[4 * _SUMS + 2 * r + b] for b in range(2)]
            high.append(pack_bf16(exact[0], exact[1]))
            rounded = [low_bf16(high[r]), high_bf16(high[r])]
            low.append(pack_bf16(exact[0] - rounded[0], exact[1] - rounded[1]))
            f.row_sum[r] = f.row_sum[r] + ((rounded[0] + low_bf16(low[r])) + (rounded[1] + high_bf16(low[r])))
            for b in range(2):
                f.acc[4 * _SUMS + 2 * r + b] = Float32(0.0)
        layout = cute.make_layout((32, _VALUE_TILES, 2), stride=(1, 32, lo.MU_ELEMENTS // 2))
        means = cute.make_tensor(cute.recast_ptr(loader.shared.mu.data_ptr(), dtype=Uint32), layout)
        for i in range(_VALUE_TILES):
            word = means[f.lane, i, group & 1]
            new = mma8.mma_bf16([*high, *low], [word, word], [f.acc[4 * i + e] for e in range(4)])
            for e in range(4):
                f.acc[4 * i + e] = new[e]

    def multiply_key_means(self, f, loader, rows, group):
        """The bias of this group's 8 blocks: this warp's query rows (not rotated) times the key means.

        The query rows come from global memory each time: 32 KB of shared memory would be more than there is.
        """
        loader.await_means(group * lo.MEAN_GROUP)
        chunks = [mma8.load_words(rows[None, i]) for i in range(8)]
        queries = [step for pair in range(4) for step in mma8.a_fragments(chunks[pair], chunks[4 + pair])]
        means = mma8.panels(loader.shared.km.data_ptr(), 4, f.lane, group & 1)
        bias = mma8.product(mma8.mma_bf16, queries, means, range(1), Float32(0.0))[0]
        for e in range(4):
            f.bias[e] = bias[e]

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
        pair = (f.lane % 4) * 2
        gSv = cute.make_tensor(sv + (head * DIM + pair), cute.make_layout((2, _VALUE_TILES), stride=(1, 8)))
        # All loads come before the first store, which they could not pass.
        channel_scale = [[gSv[b, i] for b in range(2)] for i in range(_VALUE_TILES)]
        batch = head // heads
        for r in cutlass.range_constexpr(2):
            total = quad_sum(f.row_sum[r])
            inverse = Float32(0.0)
            if total > 0.0:
                inverse = cute.arch.rcp_approx(total)
            if row + 8 * r < lq:
                line = (batch.to(Int64) * lq + (row + 8 * r)) * heads + head % heads
                gOut = cute.make_tensor(
                    out + (line * (DIM // 2) + f.lane % 4), cute.make_layout(_VALUE_TILES, stride=4)
                )
                for i in cutlass.range_constexpr(_VALUE_TILES):
                    y = [f.acc[4 * i + 2 * r + b] * inverse * channel_scale[i][b] for b in range(2)]
                    gOut[i] = pack(y[0], y[1])


def _compile(config, loader, options):
    pointers = [make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align) for _, dtype, align in POINTERS]
    numbers = [Int32(1), Int32(1), Int32(1), Float32(1.0), Int32(1), Int32(1)]
    return cute.compile(AttentionMma8(config, loader), *pointers, *numbers, cuda.CUstream(0), options=options)


def buildables(arch):
    """Every 8-bit mma.sync attention kernel for an architecture of `config_mma8.LOADERS`."""
    loader = LOADER_OF[arch]
    arguments = tuple(name for name, _, _ in POINTERS) + SCALARS
    return [
        Buildable(
            config.name,
            partial(_compile, config, loader),
            storage(config, loader).size_in_bytes(),
            "query_tiles(lq), batch * heads, 1",
            arguments,
        )
        for config in configs()
    ]
