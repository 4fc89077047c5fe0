"""manifest.json beside the cubins: what is there, for which card, and how each kernel is launched."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from ..reasons import Reason
from .abi import ABI

SCHEMA = 1
_REINSTALL = "Reinstall the pack's kernels."


@dataclass(frozen=True)
class KernelEntry:
    """One kernel: `params` are (offset, size) in bytes, in the order of `arguments`; shared is dynamic, in bytes;
    cluster: blocks along x that the launch must bind together.
    """

    name: str
    file: str
    sha256: str
    symbol: str
    arguments: tuple[str, ...]
    params: tuple[tuple[int, int], ...]
    block: tuple[int, int, int]
    shared: int
    registers: int
    cluster: int = 1


@dataclass(frozen=True)
class Manifest:
    """The kernels of one architecture in `folder`. source: hash of their sources. build: of the manifest itself, which
    holds the hash of every cubin.
    """

    folder: Path
    arch: str
    package: str
    source: str
    build: str
    kernels: dict[str, KernelEntry]

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability that the cubins need: sm_90a -> (9, 0)."""
        digits = re.sub(r"\D", "", self.arch)
        return int(digits[:-1]), int(digits[-1])


def read_manifest(folder: Path) -> Manifest | Reason:
    """The manifest in `folder`, or why it cannot be used."""
    path = folder / "manifest.json"
    if not path.is_file():
        return Reason("kernels_damaged", f"There is no manifest.json in {folder}. {_REINSTALL}")
    try:
        text = path.read_bytes()
        data = json.loads(text)
        if data["schema"] != SCHEMA or data["abi"] != ABI:
            return Reason(
                "kernels_version",
                f"The installed kernels are of another version of VC-Attention ({data.get('package')}). {_REINSTALL}",
            )
        kernels = {
            k["name"]: KernelEntry(
                k["name"],
                k["file"],
                k["sha256"],
                k["symbol"],
                tuple(k["arguments"]),
                tuple((offset, size) for offset, size in k["params"]),
                tuple(k["block"]),
                k["shared"],
                k["registers"],
                k.get("cluster", 1),
            )
            for k in data["kernels"]
        }
        build = hashlib.sha256(text).hexdigest()
        manifest = Manifest(folder, data["arch"], data["package"], data["source"], build, kernels)
        _ = manifest.capability  # an arch that is no arch is damage, too
        return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return Reason("kernels_damaged", f"{path} cannot be read ({type(error).__name__}). {_REINSTALL}")


def read_cubin(manifest: Manifest, entry: KernelEntry) -> bytes | Reason:
    """The bytes of one cubin, checked against the manifest."""
    path = manifest.folder / entry.file
    try:
        data = path.read_bytes()
    except OSError as error:
        return Reason("kernels_damaged", f"{path} cannot be read ({type(error).__name__}). {_REINSTALL}")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        return Reason("kernels_damaged", f"{path} is not the file that was built (its hash differs). {_REINSTALL}")
    return data
