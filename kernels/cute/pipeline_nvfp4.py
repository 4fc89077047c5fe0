"""Shared memory of the NVFP4 attention kernel, its barriers, and the producer warp that keeps the tiles coming.

Every operand is a pre-tiled image, so a tile is one bulk copy of consecutive bytes and needs no descriptor.
"""

# ruff: noqa: SIM102 - a compile-time test must stand in an `if` of its own, or it is staged with the other one.

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from . import layouts_nvfp4 as lo

#: K and V tiles in flight: what 99 KB of shared memory hold, and a power of two: stage and phase are bits of the tile.
STAGES = 4
K_WORDS, V_WORDS = lo.K_BYTES // 4, lo.V_BYTES // 4
#: Warps that compute, of 16 query rows each; one more warpgroup holds the producer warp.
CONSUMER_WARPS = lo.QUERY_TILE // lo.WARP_ROWS
PRODUCER_THREADS = 128
THREADS = PRODUCER_THREADS + 32 * CONSUMER_WARPS


def storage(config):
    """The shared-memory struct of one CTA."""
    array, aligned = cute.struct.MemRange, cute.struct.Align
    fields = {"full": array[Int64, STAGES], "empty": array[Int64, STAGES]}
    # Tiles of means are double-buffered: the group before still needs its own while the next group's arrives.
    if config.demean:
        fields["mu"] = aligned[array[Uint32, lo.MU_ELEMENTS], 128]
    if config.key_means:
        fields["bias"] = aligned[array[Float32, lo.QUERY_TILE * lo.MEAN_GROUP], 128]
        fields["km"] = aligned[array[Uint32, lo.KM_ELEMENTS], 128]
    fields["k"] = aligned[array[Uint32, K_WORDS * STAGES], 128]
    fields["v"] = aligned[array[Uint32, V_WORDS * STAGES], 128]
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Barriers:
    """The mbarriers of one CTA: a stage (one K and one V tile) is full when its bytes have arrived, empty when every
    consumer warp is done with it."""

    def __init__(self, shared):
        self.full, self.empty = shared.full.data_ptr(), shared.empty.data_ptr()


def bulk_copy(source, index, target, slot, nbytes, barrier):
    """Copy tile `index` of `source` to `slot` of `target`, `nbytes` each; the bytes count towards `barrier`.

    The destination is .shared::cta: for .shared::cluster, what CuTe's copy atom emits, ptxas keeps a call to a routine
    for remote CTAs on sm_120, and a kernel with a call ignores setmaxnreg (168 registers, spills).
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[
            target.toint() + slot * nbytes,
            source.toint() + index.to(Int64) * nbytes,
            Int32(nbytes),
            barrier.toint(),
        ],
    )


@cute.jit
def initialise(bars: cutlass.Constexpr):
    """Set the arrival counts; called by one thread, before a CTA-wide barrier."""
    for i in cutlass.range_constexpr(STAGES):
        cute.arch.mbarrier_init(bars.full + i, 1)
        cute.arch.mbarrier_init(bars.empty + i, CONSUMER_WARPS)


def await_tile(bars, j):
    """Wait until the K and V tiles of `j`, and the means that ride with them, have arrived."""
    cute.arch.mbarrier_wait(bars.full + j % STAGES, (j // STAGES) & 1)


@cute.jit
def produce(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    tensors: cutlass.Constexpr,
    head: Int32,
    tiles: Int32,
):
    """The producer warp: K and V tiles as consumers free their stages.

    `tensors` holds the global pointers by image name. A group's means ride on the barrier of its first tile, so that
    they need none of their own. They replace those of the group before the last, of which no warp can be reading: the
    stage of that tile has been freed by warps of the last group (STAGES <= MEAN_GROUP).
    """
    groups = (tiles + lo.MEAN_GROUP - 1) // lo.MEAN_GROUP
    for j in cutlass.range(tiles, unroll=1):
        stage = j % STAGES
        phase = (j // STAGES) & 1
        index = head * groups + j // lo.MEAN_GROUP
        buffer = (j // lo.MEAN_GROUP) & 1
        first = j % lo.MEAN_GROUP == 0
        full = bars.full + stage
        cute.arch.mbarrier_wait(bars.empty + stage, phase ^ 1)
        extra = Int32(0)
        if const_expr(config.demean):
            if first:
                extra = Int32(2 * lo.MU_ELEMENTS + (2 * lo.KM_ELEMENTS if config.key_means else 0))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, lo.K_BYTES + lo.V_BYTES + extra)
            bulk_copy(tensors["k"], head * tiles + j, shared.k.data_ptr(), stage, lo.K_BYTES, full)
            bulk_copy(tensors["v"], head * tiles + j, shared.v.data_ptr(), stage, lo.V_BYTES, full)
        if const_expr(config.demean):
            if first:
                with cute.arch.elect_one():
                    bulk_copy(tensors["mu"], index, shared.mu.data_ptr(), buffer, 2 * lo.MU_ELEMENTS, full)
                    if const_expr(config.key_means):
                        bulk_copy(tensors["km"], index, shared.km.data_ptr(), buffer, 2 * lo.KM_ELEMENTS, full)
