"""Attention calls as a model makes them, beside their peers, in one run on one GPU.

    python benchmarks/whole_call.py [--kernels FOLDER] [--shapes wan720,wan480,hv15,h3] [--json FILE]

Every row starts from bf16 q, k, v and ends with the bf16 output; "kernel alone" starts from prepared images. Rows take
turns for `--rounds` rounds, so that heat and the power limit meet all of them alike; the number is the median of all
timings. Errors are relative L2 against fp32 attention on sampled rows of two heads. Peers that cannot be imported are
named and left out.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("vc_pack", ROOT / "tools" / "pack.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.load_pack()

from vc_attention import kernels  # noqa: E402
from vc_attention.kernels import FAITHFUL, FAST, Plan, Reason  # noqa: E402
from vc_attention.kernels.launch import attend, call, prepare  # noqa: E402

#: Name -> tokens, heads (batch 1, head dimension 128).
SHAPES = {
    "wan720": (75_600, 40),
    "wan720x8": (75_600, 8),
    "wan480": (32_760, 40),
    "hv15": (111_600, 16),
    "h3": (37_710, 56),
}
PEER = "FlashAttention-4 BF16"
ROWS = 256

Call = Callable[[], torch.Tensor]


def tensors(length: int, heads: int) -> tuple[torch.Tensor, ...]:
    """q, k, v as views [1, H, L, 128] of [1, L, H, 128] bf16: noise around 64 clusters in K and V, shuffled."""
    g = torch.Generator("cuda").manual_seed(0)
    made = []
    member = torch.randint(0, 64, (length,), device="cuda", generator=g)
    for scale in (0.0, 0.4, 1.0):
        x = torch.randn(1, length, heads, 128, device="cuda", generator=g, dtype=torch.bfloat16)
        centres = scale * torch.randn(64, heads, 128, device="cuda", generator=g, dtype=torch.bfloat16)
        made.append(x.add_(centres[member]).transpose(1, 2))
    return tuple(made)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    labels = kernels.group(v).labels
    warm = kernels.group(v)
    keyed = Plan(key_means=True)
    images = prepare.prepare(call.kernels_for(q.device), q, k, v, FAST, labels)
    if isinstance(images, Reason):
        raise SystemExit(images.text)
    out = torch.empty((1, q.shape[2], q.shape[1], 128), dtype=q.dtype, device=q.device)

    def alone() -> torch.Tensor:
        attend.attend(images, FAST, out)
        return out.transpose(1, 2)

    return {
        "fast, kernel alone": alone,
        "fast, reuse step": lambda: kernels.attention(q, k, v, FAST, labels),
        "fast, grouping step (cold)": lambda: kernels.attention(q, k, v, FAST, kernels.group(v).labels),
        "fast, grouping step (warm)": lambda: kernels.attention(q, k, v, FAST, kernels.group(v, 0, warm).labels),
        "fast, plain step": lambda: kernels.attention(q, k, v, FAST),
        "fast + key means, reuse step": lambda: kernels.attention(q, k, v, keyed, labels),
        "faithful, reuse step": lambda: kernels.attention(q, k, v, FAITHFUL, labels),
    }


def peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(backend: SDPBackend) -> Call:
        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        return run

    found = {"cuDNN BF16": sdpa(SDPBackend.CUDNN_ATTENTION), "FlashAttention-2 BF16": sdpa(SDPBackend.FLASH_ATTENTION)}
    try:
        from flash_attn.cute.interface import flash_attn_func

        def flash4() -> torch.Tensor:
            got = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            return (got[0] if isinstance(got, tuple) else got).transpose(1, 2)

        found[PEER] = flash4
    except ImportError as error:
        print(f"not importable: flash-attn-4 ({error})")
    try:
        from comfy_kitchen import sage_attention

        int8 = getattr(sage_attention, "int8_attention", None) or sage_attention._int8_attention_cuda
        a, b, c = (t.contiguous() for t in (q, k, v))
        found["comfy-kitchen INT8"] = lambda: int8(a, b, c)
    except (ImportError, AttributeError) as error:
        print(f"not importable: comfy-kitchen ({error})")
    try:
        from sageattention import sageattn

        found["SageAttention"] = lambda: sageattn(q, k, v, tensor_layout="HND")
    except ImportError as error:
        print(f"not importable: sageattention ({error})")
    return found


def errors(calls: dict[str, Call], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, float]:
    """Relative L2 error of each call on sampled rows of the first and last head; calls that fail are dropped."""
    rows = torch.randperm(q.shape[2], generator=torch.Generator().manual_seed(1))[:ROWS].to(q.device)
    heads = [0, q.shape[1] - 1]
    part = (q[:, heads][:, :, rows].float(), k[:, heads].float(), v[:, heads].float())
    exact = torch.softmax(part[0] @ part[1].mT * 128**-0.5, -1) @ part[2]
    found = {}
    for name, run in list(calls.items()):
        try:
            got = run()[:, heads][:, :, rows].float()
            found[name] = float((got - exact).norm() / exact.norm())
        except Exception as error:  # a peer that does not run here must not end the run
            print(f"{name} failed: {type(error).__name__}: {str(error)[:200]}")
            del calls[name]
    return found


def time_all(calls: dict[str, Call], seconds: float, rounds: int) -> dict[str, float]:
    """Median milliseconds of each call over all rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in calls.items():
            total, first, counted = 0.0, True, 0
            while total < 1000 * seconds or counted < 2:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                end.synchronize()
                took = start.elapsed_time(end)
                total += took
                if not first:
                    times[name].append(took)
                    counted += 1
                first = False
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(run: Call) -> int:
    """Memory that one call takes on top of what is there, its output included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def bench(name: str, seconds: float, rounds: int) -> dict[str, object]:
    length, heads = SHAPES[name]
    q, k, v = tensors(length, heads)
    calls = ours(q, k, v) | peers(q, k, v)
    found = errors(calls, q, k, v)
    eight_bit = 3 * q.numel() + 2 * q.numel()  # q, k, v in 8 bit, and the bf16 output
    peak = peak_bytes(calls["fast, reuse step"]) / eight_bit - 1
    took = time_all(calls, seconds, rounds)
    base = took.get(PEER)
    print(f"\n{name}: {length} tokens, {heads} heads")
    print(f"A reuse call takes {100 * peak:.1f} % more memory than q, k, v in 8 bit and the output.\n")
    print("| | ms | TFLOP/s | x FA4 | relative error |\n|---|---|---|---|---|")
    for row, ms in took.items():
        ratio = f"{base / ms:.2f}" if base else ""
        rate = 4 * length**2 * heads * 128 / ms / 1e9
        print(f"| {row} | {ms:.3f} | {rate:.0f} | {ratio} | {found[row]:.4f} |", flush=True)
    return {"shape": name, "tokens": length, "heads": heads, "ms": took, "error": found, "peak_over_8bit": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=Path, help="folder of cubins, instead of the installed ones")
    parser.add_argument("--shapes", default="wan720,wan480,hv15,h3")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each row in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no NVIDIA GPU that torch can use, so there is nothing to time here.")
        return 2
    if arguments.kernels:
        attend.PREBUILT = arguments.kernels
    verdict = kernels.supports("cuda", FAST)
    if isinstance(verdict, Reason):
        print(verdict.text)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results = []
    for name in arguments.shapes.split(","):
        results.append(bench(name, arguments.seconds, arguments.rounds))
        gc.collect()
        torch.cuda.empty_cache()
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
