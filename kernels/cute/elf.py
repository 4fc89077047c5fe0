"""Facts that a cubin states about its kernel: name, parameters, block size, registers. Plain ELF64 reading."""

from __future__ import annotations

import struct
from dataclasses import dataclass

# Attributes of the .nv.info.<kernel> section, as `readelf` of any cubin shows them.
_FORMAT_SIZED = 0x04
_REQUIRED_THREADS = 0x10
_PARAMETER = 0x17
_REGISTER_COUNT = 0x2F


@dataclass(frozen=True)
class CubinFacts:
    """symbol: the kernel's name. params: (offset, size) of each parameter in bytes. block: threads in x, y, z.
    registers: of a thread at launch."""

    symbol: str
    params: tuple[tuple[int, int], ...]
    block: tuple[int, int, int]
    registers: int


def read_cubin(data: bytes) -> CubinFacts:
    """Facts of the one kernel in the cubin `data`. Raises ValueError if it is no cubin or holds several kernels."""
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("The compiler's output is not a 64-bit ELF file.")
    table, size, count, names = struct.unpack_from("<Q10xHHH", data, 40)
    sections = [struct.unpack_from("<IIQQQQII", data, table + i * size) for i in range(count)]
    strings = sections[names][4]
    named = {}
    for section in sections:
        start = strings + section[0]
        named[data[start : data.index(b"\0", start)].decode()] = section
    kernels = [name[len(".text.") :] for name in named if name.startswith(".text.")]
    if len(kernels) != 1:
        raise ValueError(f"A cubin must hold one kernel; this one holds {len(kernels)}.")
    symbol = kernels[0]
    info = named[f".nv.info.{symbol}"]
    params, block = {}, (0, 0, 0)
    position, end = info[4], info[4] + info[5]
    while position < end:
        form, attribute, length = struct.unpack_from("<BBH", data, position)
        position += 4
        if form != _FORMAT_SIZED:
            continue
        if attribute == _PARAMETER:
            _, ordinal, offset, flags = struct.unpack_from("<IHHI", data, position)
            params[ordinal] = (offset, flags >> 18)
        elif attribute == _REQUIRED_THREADS:
            block = struct.unpack_from("<III", data, position)
        position += length
    return CubinFacts(symbol, tuple(params[i] for i in sorted(params)), block, _registers(data, named, symbol))


def _registers(data: bytes, named: dict, symbol: str) -> int:
    """Newer cubins state the count in .nv.info, one entry a function; older ones in the code section's header."""
    section = named[".nv.info"]
    position, end, largest = section[4], section[4] + section[5], 0
    while position < end:
        form, attribute, length = struct.unpack_from("<BBH", data, position)
        position += 4
        if form != _FORMAT_SIZED:
            continue
        if attribute == _REGISTER_COUNT:
            largest = max(largest, struct.unpack_from("<II", data, position)[1])
        position += length
    return largest or named[f".text.{symbol}"][7] >> 24
