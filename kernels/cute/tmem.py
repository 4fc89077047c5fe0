"""Tensor memory and the fifth-generation tensor core: loads, stores, MMAs and their descriptors.

Tensor memory is 128 lanes (rows of a tile) x 512 columns of 32 bits; an address is lane << 16 | column. Warp w of a
warpgroup reaches lanes 32 w .. 32 w + 31. Fields and formats: PTX ISA, "Tensor Memory", "Matrix descriptor" and
"Instruction descriptor" (tcgen05).
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import nvvm

#: All of tensor memory: one CTA an SM.
COLUMNS = 512
LANES = 128

#: Formats of A and B in an instruction descriptor, by MMA kind, and the format of D.
_FORMATS = {"f8f6f4": (0, 0, 1), "i8": (1, 1, 2), "f16": (1, 1, 1)}
#: Bytes along K of one MMA, in a row of an operand, for every kind.
K_BYTES = 32
#: Swizzle -> its code in a shared-memory descriptor, and bytes of a row.
_SWIZZLES = {128: (2, 128), 32: (6, 32)}


def instruction(kind, columns):
    """Instruction descriptor of a dense MMA of 128 rows and `columns` columns, both operands K-major.

    kind "f8f6f4": E4M3 x E4M3 -> fp32; "i8": int8 x int8 -> s32; "f16": bf16 x bf16 -> fp32.
    """
    a, b, d = _FORMATS[kind]
    return d << 4 | a << 7 | b << 10 | columns // 8 << 17 | LANES // 16 << 24


def shared_operand(pointer, swizzle):
    """Shared-memory descriptor of a K-major tile at `pointer` whose rows are `swizzle` bytes (128 or 32).

    Groups of 8 rows lie one after the other: that is the stride; a tile is one swizzle atom wide, so there is no
    leading offset. The next 32 bytes along K are `descriptor + 2`.
    """
    code, row = _SWIZZLES[swizzle]
    constant = code << 61 | 1 << 46 | 8 * row // 16 << 32 | 1 << 16
    if constant >= 1 << 63:
        constant -= 1 << 64
    start = (pointer.toint() & 0x3FFFF) >> 4
    return start.to(Int64) | Int64(constant)


def mma(kind, target, a, b, descriptor, accumulate, a_in_tmem=False):
    """Queue D = A B^T (+ D if `accumulate`, Int32). One thread. A: descriptor, or an address with `a_in_tmem`."""
    first = "[{$r1}]" if a_in_tmem else "{$r1}"
    cute.arch.inline_ptx(
        "{\n.reg .pred p;\nsetp.ne.b32 p, {$r4}, 0;\n"
        f"tcgen05.mma.cta_group::1.kind::{kind} [{{$r0}}], {first}, {{$r2}}, {{$r3}}, p;\n}}",
        read_only_args=[target, a, b, Int32(descriptor), accumulate],
    )


def load(address, count, dtype=Float32):
    """`count` columns from `address` of this warp's lanes, one lane a thread; `wait_load` before using them."""
    names = ",".join(f"{{$w{i}}}" for i in range(count))
    code = f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{names}}}, [{{$r0}}];"
    found = cute.arch.inline_ptx(code, write_only_types=[dtype] * count, read_only_args=[address])
    return list(found) if count > 1 else [found]


def store(address, words):
    """Write registers to as many columns from `address`; `wait_store` before telling others."""
    names = ",".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    code = f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [{{$r0}}], {{{names}}};"
    cute.arch.inline_ptx(code, read_only_args=[address, *words])


def wait_load():
    """The registers of this thread's loads are there."""
    cute.arch.fence_view_async_tmem_load()


def wait_store():
    """This thread's stores are done."""
    cute.arch.fence_view_async_tmem_store()


def before_sync():
    """Orders tensor-memory accesses before the arrival that follows."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def after_sync():
    """Orders tensor-memory accesses after the wait that precedes."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
