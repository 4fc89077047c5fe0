"""The MMA warp of the tcgen05 attention kernel: what the tensor cores do, in which order.

Tensor memory: S of half 0 and 1 in columns 0 and 128, O of half 0 and 1 in 256 and 384, 128 columns each. P (E4M3, four
keys a column) overwrites the first 32 columns of its S, the row sums 16 columns of it from column 64, and after a
group's last tile the next group's q . (key mean) 16 more from column 80.

One thread queues everything, and MMAs of one CTA complete in the order in which they are queued. For tile j:

    half 0:  sums_0(j)  [O_0 += r mu^T]  O_0 += P_0 V^T(j)  S_0 = Q_0 K^T(j + 1)
    half 1:  sums_1(j)  [O_1 += r mu^T]  O_1 += P_1 V^T(j)  S_1 = Q_1 K^T(j + 1)

so that the MMAs of one half run under the softmax of the other. S may overwrite P because P V^T is in front of it.
"""

# ruff: noqa: SIM102 - a compile-time test must stand in an `if` of its own, or it is staged with the other one.

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import tcgen05

from . import layouts as lo
from . import tmem
from .pipeline import MU_ELEMENTS
from .pipeline_sm100 import HALVES, KM_ELEMENTS, QB_ELEMENTS, SUM_COLUMNS, TILE_BYTES, V_STAGE_BYTES

SCORES_AT, OUT_AT = 0, HALVES * lo.BLOCK
#: First column of the row sums, and of the next group's q . (key mean), within S.
SUMS_AT, BIAS_AT = 64, 80
#: MMAs along the 128 bytes of a row of Q, K, P or V^T.
_STEPS = lo.HEAD_DIM // tmem.K_BYTES
#: From one 32-byte step to the next in a shared-memory descriptor, and in columns of tensor memory.
_NEXT, _NEXT_COLUMN = tmem.K_BYTES // 16, tmem.K_BYTES // 4


class Operands:
    """Addresses and descriptors that the MMA warp works with. `base`: of the allocated tensor memory."""

    def __init__(self, config, shared, base):
        self.config = config
        self.scores_kind = "f8f6f4" if config.scores == "fp8" else "i8"
        self.scores = [base + (SCORES_AT + i * lo.BLOCK) for i in range(HALVES)]
        self.out = [base + (OUT_AT + i * lo.HEAD_DIM) for i in range(HALVES)]
        # One for each half: as offsets of a single one, ptxas (12.9) chose their registers by the addresses of its own
        # data, and two builds differed.
        self.q = [tmem.shared_operand(shared.q.data_ptr() + half * TILE_BYTES, 128) for half in range(HALVES)]
        self.k = tmem.shared_operand(shared.k.data_ptr(), 128)
        self.v = tmem.shared_operand(shared.v.data_ptr(), 128)
        if config.demean:
            self.r = tmem.shared_operand(shared.r.data_ptr(), 32)
            self.mu = tmem.shared_operand(shared.mu.data_ptr(), 32)
        if config.key_means:
            self.qb = tmem.shared_operand(shared.qb.data_ptr(), 128)
            self.km = tmem.shared_operand(shared.km.data_ptr(), 128)


def multiply_keys(ops, half, stage):
    """S = Q K^T."""
    q, k = ops.q[half], ops.k + stage * (TILE_BYTES // 16)
    code = tmem.instruction(ops.scores_kind, lo.BLOCK)
    for i in range(_STEPS):
        tmem.mma(ops.scores_kind, ops.scores[half], q + i * _NEXT, k + i * _NEXT, code, Int32(i > 0))


def sum_rows(ops, half, stage):
    """P times the ones rows of V^T: column b of the result is the row sum where block modulo 8 is b."""
    ones = ops.v + (stage * (V_STAGE_BYTES // 16) + lo.HEAD_DIM * lo.BLOCK // 16)
    _multiply_p(ops, half, ops.scores[half] + SUMS_AT, ones, SUM_COLUMNS, Int32(0))


def multiply_values(ops, half, stage, accumulate):
    """O = P V^T (+ O if `accumulate`, Int32)."""
    _multiply_p(ops, half, ops.out[half], ops.v + stage * (V_STAGE_BYTES // 16), lo.HEAD_DIM, accumulate)


def _multiply_p(ops, half, target, b, columns, accumulate):
    code = tmem.instruction("f8f6f4", columns)
    for i in range(_STEPS):
        p = ops.scores[half] + i * _NEXT_COLUMN
        tmem.mma("f8f6f4", target, p, b + i * _NEXT, code, Int32(1) if i else accumulate, a_in_tmem=True)


def restore_means(ops, half, group):
    """O += r mu^T with the means in the buffer of `group` modulo 2."""
    r = ops.r + half * (lo.QUERY_TILE * lo.MEAN_WIDTH * 2 // 16)
    mu = ops.mu + (group & 1) * (MU_ELEMENTS * 2 // 16)
    tmem.mma("f16", ops.out[half], r, mu, tmem.instruction("f16", lo.HEAD_DIM), Int32(1))


def multiply_key_means(ops, half, group, target):
    """q . (key mean) of the 8 blocks of `group`, into 16 columns from `target` (twice the same 8)."""
    code = tmem.instruction("f16", 2 * lo.MEAN_GROUP)
    for panel in range(2):
        q = ops.qb + (2 * half + panel) * (2 * QB_ELEMENTS * 2 // 16)
        means = ops.km + ((group & 1) * 2 + panel) * (2 * KM_ELEMENTS * 2 // 16)
        for i in range(_STEPS):
            tmem.mma("f16", target, q + i * _NEXT, means + i * _NEXT, code, Int32(panel + i > 0))


@cute.jit
def multiply(config: cutlass.Constexpr, shared: cutlass.Constexpr, bars: cutlass.Constexpr, base: Int32, tiles: Int32):
    """The MMA warp's work, for `tiles` key tiles."""
    ops, stages = Operands(config, shared, base), config.stages
    cute.arch.mbarrier_wait(bars.q_full, 0)
    cute.arch.mbarrier_wait(bars.k_full, 0)
    if const_expr(config.key_means):
        with cute.arch.elect_one():
            for half in cutlass.range_constexpr(HALVES):
                # There is no O yet, and the correction has read these before it lets O begin.
                multiply_key_means(ops, half, 0, ops.out[half])
                tcgen05.commit(bars.bias_full + half)
    with cute.arch.elect_one():
        for half in cutlass.range_constexpr(HALVES):
            multiply_keys(ops, half, 0)
            tcgen05.commit(bars.scores_full + half)
        tcgen05.commit(bars.k_empty)
    for j in cutlass.range(tiles, unroll=1):
        stage = j % stages
        parity = j & 1
        following = (j + 1) % stages
        group = (j + 1) // lo.MEAN_GROUP
        cute.arch.mbarrier_wait(bars.v_full + stage, (j // stages) & 1)
        for half in cutlass.range_constexpr(HALVES):
            cute.arch.mbarrier_wait(bars.p_full + half, parity)
            tmem.after_sync()
            if const_expr(not config.exact_sums):
                with cute.arch.elect_one():
                    sum_rows(ops, half, stage)
                    tcgen05.commit(bars.sums_full + half)
            if const_expr(config.key_means):
                if (j + 1) % lo.MEAN_GROUP == 0:
                    if j + 1 < tiles:
                        if const_expr(half == 0):
                            cute.arch.mbarrier_wait(bars.k_full + following, ((j + 1) // stages) & 1)
                        with cute.arch.elect_one():
                            multiply_key_means(ops, half, group, ops.scores[half] + BIAS_AT)
                            tcgen05.commit(bars.bias_full + half)
            cute.arch.mbarrier_wait(bars.out_ready + half, parity)
            tmem.after_sync()
            if const_expr(config.demean):
                if j % lo.MEAN_GROUP == 0:
                    if j > 0:
                        with cute.arch.elect_one():
                            restore_means(ops, half, j // lo.MEAN_GROUP - 1)
            with cute.arch.elect_one():
                multiply_values(ops, half, stage, cutlass.min(j, 1))
                if const_expr(half == HALVES - 1):
                    tcgen05.commit(bars.v_empty + stage)
            if j + 1 < tiles:
                if const_expr(half == 0):
                    cute.arch.mbarrier_wait(bars.k_full + following, ((j + 1) // stages) & 1)
                if const_expr(not config.exact_sums):
                    cute.arch.mbarrier_wait(bars.sums_read + half, parity)
                    tmem.after_sync()
                if const_expr(config.key_means):
                    if (j + 1) % lo.MEAN_GROUP == 0:
                        cute.arch.mbarrier_wait(bars.bias_read + half, group & 1)
                        tmem.after_sync()
                with cute.arch.elect_one():
                    multiply_keys(ops, half, following)
                    tcgen05.commit(bars.scores_full + half)
                    if const_expr(half == HALVES - 1):
                        tcgen05.commit(bars.k_empty + following)
            else:
                with cute.arch.elect_one():
                    tcgen05.commit(bars.out_full + half)
    if const_expr(config.demean):
        for half in cutlass.range_constexpr(HALVES):
            cute.arch.mbarrier_wait(bars.out_ready + half, tiles & 1)
            tmem.after_sync()
            with cute.arch.elect_one():
                restore_means(ops, half, (tiles - 1) // lo.MEAN_GROUP)
                tcgen05.commit(bars.out_full + half)
