"""Small tcgen05 kernels for tests: four warps share the lanes of tensor memory, an elected lane of warp 0 issues MMAs.

%r500 is the start of shared memory, %r505 the warp, %p1 whether it is not the first, %r506 the allocation of tensor
memory, %r507 the warp's own lanes of it. Two mbarriers and the allocation's address lie behind the image.
"""

from __future__ import annotations

import numpy as np

from .machine import SHARED_BASE
from .snippets import run

SHARED = ".extern .shared .align 1024 .b8 dyn[];"

SETUP = """
mov.b32 %r500, dyn; mov.b32 %r501, tid;
FILL: shl.b32 %r502, %r501, 2; cvt.u64.u32 %d0, %r502; add.s64 %d0, %d0, image; ld.global.b32 %r503, [%d0];
add.s32 %r504, %r500, %r502; st.shared.b32 [%r504], %r503; add.s32 %r501, %r501, 128; setp.lt.u32 %p0, %r501, @words;
@%p0 bra FILL; fence.proxy.async.shared::cta;
shr.u32 %r505, tid, 5; setp.ne.b32 %p1, %r505, 0; setp.ne.b32 %p0, tid, 0; @%p0 bra READY;
mbarrier.init.shared.b64 [%r500+@bar0], 1; mbarrier.init.shared.b64 [%r500+@bar1], 4;
fence.mbarrier_init.release.cluster;
READY: @%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r500+@holder], 512;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED: bar.sync 0; ld.shared.b32 %r506, [%r500+@holder];
shl.b32 %r507, %r505, 21; add.s32 %r507, %r507, %r506;
"""
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r500+@bar0];"
FREE = "bar.sync 0; @%p1 bra DONE; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r506, 512; DONE:"


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"


def wait(barrier: str, parity: int) -> str:
    return f"{{ W: mbarrier.try_wait.parity.shared.b64 %p5, [%r500+@{barrier}], {parity}; @%p5 bra O; bra W; O: }}"


def issue(statements: str, name: str = "ISSUED", commit: str = COMMIT) -> str:
    """By an elected lane of warp 0, after the fence."""
    elected = f"@%p1 bra {name}; tcgen05.fence::after_thread_sync; elect.sync %r508|%p2, -1; @!%p2 bra {name};"
    return f"{elected} {statements} {commit} {name}:"


def mma(kind: str, a: int | str, b: int, idesc: int, accumulate: int, d: int = 0) -> str:
    """One MMA. a, b: descriptors; A from tensor memory as text. d: column of D in the allocation."""
    left = a if isinstance(a, str) else "%d1"
    load = "" if isinstance(a, str) else f"mov.b64 %d1, {a};"
    return (
        f"{load} mov.b64 %d2, {b}; mov.b32 %r509, {idesc}; mov.b32 %r510, {accumulate}; setp.ne.b32 %p3, %r510, 0;"
        f"tcgen05.mma.cta_group::1.kind::{kind} [%r506+{d}], {left}, %d2, %r509, %p3;"
    )


def read(count: int, column: int = 0) -> str:
    """Columns of the warp's lanes to %r0 ..., and from there to `out`."""
    return (
        f"tcgen05.fence::after_thread_sync; tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {registers(0, count)},"
        f"[%r507+{column}]; tcgen05.wait::ld.sync.aligned; tcgen05.fence::before_thread_sync;" + to_global(count)
    )


def to_global(count: int) -> str:
    """%r0 ... to row `tid` of `out`, uint32 [128, count]."""
    row = f"mul.wide.u32 %d9, tid, {4 * count}; add.s64 %d9, %d9, out;"
    return row + "".join(f"st.global.b32 [%d9+{4 * n}], %r{n};" for n in range(count))


def store(count: int, column: int, row: int = 0, at: int = 0) -> str:
    """Words at ... of row `tid` of `a`, uint32 [128, row or count], to columns of the warp's lanes, for all to use."""
    address = f"mul.wide.u32 %d9, tid, {4 * (row or count)}; add.s64 %d9, %d9, a;"
    loads = "".join(f"ld.global.b32 %r{n}, [%d9+{4 * (at + n)}];" for n in range(count))
    return (
        f"{address} {loads} tcgen05.st.sync.aligned.32x32b.x{count}.b32 [%r507+{column}], {registers(0, count)};"
        "tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;"
    )


def execute(body: str, image: np.ndarray, columns: int, a: np.ndarray | None = None, **options) -> np.ndarray:
    """What `body` leaves in `out`, uint32 [128, columns]. image: bytes of shared memory. a: the array of `store`."""
    out = np.zeros((128, columns), np.uint32)
    offsets = {"bar0": image.size, "bar1": image.size + 8, "holder": image.size + 16, "words": image.size // 4}
    for name, value in offsets.items():
        body = body.replace("@" + name, str(value))
    arrays = {"image": image.view(np.uint32), "out": out}
    if a is not None:
        arrays["a"] = a
    run(body, arrays, block=128, shared=SHARED, shared_bytes=image.size + 64, target="sm_100a", **options)
    return out


#: Fields of an instruction descriptor: name -> (first bit, bits), from table 42 of PTX ISA 9.0.
FIELDS = {
    "sparsity selector": (0, 2), "sparsity": (2, 1), "saturate": (3, 1), "D": (4, 2), "reserved 6": (6, 1),
    "A": (7, 3), "B": (10, 3), "negate A": (13, 1), "negate B": (14, 1), "transpose A": (15, 1), "transpose B": (16, 1),
    "N": (17, 6), "reserved 23": (23, 1), "M": (24, 5), "reserved 29": (29, 1), "shift": (30, 2),
}  # fmt: skip
#: Kind and element -> codes of the types of D and of both operands, from the same table.
CODES = {("f8f6f4", "e4m3"): (1, 0), ("f16", "f16"): (1, 0), ("f16", "bf16"): (1, 1), ("i8", "s8"): (2, 1)}


def idesc(kind: str, element: str, columns: int, **changes: int) -> int:
    """Instruction descriptor of an MMA of 128 rows, with `changes` of fields."""
    d, code = CODES[kind, element]
    fields = {"D": d, "A": code, "B": code, "N": columns // 8, "M": 8, **changes}
    assert all(value < 1 << FIELDS[name][1] for name, value in fields.items())
    return sum(value << FIELDS[name][0] for name, value in fields.items())


#: Bytes of a swizzled row -> the shared memory descriptor but for its offsets and start.
_SWIZZLES = {128: 2 << 61, 64: 4 << 61, 32: 6 << 61, 16: 0}


def descriptor(width: int, start: int, rows: int, step: int) -> int:
    """Of K step `step` (32 bytes) of an operand at byte `start` of the image, in CuTe's layouts (`cute_layouts.place`).

    width: bytes of a swizzled row; 16 is the layout without swizzle.
    """
    if width == 16:
        start, leading, stride = start + step * 2 * rows * 16, rows * 16, 128
    else:
        start += step * 32 % width + step * 32 // width * rows * width
        leading, stride = 16, 8 * width
    return (start + SHARED_BASE) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | _SWIZZLES[width]
