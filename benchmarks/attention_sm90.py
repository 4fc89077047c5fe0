"""The sm_90a attention kernel on a GPU: correctness against the specification, then speed beside cuDNN and FA4.

    python benchmarks/attention_sm90.py FOLDER [--check] [--speed] [--peers]

FOLDER: where kernels/build.py wrote the cubins. --check compares with the specification of the same plan on random
shapes; --speed times the kernel alone on prepared images; --peers adds BF16 attention of cuDNN and, where importable,
FlashAttention-4 in the same run. Every number is a median over launches timed with device events.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def _pack():
    spec = importlib.util.spec_from_file_location("vc_pack", ROOT / "tools" / "pack.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_pack()


_pack()
from vc_attention.kernels import FAITHFUL, FAST, Plan  # noqa: E402
from vc_attention.kernels.cute.reference import prepare  # noqa: E402
from vc_attention.kernels.launch.attend import attend  # noqa: E402
from vc_attention.kernels.spec.attention import attention as spec_attention  # noqa: E402

PLANS = {
    "fast": FAST,
    "fast plain": FAST.without_smoothing(),
    "fast key means": Plan(key_means=True),
    "faithful": FAITHFUL,
    "faithful plain": FAITHFUL.without_smoothing(),
    "faithful key means": Plan(probability="exp2", key_means=True),
}
SPEED_SHAPES = [(75600, 8), (32760, 40)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def tokens(heads: int, lq: int, lkv: int, batch: int, seed: int, dtype: torch.dtype):
    """Random q, k, v with clusters in k and v, and labels that know them."""
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=g)

    labels = torch.randint(0, 16, (batch, heads, lkv), device="cuda", generator=g)
    centres = 1.5 * normal(2, batch, heads, 16, 128)
    at = labels[..., None].expand(-1, -1, -1, 128)
    q = normal(batch, heads, lq, 128)
    k = normal(batch, heads, lkv, 128) + 0.4 * centres[0].gather(2, at)
    v = normal(batch, heads, lkv, 128) + centres[1].gather(2, at)
    return (*(x.to(dtype) for x in (q, k, v)), labels.to(torch.uint8))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    p = torch.softmax(q[:, :, rows].double() @ k.double().transpose(2, 3) * 128**-0.5, -1)
    return p @ v.double()


def check(folder: Path) -> bool:
    shapes = [(1, 2, 1, 1), (1, 1, 128, 128), (2, 3, 129, 257), (1, 2, 5, 1023), (1, 2, 300, 4096), (1, 1, 4096, 77)]
    shapes += [(1, 2, 200 + 7 * r, 640 + r) for r in range(0, 128, 5)]
    shapes += [(2, 2, 1000, 2048 + r) for r in (1, 63, 64, 65, 127)] + [(1, 1, 32768, 32768), (1, 2, 4040, 20001)]
    worst: dict[str, list[float]] = {}
    good = True
    for n, (b, h, lq, lkv) in enumerate(shapes):
        dtype = torch.bfloat16 if n % 3 else torch.float16
        q, k, v, labels = tokens(h, lq, lkv, b, n, dtype)
        rows = torch.randperm(lq, device="cuda")[:512]
        want = exact(q, k, v, rows)
        for name, plan in PLANS.items():
            used = labels if plan.demean else None
            images = prepare(q, k, v, plan, used)
            buffer = torch.full((b * lq * h * 128 + 4096,), float("nan"), dtype=dtype, device="cuda")
            out = buffer[: b * lq * h * 128].view(b, lq, h, 128)
            reason = attend(images, plan, out, folder=folder)
            if reason is not None:
                print("REFUSED", reason.text)
                return False
            torch.cuda.synchronize()
            out = out.transpose(1, 2)
            spec = spec_attention(q, k, v, plan, used)
            error, spec_error = relative(out[:, :, rows], want), relative(spec[:, :, rows], want)
            ratio, apart = error / max(spec_error, 1e-3), relative(out, spec)
            # Below 0.004 the output type's own rounding is what is seen.
            bad = not (ratio < 1.1 or error < 4e-3) or not torch.isfinite(out).all()
            bad = bad or not torch.isnan(buffer[b * lq * h * 128 :]).all()
            good = good and not bad
            entry = worst.setdefault(name, [0.0, 0.0, 0.0])
            entry[0], entry[1], entry[2] = max(entry[0], ratio), max(entry[1], apart), max(entry[2], error)
            if bad or lq > 4000:
                mark = "BAD " if bad else ""
                print(
                    f"{mark}{name} {b, h, lq, lkv} error {error:.4f} spec {spec_error:.4f} apart {apart:.4f}",
                    flush=True,
                )
    for name, (ratio, apart, error) in worst.items():
        print(f"{name:20s} {len(shapes)} shapes: error / spec's <= {ratio:.3f}, to spec <= {apart:.4f}, <= {error:.4f}")
    print("CHECK", "passed" if good else "FAILED", flush=True)
    return good


def clock() -> str:
    """SM clock and power now, where the management library is importable."""
    try:
        return f"{torch.cuda.clock_rate()} MHz, {torch.cuda.power_draw() / 1000:.0f} W"
    except (ModuleNotFoundError, RuntimeError, AttributeError):
        return "clock unknown"


def median_ms(call, seconds: float) -> tuple[float, str]:
    """Median time of one call, in calls back to back for about `seconds`, after a warm-up."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    n = max(5, min(200, int(seconds / max(time.perf_counter() - start, 1e-5))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    events[0].record()
    for i in range(n):
        call()
        events[i + 1].record()
    while not events[2 * n // 3].query():
        time.sleep(0.002)
    state = clock()
    torch.cuda.synchronize()
    times = sorted(events[i].elapsed_time(events[i + 1]) for i in range(n))
    return times[n // 2], state


def peers(s: int, h: int) -> dict:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, h, s, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    calls = {"cuDNN BF16": cudnn}
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        print(f"FlashAttention-4 not importable: {error}")
    else:
        q4, k4, v4 = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        calls["FlashAttention-4 BF16"] = partial(flash_attn_func, q4, k4, v4)
    return calls


def speed(folder: Path, with_peers: bool, seconds: float, names: list[str]) -> list[dict]:
    results = []
    for s, h in SPEED_SHAPES:
        flops = 4 * s * s * 128 * h
        calls = peers(s, h) if with_peers else {}
        q, k, v, labels = tokens(h, s, s, 1, 1, torch.bfloat16)
        out = torch.empty(1, s, h, 128, dtype=torch.bfloat16, device="cuda")
        for name in names:
            plan = PLANS[name]
            images = prepare(q, k, v, plan, labels if plan.demean else None)
            calls[name] = partial(attend, images, plan, out, folder=folder)
        del q, k, v
        torch.cuda.empty_cache()
        for name, call in calls.items():
            ms, state = median_ms(call, seconds)
            results.append({"name": name, "s": s, "heads": h, "ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1)})
            print(f"S={s} H={h} {name:22s} {ms:9.3f} ms {flops / ms / 1e9:7.1f} TFLOP/s  {state}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Correctness and speed of the sm_90a attention kernel.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.5, help="time spent on each measurement")
    parser.add_argument("--plans", nargs="*", default=list(PLANS), help="which plans to time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name(), torch.__version__)
    good = check(arguments.folder) if arguments.check else True
    results = speed(arguments.folder, arguments.peers, arguments.seconds, arguments.plans) if arguments.speed else []
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
