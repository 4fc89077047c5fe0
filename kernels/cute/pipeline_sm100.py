"""Shared memory of the tcgen05 attention kernel, its barriers, and the warp that loads the tiles.

The images are those of sm_90a (`layouts`), read 128 keys at a time: half of a K image or V^T image is a K-major SW128
tile in one piece, which a shared-memory descriptor of tcgen05 reads as one of wgmma does. A tile is one bulk copy.
"""

# ruff: noqa: SIM102 - a compile-time test must stand in an `if` of its own, or it is staged with the other one.

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int8, Int32, Int64, const_expr

from . import layouts as lo
from .pipeline import MU_ELEMENTS, bulk_copy

#: Query tiles of one CTA, each with a softmax warpgroup of its own.
HALVES = 2
TILE_BYTES = lo.BLOCK * lo.HEAD_DIM
V_BYTES = lo.BLOCK * lo.V_ROWS
#: The row sums are an MMA of 16 columns, the fewest that there are: V^T rows 128..143, of which the image has 8.
SUM_COLUMNS = 16
V_STAGE_BYTES = lo.BLOCK * (lo.HEAD_DIM + SUM_COLUMNS)
#: Elements of a panel of unrotated Q (64 rows) and of key means (8 blocks): 64 channels, 128 bytes a row.
QB_ELEMENTS, KM_ELEMENTS = lo.WARPGROUP_ROWS * 64, lo.MEAN_GROUP * 64
WARPGROUPS = HALVES + 2
THREADS = 128 * WARPGROUPS
#: What a softmax thread hands to the correction thread of its row for one tile: alpha and an exact row sum.
HANDOVER = 2


def storage(config):
    """The shared-memory struct of one CTA. Swizzled tiles start at multiples of 1024 bytes, their period."""
    array, aligned, stages = cute.struct.MemRange, cute.struct.Align, config.stages
    fields = {
        name: array[Int64, count]
        for name, count in (
            ("q_full", 1),
            ("k_full", stages),
            ("k_empty", stages),
            ("v_full", stages),
            ("v_empty", stages),
            ("scores_full", HALVES),
            ("alpha_full", HALVES),
            ("p_full", HALVES),
            ("sums_full", HALVES),
            ("sums_read", HALVES),
            ("out_ready", HALVES),
            ("out_full", HALVES),
            ("bias_full", HALVES),
            ("bias_read", HALVES),
        )
    }
    fields["tmem"] = array[Int32, 4]
    # [half][tile modulo 2][alpha, sum][row]
    fields["handover"] = aligned[array[Float32, HALVES * 2 * HANDOVER * lo.QUERY_TILE], 16]
    if config.demean:
        # [half][block of the group][row]: the row sums r that wait for their means.
        fields["sums"] = aligned[array[Float32, HALVES * lo.MEAN_GROUP * lo.QUERY_TILE], 16]
        fields["r"] = aligned[array[BFloat16, HALVES * lo.QUERY_TILE * lo.MEAN_WIDTH], 1024]
        # Double-buffered: the group before is restored while the present one arrives.
        fields["mu"] = aligned[array[BFloat16, 2 * MU_ELEMENTS], 1024]
    if config.key_means:
        # [half][block of the group][row]
        fields["bias"] = aligned[array[Float32, HALVES * lo.MEAN_GROUP * lo.QUERY_TILE], 16]
        # Two buffers of [channel half], 16 rows each: an MMA has 16 columns at least, so the 8 blocks come twice.
        fields["km"] = aligned[array[BFloat16, 2 * 2 * 2 * KM_ELEMENTS], 1024]
        # [half][channel half]: 128 rows in one piece, unlike in the image.
        fields["qb"] = aligned[array[BFloat16, HALVES * 2 * 2 * QB_ELEMENTS], 1024]
    fields["q"] = aligned[array[Int8, TILE_BYTES * HALVES], 1024]
    fields["k"] = aligned[array[Int8, TILE_BYTES * stages], 1024]
    fields["v"] = aligned[array[Float8E4M3FN, V_STAGE_BYTES * stages], 1024]
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


class Barriers:
    """The mbarriers of one CTA: a tile is full when its bytes have arrived, empty when its MMAs are over.

    Of each half: `scores_full` S is there, and P V of the tile before is over; `alpha_full` alpha is handed over;
    `p_full` P is in tensor memory; `sums_full` the row sums are (with exact sums: the last one is handed over);
    `sums_read` they have been read; `out_ready` O is rescaled, and r is there; `out_full` O holds all of P V^T, then
    the last means as well; `bias_full` a group's q . (key mean) are in tensor memory, `bias_read` in shared memory.
    """

    def __init__(self, shared):
        for name in (
            *("q_full", "k_full", "k_empty", "v_full", "v_empty", "scores_full", "alpha_full", "p_full"),
            *("sums_full", "sums_read", "out_ready", "out_full", "bias_full", "bias_read"),
        ):
            setattr(self, name, getattr(shared, name).data_ptr())


@cute.jit
def initialise(bars: cutlass.Constexpr, config: cutlass.Constexpr):
    """Set the arrival counts; called by one thread, before a CTA-wide barrier. A warpgroup arrives by its warps."""
    cute.arch.mbarrier_init(bars.q_full, 1)
    for i in cutlass.range_constexpr(config.stages):
        for barrier in (bars.k_full, bars.k_empty, bars.v_full, bars.v_empty):
            cute.arch.mbarrier_init(barrier + i, 1)
    for i in cutlass.range_constexpr(HALVES):
        for barrier in (bars.scores_full, bars.out_full, bars.bias_full):
            cute.arch.mbarrier_init(barrier + i, 1)
        cute.arch.mbarrier_init(bars.sums_full + i, 4 if const_expr(config.exact_sums) else 1)
        for barrier in (bars.alpha_full, bars.p_full, bars.sums_read, bars.out_ready, bars.bias_read):
            cute.arch.mbarrier_init(barrier + i, 4)


@cute.jit
def arrive(barrier: cute.Pointer):
    """This warp arrives, for all that its threads have done."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def clear(config: cutlass.Constexpr, shared: cutlass.Constexpr, thread: Int32):
    """Zero what is multiplied although nobody wrote it: V^T rows 136..143 and the second buffer of means."""
    gap = (V_STAGE_BYTES - V_BYTES) // 4
    words = cute.make_tensor(
        cute.recast_ptr(shared.v.data_ptr() + V_BYTES, dtype=Int32),
        cute.make_layout((gap, config.stages), stride=(1, V_STAGE_BYTES // 4)),
    )
    if thread < gap:
        for stage in cutlass.range_constexpr(config.stages):
            words[thread, stage] = Int32(0)
    cute.arch.fence_view_async_shared()


@cute.jit
def load(
    config: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    bars: cutlass.Constexpr,
    tensors: cutlass.Constexpr,
    head: Int32,
    query_tile: Int32,
    query_tiles: Int32,
    key_tiles: Int32,
    tiles: Int32,
):
    """The loading warp: both Q tiles once, then K and V tiles as their stages become free.

    `tensors` holds the global pointers by image name. key_tiles: of the images, `tiles`: blocks of 128 keys that hold
    one. A group's means ride on barriers of its first tile, mu on V's and km on K's. Their buffers are free: the MMAs
    that read the group before last were queued long before the one that freed this tile's stage.
    """
    stages = config.stages
    groups = (key_tiles + lo.TILES_PER_GROUP - 1) // lo.TILES_PER_GROUP
    sQ, sK, sV = shared.q.data_ptr(), shared.k.data_ptr(), shared.v.data_ptr()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.q_full, TILE_BYTES * HALVES * (3 if config.key_means else 1))
        for half in cutlass.range_constexpr(HALVES):
            # A head with an odd number of query tiles: the last one is computed twice and stored once.
            tile = head * query_tiles + cutlass.min(query_tile + half, query_tiles - 1)
            bulk_copy(Int8, tensors["q"], tile, sQ, half, TILE_BYTES, bars.q_full)
            if const_expr(config.key_means):
                sQb = shared.qb.data_ptr()
                for panel in cutlass.range_constexpr(4):
                    slot = 4 * half + 2 * (panel % 2) + panel // 2
                    bulk_copy(BFloat16, tensors["qb"], 4 * tile + panel, sQb, slot, QB_ELEMENTS, bars.q_full)
    for j in cutlass.range(tiles, unroll=1):
        stage = j % stages
        phase = (j // stages) & 1
        block = head * (2 * key_tiles) + j
        cute.arch.mbarrier_wait(bars.k_empty + stage, phase ^ 1)
        more = Int32(0)
        if const_expr(config.key_means):
            if j % lo.MEAN_GROUP == 0:
                more = Int32(4 * 2 * KM_ELEMENTS)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full + stage, TILE_BYTES + more)
            bulk_copy(Int8, tensors["k"], block, sK, stage, TILE_BYTES, bars.k_full + stage)
        if const_expr(config.key_means):
            if j % lo.MEAN_GROUP == 0:
                key_group = j // lo.MEAN_GROUP
                sKm = shared.km.data_ptr()
                with cute.arch.elect_one():
                    for slot in cutlass.range_constexpr(4):
                        panel = 2 * (head * groups + key_group) + slot // 2
                        place = 4 * (key_group & 1) + slot
                        bulk_copy(BFloat16, tensors["km"], panel, sKm, place, KM_ELEMENTS, bars.k_full + stage)
        cute.arch.mbarrier_wait(bars.v_empty + stage, phase ^ 1)
        extra = Int32(0)
        if const_expr(config.demean):
            if j % lo.MEAN_GROUP == 0:
                extra = Int32(2 * MU_ELEMENTS)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.v_full + stage, V_BYTES + extra)
            target = sV + stage * V_STAGE_BYTES
            bulk_copy(Float8E4M3FN, tensors["v"], block, target, 0, V_BYTES, bars.v_full + stage)
        if const_expr(config.demean):
            if j % lo.MEAN_GROUP == 0:
                mean_group = j // lo.MEAN_GROUP
                sMu = shared.mu.data_ptr()
                with cute.arch.elect_one():
                    index = head * groups + mean_group
                    bulk_copy(BFloat16, tensors["mu"], index, sMu, mean_group & 1, MU_ELEMENTS, bars.v_full + stage)
