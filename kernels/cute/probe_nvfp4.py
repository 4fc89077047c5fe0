"""The instructions that only sm_120 has, one at a time on given registers: is this card's silicon what PTX says?

The attention kernels assume where a block-scaled MMA takes codes and scales from, and how the casts to E2M1 round. This
kernel issues the same inline PTX as they do, with operands that the host chose (`launch.probe`), and stores what came
out. A wrong assumption then shows as one wrong element, not as an attention that is off by some percent.
"""

from __future__ import annotations

from functools import partial

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr

from . import emulated_sm120, ptx_sm120, simt
from .buildable import Buildable
from .ptx import as_float

#: Kernel parameters in order, with their element types.
POINTERS = (("operands", Uint32), ("numbers", Float32), ("products", Float32), ("codes", Uint32), ("values", Float32))


def _store_floats(address, values):
    """Float32, four times as many as there are stores, to a global `address` that is a multiple of 16."""
    for i in range(0, len(values), 4):
        simt.effect("st.global.v4.f32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", [address + 4 * i, *values[i : i + 4]])


class ProbeNvfp4:
    """Kernel `probe_nvfp4`: grid (n), block 32, one MMA and one lane's casts for each of the n warps.

    operands: uint32 [n, 32, 12], for each lane four registers of A, two of B, the scale words of A and B, and C as the
    bits of four fp32 -> products: fp32 [n, 32, 4], the lane's accumulators.
    numbers: fp32 [n, 32, 8] -> codes: uint32 [n, 32, 2], the eight as E2M1 and the first four as E4M3; values: fp32
    [n, 32, 12], what these eight codes and four bytes stand for.
    """

    def __init__(self, emulated: bool):
        #: Where the instructions come from that only sm_120 has.
        self.native = emulated_sm120 if emulated else ptx_sm120

    @cute.jit
    def __call__(
        self, operands: cute.Pointer, numbers: cute.Pointer, products: cute.Pointer, codes: cute.Pointer,
        values: cute.Pointer, grid_x: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        self.kernel(operands, numbers, products, codes, values).launch(
            grid=(grid_x, 1, 1), block=(32, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, operands: cute.Pointer, numbers: cute.Pointer, products: cute.Pointer, codes: cute.Pointer,
        values: cute.Pointer,
    ):  # fmt: skip
        warp, _, _ = cute.arch.block_idx()
        lane, _, _ = cute.arch.thread_idx()
        at = (warp * 32 + lane).to(Int64)
        words = [word for i in range(3) for word in simt.load16(operands.toint() + at * 48 + 16 * i)]
        a, b, a_scales, b_scales, c = words[:4], words[4:6], words[6], words[7], [as_float(x) for x in words[8:]]
        _store_floats(products.toint() + at * 16, self.native.mma_nvfp4(a, a_scales, b, b_scales, c))

        x = simt.load_floats(numbers.toint() + at * 32, 8)
        word = self.native.pack_signed_e2m1(x)
        scales, rounded = ptx_sm120.round_e4m3(x[:4])
        simt.store8(codes.toint() + at * 8, [word, scales])
        _store_floats(values.toint() + at * 48, [*self.native.unpack_e2m1(word), *rounded])


def _compile(emulated, options):
    pointers = [make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=16) for _, kind in POINTERS]
    return cute.compile(ProbeNvfp4(emulated), *pointers, Int32(1), cuda.CUstream(0), options=options)


def buildables(emulated=False):
    """The probe. emulated: for a card without these instructions, to test what is around it."""
    arguments = tuple(name for name, _ in POINTERS)
    return [Buildable("probe_nvfp4", partial(_compile, emulated), 0, "products, 1, 1", arguments)]
