"""Preparation and grouping kernels on a GPU: images against the torch reference, then time and bandwidth of each pass.

    python benchmarks/preparation.py CUBINS [--check] [--time] [--small] [--json FILE]

CUBINS is the folder that `kernels/build.py` wrote. --check compares images with `kernels.cute.reference` over shapes,
layouts, dtypes and plans (poisoned outputs); --time measures Wan 720p (S = 75,600, 40 heads). Neither: both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

if "vc_attention" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("vc_pack", Path(__file__).resolve().parents[1] / "tools" / "pack.py")
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _module.load_pack()

from vc_attention.benchmarks.bench import passes
from vc_attention.benchmarks.bench.report import pass_text
from vc_attention.benchmarks.bench.results import Shape
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
from vc_attention.kernels.launch import prepare as prep
from vc_attention.kernels.launch.loader import load_library
from vc_attention.kernels.plan import Plan
from vc_attention.kernels.timing import Cuda


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


def measure(library, length=75600, heads=40, rounds=3):
    """Each launch of each kind of call by itself, and whole calls, at one shape in two layouts."""
    result = {"device": torch.cuda.get_device_name()}
    for layout in ("fused", "heads"):
        q, k, v = tensors(1, heads, length, length, layout, torch.bfloat16)
        copied, found = passes.measure(library, q, k, v, Cuda(watch=False), rounds)
        shape = Shape(layout, length, heads, [], passes=found, copy=copied)
        print("\n".join([f"{layout} layout, {length} tokens, {heads} heads", *pass_text(shape), ""]))
        result[layout] = asdict(shape)
        del q, k, v
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
