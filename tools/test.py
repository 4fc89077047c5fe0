"""Set up everything and run the whole suite: ruff, mypy, then pytest with a real ComfyUI.

Further options go to pytest: `run.py test -k replay -x`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from . import comfyui, lint
from .progress import say
from .ready import add_arguments as add_ready_arguments
from .ready import ready

ROOT = Path(__file__).resolve().parent.parent
HELP = "set up everything and run the whole test suite"
WORKERS = 2
#: Each pytest worker computes with its own threads; more threads than cores make both slower.
THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command; unknown ones are passed on."""
    add_ready_arguments(parser)
    parser.add_argument("--no-lint", action="store_true", help="run the tests alone")
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help="processes of pytest (default 2)")
    parser.set_defaults(passed_on=True)


def main(arguments: argparse.Namespace) -> int:
    """Exit status 0 when the sources are clean and every test passes."""
    found, made = ready(arguments, ("demo.txt", "test.txt", "compiler.txt"))
    sources = 0 if arguments.no_lint else lint.check(made.python)
    tests = pytest(found, made.python, arguments.workers, arguments.rest)
    if sources:
        say("The sources have findings of ruff or mypy (above).")
    return tests or sources


def pytest(found: comfyui.ComfyUI, python: Path, workers: int, arguments: list[str]) -> int:
    """Run pytest over `tests/`, or over the paths among `arguments`."""
    paths = [] if any((ROOT / part.partition("::")[0]).exists() for part in arguments) else ["tests"]
    # pytest looks for its settings near every path it is given, and ComfyUI has settings of its own
    command = [str(python), "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    # Tests of one group share what takes long to make (compiled kernels), so they stay in one process.
    command += ["-n", str(workers), "--dist=loadgroup", f"--comfyui={found.directory}"]
    command += [*arguments, *paths]
    variables = comfyui.python_environment(python, found.directory)
    cores = max(1, (os.cpu_count() or 1) // max(workers, 1))
    variables.update({name: str(cores) for name in THREAD_LIMITS})
    say(f"pytest in {workers} processes with {found.name}")
    sys.stdout.flush()
    return subprocess.run(command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, check=False).returncode
