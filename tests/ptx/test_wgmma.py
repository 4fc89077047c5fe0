"""wgmma: one warpgroup's product against matrices spelt by CuTe's layouts; what must not be touched when."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import formats as fm
from ptx import wgmma
from ptx.cute_layouts import place, positions
from ptx.parser import PtxError
from ptx.snippets import run

G = np.random.default_rng(5)
SHARED = ".extern .shared .align 1024 .b8 dyn[];"
KIB = 1024
#: Copies the image into shared memory, word by word, and makes it visible to the async proxy.
FILL = """
mov.b32 %r500, dyn; mov.b32 %r501, tid;
FILL: shl.b32 %r502, %r501, 2; cvt.u64.u32 %d0, %r502; add.s64 %d0, %d0, image; ld.global.b32 %r503, [%d0];
add.s32 %r504, %r500, %r502; st.shared.b32 [%r504], %r503; add.s32 %r501, %r501, 128; setp.lt.u32 %p0, %r501, {words};
@%p0 bra FILL; fence.proxy.async.shared::cta; bar.sync 0;
"""
ORDER = "wgmma.fence.sync.aligned; {mma} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; {after}"


KINDS = {"K_SW128": (1, 128), "K_SW64": (2, 64), "K_SW32": (3, 32), "K_INTER": (0, 16)}


def descriptor(kind: str, start: int, rows: int, step: int) -> int:
    """Of K step `step` (32 bytes) of an operand; the shared window begins at 1024, `dyn` with it."""
    swizzle, width = KINDS[kind]
    if swizzle:
        inside = step * 32 % width
        start += inside + step * 32 // width * rows * width
        leading = 1
    else:
        start += step * 2 * rows * 16
        leading = rows * 16 >> 4
    return (start + KIB) >> 4 | leading << 16 | (8 * width >> 4) << 32 | swizzle << 62


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"


def execute(
    statements: str, image: np.ndarray, count: int, setup: str = "", order: str = ORDER, after: str = "", **options
) -> np.ndarray:
    """Accumulators %r0.. of 128 threads, [128, count] words, after `statements` on `image`."""
    out = np.zeros((128, count), np.uint32)
    clear = "".join(f"mov.b32 %r{n}, 0;" for n in range(count))
    store = f"mul.wide.u32 %d9, tid, {4 * count}; add.s64 %d9, %d9, out;"
    store += "".join(f"st.global.b32 [%d9+{4 * n}], %r{n};" for n in range(count))
    body = FILL.format(words=image.size // 4) + clear + setup + order.format(mma=statements, after=after) + store
    options |= {"shared": SHARED, "shared_bytes": image.size}
    run(body, {"image": image.view(np.uint32), "out": out}, block=128, **options)
    return out


def mma(opcode: str, count: int, a, b: int, scale: int, tail: str) -> str:
    left = a if isinstance(a, str) else "%d1"
    load = "" if isinstance(a, str) else f"mov.b64 %d1, {a};"
    return (
        f"{load} mov.b64 %d2, {b}; mov.b32 %r505, {scale}; setp.ne.b32 %p1, %r505, 0;"
        f"wgmma.mma_async.sync.aligned.{opcode} {registers(0, count)}, {left}, %d2, %p1{tail};"
    )


def matrix_of(layout: str, rows: int, columns: int, values: np.ndarray) -> np.ndarray:
    found = np.full((rows, columns), np.nan)
    for thread, places in enumerate(positions(layout, rows, 128, values.shape[1])):
        for value, (row, column) in enumerate(places):
            found[row, column] = values[thread, value]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0, 1])
def test_int8_from_shared_memory(cute_layouts, kind, scale):
    """Two K steps, the first of which accumulates on what is there or not."""
    columns = 256
    layout = cute_layouts[kind][0]
    a, b = (G.integers(-128, 128, (rows, 64)).astype(np.int8) for rows in (64, columns))
    image = np.zeros(4 * KIB + columns * 64, np.uint8)
    if kind == "K_SW128":  # an operand of 64 bytes fills half of a swizzled row: the other half is junk
        image = np.full(8 * KIB + columns * 128, 0x77, np.uint8)
        a, b = (np.concatenate([x, np.full_like(x, 99)], 1) for x in (a, b))
    start = 64 * a.shape[1]
    place(image, layout, a.view(np.uint8), 0)
    place(image, layout, b.view(np.uint8), start)
    name = f"m64n{columns}k32.satfinite.s32.s8.s8"
    statements = "".join(
        mma(name, 128, descriptor(kind, 0, 64, step), descriptor(kind, start, columns, step), scale or step, "")
        for step in range(2)
    )
    setup = "".join(f"mov.b32 %r{n}, 1000;" for n in range(128))
    found = execute(statements, image, 128, setup).view(np.int32)
    expected = a[:, :64].astype(int) @ b[:, :64].astype(int).T + (1000 if scale else 0)
    layout_c = cute_layouts["wgmma s8 256"][2]
    assert np.array_equal(matrix_of(layout_c, 64, columns, found), expected)


@pytest.mark.parametrize("bits", [None, 13])
def test_fp8_with_a_in_registers(cute_layouts, bits):
    columns = 136
    a_layout, _, c_layout = cute_layouts["wgmma e4m3 136"]
    a_bytes = G.integers(0, 256, (128, 16)).astype(np.uint8)
    b = G.integers(0, 256, (columns, 128)).astype(np.uint8)
    for x in (a_bytes, b):
        x[(x & 127) == 127] = 0x38
    image = np.zeros(columns * 128 + 128 * 16, np.uint8)
    place(image, cute_layouts["K_SW128"][0], b, 0)
    image[columns * 128 :] = a_bytes.reshape(-1)
    setup = (
        f"shl.b32 %r506, tid, 4; mov.b32 %r507, dyn; add.s32 %r506, %r506, %r507; ld.shared.v4.b32 {registers(100, 4)},"
    )
    setup += f"[%r506+{columns * 128}];"
    for step in range(4):
        statements = mma(
            f"m64n{columns}k32.f32.e4m3.e4m3",
            68,
            registers(100, 4),
            descriptor("K_SW128", 0, columns, step),
            0,
            ", 1, 1",
        )
        found = execute(statements, image, 68, setup, fp8_fraction_bits=bits).view(np.float32)
        left, right = matrix_of(a_layout, 64, 32, fm.E4M3[a_bytes]), fm.E4M3[b[:, 32 * step : 32 * step + 32]]
        exact = (left @ right.T).astype(np.float32)
        expected = exact if bits is None else wgmma.truncated_sum(left, right, np.zeros_like(exact), bits)
        assert bits is None or (expected != exact).mean() > 0.5
        assert np.array_equal(matrix_of(c_layout, 64, columns, found), expected)


@pytest.mark.parametrize("kind", ["K_SW32", "K_SW128"])
def test_bf16(cute_layouts, kind):
    """A in registers and in shared memory give the same."""
    columns, width = 128, KINDS[kind][1]
    a_layout, _, c_layout = cute_layouts["wgmma bf16 128"]
    a_words = fm.to_bf16(G.standard_normal((128, 8)).astype(np.float32))
    left = matrix_of(a_layout, 64, 16, fm.from_bf16(a_words).astype(float))
    right = fm.to_bf16(G.standard_normal((columns, 16)).astype(np.float32))
    image = np.zeros((columns + 64) * width + 128 * 16, np.uint8)
    b_bytes, a_bytes = (np.zeros((rows, width), np.uint8) for rows in (columns, 64))
    b_bytes[:, :32] = right.view(np.uint8)
    a_bytes[:, :32] = fm.to_bf16(left.astype(np.float32)).view(np.uint8)
    place(image, cute_layouts[kind][0], b_bytes, 0)
    place(image, cute_layouts[kind][0], a_bytes, columns * width)
    image[(columns + 64) * width :] = a_words.view(np.uint8).reshape(-1)
    expected = (left @ fm.from_bf16(right).astype(float).T).astype(np.float32)
    setup = (
        f"shl.b32 %r506, tid, 4; mov.b32 %r507, dyn; add.s32 %r506, %r506, %r507; ld.shared.v4.b32 {registers(100, 4)},"
    )
    setup += f"[%r506+{(columns + 64) * width}];"
    name, b = f"m64n{columns}k16.f32.bf16.bf16", descriptor(kind, 0, columns, 0)
    for a, tail in ((registers(100, 4), ", 1, 1, 0"), (descriptor(kind, columns * width, 64, 0), ", 1, 1, 0, 0")):
        found = execute(mma(name, 64, a, b, 0, tail), image, 64, setup).view(np.float32)
        assert np.array_equal(matrix_of(c_layout, 64, columns, found), expected)


GOOD = {
    "mma": mma("m64n8k32.f32.e4m3.e4m3", 4, registers(100, 4), 1024 >> 4 | 1 << 16 | 64 << 32 | 1 << 62, 1, ", 1, 1"),
    "setup": "".join(f"mov.b32 %r{100 + n}, tid;" for n in range(4)),
    "order": ORDER,
}
HAZARDS = {
    "no fence": (
        {"order": ORDER.replace("wgmma.fence.sync.aligned;", "")},
        r"without a wgmma\.fence",
    ),
    "accumulator computed after the fence": (
        {"order": ORDER.replace("{mma}", "add.s32 %r1, %r1, 1; {mma}")},
        r"%r1 was computed after the last wgmma\.fence",
    ),
    "A fragment computed after the fence": (
        {"order": ORDER.replace("{mma}", "add.s32 %r101, %r101, 1; {mma}")},
        r"%r101 was computed after the last wgmma\.fence",
    ),
    "accumulator read in flight": (
        {"order": ORDER.replace("wgmma.commit", "add.s32 %r510, %r2, 1; wgmma.commit")},
        "read of the register %r2, an accumulator of a wgmma",
    ),
    "accumulator written in flight": (
        {"order": ORDER.replace("wgmma.wait", "mov.b32 %r2, 1; wgmma.wait")},
        "write to the register %r2, an operand of a wgmma",
    ),
    "A fragment written in flight": (
        {"order": ORDER.replace("wgmma.wait", "mov.b32 %r103, 1; wgmma.wait")},
        "write to the register %r103, an operand of a wgmma",
    ),
    "no commit": ({"order": ORDER.replace("wgmma.commit_group.sync.aligned;", "")}, "accumulator of a wgmma"),
    "waited for one less": ({"order": ORDER.replace("aligned 0", "aligned 1")}, "accumulator of a wgmma"),
    "shared memory written in flight": (
        {"order": ORDER.replace("wgmma.wait", "mov.b32 %r509, dyn; st.shared.b32 [%r509], 7; wgmma.wait")},
        "DATA RACE: write to shared memory",
    ),
    "unwritten A": ({"setup": ""}, "%r100|nobody has written"),
    "part of the lanes": (
        {"order": ORDER.replace("{mma}", "setp.eq.b32 %p2, tid, 0; @%p2 bra SKIP; {mma} SKIP:")},
        "whole warp",
    ),
    "descriptor differs": (
        {"mma": GOOD["mma"].replace("mov.b32 %r505", "cvt.u64.u32 %d3, tid; add.s64 %d2, %d2, %d3; mov.b32 %r505")},
        "the descriptor of B differs between the lanes",
    ),
    "warps disagree": (
        {"mma": GOOD["mma"].replace(
            "mov.b32 %r505", "shr.u32 %r508, tid, 5; cvt.u64.u32 %d3, %r508; add.s64 %d2, %d2, %d3; mov.b32 %r505")},
        "warps of a warpgroup disagree",
    ),
    "out of bounds": ({"mma": GOOD["mma"].replace("mov.b64 %d2, ", "mov.b64 %d2, 6")}, "out of bounds|base offset"),
    "negated": ({"mma": GOOD["mma"].replace(", 1, 1;", ", -1, 1;")}, "immediates"),
    "too few accumulators": ({"mma": GOOD["mma"].replace("n8k32", "n16k32")}, "8 are needed"),
    "wrong K": ({"mma": GOOD["mma"].replace("n8k32", "n8k16")}, "has no shape"),
}  # fmt: skip


def hazard(change: dict) -> np.ndarray:
    parts = {**GOOD, **change}
    return execute(parts["mma"], np.full(1024, 0x38, np.uint8), 4, parts["setup"], parts["order"])


def test_the_good_one_runs():
    assert hazard({}).shape == (128, 4)
    # What a value that is only copied after the fence is: let through, as ptxas moves its own fence.
    copied = ORDER.replace("{mma}", "mov.b32 %r1, 0; mov.b32 %r2, %r3; {mma}")
    assert np.array_equal(hazard({"order": copied}), hazard({}))
    assert np.array_equal(
        hazard({"order": ORDER.replace("wgmma.wait", "add.s32 %r510, %r101, 1; wgmma.wait")}), hazard({})
    )


@pytest.mark.parametrize("name", HAZARDS)
def test_hazards(name):
    change, message = HAZARDS[name]
    with pytest.raises(PtxError, match=message):
        hazard(change)


def test_the_async_proxy_needs_its_fence():
    with pytest.raises(PtxError, match=r"fence\.proxy\.async is missing"):
        parts = {**GOOD}
        image = np.full(1024, 0x38, np.uint8)
        out = np.zeros((128, 4), np.uint32)
        body = FILL.format(words=256).replace("fence.proxy.async.shared::cta;", "") + parts["setup"]
        body += "".join(f"mov.b32 %r{n}, 0;" for n in range(4)) + ORDER.format(mma=parts["mma"], after="")
        run(body, {"image": image.view(np.uint32), "out": out}, block=128, shared=SHARED, shared_bytes=1024)


def test_an_exit_with_an_mma_in_flight():
    out = ORDER.replace("wgmma.wait_group.sync.aligned 0;", "ret;")
    with pytest.raises(PtxError, match="ends with a wgmma"):
        hazard({"order": out})


def test_sums_are_cut_as_hopper_cuts_them():
    """By hand, with 3 fraction bits: terms are cut at the largest one's last bit, then the sum at its own."""

    def total(left, right, addend, bits=3):
        found = wgmma.truncated_sum(np.array([left]), np.array([right]), np.array([[addend]], np.float32), bits)
        assert found.dtype == np.float32
        return float(found[0, 0])

    assert total([1.0, 0.125], [1.0, 1.0], 0.0) == 1.125
    assert total([1.0, 0.0625, 0.0625], [1.0, 1.0, 1.0], 0.0) == 1.0  # each is cut before they add up
    assert total([-1.0, -0.1875], [1.0, 1.0], 0.0) == -1.125  # towards zero
    assert total([1.0], [0.1875], 1.0) == 1.125  # the addend counts as a term
    assert total([0.1875], [1.0], 2.0) == 2.0
    assert total([1.125] * 4, [1.0] * 4, 0.0) == 4.5
    assert total([1.125] * 3, [1.0] * 3, 0.0) == 3.25  # 3.375 has one bit too many at its own exponent
    assert total([1.75], [1.75], 0.125) == 3.0  # exponent 0 + 0 of a product of 3.0625; the sum 3.125 is cut once more
    assert total([0.0], [1.0], 0.0) == 0.0
    g = np.random.default_rng(0)
    left, right = (g.integers(-8, 8, (n, 32)) * 0.25 for n in (16, 24))
    addend = g.integers(-64, 64, (16, 24)).astype(np.float32)
    assert (wgmma.truncated_sum(left, right, addend, 24) == left @ right.T + addend).all()
