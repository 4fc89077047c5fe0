"""A run of the benchmark as it might have been: numbers that no card gave, to see what is made of numbers."""

from __future__ import annotations

from vc_attention.benchmarks.bench.results import CUDNN, FLASH_2, FLASH_4, Memory, Pass, Row, Run, Shape


def row(name: str, ms: float, ours: bool = False, **changed) -> Row:
    """A row of a made-up shape of 1,000 tokens."""
    values = {
        "name": name, "ours": ours, "whole_call": not name.endswith("kernel alone"), "ms": ms, "low": ms * 0.99,
        "high": ms * 1.02, "timings": 15, "rounds": [ms, ms, ms], "tflops": 5000 / ms, "error": 0.005,
        "mhz": 1500.0 + ms, "watts": 650.0 + ms,
    }  # fmt: skip
    return Row(**{**values, **changed})


def shape(*peers: str, name: str = "small") -> Shape:
    """Rows of ours at 10 ms and 12 ms, and peers at 20, 30, 40 ms in the order given."""
    rows = [row("fast, kernel alone", 10.0, True), row("fast, reuse step", 12.0, True)]
    rows += [row(peer, 10.0 * (n + 2)) for n, peer in enumerate(peers)]
    passes = [
        Pass("preparation, reuse step", "all", 1, 0.5, 1_000_000_000),
        Pass("preparation, reuse step", "q_bf16", 1, 0.2, 600_000_000),
        Pass("grouping, cold", "all", 1, 0.1, 90_000_000),
        Pass("grouping, cold", "group_update_bf16", 2, 0.01, 30_000_000),
    ]
    copied = Pass("copy", "copy", 1, 0.25, 1_000_000_000)
    return Shape(name, 1000, 4, rows, {}, passes, copied, Memory(5_150_000, 3_000_000, 2_000_000))


def run(*shapes: Shape) -> Run:
    """A run on a card that does not exist."""
    return Run(
        date="2026-11-29T12:00:00+00:00",
        command=["run.py bench", "--quick"],
        device={"name": "NVIDIA Imaginary", "capability": [9, 0], "memory": 1, "multiprocessors": 1, "driver": "1.2.3"},
        software={"torch": "2.11.0", "cuda": "13.0", "python": "3.12.0", "system": "Linux x86_64"},
        settings={"seconds": 0.25, "rounds": 3},
        peers={FLASH_4: "flash-attn-4 4.0.0", CUDNN: "cuDNN 91002", FLASH_2: "torch 2.11.0"},
        missing={"SageAttention (auto)": "sageattention cannot be used (ModuleNotFoundError: ...)"},
        kernels={"arch": "sm_90a", "package": "0.1.0", "source": "ab" * 32, "kernels": 40},
        shapes=list(shapes) or [shape(FLASH_4, CUDNN, FLASH_2)],
    )
