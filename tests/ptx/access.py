"""Loads, stores and reductions of global, shared and parameter memory."""

from __future__ import annotations

import re

import numpy as np

from .formats import TYPES, U32, U64, UNSIGNED
from .machine import WINDOW_BITS, Fault
from .memory import differing_stores
from .operands import gather, opcode, vector
from .parser import PtxError

_TYPE = r"(b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64)"
#: Hints and orders that change nothing here: no caches are modelled, and accesses are checked for order instead.
_LOAD_HINTS = r"(?:\.weak|\.relaxed\.gpu|\.relaxed\.cta|\.volatile)?"
_CACHE_HINTS = r"(?:\.L1::no_allocate|\.L1::evict_last)?(?:\.L2::(?:64|128|256)B)?"


@opcode(rf"ld\.param\.{_TYPE}")
def load_parameter(c, i, m):
    kind = TYPES[m[1]]
    found = re.fullmatch(r"\[([\w$]+)\]", i.operands[1])
    types = dict(c.kernel.parameters)
    if found is None or found[1] not in types:
        raise PtxError(f"{i.operands[1]} is not a parameter")
    if TYPES[types[found[1]]].itemsize != kind.itemsize:
        raise PtxError(f"the parameter is of type {types[found[1]]}, and is read as {m[1]}")
    write, name, unsigned = c.write(i, i.operands[0]), found[1], UNSIGNED[kind.itemsize]
    return lambda warp: write(warp, np.full(32, warp.cta.cluster.launch.parameters[name], unsigned))


@opcode(rf"ld{_LOAD_HINTS}\.(global|shared(?:::cta)?)(?:\.nc)?{_CACHE_HINTS}(?:\.v(2|4))?\.{_TYPE}")
def load(c, i, m):
    kind, parts = TYPES[m[3]], int(m[2] or 1)
    unsigned, size = UNSIGNED[kind.itemsize], kind.itemsize * parts
    extend = "s" if kind.kind == "i" else "u"
    writes = [c.write(i, name, extend) for name in vector(i.operands[0])]
    if len(writes) != parts:
        raise PtxError(f"{parts} destinations are needed")
    is_shared = m[1] != "global"
    address = c.address(i, i.operands[1], U32 if is_shared else U64)

    def execute(warp):
        active = warp.active()
        addresses = address(warp)[active]
        if is_shared:
            shared = warp.cta.shared
            index, granules = shared.locate(addresses.astype(np.int64), size)
            shared.check_read(warp.agent, warp.clock[warp.agent], warp.clock, granules)
            values = shared.data[index]
        else:
            memory = warp.cta.cluster.memory
            buffer, index = memory.locate(addresses, size)
            values = memory.read(warp, buffer, index)
        values = np.ascontiguousarray(values).view(unsigned)
        if len(values) < 32:
            lanes = np.zeros((32, parts), unsigned)
            lanes[active] = values
            values = lanes
        for n, write in enumerate(writes):
            write(warp, values[:, n].copy())

    return execute


@opcode(rf"st{_LOAD_HINTS}\.(global|shared(?:::cta)?){_CACHE_HINTS}(?:\.v(2|4))?\.{_TYPE}")
def store(c, i, m):
    kind, parts = TYPES[m[3]], int(m[2] or 1)
    unsigned, size = UNSIGNED[kind.itemsize], kind.itemsize * parts
    reads = [c.read(i, name, unsigned, widen=True) for name in vector(i.operands[1])]
    if len(reads) != parts:
        raise PtxError(f"{parts} sources are needed")
    is_shared = m[1] != "global"
    address = c.address(i, i.operands[0], U32 if is_shared else U64)

    def execute(warp):
        active = warp.active()
        addresses = address(warp)[active]
        values = np.ascontiguousarray(gather(reads, warp).T)[active].view(np.uint8).reshape(-1, size)
        if is_shared:
            _store_shared(warp, addresses.astype(np.int64), values, size)
        else:
            memory = warp.cta.cluster.memory
            buffer, index = memory.locate(addresses, size)
            memory.write(warp, buffer, index, values)
            warp.cta.cluster.events += 1

    return execute


def _store_shared(warp, addresses, values, size, atomic=False):
    shared = warp.cta.shared
    index, granules = shared.locate(addresses, size)
    if not atomic and differing_stores(addresses, values):
        raise Fault("two lanes store different values to the same shared address")
    change = None if atomic else (index, values)
    shared.check_write(warp.agent, warp.clock[warp.agent], warp.clock, granules, True, atomic, change)
    shared.data[index] = values
    warp.cta.decoded.clear()
    warp.cta.cluster.events += 1


@opcode(r"red(?:\.relaxed)?(?:\.gpu|\.cta)?\.(global|shared(?:::cta)?)\.(add|max|min)\.(u32|s32)")
def reduction(c, i, m):
    """Lanes one after the other; atomic against every other red, and checked for order against plain accesses."""
    kind = TYPES[m[3]]
    is_shared = m[1] != "global"
    address = c.address(i, i.operands[0], U32 if is_shared else U64)
    operand = c.read(i, i.operands[1], kind)
    function = {"add": np.add, "max": np.maximum, "min": np.minimum}[m[2]]

    def execute(warp):
        active = warp.active()
        addresses, values = address(warp)[active], operand(warp)[active]
        unique, inverse = np.unique(addresses, return_inverse=True)
        cluster = warp.cta.cluster
        if is_shared:
            shared = warp.cta.shared
            index, granules = shared.locate(unique.astype(np.int64), 4)
            if shared.writer[granules].min() < 0:
                raise Fault("a reduction on shared memory that nobody has written")
            result = shared.data[index].view(kind).reshape(-1)
        else:
            buffer, index = cluster.memory.locate(unique, 4)
            if not buffer.written[index].all():
                raise Fault(f"a reduction on bytes of {buffer.name} that nobody has written")
            result = buffer.data[index].view(kind).reshape(-1)
        result = result.copy()
        function.at(result, inverse, values)
        raw = result.view(np.uint8).reshape(-1, 4)
        if is_shared:
            _store_shared(warp, unique.astype(np.int64), raw, 4, atomic=True)
        else:
            cluster.memory.write(warp, buffer, index, raw, atomic=True)
            cluster.events += 1

    return execute


@opcode(r"cvta(?:\.to)?\.(?:global|shared)\.u64")
def convert_address(c, i, m):
    """Generic addresses are not modelled; a global one is its own generic one."""
    if "shared" in i.opcode:
        raise PtxError("generic addresses of shared memory are not modelled")
    write, x = c.write(i, i.operands[0]), c.read(i, i.operands[1], U64)
    return lambda warp: write(warp, x(warp))


@opcode(r"mapa\.shared::cluster\.u32")
def map_address(c, i, m):
    """The shared::cluster address of a shared address in the CTA of a given rank."""
    write, x, rank = c.write(i, i.operands[0]), c.read(i, i.operands[1], U32), c.read(i, i.operands[2], U32)

    def execute(warp):
        local, ranks = x(warp) & np.uint32((1 << WINDOW_BITS) - 1), rank(warp)
        if (ranks[warp.active()] >= warp.cta.cluster.size).any():
            raise Fault(f"mapa to a CTA that the cluster of {warp.cta.cluster.size} does not have")
        write(warp, (ranks + np.uint32(1)) << np.uint32(WINDOW_BITS) | local)

    return execute
