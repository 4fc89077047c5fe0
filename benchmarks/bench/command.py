"""The command line of the benchmark: what `python3 run.py bench` and `python benchmarks/whole_call.py` run."""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...tools.progress import Step, say
from . import plot, report
from .results import Run, from_json, to_json, write

#: --shapes when it is not given: every one of `shapes.SHAPES`, which needs torch.
DEFAULT_SHAPES = "wan720,wan720x8,wan480,hv15,h3"
SECONDS, ROUNDS = 0.3, 3
QUICK_SECONDS, QUICK_ROUNDS = 0.05, 2
OTHER_PYTHON = "Name the Python that runs your ComfyUI with --python PATH."


class UnusableError(Exception):
    """Nothing can be measured; the text is the one sentence that says why."""


def arguments_of(prog: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed options."""
    parser = argparse.ArgumentParser(prog=prog, description="One attention call, ours beside its peers, on one GPU.")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="kernels to use, instead of the installed ones")
    parser.add_argument("--shapes", default=DEFAULT_SHAPES, help=f"comma-separated (default {DEFAULT_SHAPES})")
    parser.add_argument("--quick", action="store_true", help="one short clip, a few seconds")
    parser.add_argument("--seconds", type=float, help=f"of each row in each round (default {SECONDS:g})")
    parser.add_argument("--rounds", type=int, help=f"in which the rows take turns (default {ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the bars there (needs matplotlib)")
    parser.add_argument(
        "--from", type=Path, metavar="FILE", dest="earlier", help="show that earlier run's JSON instead"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, prog: str = "whole_call.py") -> int:
    """Exit status 0; 1 when no shape fits the card; 2 with one sentence when nothing can be measured here or an option
    makes no sense.
    """
    arguments = arguments_of(prog, argv)
    try:
        run = read(arguments.earlier) if arguments.earlier else measured(arguments, prog, argv)
    except UnusableError as error:
        sys.stdout.flush()
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    if arguments.earlier:
        print(report.text(run))
    if not run.shapes:
        return 1
    if arguments.plot:
        say(plot.draw(run, arguments.plot))
    return 0


def read(path: Path) -> Run:
    """An earlier run. Raises UnusableError."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnusableError(f"--from {path}: it cannot be read ({error}).") from error


def measured(arguments: argparse.Namespace, prog: str, argv: Sequence[str] | None) -> Run:
    """Measure everything that was asked for, and print each shape's tables as they come."""
    require_gpu()
    import torch

    from . import measure, ours
    from .shapes import QUICK, SHAPES

    names = ["quick"] if arguments.quick else arguments.shapes.split(",")
    known = SHAPES | QUICK
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnusableError(f"--shapes {arguments.shapes}: there is no shape {unknown[0]}; choose {', '.join(SHAPES)}.")
    seconds, rounds = (QUICK_SECONDS, QUICK_ROUNDS) if arguments.quick else (SECONDS, ROUNDS)
    seconds = seconds if arguments.seconds is None else arguments.seconds
    rounds = rounds if arguments.rounds is None else arguments.rounds
    if seconds <= 0 or rounds < 1:
        raise UnusableError("--seconds and --rounds must be positive.")
    # The fp32 that errors are measured against is to be fp32.
    torch.backends.cuda.matmul.allow_tf32 = False
    command = [prog, *(sys.argv[1:] if argv is None else argv)]
    run = Run(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=command,
        device=device_facts(),
        software=software_facts(),
        settings={"seconds": seconds, "rounds": rounds},
        ours_absent=ours.use(arguments.kernels),
    )
    if not run.ours_absent:
        run.kernels = ours.provenance()
    for name in names:
        try:
            with Step(f"Measuring {name}") as step:
                shape = measure.measure(run, (name, *known[name]), seconds, rounds, show=step.show)
        except torch.cuda.OutOfMemoryError:
            say(f"{name} was left out: it does not fit into the memory of this card.")
            torch.cuda.empty_cache()
            continue
        run.shapes.append(shape)
        lines = report.header(run) if len(run.shapes) == 1 else []
        print("\n".join([*lines, "", *report.shape_text(shape)]), flush=True)
        if arguments.json:
            write(arguments.json, to_json(run))
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.json and run.shapes:
        say(f"Numbers: {arguments.json}")
    return run


def require_gpu() -> None:
    """Raises UnusableError where there is no torch, or no GPU that it can use."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of torch that does not load
        raise UnusableError(f"{sys.executable} cannot import torch ({error}). {OTHER_PYTHON}") from error
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda or torch.version.hip else " (a build for the CPU)"
        raise UnusableError(
            f"There is no GPU that torch {torch.__version__}{build} of {sys.executable} can use, so nothing can be "
            f"timed here. {OTHER_PYTHON}"
        )


def device_facts() -> dict[str, Any]:
    """The current CUDA device, and the driver."""
    import torch

    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": facts.name,
        "capability": [facts.major, facts.minor],
        "memory": facts.total_memory,
        "multiprocessors": facts.multi_processor_count,
        "driver": driver_version(),
    }


def driver_version() -> str | None:
    """The version of NVIDIA's driver, as nvidia-smi says it; None where it says nothing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split()
    return lines[0] if lines else None


def software_facts() -> dict[str, str]:
    """Versions of what the calls run on."""
    import torch

    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or torch.version.hip or "",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
