"""Preparation of K: channel mean, gather, rotate, 8 bit with one scale for 128 keys, tile image, block means.

Three kernels. `k_sum` adds up chunks of tokens of each channel, `k_mean` turns the sums into the mean and its partial
rotation, `k` makes the image. The rotation is linear, so K enters the tensor core as it was read (16 bit, exact) and
the mean, rotated as far as the tensor core does it, is the addend of that product.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_ptr

from . import layouts, simt
from .prep_q import SCORES
from .rotate import rotate, rotate_partly, signs

#: Tokens that one CTA of `k_sum` adds up.
SUM_CHUNK = 1024
#: Rows that a thread of `k_sum` has in flight.
SUM_FLIGHT = 8


class SumK:
    """Kernel `k_sum`: grid (BH, chunks), block 256, 4096 bytes of shared memory. sums: fp32 [BH, chunks, 128]."""

    SHARED = 8 * 512

    def __init__(self, fp16: bool):
        self.fp16 = fp16

    @cute.jit
    def __call__(
        self, k: cute.Pointer, sums: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32,
        length: Int32, grid_x: Int32, grid_y: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(k, sums, stride_b, stride_h, stride_l, heads, length).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=4, preferred_smem_carveout=50,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, k: cute.Pointer, sums: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32,
        length: Int32,
    ):  # fmt: skip
        head, chunk, _ = cute.arch.block_idx()
        _, chunks, _ = cute.arch.grid_dim()
        thread, warp, lane = simt.thread_position()
        shared = simt.shared_memory(self.SHARED)
        rows = simt.Rows(k, head, heads, stride_b, stride_h, stride_l)
        total = cute.make_rmem_tensor(8, Float32)
        total.fill(0.0)
        first = chunk * SUM_CHUNK + thread // 16
        for step in cutlass.range(SUM_CHUNK // (16 * SUM_FLIGHT), unroll=1):
            self.add(rows, total, first + step * (16 * SUM_FLIGHT), length, lane)
        self.finish(total, sums, shared, thread, warp, lane, head * chunks + chunk)

    def add(self, rows, total, token, length, lane):
        words = []
        for n in range(SUM_FLIGHT):
            t = token + 16 * n
            words.append(simt.load16(rows.address(simt.smaller(t, length - 1), (lane % 16) * 16), simt.less(t, length)))
        for row in words:
            for n in range(4):
                low, high = simt.unpack2(row[n], self.fp16)
                total[2 * n] = total[2 * n] + low
                total[2 * n + 1] = total[2 * n + 1] + high

    def finish(self, total, sums, shared, thread, warp, lane, at):
        values = [total[n] + simt.shuffle_xor(total[n], 16) for n in range(8)]
        slot = shared + warp * 512 + (lane % 16) * 32  # lanes 16..31 write the same values again
        simt.shared_store16(slot, values[:4])
        simt.shared_store16(slot + 16, values[4:])
        cute.arch.sync_threads()
        channel = thread % 128
        value = simt.shared_load(shared + channel * 4)
        for w in range(1, simt.WARPS):
            value = value + simt.shared_load(shared + w * 512 + channel * 4)
        simt.store_float(sums.toint() + (at.to(Int64) * 512 + (channel * 4).to(Int64)), value, simt.less(thread, 128))


class MeanK:
    """Kernel `k_mean`: grid (BH), block 128, no shared memory.

    sums fp32 [BH, chunks, 128] -> mean fp32 [BH, 2, 128]: the channel mean, and the addend of `rotate` for it.
    """

    @cute.jit
    def __call__(
        self, sums: cute.Pointer, mean: cute.Pointer, chunks: Int32, length: Int32, grid_x: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(sums, mean, chunks, length).launch(
            grid=(grid_x, 1, 1), block=(128, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, sums: cute.Pointer, mean: cute.Pointer, chunks: Int32, length: Int32):
        head, _, _ = cute.arch.block_idx()
        channel, _, _ = cute.arch.thread_idx()
        total = cute.make_rmem_tensor(8, Float32)
        total.fill(0.0)
        base = sums.toint() + (head * chunks).to(Int64) * 512 + (channel * 4).to(Int64)
        for chunk in cutlass.range(0, chunks, 8, unroll=1):
            for n in cutlass.range_constexpr(8):
                inside = simt.less(chunk + n, chunks)
                value = simt.load_float(base + simt.smaller(chunk + n, chunks - 1).to(Int64) * 512)
                total[n] = total[n] + simt.select(inside, value, Float32(0.0))
        value = total[0]
        for n in cutlass.range_constexpr(1, 8):
            value = value + total[n]
        value = simt.divide(value, length.to(Float32))
        out = mean.toint() + head.to(Int64) * 1024 + (channel * 4).to(Int64)
        simt.store_float(out, value)
        simt.store_float(out + 512, rotate_partly(Float32(0.0) - value, channel))


def missing_blocks(layout):
    """The most blocks that a last tile of means can lack."""
    return layout.MEAN_GROUP - getattr(layout, "KEY_TILE", layout.BLOCK) // layout.BLOCK


def channel_centre(mean_at, x):
    """`rotate`'s addend for the channel mean, of quad lane `x`; mean_at: address of `k_mean`'s result."""
    return lambda i: simt.load_floats(mean_at + 512 + (x * 32).to(Int64) + 128 * i, 8)


def shared_centre(at, x):
    """`rotate`'s addend from 128 numbers in shared memory."""

    def centre(i):
        byte = at + x * 32 + 128 * i
        return simt.shared_load16(byte, Float32) + simt.shared_load16(byte + 16, Float32)

    return centre


class PrepareK:
    """Kernel `k`: grid (BH, nb), block 256, SHARED bytes of shared memory.

    order: int32 [BH, L] token of each position (unused without `gather`). mean: of `k_mean`. Means: block means as the
    key-mean MMA reads them (only with `means`). layout: module that states the images, `layouts` or `layouts_mma8`.
    scores: "int8" or "fp8".
    """

    SHARED = 8 * 512 + 512 + 128

    def __init__(self, fp16: bool, gather: bool, means: bool, layout=layouts, scores: str = "int8"):
        self.fp16, self.gather, self.means, self.layout = fp16, gather, means, layout
        self.format = SCORES[scores]

    @cute.jit
    def __call__(
        self, k: cute.Pointer, order: cute.Pointer, mean: cute.Pointer, k_image: cute.Pointer, k_scale: cute.Pointer,
        k_means: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32,
        grid_x: Int32, grid_y: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(k, order, mean, k_image, k_scale, k_means, stride_b, stride_h, stride_l, heads, length).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=2, preferred_smem_carveout=50,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, k: cute.Pointer, order: cute.Pointer, mean: cute.Pointer, k_image: cute.Pointer, k_scale: cute.Pointer,
        k_means: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32,
    ):  # fmt: skip
        head, block, _ = cute.arch.block_idx()
        _, blocks, _ = cute.arch.grid_dim()
        shared = simt.shared_memory(self.SHARED)
        rows = simt.Rows(k, head, heads, stride_b, stride_h, stride_l)
        self.body(rows, order, mean, k_image, k_scale, k_means, length, head, block, blocks, shared)

    def body(self, rows, order, mean, image, scales, means, length, head, block, blocks, shared):
        layout = self.layout
        thread, warp, lane = simt.thread_position()
        g, x = lane // 4, lane % 4
        row = warp * 16 + g
        # A wholly padded block is the last valid block once more: real residuals under that block's scale.
        valid_block = simt.smaller(block, (length - 1) // layout.BLOCK)
        raw, weight = self.load(rows, order, length, head, valid_block, row, x)
        mean_at = mean.toint() + head.to(Int64) * 1024
        if self.means:
            centre_at = self.block_mean(raw, weight, mean_at, means, length, head, block, valid_block, blocks, shared)
            centre = shared_centre(centre_at, x)
        else:
            centre = channel_centre(mean_at, x)

        y = rotate(raw[0], raw[1], signs(lane, self.fp16), self.fp16, centre)
        amax = Float32(0.0)
        for v in y[0] + y[1]:
            amax = simt.max_abs(amax, v)
        amax = simt.warp_max(amax)
        slots = shared + (self.SHARED - 128)
        simt.shared_store(slots + warp * 4, amax)  # every lane writes the same value
        cute.arch.sync_threads()
        for n in range(2):
            for v in simt.shared_load16(slots + 16 * n, Float32):
                amax = cute.arch.fmax(amax, v)
        scale, inverse = self.format.scale(amax)
        at = (head * blocks + block).to(Int64)
        base = image.toint() + at * (layout.BLOCK * 128)
        for r in range(2):
            for i in range(4):
                codes = [v * inverse for v in y[r][8 * i : 8 * i + 8]]
                words = [self.format.pack(codes[4 * n : 4 * n + 4]) for n in range(2)]
                simt.store8(base + layout.k_offset(row + 8 * r, 32 * i + 8 * x).to(Int64), words)
        simt.store_float(scales.toint() + at * 4, scale, simt.less(thread, 1))

    def load(self, rows, order, length, head, block, row, x):
        """Keys `row` and `row` + 8 of a valid block as quad lane `x` has them for `rotate`, and whether they exist."""
        raw, weight = [], []
        for r in range(2):
            position = block * self.layout.BLOCK + row + 8 * r
            inside = simt.less(position, length)
            position = simt.select(inside, position, self.stand_in(block, length))
            weight.append(inside)
            address = rows.address(self.token(order, head, length, position), x * 16)
            raw.append([w for i in range(4) for w in simt.load16(address + 64 * i)])
        return raw, weight

    def stand_in(self, block, length):
        """Position of the key that stands in for those beyond the last."""
        return block * self.layout.BLOCK

    def token(self, order, head, length, position):
        """Token (Int32) at a valid `position` of the gathered sequence."""
        if not self.gather:
            return position
        return simt.load_int(order.toint() + (head.to(Int64) * length.to(Int64) + position.to(Int64)) * 4)

    def block_mean(self, raw, weight, mean_at, means, length, head, block, valid_block, blocks, shared):
        """Store the block's mean (of valid keys, less the channel mean); returns where `rotate`'s addend for the sum of
        both is in shared memory."""
        thread, warp, lane = simt.thread_position()
        g, x = lane // 4, lane % 4
        w = [n.to(Float32) for n in weight]
        values = []
        for n in range(16):
            low, high = simt.unpack2(raw[0][n], self.fp16), simt.unpack2(raw[1][n], self.fp16)
            values += [a * w[0] + b * w[1] for a, b in zip(low, high, strict=True)]
        for mask in (16, 8, 4):  # each step halves the channels that a lane adds up
            half = len(values) // 2
            up = lane & mask
            keep = [simt.select(up, values[half + n], values[n]) for n in range(half)]
            give = [simt.select(up, values[n], values[half + n]) for n in range(half)]
            values = [a + simt.shuffle_xor(b, mask) for a, b in zip(keep, give, strict=True)]
        channel = 32 * (g // 2) + 8 * x + 4 * (g % 2)
        simt.shared_store16(shared + warp * 512 + channel * 4, values)
        cute.arch.sync_threads()
        channel = thread % 128
        total = simt.shared_load(shared + channel * 4)
        for n in range(1, simt.WARPS):
            total = total + simt.shared_load(shared + n * 512 + channel * 4)
        layout = self.layout
        count = simt.smaller(length - valid_block * layout.BLOCK, Int32(layout.BLOCK))
        mean = simt.load_float(mean_at + (channel * 4).to(Int64))
        word = simt.bf16x2(simt.divide(total, count.to(Float32)) - mean, Float32(0.0))
        # Tiles of means hold whole groups of 8 blocks: the last block also fills the blocks that do not exist.
        groups = (blocks + layout.MEAN_GROUP - 1) // layout.MEAN_GROUP
        for n in range(1 + missing_blocks(layout)):
            target = block + n
            wanted = simt.less(thread, 128)
            if n:
                wanted = wanted & (1 - simt.less(block, blocks - 1)) & simt.less(target, groups * layout.MEAN_GROUP)
            tile = (head * groups + target // layout.MEAN_GROUP).to(Int64) * (layout.MEAN_GROUP * 256)
            offset = layout.km_offset(target % layout.MEAN_GROUP, channel) * 2
            simt.store_half(means.toint() + tile + offset.to(Int64), word, wanted)
        centre = Float32(0.0) - (mean + simt.unpack2(word, False)[0])
        centre_at = shared + 8 * 512
        simt.shared_store(centre_at + channel * 4, rotate_partly(centre, channel))
        cute.arch.sync_threads()
        return centre_at


def _gmem(kind):
    return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=16)


def build_sum(options="", fp16=False):
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    return cute.compile(
        SumK(fp16), _gmem(kind), _gmem(Float32), Int64(1), Int64(1), Int64(1), Int32(1), Int32(1), Int32(1), Int32(1),
        cuda.CUstream(0), options=options,
    )  # fmt: skip


def build_mean(options=""):
    return cute.compile(
        MeanK(), _gmem(Float32), _gmem(Float32), Int32(1), Int32(1), Int32(1), cuda.CUstream(0), options=options
    )


def build(options="", fp16=False, gather=False, means=False, layout=layouts, scores="int8"):
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    return cute.compile(
        PrepareK(fp16, gather, means, layout, scores), _gmem(kind), _gmem(Int32), _gmem(Float32), _gmem(cutlass.Int8),
        _gmem(Float32), _gmem(cutlass.BFloat16), Int64(1), Int64(1), Int64(1), Int32(1), Int32(1), Int32(1), Int32(1),
        cuda.CUstream(0), options=options,
    )  # fmt: skip
