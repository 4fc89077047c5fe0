"""The wheel of one family of cards, packed from compiled kernels, and the file that pins the wheels of a version."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .messages import ToolError
from .wheel_file import Project, wheel_bytes

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
LICENCE = "Apache-2.0"
#: What every architecture of a wheel must have in common, as its manifest says it.
_COMMON = ("package", "abi", "source", "compiler", "nvvm", "ptxas")


@dataclass(frozen=True)
class Wheel:
    """One packed wheel. source: hash of the kernel sources. compiler: name and version."""

    family: str
    file: str
    data: bytes
    archs: tuple[str, ...]
    version: str
    source: str
    compiler: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def pin(self) -> dict[str, Any]:
        """The entry of this wheel in wheels.json."""
        return {
            "family": self.family,
            "file": self.file,
            "size": len(self.data),
            "sha256": self.sha256,
            "archs": list(self.archs),
            "source": self.source,
            "compiler": self.compiler,
        }


def load_by_path(name: str) -> ModuleType:
    """A torch-free module of `kernels`, by its file: importing the package would need torch."""
    full_name = f"_vc_attention_wheels_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, ROOT / "kernels" / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ToolError(f"kernels/{name}.py is missing: this checkout is not complete.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[full_name] = module
    return sys.modules[full_name]


def version_here() -> str:
    """The pack's version, in pyproject.toml."""
    return _of_pyproject("version")


def pack(family: str, folders: Mapping[str, Path]) -> Wheel:
    """The wheel of `family` from folders of cubins and manifest.json, by architecture.

    Raises ToolError when a folder is not a complete build of its architecture, or the builds do not belong together.
    """
    families = load_by_path("families")
    package = families.package_name(family)
    archs = tuple(arch for arch in families.FAMILIES[family] if arch in folders)
    manifests = {arch: _manifest(arch, folders[arch]) for arch in archs}
    first = manifests[archs[0]]
    for arch in archs:
        for key in _COMMON:
            if manifests[arch][key] != first[key]:
                raise ToolError(
                    f"The kernels of {archs[0]} and {arch} are not of one build: their {key} differs "
                    f"({first[key]} and {manifests[arch][key]}). Build both again."
                )
    provenance = {
        "schema": SCHEMA,
        "family": family,
        "version": first["package"],
        "source": first["source"],
        "compiler": first["compiler"],
        "nvvm": first["nvvm"],
        "ptxas": first["ptxas"],
        "abi": first["abi"],
        "archs": list(archs),
    }
    files = {
        f"{package}/__init__.py": f'"""Kernels of VC-Attention for {family} cards; data only."""\n'.encode(),
        f"{package}/provenance.json": _json(provenance),
    }
    for arch in archs:
        files[f"{package}/{arch}/manifest.json"] = (folders[arch] / "manifest.json").read_bytes()
        for name in (kernel["file"] for kernel in manifests[arch]["kernels"]):
            files[f"{package}/{arch}/{name}"] = (folders[arch] / name).read_bytes()
    project = Project(
        name=package.replace("_", "-"),
        version=first["package"],
        summary=f"Compiled attention kernels of VC-Attention for {family} cards",
        description=(
            f"The GPU code of VC-Attention for ComfyUI on {family} cards ({', '.join(archs)}), for every operating\n"
            "system, Python and torch. The pack's install.py unpacks it; pip can install it instead. It holds data\n"
            "only. provenance.json names the sources and the compiler that it was made from."
        ),
        licence=LICENCE,
        repository=_of_pyproject("Repository"),
        requires_python=_of_pyproject("requires-python"),
    )
    licence_text = (ROOT / "LICENSE").read_bytes().replace(b"\r\n", b"\n")
    data = wheel_bytes(project, files, licence_text)
    file = families.wheel_name(family, project.version)
    return Wheel(family, file, data, archs, project.version, first["source"], first["compiler"])


def read_pinned(path: Path) -> dict[str, Any] | None:
    """What wheels.json says; None when there is none yet. ToolError when it cannot be read."""
    if not path.exists():
        return None
    try:
        pinned = json.loads(path.read_text(encoding="utf-8"))
        if pinned["schema"] != SCHEMA:
            raise ValueError(f"its schema is {pinned['schema']}")
        [(wheel["family"], wheel["file"], wheel["size"], wheel["sha256"], wheel["archs"]) for wheel in pinned["wheels"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Take it from git again, or make it anew with "
            "python3 run.py wheels --write."
        ) from error
    return pinned


def write_pinned(path: Path, wheels: Sequence[Wheel]) -> None:
    """Make wheels.json name exactly these wheels."""
    content = {"schema": SCHEMA, "version": version_here(), "wheels": [wheel.pin() for wheel in wheels]}
    part = path.with_name(path.name + ".part")
    part.write_bytes(_json(content))
    part.replace(path)


def differences(pinned: Mapping[str, Any] | None, wheels: Sequence[Wheel], complete: bool = True) -> list[str]:
    """What distinguishes the built `wheels` from the `pinned` ones, a sentence each; empty when nothing does.

    complete: `wheels` are all that can be built, so a pinned one that is not among them is a difference.
    """
    if pinned is None:
        return ["kernels/wheels.json does not exist."]
    found = []
    if pinned.get("version") != version_here():
        found.append(f"The pinned version is {pinned.get('version')}, and pyproject.toml states {version_here()}.")
    entries = {entry["family"]: entry for entry in pinned["wheels"]}
    for wheel in wheels:
        entry = entries.pop(wheel.family, None)
        found += [f"{wheel.family}: no wheel is pinned."] if entry is None else _between(entry, wheel)
    if complete:
        found += [f"{family}: a wheel is pinned, and there are no kernels for it." for family in entries]
    return found


def _between(entry: Mapping[str, Any], wheel: Wheel) -> list[str]:
    """As `differences`, of one wheel; the causes stand before the hash that they explain."""
    built = wheel.pin()
    words = {
        "source": "the sources of the kernels are not those of the pinned wheel",
        "compiler": "the compiler is not that of the pinned wheel",
        "archs": "the architectures are not those of the pinned wheel",
        "file": "the file name is not the pinned one",
        "size": "the size is not the pinned one",
        "sha256": "the sha256 is not the pinned one",
    }
    return [
        f"{wheel.family}: {text} ({_plain(entry.get(key))} pinned, {_plain(built[key])} built)."
        for key, text in words.items()
        if entry.get(key) != built[key]
    ]


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _manifest(arch: str, folder: Path) -> dict[str, Any]:
    """The manifest of a build, after every file that it names was found to be what it says."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        missing = [key for key in (*_COMMON, "kernels") if key not in manifest]
        if missing or manifest["arch"] != arch or not manifest["kernels"]:
            lacking = ", ".join(missing) or f"a kernel of {arch}"
            raise ToolError(f"{folder} holds no build of {arch} that can be packed: its manifest lacks {lacking}.")
        for kernel in manifest["kernels"]:
            data = (folder / kernel["file"]).read_bytes()
            if hashlib.sha256(data).hexdigest() != kernel["sha256"]:
                raise ToolError(f"{folder / kernel['file']} is not the file that was compiled: its hash differs.")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolError(
            f"The build of {arch} in {folder} is not complete ({type(error).__name__}: {error})."
        ) from error
    if manifest["package"] != version_here():
        raise ToolError(f"The build of {arch} is of version {manifest['package']}, not {version_here()}: build again.")
    return manifest


def _of_pyproject(key: str) -> str:
    """A plain string of pyproject.toml. (Python 3.10 has no TOML reader.)"""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'^{re.escape(key)} = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise ToolError(f"pyproject.toml states no {key}.")
    return found[1]


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
