"""The correction warpgroup of the tcgen05 attention kernel: rescales O, keeps the row sums, writes the output.

A thread has the same row of both query tiles. Row sums r wait in shared memory for their means, each thread reading
only what it wrote; a tile costs one store there, as they are rescaled only when O is.
"""

# ruff: noqa: SIM102 - a compile-time test must stand in an `if` of its own, or it is staged with the other one.

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from . import layouts as lo
from . import tmem
from .mma_sm100 import BIAS_AT, OUT_AT, SCORES_AT, SUMS_AT
from .pipeline_sm100 import HALVES, HANDOVER, arrive
from .ptx import high_bf16, low_bf16, pack_bf16, pack_fp16

#: Columns of O that a thread writes out at a time, and that it rescales at a time; the latter are loaded two steps
#: ahead, which hides most of the latency and takes few registers.
_CHUNK, _RESCALED, _AHEAD = 32, 16, 2


class Rows:
    """What a correction thread works with: its row of shared memory, its lanes of tensor memory, its sums."""

    def __init__(self, config, shared, base, thread):
        self.config, self.thread = config, thread
        lanes = base + (thread // 32 << 21)
        self.scores = [lanes + (SCORES_AT + i * lo.BLOCK) for i in range(HALVES)]
        self.out = [lanes + (OUT_AT + i * lo.HEAD_DIM) for i in range(HALVES)]
        rows = lo.QUERY_TILE
        self.handover = cute.make_tensor(
            shared.handover.data_ptr() + thread,
            cute.make_layout((HANDOVER, 2, HALVES), stride=(rows, HANDOVER * rows, 2 * HANDOVER * rows)),
        )
        self.total = cute.make_rmem_tensor(HALVES, Float32)
        self.total.fill(0.0)
        if config.demean:
            self.sums = cute.make_tensor(
                shared.sums.data_ptr() + thread,
                cute.make_layout((lo.MEAN_GROUP, HALVES), stride=(rows, lo.MEAN_GROUP * rows)),
            )
            # 32 bytes a row: eight r, high then low. The two chunks of 16 bytes are exchanged in rows 4..7 of 8.
            start = cute.recast_ptr(shared.r.data_ptr(), dtype=Uint32) + lo.swizzle_32(thread, 0) // 4
            other = cute.recast_ptr(shared.r.data_ptr(), dtype=Uint32) + lo.swizzle_32(thread, 16) // 4
            layout = cute.make_layout((4, HALVES), stride=(1, rows * lo.MEAN_WIDTH // 2))
            self.r = [cute.make_tensor(start, layout), cute.make_tensor(other, layout)]
        if config.key_means:
            self.bias = cute.make_tensor(
                shared.bias.data_ptr() + thread,
                cute.make_layout((lo.MEAN_GROUP, HALVES), stride=(rows, lo.MEAN_GROUP * rows)),
            )


def rescale(rows, half, alpha):
    """O, l and the pending r times alpha."""
    chunks = range(0, lo.HEAD_DIM, _RESCALED)
    values = {i: tmem.load(rows.out[half] + i, _RESCALED) for i in chunks[:_AHEAD]}
    for i in chunks:
        tmem.wait_load()
        later = i + _AHEAD * _RESCALED
        if later in chunks:
            values[later] = tmem.load(rows.out[half] + later, _RESCALED)
        pairs = [(values[i][c], values[i][c + 1]) for c in range(0, _RESCALED, 2)]
        scaled = [x for pair in pairs for x in cute.arch.mul_packed_f32x2(pair, (alpha, alpha))]
        tmem.store(rows.out[half] + i, scaled)
    tmem.wait_store()
    rows.total[half] = rows.total[half] * alpha
    if rows.config.demean:
        for b in range(lo.MEAN_GROUP):
            rows.sums[b, half] = rows.sums[b, half] * alpha


def clear(rows):
    """No block has a row sum yet."""
    for half in range(HALVES):
        for b in range(lo.MEAN_GROUP):
            rows.sums[b, half] = Float32(0.0)


def keep(rows, half, block, value):
    """The row sum of key block `block`."""
    if rows.config.demean:
        rows.sums[block % lo.MEAN_GROUP, half] = value
    else:
        rows.total[half] = rows.total[half] + value


def collect(rows, half):
    """Move the row sums of 8 blocks into the A operand of the mean MMA, and start them again at zero.

    Each sum becomes two bf16, of which the second meets a copy of the mean. l adds the same rounded values: two
    roundings would not cancel.
    """
    total = Float32(0.0)
    for b in range(0, lo.MEAN_GROUP, 2):
        exact = [rows.sums[b + n, half] for n in range(2)]
        high = pack_bf16(exact[0], exact[1])
        rounded = [low_bf16(high), high_bf16(high)]
        low = pack_bf16(exact[0] - rounded[0], exact[1] - rounded[1])
        rows.r[0][b // 2, half] = high
        rows.r[1][b // 2, half] = low
        total = total + ((rounded[0] + low_bf16(low)) + (rounded[1] + high_bf16(low)))
        for n in range(2):
            rows.sums[b + n, half] = Float32(0.0)
    rows.total[half] = rows.total[half] + total
    cute.arch.fence_view_async_shared()


def pass_bias(rows, half, address, scale):
    """q . (key mean) of 8 blocks to the softmax thread of the row, in its units."""
    found = tmem.load(address, lo.MEAN_GROUP)
    tmem.wait_load()
    for b in range(lo.MEAN_GROUP):
        rows.bias[b, half] = found[b] * scale
    tmem.before_sync()


@cute.jit
def correct(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    base: Int32,
    sv: cute.Pointer,
    out: cute.Pointer,
    lq: Int32,
    heads: Int32,
    head: Int32,
    first_row: Int32,
    tiles: Int32,
    scale: Float32,
):
    """The correction warpgroup's work. first_row: of the first query tile, within the head. scale: of a score, in the
    softmax's units."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % 128
    rows = Rows(config, shared, base, thread)
    if const_expr(config.demean):
        clear(rows)
    if const_expr(config.key_means):
        for half in cutlass.range_constexpr(HALVES):
            cute.arch.mbarrier_wait(bars.bias_full + half, 0)
            tmem.after_sync()
            pass_bias(rows, half, rows.out[half], scale)
            arrive(bars.bias_read + half)
    for j in cutlass.range(tiles, unroll=1):
        parity = j & 1
        for half in cutlass.range_constexpr(HALVES):
            cute.arch.mbarrier_wait(bars.alpha_full + half, parity)
            tmem.after_sync()
            alpha = rows.handover[0, parity, half]
            if const_expr(config.exact_sums):
                if j > 0:
                    keep(rows, half, j - 1, rows.handover[1, parity, half])
            if j > 0:
                if cute.arch.vote_any_sync(alpha < 1.0):
                    rescale(rows, half, alpha)
            if const_expr(config.demean):
                if j % lo.MEAN_GROUP == 0:
                    if j > 0:
                        collect(rows, half)
            tmem.before_sync()
            arrive(bars.out_ready + half)
            if const_expr(not config.exact_sums):
                cute.arch.mbarrier_wait(bars.sums_full + half, parity)
                tmem.after_sync()
                found = tmem.load(rows.scores[half] + (SUMS_AT + j % lo.MEAN_GROUP), 1)
                tmem.wait_load()
                tmem.before_sync()
                arrive(bars.sums_read + half)
                keep(rows, half, j, found[0])
            if const_expr(config.key_means):
                if (j + 1) % lo.MEAN_GROUP == 0:
                    if j + 1 < tiles:
                        cute.arch.mbarrier_wait(bars.bias_full + half, ((j + 1) // lo.MEAN_GROUP) & 1)
                        tmem.after_sync()
                        pass_bias(rows, half, rows.scores[half] + BIAS_AT, scale)
                        arrive(bars.bias_read + half)
    for half in cutlass.range_constexpr(HALVES):
        if const_expr(config.exact_sums):
            cute.arch.mbarrier_wait(bars.sums_full + half, 0)
            keep(rows, half, tiles - 1, rows.handover[1, tiles & 1, half])
        cute.arch.mbarrier_wait(bars.out_full + half, 0)
        if const_expr(config.demean):
            # Only now is the A operand free: the last tile may have restored the group before.
            collect(rows, half)
            arrive(bars.out_ready + half)
    for half in cutlass.range_constexpr(HALVES):
        if const_expr(config.demean):
            cute.arch.mbarrier_wait(bars.out_full + half, 1)
        tmem.after_sync()
        write(config, rows, half, sv, out, lq, heads, head, first_row + half * lo.QUERY_TILE + thread)


@cute.jit
def write(
    config: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    half: cutlass.Constexpr,
    sv: cute.Pointer,
    out: cute.Pointer,
    lq: Int32,
    heads: Int32,
    head: Int32,
    row: Int32,
):
    """Write O sv / l of one row below `lq` to out [B, Lq, H, 128]. A row without weight becomes 0."""
    pack = pack_bf16 if const_expr(config.output == "bf16") else pack_fp16
    inverse = Float32(0.0)
    if rows.total[half] > 0.0:
        inverse = cute.arch.rcp_approx(rows.total[half])
    gSv = cute.make_tensor(sv + head * lo.HEAD_DIM, cute.make_layout((4, lo.HEAD_DIM // 4), stride=(1, 4)))
    line = ((head // heads).to(Int64) * lq + row) * heads + head % heads
    gOut = cute.make_tensor(out + line * (lo.HEAD_DIM // 2), cute.make_layout((4, lo.HEAD_DIM // 8), stride=(1, 4)))
    for i in cutlass.range_constexpr(0, lo.HEAD_DIM, _CHUNK):
        values = tmem.load(rows.out[half] + i, _CHUNK)
        tmem.wait_load()
        if row < lq:
            for c in cutlass.range_constexpr(0, _CHUNK, 8):
                scale = [gSv[None, (i + c) // 4 + n].load() for n in range(2)]
                words = cute.make_rmem_tensor(4, Uint32)
                for n in cutlass.range_constexpr(4):
                    y = [values[c + 2 * n + b] * inverse * scale[n // 2][2 * (n % 2) + b] for b in range(2)]
                    words[n] = pack(y[0], y[1])
                cute.autovec_copy(words, gOut[None, (i + c) // 8])
