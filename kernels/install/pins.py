"""The wheels that this version of the pack pins in `kernels/wheels.json`, and where they are released."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ..families import FAMILIES, arch_of, wheel_name
from .trouble import Trouble, reading_failed

SCHEMA = 1
#: Cubins of all kernels of a family take a few megabytes; nothing near this is ever pinned, or held in memory.
LARGEST = 256 << 20


@dataclass(frozen=True)
class Wheel:
    """One pinned wheel. size: bytes; archs: the architectures whose kernels it holds."""

    family: str
    file: str
    size: int
    sha256: str
    archs: tuple[str, ...]

    @property
    def build(self) -> str:
        """Name of the folder that it is unpacked into."""
        return self.sha256[:12]


@dataclass(frozen=True)
class Pins:
    """Every pinned wheel, of one version of the pack; none before the first release."""

    version: str = ""
    wheels: tuple[Wheel, ...] = ()

    def wheel_for(self, capability: tuple[int, int] | None) -> Wheel | None:
        """The wheel with kernels for cards of a compute capability; None when none is released."""
        arch = arch_of(capability) if capability else None
        return next((wheel for wheel in self.wheels if arch in wheel.archs), None)

    def of_family(self, family: str) -> Wheel | None:
        """The wheel of a family of cards; None when none is released."""
        return next((wheel for wheel in self.wheels if wheel.family == family), None)

    @property
    def archs(self) -> frozenset[str]:
        """The architectures whose kernels are released."""
        return frozenset(arch for wheel in self.wheels for arch in wheel.archs)


def read_pins(kernels: Path) -> Pins:
    """What `wheels.json` in the folder `kernels` pins. Raises Trouble when it is damaged."""
    path = kernels / "wheels.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["version"]
        wheels = tuple(_wheel(entry, version) for entry in data["wheels"])
        if data["schema"] != SCHEMA or len({wheel.family for wheel in wheels}) != len(wheels):
            raise ValueError
    except FileNotFoundError:
        return Pins()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Trouble(f"{path} is {reading_failed(error)}.", "Reinstall or update the pack.") from error
    return Pins(version, wheels)


def _wheel(entry: dict, version: str) -> Wheel:
    wheel = Wheel(entry["family"], entry["file"], entry["size"], entry["sha256"], tuple(entry["archs"]))
    sound = (
        wheel.file == wheel_name(wheel.family, version)
        and re.fullmatch(r"[\w.+]+", version) is not None
        and re.fullmatch(r"[0-9a-f]{64}", wheel.sha256) is not None
        and isinstance(wheel.size, int)
        and 0 < wheel.size <= LARGEST
        and wheel.archs
        and set(wheel.archs) <= set(FAMILIES[wheel.family])
    )
    if not sound:
        raise ValueError(wheel.file)
    return wheel


def release_address(pack: Path, version: str) -> str:
    """Where the release `version` of the pack keeps its files, ending in a slash; empty when no repository is named."""
    try:
        text = (pack / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return ""
    # Python 3.10 has no reader of TOML
    section = re.search(r"^\[project\.urls\]\s*$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    found = section and re.search(r'^Repository\s*=\s*"(https?://[^"\s]+)"', section[1], re.MULTILINE)
    if not found:
        return ""
    return f"{found[1].rstrip('/').removesuffix('.git')}/releases/download/v{version}/"
