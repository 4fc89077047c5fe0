"""Lanes that part and meet, guards, registers that nobody has written, exchange between lanes, limits of a launch."""

from __future__ import annotations

import numpy as np
import pytest
from ptx.parser import PtxError
from ptx.run import Loaded
from ptx.snippets import kernel, run

STORE = "mul.wide.u32 %d0, tid, 4; add.s64 %d0, %d0, out; st.global.b32 [%d0], %r1;"
LANE = np.arange(32)


def lanes(body: str, block: int = 32, **options) -> np.ndarray:
    """%r1 of each thread after `body`."""
    out = np.zeros(block, np.uint32)
    run(body + STORE, {"out": out}, block=block, **options)
    return out


def test_lanes_part_and_meet():
    """An if with both sides, nested, and a loop whose count differs between lanes; then a shuffle of all."""
    body = """
    mov.b32 %r1, 0; and.b32 %r2, tid, 3; setp.eq.b32 %p0, %r2, 0; @%p0 bra ZERO;
    setp.eq.b32 %p1, %r2, 1; @%p1 bra ONE; add.s32 %r1, %r1, 100; bra DONE;
    ONE: add.s32 %r1, %r1, 10; bra DONE;
    ZERO: add.s32 %r1, %r1, 1;
    DONE: mov.b32 %r3, tid;
    LOOP: add.s32 %r1, %r1, 1000; sub.s32 %r3, %r3, 1; setp.ge.s32 %p2, %r3, 0; @%p2 bra LOOP;
    shfl.sync.idx.b32 %r1, %r1, tid, 31, -1;
    """
    expected = np.array([1, 10, 100, 100])[LANE % 4] + 1000 * (LANE + 1)
    for schedule in ("orderly", "eager", "random"):
        assert np.array_equal(lanes(body, schedule=schedule), expected)


def test_guards():
    body = "mov.b32 %r1, 7; setp.lt.u32 %p0, tid, 5; @%p0 mov.b32 %r1, 1; @!%p0 add.s32 %r1, %r1, tid;"
    assert np.array_equal(lanes(body), np.where(LANE < 5, 1, 7 + LANE))


def test_lanes_may_return_early():
    out = np.zeros(32, np.uint32)
    report = run("mov.b32 %r1, 9; setp.gt.u32 %p0, tid, 15; @%p0 bra END;" + STORE + "END:", {"out": out})
    assert np.array_equal(out, np.where(LANE < 16, 9, 0))
    assert report.unwritten == ["out"]


def test_unwritten_registers():
    with pytest.raises(PtxError, match=r"line \d+, warp 0 .*%r1, which nobody has written"):
        lanes("")
    some = "setp.lt.u32 %p0, tid, 16; @%p0 mov.b32 %r1, 1;"
    with pytest.raises(PtxError, match="%r1 in lanes that have not written it"):
        lanes(some)
    assert np.array_equal(lanes(some + "@!%p0 mov.b32 %r1, 2;"), np.where(LANE < 16, 1, 2))
    assert np.array_equal(lanes(some + "mov.b32 %r1, 3;"), np.full(32, 3))
    only_those = some + "@%p0 add.s32 %r1, %r1, 1; @!%p0 mov.b32 %r1, 0;"
    assert np.array_equal(lanes(only_those), np.where(LANE < 16, 2, 0))


def test_exchange():
    for statement, expected in {
        "shfl.sync.bfly.b32 %r1, tid, 5, 31, -1;": LANE ^ 5,
        "shfl.sync.idx.b32 %r1, tid, 3, 31, -1;": np.full(32, 3),
        "shfl.sync.up.b32 %r1, tid, 2, 0, -1;": np.where(LANE < 2, LANE, LANE - 2),
        "shfl.sync.down.b32 %r1, tid, 2, 31, -1;": np.where(LANE > 29, LANE, LANE + 2),
        # Segments of 8 lanes: mask 24 in bits 8..12.
        "shfl.sync.idx.b32 %r1, tid, 1, 6175, -1;": LANE // 8 * 8 + 1,
        "shfl.sync.up.b32 %r1, tid, 1, 6144, -1;": np.where(LANE % 8, LANE - 1, LANE),
        "shfl.sync.up.b32 %r2|%p1, tid, 1, 0, -1; selp.b32 %r1, 1, 0, %p1;": LANE > 0,
        "setp.lt.u32 %p0, tid, 3; vote.sync.ballot.b32 %r1, %p0, 0xffffffff;": np.full(32, 7),
        "setp.lt.u32 %p0, tid, 3; vote.sync.any.pred %p1, %p0, -1; selp.b32 %r1, 1, 0, %p1;": np.full(32, 1),
        "setp.gt.u32 %p0, tid, 31; vote.sync.any.pred %p1, %p0, -1; selp.b32 %r1, 1, 0, %p1;": np.full(32, 0),
        "setp.lt.u32 %p0, tid, 31; vote.sync.all.pred %p1, %p0, -1; selp.b32 %r1, 1, 0, %p1;": np.full(32, 0),
        "setp.lt.u32 %p0, tid, 32; vote.sync.all.pred %p1, %p0, -1; selp.b32 %r1, 1, 0, %p1;": np.full(32, 1),
        "and.b32 %r2, tid, 15; match.any.sync.b32 %r1, %r2, 0xffffffff;": 0x10001 << LANE % 16,
        "sub.s32 %r2, tid, 9; redux.sync.max.s32 %r1, %r2, 0xffffffff;": np.full(32, 22),
        "elect.sync %r2|%p0, -1; selp.b32 %r1, 1, 0, %p0;": LANE == 0,
    }.items():
        assert np.array_equal(lanes(statement), expected), statement


def test_exchange_needs_the_whole_warp():
    for statement in (
        "shfl.sync.idx.b32 %r1, tid, 0, 31, -1;",
        "elect.sync %r1|%p1, -1;",
        "bar.warp.sync -1;",
        "bar.sync 0;",
        "vote.sync.ballot.b32 %r1, %p0, -1;",
        "vote.sync.any.pred %p1, %p0, -1;",
    ):
        with pytest.raises(PtxError, match="only lanes 0, 1, 2, 3 are here"):
            lanes(f"mov.b32 %r1, 0; setp.lt.u32 %p0, tid, 4; @%p0 bra FEW; bra ALL; FEW: {statement} ALL:")
    with pytest.raises(PtxError, match="less than the whole warp is not modelled"):
        lanes("shfl.sync.idx.b32 %r1, tid, 0, 31, 0xffff;")
    with pytest.raises(PtxError, match="parts the lanes"):
        lanes("setp.lt.u32 %p0, tid, 4; @%p0 bra.uni END; END: mov.b32 %r1, 0;")


def test_special_registers():
    text = kernel(
        """
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %nctaid.x; mov.u32 %r4, %ntid.x;
        mov.u32 %r5, %laneid;
        mad.lo.s32 %r6, %r2, %r3, %r1; mad.lo.s32 %r6, %r6, %r4, tid; mul.wide.u32 %d0, %r6, 4; add.s64 %d0, %d0, out;
        mad.lo.s32 %r5, %r5, 1000, %r6; st.global.b32 [%d0], %r5;
        """, ("out",), block=64)  # fmt: skip
    out = np.zeros(64 * 6, np.uint32)
    Loaded(text).launch((3, 2), None, [out])
    thread = np.arange(64 * 6)
    assert np.array_equal(out, thread % 32 * 1000 + thread)


def test_a_launch_is_checked():
    loaded = Loaded(kernel(STORE.replace("%r1", "tid"), ("out",), block=32))
    out = np.zeros(32, np.uint32)
    with pytest.raises(PtxError, match="requires a block"):
        loaded.launch((1,), (64,), [out])
    with pytest.raises(PtxError, match="0 parameters; the kernel has 1"):
        loaded.launch((1,), None, [])
    with pytest.raises(PtxError, match="more parameters than the kernel's 1"):
        loaded.launch((1,), None, [out, out])
    with pytest.raises(PtxError, match="not whole clusters of 2"):
        loaded.launch((3,), None, [out], cluster=2)
    with pytest.raises(ValueError, match="no schedule 'lucky'"):
        loaded.launch((1,), None, [out], schedule="lucky")
    loaded.launch((1,), None, [out])
    assert np.array_equal(out, LANE)
