"""Machines that nobody here owns, as NVIDIA's driver library and the rest of the system would show them."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

GIB = 1 << 30


class FakeCard(NamedTuple):
    """What the driver tells about one card."""

    name: str
    capability: tuple[int, int]
    memory: int


V100 = FakeCard("Tesla V100-SXM2-16GB", (7, 0), 16 * GIB)
T4 = FakeCard("Tesla T4", (7, 5), 15 * GIB)
A100 = FakeCard("NVIDIA A100-SXM4-80GB", (8, 0), 80 * GIB)
RTX_3090 = FakeCard("NVIDIA GeForce RTX 3090", (8, 6), 24 * GIB)
RTX_4090 = FakeCard("NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB)
H200 = FakeCard("NVIDIA H200", (9, 0), 140 * GIB)
B200 = FakeCard("NVIDIA B200", (10, 0), 179 * GIB)
B300 = FakeCard("NVIDIA B300", (10, 3), 268 * GIB)
RTX_5090 = FakeCard("NVIDIA GeForce RTX 5090", (12, 0), 32 * GIB)
GB10 = FakeCard("NVIDIA GB10", (12, 1), 119 * GIB)
NEXT_YEAR = FakeCard("NVIDIA GeForce RTX 6090", (13, 0), 48 * GIB)

#: Name of a machine -> its NVIDIA cards. AMD, Apple and CPU machines have none.
MACHINES: dict[str, tuple[FakeCard, ...]] = {
    "7.0": (V100,),
    "7.5": (T4,),
    "8.0": (A100,),
    "8.6": (RTX_3090,),
    "8.9": (RTX_4090,),
    "9.0": (H200,),
    "10.0": (B200,),
    "10.3": (B300,),
    "12.0": (RTX_5090,),
    "12.1": (GB10,),
    "13.0": (NEXT_YEAR,),
    "two-different": (RTX_5090, RTX_3090),
    "two-equal": (H200, H200),
    "two-families": (H200, RTX_5090),
    "amd": (),
    "apple": (),
    "cpu": (),
}
#: (name, vendor) of what such a machine has instead.
OTHERS = {"amd": ("AMD Radeon RX 7900 XTX", "amd"), "apple": ("Apple silicon GPU", "apple")}


class FakeDriver:
    """Answers the calls of `kernels/detect.py` as libcuda does: through pointers, with a status as the result."""

    def __init__(self, cards: tuple[FakeCard, ...], version: int = 13000, status: int = 0) -> None:
        self.cards = cards
        self.version = version
        self.status = status

    def cuInit(self, flags: int) -> int:  # noqa: N802 - the driver's own names
        return self.status

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.cards)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:  # noqa: N802
        name.value = self.cards[device.value].name.encode()[: size - 1]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:  # noqa: N802
        value._obj.value = self.cards[device.value].capability[{75: 0, 76: 1}[attribute]]
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: ctypes.c_int) -> int:  # noqa: N802
        size._obj.value = self.cards[device.value].memory
        return 0


def look(detect: Any, machine: str) -> tuple[Any, tuple[Any, ...]]:
    """(driver, other cards) of a machine, as `detect` (the module kernels/detect.py) finds them."""
    cards = MACHINES[machine]
    if cards:
        return detect.nvidia(lambda name: FakeDriver(cards)), ()

    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    other = OTHERS.get(machine)
    return detect.nvidia(absent, "linux"), (detect.Card(*other),) if other else ()
