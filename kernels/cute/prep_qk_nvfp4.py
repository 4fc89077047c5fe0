"""NVFP4 preparation of Q and K: rotate, groups of 16 channels, fragment-major tiles (`layouts_nvfp4`).

The second-level scale of a head is that of its largest rotated magnitude, so each operand is read twice: `q4_amax` and
`k4_amax` rotate and take the maximum, `q4` and `k4` rotate again and write the image. With key means `k4_amax` also
writes their image, and `k4` reads it. One CTA makes one tile of 128 rows, one warp 16 rows of it.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_ptr

from . import emulated_sm120, ptx_sm120, simt
from . import layouts_nvfp4 as lo
from .prep_k import PrepareK, channel_centre, shared_centre
from .prep_q import load_rows
from .quantise_nvfp4 import SecondLevel, add_amax, quantise_row, store_scales, token_of
from .rotate import NORMALISE, rotate, rotate_partly, signs


def largest(rows):
    amax = Float32(0.0)
    for value in rows[0] + rows[1]:
        amax = simt.max_abs(amax, value)
    return amax


class AmaxQ4:
    """Kernel `q4_amax`: grid (BH, nq), block 256, SHARED bytes. amax: fp32 [BH], zero on entry, of rows times
    128 ** 0.5."""

    SHARED = 32

    def __init__(self, fp16: bool):
        self.fp16 = fp16

    @cute.jit
    def __call__(
        self, q: cute.Pointer, amax: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32,
        length: Int32, grid_x: Int32, grid_y: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(q, amax, stride_b, stride_h, stride_l, heads, length).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=2, preferred_smem_carveout=50,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: cute.Pointer, amax: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32,
        length: Int32,
    ):  # fmt: skip
        head, tile, _ = cute.arch.block_idx()
        thread, warp, lane = simt.thread_position()
        slots = simt.shared_memory(self.SHARED)
        rows = simt.Rows(q, head, heads, stride_b, stride_h, stride_l)
        raw = load_rows(rows, length, tile, warp * 16 + lane // 4, lane % 4)
        y = rotate(raw[0], raw[1], signs(lane, self.fp16), self.fp16)
        add_amax(largest(y), amax, head, slots, thread, warp)


class PrepareQ4:
    """Kernel `q4`: grid (BH, nq), block 256, no dynamic shared memory. amax: of `q4_amax`. adaptive: 0 or 1."""

    def __init__(self, fp16: bool, means: bool, native=ptx_sm120):
        self.fp16, self.means, self.native = fp16, means, native

    @cute.jit
    def __call__(
        self, q: cute.Pointer, amax: cute.Pointer, q_image: cute.Pointer, q_scale: cute.Pointer, q_rows: cute.Pointer,
        stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32, adaptive: Int32,
        grid_x: Int32, grid_y: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(
            q, amax, q_image, q_scale, q_rows, stride_b, stride_h, stride_l, heads, length, adaptive
        ).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=2, preferred_smem_carveout=50,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: cute.Pointer, amax: cute.Pointer, q_image: cute.Pointer, q_scale: cute.Pointer, q_rows: cute.Pointer,
        stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32, adaptive: Int32,
    ):  # fmt: skip
        head, tile, _ = cute.arch.block_idx()
        _, tiles, _ = cute.arch.grid_dim()
        rows = simt.Rows(q, head, heads, stride_b, stride_h, stride_l)
        self.body(rows, amax, q_image, q_scale, q_rows, length, adaptive, head, tile, tiles)

    def body(self, rows, amax, image, scale, rows16, length, adaptive, head, tile, tiles):
        thread, warp, lane = simt.thread_position()
        g, x = lane // 4, lane % 4
        row = warp * 16 + g
        raw = load_rows(rows, length, tile, row, x)
        at = (head * tiles + tile).to(Int64)
        if self.means:
            self.store_rows(rows16.toint() + at * (lo.QB_ELEMENTS * 2), raw, row, x)
        second = SecondLevel(simt.load_float(amax.toint() + head.to(Int64) * 4), NORMALISE)
        simt.store_float(scale.toint() + head.to(Int64) * 4, second.stored, 1 - simt.less(0, tile + thread))
        y = rotate(raw[0], raw[1], signs(lane, self.fp16), self.fp16)
        base = image.toint() + at * lo.Q_BYTES
        words = []
        for r in range(2):
            codes, scales = quantise_row(y[r], second, adaptive, self.native)
            words.append(codes)
            store_scales(base + lo.q_scale(row + 8 * r, 0).to(Int64), scales, lane)
        for half in range(2):
            # Words of rows g, g + 8 and of channels c, c + 32: the A fragment of one MMA.
            fragment = [words[r][2 * half + i] for i in range(2) for r in range(2)]
            simt.store16(base + (lo.q_code(row, 64 * half + 8 * x) >> 1).to(Int64), fragment)

    def store_rows(self, base, raw, row, x):
        """The bf16 rows for key means, as they were read: words of rows g and g + 8 are neighbours in the image."""
        for i in range(4):
            for pair in range(4):
                words = simt.to_bf16([raw[r][4 * i + pair] for r in range(2)], self.fp16)
                simt.store8(base + (lo.qb_offset(row, 32 * i + 8 * x + 2 * pair) * 2).to(Int64), words)


class _Keys(PrepareK):
    """What `k4_amax` and `k4` share: the last key stands in for missing ones, and an order may be there or not."""

    def __init__(self, fp16: bool, means: bool, native=ptx_sm120):
        super().__init__(fp16, True, means, lo)
        self.native = native

    def stand_in(self, block, length):
        return length - 1

    def token(self, order, head, length, position):
        return token_of(order, head, length, position)


class AmaxK4(_Keys):
    """Kernel `k4_amax`: grid (BH, nk), block 256, SHARED bytes of shared memory.

    order: int32 [BH, L] or null. mean: of `k_mean`. amax: fp32 [BH], zero on entry, of rows times 128 ** 0.5. k_means:
    image of block means (only with `means`).
    """

    @cute.jit
    def __call__(
        self, k: cute.Pointer, order: cute.Pointer, mean: cute.Pointer, amax: cute.Pointer, k_means: cute.Pointer,
        stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32, grid_x: Int32, grid_y: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(k, order, mean, amax, k_means, stride_b, stride_h, stride_l, heads, length).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=2, preferred_smem_carveout=50,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, k: cute.Pointer, order: cute.Pointer, mean: cute.Pointer, amax: cute.Pointer, k_means: cute.Pointer,
        stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32,
    ):  # fmt: skip
        head, block, _ = cute.arch.block_idx()
        _, blocks, _ = cute.arch.grid_dim()
        shared = simt.shared_memory(self.SHARED)
        rows = simt.Rows(k, head, heads, stride_b, stride_h, stride_l)
        self.measure(rows, order, mean, amax, k_means, length, head, block, blocks, shared)

    def measure(self, rows, order, mean, amax, means, length, head, block, blocks, shared):
        thread, warp, lane = simt.thread_position()
        x = lane % 4
        raw, weight = self.load(rows, order, length, head, block, warp * 16 + lane // 4, x)
        mean_at = mean.toint() + head.to(Int64) * 1024
        if self.means:
            at = self.block_mean(raw, weight, mean_at, means, length, head, block, block, blocks, shared)
            centre = shared_centre(at, x)
        else:
            centre = channel_centre(mean_at, x)
        y = rotate(raw[0], raw[1], signs(lane, self.fp16), self.fp16, centre)
        add_amax(largest(y), amax, head, shared + (self.SHARED - 128), thread, warp)


class PrepareK4(_Keys):
    """Kernel `k4`: grid (BH, nk), block 256, SHARED bytes of shared memory. Arguments as `k4_amax` has or wrote them;
    adaptive: 0 or 1."""

    SHARED = 512

    @cute.jit
    def __call__(
        self, k: cute.Pointer, order: cute.Pointer, mean: cute.Pointer, amax: cute.Pointer, k_means: cute.Pointer,
        k_image: cute.Pointer, k_scale: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32,
        length: Int32, adaptive: Int32, grid_x: Int32, grid_y: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(
            k, order, mean, amax, k_means, k_image, k_scale, stride_b, stride_h, stride_l, heads, length, adaptive
        ).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=2, preferred_smem_carveout=50,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, k: cute.Pointer, order: cute.Pointer, mean: cute.Pointer, amax: cute.Pointer, k_means: cute.Pointer,
        k_image: cute.Pointer, k_scale: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32,
        length: Int32, adaptive: Int32,
    ):  # fmt: skip
        head, block, _ = cute.arch.block_idx()
        _, blocks, _ = cute.arch.grid_dim()
        shared = simt.shared_memory(self.SHARED)
        rows = simt.Rows(k, head, heads, stride_b, stride_h, stride_l)
        self.write(rows, order, mean, amax, k_means, k_image, k_scale, length, adaptive, head, block, blocks, shared)

    def write(
        self, rows, order, mean, amax, means, image, scale, length, adaptive, head, block, blocks, shared
    ):  # fmt: skip
        thread, warp, lane = simt.thread_position()
        x = lane % 4
        row = warp * 16 + lane // 4
        raw, _ = self.load(rows, order, length, head, block, row, x)
        mean_at = mean.toint() + head.to(Int64) * 1024
        centre = channel_centre(mean_at, x)
        if self.means:
            self.stored_centre(mean_at, means, head, block, blocks, thread, shared)
            centre = shared_centre(shared, x)
        second = SecondLevel(simt.load_float(amax.toint() + head.to(Int64) * 4), NORMALISE)
        simt.store_float(scale.toint() + head.to(Int64) * 4, second.stored, 1 - simt.less(0, block + thread))
        y = rotate(raw[0], raw[1], signs(lane, self.fp16), self.fp16, centre)
        base = image.toint() + (head * blocks + block).to(Int64) * lo.K_BYTES
        for r in range(2):
            codes, scales = quantise_row(y[r], second, adaptive, self.native)
            simt.store16(base + (lo.k_code(row + 8 * r, 8 * x) >> 1).to(Int64), codes)
            store_scales(base + lo.k_scale(row + 8 * r, 0).to(Int64), scales, lane)

    def stored_centre(self, mean_at, means, head, block, blocks, thread, shared):
        """`rotate`'s addend for the channel mean and the stored block mean, into shared memory."""
        channel = thread % 128
        groups = (blocks + lo.MEAN_GROUP - 1) // lo.MEAN_GROUP
        tile = means.toint() + (head * groups + block // lo.MEAN_GROUP).to(Int64) * (lo.KM_ELEMENTS * 2)
        at = tile + (lo.km_offset(block % lo.MEAN_GROUP, channel) * 2).to(Int64)
        stored = simt.ptx(
            "{.reg .b16 h, z; mov.b16 z, 0; ld.global.b16 h, [{$r0}]; mov.b32 {$w0}, {z, h};}", Float32, [at]
        )
        mean = simt.load_float(mean_at + (channel * 4).to(Int64))
        simt.shared_store(shared + channel * 4, rotate_partly(Float32(0.0) - (mean + stored), channel))
        cute.arch.sync_threads()


def gmem(kind):
    return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=16)


def _compile(kernel, kind, outputs, numbers, options):
    """Compile `kernel` of (input, outputs, strides and sizes, `numbers` more, grid, stream)."""
    sizes = [Int64(1)] * 3 + [Int32(1)] * (2 + numbers)
    pointers = [gmem(kind), *map(gmem, outputs)]
    return cute.compile(kernel, *pointers, *sizes, Int32(1), Int32(1), cuda.CUstream(0), options=options)


def _kind(fp16):
    return cutlass.Float16 if fp16 else cutlass.BFloat16


def _native(emulated):
    return emulated_sm120 if emulated else ptx_sm120


def build_q_amax(options="", fp16=False):
    return _compile(AmaxQ4(fp16), _kind(fp16), [Float32], 0, options)


def build_q(options="", fp16=False, means=False, emulated=False):
    outputs = [Float32, cutlass.Uint8, Float32, cutlass.BFloat16]
    return _compile(PrepareQ4(fp16, means, _native(emulated)), _kind(fp16), outputs, 1, options)


def build_k_amax(options="", fp16=False, means=False):
    outputs = [Int32, Float32, Float32, cutlass.BFloat16]
    return _compile(AmaxK4(fp16, means), _kind(fp16), outputs, 0, options)


def build_k(options="", fp16=False, means=False, emulated=False):
    outputs = [Int32, Float32, Float32, cutlass.BFloat16, cutlass.Uint8, Float32]
    return _compile(PrepareK4(fp16, means, _native(emulated)), _kind(fp16), outputs, 1, options)
