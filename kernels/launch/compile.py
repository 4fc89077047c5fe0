"""Compile the kernels on this machine where nvidia-cutlass-dsl is installed, once, into a folder that is kept.

The compiler runs in a process of its own (`compile_process`), so that it can be stopped and cannot break ComfyUI.
`multiprocessing` would start that process by running ComfyUI's main.py once more; `kernels/compile_here.py` is started
as a program instead.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from filelock import FileLock, Timeout

from .. import build
from ..cute.catalogue import KERNELS
from ..reasons import Reason
from . import verdicts
from .manifest import Manifest, read_manifest

#: Called with (kernels done, kernels altogether, name of the one at work or what is waited for), about ten times a
#: second. What it raises stops the compiler and passes through.
Progress = Callable[[int, int, str], object]

#: All kernels take a minute or two; a machine that is this slow is swapping.
TIMEOUT_SECONDS = 1800.0
_POLL_SECONDS = 0.1
_PROGRAM = "compile_here.py"
_LINE = re.compile(r"^compiling (\d+) (\d+) (\S+)$", re.MULTILINE)


def compiler() -> Path | Reason:
    """The folder that holds the compiler's module `cutlass`, which is not imported; or why it cannot be used."""
    if sys.platform != "linux":
        return Reason("no_compiler", "nvidia-cutlass-dsl, which compiles kernels on this machine, is for Linux only.")
    missing = Reason("no_compiler", "nvidia-cutlass-dsl, which compiles kernels on this machine, is not installed.")
    if not (build.HERE / _PROGRAM).is_file():
        return Reason(
            "no_compiler",
            "This copy of the pack comes without the part that compiles kernels on this machine, as the registry's do. "
            "Install the pack with git to have it.",
        )
    try:
        spec = importlib.util.find_spec("cutlass")
    except (ImportError, ValueError):
        return missing
    places = None if spec is None else spec.submodule_search_locations
    for place in places or ():
        # CUTLASS's older Python package has the same name and no `cute`.
        if (Path(place) / "cute").is_dir():
            return Path(place).parent
    return missing


def compiler_version() -> str:
    """Name and version of the compiler, as installed."""
    try:
        return f"nvidia-cutlass-dsl {importlib.metadata.version('nvidia-cutlass-dsl')}"
    except importlib.metadata.PackageNotFoundError:
        return "nvidia-cutlass-dsl"


def compiled(arch: str) -> Path | None:
    """The folder of finished kernels of `arch` from the sources of this version; None if there is none."""
    folder = _place(arch)
    return folder if folder is not None and (folder / "manifest.json").is_file() else None


def compile_kernels(
    arch: str, progress: Progress | None = None, only: str = "", timeout: float = TIMEOUT_SECONDS
) -> Path | Reason:
    """The folder of finished kernels of `arch`, compiled now if it is not there; or why there is none.

    Blocks for a minute or two. Another process that compiles the same is waited for. only: compile the kernels whose
    name contains this (for tests). timeout: seconds, waiting included.
    """
    found = compiled(arch)
    if found is not None:
        return found
    if arch not in KERNELS:
        return Reason("no_kernels", f"There are no kernel sources for {arch} in this version of VC-Attention.")
    packages = compiler()
    if isinstance(packages, Reason):
        return packages
    place = _place(arch)
    if place is None:
        return Reason("no_folder", "No folder is set in which compiled kernels could be kept (kernels.set_folder).")
    deadline = time.monotonic() + timeout
    report = progress or (lambda done, count, name: None)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _alone(place.with_name(f"{place.name}.lock"), report, deadline):
            return compiled(arch) or _compile(place, arch, packages, report, only, deadline)
    except Timeout:
        return Reason("compile_failed", "Another process has been compiling the kernels for too long; end it.")
    except OSError as error:
        return Reason("compile_failed", f"Kernels cannot be kept in {place.parent} ({error.strerror or error}).")


def discard(folder: Path) -> bool:
    """Remove finished kernels that turned out to be damaged; whether they are gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _place(arch: str) -> Path | None:
    folder = verdicts.folder()
    return None if folder is None else folder / "compiled" / f"{_sources()}-{arch}"


@lru_cache(maxsize=1)
def _sources() -> str:
    return build.source_hash()[:16]


@contextlib.contextmanager
def _alone(path: Path, report: Progress, deadline: float) -> Iterator[None]:
    """Hold the lock of one folder. Raises Timeout at the deadline, and what `report` raises while waiting."""
    lock = FileLock(path)
    while True:
        try:
            lock.acquire(timeout=_POLL_SECONDS)
            break
        except Timeout:
            report(0, 0, "another process compiles them")
            if time.monotonic() > deadline:
                raise
        except NotImplementedError:  # a file system without locks: two processes then compile the same, and one wins
            yield
            return
    try:
        yield
    finally:
        lock.release()


def _compile(place: Path, arch: str, packages: Path, report: Progress, only: str, deadline: float) -> Path | Reason:
    """Compile into a folder beside `place`, check it, and give it its name in one step."""
    part = place.with_name(f"{place.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        problem = _run(part, arch, packages, report, only, deadline)
        if problem is not None:
            return problem
        manifest = read_manifest(part)
        if not isinstance(manifest, Manifest):
            return Reason("compile_failed", f"The kernel compiler ended without a result. {manifest.text}")
        os.replace(part, place)
        _prune(place, arch)
        return place
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _prune(place: Path, arch: str) -> None:
    """Remove what earlier versions compiled for `arch`, and what was cut off. The lock is held."""
    for old in place.parent.iterdir():
        ours = old.name.endswith(f"-{arch}") or f"-{arch}.part-" in old.name
        if ours and old != place and old.is_dir():
            shutil.rmtree(old, ignore_errors=True)


def _run(part: Path, arch: str, packages: Path, report: Progress, only: str, deadline: float) -> Reason | None:
    """Run the build to its end, or kill it: at the deadline, or when `report` raises."""
    if not sys.executable:
        return Reason("no_compiler", "This Python does not know its own program, which compiling kernels needs.")
    command = [sys.executable, str(build.HERE / _PROGRAM), str(part), arch, str(packages), only]
    from .compile_process import Child  # not in every copy of the pack

    log = part.with_name(f"{part.name}.log")
    try:
        with log.open("wb") as output:
            child = Child(command, output)
            try:
                while child.running(_POLL_SECONDS):
                    report(*_progress(log))
                    if time.monotonic() > deadline:
                        return Reason("compile_failed", "Compiling the kernels took too long and was stopped.")
            finally:
                child.stop()
        if child.error or child.status != 0:
            why = child.error or _last_line(log) or f"status {child.status}"
            return Reason("compile_failed", f"The kernel compiler failed: {why}")
        return None
    finally:
        with contextlib.suppress(OSError):
            log.unlink()


def _progress(log: Path) -> tuple[int, int, str]:
    lines = _LINE.findall(log.read_text(encoding="utf-8", errors="replace"))
    return (int(lines[-1][0]), int(lines[-1][1]), lines[-1][2]) if lines else (0, 0, "the compiler starts")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else ""
