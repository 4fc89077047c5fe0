"""Builds of the sm_90a attention kernel (`kernels/build.py --tuning`) against each other, on a GPU.

    python benchmarks/tuning_sm90.py FOLDER [--json FILE] [--seconds 0.25] [--rounds 4] [--budget 230]

FOLDER/NAME/sm_90a holds the cubins of build NAME; "base" must be among them. Every build is first compared with the
specification on a few shapes, then all of them are timed in turn, round after round, so that heat is fair. One process
does it under the eye of another: if a build hangs or faults, it is named, left out, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

PLANS = ("fast", "fast key means", "faithful")
BASE, PEER = "base", "cuDNN BF16"
CHECK_SHAPES = [
    (1, 2, 1, 1),
    (2, 3, 129, 257),
    (1, 2, 5, 1023),
    (1, 1, 4096, 77),
    (1, 2, 300, 4096),
    (1, 2, 235, 645),
    (2, 2, 1000, 2111),
    (1, 2, 641, 3000),
    (1, 3, 900, 2048),
    (1, 2, 4040, 20001),
]
#: A worker that says nothing for this long (s) hangs.
SILENCE = 40.0


def builds_of(folder: Path) -> dict[str, set[str]]:
    """The builds in `folder`, each with the names of its kernels."""
    found = {}
    for path in sorted(folder.glob("*/sm_90a/manifest.json")):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        found[path.parent.parent.name] = {kernel["name"] for kernel in manifest["kernels"]}
    if BASE not in found:
        raise SystemExit(f"{folder} has no build named {BASE}.")
    return found


class Worker:
    """Runs what is not done yet and writes a line before and a line after each item."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import attention_sm90
        import torch
        from vc_attention.kernels.launch import attend

        torch.backends.cuda.matmul.allow_tf32 = False
        # There may be more builds than the package keeps loaded.
        attend.library = lru_cache(maxsize=None)(attend.library.__wrapped__)

        self.torch, self.bench, self.folder = torch, attention_sm90, arguments.folder
        self.seconds, self.rounds = arguments.seconds, arguments.rounds
        self.log = arguments.log
        self.bad, self.done = set(arguments.skip), set()
        for line in read_lines(self.log):
            if "key" in line and not line.get("begin"):
                self.done.add(line["key"])
            if line.get("wrong"):
                self.bad.add(line["name"])
        self.kernels = builds_of(self.folder)

    def write(self, **line: Any) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def item(self, name: str, key: str, work: Callable[[], dict[str, Any]]) -> None:
        """Do `work` for build `name`, unless `key` is done or the build has failed."""
        if name in self.bad or key in self.done:
            return
        self.write(key=key, name=name, begin=True)
        result = work()
        if result.get("wrong"):
            self.bad.add(name)
        self.write(key=key, name=name, **result)

    def users(self, plan: Any) -> list[str]:
        """The builds that have the kernel of `plan`; the base first."""
        from vc_attention.kernels.launch.attend import kernel_name

        kernel = kernel_name(plan, self.torch.bfloat16)
        return sorted((n for n, names in self.kernels.items() if kernel in names), key=lambda n: (n != BASE, n))

    def attend(self, name: str, images: Any, plan: Any, out: Any) -> None:
        from vc_attention.kernels.launch.attend import attend

        reason = attend(images, plan, out, folder=self.folder / name / "sm_90a")
        if reason is not None:
            raise RuntimeError(f"{name}: {reason.text}")

    def check(self) -> None:
        """Every build against the specification, on outputs poisoned with NaN and a guard behind them."""
        torch, bench = self.torch, self.bench
        for n, (b, h, lq, lkv) in enumerate(CHECK_SHAPES):
            self.write(note=f"checks of {lkv} keys")
            q, k, v, labels = bench.tokens(h, lq, lkv, b, n, torch.bfloat16)
            rows = torch.randperm(lq, device="cuda")[:512]
            want = bench.exact(q, k, v, rows)
            for plan_name in PLANS:
                plan = bench.PLANS[plan_name]
                images = bench.prepare(q, k, v, plan, labels)
                spec = bench.spec_attention(q, k, v, plan, labels)
                spec_error = bench.relative(spec[:, :, rows], want)
                for name in self.users(plan):
                    work = partial(self.compare, name, images, plan, (b, lq, h), rows, want, spec, spec_error)
                    self.item(name, f"check {plan_name} {b, h, lq, lkv} {name}", work)

    def compare(self, name, images, plan, shape, rows, want, spec, spec_error) -> dict[str, Any]:
        torch, bench = self.torch, self.bench
        b, lq, h = shape
        size = b * lq * h * 128
        buffer = torch.full((size + 4096,), float("nan"), dtype=torch.bfloat16, device="cuda")
        out = buffer[:size].view(b, lq, h, 128)
        self.attend(name, images, plan, out)
        torch.cuda.synchronize()
        out = out.transpose(1, 2)
        error, apart = bench.relative(out[:, :, rows], want), bench.relative(out, spec)
        ratio = error / max(spec_error, 1e-3)
        wrong = not (ratio < 1.1 or error < 4e-3) or not torch.isfinite(out).all().item()
        wrong = wrong or not torch.isnan(buffer[size:]).all().item()
        return {"error": error, "ratio": ratio, "apart": apart, "wrong": wrong}

    def time(self) -> None:
        """Rounds over the peer and all builds, a measurement of each plan."""
        torch, bench = self.torch, self.bench
        for s, h in bench.SPEED_SHAPES:
            self.write(note=f"images of {s} tokens")
            flops = 4 * s * s * 128 * h
            peer = bench.peers(s, h)[PEER]
            q, k, v, labels = bench.tokens(h, s, s, 1, 1, torch.bfloat16)
            images = {p: bench.prepare(q, k, v, bench.PLANS[p], labels) for p in PLANS}
            del q, k, v
            out = torch.empty(1, s, h, 128, dtype=torch.bfloat16, device="cuda")
            expected = {}
            for plan_name in PLANS:
                plan = bench.PLANS[plan_name]
                self.attend(BASE, images[plan_name], plan, out)
                expected[plan_name] = out[:, ::97].clone()
            torch.cuda.synchronize()
            for turn in range(self.rounds):
                self.item(PEER, f"time {s} {turn} {PEER}", partial(self.measure, peer, flops, s, "", None))
                for plan_name in PLANS:
                    plan = bench.PLANS[plan_name]
                    for name in self.users(plan):
                        call = partial(self.attend, name, images[plan_name], plan, out)
                        same = partial(bench.relative, out[:, ::97], expected[plan_name]) if turn == 0 else None
                        work = partial(self.measure, call, flops, s, plan_name, same)
                        self.item(name, f"time {s} {turn} {plan_name} {name}", work)
            del images, expected, peer
            torch.cuda.empty_cache()

    def measure(self, call, flops, s, plan_name, same) -> dict[str, Any]:
        ms, state = self.bench.median_ms(call, self.seconds)
        result = {"plan": plan_name, "s": s, "ms": ms, "tflops": flops / ms / 1e9, "state": state}
        if same is not None:
            result["apart"] = same()
            result["wrong"] = not result["apart"] < 0.03
        return result


def read_lines(log: Path) -> list[dict[str, Any]]:
    """What workers have written so far; a half-written last line is left out."""
    lines = []
    for text in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def supervise(arguments: argparse.Namespace, log: Path) -> dict[str, str]:
    """Run workers until one finishes or the budget is spent. Returns the builds that failed, with the reason."""
    failed: dict[str, str] = {}
    stop = time.monotonic() + arguments.budget
    while time.monotonic() < stop:
        command = [sys.executable, __file__, str(arguments.folder), "--log", str(log), "--skip", *failed]
        command += ["--seconds", str(arguments.seconds), "--rounds", str(arguments.rounds)]
        size, heard = -1, time.monotonic()
        with subprocess.Popen(command) as process:
            while process.poll() is None and time.monotonic() < min(stop, heard + SILENCE):
                time.sleep(0.2)
                if log.exists() and log.stat().st_size != size:
                    size, heard = log.stat().st_size, time.monotonic()
            hung = process.poll() is None
            if hung:
                process.kill()
        if process.returncode == 0 or time.monotonic() >= stop:
            break
        lines = read_lines(log)
        if not lines or not lines[-1].get("begin"):  # the last item was done, or none begun
            print(f"The worker ended with {process.returncode} outside of any build.", flush=True)
            break
        failed[lines[-1]["name"]] = f"{'hung' if hung else 'faulted'} in {lines[-1]['key']}"
        print(f"{lines[-1]['name']} {failed[lines[-1]['name']]}", flush=True)
        if lines[-1]["name"] in (BASE, PEER):
            break
    return failed


def report(lines: list[dict[str, Any]], failed: dict[str, str]) -> list[dict[str, Any]]:
    """Print the table; returns its rows."""
    for name, reason in failed.items():
        print(f"FAILED {name}: {reason}")
    checks = [line for line in lines if line.get("key", "").startswith("check") and not line.get("begin")]
    worst: dict[str, float] = {}
    for line in checks:
        worst[line["name"]] = max(worst.get(line["name"], 0.0), line["ratio"] if line["error"] > 4e-3 else 0.0)
    for line in lines:
        if line.get("wrong"):
            print(f"WRONG {line}")
    times: dict[tuple[int, str, str], dict[str, dict[str, Any]]] = {}
    for line in lines:
        if "ms" in line:
            turn = line["key"].split()[2]
            times.setdefault((line["s"], line["plan"], line["name"]), {})[turn] = line
    rows = []
    for (s, plan, name), by_turn in times.items():
        speeds = [line["tflops"] for line in by_turn.values()]
        base = times.get((s, plan, BASE), {})
        gains = [line["tflops"] / base[turn]["tflops"] for turn, line in by_turn.items() if turn in base]
        row = {
            "s": s,
            "plan": plan or "-",
            "name": name,
            "tflops": round(statistics.median(speeds), 1),
            "spread": [round(min(speeds), 1), round(max(speeds), 1)],
            "gain": round(statistics.median(gains), 4) if gains else None,
            "check": round(worst.get(name, 0.0), 3),
            "apart": next((line["apart"] for line in by_turn.values() if "apart" in line), None),
            "state": list(by_turn.values())[-1]["state"],
        }
        rows.append(row)
    rows.sort(key=lambda r: (r["s"], r["plan"], -r["tflops"]))
    columns = f"{'S':>6} {'plan':15} {'build':22} {'TFLOP/s':>8} {'min':>7} {'max':>7} {'x base':>7} {'check':>6}"
    print(columns + "  apart, state")
    for r in rows:
        gain = f"{r['gain']:.3f}" if r["gain"] else ""
        apart = f"{r['apart']:.4f}" if r["apart"] is not None else ""
        print(
            f"{r['s']:6d} {r['plan']:15} {r['name']:22} {r['tflops']:8.1f} {r['spread'][0]:7.1f} {r['spread'][1]:7.1f} "
            f"{gain:>7} {r['check']:6.3f}  {apart} {r['state']}"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds of the sm_90a attention kernel against each other.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=0.25, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--budget", type=float, default=230.0, help="seconds after which the table is made")
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.log:
        worker = Worker(arguments)
        worker.check()
        worker.time()
        return 0
    builds_of(arguments.folder)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        failed = supervise(arguments, log)
        lines = read_lines(log)
    rows = report(lines, failed)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "failed": failed, "lines": lines}, indent=1))
    wrong = any(line.get("wrong") for line in lines)
    return 1 if failed or wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
