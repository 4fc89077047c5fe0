"""The allow-list: whatever the interpreter does not know is an error that names it. And what a parse holds."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ptx.parser import PtxError, find_label, parse, split_operands
from ptx.snippets import kernel, run

UNKNOWN = {
    "tanh.approx.f32 %f0, %f1;": "tanh.approx.f32",
    "add.sat.s32 %r0, %r1, %r2;": "the modifier .sat",
    "add.rz.f32 %f0, %f1, %f2;": "the modifier .rz",
    "mul.rm.f32 %f0, %f1, %f2;": "the modifier .rm",
    "cvt.rz.satfinite.e4m3x2.f32 %h0, %f1, %f2;": "cvt.rz.satfinite.e4m3x2.f32",
    "ld.global.cv.b32 %r0, [%d0];": "the modifier .cv",
    "st.shared::cluster.b32 [%r0], %r1;": "the modifier .shared::cluster",
    "shfl.bfly.b32 %r0, %r1, 1, 31;": "shfl.bfly.b32",
    "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r0,%r1},{%r2,%r3,%r4,%r5},{%r6,%r7},{%r8,%r9};": "f16.f16.f16",
    "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32 {%f0,%f1,%f2,%f3},{%r2,%r3,%r4,%r5},{%r6,%r7},"
    "{%f0,%f1,%f2,%f3};": "m16n8k32.row.col.f32.e5m2.e4m3.f32",
    "wgmma.wait_group.sync.aligned %r0;": "must be a literal",
    "cp.async.bulk.commit_group;": "cp.async.bulk.commit_group",
    "atom.global.add.u32 %r0, [%d0], %r1;": "atom.global.add.u32",
    "mov.u32 %r0, %clock;": "%clock",
    "mov.u32 %r0, %nosuch;": "%nosuch",
    "mov.b32 %r0, %d0;": "%d0",
    "add.f32 %f0, %p1, %f1;": "%p1",
    "bra NOWHERE;": "NOWHERE",
    ".local .b8 stack[16];": ".local",
    ".reg .b128 %q0;": ".b128",
    "setmaxnreg.inc.sync.aligned.u32 100;": "100",
    "@%p0 garbage": "garbage",
}


@pytest.mark.parametrize("statement", UNKNOWN, ids=lambda s: s.split()[0])
def test_what_is_not_modelled_is_named(statement):
    with pytest.raises(PtxError, match=re.escape(UNKNOWN[statement])) as error:
        run(statement if statement.endswith(";") else statement + ";")
    assert "PTX line" in str(error.value)


def test_header_and_parameters():
    text = kernel("mov.u32 %r0, 1;", ("a", "b"), block=96, shared=".extern .shared .align 128 .b8 dyn[];")
    found = parse(text)
    assert found.name == "k"
    assert found.block == (96, 1, 1)
    assert found.parameters == [("k_a", "u64"), ("k_b", "u64")]
    assert found.shared == {"dyn": (128, 0, True)}
    assert found.target == "sm_90a"
    with pytest.raises(PtxError, match="header"):
        parse(text.replace(".reqntid 96, 1, 1", ".reqntid 96, 1, 1\n.noreturn"))
    with pytest.raises(PtxError, match="parameter"):
        parse(text.replace(".param .u64 k_a", ".param .align 4 .b8 k_a[16]"))
    with pytest.raises(PtxError, match="0 kernels called 'other'"):
        parse(text, "other")


def test_scopes_hide_registers_and_labels():
    """A register or label of inner braces is another one; the branch takes the nearest."""
    body = """
    mov.b32 %r1, 5;
    { .reg .b32 %r1; mov.b32 %r1, 7; bra SKIP; mov.b32 %r1, 8; SKIP: mov.b32 %r2, %r1; }
    { .reg .b32 t; mov.b32 t, %r2; bra SKIP; mov.b32 t, 0; SKIP: add.s32 %r3, t, %r1; }
    mul.wide.u32 %d0, tid, 4; add.s64 %d0, %d0, out; st.global.b32 [%d0], %r3;
    """
    out = np.zeros(32, np.uint32)
    run(body, {"out": out})
    assert (out == 12).all()
    program = parse(kernel(body, ("out",))).program
    first, second = (find_label(i, "SKIP") for i in program if i.opcode == "bra")
    assert program[first].opcode == "mov.b32"
    assert program[second].opcode == "add.s32"


def test_lines_comments_and_operands():
    text = kernel("// one\n/* two\nthree */ add.s32 %r0,\n %r1, // four\n %r2;\nmov.b32 %r3, 1;")
    program = parse(text).program
    lines = text.split("\n")
    for instruction in program:
        assert instruction.opcode in lines[instruction.line - 1]
    assert program[1].operands == ["%r0", "%r1", "%r2"]
    assert split_operands("{a, b}, [c+4], d|p") == ["{a, b}", "[c+4]", "d|p"]
    assert program[1].text == "add.s32 %r0, %r1, %r2"
