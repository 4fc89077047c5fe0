"""How far each plan and each other low-bit attention is from exact attention, on synthetic video tokens.

    python benchmarks/fidelity.py --tokens 8192 --heads 2 --seeds 3 --json fidelity.json
    python benchmarks/fidelity.py --memory

Prints the relative L2 error against fp64 attention, its ratio to the SageAttention2 and SageAttention3 emulations, and
the share of V's energy that block means remove. Exit status 1, with a sentence, when a bound is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

if "vc_attention" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("vc_pack", Path(__file__).resolve().parents[1] / "tools" / "pack.py")
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _module.load_pack()

from vc_attention.benchmarks import emulations, synthetic
from vc_attention.kernels import FAITHFUL, FAST, FOUR_BIT, Plan, attention
from vc_attention.kernels.spec.grouping import group
from vc_attention.kernels.spec.smoothing import block_energy_removed

#: Queries are taken in whole blocks of this many rows, because score scales and query means belong to such blocks.
ROWS = 128
FINE = {"score_groups": "per_thread"}

#: name -> (plan, grouped by k-means or in sequence order)
PLANS: dict[str, tuple[Plan, bool]] = {
    "faithful, per-thread scales": (replace(FAITHFUL, **FINE), True),
    "faithful, per-warp scales": (FAITHFUL, True),
    "fast, per-thread scales": (replace(FAST, **FINE), True),
    "fast, per-warp scales": (FAST, True),
    "fast with ExpCast as published, per-thread": (replace(FAST, probability="expcast", **FINE), True),
    "fast with ExpCast as published, per-warp": (replace(FAST, probability="expcast"), True),
    "fast with the subnormal chord, per-thread": (replace(FAST, probability="expcast_chord", **FINE), True),
    "faithful + key means, per-thread": (replace(FAITHFUL, key_means=True, **FINE), True),
    "fast + key means, per-warp": (replace(FAST, key_means=True), True),
    "faithful + clipped means, per-thread": (replace(FAITHFUL, clip_means=True, **FINE), True),
    "plain, exp2, per-thread (no grouping, no means)": (replace(FAITHFUL, **FINE).without_smoothing(), False),
    "plain, ExpCast, per-thread (no grouping, no means)": (replace(FAST, **FINE).without_smoothing(), False),
    "grouped without means, exp2, per-thread": (replace(FAITHFUL, **FINE).without_smoothing(), True),
    "sequence-order means, exp2, per-thread": (replace(FAITHFUL, **FINE), False),
    "FP8 scores, exp2, per-thread": (replace(FAITHFUL, scores="fp8", **FINE), True),
    "FP8 scores + key means, exp2, per-thread": (replace(FAITHFUL, scores="fp8", key_means=True, **FINE), True),
    "faithful with FP8 scores, per-warp": (replace(FAITHFUL, scores="fp8"), True),
    "fast with FP8 scores, per-warp": (replace(FAST, scores="fp8"), True),
    "faithful with FP8 scores + key means, per-warp": (replace(FAITHFUL, scores="fp8", key_means=True), True),
    "fast with FP8 scores + key means, per-warp": (replace(FAST, scores="fp8", key_means=True), True),
    "INT8 values, exp2, per-thread": (replace(FAITHFUL, values="int8", **FINE), True),
    "INT8 values without means, exp2, per-thread": (
        replace(FAITHFUL, values="int8", **FINE).without_smoothing(),
        False,
    ),
    "four_bit": (FOUR_BIT, True),
    "four_bit, scales on 6 alone": (replace(FOUR_BIT, adaptive_scales=False), True),
    "four_bit + key means": (replace(FOUR_BIT, key_means=True), True),
    "four_bit without means": (FOUR_BIT.without_smoothing(), False),
    "FP8 scores + NVFP4 values": (replace(FOUR_BIT, scores="fp8"), True),
    "FP8 scores + key means + NVFP4 values": (replace(FOUR_BIT, scores="fp8", key_means=True), True),
}
#: row -> (baseline, largest ratio to it). From the design: measured before, with a margin.
BOUNDS = {
    "faithful, per-thread scales": ("SageAttention2", 0.80),
    "faithful, per-warp scales": ("SageAttention2", 0.85),
    "fast, per-thread scales": ("SageAttention2", 0.93),
    "fast, per-warp scales": ("SageAttention2", 0.97),
    "four_bit": ("SageAttention3", 0.72),
}
#: order -> (share of V's energy that block means remove, tolerance). The paper's numbers.
ENERGY = {"sequence order": (0.08, 0.015), "4 x 4 x 8 cubes": (0.12, 0.015), "k-means groups": (0.36, 0.015)}
SHARED = " | shared"


def measure(tokens: int, heads: int, seeds: int, queries: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Relative errors of every row, and energy shares of every order, one number for each seed."""
    errors: dict[str, list[float]] = {}
    energy: dict[str, list[float]] = {name: [] for name in ENERGY}
    order = synthetic.cube_order(synthetic.grid_for(tokens))
    for seed in range(seeds):
        for shared in (False, True):
            q, k, v = synthetic.make_qkv(tokens, heads, seed=seed, share_clusters=shared)
            q = q[..., query_rows(tokens, queries), :]
            labels, _ = group(v)
            if not shared:
                for name, tensor, of in zip(ENERGY, (v, v[:, :, order], v), (None, None, labels), strict=True):
                    energy[name].append(block_energy_removed(tensor, of))
            true = emulations.exact(q, k, v)
            for name, run in rows(q, k, v, labels):
                started = time.perf_counter()
                out = run()
                error = float((out - true).norm() / true.norm())
                errors.setdefault(name + (SHARED if shared else ""), []).append(error)
                progress(f"seed {seed} {'shared' if shared else 'own'} clusters: {name}", time.perf_counter() - started)
    return errors, energy


def rows(q: Tensor, k: Tensor, v: Tensor, labels: Tensor) -> list[tuple[str, Callable[[], Tensor]]]:
    """(name, call) of every emulation and plan."""

    def emulation(name: str) -> Callable[[], Tensor]:
        return lambda: emulations.EMULATIONS[name](q, k, v)

    def ours(name: str) -> Callable[[], Tensor]:
        plan, grouped = PLANS[name]
        return lambda: attention(q, k, v, plan, labels if grouped else None, backend="spec")

    return [(n, emulation(n)) for n in emulations.EMULATIONS] + [(n, ours(n)) for n in PLANS]


def query_rows(tokens: int, queries: int) -> Tensor:
    """Whole 128-row blocks of queries, spread evenly over the sequence."""
    blocks = max(1, min(queries, tokens) // ROWS)
    starts = torch.arange(blocks) * (tokens // ROWS) // blocks * ROWS
    return (starts[:, None] + torch.arange(ROWS)).reshape(-1)


def progress(what: str, seconds: float) -> None:
    """One line on a terminal that the next one overwrites."""
    if sys.stderr.isatty():
        print(f"\r{what[:90]:90} {seconds:5.1f} s", end="", file=sys.stderr, flush=True)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def ratio(errors: dict[str, list[float]], name: str, baseline: str) -> float:
    """Mean over the seeds of the row's error divided by the baseline's on the same tensors."""
    base = baseline + (SHARED if name.endswith(SHARED) else "")
    return mean([a / b for a, b in zip(errors[name], errors[base], strict=True)])


def table(errors: dict[str, list[float]], energy: dict[str, list[float]]) -> str:
    """The report, as Markdown."""
    lines = ["| block means over | energy of V removed | seeds | published |", "|---|---|---|---|"]
    for name, shares in energy.items():
        each = ", ".join(f"{100 * s:.1f}" for s in shares)
        lines.append(f"| {name} | {100 * mean(shares):.1f} % | {each} | {100 * ENERGY[name][0]:.0f} % |")
    for shared in (False, True):
        lines += ["", "K shares V's clusters:" if shared else "K has clusters of its own:", ""]
        lines += ["| row | relative L2 error | to SageAttention2 | to SageAttention3 | bound |"]
        lines += ["|---|---|---|---|---|"]
        for name in errors:
            if name.endswith(SHARED) == shared:
                two, three = (f"{ratio(errors, name, f'SageAttention{n}'):.3f}" for n in (2, 3))
                bound = "" if name not in BOUNDS else f"{BOUNDS[name][1]:.2f} x {BOUNDS[name][0]}"
                row = name.removesuffix(SHARED)
                lines.append(f"| {row} | {100 * mean(errors[name]):.3f} % | {two} | {three} | {bound} |")
    return "\n".join(lines)


def missed(errors: dict[str, list[float]], energy: dict[str, list[float]]) -> list[str]:
    """A sentence for each bound that does not hold."""
    out = []
    for name, (target, tolerance) in ENERGY.items():
        if abs(mean(energy[name]) - target) > tolerance:
            out.append(
                f"Block means over {name} remove {100 * mean(energy[name]):.1f} % of V's energy; the generator must "
                f"give {100 * target:.0f} % within {100 * tolerance:.1f} points before any error here means something."
            )
    for name, (baseline, bound) in BOUNDS.items():
        value = ratio(errors, name, baseline)
        if value > bound:
            out.append(f"{name}: {value:.3f} times the error of {baseline}; at most {bound:.2f} is expected.")
    return out


def memory() -> int:
    """Time and peak memory of the specification at 8 heads x 16384 tokens, all queries. Exit status 1 above 2 GB."""
    import resource

    def peak() -> float:
        # ru_maxrss is in kilobytes on Linux and in bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, 16384, 128, generator=g).to(torch.bfloat16) for _ in range(3))
    before = peak()
    print(f"{before:.2f} GB before: torch, and q, k, v in bf16")
    started = time.perf_counter()
    labels, _ = group(v)
    print(f"{peak():.2f} GB after grouping, {time.perf_counter() - started:.1f} s")
    for name, plan in (("fast", FAST), ("faithful", FAITHFUL), ("four_bit", FOUR_BIT)):
        started = time.perf_counter()
        attention(q, k, v, plan, labels, backend="spec")
        print(f"{peak():.2f} GB after {name}, {time.perf_counter() - started:.1f} s", flush=True)
    if peak() >= 2.0:
        print(f"The specification needs {peak():.2f} GB for 8 heads of 16384 tokens; it must stay under 2 GB.")
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of K and V, a power of two")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--queries", type=int, default=1024, help="query rows for each head, in whole blocks of 128")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (0: torch's choice)")
    parser.add_argument("--json", type=Path, help="write every number to this file as well")
    parser.add_argument("--memory", action="store_true", help="only measure time and peak memory at 8 x 16384 tokens")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.memory:
        return memory()
    errors, energy = measure(options.tokens, options.heads, options.seeds, options.queries)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(table(errors, energy))
    faults = missed(errors, energy)
    if options.json:
        settings = {name: getattr(options, name) for name in ("tokens", "heads", "seeds", "queries")}
        record = {"settings": settings, "errors": errors, "energy": energy, "missed": faults}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
