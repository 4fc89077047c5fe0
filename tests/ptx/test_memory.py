"""What silicon would do silently: bounds, alignment, unwritten bytes, races; atomics and cp.async."""

from __future__ import annotations

import numpy as np
import pytest
from ptx.parser import PtxError
from ptx.snippets import run

SHARED = ".extern .shared .align 128 .b8 dyn[];"
AT = "mov.b32 %r0, dyn; shl.b32 %r1, tid, 2; add.s32 %r0, %r0, %r1;"
OUT = "mul.wide.u32 %d0, tid, 4; add.s64 %d0, %d0, out;"


def shared(body: str, block: int = 64, size: int = 1024, count: int | None = None, **options) -> np.ndarray:
    """Run `body` with %r0 the address of this thread's word, and %d0 that of its result; returns the results."""
    out = np.zeros(count or block, np.uint32)
    run(AT + OUT + body, {"out": out}, block=block, shared=SHARED, shared_bytes=size, **options)
    return out


GLOBAL_FAULTS = {
    "ld.global.b32 %r1, [data+128];": "out of bounds",
    "add.s64 %d1, data, -4; ld.global.b32 %r1, [%d1];": "out of bounds",
    "ld.global.b32 %r1, [data+2];": "misaligned 4-byte global access",
    "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [data+8];": "misaligned 16-byte global access",
    "ld.global.b32 %r1, [out];": "nobody has written: out, byte 0",
    "st.global.b32 [out], tid;": "two lanes store different values",
    "mov.b64 %d1, 0; ld.global.b32 %r1, [%d1];": "out of bounds",
}


@pytest.mark.parametrize("statement", GLOBAL_FAULTS)
def test_global_faults(statement):
    with pytest.raises(PtxError, match=GLOBAL_FAULTS[statement]):
        run(statement, {"data": np.zeros(32, np.uint32), "out": np.zeros(32, np.uint32)})


SHARED_FAULTS = {
    "ld.shared.b32 %r1, [%r0];": "shared memory that nobody has written, at 0x400",
    "st.shared.b32 [%r0+2], tid;": "misaligned 4-byte shared access at 0x402",
    "st.shared.b32 [%r0+1024], tid;": "shared access out of bounds",
    "st.shared.b32 [%r0+-4], tid;": "shared access out of bounds",
    "mov.b32 %r2, dyn; st.shared.b32 [%r2], tid;": "different values to the same shared address",
    "st.shared.b32 [%r0], tid; xor.b32 %r0, %r0, 128; ld.shared.b32 %r1, [%r0];": "DATA RACE: read",
    "st.shared.b32 [%r0], tid; xor.b32 %r0, %r0, 128; st.shared.b32 [%r0], tid;": "DATA RACE: write",
    "st.shared.b32 [%r0], tid; bar.sync 0; xor.b32 %r0, %r0, 128; ld.shared.b32 %r1, [%r0]; xor.b32 %r0, %r0, 128;"
    "st.shared.b32 [%r0], 1;": "DATA RACE",
}


@pytest.mark.parametrize("schedule", ["orderly", "random"])
@pytest.mark.parametrize("statement", SHARED_FAULTS)
def test_shared_faults(statement, schedule):
    """Two warps exchange words; each fault is found whatever the order in which they ran."""
    message = SHARED_FAULTS[statement]
    if "RACE" in message:
        message += "|nobody has written"
    with pytest.raises(PtxError, match=message) as error:
        shared(statement, schedule=schedule)
    assert "PTX line" in str(error.value)
    assert "warp" in str(error.value)


@pytest.mark.parametrize("schedule", ["orderly", "eager", "random"])
def test_a_barrier_orders(schedule):
    body = """
    st.shared.b32 [%r0], tid; bar.sync 0; xor.b32 %r2, %r0, 128; ld.shared.b32 %r1, [%r2]; bar.sync 0;
    st.shared.b32 [%r0], 5; ld.shared.b32 %r3, [%r0]; mad.lo.s32 %r1, %r3, 1000, %r1; st.global.b32 [%d0], %r1;
    """
    assert np.array_equal(shared(body, schedule=schedule, seed=4), 5000 + (np.arange(64) ^ 32))


def test_races_can_be_let_through():
    body = "st.shared.b32 [%r0], tid; xor.b32 %r0, %r0, 128; st.shared.b32 [%r0], tid; st.global.b32 [%d0], tid;"
    assert np.array_equal(shared(body, races=False), np.arange(64))


def test_the_same_value_is_no_race():
    body = "mov.b32 %r2, dyn; st.shared.b32 [%r2], 3; bar.sync 0; ld.shared.b32 %r1, [%r2]; st.global.b32 [%d0], %r1;"
    assert (shared(body) == 3).all()


def test_bytes_and_halves_are_told_apart():
    """Warps write neighbouring bytes of one word: no race, as the detector then looks at bytes."""
    body = """
    mov.b32 %r2, dyn; shr.u32 %r3, tid, 5; and.b32 %r4, tid, 31; shl.b32 %r4, %r4, 1; add.s32 %r2, %r2, %r4;
    add.s32 %r2, %r2, %r3; st.shared.u8 [%r2], tid; bar.sync 0;
    mov.b32 %r2, dyn; add.s32 %r2, %r2, %r4; ld.shared.u16 %h0, [%r2]; cvt.u32.u16 %r1, %h0; st.global.b32 [%d0], %r1;
    """
    lane = np.arange(64) % 32
    assert np.array_equal(shared(body), lane + 256 * (lane + 32))


def test_signs_and_widths_of_loads():
    body = """
    st.shared.b32 [%r0], 0xfffe80; ld.shared.s8 %r1, [%r0]; ld.shared.u8 %r2, [%r0]; ld.shared.s16 %r3, [%r0];
    add.s32 %r1, %r1, %r2; add.s32 %r1, %r1, %r3; st.global.b32 [%d0], %r1;
    """
    assert (shared(body).view(np.int32) == -128 + 128 - 384).all()


def test_reductions():
    """Atomic between warps and blocks; ordered against plain accesses by barriers only."""
    body = """
    setp.eq.b32 %p0, tid, 0; mov.b32 %r2, dyn; @%p0 st.shared.b32 [%r2], 0; bar.sync 0;
    red.shared.add.u32 [%r2], tid; {sync} ld.shared.b32 %r1, [%r2]; st.global.b32 [%d0], %r1;
    """
    assert (shared(body.replace("{sync}", "bar.sync 0;")) == 64 * 63 // 2).all()
    with pytest.raises(PtxError, match="DATA RACE"):
        shared(body.replace("{sync}", ""))
    body = body.replace("{sync}", "bar.sync 0;")
    with pytest.raises(PtxError, match="DATA RACE"):
        shared(body.replace("@%p0 st.shared.b32 [%r2], 0; bar.sync 0;", "@%p0 st.shared.b32 [%r2], 0;"))
    peak = np.zeros(1, np.uint32)
    run(
        "mov.u32 %r1, %ctaid.x; mad.lo.s32 %r1, %r1, 100, tid; red.global.max.u32 [peak], %r1;",
        {"peak": peak},
        grid=(3,),
    )
    assert peak[0] == 231


def test_blocks_do_not_see_each_other():
    """Blocks of a launch are not ordered: what one writes another may neither read nor write."""
    write = "mov.u32 %r1, %ctaid.x; setp.eq.b32 %p0, tid, 0; @%p0 st.global.b32 [data], %r1;"
    with pytest.raises(PtxError, match="DATA RACE: write of data"):
        run(write, {"data": np.full(1, 9, np.uint32)}, grid=(2,))
    read = "setp.eq.b32 %p1, %r1, 1; @%p1 ld.global.b32 %r2, [data];"
    with pytest.raises(PtxError, match="DATA RACE: read of data"):
        run(write.replace("@%p0", "setp.lt.and.u32 %p0, %r1, 1, %p0; @%p0") + read, {"data": np.zeros(1, np.uint32)},
            grid=(2,))  # fmt: skip
    after = "ld.global.b32 %r2, [data];" + write.replace("@%p0", "setp.eq.and.b32 %p0, %r1, 1, %p0; @%p0")
    with pytest.raises(PtxError, match="DATA RACE: write to data"):
        run(after, {"data": np.zeros(1, np.uint32)}, grid=(2,))


ASYNC = """
mul.wide.u32 %d1, tid, 16; add.s64 %d1, %d1, data; mov.b32 %r2, dyn; shl.b32 %r3, tid, 4; add.s32 %r2, %r2, %r3;
cp.async.cg.shared.global [%r2], [%d1], 16{size}; cp.async.commit_group; {wait} {sync}
xor.b32 %r2, %r2, {other}; ld.shared.b32 %r1, [%r2+8]; st.global.b32 [%d0], %r1;
"""


def copied(schedule="orderly", wait="cp.async.wait_group 0;", sync="bar.sync 0;", other="512", size="") -> np.ndarray:
    data, out = np.arange(256, dtype=np.uint32), np.zeros(64, np.uint32)
    body = OUT + ASYNC.format(wait=wait, sync=sync, other=other, size=size)
    run(body, {"data": data, "out": out}, block=64, shared=SHARED, shared_bytes=1024, schedule=schedule)
    return out


@pytest.mark.parametrize("schedule", ["orderly", "eager", "random"])
def test_cp_async(schedule):
    thread = np.arange(64)
    assert np.array_equal(copied(schedule), (thread ^ 32) * 4 + 2)
    assert np.array_equal(copied(schedule, sync="", other="0"), thread * 4 + 2)
    assert (copied(schedule, size=", 8") == 0).all()
    with pytest.raises(PtxError, match="DATA RACE: read"):
        copied(schedule, wait="", other="0")
    with pytest.raises(PtxError, match=r"DATA RACE: read|nobody has written"):
        copied(schedule, sync="")
    with pytest.raises(PtxError, match="DATA RACE: read"):
        copied(schedule, wait="cp.async.wait_group 1;", sync="", other="0")
    with pytest.raises(PtxError, match="more than 16 bytes"):
        copied(schedule, size=", 17")


def test_a_forgotten_cp_async():
    with pytest.raises(PtxError, match=r"ends with a cp\.async"):
        run("mov.b32 %r2, dyn; setp.eq.b32 %p0, tid, 0; @%p0 cp.async.cg.shared.global [%r2], [data], 16;",
            {"data": np.zeros(4, np.uint32)}, shared=SHARED, shared_bytes=64)  # fmt: skip


def test_ldmatrix():
    data, out = np.arange(256, dtype=np.uint16), np.zeros(32, np.uint32)
    body = """
    mul.wide.u32 %d1, tid, 16; add.s64 %d1, %d1, data; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d1];
    mov.b32 %r5, dyn; shl.b32 %r6, tid, 4; add.s32 %r5, %r5, %r6; st.shared.v4.b32 [%r5], {%r1, %r2, %r3, %r4};
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
    st.global.b32 [%d0], %r{which};
    """
    matrices = data.reshape(4, 8, 8)
    for trans in ("", ".trans"):
        for which in range(4):
            text = OUT + body.replace("{trans}", trans).replace("{which}", str(which + 1))
            run(text, {"data": data, "out": out}, shared=SHARED, shared_bytes=512)
            matrix = matrices[which].T if trans else matrices[which]
            assert np.array_equal(out.view(np.uint16), matrix.reshape(-1))
