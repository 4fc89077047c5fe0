"""Preparation of V: gather, block means, channel scale of the residual, E4M3, transposed tile image.

Two kernels. `v_stats` reads V once: the mean of each 128-token block, and for each channel the largest magnitude of
V less its block mean over all tokens (from each block's largest and smallest value: rounding is monotonic, so this is
exactly the largest |v - mean|). `v` reads V again and writes the image. Without demeaning the first pass finds the
largest |v|, in any order of the tokens.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr

from . import layouts, layouts_mma8, simt
from .prep_k import missing_blocks
from .prep_q import TINY
from .quantise_nvfp4 import token_of

#: Rows that a thread has in flight: 8 of 16 bytes each, one 128-token block for a CTA.
FLIGHT = 8


def max2(a, b, fp16, largest=True):
    """Packed maximum (or minimum) of two words of 16-bit floats."""
    kind = "f16x2" if fp16 else "bf16x2"
    return simt.ptx(f"{'max' if largest else 'min'}.{kind} {{$w0}}, {{$r0}}, {{$r1}};", Uint32, [a, b])


def token_at(order, head, length, position, gather):
    """Token (Int32) of a valid `position` in the gathered sequence. gather: None if only the pointer tells."""
    if gather is None:
        return token_of(order, head, length, position)
    if not gather:
        return position
    return simt.load_int(order.toint() + (head.to(Int64) * length.to(Int64) + position.to(Int64)) * 4)


class ImageV:
    """What `PrepareV` needs to know of the V^T image beside `layouts`. A lane has four tokens that share a word."""

    layout = layouts
    #: Columns of a tile of means: where the means are, and where they are once more.
    mean_columns = (0, layouts.MEAN_GROUP)
    #: Largest value of the image.
    top = 448.0
    #: The four tokens of a lane, of its quad's 16: the lane's number times `step` plus these.
    step, extra = 2, (0, 1, 8, 9)

    def unit(self, unit):
        """(V^T row, its group of 16 tokens XORed with row % 8) of the `unit`-th 16 bytes of the image."""
        return unit // 8, unit % 8

    def group(self, row, chunk):
        """The 16 tokens (0..7) of chunk `chunk` of row `row`."""
        return chunk ^ row

    def chunk_offset(self, row, chunk):
        """Byte in the image of that chunk."""
        return row * 128 + chunk * 16


class PanelImageV(ImageV):
    """The same of `layouts_mma8`."""

    layout = layouts_mma8
    mean_columns = (0,)
    top = layouts_mma8.VALUE_TOP["f32"]
    step, extra = 4, (0, 1, 2, 3)

    def unit(self, unit):
        panel, row = unit // 32, unit % 32 // 4
        return panel // 2 * 8 + row, (panel % 2 * 4 + unit % 4) ^ row

    def group(self, row, chunk):
        return chunk

    def chunk_offset(self, row, chunk):
        return layouts_mma8.v_offset(row, chunk * 16)


class StatsV:
    """Kernel `v_stats`: grid (BH, ceil(L / 128)), block 256, SHARED bytes of shared memory.

    order: int32 [BH, L]. means: fp32 [BH, ceil(L / 128), 128] (written only with `demean`). amax: fp32 [BH, 128], zero
    on entry; a maximum of non-negative floats does not depend on the order of the atomic operations. gather: None if
    `order` may be null. rounded: amax is of V less the mean as bf16 (NVFP4's second level asks for that).
    """

    SHARED = 8 * 1024

    def __init__(self, fp16: bool, demean: bool, gather: bool | None, rounded: bool = False):
        self.fp16, self.demean, self.gather, self.rounded = fp16, demean, gather, rounded

    @cute.jit
    def __call__(
        self, v: cute.Pointer, order: cute.Pointer, means: cute.Pointer, amax: cute.Pointer, stride_b: Int64,
        stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32, grid_x: Int32, grid_y: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(v, order, means, amax, stride_b, stride_h, stride_l, heads, length).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=3, preferred_smem_carveout=50,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, v: cute.Pointer, order: cute.Pointer, means: cute.Pointer, amax: cute.Pointer, stride_b: Int64,
        stride_h: Int64, stride_l: Int64, heads: Int32, length: Int32,
    ):  # fmt: skip
        head, block, _ = cute.arch.block_idx()
        _, blocks, _ = cute.arch.grid_dim()
        shared = simt.shared_memory(self.SHARED)
        rows = simt.Rows(v, head, heads, stride_b, stride_h, stride_l)
        self.body(rows, order, means, amax, length, head, block, blocks, shared)

    def body(self, rows, order, means, amax, length, head, block, blocks, shared):
        thread, warp, lane = simt.thread_position()
        first = block * layouts.BLOCK
        tokens, weight = [], []
        for n in range(FLIGHT):
            position = first + thread // 16 + 16 * n
            inside = simt.less(position, length)
            # Past the end the block's first token stands in: harmless for the extremes, weight 0 in the sum.
            tokens.append(token_at(order, head, length, simt.select(inside, position, first), self.gather))
            weight.append(inside.to(Float32))
        words = [simt.load16(rows.address(token, (lane % 16) * 16)) for token in tokens]
        high = [words[0][n] for n in range(4)]
        low = [words[0][n] for n in range(4)]
        for row in words[1:]:
            high = [max2(a, b, self.fp16) for a, b in zip(high, row, strict=True)]
            low = [max2(a, b, self.fp16, False) for a, b in zip(low, row, strict=True)]
        high = [max2(a, simt.shuffle_xor(a, 16), self.fp16) for a in high]
        low = [max2(a, simt.shuffle_xor(a, 16), self.fp16, False) for a in low]
        slot = shared + warp * 1024 + (lane % 16) * 16  # lanes 16..31 write the same values again
        simt.shared_store16(slot, high)
        simt.shared_store16(slot + 256, low)
        if self.demean:
            total = [Float32(0.0)] * 8
            for row, w in zip(words, weight, strict=True):
                values = [v for word in row for v in simt.unpack2(word, self.fp16)]
                total = [t + v * w for t, v in zip(total, values, strict=True)]
            total = [t + simt.shuffle_xor(t, 16) for t in total]
            slot = shared + warp * 1024 + 512 + (lane % 16) * 32
            simt.shared_store16(slot, total[:4])
            simt.shared_store16(slot + 16, total[4:])
        cute.arch.sync_threads()
        channel = thread % 128
        at = shared + (channel // 2) * 4
        high = simt.shared_load(at, Uint32)
        low = simt.shared_load(at + 256, Uint32)
        for n in range(1, simt.WARPS):
            high = max2(high, simt.shared_load(at + n * 1024, Uint32), self.fp16)
            low = max2(low, simt.shared_load(at + n * 1024 + 256, Uint32), self.fp16, False)
        high, low = (simt.select(channel & 1, *reversed(simt.unpack2(word, self.fp16))) for word in (high, low))
        mean = Float32(0.0)
        mine = simt.less(thread, 128)
        if self.demean:
            at = shared + 512 + channel * 4
            total = simt.shared_load(at)
            for n in range(1, simt.WARPS):
                total = total + simt.shared_load(at + n * 1024)
            mean = simt.divide(total, simt.smaller(length - first, Int32(layouts.BLOCK)).to(Float32))
            out = means.toint() + (head * blocks + block).to(Int64) * 512
            simt.store_float(out + (channel * 4).to(Int64), mean, mine)
        if self.rounded:
            mean = simt.unpack2(simt.bf16x2(mean, Float32(0.0)), False)[0]
        largest = simt.max_abs(simt.max_abs(Float32(0.0), high - mean), low - mean)
        bits = simt.ptx("mov.b32 {$w0}, {$r0};", Uint32, [largest])
        simt.effect(
            "{.reg .pred p; setp.ne.s32 p, {$r2}, 0; @p red.global.max.u32 [{$r0}], {$r1};}",
            [amax.toint() + head.to(Int64) * 512 + (channel * 4).to(Int64), bits, mine],
        )


class PrepareV:
    """Kernel `v`: grid (BH, nb), block 256, SHARED bytes of shared memory.

    order, means, amax: as `v_stats` has them. image, v_scale (sv), v_means (mu): see the layout module; `v_means` is
    written only with `demean`.
    """

    SHARED = 128 * 128 + 2 * 512

    def __init__(self, fp16: bool, demean: bool, gather: bool, image: ImageV | None = None):
        self.fp16, self.demean, self.gather = fp16, demean, gather
        self.image = image or ImageV()

    @cute.jit
    def __call__(
        self, v: cute.Pointer, order: cute.Pointer, means: cute.Pointer, amax: cute.Pointer, v_image: cute.Pointer,
        v_scale: cute.Pointer, v_means: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32,
        length: Int32, grid_x: Int32, grid_y: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(
            v, order, means, amax, v_image, v_scale, v_means, stride_b, stride_h, stride_l, heads, length
        ).launch(
            grid=(grid_x, grid_y, 1), block=(simt.THREADS, 1, 1), min_blocks_per_mp=3, preferred_smem_carveout=50,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, v: cute.Pointer, order: cute.Pointer, means: cute.Pointer, amax: cute.Pointer, v_image: cute.Pointer,
        v_scale: cute.Pointer, v_means: cute.Pointer, stride_b: Int64, stride_h: Int64, stride_l: Int64, heads: Int32,
        length: Int32,
    ):  # fmt: skip
        head, block, _ = cute.arch.block_idx()
        _, blocks, _ = cute.arch.grid_dim()
        shared = simt.shared_memory(self.SHARED)
        rows = simt.Rows(v, head, heads, stride_b, stride_h, stride_l)
        thread, warp, lane = simt.thread_position()
        words, valid = self.load(rows, order, length, head, block, warp, lane)
        self.scales(means, amax, v_scale, v_means, length, head, block, blocks, thread, shared + 128 * 128)
        cute.arch.sync_threads()
        self.quantise(words, valid, warp, lane, shared)
        cute.arch.sync_threads()
        base = v_image.toint() + (head * blocks + block).to(Int64) * (layouts.V_ROWS * layouts.BLOCK)
        self.write(base, thread, shared)
        self.row_sums(base, length, block, thread)

    def place(self, warp, lane, n):
        """(16-token group, first token of the lane's four, 64-channel half) of load group n (0, 1)."""
        return warp // 2 + 4 * n, (lane % 4) * self.image.step, warp % 2

    def load(self, rows, order, length, head, block, warp, lane):
        """The lane's 8 channels of four tokens of two groups, one word of the image each."""
        tokens, valid = [], []
        for n in range(2):
            group, first, _ = self.place(warp, lane, n)
            for extra in self.image.extra:
                position = block * layouts.BLOCK + group * 16 + first + extra
                inside = simt.less(position, length)
                tokens.append(token_at(order, head, length, simt.smaller(position, length - 1), self.gather))
                valid.append(inside)
        byte = (warp % 2) * 128 + (lane // 4) * 16
        return [simt.load16(rows.address(token, byte), ok) for token, ok in zip(tokens, valid, strict=True)], valid

    def scales(self, means, amax, v_scale, v_means, length, head, block, blocks, thread, table):
        """1 / sv and the restored mean of this block's channels into shared memory; sv and mu to their images."""
        layout, width = self.image.layout, len(self.image.mean_columns) * layouts.MEAN_GROUP
        channel = thread % 128
        mine = simt.less(thread, 128)
        byte = (channel * 4).to(Int64)
        largest = simt.load_float(amax.toint() + head.to(Int64) * 512 + byte)
        scale = simt.divide(largest, Float32(self.image.top))
        usable = simt.ptx(
            "{.reg .pred p; setp.gt.f32 p, {$r0}, {$r1}; selp.s32 {$w0}, 1, 0, p;}", Int32, [scale, Float32(TINY)]
        )
        scale = simt.select(usable, scale, Float32(1.0))
        simt.shared_store(table + channel * 4, simt.divide(Float32(1.0), scale))
        out = v_scale.toint() + head.to(Int64) * 512 + byte
        simt.store_float(out, scale, mine & (1 - simt.less(0, block)))
        if not self.demean:
            return
        valid_blocks = (length + layout.BLOCK - 1) // layout.BLOCK
        exists = simt.less(block, valid_blocks)
        at = (head * valid_blocks + simt.smaller(block, valid_blocks - 1)).to(Int64) * 512 + byte
        mean = simt.select(exists, simt.divide(simt.load_float(means.toint() + at), scale), Float32(0.0))
        word = simt.bf16x2(mean, Float32(0.0))
        # Against the mean as attention restores it: its rounding then costs nothing, the residual carries it.
        simt.shared_store(table + 512 + channel * 4, simt.unpack2(word, False)[0] * scale)
        # Tiles of means hold whole groups of 8 blocks: the last block also clears the blocks that do not exist.
        groups = (blocks + layout.MEAN_GROUP - 1) // layout.MEAN_GROUP
        for n in range(1 + missing_blocks(layout)):
            target = block + n
            wanted = mine
            if n:
                wanted = wanted & (1 - simt.less(block, blocks - 1)) & simt.less(target, groups * layout.MEAN_GROUP)
                word = Uint32(0)
            column = target % layout.MEAN_GROUP
            tile = (head * groups + target // layout.MEAN_GROUP).to(Int64) * (128 * width * 2)
            base = v_means.toint() + tile
            for first in self.image.mean_columns:
                offset = layout.mu_offset(channel, column + first if first else column) * 2
                simt.store_half(base + offset.to(Int64), word, wanted)

    def quantise(self, words, valid, warp, lane, shared):
        """E4M3 of the residuals into shared memory, V^T rows of 128 tokens.

        A group of a row is at chunk group ^ row % 8 (as in the image of `layouts`), XORed with row / 8 % 8 on top: the
        eight rows that a warp writes at once then fall into different banks.
        """
        part = lane // 4
        table = shared + 128 * 128 + (warp % 2) * 256 + part * 32
        inverse = [v for n in range(2) for v in simt.shared_load16(table + 16 * n, Float32)]
        mean = [Float32(0.0)] * 8
        if self.demean:
            mean = [v for n in range(2) for v in simt.shared_load16(table + 512 + 16 * n, Float32)]
        for n in range(2):
            group, _, half = self.place(warp, lane, n)
            mask = Uint32(0)
            for m in range(4):
                ones = Uint32(0xFF << (8 * m))
                mask = mask | simt.select(valid[4 * n + m], ones, Uint32(0))
            four = [[v for w in words[4 * n + m] for v in simt.unpack2(w, self.fp16)] for m in range(4)]
            for e in range(8):
                x = [(four[m][e] - mean[e]) * inverse[e] for m in range(4)]
                row = half * 64 + part * 8 + e
                at = shared + row * 128 + ((group ^ part ^ e) << 4) + (lane % 4) * 4
                simt.shared_store(at, simt.e4m3x4(x) & mask)

    def write(self, base, thread, shared):
        """The 128 channel rows from shared memory to the image, 16 bytes a thread and step."""
        for n in range(128 * 128 // (16 * simt.THREADS)):
            unit = thread + n * simt.THREADS
            row, place = self.image.unit(unit)
            words = simt.shared_load16(shared + row * 128 + ((place ^ ((row // 8) % 8)) << 4))
            simt.store16(base + (unit * 16).to(Int64), words)

    def row_sums(self, base, length, block, thread):
        """Rows 128..135: 1.0 at the valid tokens of the block's own row, 0 elsewhere."""
        row, chunk = (thread // 8) % 8, thread % 8
        group = self.image.group(row, chunk)
        own = 1 - ((row ^ (block % layouts.MEAN_GROUP)) + 7) // 8
        words = []
        for a in range(4):
            word = Uint32(0)
            for n, extra in enumerate(self.image.extra):
                token = block * layouts.BLOCK + group * 16 + self.image.step * a + extra
                one = Uint32(layouts.E4M3_ONE << (8 * n))
                word = word | simt.select(own & simt.less(token, length), one, Uint32(0))
            words.append(word)
        at = base + self.image.chunk_offset(layouts.HEAD_DIM + row, chunk).to(Int64)
        simt.store16_if(at, words, simt.less(thread, 64))


def _gmem(kind):
    return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=16)


def build_stats(options="", fp16=False, demean=True, gather=True, rounded=False):
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    return cute.compile(
        StatsV(fp16, demean, gather, rounded), _gmem(kind), _gmem(Int32), _gmem(Float32), _gmem(Float32), Int64(1),
        Int64(1), Int64(1), Int32(1), Int32(1), Int32(1), Int32(1), cuda.CUstream(0), options=options,
    )  # fmt: skip


def build(options="", fp16=False, demean=True, gather=True, image=None):
    kind = cutlass.Float16 if fp16 else cutlass.BFloat16
    return cute.compile(
        PrepareV(fp16, demean, gather, image), _gmem(kind), _gmem(Int32), _gmem(Float32), _gmem(Float32),
        _gmem(cutlass.Float8E4M3FN), _gmem(Float32), _gmem(cutlass.BFloat16), Int64(1), Int64(1), Int64(1), Int32(1),
        Int32(1), Int32(1), Int32(1), cuda.CUstream(0), options=options,
    )  # fmt: skip
