"""What the numeric guard costs a clip on one GPU, and that it waits for nothing.

    python benchmarks/guard_cost.py [--shapes wan720,wan480,hv15,h3] [--kernels FOLDER] [--json FILE]

Times the guard of one call (`kernels.agreement`) beside the attention call that it judges, on the same tensors, in
turns. A clip of S steps guards the first pass of each of its phases (group, reuse, plain), every layer of it, so that

    share = phases * layers * guard / (S * layers * attention) = 3 guard / (20 attention)

of the time in attention; the whole clip takes longer, so of the clip it is less. The bar is 0.5 % at wan720. "all
heads" is what looking at every head, instead of 8 a call, would cost. Exit status 1 when the bar is missed, when the
guard synchronises, takes more memory than it says, refuses the kernel's result or passes one with K in another order.
Where no kernel of ours runs, torch's own attention stands in, and the table says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("vc_pack", ROOT / "tools" / "pack.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.load_pack()

from vc_attention import kernels  # noqa: E402
from vc_attention.kernels import Reason, guard  # noqa: E402
from vc_attention.kernels.launch import attend  # noqa: E402

#: Name -> tokens, heads (batch 1, head dimension 128).
SHAPES = {
    "wan720": (75_600, 40),
    "wan480": (32_760, 40),
    "hv15": (111_600, 16),
    "h3": (37_710, 56),
    "short": (4_096, 40),
    "tiny": (1_024, 12),
}
BAR = 0.005
BAR_SHAPE = "wan720"

Call = Callable[[], torch.Tensor]


def tensors(length: int, heads: int, device: torch.device) -> list[torch.Tensor]:
    """q, k, v as views [1, H, L, 128] of [1, L, H, 128] bf16: noise around 64 shuffled clusters in K and V.

    Scores of about 3 nats, so that rows differ and a wrong kernel shows.
    """
    g = torch.Generator(device).manual_seed(0)
    member = torch.randint(0, 64, (length,), device=device, generator=g)
    made = []
    for scale in (0.0, 0.4, 1.0):
        x = torch.randn(1, length, heads, 128, device=device, generator=g).to(torch.bfloat16)
        centres = scale * torch.randn(64, heads, 128, device=device, generator=g)
        made.append(x.add_(centres.to(torch.bfloat16)[member]).transpose(1, 2))
    made[0] = made[0] * 3
    return made


#: Clock cycles that the device waits while the host queues what is timed: about 50 ms.
WAIT_CYCLES = 80_000_000


def milliseconds(calls: dict[str, Call], device: torch.device, rounds: int, repeats: int) -> dict[str, float]:
    """Median time of each call over `rounds` turns, each the mean of `repeats` calls back to back."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in calls.values():
        run()
    for _ in range(rounds):
        for name, run in calls.items():
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # As in a clip, where the host is ahead of the device: without it slow launches would be timed.
                torch.cuda._sleep(WAIT_CYCLES)
                start.record()
                for _ in range(repeats):
                    run()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) / repeats)
            else:
                began = time.perf_counter()
                for _ in range(repeats):
                    run()
                times[name].append((time.perf_counter() - began) * 1e3 / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def queueing_ms(run: Call, device: torch.device, repeats: int = 5) -> float:
    """Median time of the host alone; an error if `run` synchronises."""
    times = []
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e3)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return statistics.median(times)


def peak_bytes(run: Call, device: torch.device) -> int | None:
    """Memory that one call takes on top of what is there."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def bench(name: str, device: torch.device, steps: int, phases: int, rounds: int) -> dict[str, object]:
    """One shape's row, and the faults found."""
    length, heads = SHAPES[name]
    q, k, v = tensors(length, heads, device)
    plan = kernels.preset("fast", device)
    ours = not isinstance(kernels.supports(device, plan), Reason)
    labels = kernels.group(v).labels if ours else None

    def attention(key: torch.Tensor = k) -> torch.Tensor:
        if ours:
            return kernels.attention(q, key, v, plan, labels)
        return torch.nn.functional.scaled_dot_product_attention(q, key, v)

    out = attention()
    order = torch.randperm(length, device=device)
    good = float(kernels.agreement(q, k, v, out))
    bad = float(kernels.agreement(q, k, v, attention(k[:, :, order])))

    def every_head() -> torch.Tensor:
        sampled, guard.HEADS = guard.HEADS, heads
        try:
            return kernels.agreement(q, k, v, out)
        finally:
            guard.HEADS = sampled

    calls = {"attention": attention, "guard": lambda: kernels.agreement(q, k, v, out), "all heads": every_head}
    queueing = queueing_ms(calls["guard"], device)
    peak = peak_bytes(calls["guard"], device)
    took = milliseconds(calls, device, rounds, 3)
    share, share_all = (phases * took[row] / (steps * took["attention"]) for row in ("guard", "all heads"))
    least = kernels.least_agreement(plan)
    faults = []
    if name == BAR_SHAPE and share >= BAR:
        faults.append(f"{name}: the guard takes {100 * share:.2f} % of a clip's attention; the bar is {100 * BAR} %")
    if peak is not None and peak > 1.1 * guard.TEMPORARY_BYTES + (1 << 20):
        faults.append(f"{name}: the guard takes {peak / 2**20:.0f} MiB; it says {guard.TEMPORARY_BYTES >> 20}")
    if not good >= least > bad:
        faults.append(f"{name}: agreement {good:.4f} of the kernel, {bad:.4f} with K in another order; least {least}")
    return {
        "shape": name,
        "tokens": length,
        "heads": heads,
        "attention": "fast, reuse step" if ours else "torch's own attention",
        "ms": took,
        "queueing_ms": queueing,
        "peak_mib": None if peak is None else peak / 2**20,
        "share": share,
        "share_all_heads": share_all,
        "agreement": good,
        "agreement_permuted": bad,
        "faults": faults,
    }


def main() -> int:
    """Print the table; 1 when something is wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="wan720,wan480,hv15,h3,short")
    parser.add_argument("--kernels", type=Path, help="folder of cubins, instead of the installed ones")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--phases", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda", help="cpu: only to try this script, with --shapes tiny")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.shapes.split(",") if name not in SHAPES]
    if unknown:
        parser.error(f"unknown shape {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    device = torch.device(arguments.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print("There is no NVIDIA GPU that torch can use, so there is nothing to time here.")
            return 2
        device = torch.device("cuda", torch.cuda.current_device())
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if arguments.kernels:
        attend.PREBUILT = arguments.kernels
    rows = []
    print(f"{arguments.steps} steps, {arguments.phases} phases; times in ms, of one call and one layer\n")
    print("| shape | attention | guard | queueing it | MiB | share | all heads | share | agreement | K permuted |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in arguments.shapes.split(","):
        row = bench(name, device, arguments.steps, arguments.phases, arguments.rounds)
        rows.append(row)
        took, peak = row["ms"], row["peak_mib"]
        cells = [
            f"{name} ({row['attention']})",
            f"{took['attention']:.3f}",
            f"{took['guard']:.3f}",
            f"{row['queueing_ms']:.3f}",
            "" if peak is None else f"{peak:.1f}",
            f"{100 * row['share']:.3f} %",
            f"{took['all heads']:.3f}",
            f"{100 * row['share_all_heads']:.3f} %",
            f"{row['agreement']:.5f}",
            f"{row['agreement_permuted']:.3f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
    faults = [fault for row in rows for fault in row["faults"]]
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "faults": faults}, indent=1), encoding="utf-8")
    print("\n" + ("\n".join(faults) if faults else "passed"))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
