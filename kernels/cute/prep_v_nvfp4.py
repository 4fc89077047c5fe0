"""NVFP4 preparation of V: gather, block means, groups of 16 tokens of the residual, V^T tiles (`layouts_nvfp4`).

Two kernels. `prep_v.StatsV` has the block means and each channel's largest residual; `v4` writes the image. It reads
its 128 tokens as rows, leaves them in shared memory as they are, and takes columns from there: quad lane x then has the
tokens 32 i + 8 x + e of two neighbouring channels, which is what `quantise_row` wants of a row.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from . import emulated_sm120, ptx_sm120, simt
from . import layouts_nvfp4 as lo
from .prep_k import missing_blocks
from .prep_qk_nvfp4 import gmem
from .quantise_nvfp4 import SecondLevel, quantise_row, store_scales, token_of

#: Bytes of the block in shared memory, 16 bits a value.
_BLOCK_BYTES = lo.BLOCK * lo.HEAD_DIM * 2


def _word_at(token, word):
    """Byte in shared memory of channels 2 `word` and 2 `word` + 1 of `token`: quads then read different banks."""
    return ((token << 6) + (word ^ (((token >> 3) & 3) << 3))) << 2


class PrepareV4:
    """Kernel `v4`: grid (BH, nk), block 256, SHARED bytes of shared memory.

    order: int32 [BH, L] or null. means: fp32 [BH, nk, 128] (only with `demean`), amax: fp32 [BH, 128], of `v_stats`.
    v_image, v_scale (sv), v_means (mu, only with `demean`): see `layouts_nvfp4`. adaptive: 0 or 1.
    """

    SHARED = _BLOCK_BYTES + 512

    def __init__(self, fp16: bool, demean: bool, native=ptx_sm120):
        self.fp16, self.demean, self.native = fp16, demean, native

    @cute.jit
    def __call__(
        self, v: cute.Pointer, order: cute.Pointer, means: cute.Pointer, amax: cute.Pointer, v_image: cute.Pointer,
        v_scale: cute.Pointer, v_means: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32,
        length: Int32, adaptive: Int32, grid_x: Int32, grid_y: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(
            v, order, means, amax, v_image, v_scale, v_means, stride_b, stride_h, stride_l, heads, length, adaptive
        ).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=2, preferred_smem_carveout=75,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, v: cute.Pointer, order: cute.Pointer, means: cute.Pointer, amax: cute.Pointer, v_image: cute.Pointer,
        v_scale: cute.Pointer, v_means: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32,
        length: Int32, adaptive: Int32,
    ):  # fmt: skip
        head, block, _ = cute.arch.block_idx()
        _, blocks, _ = cute.arch.grid_dim()
        thread, warp, lane = simt.thread_position()
        shared = simt.shared_memory(self.SHARED)
        rows = simt.Rows(v, head, heads, stride_b, stride_h, stride_l)
        self.load(rows, order, length, head, block, thread, shared)
        channels = simt.load_floats(amax.toint() + head.to(Int64) * 512 + (lane * 16).to(Int64), 4)
        largest = Float32(0.0)
        for value in channels:
            largest = cute.arch.fmax(largest, value)
        second = SecondLevel(simt.warp_max(largest))
        simt.store_float(v_scale.toint() + head.to(Int64) * 4, second.stored, 1 - simt.less(0, block + thread))
        if self.demean:
            self.store_means(means, v_means, second, head, block, blocks, thread, shared + _BLOCK_BYTES)
        cute.arch.sync_threads()
        base = v_image.toint() + (head * blocks + block).to(Int64) * lo.V_BYTES
        self.columns(base, second, adaptive, length - block * lo.BLOCK, warp, lane, shared)
        self.row_sums(base, length - block * lo.BLOCK, block, thread)

    def load(self, rows, order, length, head, block, thread, shared):
        """The block into shared memory; zeros beyond the last token."""
        words = []
        for n in range(lo.BLOCK // 16):
            position = block * lo.BLOCK + thread // 16 + 16 * n
            token = token_of(order, head, length, simt.smaller(position, length - 1))
            words.append(simt.load16(rows.address(token, thread % 16 * 16), simt.less(position, length)))
        for n in range(lo.BLOCK // 16):
            simt.shared_store16(shared + _word_at(thread // 16 + 16 * n, thread % 16 * 4), words[n])

    def store_means(self, means, v_means, second, head, block, blocks, thread, table):
        """The restored means of this block's channels into shared memory, and the stored ones to their image."""
        channel = thread % 128
        at = (head * blocks + block).to(Int64) * 512 + (channel * 4).to(Int64)
        word = simt.bf16x2(simt.divide(simt.load_float(means.toint() + at), second.own), Float32(0.0))
        # Against the mean as attention restores it: its rounding then costs nothing, the residual carries it.
        simt.shared_store(table + channel * 4, simt.unpack2(word, False)[0] * second.own)
        groups = (blocks + lo.MEAN_GROUP - 1) // lo.MEAN_GROUP
        # The last block also clears the blocks that do not exist.
        for n in range(1 + missing_blocks(lo)):
            target = block + n
            wanted = simt.less(thread, 128)
            if n:
                wanted = wanted & (1 - simt.less(block, blocks - 1)) & simt.less(target, groups * lo.MEAN_GROUP)
                word = Uint32(0)
            tile = (head * groups + target // lo.MEAN_GROUP).to(Int64) * (lo.MU_ELEMENTS * 2)
            offset = lo.mu_offset(channel, target % lo.MEAN_GROUP) * 2
            simt.store_half(v_means.toint() + tile + offset.to(Int64), word, wanted)

    def columns(self, base, second, adaptive, valid, warp, lane, shared):
        """Quantise two channels of this lane and write their rows of the image."""
        x = lane % 4
        word = warp * 8 + lane // 4
        tokens = [32 * i + 8 * x + e for i in range(4) for e in range(8)]
        pairs = [simt.unpack2(simt.shared_load(shared + _word_at(t, word), Uint32), self.fp16) for t in tokens]
        for r in range(2):
            channel = 2 * word + r
            y = [pair[r] for pair in pairs]
            if self.demean:
                mean = simt.shared_load(shared + _BLOCK_BYTES + channel * 4)
                inside = [simt.less(token, valid) for token in tokens]
                y = [simt.select(ok, value - mean, Float32(0.0)) for ok, value in zip(inside, y, strict=True)]
            codes, scales = quantise_row(y, second, adaptive, self.native)
            simt.store16(base + (lo.v_code(channel, 8 * x) >> 1).to(Int64), codes)
            store_scales(base + lo.v_scale(channel, 0).to(Int64), scales, lane)

    def row_sums(self, base, valid, block, thread):
        """Rows 128..135: 1.0 at the valid tokens of the block's own row, 0 elsewhere."""
        row, x = thread // 4 % 8, thread % 4
        own = 1 - ((row ^ (block % lo.MEAN_GROUP)) + 7) // 8
        words = []
        for i in range(4):
            word = Uint32(0)
            for e in range(8):
                one = Uint32(lo.E2M1_ONE << (4 * e))
                word = word | simt.select(own & simt.less(32 * i + 8 * x + e, valid), one, Uint32(0))
            words.append(word)
        at = base + (lo.v_code(lo.HEAD_DIM + row, 8 * x) >> 1).to(Int64)
        simt.store16_if(at, words, simt.less(thread, 32))


def build(options="", fp16=False, demean=True, emulated=False):
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    native = emulated_sm120 if emulated else ptx_sm120
    return cute.compile(
        PrepareV4(fp16, demean, native), gmem(kind), gmem(Int32), gmem(Float32), gmem(Float32), gmem(cutlass.Uint8),
        gmem(Float32), gmem(cutlass.BFloat16), Int64(1), Int64(1), Int64(1), Int32(1), Int32(1), Int32(1), Int32(1),
        Int32(1), cuda.CUstream(0), options=options,
    )  # fmt: skip
