"""The 8-bit mma.sync attention kernels (sm_89, sm_120a) on the GPU that is there: correctness, then a rough speed.

    python kernels/build.py FOLDER --arch sm_90a --trial mma8      cross-compile, needs no GPU
    python benchmarks/attention_mma8.py FOLDER [--check] [--speed] [--json FILE]

FOLDER: kernels of the card's own architecture. On sm_90a they are those of sm_89 from the same source, compiled for
trials only: ptxas makes an E4M3 MMA of two fp16 ones there, so the products are exact, the accumulators are fp32, and
the speed says nothing about the cards that the kernels are for. --check compares with the specification of the same
plan on random shapes, images by `reference_mma8`; --speed times the kernel alone beside cuDNN.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from attention_sm90 import PLANS, exact, median_ms, peers, relative, tokens
from vc_attention.kernels import Plan, Reason
from vc_attention.kernels.cute import layouts_mma8 as lo
from vc_attention.kernels.cute.config_mma8 import ACCUMULATORS, config_of
from vc_attention.kernels.cute.reference_mma8 import prepare
from vc_attention.kernels.launch.images import Images
from vc_attention.kernels.launch.loader import Library, load_library
from vc_attention.kernels.spec.attention import attention as spec_attention

_OUTPUTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Name -> plan and type of the accumulators of a tile.
VARIANTS = {f"{name}, {acc}": (plan, acc) for acc in ACCUMULATORS for name, plan in PLANS.items()}
#: Lengths where a tile, a group of tiles or a query tile begins or ends, among the random ones.
_EDGES = [(1, 1), (128, 128), (129, 257), (5, 1023), (300, 1024), (16, 1025), (4096, 77), (257, 2049), (127, 3072)]
_SPEED = (32760, 16)


class RefusedError(Exception):
    """Why the kernels did not run."""


def attend(library: Library, images: Images, plan: Plan, accumulate: str, out: torch.Tensor) -> None:
    """Attention of `images` into `out` [B, Lq, H, 128], queued on the current stream."""
    config = config_of(plan, _OUTPUTS[out.dtype], accumulate)
    kernel = library.kernel(config.name if config else "")
    if isinstance(kernel, Reason):
        raise RefusedError(kernel.text)
    pointers = (images.q, images.k, images.v, images.qs, images.ks, images.sv, images.mu, images.qb, images.km, out)
    numbers = (images.lq, images.lkv, images.heads, lo.HEAD_DIM**-0.5 * math.log2(math.e))
    grid = (lo.query_tiles(images.lq), images.batch * images.heads, 1)
    reason = kernel.launch(grid, (*pointers, *numbers))
    if reason is not None:
        raise RefusedError(reason.text)


def shapes(count: int, seed: int) -> list[tuple[int, int, int, int]]:
    """(batch, heads, Lq, Lkv): the edges, two long ones and random ones."""
    chosen = [(1, 2, lq, lkv) for lq, lkv in _EDGES] + [(1, 1, 8192, 16384), (1, 2, 4040, 20001)]
    g = random.Random(seed)
    while len(chosen) < count:
        chosen.append((g.choice((1, 1, 2)), g.choice((1, 2, 3)), g.randint(1, 900), g.randint(1, 5000)))
    return chosen


def check(library: Library, count: int, seed: int) -> tuple[bool, list[dict]]:
    """Every plan on `count` shapes. Good: error at most 1.1 x the specification's, nothing outside `out` written."""
    found: dict[str, dict] = {
        name: {"plan": name, "shapes": 0, "failed": 0, "ratio": 0.0, "to_spec": 0.0, "error": 0.0} for name in VARIANTS
    }
    for n, (b, h, lq, lkv) in enumerate(shapes(count, seed)):
        dtype = torch.bfloat16 if n % 3 else torch.float16
        q, k, v, labels = tokens(h, lq, lkv, b, n, dtype)
        rows = torch.randperm(lq, device="cuda")[:512]
        want = exact(q, k, v, rows)
        specs: dict[str, torch.Tensor] = {}
        for name, (plan, accumulate) in VARIANTS.items():
            used = labels if plan.demean else None
            images = prepare(q, k, v, plan, used, accumulate)
            # What the kernel does not write stays NaN, and what it writes beyond the end shows.
            size = b * lq * h * lo.HEAD_DIM
            buffer = torch.full((size + 4096,), float("nan"), dtype=dtype, device="cuda")
            out = buffer[:size].view(b, lq, h, lo.HEAD_DIM)
            attend(library, images, plan, accumulate, out)
            torch.cuda.synchronize()
            result = out.transpose(1, 2)
            if plan.encode() not in specs:
                specs[plan.encode()] = spec_attention(q, k, v, plan, used)
            spec = specs[plan.encode()]
            error, spec_error = relative(result[:, :, rows], want), relative(spec[:, :, rows], want)
            ratio = error / max(spec_error, 1e-3)
            # Below 0.004 the output type's own rounding is what is seen.
            good = (ratio < 1.1 or error < 4e-3) and bool(torch.isfinite(result).all())
            good = good and bool(torch.isnan(buffer[size:]).all())
            entry = found[name]
            entry["shapes"] += 1
            entry["failed"] += not good
            entry["ratio"] = max(entry["ratio"], ratio if error >= 4e-3 else 0.0)
            entry["to_spec"] = max(entry["to_spec"], relative(result, spec))
            entry["error"] = max(entry["error"], error)
            if not good:
                print(f"BAD {name} {b, h, lq, lkv} error {error:.4f} specification {spec_error:.4f}", flush=True)
    print(f"{'plan':26s} {'shapes':>6s} {'failed':>6s} {'error / specification':>22s} {'to it':>7s} {'error':>7s}")
    for e in found.values():
        print(
            f"{e['plan']:26s} {e['shapes']:6d} {e['failed']:6d} {e['ratio']:22.3f} {e['to_spec']:7.4f} "
            f"{e['error']:7.4f}"
        )
    good = not any(e["failed"] for e in found.values())
    print("CHECK", "passed" if good else "FAILED", flush=True)
    return good, list(found.values())


def speed(library: Library, seconds: float) -> list[dict]:
    """TFLOP/s of every plan on prepared images, and of cuDNN."""
    s, h = _SPEED
    calls: dict[str, Callable] = {name: call for name, call in peers(s, h).items() if name.startswith("cuDNN")}
    q, k, v, labels = tokens(h, s, s, 1, 1, torch.bfloat16)
    out = torch.empty(1, s, h, lo.HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    for name, (plan, accumulate) in VARIANTS.items():
        images = prepare(q, k, v, plan, labels if plan.demean else None, accumulate)
        calls[name] = partial(attend, library, images, plan, accumulate, out)
    results = []
    for name, call in calls.items():
        ms, state = median_ms(call, seconds)
        tflops = 4 * s * s * lo.HEAD_DIM * h / ms / 1e9
        results.append({"name": name, "s": s, "heads": h, "ms": round(ms, 4), "tflops": round(tflops, 1)})
        print(f"S={s} H={h} {name:26s} {ms:9.3f} ms {tflops:7.1f} TFLOP/s  {state}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Correctness and rough speed of the 8-bit mma.sync kernels.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--shapes", type=int, default=50, help="how many shapes are checked")
    parser.add_argument("--seed", type=int, default=0, help="of the random shapes")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each measurement")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    library = load_library(arguments.folder, torch.device("cuda"))
    if isinstance(library, Reason):
        print(library.text)
        return 1
    device = torch.cuda.get_device_name()
    print(device, torch.__version__, library.manifest.arch)
    good, checks, speeds = True, [], []
    try:
        if arguments.check or not arguments.speed:
            good, checks = check(library, arguments.shapes, arguments.seed)
        if arguments.speed:
            speeds = speed(library, arguments.seconds)
    except RefusedError as refused:
        print("REFUSED", refused)
        return 1
    if arguments.json:
        facts = {"device": device, "torch": torch.__version__, "arch": library.manifest.arch}
        facts |= {"source": library.manifest.source, "check": checks, "speed": speeds}
        arguments.json.write_text(json.dumps(facts, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
