"""Preparation and grouping kernels on a GPU: images against the torch reference, then time and bandwidth of each pass.

    python benchmarks/preparation.py CUBINS [--check] [--time] [--small] [--json FILE]

CUBINS is the folder that `kernels/build.py` wrote. --check compares images with `kernels.cute.reference` over shapes,
layouts, dtypes and plans (poisoned outputs); --time measures Wan 720p (S = 75,600, 40 heads). Neither: both.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import torch

if "vc_attention" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("vc_pack", Path(__file__).resolve().parents[1] / "tools" / "pack.py")
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _module.load_pack()

from vc_attention.benchmarks.preparation_checks import (
    LAYOUTS,
    PLANS,
    check,
    check_call,
    check_capture,
    check_grouping,
    check_layouts,
    check_random,
    must,
    tensors,
)
from vc_attention.kernels.cute import layouts as lo
from vc_attention.kernels.launch import prepare as prep
from vc_attention.kernels.launch.loader import load_library
from vc_attention.kernels.plan import Plan


def host_time(library):
    """Microseconds of host time for one launch, one preparation (demean, labels) and one cold grouping, small shape."""
    q, k, v = tensors(1, 2, 512, 512, "fused", torch.bfloat16)
    labels, _ = must(prep.group(library, v))
    sums, mean = torch.empty(2, 1, 128, device="cuda"), torch.empty(2, 2, 128, device="cuda")
    kernel = must(library.kernel("k_mean"))
    calls = {
        "launch": lambda: kernel.launch((2, 1, 1), (sums, mean, 1, 512)),
        "prepare": lambda: prep.prepare(library, q, k, v, Plan(), labels),
        "group": lambda: prep.group(library, v),
    }
    out = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        times = []
        for _ in range(200):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        out[name] = statistics.median(times)
    print("host time, us: " + ", ".join(f"{name} {us:.1f}" for name, us in out.items()))
    return out


def milliseconds(call, repeats=15):
    """Median time of `call` on the device."""
    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def recorded(library, call):
    """The launches (name, closure) that `call` queues."""
    launches = []
    plain = prep.Queue.__call__

    def record(self, name, grid, *arguments):
        launches.append((name, lambda: plain(self, name, grid, *arguments)))
        plain(self, name, grid, *arguments)

    prep.Queue.__call__ = record
    try:
        kept = must(call())
    finally:
        prep.Queue.__call__ = plain
    return launches, kept


def pass_bytes(name, n, length):
    """Bytes that a pass must read and write, or None where it is not a pass over an operand."""
    read, coded = n * length * 256, n * lo.query_tiles(length) * 128 * 128
    keys = n * lo.key_blocks(length) * 128
    means, order = n * -(-length // 128) * 512, n * length * 4
    gathered = order if "gather" in name else 0
    with_means = means if "means" in name else 0
    table = {
        "q": read + coded + coded // 32 + (2 * coded if "means" in name else 0),
        "k_sum": read,
        "k": read + keys * 128 + gathered + with_means // 2,
        "v_stats": read + gathered + with_means,
        "v": read + keys * 136 + gathered + 2 * with_means,
        "group_assign": read + n * length,
    }
    for stem in ("group_assign", "v_stats", "k_sum", "k_mean", "q", "k", "v"):
        if name.startswith(stem + "_") or name == stem:
            return table.get(stem)
    return None


def measure(library, length=75600, heads=40):
    """Each launch of each kind of call by itself, and whole calls, at one shape in two layouts."""
    result = {"length": length, "heads": heads, "device": torch.cuda.get_device_name()}
    x = torch.randn(heads, length, 128, device="cuda").to(torch.bfloat16)
    y = torch.empty_like(x)
    ms = milliseconds(lambda x=x, y=y: y.copy_(x))
    copy = 2 * x.nbytes / ms / 1e6
    result["copy_GBs"] = copy
    print(f"copy of {x.nbytes / 1e6:.0f} MB: {ms:.3f} ms, {copy:.0f} GB/s")
    del x, y
    torch.cuda.empty_cache()
    for layout in ("fused", "heads"):
        q, k, v = tensors(1, heads, length, length, layout, torch.bfloat16)
        cold = lambda v=v: prep.group(library, v)  # noqa: E731
        labels, centroids = must(cold())
        calls = {
            "plain": lambda q=q, k=k, v=v: prep.prepare(library, q, k, v, PLANS["plain"]),
            "demean": lambda q=q, k=k, v=v, t=labels: prep.prepare(library, q, k, v, PLANS["demean"], t),
            "key_means": lambda q=q, k=k, v=v, t=labels: prep.prepare(library, q, k, v, PLANS["key_means"], t),
            "group cold": cold,
            "group warm": lambda v=v, c=centroids: prep.group(library, v, 0, c),
            "group assignment only": lambda v=v, c=centroids: prep.group(library, v, 0, c, False),
        }
        seen = {}
        for title, call in calls.items():
            launches, kept = recorded(library, call)
            whole = milliseconds(call, 9)
            result[f"{layout} {title}"] = whole
            print(f"{layout} | {title}: whole call {whole:.3f} ms = {whole / 176 * 100:.2f} % of 176 ms")
            for name, launch in launches:
                if name in seen and not name.startswith("group"):
                    continue
                ms = milliseconds(launch)
                seen[name] = ms
                nbytes = pass_bytes(name, heads, length)
                if nbytes and (name.startswith("group_assign") is False or ms > 0.2):
                    rate = nbytes / ms / 1e6
                    print(f"    {name}: {ms:.3f} ms, {rate:.0f} GB/s, {rate / copy * 100:.0f} % of copy")
                else:
                    print(f"    {name}: {ms:.3f} ms")
                result.setdefault(f"{layout} passes", {}).setdefault(name, []).append(ms)
            del kept, launches
        del q, k, v, calls, labels, centroids, cold, call, launch
        torch.cuda.empty_cache()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cubins", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--small", action="store_true", help="only a few small calls, for compute-sanitizer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    library = must(load_library(arguments.cubins, torch.device("cuda")))
    if arguments.small:
        for plan, layout in zip(PLANS.values(), LAYOUTS, strict=False):
            q, k, v = tensors(1, 2, 300, 515, layout, torch.bfloat16)
            labels, centroids = must(prep.group(library, v))
            must(prep.group(library, v, 0, centroids))
            must(prep.prepare(library, q, k, v, plan, labels))
        torch.cuda.synchronize()
        print("small calls done")
        return
    both = not (arguments.check or arguments.time)
    result = {}
    if arguments.check or both:
        result["images"] = check(library)
        result["grouping"] = check_grouping(library)
        result["random"] = check_random(library)
        result["capture"] = check_capture(library)
        result["call"] = check_call(library, arguments.cubins)
        result["offsets"] = check_layouts(library)
    if arguments.time or both:
        result["host"] = host_time(library)
        result["time"] = measure(library)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
