"""Shared memory of the sm_90a attention kernel, its barriers, and the producer warp that keeps the tiles coming.

Every operand is a pre-tiled image, so a tile is one bulk copy of consecutive bytes and needs no descriptor.
"""

# ruff: noqa: SIM102 - a compile-time test must stand in an `if` of its own, or it is staged with the other one.

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Int8, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from . import layouts as lo

Q_BYTES = lo.QUERY_TILE * lo.HEAD_DIM
K_BYTES = lo.KEY_TILE * lo.HEAD_DIM
V_BYTES = lo.KEY_TILE * lo.V_ROWS
MU_ELEMENTS = lo.HEAD_DIM * lo.MEAN_WIDTH
KM_ELEMENTS = lo.MEAN_GROUP * lo.HEAD_DIM
CONSUMERS = lo.QUERY_TILE // lo.WARPGROUP_ROWS
THREADS = 128 * (CONSUMERS + 1)


def storage(config):
    """The shared-memory struct of one CTA. Swizzled tiles start at multiples of 1024 bytes, their period."""
    array, aligned, stages = cute.struct.MemRange, cute.struct.Align, config.stages
    fields = {
        "q_full": array[Int64, 1],
        "k_full": array[Int64, stages],
        "v_full": array[Int64, stages],
        "k_empty": array[Int64, stages],
        "v_empty": array[Int64, stages],
    }
    # Tiles of means are double-buffered: the group before is restored while the present one arrives.
    if config.demean:
        fields["mu"] = aligned[array[BFloat16, 2 * MU_ELEMENTS], 1024]
    if config.key_means:
        fields["km"] = aligned[array[BFloat16, 2 * KM_ELEMENTS], 1024]
        fields["qb"] = aligned[array[BFloat16, Q_BYTES], 1024]
    fields["q"] = aligned[array[Int8, Q_BYTES], 1024]
    fields["k"] = aligned[array[Int8, K_BYTES * stages], 1024]
    fields["v"] = aligned[array[Float8E4M3FN, V_BYTES * stages], 1024]
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Barriers:
    """The mbarriers of one CTA: a tile is full when its bytes have arrived, empty when all consumer warps are done."""

    def __init__(self, shared):
        self.q_full = shared.q_full.data_ptr()
        self.k_full, self.v_full = shared.k_full.data_ptr(), shared.v_full.data_ptr()
        self.k_empty, self.v_empty = shared.k_empty.data_ptr(), shared.v_empty.data_ptr()


@cute.jit
def initialise(bars: cutlass.Constexpr, stages: cutlass.Constexpr, cluster: cutlass.Constexpr):
    """Set the arrival counts; called by one thread, before a CTA-wide barrier."""
    cute.arch.mbarrier_init(bars.q_full, 1)
    for i in cutlass.range_constexpr(stages):
        cute.arch.mbarrier_init(bars.k_full + i, 1)
        cute.arch.mbarrier_init(bars.v_full + i, 1)
        cute.arch.mbarrier_init(bars.k_empty + i, 4 * CONSUMERS * cluster)
        cute.arch.mbarrier_init(bars.v_empty + i, 4 * CONSUMERS * cluster)


def bulk_copy(dtype, source, index, target, slot, count, barrier):
    """Copy tile `index` of `source` to `slot` of `target`: `count` elements each; the bytes count towards `barrier`."""
    layout = cute.make_layout(count)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), dtype)
    tile = cute.make_tensor(source + index.to(Int64) * count, layout)
    cute.copy(atom, tile, cute.make_tensor(target + slot * count, layout), mbar_ptr=barrier)


def tile_copy(cluster, dtype, source, index, target, slot, count, barrier):
    """`bulk_copy` of a tile that every CTA of a cluster needs: each fetches its share and sends it to all."""
    if cluster == 1:
        bulk_copy(dtype, source, index, target, slot, count, barrier)
        return
    share = count // cluster
    start = cute.arch.block_idx_in_cluster() * share
    layout = cute.make_layout(share)
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SMulticastOp(), dtype)
    tile = cute.make_tensor(source + (index.to(Int64) * count + start), layout)
    place = cute.make_tensor(target + (slot * count + start), layout)
    cute.copy(atom, tile, place, mbar_ptr=barrier, mcast_mask=Int16((1 << cluster) - 1))


@cute.jit
def produce(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    tensors: cutlass.Constexpr,
    head: Int32,
    query_tile: Int32,
    query_tiles: Int32,
    tiles: Int32,
):
    """The producer warp: Q once, then K and V tiles as consumers free their stages.

    `tensors` holds the global pointers by image name. A group's means ride on a barrier of its first tile: mu on V's
    and km on K's, so that neither needs a barrier of its own (safe while stages <= tiles per group).
    """
    stages = config.stages
    groups = (tiles + lo.TILES_PER_GROUP - 1) // lo.TILES_PER_GROUP
    query = head * query_tiles + cutlass.min(query_tile, query_tiles - 1)
    sQ, sK, sV = shared.q.data_ptr(), shared.k.data_ptr(), shared.v.data_ptr()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.q_full, Q_BYTES * (3 if config.key_means else 1))
        bulk_copy(Int8, tensors["q"], query, sQ, 0, Q_BYTES, bars.q_full)
        if const_expr(config.key_means):
            bulk_copy(BFloat16, tensors["qb"], query, shared.qb.data_ptr(), 0, Q_BYTES, bars.q_full)
    for j in cutlass.range(tiles, unroll=1):
        stage = j % stages
        phase = (j // stages) & 1
        group = j // lo.TILES_PER_GROUP
        first = j % lo.TILES_PER_GROUP == 0
        cute.arch.mbarrier_wait(bars.k_empty + stage, phase ^ 1)
        extra = Int32(0)
        if const_expr(config.key_means):
            if first:
                extra = Int32(2 * KM_ELEMENTS)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full + stage, K_BYTES + extra)
            tile_copy(config.cluster, Int8, tensors["k"], head * tiles + j, sK, stage, K_BYTES, bars.k_full + stage)
        if const_expr(config.key_means):
            if first:
                sKm = shared.km.data_ptr()
                with cute.arch.elect_one():
                    tile_copy(
                        config.cluster,
                        BFloat16,
                        tensors["km"],
                        head * groups + group,
                        sKm,
                        group & 1,
                        KM_ELEMENTS,
                        bars.k_full + stage,
                    )
        cute.arch.mbarrier_wait(bars.v_empty + stage, phase ^ 1)
        extra = Int32(0)
        if const_expr(config.demean):
            if first:
                extra = Int32(2 * MU_ELEMENTS)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.v_full + stage, V_BYTES + extra)
            tile_copy(
                config.cluster, Float8E4M3FN, tensors["v"], head * tiles + j, sV, stage, V_BYTES, bars.v_full + stage
            )
        if const_expr(config.demean):
            if first:
                sMu = shared.mu.data_ptr()
                with cute.arch.elect_one():
                    tile_copy(
                        config.cluster,
                        BFloat16,
                        tensors["mu"],
                        head * groups + group,
                        sMu,
                        group & 1,
                        MU_ELEMENTS,
                        bars.v_full + stage,
                    )
