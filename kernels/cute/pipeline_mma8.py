"""Shared memory of the 8-bit mma.sync kernels and the two ways to fill it.

"bulk" (sm_120a): a producer warp keeps bulk copies coming, mbarriers tell full from empty. "async" (sm_89): all threads
copy the next tile with cp.async before they compute on this one; one CTA barrier a tile does for both directions.
"""

# ruff: noqa: SIM102 - a compile-time test must stand in an `if` of its own, or it is staged with the other one.

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Int8, Int32, Int64, const_expr

from . import layouts_mma8 as lo

#: K and V tiles in flight. A tile takes 4,000 to 6,500 clk of tensor time, so that one ahead is enough.
STAGES = 2
WARPS = lo.QUERY_TILE // lo.WARP_ROWS
CONSUMERS = 32 * WARPS
#: Threads of a CTA. The producer is a whole warpgroup, as setmaxnreg is of warpgroups.
THREADS = {"bulk": CONSUMERS + 128, "async": CONSUMERS}


def storage(config, loader):
    """The shared-memory struct of one CTA: tiles of means are double-buffered like the tiles they come with."""
    array, aligned = cute.struct.MemRange, cute.struct.Align
    fields = {}
    if loader == "bulk":
        fields = dict.fromkeys(("k_full", "v_full", "k_empty", "v_empty"), array[Int64, STAGES])
    if config.demean:
        fields["mu"] = aligned[array[BFloat16, 2 * lo.MU_ELEMENTS], 128]
    if config.key_means:
        fields["km"] = aligned[array[BFloat16, 2 * lo.KM_ELEMENTS], 128]
    fields["k"] = aligned[array[Int8, lo.K_BYTES * STAGES], 128]
    fields["v"] = aligned[array[Float8E4M3FN, lo.V_BYTES * STAGES], 128]
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def addresses(loader, name, index, slot, size):
    """Shared address of `slot` in the buffer of image `name`, global address of its tile `index` of `size` bytes."""
    target = getattr(loader.shared, name).data_ptr().toint() + slot * size
    return target, loader.tensors[name].toint() + index.to(Int64) * size


class Bulk:
    """Tiles by bulk copies: a tile is full when its bytes have arrived, empty when all consumer warps have left it."""

    def __init__(self, config, shared, tensors, head, tiles):
        self.config, self.shared, self.tensors = config, shared, tensors
        self.head, self.tiles = head, tiles
        self.k_full, self.v_full = shared.k_full.data_ptr(), shared.v_full.data_ptr()
        self.k_empty, self.v_empty = shared.k_empty.data_ptr(), shared.v_empty.data_ptr()

    def start(self):
        """Nothing: the producer has started."""

    def await_keys(self, j):
        """Return when K tile `j` lies in its stage."""
        cute.arch.mbarrier_wait(self.k_full + j % STAGES, (j // STAGES) & 1)

    def await_means(self, j):
        """Return when the key means that come with K tile `j` lie in their buffer."""
        self.await_keys(j)

    def await_values(self, j):
        """Return when V tile `j` lies in its stage."""
        cute.arch.mbarrier_wait(self.v_full + j % STAGES, (j // STAGES) & 1)

    @cute.jit
    def release_keys(self, j: Int32):
        """This warp no longer reads K tile `j`."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.k_empty + j % STAGES)

    @cute.jit
    def release_values(self, j: Int32):
        """This warp no longer reads V tile `j`."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.v_empty + j % STAGES)


def bulk_copy(loader, name, index, slot, size, barrier):
    """Copy the `size` bytes of tile `index` of image `name` to `slot` of its buffer; they count towards `barrier`.

    To .shared::cta, not .shared::cluster as CuTe's copy atom has it: for that, ptxas calls a routine for remote CTAs on
    sm_120, and a kernel with a call does not get the registers that setmaxnreg asks for.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[*addresses(loader, name, index, slot, size), Int32(size), barrier.toint()],
    )


@cute.jit
def initialise(loader: cutlass.Constexpr):
    """Set the arrival counts; called by one thread, before a CTA-wide barrier."""
    for i in cutlass.range_constexpr(STAGES):
        cute.arch.mbarrier_init(loader.k_full + i, 1)
        cute.arch.mbarrier_init(loader.v_full + i, 1)
        cute.arch.mbarrier_init(loader.k_empty + i, WARPS)
        cute.arch.mbarrier_init(loader.v_empty + i, WARPS)


@cute.jit
def produce(loader: cutlass.Constexpr):
    """The producer warp: K and V tiles as consumers free their stages.

    A group's means ride on a barrier of its first tile, km on K's and mu on V's. Their buffer is free by then: it
    held the group before the last, whose means were restored before the tile that this stage held.
    """
    groups = (loader.tiles + lo.MEAN_GROUP - 1) // lo.MEAN_GROUP
    for j in cutlass.range(loader.tiles, unroll=1):
        stage = j % STAGES
        phase = (j // STAGES) & 1
        first = j % lo.MEAN_GROUP == 0
        group = j // lo.MEAN_GROUP
        cute.arch.mbarrier_wait(loader.k_empty + stage, phase ^ 1)
        extra = Int32(0)
        if const_expr(loader.config.key_means):
            if first:
                extra = Int32(2 * lo.KM_ELEMENTS)
        with cute.arch.elect_one():
            full = loader.k_full + stage
            cute.arch.mbarrier_arrive_and_expect_tx(full, lo.K_BYTES + extra)
            bulk_copy(loader, "k", loader.head * loader.tiles + j, stage, lo.K_BYTES, full)
        if const_expr(loader.config.key_means):
            if first:
                with cute.arch.elect_one():
                    index = loader.head * groups + group
                    bulk_copy(loader, "km", index, group & 1, 2 * lo.KM_ELEMENTS, loader.k_full + stage)
        cute.arch.mbarrier_wait(loader.v_empty + stage, phase ^ 1)
        extra = Int32(0)
        if const_expr(loader.config.demean):
            if first:
                extra = Int32(2 * lo.MU_ELEMENTS)
        with cute.arch.elect_one():
            full = loader.v_full + stage
            cute.arch.mbarrier_arrive_and_expect_tx(full, lo.V_BYTES + extra)
            bulk_copy(loader, "v", loader.head * loader.tiles + j, stage, lo.V_BYTES, full)
        if const_expr(loader.config.demean):
            if first:
                with cute.arch.elect_one():
                    index = loader.head * groups + group
                    bulk_copy(loader, "mu", index, group & 1, 2 * lo.MU_ELEMENTS, loader.v_full + stage)


class Async:
    """Tiles by cp.async: K, V and means of tile j + 1 are requested when every warp has finished tile j - 1."""

    def __init__(self, config, shared, tensors, head, tiles):
        self.config, self.shared, self.tensors = config, shared, tensors
        self.head, self.tiles = head, tiles
        self.thread, _, _ = cute.arch.thread_idx()

    def copy(self, name, index, slot, size):
        """Copy the `size` bytes of tile `index` of image `name` to `slot` of its buffer, 16 bytes a thread a time."""
        target, source = addresses(self, name, index, slot, size)
        for start in range(0, size, 16 * CONSUMERS):
            threads = min(CONSUMERS, (size - start) // 16)
            self.copy_chunk(source + start, target + start, threads)

    @cute.jit
    def copy_chunk(self, source: Int64, target: Int32, threads: cutlass.Constexpr):
        """16 bytes for each of the first `threads` threads."""
        code = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;"
        place = [target + 16 * self.thread, source + (16 * self.thread).to(Int64)]
        if const_expr(threads == CONSUMERS):
            cute.arch.inline_ptx(code, read_only_args=place)
        else:
            if self.thread < threads:
                cute.arch.inline_ptx(code, read_only_args=place)

    @cute.jit
    def request(self, j: Int32):
        """Request tile `j`, if there is one, as one group of copies."""
        if j < self.tiles:
            stage = j % STAGES
            self.copy("k", self.head * self.tiles + j, stage, lo.K_BYTES)
            self.copy("v", self.head * self.tiles + j, stage, lo.V_BYTES)
            if const_expr(self.config.demean):
                if j % lo.MEAN_GROUP == 0:
                    group = j // lo.MEAN_GROUP
                    index = self.head * ((self.tiles + lo.MEAN_GROUP - 1) // lo.MEAN_GROUP) + group
                    self.copy("mu", index, group & 1, 2 * lo.MU_ELEMENTS)
                    if const_expr(self.config.key_means):
                        self.copy("km", index, group & 1, 2 * lo.KM_ELEMENTS)
            cute.arch.cp_async_commit_group()

    def start(self):
        """Request the first tile."""
        self.request(Int32(0))

    def await_keys(self, j):
        """Return when tile `j` lies in its stage for all warps; the other stage is then free and is filled."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.request(j + 1)

    def await_means(self, j):
        """Return when the key means that come with tile `j` lie in their buffer for all warps."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    def await_values(self, j):
        """V came with K."""

    def release_keys(self, j):
        """The barrier of the next tile says so."""

    def release_values(self, j):
        """The barrier of the next tile says so."""


LOADERS: dict[str, Any] = {"bulk": Bulk, "async": Async}
