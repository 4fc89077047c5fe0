"""The kernels installed in the pack: `prebuilt/<family>/<build>/<arch>/`, each family's build named by a pointer file.

A build is complete and checked before the pointer `prebuilt/<family>.json` is replaced, so at every moment, whatever
ends the process, the pointer names the new build or the last good one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..families import FAMILIES, package_name
from . import archive
from .files import remove_tree, replace, sync_folder, token, write_over
from .pins import Wheel
from .trouble import Trouble, of_writing, reading_failed

SCHEMA = 1
DOWNLOADS = ".download"


@dataclass(frozen=True)
class Installed:
    """One build that is here. folder: what holds its architectures; origin: who put it there, "pointer", "package" (a
    wheel among Python's packages) or "hand"; problem: why it cannot be used, empty when every file is as it was built.
    """

    family: str
    version: str
    sha256: str
    folder: Path
    archs: tuple[str, ...]
    origin: str
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether every file is as it was built."""
        return not self.problem

    @property
    def state(self) -> str:
        """How it stands, in words."""
        origin = {"hand": "built by hand", "package": "installed as a Python package"}.get(self.origin, "installed")
        version = f", version {self.version}" if self.version else ""
        return f"{origin}{version}, {f'not usable: {self.problem}' if self.problem else 'every file as it was built'}"


def installed(prebuilt: Path, family: str) -> Installed | None:
    """The build that the pointer of a family names; None without a pointer."""
    pointer = prebuilt / f"{family}.json"
    try:
        data = json.loads(pointer.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA or not re.fullmatch(re.escape(family) + r"/[0-9a-f]{12}", data["folder"]):
            raise ValueError
        folder = prebuilt / data["folder"]
        archs = _archs(folder)
        problem = problem_of(folder, archs)
        return Installed(family, str(data["version"]), str(data["sha256"]), folder, archs, "pointer", problem)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Installed(family, "", "", pointer, (), "pointer", f"{pointer.name} is {reading_failed(error)}")


def by_hand(prebuilt: Path) -> list[Installed]:
    """Builds that `kernels/build.py` left in `prebuilt/<arch>/`; they are used before installed ones."""
    builds = []
    for family, archs in FAMILIES.items():
        for arch in archs:
            if (prebuilt / arch / "manifest.json").is_file():
                problem = problem_of(prebuilt, (arch,))
                builds.append(Installed(family, "", "", prebuilt / arch, (arch,), "hand", problem))
    return builds


def as_package(family: str) -> Installed | None:
    """The build among Python's packages; none of its code runs."""
    try:
        spec = importlib.util.find_spec(package_name(family))
    except (ImportError, ValueError, AttributeError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        return None
    folder = Path(places[0])
    archs = _archs(folder)
    try:
        version = str(json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Installed(family, "", "", folder, archs, "package", f"provenance.json is {reading_failed(error)}")
    return Installed(family, version, "", folder, archs, "package", problem_of(folder, archs))


def everything(prebuilt: Path) -> list[Installed]:
    """Every build that is here, in the order in which the loader tries them."""
    pointers = [installed(prebuilt, family) for family in FAMILIES]
    packages = [as_package(family) for family in FAMILIES]
    return by_hand(prebuilt) + [build for build in (*pointers, *packages) if build is not None]


def _archs(folder: Path) -> tuple[str, ...]:
    """The architectures that a folder holds."""
    return tuple(sorted(path.parent.name for path in folder.glob("sm_*/manifest.json")))


def problem_of(folder: Path, archs: Sequence[str]) -> str:
    """Why the kernels of `archs` in `folder` are not what was built; empty when they are."""
    if not archs:
        return f"{folder.name} holds no kernels"
    for arch in archs:
        place = "manifest.json"
        try:
            manifest = json.loads((folder / arch / place).read_text(encoding="utf-8"))
            if manifest["arch"] != arch or not manifest["kernels"]:
                return f"{arch}/{place} is not that of {arch}"
            for kernel in manifest["kernels"]:
                place = kernel["file"]
                if Path(place).name != place:
                    return f"{arch}/manifest.json names a file elsewhere"
                if hashlib.sha256((folder / arch / place).read_bytes()).hexdigest() != kernel["sha256"]:
                    return f"{arch}/{place} is not the file that was built"
        except FileNotFoundError:
            return f"{arch}/{place} is missing"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{arch}/{place} is {reading_failed(error)}"
    return ""


def put(prebuilt: Path, wheel: Wheel, version: str, data: bytes) -> None:
    """Unpack a wheel's verified bytes and make them the build of its family. Raises Trouble, the last build kept."""
    family = prebuilt / wheel.family
    target = family / wheel.build
    draft = family / f".{wheel.build}.{token()}.tmp"
    try:
        # A folder of this name is there when an install ended before its pointer was written, or when it is damaged.
        if not target.is_dir() or problem_of(target, wheel.archs):
            draft.mkdir(parents=True)
            archive.unpack(data, wheel, draft)
            problem = problem_of(draft, wheel.archs)
            if problem:
                raise Trouble(f"{wheel.file} is incomplete: {problem}.", "Report this to the pack's authors.")
            if target.exists():
                replace(target, family / f".{wheel.build}.{token()}.old")
            replace(draft, target)
            sync_folder(family)
        pointer = {
            "schema": SCHEMA,
            "family": wheel.family,
            "folder": f"{wheel.family}/{wheel.build}",
            "wheel": wheel.file,
            "sha256": wheel.sha256,
            "version": version,
        }
        write_over(prebuilt / f"{wheel.family}.json", (json.dumps(pointer, indent=1) + "\n").encode())
    except OSError as error:
        raise of_writing(error, prebuilt) from error
    finally:
        remove_tree(draft)


def part_of(prebuilt: Path, wheel: Wheel) -> Path:
    """Where the download of a wheel grows."""
    return prebuilt / DOWNLOADS / f"{wheel.file}.{wheel.build}.part"


def leftovers(prebuilt: Path, wheel: Wheel) -> list[Path]:
    """What installs of a wheel's family left behind: builds before it, broken-off ones, downloads."""
    return [
        *(path for path in _entries(prebuilt / wheel.family) if path.name != wheel.build),
        *prebuilt.glob(f".{wheel.family}.json.*.tmp"),
        *(prebuilt / DOWNLOADS).glob(f"{package_name(wheel.family)}-*.part"),
    ]


def tidy(prebuilt: Path, wheel: Wheel) -> None:
    """Remove the leftovers of a family whose build is `wheel`, under the lock. As far as it goes: on Windows a running
    ComfyUI may hold an old file until the next time.
    """
    for path in leftovers(prebuilt, wheel):
        _remove(path)
    with contextlib.suppress(OSError):
        (prebuilt / DOWNLOADS).rmdir()  # unless another family's download waits in it


def remove(prebuilt: Path) -> tuple[list[str], list[Path]]:
    """Take every installed build away: (families that had one, what could not be removed). Raises Trouble when even a
    pointer stays.
    """
    removed, left = [], []
    for family in FAMILIES:
        pointer = prebuilt / f"{family}.json"
        if pointer.exists() or (prebuilt / family).exists():
            removed.append(family)
        try:
            pointer.unlink(missing_ok=True)  # first: from here on nothing loads the folder
        except OSError as error:
            raise of_writing(error, prebuilt) from error
        left += [path for path in (prebuilt / family,) if not _remove(path)]
    left += [path for path in (prebuilt / DOWNLOADS, *prebuilt.glob(".*.json.*.tmp")) if not _remove(path)]
    return removed, left


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _remove(path: Path) -> bool:
    """Remove a file or a folder as far as it can be; whether it is gone."""
    if path.is_dir():
        return remove_tree(path)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    return not path.exists()
