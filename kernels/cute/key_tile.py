"""One key tile of the sm_90a attention kernel, as a consumer warpgroup computes it, and the parts it consists of."""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from . import layouts as lo
from .fragments import DIM, KEYS, ROWS
from .pipeline import CONSUMERS
from .ptx import as_int, fma_64, high_bf16, late_zero, low_bf16, pack_bf16
from .softmax import TileSoftmax, block_maximum, fragment_view, magic, magic_bits, quad_sum, score_halves


def await_turn(warpgroup_index):
    """Wait until the other warpgroup has passed the turn to this one (named barriers 1 and 2, one a warpgroup)."""
    cute.arch.barrier(barrier_id=1 + warpgroup_index, number_of_threads=128 * CONSUMERS)


def pass_turn(warpgroup_index):
    """Let the other warpgroup have the tensor cores."""
    cute.arch.barrier_arrive(barrier_id=2 - warpgroup_index, number_of_threads=128 * CONSUMERS)


class KeyTiles:
    """The recurrence over key tiles of one kernel; `config` holds its compile-time choices."""

    def __init__(self, config):
        self.config = config
        self.take_turns = config.take_turns

    def tile(self, f, bars, gKs, j, lkv, group, first, scale):
        """One key tile. `first`: of its mean group, which is when the previous group's means are restored."""
        config, mmas = self.config, f.mmas
        stage = j % config.stages
        phase = (j // config.stages) & 1
        key_scale = [gKs[h, j] for h in range(2)]
        split = config.tuning.split
        if first:
            if split:
                self.merge(f, f.acc_tile, f.rescale)
            self.collect_row_sums(f)
        scores = self.split_scores if split else self.whole_scores
        halves, tops = scores(f, bars, stage, phase, group, first)
        addend = None
        if config.key_means:
            lane = (f.thread % 32 & 28) + j % lo.TILES_PER_GROUP
            addend = [[cute.arch.shuffle_sync(f.acc_bias[2 * r + h], lane) * scale for h in range(2)] for r in range(2)]
        softmax = TileSoftmax(config, halves, tops, f.maximum, f.row_scale, key_scale, addend, f.zero)
        if split:
            acc_tile = f.acc_tile
        else:
            acc_tile = f.values_thread.make_fragment_C(f.values_thread.partition_shape_C((ROWS, mmas.columns)))
        if config.halves == 1 or (config.halves == 2 and not first):
            # The second half first: T has its registers.
            for h in (1, 0):
                late = None if h else late_zero(f.zero)
                for r in range(2):
                    softmax.pack(r, h, f.p_words, late)
                if h == 1:
                    self.await_values(f, bars, j, lkv, stage, phase)
                self.queue_values(f, acc_tile, stage, h * (KEYS // 64), (h + 1) * (KEYS // 64), h)
        else:
            for r in range(2):
                for h in range(2):
                    softmax.pack(r, h, f.p_words)
            self.await_values(f, bars, j, lkv, stage, phase)
            self.queue_values(f, acc_tile, stage, 0, KEYS // 32)
        rescale = softmax.rescale
        if config.exact_sums:
            block_sums = self.block_sums(f, softmax.sums, softmax.last, j, lkv)
        warpgroup.wait_group(0)
        self.release(bars.v_empty + stage)
        if config.exact_sums:
            ones = fragment_view(f.acc, lo.V_ROWS)
            for r in range(2):
                for b in range(2):
                    ones[b, r, DIM // 8] = ones[b, r, DIM // 8] * rescale[r] + block_sums[r][b]
        if split:
            for r in range(2):
                f.rescale[r] = rescale[r]
        else:
            self.merge(f, acc_tile, rescale)

    def await_values(self, f, bars, j, lkv, stage, phase):
        """Wait for the V tile of `stage`, and for this warpgroup's turn."""
        stages = self.config.stages
        if self.take_turns:
            # The next K tile is waited for here, where it costs nothing, and not inside the turn.
            later = cutlass.min(j + 1, (lkv - 1) // KEYS)
            cute.arch.mbarrier_wait(bars.k_full + later % stages, (later // stages) & 1)
        cute.arch.mbarrier_wait(bars.v_full + stage, phase)
        if self.take_turns:
            await_turn(f.warpgroup_index)

    def queue_values(self, f, acc_tile, stage, begin, end, new=True):
        """Queue T := P V, or T += P V if not `new`, over the 32-key steps `begin` to `end`."""
        warpgroup.fence()
        for i in range(begin, end):
            mma = f.mmas.values_first if new and i == begin else f.mmas.values
            cute.gemm(mma, acc_tile, f.tOrP[None, None, i], f.tOrV[None, None, i, stage], acc_tile)
        warpgroup.commit_group()

    def merge(self, f, acc_tile, rescale):
        """O := alpha O + T, and the row sums so far likewise."""
        config = self.config
        old, new = fragment_view(f.acc, lo.V_ROWS), fragment_view(acc_tile, f.mmas.columns)
        for i in range(DIM // 8 if config.exact_sums else lo.V_ROWS // 8):
            for r in range(2):
                for b in range(2):
                    old[b, r, i] = old[b, r, i] * rescale[r] + new[b, r, i]
        if config.demean:
            for r in range(2):
                f.row_sum[r] = f.row_sum[r] * rescale[r]

    def whole_scores(self, f, bars, stage, phase, group, first):
        """S of one tile by one product: its `score_halves`, and their maxima as a function of (row, block)."""
        acc_scores = f.scores_thread.make_fragment_C(f.scores_thread.partition_shape_C((ROWS, KEYS)))
        self.start_scores(f, acc_scores)
        if not self.take_turns:
            cute.arch.mbarrier_wait(bars.k_full + stage, phase)
        warpgroup.fence()
        if first:
            self.queue_means(f, group)
        for i in range(DIM // 32):
            cute.gemm(f.mmas.scores, acc_scores, f.tSrQ[None, None, i], f.tSrK[None, None, i, stage], acc_scores)
        warpgroup.commit_group()
        if self.take_turns:
            pass_turn(f.warpgroup_index)
        warpgroup.wait_group(0)
        self.release(bars.k_empty + stage)
        halves = score_halves(acc_scores)
        return halves, partial(block_maximum, halves, magic=magic(self.config))

    def split_scores(self, f, bars, stage, phase, group, first):
        """S of one tile by two products of 128 keys each, with other work under them; results as `whole_scores`.

        Under the first the tile before is merged, under the second the first one's maxima are taken.
        """
        mmas, split = f.mmas, self.config.tuning.split
        accs = [f.scores_thread.make_fragment_C(f.scores_thread.partition_shape_C((ROWS, lo.BLOCK))) for _ in range(2)]
        halves = [fragment_view(acc, lo.BLOCK) for acc in accs]
        begun = [split == 3, split != 2]
        maxima: list[list[Float32]] = []
        for h in range(2):
            if begun[h]:
                self.start_scores(f, accs[h])
            if h == 0 and not self.take_turns:
                cute.arch.mbarrier_wait(bars.k_full + stage, phase)
            warpgroup.fence()
            if h == 0 and first:
                self.queue_means(f, group)
            for i in range(DIM // 32):
                mma = mmas.scores if i or begun[h] else mmas.scores_first
                cute.gemm(mma, accs[h], f.tSrQ[None, None, i], f.tSrK[h][None, None, i, stage], accs[h])
            warpgroup.commit_group()
            if h == 0:
                if not first:
                    self.merge(f, f.acc_tile, f.rescale)
            else:
                if self.take_turns:
                    pass_turn(f.warpgroup_index)
                self.finish_half(accs[0], halves, maxima, begun[0])
            warpgroup.wait_group(0)
        self.release(bars.k_empty + stage)
        self.finish_half(accs[1], halves, maxima, begun[1])
        return halves, lambda r, h: maxima[h][r]

    def finish_half(self, acc, halves, maxima, begun):
        """Append the maxima [row] of the next half to `maxima`; first add the start value, unless it has `begun` so."""
        if not begun:
            for i in range(cute.size(acc)):
                acc[i] = acc[i] + Int32(magic_bits(self.config))
        h = len(maxima)
        maxima.append([block_maximum(halves, r, h, magic(self.config)) for r in range(2)])

    def queue_means(self, f, group):
        """Queue what the first tile of a mean group adds: the means of the group before, and the key means' scores."""
        self.restore_means(f, group + 1)
        if self.config.key_means:
            for i in range(DIM // 16):
                mma = f.mmas.key_means if i else f.mmas.key_means_first
                cute.gemm(mma, f.acc_bias, f.tBrQ[None, None, i], f.tBrKm[None, None, i, group & 1], f.acc_bias)

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
        """S := magic. Inside a turn half of it by FMAs on O (times zero), so that two pipes share the 128 writes."""
        bits = magic_bits(self.config)
        if self.config.tuning.wide_fill:
            # Two elements an instruction on the FP64 pipe, which nothing else uses. A pair of finite fp32 is a finite
            # fp64. Each operand pair occurs once, or the compiler would compute one and copy it.
            for i in range(cute.size(acc_scores) // 2):
                low, high = f.acc[2 * i % (DIM // 2)], f.acc[(2 * i + 1) % (DIM // 2)]
                words = fma_64(low, high, f.zeros[2 * i // (DIM // 2)], f.magic)
                acc_scores[2 * i], acc_scores[2 * i + 1] = words
        elif self.config.tuning.split:
            # Reading the merged O tells the compiler that T is done with: S then takes T's registers.
            for i in range(cute.size(acc_scores)):
                acc_scores[i] = as_int(f.acc[i] * f.zero + f.magic)
        elif self.take_turns:
            for i in range(cute.size(acc_scores)):
                acc_scores[i] = as_int(f.acc[i // 2] * f.zero + f.magic) if i % 2 == 0 else Int32(bits)
        else:
            acc_scores.fill(bits)

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
