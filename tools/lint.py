"""Check the sources: ruff for everything, mypy for kernels and nodes."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from . import comfyui, environment

ROOT = Path(__file__).resolve().parent.parent
HELP = "check the sources with ruff and mypy"
TYPED = ("kernels", "nodes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--fix", action="store_true", help="let ruff correct what it can")
    parser.add_argument("--python", metavar="PATH", help="use this Python, with ruff and mypy, and install nothing")


def main(arguments: argparse.Namespace) -> int:
    """Exit status 0 when both are content."""
    # the compiler too: mypy follows what the kernels import
    requirements = [*comfyui.locate(None).requirements, "test.txt", "compiler.txt"]
    python = environment.prepare(requirements, python=arguments.python).python
    return check(python, arguments.fix)


def check(python: Path, fix: bool = False) -> int:
    """Run both in `python`'s environment; 0 when both are content, else 1."""
    ruff = [str(python), "-m", "ruff", "check", *(["--fix"] if fix else []), "."]
    mypy = [str(python), "-m", "mypy", *(folder for folder in TYPED if (ROOT / folder).is_dir())]
    failed = 0
    for name, command in (("ruff", ruff), ("mypy", mypy)):
        print(f"{name}: ", end="", flush=True)
        failed |= subprocess.run(command, cwd=ROOT, check=False).returncode
    return 1 if failed else 0
