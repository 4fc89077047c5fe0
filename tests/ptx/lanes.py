"""Exchange between the lanes of a warp: shfl, vote, match, redux, elect. All of them need the whole warp."""

from __future__ import annotations

import numpy as np

from .formats import B1, S32, S64, U32
from .machine import LANES, Fault
from .operands import opcode

_ALL = 0xFFFFFFFF
_LANE = LANES.astype(S64)


def _members(c, i, name):
    """Reads a membermask and faults unless it names the whole warp, which must be here."""
    read = c.read(i, name, U32)

    def check(warp):
        warp.require_converged(i.opcode)
        if (read(warp) != _ALL).any():
            raise Fault("a membermask of less than the whole warp is not modelled")

    return check


def _pair(c, i):
    """Closures of a `d|p` destination; the predicate may be left out."""
    names = i.operands[0].split("|")
    return c.write(i, names[0].strip()), c.write(i, names[1].strip()) if len(names) > 1 else None


@opcode(r"shfl\.sync\.(idx|bfly|up|down)\.b32")
def shuffle(c, i, m):
    """c holds the clamp in bits 0..4 and the segment mask in bits 8..12; out of range lanes keep their own value."""
    write, write_predicate = _pair(c, i)
    value, lane, clamp = (c.read(i, name, U32) for name in i.operands[1:4])
    members, mode = _members(c, i, i.operands[4]), m[1]

    def sources(by, control):
        """The lane that each lane reads, and whether that is inside its segment."""
        by, control = (by & np.uint32(31)).astype(S64), control.astype(S64)
        segment = (control >> 8) & 31
        limit = (_LANE & segment) | (control & 31 & ~segment)
        if mode == "idx":
            source = (_LANE & segment) | (by & ~segment)
        else:
            source = {"bfly": _LANE ^ by, "up": _LANE - by, "down": _LANE + by}[mode]
        inside = source >= limit if mode == "up" else source <= limit
        return np.where(inside, source, _LANE), inside

    literals = [c.constant(name) for name in i.operands[2:4]]
    known = None if None in literals else sources(*(np.full(32, x & _ALL, U32) for x in literals))

    if c.lanes > 32:
        assert known is not None
        among = (known[0] + np.arange(0, c.lanes, 32)[:, None]).ravel()
        return lambda warp: write(warp, value(warp)[among])

    def execute(warp):
        members(warp)
        source, inside = known or sources(lane(warp), clamp(warp))
        write(warp, value(warp)[source])
        if write_predicate:
            write_predicate(warp, inside)

    return execute


@opcode(r"vote\.sync\.ballot\.b32")
def ballot(c, i, m):
    write, predicate = c.write(i, i.operands[0]), c.read(i, i.operands[1], B1)
    members = _members(c, i, i.operands[2])

    def execute(warp):
        members(warp)
        bits = np.packbits(predicate(warp), bitorder="little").view(U32)
        write(warp, np.full(32, bits[0], U32))

    return execute


@opcode(r"vote\.sync\.(any|all)\.pred")
def vote(c, i, m):
    """Whether the predicate holds in any lane, or in all of them."""
    write, predicate = c.write(i, i.operands[0]), c.read(i, i.operands[1], B1)
    members, function = _members(c, i, i.operands[2]), np.any if m[1] == "any" else np.all

    def execute(warp):
        members(warp)
        write(warp, np.full(32, function(predicate(warp))))

    return execute


@opcode(r"match\.any\.sync\.b32")
def match_any(c, i, m):
    """The lanes that hold the same value as this one, as a mask."""
    write, value = c.write(i, i.operands[0]), c.read(i, i.operands[1], U32)
    members = _members(c, i, i.operands[2])

    def execute(warp):
        members(warp)
        x = value(warp)
        write(warp, np.packbits(x[:, None] == x[None, :], axis=1, bitorder="little").view(U32).reshape(32))

    return execute


@opcode(r"redux\.sync\.(max|min|add)\.(s32|u32)")
def reduce(c, i, m):
    kind = S32 if m[2] == "s32" else U32
    write, value = c.write(i, i.operands[0]), c.read(i, i.operands[1], kind)
    members, function = _members(c, i, i.operands[2]), {"max": np.max, "min": np.min, "add": np.sum}[m[1]]

    def execute(warp):
        members(warp)
        write(warp, np.full(32, function(value(warp)), kind))

    return execute


@opcode(r"elect\.sync")
def elect(c, i, m):
    """The lowest lane is elected; PTX leaves the choice open."""
    write, write_predicate = _pair(c, i)
    members = _members(c, i, i.operands[1])

    def execute(warp):
        members(warp)
        write(warp, np.zeros(32, U32))
        write_predicate(warp, LANES == 0)

    return execute


@opcode(r"bar\.warp\.sync")
def sync_warp(c, i, m):
    """Orders the warp's own lanes, which run in lockstep here: only the membership is checked."""
    members = _members(c, i, i.operands[0])

    def execute(warp):
        members(warp)

    return execute
