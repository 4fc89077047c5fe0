"""What one consumer thread of the sm_90a attention kernel holds: tiled MMAs, operand descriptors, accumulators."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int8, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from . import layouts as lo
from .pipeline import CONSUMERS
from .softmax import MAGIC

ROWS, DIM, KEYS = lo.WARPGROUP_ROWS, lo.HEAD_DIM, lo.KEY_TILE
_K_SW128 = warpgroup.SmemLayoutAtomKind.K_SW128
_K_SW32 = warpgroup.SmemLayoutAtomKind.K_SW32


class Mmas:
    """The tiled MMAs, one for each value of ACCUMULATE, so that nothing is mutated inside a staged loop."""

    def __init__(self, config):
        k_major, registers = OperandMajorMode.K, warpgroup.OperandSource.RMEM
        smem = warpgroup.OperandSource.SMEM
        scores = warpgroup.MmaI8Op(Int8, Int8, Int32, (ROWS, KEYS, 32), smem, k_major, k_major)
        self.scores = self._tiled(scores, True)
        # Exact sums come from registers: the ones rows of V^T are left out (with key means ptxas spills without them).
        self.columns = DIM if config.exact_sums and not config.key_means else lo.V_ROWS
        values = (Float8E4M3FN, Float8E4M3FN, Float32, (ROWS, self.columns, 32), registers, k_major, k_major)
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
        self.warpgroup_index = warpgroup_index
        # A zero that the compiler cannot see through: the grid is flat.
        self.zero = Float32(cute.arch.block_idx()[2])
        self.magic = self.zero + MAGIC
        self.scores_thread, self.values_thread = mmas.scores.get_slice(thread), mmas.values.get_slice(thread)
        sQ = tiled(shared.q, _K_SW128, Int8, (ROWS, DIM, CONSUMERS))
        sK = tiled(shared.k, _K_SW128, Int8, (KEYS, DIM, stages))
        sV = tiled(shared.v, _K_SW128, Float8E4M3FN, (lo.V_ROWS, KEYS, stages))
        if mmas.columns == DIM:
            sV = cute.local_tile(sV, (DIM, KEYS, stages), (0, 0, 0))
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
