"""Cross-compile the kernels of every architecture and pack them into one wheel for each family of cards.

No GPU is needed. The same sources and the same compiler give the same bytes on any machine, so anyone can compare a
wheel with `kernels/wheels.json`, which names the wheels of this version with their sizes and hashes.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import environment
from .messages import ToolError, size_text
from .progress import Step, say
from .wheel_family import Wheel, differences, load_by_path, pack, read_pinned, version_here, write_pinned

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "kernels" / "build.py"
PINNED = ROOT / "kernels" / "wheels.json"
LOGS = ROOT / ".cache" / "logs"
HELP = "compile the kernels and pack them into wheels"
MACHINES = ("x86_64", "aarch64")
_TAIL = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH",
        help="such as sm_90a, several times; by default all that have kernels",
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR", help="where the wheels go (dist)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="status 1 when the wheels are not those of wheels.json")
    what.add_argument("--write", action="store_true", help="make kernels/wheels.json name the wheels built here")
    parser.add_argument("--tag", help="status 1 unless this is the tag of the version in pyproject.toml (v1.2.3)")
    parser.add_argument("--python", metavar="PATH", help="use this Python, with the compiler, and install nothing")


def main(arguments: argparse.Namespace) -> int:
    """Exit status 0 when every wheel is built, and with --check also is the pinned one."""
    check_machine(sys.platform, platform.machine())
    if arguments.tag is not None and arguments.tag != f"v{version_here()}":
        raise ToolError(
            f"The tag is {arguments.tag}, and pyproject.toml states version {version_here()}, whose tag is "
            f"v{version_here()}. Correct one of the two."
        )
    python = environment.prepare(["compiler.txt"], python=arguments.python).python
    chosen = choose(arguments.arch, with_kernels(python), whole_families=arguments.check or arguments.write)
    pinned = read_pinned(PINNED)
    wheels = build(python, chosen)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        path = arguments.out / wheel.file
        part = path.with_name(path.name + ".part")
        part.write_bytes(wheel.data)
        part.replace(path)
        print(f"{path}  {size_text(len(wheel.data))}  {', '.join(wheel.archs)}\n    sha256 {wheel.sha256}")
    if arguments.write:
        write_pinned(PINNED, wheels)
        print("kernels/wheels.json now names these wheels. Commit it together with the kernels' sources.")
        return 0
    found = differences(pinned, wheels, complete=arguments.arch is None)
    if not found:
        print("The same as in kernels/wheels.json.")
        return 0
    print("Not the wheels of kernels/wheels.json:\n" + "\n".join(f"  {line}" for line in found))
    print("If that is intended, `python3 run.py wheels --write` pins the new ones.")
    return 1 if arguments.check else 0


def check_machine(system: str, machine: str) -> None:
    """ToolError where the compiler does not exist. As sys.platform and platform.machine() call them."""
    if system != "linux" or machine.lower() not in MACHINES:
        raise ToolError(
            "The compiler of the kernels (nvidia-cutlass-dsl) exists for Linux on x86-64 and ARM64 only, and this is "
            f"{system} on {machine or 'an unknown processor'}. Build the wheels on a Linux machine (WSL and "
            "containers are fine, no GPU is needed); the wheels themselves are for Linux and Windows."
        )


def with_kernels(python: Path) -> list[str]:
    """The architectures that have kernels."""
    done = subprocess.run([str(python), str(BUILD), "--list"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolError(f"The list of kernels cannot be read: {_last_line(done.stderr)}")
    return done.stdout.split()


def choose(asked: Sequence[str] | None, existing: Sequence[str], whole_families: bool = False) -> list[str]:
    """Which architectures to build: those `asked` for, all if None, that are among the `existing` ones.

    The others are named on stderr. whole_families: refuse a choice that leaves an architecture of a family out.
    """
    families = load_by_path("families")
    known = [arch for archs in families.FAMILIES.values() for arch in archs]
    unknown = [arch for arch in asked or () if arch not in known]
    if unknown:
        raise ToolError(f"--arch {unknown[0]}: the architectures are {', '.join(known)}.", 2)
    wanted = [arch for arch in known if asked is None or arch in asked]
    for arch in wanted:
        if arch not in existing:
            say(f"{arch} has no kernels yet: skipped.")
    chosen = [arch for arch in wanted if arch in existing]
    if not chosen:
        raise ToolError(f"Nothing to build: only {', '.join(existing) or 'none'} of the architectures has kernels.")
    if whole_families:
        left_out = [arch for arch in known if arch in existing and arch not in chosen]
        if left_out:
            raise ToolError(
                f"kernels/wheels.json is about all wheels, and --arch leaves {', '.join(left_out)} out: run again "
                "without --arch.",
                2,
            )
    return chosen


def build(python: Path, archs: Sequence[str]) -> list[Wheel]:
    """The wheel of each family that has one of `archs`, compiled by `python` in one process for each architecture."""
    families = load_by_path("families")
    with tempfile.TemporaryDirectory(prefix="vc-wheels-") as temporary:
        folders = {arch: Path(temporary) / arch for arch in archs}
        for arch, folder in folders.items():
            with Step(f"Compiling the kernels of {arch}") as step:
                step.finish(_compile(python, arch, folder))
        return [
            pack(family, {arch: folders[arch] for arch in members if arch in folders})
            for family, members in families.FAMILIES.items()
            if any(arch in folders for arch in members)
        ]


def _compile(python: Path, arch: str, folder: Path) -> str:
    """Run kernels/build.py; what it says at the end."""
    # The compiler's own settings change its output, and the search path of another Python its imports.
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_") and k not in ("PYTHONPATH", "PYTHONHOME")
    }
    command = [str(python), str(BUILD), str(folder), "--arch", arch]
    done = subprocess.run(
        command,
        env={**kept, "CUTE_DSL_ARCH": arch},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return _last_line(done.stdout).partition(" in ")[0]
    log = LOGS / f"wheels-{arch}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    if "No module named 'cutlass'" in done.stderr:
        raise ToolError(
            f"{python} has no nvidia-cutlass-dsl. Install tools/requirements/compiler.txt into it with pip, or leave "
            "--python out."
        )
    raise ToolError(f"The kernels of {arch} could not be compiled: {_last_line(done.stderr)} Details: {log}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it gave no reason."
