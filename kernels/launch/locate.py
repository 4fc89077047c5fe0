"""Where the kernels of an architecture may lie, in the order in which they are tried. Looks, loads nothing.

1. `prebuilt/<arch>`: built by hand. 2. `prebuilt/<family>.json`: the pointer that install.py leaves for each wheel it
has unpacked. 3. A pip-installed package `vc_attention_kernels_<family>`; it is found, none of its code runs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..families import FAMILIES, package_name
from ..reasons import Reason

POINTER_SCHEMA = 1
_INSTALL_AGAIN = "Run install.py in the pack's folder once more."


@dataclass(frozen=True)
class Candidate:
    """A folder with a manifest and cubins. `what` names them in a sentence; `backend` is "cubin" or "cute"."""

    what: str
    folder: Path
    backend: str = "cubin"


def candidates(
    arch: str, root: Path, find_package: Callable[[str], Path | None] | None = None
) -> list[Candidate | tuple[str, Reason]]:
    """Every place that has, or should have, prebuilt kernels of `arch`; (what, reason) where it cannot be read.

    root: the folder `prebuilt`. find_package: gives the folder of an installed package (a seam for tests).
    """
    found: list[Candidate | tuple[str, Reason]] = []
    by_hand = root / arch
    if by_hand.is_dir():
        found.append(Candidate(f"kernels built by hand in {by_hand}", by_hand))
    for family in (family for family, archs in FAMILIES.items() if arch in archs):
        pointer = root / f"{family}.json"
        if pointer.is_file():
            found.append(_pointed(pointer, root, arch))
        package = package_name(family)
        folder = (find_package or package_folder)(package)
        if folder is not None and (folder / arch).is_dir():
            found.append(Candidate(f"the Python package {package}", folder / arch))
    return found


def _pointed(pointer: Path, root: Path, arch: str) -> Candidate | tuple[str, Reason]:
    """The folder that an installer's pointer names."""
    what = f"the wheel that {pointer.name} points to"
    try:
        data = json.loads(pointer.read_text(encoding="utf-8"))
        schema, wheel, folder = data["schema"], str(data["wheel"]), Path(data["folder"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{pointer} cannot be read ({type(error).__name__}). {_INSTALL_AGAIN}"
        return what, Reason("kernels_damaged", reason)
    what = f"the installed wheel {wheel}"
    if schema != POINTER_SCHEMA:
        reason = f"{pointer} was written by another version of VC-Attention. {_INSTALL_AGAIN}"
        return what, Reason("kernels_version", reason)
    if folder.is_absolute() or ".." in folder.parts or not (root / folder / arch).is_dir():
        reason = f"{pointer} points to {folder.as_posix()}, which holds no kernels of {arch}. {_INSTALL_AGAIN}"
        return what, Reason("kernels_damaged", reason)
    return Candidate(what, root / folder / arch)


def package_folder(name: str) -> Path | None:
    """The folder of an importable top-level package, which is not imported; None where there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None  # a broken finder, or a stand-in module of another program
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None
