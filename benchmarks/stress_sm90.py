"""Thousands of random legal attention calls on the prebuilt kernels, each against exact attention in fp64.

    python benchmarks/stress_sm90.py [--kernels FOLDER] [--count 10000] [--seed 0] [--minutes M] [--json FILE]

Shapes, strides, dtypes, plans, labels and scales are random (`stress_checks.make_case`). An error may be 1.1 times the
specification's, or the rounding of the output. The specification is slow: it runs for one case in ten, and for every
case whose error is not well below an estimate made from the data. A case that fails prints its seed; `--seed SEED
--count 1` runs it again.

`--backend spec --device cpu` puts the specification in the kernels' place, to try the script without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("vc_pack", ROOT / "tools" / "pack.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.load_pack()

from vc_attention import kernels  # noqa: E402
from vc_attention.benchmarks import stress_checks as checks  # noqa: E402
from vc_attention.kernels import FAST, Reason  # noqa: E402
from vc_attention.kernels.launch import attend  # noqa: E402


def cases(seed: int, count: int, longest: int, minutes: float, progress: float = 15.0) -> Iterator[checks.Case]:
    """Cases `seed` .. `seed + count - 1`, until the time is up; says now and then how far it is."""
    start = last = time.monotonic()
    for n in range(count):
        now = time.monotonic()
        if now - start > 60 * minutes:
            print(f"The time limit of {minutes:g} minutes ends the run.")
            return
        if now - last > progress:
            print(f"{n} of {count} cases, {now - start:.0f} s", flush=True)
            last = now
        yield checks.make_case(seed + n, longest)


def report(stress: checks.Stress, seconds: float) -> dict[str, object]:
    """Print the table and the failures; returns both."""
    print("\n| plan | cases | compared | worst error / allowed | error / specification's, pooled |")
    print("|---|---|---|---|---|")
    rows = {}
    for name, tally in stress.tallies.items():
        print(f"| {name} | {tally.cases} | {tally.compared} | {tally.worst:.3f} | {tally.pooled:.3f} |")
        if not tally.within:
            stress.failures.append(f"{name}: pooled error {tally.pooled:.3f} times the specification's")
        rows[name] = {"cases": tally.cases, "compared": tally.compared, "worst": tally.worst, "pooled": tally.pooled}
    print(f"\n{stress.done} launches in {seconds:.0f} s, {len(stress.failures)} failures")
    for failure in stress.failures[:50]:
        print(f"FAIL {failure}")
    return {"cases": stress.done, "seconds": round(seconds, 1), "failures": stress.failures, "plans": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=Path, help="folder that contains sm_90a, instead of the installed kernels")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop cleanly after this time")
    parser.add_argument("--longest", type=int, default=checks.LONGEST, help="largest Lq and Lkv")
    parser.add_argument("--backend", choices=("cubin", "spec"), default="cubin")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.kernels:
        attend.PREBUILT = arguments.kernels
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print("There is no NVIDIA GPU that torch can use; --backend spec --device cpu tries the script without one.")
        return 2
    verdict = kernels.supports(arguments.device, FAST, backend=arguments.backend)
    if isinstance(verdict, Reason):
        print(verdict.text)
        return 2
    if arguments.device != "cpu":
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")

    def attention(q, k, v, plan, labels, scale):
        with checks.dirty_memory(0xFF):
            return kernels.attention(q, k, v, plan, labels, scale, backend=arguments.backend)

    start = time.monotonic()
    stress = checks.Stress(attention, arguments.device)
    stress.run(cases(arguments.seed, arguments.count, arguments.longest, arguments.minutes))
    found = report(stress, time.monotonic() - start)
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), **found}, indent=1, default=str))
    return 1 if stress.failures else 0


if __name__ == "__main__":
    sys.exit(main())
