"""A small whole call of every plan, and grouping, under the tools of compute-sanitizer, in one table.

    python benchmarks/sanitize_sm90.py [--kernels FOLDER [--as ARCH]] [--tools memcheck,...] [--json FILE]

--as: the kernels in FOLDER are those of another architecture that run here as well (`kernels/build.py --trial rtx`).

compute-sanitizer comes with the CUDA toolkit. Each tool runs this script once more as its child; a child that outlasts
`--timeout` is ended and the table names the case in which it hung. torch's caching allocator is off in the child, so
that every tensor is an allocation of its own, with an end that memcheck sees. Inputs come from the CPU and results are
checked there: apart from a few fills, what runs on the device are the kernels of this pack.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
#: Batch, heads, Lq, Lkv: several query tiles and a ragged key tile; the smallest second block of everything.
SHAPES = ((1, 2, 300, 600), (1, 1, 129, 257))
STARTED, PASSED = "case started:", "case passed:"
#: A finding of compute-sanitizer begins with a line of this form.
FINDING = re.compile(
    r"^=+\s+((?:Invalid|Uninitialized|Barrier error|Potential|Error: |Warning: |Program hit|Internal|Unspecified).*)"
)
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)")
#: Relative error that no plan comes near on these shapes (0.007 to 0.015).
WORST, WORST_FOUR_BIT = 0.03, 0.25


def child(kernels_folder: Path | None, arch: str) -> int:
    """Run every case on the device, saying which; what compute-sanitizer prints in between belongs to it."""
    spec = importlib.util.spec_from_file_location("vc_pack", ROOT / "tools" / "pack.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load_pack()
    import torch
    from vc_attention import kernels
    from vc_attention.benchmarks import preparation_checks, stress_checks
    from vc_attention.kernels.launch import attend, call, prepare
    from vc_attention.kernels.launch.loader import load_library

    if not torch.cuda.is_available():
        print("There is no NVIDIA GPU that torch can use here.")
        return 2
    plans = dict(stress_checks.PLANS)
    if arch:
        library = preparation_checks.must(load_library(kernels_folder, torch.device("cuda", 0)))
        library.manifest = replace(library.manifest, arch=arch)
        four = {"four bit": kernels.FOUR_BIT, "four bit plain": kernels.FOUR_BIT.without_smoothing()}
        plans |= {**four, "four bit key means": replace(kernels.FOUR_BIT, key_means=True)}
    elif kernels_folder:
        attend.PREBUILT = kernels_folder

    def attention(q, k, v, plan, labels):
        if arch:
            return call.attention_on(library, q, k, v, plan, labels, None)
        return kernels.attention(q, k, v, plan, labels, backend="cubin")

    def group(v, previous=None):
        # Not `kernels.group`, which would fall back to plain torch.
        found = prepare.group(library, v, 0, previous) if arch else call.group(v, 0, previous)
        return preparation_checks.must(found)

    for b, h, lq, lkv in SHAPES:
        host = preparation_checks.tensors(b, h, lq, lkv, "heads", torch.bfloat16, lkv, "cpu")
        q, k, v = (x.cuda() for x in host)
        true = stress_checks.exact(*host)[1]
        print(STARTED, f"grouping {(b, h, lq, lkv)}", flush=True)
        _, centroids = group(v)
        labels, _ = group(v, centroids)
        torch.cuda.synchronize()
        if int(labels.cpu().max()) >= centroids.shape[-2]:
            print("A label names no group.")
            return 1
        print(PASSED, f"grouping {(b, h, lq, lkv)}", flush=True)
        for name, plan in plans.items():
            for used, how in ((labels, "grouped"), (None, "in order")):
                case = f"{name}, {how} {(b, h, lq, lkv)}"
                print(STARTED, case, flush=True)
                out = attention(q, k, v, plan, used)
                torch.cuda.synchronize()
                error = float(stress_checks.relative(out.cpu(), true))
                if not error < (WORST_FOUR_BIT if plan.scores == "nvfp4" else WORST):
                    print(f"The relative error is {error:.3f}.")
                    return 1
                print(PASSED, case, flush=True)
    return 0


def sanitizer() -> str | None:
    """Path of compute-sanitizer."""
    candidates = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"]
    return shutil.which("compute-sanitizer") or next((str(path) for path in candidates if path.is_file()), None)


def run_tool(program: str, tool: str, kernels_folder: Path | None, arch: str, timeout: float) -> dict[str, object]:
    """One child under `tool`: what it found, in which cases, and how it ended."""
    command = [program, "--tool", tool, "--print-limit", "50", "--error-exitcode", "9"]
    command += [sys.executable, str(Path(__file__).resolve()), "--child"]
    command += ["--kernels", str(kernels_folder)] if kernels_folder else []
    command += ["--as", arch] if arch else []
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # so that the child of the tool can be ended with it
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        output.seek(0)
        lines = output.read().splitlines()
    return {"tool": tool, "seconds": round(time.monotonic() - start), **verdict(lines, status)}


def verdict(lines: list[str], status: int | None) -> dict[str, object]:
    """What a child's output says. status: its exit status, None when it was ended at the timeout."""
    case, passed, findings, reported = "start", 0, [], 0
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        if line.startswith(STARTED):
            case = line.removeprefix(STARTED).strip()
        elif line.startswith(PASSED):
            passed += 1
        elif found := FINDING.match(line):
            # The next line says in which kernel, where this one does not.
            findings.append(f"{case}: {found[1]} {following.strip('= ')}")
        elif found := SUMMARY.match(line):
            reported = int(found[1])
    if status is None:
        word = f"HUNG in {case}"
    elif reported or findings:
        word = "FOUND"
    else:
        # A child that did nothing has found nothing either.
        word = "clean" if status == 0 and passed else f"FAILED in {case} (exit status {status})"
    tail = [] if word == "clean" else [line for line in lines if line.strip()][-15:]
    return {"verdict": word, "passed": passed, "reported": reported, "findings": findings, "tail": tail}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=Path, help="folder that contains sm_90a, instead of the installed kernels")
    parser.add_argument("--as", dest="arch", default="", help="take the kernels in FOLDER for those of ARCH")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for each tool")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arch and not arguments.kernels:
        parser.error("--as needs --kernels")
    if arguments.child:
        return child(arguments.kernels, arguments.arch)
    program = sanitizer()
    if program is None:
        print("compute-sanitizer is neither on PATH nor in CUDA_HOME; it comes with the CUDA toolkit.")
        return 2
    results = []
    for tool in arguments.tools.split(","):
        results.append(run_tool(program, tool, arguments.kernels, arguments.arch, arguments.timeout))
        print(f"{tool}: {results[-1]['verdict']} after {results[-1]['seconds']} s", flush=True)
    print("\n| tool | verdict | cases passed | reported | seconds |\n|---|---|---|---|---|")
    for row in results:
        print(f"| {row['tool']} | {row['verdict']} | {row['passed']} | {row['reported']} | {row['seconds']} |")
    for row in results:
        for line in [*row["findings"][:20], *row["tail"]]:
            print(f"{row['tool']}: {line}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0 if all(row["verdict"] == "clean" for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
