"""From a fresh process to the first result on installed kernels, and what a launch costs the host.

    python benchmarks/first_call.py (--kernels FOLDER | --wheel FILE) [--json FILE]

FOLDER: with manifest.json and cubins, or with a folder of them for each architecture. FILE: a kernel wheel; it is
unpacked as pip would install it, and nothing else is there. In every process nvidia-cutlass-dsl cannot be imported.

Two processes run one after the other with one user folder, so the second finds the verdict of the first. "To the first
result" is what the pack adds to a ComfyUI that runs already: its import, finding, loading and testing the kernels, and
one attention call, waited for. Launches and calls are timed on the host only, in short bursts so that the device's
queue never fills; the number is the median burst. Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BAR_FIRST_RESULT = 2.0
BAR_LAUNCH = 10.0
#: Tokens and heads of the first call: a short clip.
TOKENS, HEADS = 8190, 24
BURST, BURSTS = 100, 50


def child(prebuilt: Path, user: Path) -> dict[str, object]:
    """One fresh process: times in seconds, host times in microseconds."""
    start = time.perf_counter()
    times: dict[str, float] = {}

    def lap(name: str) -> None:
        nonlocal start
        now = time.perf_counter()
        times[name] = now - start
        start = now

    sys.modules["cutlass"] = None  # type: ignore[assignment]
    import torch

    lap("import torch")
    if not torch.cuda.is_available():
        raise SystemExit("There is no NVIDIA GPU that torch can use, so there is nothing to time here.")
    q, k, v = (torch.randn(1, HEADS, TOKENS, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.synchronize()
    lap("torch's CUDA start and the inputs")
    spec = importlib.util.spec_from_file_location("vc_pack", ROOT / "tools" / "pack.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load_pack()
    from vc_attention import kernels
    from vc_attention.kernels import preset
    from vc_attention.kernels.launch import attend, call

    lap("import of the pack")
    attend.PREBUILT = prebuilt
    kernels.set_folder(user)
    plan = preset("fast", "cuda")
    verdict = kernels.supports("cuda", plan)
    if not verdict:
        raise SystemExit(str(verdict))
    lap("kernels found, loaded and tested")
    out = kernels.attention(q, k, v, plan)
    torch.cuda.synchronize()
    lap("first call, to its result")
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    error = ((out.float() - exact.float()).norm() / exact.float().norm()).item()
    rows = [row.reason for row in kernels.backends() if row.name == verdict.backend and row.available]
    library = call.kernels_for(q.device)
    host = {}
    if not isinstance(library, kernels.Reason):
        host = host_times(torch, kernels, call, library)
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "driver": library.driver_version,
        "kernels": len(library.manifest.kernels),
        "backend": verdict.backend,
        "said": rows[:1],
        "seconds": times,
        "to_first_result": sum(times[name] for name in list(times)[2:]),
        "error": error,
        "host_us": host,
    }


def host_times(torch, kernels, call, library) -> dict[str, float]:
    """Host time of launches and calls, in microseconds, on shapes that keep the device idle."""
    from vc_attention.kernels import preset
    from vc_attention.kernels.launch import attend, prepare

    q, k, v = (torch.randn(1, 1, 256, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    labels = torch.zeros(1, 1, 256, dtype=torch.uint8, device="cuda")
    out = torch.empty(1, 256, 1, 128, device="cuda", dtype=torch.bfloat16)
    plan = preset("fast", "cuda")
    images = prepare.prepare(library, q, k, v, plan)
    stream = library.stream()
    sums = torch.zeros(1, 1, 128, device="cuda")
    mean = torch.zeros(1, 2, 128, device="cuda")
    single = library.kernel("k_mean")
    clustered = library.kernel(attend.kernel_name(plan, torch.bfloat16, library.manifest.arch))
    pointers = (images.q, images.k, images.v, images.qs, images.ks, images.sv, images.mu, images.qb, images.km, out)
    grid = (clustered.entry.cluster, 1, 1)

    def burst(run: Callable[[], object]) -> float:
        took = []
        for _ in range(BURSTS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BURST):
                run()
            took.append((time.perf_counter() - start) / BURST * 1e6)
        return statistics.median(took)

    def op(labels=None) -> Callable[[], object]:
        return lambda: kernels.attention(q, k, v, plan, labels)

    return {
        "launch, 4 parameters": burst(lambda: single.launch((1, 1, 1), (sums, mean, 1, 256), stream)),
        "launch, 14 parameters, cluster": burst(lambda: clustered.launch(grid, (*pointers, 256, 256, 1, 0.1), stream)),
        "of which the driver, 4 parameters": burst(lambda: single._start.queue((1, 1, 1), stream)),
        "of which the driver, 14 parameters, cluster": burst(lambda: clustered._start.queue(grid, stream)),
        "stream and context, once a call": burst(library.stream),
        "attention on prepared images": burst(lambda: attend.attend(images, plan, out, kernels=library, stream=stream)),
        "preparation": burst(lambda: prepare.prepare(library, q, k, v, plan)),
        "whole call, plain step": burst(lambda: call.attention_on(library, q, k, v, plan, None, None)),
        "whole call, reuse step": burst(lambda: call.attention_on(library, q, k, v, plan, labels, None)),
        "kernels.attention, plain step": burst(op()),
        "kernels.attention, reuse step": burst(op(labels)),
        "for comparison: torch.add of two small tensors": burst(lambda: torch.add(sums, sums)),
        "for comparison: torch SDPA": burst(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)),
    }


def lay_out(arguments: argparse.Namespace, place: Path) -> tuple[Path, Path]:
    """(prebuilt, packages): the kernels in `place` as install.py or pip would leave them."""
    prebuilt, packages = place / "prebuilt", place / "site-packages"
    prebuilt.mkdir()
    packages.mkdir()
    if arguments.wheel:
        with zipfile.ZipFile(arguments.wheel) as wheel:
            wheel.extractall(packages)
    elif (arguments.kernels / "manifest.json").is_file():
        arch = json.loads((arguments.kernels / "manifest.json").read_text(encoding="utf-8"))["arch"]
        shutil.copytree(arguments.kernels, prebuilt / arch)
    else:
        shutil.copytree(arguments.kernels, prebuilt, dirs_exist_ok=True)
    return prebuilt, packages


def run_child(prebuilt: Path, packages: Path, user: Path) -> dict:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(prebuilt), str(user)]
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"The measuring process ended with status {done.returncode}. {done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def show(results: list[dict]) -> bool:
    """Print the tables; whether the bars are met."""
    first = results[0]
    print(f"{first['card']}, driver {first['driver']}, torch {first['torch']}; {first['kernels']} kernels")
    for number, result in enumerate(results, 1):
        print(f"  process {number}: {' '.join(result['said'])}")
    print(f"\n| seconds | {' | '.join(f'process {n}' for n in range(1, len(results) + 1))} |")
    print("|---|" + "---|" * len(results))
    for name in first["seconds"]:
        print(f"| {name} | {' | '.join(format(r['seconds'][name], '.3f') for r in results)} |")
    print(f"| **to the first result** | {' | '.join(format(r['to_first_result'], '.3f') for r in results)} |")
    print("\n| host time | microseconds, in each process |\n|---|---|")
    for name in first["host_us"]:
        print(f"| {name} | {', '.join(format(r['host_us'][name], '.1f') for r in results)} |")
    print(f"\nrelative error of the first call against torch's 16-bit attention: {first['error']:.4f}")
    slowest = max(r["to_first_result"] for r in results)
    launch = max(us for r in results for name, us in r["host_us"].items() if name.startswith("launch,"))
    good = slowest < BAR_FIRST_RESULT and launch < BAR_LAUNCH and first["error"] < 0.1
    print(
        f"bars: first result {slowest:.2f} s (under {BAR_FIRST_RESULT:g}), "
        f"launch {launch:.1f} us (under {BAR_LAUNCH:g})"
    )
    print("passed" if good else "FAILED")
    return good


def main() -> int:
    """Status 1 when a bar is missed."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(Path(sys.argv[2]), Path(sys.argv[3]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--kernels", type=Path, help="folder of cubins")
    source.add_argument("--wheel", type=Path, help="a kernel wheel")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        prebuilt, packages = lay_out(arguments, Path(place))
        results = [run_child(prebuilt, packages, Path(place) / "user") for _ in range(2)]
    good = show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
