"""Attention for B200 and B300 (sm_100a, sm_103a) on tcgen05: FP8 or INT8 Q K^T, FP8 P V, ExpCast or exp2, V-Smooth
means and key block means inside the recurrence.

A CTA computes 256 query rows of one head, two tiles of 128, with four warpgroups:

    0, 1   softmax of a tile each (`softmax_sm100`): a thread is a row, scores from tensor memory, P back into it
    2      correction (`correction_sm100`): O *= alpha where a maximum rose, row sums, means, output
    3      one warp that queues the MMAs (`mma_sm100`, which states their order) and one that loads (`pipeline_sm100`)

Assumptions that no card was there to check; `launch.selftest` finds them wrong on the user's: tcgen05 adds FP8 products
up in fp32 (PTX ISA, tcgen05.mma), so O has a single level of accumulation; MMAs of one CTA complete in the order of
issue, whatever their kind and shape (FlashAttention-4 relies on it, too, where S overwrites P).
"""

from __future__ import annotations

from functools import partial

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int8, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_ptr

from . import layouts as lo
from . import tmem
from .buildable import Buildable
from .config_sm100 import configs
from .correction_sm100 import correct
from .mma_sm100 import SCORES_AT, multiply
from .pipeline_sm100 import HALVES, HANDOVER, THREADS, Barriers, arrive, clear, initialise, load, storage
from .softmax_sm100 import load_scores, make_probabilities, new_maximum, score_unit

#: Registers of a thread of a softmax, the correction and the MMA warpgroup: 128 (2 * 176 + 96 + 64) = 65536.
_SOFTMAX_REGISTERS, _CORRECTION_REGISTERS, _OTHER_REGISTERS = 176, 96, 64

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


class AttentionSm100:
    """One attention kernel; `config` holds its compile-time choices. polynomial: exp2 computes some exponentials so."""

    def __init__(self, config, polynomial):
        self.config, self.polynomial = config, polynomial

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
        """Grid (pairs of query tiles, B H). `lq`, `lkv`: lengths; `heads`: H; `scale`: score scale times log2 e."""
        config = self.config
        key_tiles = (lkv + lo.KEY_TILE - 1) // lo.KEY_TILE
        tiles = (lkv + lo.BLOCK - 1) // lo.BLOCK
        query_tiles = (lq + lo.QUERY_TILE - 1) // lo.QUERY_TILE
        thread, _, _ = cute.arch.thread_idx()
        pair, head, _ = cute.arch.block_idx()
        query_tile = pair * HALVES
        warp = cute.arch.make_warp_uniform(thread // 32)
        group_index = cute.arch.make_warp_uniform(thread // 128)
        shared = cutlass.memory.SmemAllocator().allocate(self.storage)
        bars = Barriers(shared)
        clear(config, shared, thread)
        if warp == 4 * (HALVES + 1):
            cute.arch.alloc_tmem(tmem.COLUMNS, shared.tmem.data_ptr())
            cute.arch.relinquish_tmem_alloc_permit()
        if thread == 0:
            initialise(bars, config)
        cute.arch.mbarrier_init_fence()
        tmem.before_sync()
        cute.arch.sync_threads()
        tmem.after_sync()
        base = cute.make_tensor(shared.tmem.data_ptr(), cute.make_layout(1))[0]
        if group_index < HALVES:
            cute.arch.setmaxregister_increase(_SOFTMAX_REGISTERS)
            self.soften(shared, bars, base, qs, ks, head, query_tile, query_tiles, key_tiles, lkv, scale, group_index)
        elif group_index == HALVES:
            cute.arch.setmaxregister_decrease(_CORRECTION_REGISTERS)
            first_row, unit = query_tile * lo.QUERY_TILE, scale * score_unit(config)
            correct(config, shared, bars, base, sv, out, lq, heads, head, first_row, tiles, unit)
        else:
            cute.arch.setmaxregister_decrease(_OTHER_REGISTERS)
            if warp == 4 * (HALVES + 1):
                multiply(config, shared, bars, base, tiles)
            if warp == 4 * (HALVES + 1) + 1:
                tensors = {"q": q, "k": k, "v": v, "mu": mu, "qb": qb, "km": km}
                load(config, shared, bars, tensors, head, query_tile, query_tiles, key_tiles, tiles)
        tmem.before_sync()
        cute.arch.sync_threads()
        if warp == 4 * (HALVES + 1):
            tmem.after_sync()
            cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, shared.tmem.data_ptr()), tmem.COLUMNS)

    @cute.jit
    def soften(
        self,
        shared: cutlass.Constexpr,
        bars: cutlass.Constexpr,
        base: Int32,
        qs: cute.Pointer,
        ks: cute.Pointer,
        head: Int32,
        query_tile: Int32,
        query_tiles: Int32,
        key_tiles: Int32,
        lkv: Int32,
        scale: Float32,
        half: Int32,
    ):
        """One softmax warpgroup: the loop over key tiles."""
        config = self.config
        tiles = (lkv + lo.BLOCK - 1) // lo.BLOCK
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % 128
        known = cutlass.min(query_tile + half, query_tiles - 1)
        gQs = cute.make_tensor(
            qs + (head * query_tiles + known).to(Int64) * lo.QUERY_TILE + thread, cute.make_layout(1)
        )
        unit = score_unit(config)
        row_scale = gQs[0] * (scale * unit)
        gKs = cute.make_tensor(ks + (head * key_tiles).to(Int64) * 2, cute.make_layout(1 << 24))
        scores_at = base + (thread // 32 << 21) + SCORES_AT + half * lo.BLOCK
        handover = cute.make_tensor(
            shared.handover.data_ptr() + half * (2 * HANDOVER * lo.QUERY_TILE) + thread,
            cute.make_layout((HANDOVER, 2), stride=(lo.QUERY_TILE, HANDOVER * lo.QUERY_TILE)),
        )
        bias = Float32(0.0)
        if const_expr(config.key_means):
            biases = cute.make_tensor(
                shared.bias.data_ptr() + half * (lo.MEAN_GROUP * lo.QUERY_TILE) + thread,
                cute.make_layout(lo.MEAN_GROUP, stride=lo.QUERY_TILE),
            )
        maximum = -Float32.inf
        key_scale = gKs[0]
        pending = Float32(0.0)
        for j in cutlass.range(tiles, unroll=1):
            parity = j & 1
            a = row_scale * key_scale
            # The next tile's scale comes from memory under this tile's work.
            key_scale = gKs[cutlass.min(j + 1, tiles - 1)]
            cute.arch.mbarrier_wait(bars.scores_full + half, parity)
            tmem.after_sync()
            scores = load_scores(config, scores_at)
            if const_expr(config.key_means):
                if j % lo.MEAN_GROUP == 0:
                    cute.arch.mbarrier_wait(bars.bias_read + half, (j // lo.MEAN_GROUP) & 1)
                bias = biases[j % lo.MEAN_GROUP]
            addend = bias if const_expr(config.key_means) else None
            new = new_maximum(scores, a, addend, maximum)
            handover[0, parity] = cute.math.exp2((maximum - new) * (1.0 / unit), fastmath=True)
            maximum = new
            if const_expr(config.exact_sums):
                handover[1, parity] = pending
            tmem.before_sync()
            arrive(bars.alpha_full + half)
            total, last = make_probabilities(config, scores_at, scores, a, addend, new, self.polynomial)
            tmem.wait_store()
            tmem.before_sync()
            arrive(bars.p_full + half)
            if const_expr(config.exact_sums):
                # Keys beyond `lkv` repeat one real key: each has the P of the block's last column.
                missing = cutlass.max((j + 1) * lo.BLOCK - lkv, 0)
                pending = total - Float32(missing) * last
        if const_expr(config.exact_sums):
            # Not on `alpha_full`, which would go two phases ahead of a correction warp that is late.
            handover[1, tiles & 1] = pending
            arrive(bars.sums_full + half)


def _compile(config, polynomial, options):
    pointers = [make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align) for _, dtype, align in POINTERS]
    numbers = [Int32(1), Int32(1), Int32(1), Float32(1.0), Int32(1), Int32(1)]
    return cute.compile(AttentionSm100(config, polynomial), *pointers, *numbers, cuda.CUstream(0), options=options)


def buildables(arch):
    """Every tcgen05 attention kernel of `arch`, "sm_100a" or "sm_103a"."""
    arguments = tuple(name for name, _, _ in POINTERS) + SCALARS
    return [
        Buildable(
            config.name,
            # B300 has twice the special functions of B200, and its exp2 kernels end at other limits.
            partial(_compile, config, arch == "sm_100a"),
            storage(config).size_in_bytes(),
            "query_tiles(lq) / 2 rounded up, batch * heads, 1",
            arguments,
        )
        for config in configs(arch)
    ]
