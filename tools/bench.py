"""Time one attention call on this machine's GPU: ours on every kind of step, beside every other attention found here.

Prints, for each shape, medians, speed against FlashAttention-4 (or cuDNN, or FlashAttention-2), errors against fp32,
and the bandwidth of each preparation pass. It runs in the Python that runs your ComfyUI and installs nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from . import environment
from .messages import ToolError

ROOT = Path(__file__).resolve().parent.parent
HELP = "time attention on this GPU: ours beside FlashAttention, cuDNN, SageAttention and comfy-kitchen"
#: Where results go when no file is named.
OUTPUT = ROOT / "output" / "bench"
SHAPES = ("wan720", "wan720x8", "wan480", "hv15", "h3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command. Values are checked in `main`, where a wrong one is one line."""
    parser.add_argument("--shapes", metavar="A,B", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="one short clip, a few seconds, to see that it runs")
    parser.add_argument("--seconds", metavar="N", help="time of each row in each round (default 0.3)")
    parser.add_argument("--rounds", metavar="N", help="rounds in which the rows take turns (default 3)")
    parser.add_argument("--kernels", metavar="FOLDER", help="kernels to use, instead of the installed ones")
    parser.add_argument("--json", metavar="FILE", help="where the numbers go (default output/bench/bench.json)")
    parser.add_argument("--plot", metavar="FILE.png", help="where the plot goes (default output/bench/bench.png)")
    parser.add_argument("--from", metavar="FILE.json", dest="earlier", help="show an earlier run instead of measuring")
    parser.add_argument(
        "--python", metavar="PATH", help="the Python that runs your ComfyUI (default: the one that runs this command)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Exit status 0, or 2 when there is no GPU to time or an option makes no sense."""
    options = check(arguments)
    command = [str(interpreter(arguments.python)), str(ROOT / "tools" / "pack.py"), "bench_main", *options]
    # The user's own settings stay as they are: peers may be importable only through them.
    sys.stdout.flush()
    return subprocess.run(command, env={**os.environ, "PYTHONUTF8": "1"}, check=False).returncode


def check(arguments: argparse.Namespace) -> list[str]:
    """The options for `bench_main.py`. ToolError with status 2 when they make no sense."""
    options: list[str] = []
    if arguments.shapes is not None:
        if arguments.quick:
            raise ToolError("--quick is a shape of its own; leave out --shapes.", 2)
        names = [name.strip() for name in arguments.shapes.split(",")]
        for name in names:
            if name not in SHAPES:
                raise ToolError(f"--shapes {arguments.shapes}: choose from {', '.join(SHAPES)}.", 2)
        options += ["--shapes", ",".join(names)]
    if arguments.quick:
        options.append("--quick")
    for name, kind in (("seconds", float), ("rounds", int)):
        value = getattr(arguments, name)
        if value is not None:
            options += [f"--{name}", str(_positive(name, value, kind))]
    if arguments.kernels is not None:
        options += ["--kernels", str(_existing("--kernels", arguments.kernels, folder=True))]
    if arguments.earlier is not None:
        options += ["--from", str(_existing("--from", arguments.earlier, folder=False))]
    # An earlier run has its numbers already; its plot is drawn only where one is asked for.
    if arguments.earlier is None:
        options += ["--json", str(_target("--json", arguments.json, "bench.json"))]
    elif arguments.json is not None:
        raise ToolError("--from reads an earlier run, so there are no numbers for --json to write.", 2)
    if arguments.earlier is None or arguments.plot is not None:
        options += ["--plot", str(_target("--plot", arguments.plot, "bench.png"))]
    return options


def interpreter(python: str | None) -> Path:
    """The Python to measure in: the given one, else this one if it has torch. ToolError when there is none."""
    if python is not None:
        return environment.given(python)
    if importlib.util.find_spec("torch") is None:
        raise ToolError(
            f"This Python ({sys.executable}) has no torch. Name the one that runs your ComfyUI with --python PATH; the "
            "portable ComfyUI for Windows keeps it in python_embeded.",
            2,
        )
    return Path(sys.executable)


def _positive(name: str, text: str, kind: type) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < 3600:
        raise ToolError(f"--{name} {text}: give a number above 0{' without decimals' if kind is int else ''}.", 2)
    return value


def _existing(option: str, text: str, folder: bool) -> Path:
    path = Path(text).expanduser().absolute()
    if not (path.is_dir() if folder else path.is_file()):
        raise ToolError(f"{option} {text}: there is no such {'folder' if folder else 'file'}.", 2)
    return path


def _target(option: str, text: str | None, name: str) -> Path:
    """The file to write, in a folder that exists: the default one is made."""
    if text is None:
        OUTPUT.mkdir(parents=True, exist_ok=True)
        return OUTPUT / name
    path = Path(text).expanduser().absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise ToolError(f"{option} {text}: no file can be written there (no such folder, or not a file).", 2)
    return path
