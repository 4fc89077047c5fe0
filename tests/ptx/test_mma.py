"""mma.sync: one instruction against a product of matrices that are spelt by CuTe's own fragment layouts."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import formats as fm
from ptx.cute_layouts import positions
from ptx.parser import PtxError
from ptx.snippets import run

G = np.random.default_rng(11)
KINDS = {
    "bf16": ("m16n8k16.row.col.f32.bf16.bf16.f32", 16, "bf16"),
    "f16": ("m16n8k16.row.col.f32.f16.f16.f32", 16, "f16"),
    "e4m3": ("m16n8k32.row.col.f32.e4m3.e4m3.f32", 32, "e4m3"),
    "e4m3 of sm_120": ("m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32", 32, "e4m3"),
    # CuTe has no INT8 warp MMA; PTX gives 8-bit types one layout.
    "s8": ("m16n8k32.row.col.s32.s8.s8.s32", 32, "e4m3"),
    "s8 saturating": ("m16n8k32.row.col.satfinite.s32.s8.s8.s32", 32, "e4m3"),
}


def run_mma(name: str, words: np.ndarray, tail: str = "") -> np.ndarray:
    """One MMA on 32 lanes of 4 A, 2 B, 4 C and up to 2 scale words: the 4 D words of each lane."""
    out = np.zeros((32, 4), np.uint32)
    body = f"""
    mul.wide.u32 %d0, tid, 48; add.s64 %d0, %d0, in; mul.wide.u32 %d1, tid, 16; add.s64 %d1, %d1, out;
    ld.global.v4.b32 {{%r1,%r2,%r3,%r4}}, [%d0]; ld.global.v4.b32 {{%r5,%r6,%r11,%r12}}, [%d0+16];
    ld.global.v4.b32 {{%r7,%r8,%r9,%r10}}, [%d0+32];
    mma.sync.aligned.{name} {{%r21,%r22,%r23,%r24}}, {{%r1,%r2,%r3,%r4}}, {{%r5,%r6}}, {{%r7,%r8,%r9,%r10}}{tail};
    st.global.v4.b32 [%d1], {{%r21,%r22,%r23,%r24}};
    """
    run(body, {"in": words, "out": out})
    return out


def decode(words: np.ndarray, kind: str) -> np.ndarray:
    """Values of the elements of each lane's words, in order."""
    raw = np.ascontiguousarray(words)
    if kind == "bf16":
        return fm.from_bf16(raw.view(np.uint16)).astype(float)
    if kind == "f16":
        return raw.view(np.float16).astype(float)
    if kind.startswith("s8"):
        return raw.view(np.int8).astype(float)
    if kind.startswith("e4m3"):
        return fm.E4M3[raw.view(np.uint8)]
    nibbles = np.stack([raw.view(np.uint8) & 15, raw.view(np.uint8) >> 4], -1)
    return fm.E2M1[nibbles].reshape(len(raw), -1)


def matrix(layout: str, rows: int, columns: int, values: np.ndarray) -> np.ndarray:
    found = np.full((rows, columns), np.nan)
    for lane, places in enumerate(positions(layout, rows, 32, values.shape[1])):
        for value, (row, column) in enumerate(places):
            found[row, column] = values[lane, value]
    assert np.isfinite(found).all()
    return found


def random_words(kind: str) -> np.ndarray:
    if kind == "bf16":
        halves = fm.to_bf16(G.standard_normal((32, 12)).astype(np.float32))
    elif kind == "f16":
        halves = fm.to_f16(G.standard_normal((32, 12)).astype(np.float32))
    else:
        raw = G.integers(0, 256, (32, 24), dtype=np.uint8)
        return np.where(kind.startswith("e4m3") & ((raw & 127) == 127), 0x30, raw).astype(np.uint8).view(np.uint32)
    return halves.view(np.uint32)


@pytest.mark.parametrize("kind", KINDS)
def test_fragments_are_cutes(cute_layouts, kind):
    name, k, layout = KINDS[kind]
    integer = kind.startswith("s8")
    a_layout, b_layout, c_layout = cute_layouts[layout]
    words = np.zeros((32, 12), np.uint32)
    words[:, :6] = random_words(kind)
    addend = G.integers(-1000, 1000, (32, 4)).astype(np.int32 if integer else np.float32)
    words[:, 8:] = addend.view(np.uint32)
    a = matrix(a_layout, 16, k, decode(words[:, :4], kind))
    b = matrix(b_layout, 8, k, decode(words[:, 4:6], kind))
    c = matrix(c_layout, 16, 8, addend.astype(float))
    found = run_mma(name, words).view(addend.dtype)
    result = matrix(c_layout, 16, 8, found.astype(float))
    assert np.array_equal(result, (a @ b.T + c).astype(addend.dtype))


def test_saturation():
    words = np.zeros((32, 12), np.uint32)
    words[:, :6] = 0x7F7F7F7F
    words[:, 8:] = 0x7FFFFFF0
    assert (run_mma(KINDS["s8 saturating"][0], words) == 0x7FFFFFFF).all()
    assert (run_mma(KINDS["s8"][0], words).view(np.int32) < 0).all()


SCALED = "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"


@pytest.mark.parametrize(("a_thread", "b_thread"), [(0, 0), (1, 0), (0, 3), (1, 2)])
def test_block_scaled_fragments_are_cutes(cute_layouts, a_thread, b_thread):
    """CuTe's scale layouts are those of selector 0; PTX: a selector moves A's scales by two lanes, B's by one."""
    a_layout, b_layout, c_layout = cute_layouts["e2m1"]
    words = G.integers(0, 2**32, (32, 12), dtype=np.uint32)
    words[:, 6:8] &= 0x77777777
    addend = G.standard_normal((32, 4)).astype(np.float32)
    words[:, 8:] = addend.view(np.uint32)
    scales = []
    for which, (rows, shift) in enumerate(((16, 2 * a_thread), (8, b_thread))):
        grid = np.full((rows, 64), np.nan)
        for lane, places in enumerate(positions(cute_layouts["e2m1 scales"][which], rows, 32, 64)):
            holder = lane // 4 * 4 + (lane + shift) % 4
            # Lanes to which the layout gives the same elements: the selector names the one that counts.
            if lane % 4 < (2 if which == 0 else 1):
                for row, column in places:
                    grid[row, column] = fm.E4M3[int(words[holder, 6 + which]) >> 8 * (column // 16) & 255]
        scales.append(grid)
    a = matrix(a_layout, 16, 64, decode(words[:, :4], "e2m1")) * scales[0]
    b = matrix(b_layout, 8, 64, decode(words[:, 4:6], "e2m1")) * scales[1]
    c = matrix(c_layout, 16, 8, addend.astype(float))
    tail = f", %r11, {{0,{a_thread}}}, %r12, {{0,{b_thread}}}"
    result = matrix(c_layout, 16, 8, run_mma(SCALED, words, tail).view(np.float32).astype(float))
    assert np.array_equal(result, (a @ b.T + c).astype(np.float32))


@pytest.mark.parametrize("selectors", [("{1,0}", "{0,0}"), ("{0,2}", "{0,0}"), ("{0,0}", "{0,4}"), ("{0,0}", "{2,0}")])
def test_selectors_that_do_not_exist(selectors):
    with pytest.raises(PtxError, match="scale selectors"):
        run_mma(SCALED, np.zeros((32, 12), np.uint32), f", %r11, {selectors[0]}, %r12, {selectors[1]}")


def test_a_negative_scale_is_not_a_number():
    words = np.zeros((32, 12), np.uint32)
    words[:, :6] = 0x22222222
    words[:, 6:8] = 0xB8B8B8B8
    found = run_mma(SCALED, words, ", %r11, {0,0}, %r12, {0,0}").view(np.float32)
    assert np.isnan(found).all()
