"""Remove one guard at a time from a copy of the checkout and see which tests notice. Not part of the suite.

    python tests/mutants.py --comfyui DIR [--only WORD] [--jobs 2]

Each mutant is one small edit that takes a protection away; the tests of its row of known_failures run on the copy.
A mutant that no test catches means that the guard is decoration, or that its test is. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from guard_mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    *("__init__.py", "install.py", "pyproject.toml"),
    *("kernels", "nodes", "tools", "tests", "benchmarks", "workflows", "locales", "web"),
)


def run_mutant(mutant: Mutant, comfyui: Path | None) -> tuple[Mutant, str, list[str]]:
    """(mutant, verdict, failing tests): "caught", "survived", or why it could not be tried."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "checkout"
        copy.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            elif source.exists():
                shutil.copy2(source, copy / name)
        for file, old, new in ((mutant.file, mutant.old, mutant.new), *mutant.also):
            target = copy / file
            text = target.read_text(encoding="utf-8")
            if text.count(old) != 1:
                return mutant, f"not applicable: the text occurs {text.count(old)} times", []
            target.write_text(text.replace(old, new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "--maxfail=4", "-rfE"]
        command += [*mutant.tests, *(() if comfyui is None else ("--comfyui", str(comfyui)))]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=900, check=False)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        passed = re.search(r"(\d+) passed", done.stdout)
        if any("::" not in name for name in failed):
            return mutant, "not applicable: the copy does not import", failed
        if failed:
            return mutant, "caught", failed
        return mutant, "survived" if passed else f"no test ran: {done.stdout[-200:]!r}", []


def main() -> int:
    """Run the mutants and print the table; the exit status is the number of mutants that were not caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path)
    parser.add_argument("--only", default="", help="run the mutants whose row or guard contains this")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    comfyui = args.comfyui.resolve() if args.comfyui else None
    newer = comfyui is not None and "AttentionTensorContainer" in (
        comfyui / "comfy" / "ldm" / "modules" / "attention.py"
    ).read_text(encoding="utf-8")
    chosen = [m for m in MUTANTS if args.only in f"{m.row} {m.guard}" and (newer or not m.needs)]
    print("| row | guard removed | verdict | caught by |\n|---|---|---|---|")
    missed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutant, verdict, failed in pool.map(lambda m: run_mutant(m, comfyui), chosen):
            missed += verdict != "caught"
            names = sorted({name.split("::")[-1].split("[")[0] for name in failed})
            print(f"| {mutant.row} | {mutant.guard} | {verdict} | {', '.join(names)} |", flush=True)
    skipped = len(MUTANTS) - len(chosen)
    print(f"\n{len(chosen)} mutants, {missed} not caught, {skipped} not run here")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
