"""Every check that needs an H100 or H200, one after the other: what a release has to pass on a card.

    python benchmarks/check_on_hopper.py build FOLDER                    needs the compiler, no GPU
    python benchmarks/check_on_hopper.py run FOLDER OUT [--minutes M] [--only NAME,...]   on the card; torch and pytest

`build` compiles the shipped kernels, with PTX and as a wheel, and the trials that run the kernels of other cards there.
`run` gives every check a process of its own and a time limit, so that one that hangs or fails does not take the others
along, leaves its output and JSON in OUT and prints a table. Exit status 1 when a check failed or was cut.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SHIPPED, EIGHT_BIT, RTX, NVFP4, DATACENTER = "shipped", "mma8", "rtx", "nvfp4", "datacenter"


class Check(NamedTuple):
    """One check: a script with its arguments, and the seconds that it may take."""

    name: str
    arguments: tuple[str, ...]
    seconds: int


def checks(folder: Path, out: Path, minutes: float) -> list[Check]:
    """In the order of what is missed most when the time is short. minutes: for the random calls."""
    shipped = str(folder / SHIPPED)
    kernels = ("--kernels", shipped)
    wheels = [str(path) for path in sorted(folder.glob("*.whl"))]

    def json(name: str) -> tuple[str, str]:
        return "--json", str(out / f"{name}.json")

    tests = ("-m", "pytest", "-m", "gpu", "tests/kernels", "tests/nodes", "tests/known_failures", "-q")
    stress = ("benchmarks/stress_sm90.py", *kernels, "--minutes", str(minutes), *json("stress"))
    first = ("benchmarks/first_call.py", "--wheel", wheels[0] if wheels else "", *json("first_call"))
    nvfp4 = ("benchmarks/nvfp4_on_sm90.py", str(folder / NVFP4), "--save", str(out / "nvfp4.pt"), *json("nvfp4"))
    guard = ("benchmarks/guard_cost.py", *kernels, "--shapes", "wan720,wan480", *json("guard_cost"))
    # Not racecheck: it does not see that a warp is together where ptxas has left out WARPSYNC as needless (NOTES.md).
    tools = ("--tools", "memcheck,initcheck,synccheck")
    others = ("benchmarks/sanitize_sm90.py", "--kernels", str(folder / RTX), "--as", "sm_120a", *tools)
    b300 = ("--as", "sm_103a")
    return [
        Check("first_call", first, 60),
        Check("tests", (*tests, "-p", "no:cacheprovider", "--cubins", shipped), 300),
        Check("stress", stress, int(60 * minutes) + 60),
        Check("rtx", ("benchmarks/rtx_on_sm90.py", str(folder / RTX), *json("rtx")), 120),
        Check("datacenter", ("benchmarks/rtx_on_sm90.py", str(folder / DATACENTER), *b300, *json("datacenter")), 60),
        Check("mma8", ("benchmarks/attention_mma8.py", str(folder / EIGHT_BIT), "--check", *json("mma8")), 120),
        Check("nvfp4", nvfp4, 120),
        Check("agreement", ("tests/ptx/agreement.py", "--kernels", f"{shipped}/sm_90a", *json("agreement")), 300),
        Check("guard_cost", guard, 60),
        Check("sanitize", ("benchmarks/sanitize_sm90.py", *kernels, "--timeout", "60", *json("sanitize")), 300),
        Check("sanitize_rtx", (*others, "--timeout", "70", *json("sanitize_rtx")), 300),
    ]


def run(folder: Path, out: Path, minutes: float, only: list[str] | None = None) -> int:
    """Run the checks (those named in `only`, or all); the number of those that failed or were cut."""
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for check in checks(folder, out, minutes):
        if only and check.name not in only:
            continue
        began = time.monotonic()
        log = out / f"{check.name}.log"
        with log.open("w", encoding="utf-8") as stream:
            try:
                command = [sys.executable, *check.arguments]
                done = subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, timeout=check.seconds)
                verdict = "passed" if done.returncode == 0 else f"FAILED ({done.returncode})"
            except subprocess.TimeoutExpired:
                verdict = f"CUT after {check.seconds} s"
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        if check.name == "tests" and " passed" not in last and verdict == "passed":
            verdict = "NOTHING RAN"  # pytest is content with tests that were all skipped
        rows.append((check.name, verdict, time.monotonic() - began, last))
        print(f"{check.name}: {verdict}", flush=True)
    print("\n| check | verdict | seconds | last line |\n|---|---|---|---|")
    for name, verdict, seconds, last in rows:
        print(f"| {name} | {verdict} | {seconds:.0f} | {last[:120]} |")
    return sum(verdict != "passed" for _, verdict, _, _ in rows)


def build(folder: Path) -> None:
    """Compile what `run` needs into `folder`."""
    for arguments in (
        ("kernels/build.py", str(folder / SHIPPED / "sm_90a"), "--ptx"),
        ("kernels/build.py", str(folder / EIGHT_BIT), "--trial", "mma8"),
        ("kernels/build.py", str(folder / RTX), "--trial", "rtx"),
        ("kernels/build.py", str(folder / DATACENTER), "--trial", "datacenter"),
        ("tests/support/nvfp4_build.py", str(folder / NVFP4), "emulated"),
        ("run.py", "wheels", "--arch", "sm_90a", "--python", sys.executable, "--out", str(folder)),
    ):
        environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a"}
        subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("build", "run"))
    parser.add_argument("folder", type=Path, help="where the compiled kernels are")
    parser.add_argument("out", type=Path, nargs="?", help="run: folder for logs and JSON")
    parser.add_argument("--minutes", type=float, default=2.0, help="for the random calls")
    parser.add_argument("--only", default="", help="run: names of checks, with commas between them")
    arguments = parser.parse_args()
    if arguments.command == "build":
        build(arguments.folder.resolve())
        return 0
    if arguments.out is None:
        parser.error("name the folder that logs and JSON go to")
    only = [name for name in arguments.only.split(",") if name]
    unknown = set(only) - {check.name for check in checks(arguments.folder, arguments.out, arguments.minutes)}
    if unknown:
        parser.error(f"there is no check {', '.join(sorted(unknown))}")
    return 1 if run(arguments.folder.resolve(), arguments.out.resolve(), arguments.minutes, only) else 0


if __name__ == "__main__":
    sys.exit(main())
