"""Arithmetic, logic, comparison, selection and moves: everything that stays within a lane but conversions."""

from __future__ import annotations

import numpy as np

from . import formats as fm
from .formats import B1, F32, F64, S64, TYPES, U8, U16, U32, U64, UNSIGNED
from .machine import Fault
from .operands import gather, opcode, vector

_INTEGER = r"(s16|u16|s32|u32|s64|u64)"


def _operands(c, i, dtype, count=2):
    return c.write(i, i.operands[0]), *(c.read(i, name, dtype) for name in i.operands[1 : 1 + count])


@opcode(r"mov\.(pred|[bus](?:16|32|64)|f32)")
def move(c, i, m):
    """mov, also between a register and a vector of its parts."""
    kind = TYPES[m[1]]
    target, source = i.operands
    copied = c.copies(i, vector(target), vector(source))
    if target.startswith("{"):
        parts = [c.write(i, name) for name in vector(target)]
        part = UNSIGNED[kind.itemsize // len(parts)]
        read = c.read(i, source, kind, unfilled=True)

        def unpack(warp):
            values = read(warp).view(part)
            for n, write in enumerate(parts):
                write(warp, values[n :: len(parts)].copy())
            if warp.loading:
                copied(warp)

        return unpack
    write = c.write(i, target)
    if source.startswith("{"):
        names = vector(source)
        part = UNSIGNED[kind.itemsize // len(names)]
        reads = [c.read(i, name, part, unfilled=True) for name in names]
        whole = UNSIGNED[kind.itemsize]

        def pack(warp):
            write(warp, np.ascontiguousarray(gather(reads, warp).T).view(whole).reshape(-1))
            if warp.loading:
                copied(warp)

        return pack
    read = c.read(i, source, kind, as_is=True, unfilled=True)

    def copy(warp):
        write(warp, read(warp))
        if warp.loading:
            copied(warp)

    return copy


@opcode(r"(add|sub|mul)(?:\.rn)?(\.ftz)?\.f32")
def float_binary(c, i, m):
    write, a, b = _operands(c, i, F32)
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[m[1]]
    if m[2]:
        return lambda warp: write(warp, fm.flush(function(fm.flush(a(warp)), fm.flush(b(warp)))))
    return lambda warp: write(warp, function(a(warp), b(warp)))


@opcode(r"fma\.rn\.f32|fma\.contracted\.f32\.(pp|pn|np)")
def fused(c, i, m):
    """fma.rn, and what `contraction` makes of a mul and an add or sub: a b + c, a b - c or c - a b."""
    write, a, b, add = _operands(c, i, F32, 3)
    if m[1] == "pn":
        return lambda warp: write(warp, fm.fma(a(warp), b(warp), -add(warp)))
    if m[1] == "np":
        return lambda warp: write(warp, fm.fma(-a(warp), b(warp), add(warp)))
    return lambda warp: write(warp, fm.fma(a(warp), b(warp), add(warp)))


@opcode(r"div\.rn\.f32")
def divide(c, i, m):
    write, a, b = _operands(c, i, F32)
    return lambda warp: write(warp, np.divide(a(warp), b(warp)))


@opcode(r"(max|min)\.f32")
def float_extreme(c, i, m):
    """Of two values, or of three, which sm_100 has."""
    write, a, b, *third = _operands(c, i, F32, len(i.operands) - 1)
    function = fm.maximum if m[1] == "max" else fm.minimum
    if third:
        (d,) = third
        return lambda warp: write(warp, function(function(a(warp), b(warp)), d(warp)))
    return lambda warp: write(warp, function(a(warp), b(warp)))


@opcode(r"(max|min)\.(bf16|f16)x2")
def packed_extreme(c, i, m):
    write, a, b = _operands(c, i, U32)
    function = fm.maximum if m[1] == "max" else fm.minimum
    decode, encode = (fm.from_bf16, fm.to_bf16) if m[2] == "bf16" else (fm.from_f16, fm.to_f16)

    def execute(warp):
        halves = (decode(np.ascontiguousarray(x(warp)).view(U16)) for x in (a, b))
        write(warp, encode(function(*halves)).view(U32))

    return execute


@opcode(r"(ex2|rcp)\.approx(\.ftz)?\.f32")
def approximate(c, i, m):
    """Correctly rounded, then moved by the launch's `approximation`, as hardware is only accurate to 2 ulps."""
    write, x = _operands(c, i, F32, 1)
    function = np.exp2 if m[1] == "ex2" else np.reciprocal
    ulps, ftz = c.approximation, m[2] is not None

    def execute(warp):
        value = x(warp)
        exact = function((fm.flush(value) if ftz else value).astype(F64)).astype(F32)
        result = fm.move_ulps(exact, ulps)
        write(warp, fm.flush(result) if ftz else result)

    return execute


@opcode(r"(neg|abs)\.(f32|s16|s32|s64)")
def unary(c, i, m):
    write, x = _operands(c, i, TYPES[m[2]], 1)
    function = np.negative if m[1] == "neg" else np.abs
    return lambda warp: write(warp, function(x(warp)))


@opcode(rf"(add|sub|min|max)\.{_INTEGER}")
def integer_binary(c, i, m):
    write, a, b = _operands(c, i, TYPES[m[2]])
    function = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}[m[1]]
    return lambda warp: write(warp, function(a(warp), b(warp)))


@opcode(r"(mul|mad)\.(lo|wide)\.(s16|u16|s32|u32|s64|u64)")
def integer_multiply(c, i, m):
    narrow = TYPES[m[3]]
    wide = np.dtype(f"{narrow.kind}{2 * narrow.itemsize}") if m[2] == "wide" else narrow
    write, a, b = _operands(c, i, narrow)
    if m[1] == "mul":
        return lambda warp: write(warp, a(warp).astype(wide) * b(warp).astype(wide))
    add = c.read(i, i.operands[3], wide)
    return lambda warp: write(warp, a(warp).astype(wide) * b(warp).astype(wide) + add(warp))


@opcode(r"mul\.hi\.(s32|u32)")
def multiply_high(c, i, m):
    write, a, b = _operands(c, i, TYPES[m[1]])
    wide = S64 if m[1] == "s32" else U64
    return lambda warp: write(warp, (a(warp).astype(wide) * b(warp).astype(wide) >> wide.type(32)).astype(TYPES[m[1]]))


@opcode(r"(div|rem)\.(s32|u32|s64|u64)")
def integer_divide(c, i, m):
    """Towards zero. The result of a division by zero is not specified, so it is an error."""
    kind = TYPES[m[2]]
    write, a, b = _operands(c, i, kind)

    def execute(warp):
        x, y = a(warp), b(warp)
        if (y[warp.active()] == 0).any():
            raise Fault("an integer division by zero")
        y = np.where(y == 0, kind.type(1), y)
        remainder = np.fmod(x, y)
        write(warp, ((x - remainder) // y if m[1] == "div" else remainder).astype(kind))

    return execute


@opcode(r"(and|or|xor)\.(pred|b16|b32|b64)")
def logic(c, i, m):
    write, a, b = _operands(c, i, TYPES[m[2]])
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[m[1]]
    return lambda warp: write(warp, function(a(warp), b(warp)))


@opcode(r"not\.(pred|b16|b32|b64)")
def invert(c, i, m):
    write, x = _operands(c, i, TYPES[m[1]], 1)
    return lambda warp: write(warp, ~x(warp))


@opcode(r"(shl|shr)\.(b16|b32|b64|u16|u32|u64|s16|s32|s64)")
def shift(c, i, m):
    """Shifts of the width or more give 0, or the sign for an arithmetic right shift."""
    kind = TYPES[m[2]]
    bits = 8 * kind.itemsize
    write, x = _operands(c, i, kind, 1)
    left, literal = m[1] == "shl", c.constant(i.operands[2])
    if literal is not None and 0 <= literal < bits:
        function, by = np.left_shift if left else np.right_shift, kind.type(literal)
        return lambda warp: write(warp, function(x(warp), by))
    amount = c.read(i, i.operands[2], U32)

    def execute(warp):
        value, by = x(warp), amount(warp)
        near = np.minimum(by, bits - 1).astype(kind)
        result = value << near if left else value >> near
        beyond = by >= bits
        if beyond.any():
            result = np.where(beyond, value >> kind.type(bits - 1) if kind.kind == "i" and not left else 0, result)
        write(warp, result.astype(kind))

    return execute


@opcode(r"bfe\.u32")
def extract_bits(c, i, m):
    write, x, start, length = _operands(c, i, U32, 3)
    byte = np.uint32(255)

    def execute(warp):
        mask = (np.uint64(1) << (length(warp) & byte).astype(U64)) - np.uint64(1)
        write(warp, ((x(warp).astype(U64) >> (start(warp) & byte).astype(U64)) & mask).astype(U32))

    return execute


@opcode(r"(popc|clz|brev)\.b32")
def count_bits(c, i, m):
    write, x = _operands(c, i, U32, 1)

    def execute(warp):
        bits = np.unpackbits(np.ascontiguousarray(x(warp)).view(U8).reshape(32, 4), axis=1, bitorder="little")
        if m[1] == "popc":
            result = bits.sum(1)
        elif m[1] == "clz":
            result = np.where(bits.any(1), bits[:, ::-1].argmax(1), 32)
        else:
            result = np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(U32).reshape(32)
        write(warp, result.astype(U32))

    return execute


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@opcode(r"setp\.(eq|lt|le|gt|ge)u\.f32")
def compare_unordered(c, i, m):
    """True as well when either operand is a NaN."""
    write, a, b = _operands(c, i, F32)
    function = _COMPARE[m[1]]

    def execute(warp):
        x, y = a(warp), b(warp)
        write(warp, function(x, y) | np.isnan(x) | np.isnan(y))

    return execute


@opcode(r"setp\.(eq|ne|lt|le|gt|ge)(?:\.(and|or))?\.(b32|s16|u16|s32|u32|b64|s64|u64)|setp\.(eq|lt|le|gt|ge)\.(f32)")
def compare(c, i, m):
    """setp; with .and or .or the comparison is combined with a further predicate. setp.ne.f32 is false for NaN, which
    numpy's is not, and therefore not modelled."""
    write, a, b = _operands(c, i, TYPES[m[3] or m[5]])
    function = _COMPARE[m[1] or m[4]]
    if not m[2]:
        return lambda warp: write(warp, function(a(warp), b(warp)))
    other, combine = c.read(i, i.operands[3], B1), np.bitwise_and if m[2] == "and" else np.bitwise_or
    return lambda warp: write(warp, combine(function(a(warp), b(warp)), other(warp)))


@opcode(r"selp\.(b16|b32|s32|u32|b64|f32)")
def select(c, i, m):
    write, a, b = _operands(c, i, TYPES[m[1]])
    which = c.read(i, i.operands[3], B1)
    return lambda warp: write(warp, np.where(which(warp), a(warp), b(warp)))


@opcode(r"prmt\.b32")
def permute_bytes(c, i, m):
    """Byte n of the result is byte (selector nibble n) of the two sources; its sign spread over it if bit 3 is set."""
    write, a, b, selector = _operands(c, i, U32, 3)
    shifts = 4 * np.arange(4, dtype=U32)

    def execute(warp):
        source = np.stack([a(warp), b(warp)], 1).view(U8)
        nibble = (selector(warp)[:, None] >> shifts) & np.uint32(15)
        chosen = np.take_along_axis(source, (nibble & np.uint32(7)).astype(S64), 1)
        signs = np.where(chosen & 128, 255, 0)
        write(warp, np.where(nibble & np.uint32(8), signs, chosen).astype(U8).view(U32).reshape(-1))

    return execute
