#!/usr/bin/env python3
"""What the hook and its numeric guard cost, and whether an accelerated layer ever waits for the device.

    python benchmarks/hook_overhead.py [--calls N] [--json]

Prints, for each kind of declined call, the median time per call with the hook, the time of calling the attention
function directly, and the difference (bar: 50 microseconds). Then the time that this host needs to queue the guard of
one call (a few keys, so that on a CPU, too, it is mostly launching; `guard_cost.py` has the GPU's side). Then runs
accelerated calls under modes that count what brings a tensor's value to the host (`item`, `float()`, `tolist`, `bool`
and the operations below them): none in a layer, guarded or not, and one for the first pass of each phase.
Exit status 1 when a bar is missed. Runs on a CPU in a few seconds; needs no ComfyUI.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

BAR_MICROSECONDS = 50.0
#: Methods and operations by which a tensor's value, or a shape that depends on it, reaches the host.
HOST_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "equal", "__float__", "__int__", "__bool__")
HOST_OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class MethodReads(TorchFunctionMode):
    """Counts reads in Python code: `tolist` of a CPU tensor, for example, is no torch operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in HOST_READS:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operations, views aside: about as many launches on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class OperationReads(TorchDispatchMode):
    """Counts reads below Python: inside other operations, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in HOST_OPERATIONS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def load_pack() -> None:
    """Import this checkout as `vc_attention`."""
    path = Path(__file__).resolve().parent.parent / "tools" / "pack.py"
    spec = importlib.util.spec_from_file_location("_vc_attention_pack_loader", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load_pack()


class Bench:
    """A session with its hook, without ComfyUI: the records that the wrapper makes are made here by hand."""

    def __init__(self, **chosen) -> None:
        from vc_attention.nodes import hook, host
        from vc_attention.nodes.options import PatchOptions
        from vc_attention.nodes.session import Session

        self.host = host
        self.session = Session(PatchOptions(backend="spec", **chosen))
        self.override = hook._override(self.session, None)
        self.wrapper = hook._apply_model_wrapper(self.session)
        self.sampling = SimpleNamespace(sigma_max=1.0, percent_to_sigma=lambda percent: 1.0 - percent)
        self.sample_sigmas = torch.linspace(1.0, 0.0, 9)

    def forward(self, sigma: float, body) -> object:
        """Run `body(transformer_options)` as one forward pass of the model."""
        options = {"sigmas": torch.tensor([sigma]), "sample_sigmas": self.sample_sigmas, "uuids": ["a"]}
        model = SimpleNamespace(model_sampling=self.sampling, diffusion_model=None)

        class Executor:
            class_obj = model

            def __call__(self, *args, **kwargs):
                return body(options)

        return self.wrapper(Executor(), torch.zeros(1), options["sigmas"], None, None, None, options)


def microseconds(function, calls: int, rounds: int = 15) -> float:
    """Median over rounds of the mean time per call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def declined_rows(calls: int) -> list[dict[str, object]]:
    """One row for each kind of declined call."""
    bench = Bench(min_tokens=4096, dense_blocks="3, single:0-2", start_percent=0.2)
    out = torch.zeros(1, 8, 256)

    def func(q, k, v, heads, mask=None, **kwargs):
        return out

    text = torch.zeros(1, 512, 256)
    video = torch.empty(1, 4096, 256)
    mask = torch.zeros(1, 1, 4096)
    kinds = {
        "text cross-attention (short)": ((video, text, text, 2), {}, 0.5),
        "masked": ((video, video, video, 2), {"mask": mask}, 0.5),
        "dense block": ((video, video, video, 2), {}, 0.5),
        "step outside start/end": ((video, video, video, 2), {}, 1.0),
    }
    rows = []
    for name, (args, extra, sigma) in kinds.items():

        def measure(options, args=args, extra=extra, name=name):
            options = {**options, "block_index": 3 if name == "dense block" else 5, "block_type": "double"}
            kwargs = {**extra, "transformer_options": options, "_inside_attn_wrapper": True}
            return (
                microseconds(lambda: func(*args, **kwargs), calls),
                microseconds(lambda: bench.override(func, *args, **kwargs), calls),
            )

        direct, hooked = bench.forward(sigma, measure)
        rows.append({"call": name, "direct_us": direct, "hooked_us": hooked, "overhead_us": hooked - direct})
    reasons = set(bench.session.stats.declined)
    if reasons != {"short", "mask", "dense_block", "step_range"} or bench.session.stats.accelerated:
        raise SystemExit(f"The benchmark did not measure declined calls: {reasons}.")
    return rows


def guard_row(calls: int) -> dict[str, float]:
    """Operations and microseconds of the guard of one call: 40 heads of 128 channels, `keys` keys in one chunk."""
    from vc_attention.kernels import agreement

    keys = 1024
    q, k, v, out = (torch.randn(1, 40, keys, 128).to(torch.bfloat16) for _ in range(4))
    with Operations() as operations:
        agreement(q, k, v, out)
    took = microseconds(lambda: agreement(q, k, v, out), max(1, calls // 200), 5)
    return {"keys": keys, "operations": operations.count, "us": took}


def host_reads(layers: int = 6) -> dict[str, int]:
    """Host reads per forward pass (planning) and per accelerated call, over group, reuse and plain steps.

    The kernel and the grouping are replaced by stand-ins: what is counted is the hook's own part of a layer, the
    numeric guard included.
    """
    from vc_attention.nodes import engine
    from vc_attention.nodes import guard as numeric_guard

    bench = Bench(min_tokens=64, group_fraction=0.5, reuse_steps=2)
    engine.attention = lambda q, k, v, plan, labels, scale, backend: torch.nn.functional.scaled_dot_product_attention(
        q, k, v
    )
    engine.group = lambda v, groups, previous: engine_labels(v)
    guarded: list[int] = []
    agreement = numeric_guard.agreement
    numeric_guard.agreement = lambda *given: guarded.append(1) or agreement(*given)
    x = torch.randn(1, 256, 256)
    counts = {"forwards": 0, "calls": 0, "reads_in_calls": 0, "reads_in_forwards": 0, "guarded": 0}
    for step in range(8):
        with MethodReads() as outer:

            def layers_of(options):
                with MethodReads() as methods, OperationReads() as operations:
                    for index in range(layers):
                        options["block_index"] = index
                        bench.override(None, x, x, x, 2, transformer_options=options)
                counts["reads_in_calls"] += len(methods.seen) + len(operations.seen)
                counts["calls"] += layers

            bench.forward(1.0 - step / 8, layers_of)
        counts["forwards"] += 1
        counts["reads_in_forwards"] += len(outer.seen)
    stats = bench.session.stats
    counts["guarded"] = len(guarded)
    if stats.declined or len(guarded) != 3 * layers:
        raise SystemExit(
            f"The guard did not look at the first pass of each phase, once: {len(guarded)} calls, {stats}."
        )
    if (stats.grouped, stats.reused, stats.plain) != (2 * layers, 2 * layers, 4 * layers):
        raise SystemExit(f"The benchmark did not run the phases it meant to: {stats}.")
    return counts


def engine_labels(v):
    """A stand-in grouping: every token in group 0."""
    from vc_attention.kernels import Labels

    b, h, length, d = v.shape
    return Labels(torch.zeros(b, h, length, dtype=torch.uint8), torch.zeros(b, h, 1, d))


def main() -> int:
    """Print the tables; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000, help="calls per round (15 rounds)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args()
    load_pack()
    torch.set_num_threads(1)
    rows = declined_rows(arguments.calls)
    guard = guard_row(arguments.calls)
    reads = host_reads()
    worst = max(float(row["overhead_us"]) for row in rows)
    # The schedule, one for each forward pass, and one more for the first pass of each phase (three).
    allowed = 1 + reads["forwards"] + 3
    passed = worst < BAR_MICROSECONDS and reads["reads_in_calls"] == 0 and reads["reads_in_forwards"] <= allowed
    if arguments.json:
        print(json.dumps({"declined": rows, "guard": guard, "host_reads": reads, "passed": passed}))
        return 0 if passed else 1
    print(f"{'declined call':<32}{'direct us':>12}{'hooked us':>12}{'overhead us':>13}")
    for row in rows:
        print(f"{row['call']:<32}{row['direct_us']:>12.2f}{row['hooked_us']:>12.2f}{row['overhead_us']:>13.2f}")
    print(f"bar: overhead under {BAR_MICROSECONDS:g} us; worst {worst:.2f} us")
    print()
    print(
        f"guard of one call (40 heads, {guard['keys']:g} keys): {guard['operations']:g} operations, "
        f"{guard['us']:.0f} us"
    )
    print()
    print(
        f"host reads: {reads['reads_in_calls']} in {reads['calls']} accelerated calls, {reads['guarded']} of them "
        "guarded (bar: 0);"
    )
    print(f"            {reads['reads_in_forwards']} in {reads['forwards']} forward passes (at most {allowed}: the")
    print("            schedule, one per pass, one more for the first pass of each phase)")
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
