"""What graphics cards this machine has, asked from the drivers through ctypes: works before torch can be imported.

Standard library only and no relative imports: `install.py` loads this file by its path.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
#: Oldest CUDA that a driver must serve for prebuilt kernels to be checked and launched.
OLDEST_CUDA = (12, 4)
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_PCI_VENDORS = {"0x1002": ("amd", "an AMD GPU"), "0x8086": ("intel", "an Intel GPU")}
_WINDOWS_DISPLAY_CLASS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"


@dataclass(frozen=True)
class Card:
    """One card. capability: CUDA compute capability; memory: bytes; both None where the driver does not say."""

    name: str
    vendor: str
    capability: tuple[int, int] | None = None
    memory: int | None = None


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver. `cuda`: newest CUDA it serves, (major, minor); None without one. `problem`: why no card."""

    cuda: tuple[int, int] | None
    cards: tuple[Card, ...]
    problem: str = ""


def library_name(system: str = sys.platform) -> str:
    """File name of NVIDIA's driver library."""
    return "nvcuda.dll" if system == "win32" else "libcuda.so.1"


def nvidia(load: Callable[[str], Any] = ctypes.CDLL, system: str = sys.platform) -> Driver:
    """NVIDIA's cards, in the driver's order. Never raises: what is missing is said in `problem`.

    load: opens a library by name (a seam for tests).
    """
    try:
        library = load(library_name(system))
    except OSError:
        return Driver(None, (), f"There is no NVIDIA driver on this machine ({library_name(system)} was not found).")
    try:
        return _ask(library)
    except (AttributeError, ValueError, ctypes.ArgumentError) as error:
        return Driver(None, (), f"The NVIDIA driver library does not answer as expected ({error}).")


def _ask(library: Any) -> Driver:
    status = library.cuInit(0)
    version = ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    cuda = (version.value // 1000, version.value % 1000 // 10) if version.value else None
    if status == _NO_DEVICE:
        return Driver(cuda, (), "An NVIDIA driver is installed, but it shows no card to this program.")
    if status:
        return Driver(cuda, (), f"The NVIDIA driver did not start (error {status}); restarting the machine may help.")
    count = ctypes.c_int(0)
    library.cuDeviceGetCount(ctypes.byref(count))
    cards = tuple(_card(library, index) for index in range(count.value))
    return Driver(cuda, cards, "" if cards else "An NVIDIA driver is installed, but it shows no card to this program.")


def _card(library: Any, index: int) -> Card:
    device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    memory = ctypes.c_size_t(0)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    library.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    text = name.value.decode("utf-8", "replace") or "an NVIDIA GPU"
    return Card(text, "nvidia", (major.value, minor.value), memory.value or None)


def other_cards(
    system: str = sys.platform, machine: str | None = None, devices: Path = Path("/sys/class/drm")
) -> tuple[Card, ...]:
    """Cards of other makers, as far as the system names them without extra programs."""
    if system == "darwin":
        apple = (machine or platform.machine()) == "arm64"
        return (Card("Apple silicon GPU", "apple"),) if apple else ()
    if system == "win32":
        return _windows_cards()
    cards = []
    for entry in sorted(devices.glob("card[0-9]*")):
        if "-" in entry.name:
            continue  # a connector of a card, not a card
        vendor, name = _PCI_VENDORS.get(_read(entry / "device" / "vendor"), ("", ""))
        if vendor:
            cards.append(Card(_read(entry / "device" / "product_name") or name, vendor))
    return tuple(cards)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _windows_cards() -> tuple[Card, ...]:
    """AMD and Intel cards by the names of their installed display drivers."""
    if sys.platform != "win32":
        return ()
    import winreg

    cards = []
    for index in range(16):
        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, rf"{_WINDOWS_DISPLAY_CLASS}\{index:04d}") as key:
                name = str(winreg.QueryValueEx(key, "DriverDesc")[0])
        except OSError:
            continue
        for word, vendor in (("AMD", "amd"), ("Radeon", "amd"), ("Intel", "intel")):
            if word in name:
                cards.append(Card(name, vendor))
                break
    return tuple(cards)


def cards_here(driver: Driver | None = None, others: tuple[Card, ...] | None = None) -> tuple[Card, ...]:
    """The cards that decide what runs: NVIDIA's, else those of other makers, else the CPU as the only one."""
    driver = nvidia() if driver is None else driver
    if driver.cards:
        return driver.cards
    others = other_cards() if others is None else others
    return others or (Card("This machine (no GPU found)", "cpu"),)
