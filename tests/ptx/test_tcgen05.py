"""tcgen05.mma: descriptors against the tables of the PTX ISA and what CuTe builds, products against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import formats as fm
from ptx import tcgen05
from ptx.cute_layouts import parse_layout, place
from ptx.machine import Fault
from ptx.parser import PtxError
from ptx.snippets import run
from ptx.tensor_snippets import CODES, FREE, SETUP, descriptor, execute, idesc, issue, mma, read, store, wait

G = np.random.default_rng(7)

#: What CuTe DSL 4.8.1 puts into its PTX for MmaI8Op, MmaF8F6F4Op and MmaF16BF16Op of shapes (128, N, 256 bits).
CUTE_INSTRUCTIONS = {
    ("i8", "s8"): {8: 134349992, 64: 135267496, 256: 138413224},
    ("f8f6f4", "e4m3"): {8: 134348816, 64: 135266320, 256: 138412048},
    ("f16", "bf16"): {8: 134349968, 64: 135267472, 256: 138413200},
}


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("columns", [8, 16, 64, 256])
def test_instruction_descriptors(kind, columns):
    found = tcgen05.instruction(kind[0], idesc(*kind, columns))
    assert (found.a, found.b, found.columns, found.saturate) == (kind[1], kind[1], columns, False)
    assert found.accumulator == (np.int32 if kind[0] == "i8" else np.float32)
    # CuTe asks for saturation of integers.
    saturate = {"saturate": 1} if kind[0] == "i8" else {}
    if columns in CUTE_INSTRUCTIONS.get(kind, {}):
        assert CUTE_INSTRUCTIONS[kind][columns] == idesc(*kind, columns, **saturate)


WRONG = [
    ("f8f6f4", {"sparsity selector": 1}, "sparsity selector"), ("f8f6f4", {"sparsity": 1}, "sparsity"),
    ("f8f6f4", {"saturate": 1}, "only integers"), ("f8f6f4", {"D": 0}, "D of type 0"),
    ("f8f6f4", {"D": 2}, "D of type 2"), ("f16", {"D": 0}, "D of type 0"), ("i8", {"D": 1}, "D of type 1"),
    ("i8", {"A": 0}, "types 0 and 1"),
    ("f8f6f4", {"A": 1}, "types 1 and 0"), ("f8f6f4", {"B": 5}, "types 0 and 5"), ("f16", {"B": 2}, "types 1 and 2"),
    ("f8f6f4", {"reserved 6": 1}, "reserved bit 6"), ("f8f6f4", {"reserved 23": 1}, "reserved bit 23"),
    ("f8f6f4", {"reserved 29": 1}, "reserved bit 29"), ("f8f6f4", {"negate A": 1}, "a negated A"),
    ("f8f6f4", {"negate B": 1}, "a negated B"), ("f8f6f4", {"transpose A": 1}, "an MN-major A"),
    ("f8f6f4", {"transpose B": 1}, "an MN-major B"), ("f8f6f4", {"M": 4}, "64 rows"), ("f8f6f4", {"M": 16}, "256 rows"),
    ("f8f6f4", {"N": 0}, "no N of 0"), ("f8f6f4", {"N": 33}, "no N of 264"), ("i8", {"N": 5}, "no N of 40"),
    ("f8f6f4", {"shift": 1}, "a shift of B"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "message"), WRONG)
def test_wrong_instruction_descriptors(kind, change, message):
    element = {"f8f6f4": "e4m3", "f16": "bf16", "i8": "s8"}[kind]
    with pytest.raises(Fault, match=message):
        tcgen05.instruction(kind, idesc(kind, element, 64, **change))


#: What CuTe DSL 4.8.1 puts into its PTX for operands of 64 rows: width of a swizzled row -> descriptor without start.
CUTE_DESCRIPTORS = {
    128: 0x4000404000010000, 64: 0x8000402000010000, 32: 0xC000401000010000, 16: 0x0000400800400000,
}  # fmt: skip


@pytest.mark.parametrize("width", CUTE_DESCRIPTORS)
def test_shared_memory_descriptors(width, cute_layouts):
    """Every byte of an operand lies where CuTe's layout has it."""
    assert descriptor(width, 0, 64, 0) == CUTE_DESCRIPTORS[width] | 1024 >> 4
    layout = cute_layouts["tcgen05 K_" + ("INTER" if width == 16 else f"SW{width}")][0]
    height, columns = 64, max(width, 32)
    numbers = np.arange(height * columns).reshape(height, columns)
    image = np.zeros(height * columns, np.int64)
    place(image, layout, numbers, 0)
    for step in range(columns // 32):
        found = image[tcgen05.operand_addresses(descriptor(width, 0, height, step), height) - 1024]
        assert np.array_equal(found, numbers[:, 32 * step : 32 * step + 32])


def test_wrong_shared_memory_descriptors():
    good = descriptor(128, 0, 64, 0)
    for bits, message in (
        (1 << 14, "reserved bits"), (1 << 31, "reserved bits"), (1 << 53, "reserved bits"), (1 << 60, "reserved bits"),
        (1 << 46, "are 0, not 1"), (1 << 47, "are 3, not 1"), (1 << 49, "base offset"), (1 << 52, "absolute leading"),
        (1 << 61, "swizzle 3 .* does not exist"), (3 << 61, "with atoms of 32 bytes"),
    ):  # fmt: skip
        with pytest.raises(Fault, match=message):
            tcgen05.operand_addresses(good ^ bits, 64)


def test_operands_in_tensor_memory(cute_layouts):
    """CuTe's D and A there: row r in lane r, columns side by side; offsets count elements of 32 bits a column."""
    for element, bits in (("e4m3", 8), ("bf16", 16)):
        (d_shape, d_stride), (a_shape, a_stride) = (parse_layout(text) for text in cute_layouts[f"tcgen05 {element}"])
        assert (d_shape[0], d_stride[0]) == ([128, 64], [1 << 16, 1])
        assert (a_shape[0], a_stride[0]) == ([128, 256 // bits], [(1 << 16) * 32 // bits, 1])


def random_bytes(element: str, rows: int, columns: int) -> np.ndarray:
    """Random elements [rows, columns] of any size, as their bytes."""
    if element == "s8":
        return G.integers(-128, 128, (rows, columns)).astype(np.int8).view(np.uint8)
    if element == "e4m3":
        codes = G.integers(0, 256, (rows, columns)).astype(np.uint8)
        return np.where((codes & 127) == 127, 0x38, codes).astype(np.uint8)
    values = G.standard_normal((rows, columns // 2)).astype(np.float32)
    return (fm.to_bf16 if element == "bf16" else fm.to_f16)(values).view(np.uint8)


def decode(element: str, data: np.ndarray) -> np.ndarray:
    if element == "s8":
        return data.view(np.int8).astype(float)
    if element == "e4m3":
        return fm.E4M3[data]
    return (fm.from_bf16 if element == "bf16" else fm.from_f16)(data.view(np.uint16)).astype(float)


def product(element: str, a: np.ndarray, b: np.ndarray, addend: np.ndarray) -> np.ndarray:
    """D in steps of 32 bytes, each rounded once."""
    for step in range(0, a.shape[1], 32):
        exact = decode(element, a[:, step : step + 32]) @ decode(element, b[:, step : step + 32]).T
        addend = (addend + exact).astype(np.int32 if element == "s8" else np.float32)
    return addend


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("width", [128, 64, 32, 16])
def test_products_of_shared_memory(kind, width, cute_layouts):
    """Four K steps, of which the first does not add D; the columns beside D stay as they are."""
    columns, element = 64, kind[1]
    layout = cute_layouts["tcgen05 K_" + ("INTER" if width == 16 else f"SW{width}")][0]
    a, b = random_bytes(element, 128, 128), random_bytes(element, columns, 128)
    image = np.zeros((128 + columns) * 128, np.uint8)
    place(image, layout, a, 0)
    place(image, layout, b, 128 * 128)
    statements = "".join(
        mma(
            kind[0],
            descriptor(width, 0, 128, step),
            descriptor(width, 128 * 128, columns, step),
            idesc(*kind, columns),
            step,
            d=32,
        )
        for step in range(4)
    )
    found = execute(SETUP + issue(statements) + wait("bar0", 0) + read(columns, 32) + FREE, image, columns)
    expected = product(element, a, b, np.zeros((128, columns), np.int32 if element == "s8" else np.float32))
    assert np.array_equal(found.view(expected.dtype), expected)


@pytest.mark.parametrize("kind", CODES)
def test_products_of_tensor_memory(kind, cute_layouts):
    """A from tensor memory, D added that a store has put there."""
    columns, element = 128, kind[1]
    a, b = random_bytes(element, 128, 32), random_bytes(element, columns, 32)
    d = np.where(G.random((128, columns)) < 0.5, 1000, -3).astype(np.int32 if element == "s8" else np.float32)
    image = np.zeros(columns * 32, np.uint8)
    place(image, cute_layouts["tcgen05 K_SW32"][0], b, 0)
    words = np.concatenate([a.view(np.uint32), d.view(np.uint32)], 1)
    statements = mma(kind[0], "[%r506+128]", descriptor(32, 0, columns, 0), idesc(*kind, columns), 1)
    stores = store(8, 128, row=136) + store(128, 0, row=136, at=8)
    found = execute(SETUP + stores + issue(statements) + wait("bar0", 0) + read(128) + FREE, image, columns, words)
    assert np.array_equal(found.view(d.dtype), product(element, a, b, d))


def test_saturation_of_integers():
    """Without it a sum wraps around, with it it stays at the end of the range."""
    image = np.full(128 * 32 + 8 * 32, 127, np.uint8)
    big = np.full((128, 8), 2**31 - 1000, np.int32)
    for saturate, expected in ((0, 2**31 - 1000 + 32 * 127 * 127 - 2**32), (1, 2**31 - 1)):
        statements = mma(
            "i8", descriptor(32, 0, 128, 0), descriptor(32, 4096, 8, 0), idesc("i8", "s8", 8, saturate=saturate), 1
        )
        body = SETUP + store(8, 0) + issue(statements) + wait("bar0", 0) + read(8) + FREE
        found = execute(body, image, 8, big.view(np.uint32))
        assert (found.view(np.int32) == expected).all()


def test_what_is_not_modelled():
    body = SETUP + issue("{}") + FREE
    good = mma("f8f6f4", descriptor(32, 0, 128, 0), descriptor(32, 0, 64, 0), idesc("f8f6f4", "e4m3", 64), 0)
    for old, new, message in (
        ("cta_group::1.kind", "cta_group::2.kind", "cta_group::2"),
        ("tcgen05.mma.", "tcgen05.mma.ws.", r"modifier \.ws of"),
        ("kind::f8f6f4", "kind::mxf8f6f4", "kind::mxf8f6f4"),
        ("kind::f8f6f4", "kind::f8f6f4.collector::a::fill", "collector::a::fill"),
        (", %p3;", ", %p3, 3;", "scale-input-d"),
        ("tcgen05.mma.cta_group::1.kind::f8f6f4", "tcgen05.cp.cta_group::1.128x256b", r"tcgen05\.cp is not modelled"),
        ("tcgen05.mma.cta_group::1.kind::f8f6f4", "tcgen05.shift.cta_group::1.down", r"tcgen05\.shift is not modelled"),
    ):
        assert old in good
        with pytest.raises(PtxError, match=message):
            execute(body.replace("{}", good.replace(old, new)), np.zeros(4096, np.uint8), 1)
    lanes = good.replace(", %p3;", ", {%r511, %r511, %r511, %r511}, %p3;")
    rest = wait("bar0", 0) + "tcgen05.fence::after_thread_sync;"
    execute(SETUP + issue("mov.b32 %r511, 0;" + lanes) + rest + FREE, np.zeros(4096, np.uint8), 1)
    with pytest.raises(PtxError, match="disabled output lanes"):
        execute(SETUP + issue("mov.b32 %r511, 2;" + lanes) + rest + FREE, np.zeros(4096, np.uint8), 1)


def test_sm_103_has_no_integers():
    statement = "tcgen05.mma.cta_group::1.kind::i8 [%r0], %d0, %d0, %r0, %p0;"
    with pytest.raises(PtxError, match="sm_103 has no kind::i8"):
        run(statement, target="sm_103a")
