"""Stretches that several warps run as one: the same results as warp by warp, the same faults, nobody left waiting."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import gang
from ptx.parser import PtxError
from ptx.snippets import kernel, run

#: Everything that may be in a stretch, on the bits of in0 and on the thread: floats, integers, bytes, lanes, an MMA.
STRETCH = """
shr.u32 %r1, tid, 2;
shl.b32 %r2, tid, %r1;
cvt.rn.f32.u32 %f1, tid;
fma.rn.f32 %f2, %f1, 0f3F8CCCCD, 0fBF000000;
shfl.sync.bfly.b32 %r3, %r2, 3, 31, -1;
shfl.sync.up.b32 %r4, %r0, 1, 0, -1;
setp.gt.f32 %p1, %f2, 0f41200000;
selp.b32 %r5, %r3, %r4, %p1;
prmt.b32 %r6, %r5, %r0, 0x5140;
cvt.rn.bf16x2.f32 %r7, %f2, %f1;
mov.b32 {%h1, %h2}, %r7;
mov.b32 %r8, {%h2, %h1};
mov.b32 %f3, 0f40000000;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f4,%f5,%f6,%f7}, {%r7,%r8,%r7,%r8}, {%r8,%r7}, {%f3,%f2,%f3,%f1};
ex2.approx.f32 %f8, %f7;
max.f32 %f9, %f8, %f6;
xor.b32 %r9, %r6, %r8;
mov.b32 %r10, %f9;
add.s32 %r11, %r9, %r10;
"""
LOAD = "mul.wide.u32 %d1, tid, 4;\nadd.s64 %d2, %d1, in0;\nld.global.b32 %r0, [%d2];\n"
STORE = "add.s64 %d3, %d1, out;\nst.global.b32 [%d3], %r11;\n"


def result(body: str, threads: int = 128, **options) -> tuple[np.ndarray, int]:
    data = np.random.default_rng(1).integers(0, 2**32, threads, dtype=np.uint32)
    out = np.zeros(threads, np.uint32)
    report = run(body, {"in0": data, "out": out}, threads, **options)
    return out, report.instructions


@pytest.mark.parametrize("schedule", ["orderly", "eager", "random"])
def test_together_is_as_alone(schedule, monkeypatch):
    loop = f"mov.b32 %r20, 0;\nL:\n{STRETCH}add.s32 %r20, %r20, 1;\nxor.b32 %r0, %r0, %r11;\n"
    body = f"{LOAD}{loop}setp.lt.s32 %p2, %r20, 3;\n@%p2 bra L;\n{STORE}"
    together = result(body, schedule=schedule, seed=2)
    seen = []
    monkeypatch.setattr(gang.Stretches, "_run", lambda self, stretch, warps: seen.append(len(warps)))
    alone = result(body, schedule=schedule, seed=2)
    assert max(seen) > 1
    assert np.array_equal(together[0], alone[0]) and together[1] == alone[1]
    monkeypatch.setattr(gang, "_SHORTEST", 10**9)
    assert np.array_equal(result(body)[0], alone[0])


def test_a_stretch_is_found_and_only_what_is_needed_is_kept():
    from ptx.operands import Compiler
    from ptx.parser import parse

    parsed = parse(kernel(f"{LOAD}{STRETCH}{STORE}", ("in0", "out")))
    (stretch,) = gang._find(parsed, Compiler(parsed, {}, 0))
    names = {slot: name for name, (slot, _) in parsed.program[0].scope.registers.items()}
    assert stretch.end - stretch.start >= STRETCH.count(";")
    assert {names[slot] for slot in stretch.reads} == {"tid", "%r0", "%d1", "out"}
    assert {names[slot] for slot in stretch.writes} == {"%r11", "%d3"}


def test_a_fault_names_its_warp_alone():
    """Warp 2 has not written a register that all of them read."""
    body = f"{LOAD}shr.u32 %r30, tid, 5;\nsetp.eq.s32 %p3, %r30, 2;\n@%p3 bra L;\nmov.b32 %r31, 1;\nL:\n"
    body += f"{STRETCH}add.s32 %r11, %r11, %r31;\n{STORE}"
    with pytest.raises(PtxError, match=r"warp 2 of block .* read of the register %r31, which nobody has written"):
        result(body)


@pytest.mark.parametrize("schedule", ["orderly", "random"])
def test_warps_that_go_elsewhere_are_not_waited_for(schedule):
    """One has returned, one takes another way, two stand at a barrier that the others reach after the stretch."""
    body = f"""{LOAD}shr.u32 %r30, tid, 5;
    setp.eq.s32 %p3, %r30, 0;
    @%p3 bra END;
    setp.eq.s32 %p3, %r30, 1;
    @%p3 bra OTHER;
    bar.sync 1, 96;
    {STRETCH}{STORE}bra END;
    OTHER:
    mov.b32 %r11, 7;
    {STORE}bar.sync 1, 96;
    END:
    """
    out, _ = result(body, schedule=schedule, seed=4)
    assert (out[:32] == 0).all() and (out[32:64] == 7).all() and len(set(out[64:].tolist())) > 8
