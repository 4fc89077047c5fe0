"""A Wan2.2 14B of random weights sampled in a real ComfyUI: seconds per step, end to end, for each attention.

    python benchmarks/comfyui_gpu.py --comfyui DIR [--shapes 480p,720p] [--steps N] [--rows NAME,...] [--json FILE]
    python benchmarks/comfyui_gpu.py --comfyui DIR --tiny          the same code on a CPU in seconds

DIR is a ComfyUI checkout (0.3.75 or newer) whose requirements this Python has. The network has the published size (40
blocks, 5120 wide, 40 heads; 28 GB in bf16), a step's time does not depend on the weights, and the latents are those of
81 frames. Rows: ComfyUI's default attention, each other backend that ComfyUI itself offers, cuDNN and FlashAttention-4
put into ComfyUI's hook, the VC-Attention Patch node, and the model with its attention left out. cfg 1 makes one pass a
step.

A step's time is taken at the sampler's callback, after the device has finished. `s/step` is the median over the steps
after the first; for ours it is taken over the plain steps, and the grouping and reuse steps have columns of their own.
Every row is warmed up on a short clip first. Peers stop after `--peer-steps` of the schedule, because each of their
steps costs the same; all rows are compared with ComfyUI's default by the denoised latent of that step, and those that
run to the end by the final latent as well. With `--rounds 2` every row runs twice, the second time in reverse order.

Exit status 1, with a sentence, when calls were not grouped, reused and plain as the schedule says, or when a latent is
not finite. The JSON file is written again after every row.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

if "vc_attention" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("vc_pack", Path(__file__).resolve().parents[1] / "tools" / "pack.py")
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _module.load_pack()

from vc_attention.benchmarks import comfyui_model, comfyui_rows
from vc_attention.benchmarks.comfyui_model import Run, Scale
from vc_attention.benchmarks.comfyui_rows import REFERENCE, Row
from vc_attention.kernels import Reason, supports
from vc_attention.kernels.launch import attend
from vc_attention.nodes.hook import session_of
from vc_attention.nodes.options import PatchOptions
from vc_attention.tools import tiny_models

#: Steps of the warm-up: with the node's defaults the first groups, the second reuses, the others are plain.
WARM_UP_STEPS = 5


def phases(steps: int, options: PatchOptions) -> list[str]:
    """What each step of a full schedule does, from the rule and not from the pack's code: the first
    ceil(fraction * steps) steps work with groups, which are found at the first of them and every `reuse_steps`."""
    window = math.ceil(options.group_fraction * steps - 1e-9)
    found = ["group" if step % options.reuse_steps == 0 else "reuse" for step in range(window)]
    return found + ["plain"] * (steps - window)


def expected(steps: int, options: PatchOptions, layers: int, branches: int) -> dict[str, int]:
    """Calls of a whole run: self-attention of every layer and branch by its step's phase, text left to ComfyUI."""
    due = phases(steps, options)
    calls = layers * branches
    counts = {name: due.count(phase) * calls for name, phase in _PHASE_OF.items()}
    return {**counts, "declined": steps * calls}


_PHASE_OF = {"grouped": "group", "reused": "reuse", "plain": "plain"}


@dataclass
class Result:
    """One row of one shape. Times in seconds, one list a round; errors against ComfyUI's own latents."""

    row: str
    title: str
    kernel: str = ""
    seconds: list[list[float]] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    peak_bytes: int | None = None
    error_denoised: list[float] = field(default_factory=list)
    error_final: float | None = None
    psnr_final: float | None = None
    counts: dict[str, int] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    text: str = ""
    problems: list[str] = field(default_factory=list)

    def median(self, phase: str) -> float | None:
        """Median time of the steps of one phase. Only grouping steps include the run's first."""
        first = 0 if phase == "group" else 1
        pairs = [pair for run in self.seconds for pair in list(zip(self.phases, run, strict=False))[first:]]
        times = [took for seen, took in pairs if seen == phase]
        return statistics.median(times) if times else None

    def record(self) -> dict[str, Any]:
        """Everything, for the JSON file."""
        medians = {phase: self.median(phase) for phase in ("group", "reuse", "plain")}
        return {**vars(self), "median": medians}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2 distance of a from b."""
    return float((a - b).double().norm() / b.double().norm())


def psnr(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Decibels, the peak being the range of b; None when they are equal."""
    error = float((a - b).double().square().mean())
    return None if error == 0 else 10 * math.log10(float(b.max() - b.min()) ** 2 / error)


class Bench:
    """One model and its rows. `results` grows while it runs."""

    def __init__(self, arguments: argparse.Namespace, scale: Scale) -> None:
        self.arguments = arguments
        self.scale = scale
        self.results: list[dict[str, Any]] = []
        self.failed = False
        self.model = comfyui_model.build(scale)

    def run(self, rows: Sequence[Row], shapes: Sequence[str]) -> None:
        """Warm every row up, then let them take turns on each shape."""
        names = {row.name: self._warm_up(row) for row in rows}
        ready = [row for row in rows if names[row.name] is not None]
        for shape in shapes:
            self._shape(shape, ready, {name: kernel or "" for name, kernel in names.items()})

    def _warm_up(self, row: Row) -> str | None:
        """Compile and load what the row needs; its kernel's name, or None for a row that cannot run here."""
        print(f"{row.name}: {row.title}", end="", flush=True)
        start = time.perf_counter()
        last = WARM_UP_STEPS if row.options is not None else 1
        try:
            self._sample(row, self.scale.warm_up, WARM_UP_STEPS, last)
            kernel = comfyui_rows.kernel_of(row, self.model, self.scale)
        except Exception as error:  # a peer that does not run on this card must not end the others' run
            if row.options is not None or row.name == REFERENCE:
                raise
            print(f"\n    left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return None
        print(f" ({time.perf_counter() - start:.0f} s){': ' + kernel if kernel else ''}", flush=True)
        return kernel

    def _sample(self, row: Row, latent: Sequence[int], steps: int, last: int) -> tuple[Run, Any]:
        patched = row.patch(self.model)
        until = None if last == steps else last
        run = comfyui_model.sample(patched, self.scale, latent, steps, self.arguments.cfg, until)
        return run, session_of(patched)

    def _shape(self, shape: str, rows: Sequence[Row], kernels: dict[str, str]) -> None:
        latent = self.scale.shapes[shape]
        tokens = self.scale.tokens(latent)
        results = {row.name: Result(row.name, row.title, kernels[row.name]) for row in rows}
        entry: dict[str, Any] = {"shape": shape, "latent": latent, "tokens": tokens, "rows": []}
        self.results.append(entry)
        print(f"\n{shape}: {tokens} tokens, {self.arguments.steps} steps", flush=True)
        reference: Run | None = None
        for turn in range(self.arguments.rounds):
            # Later rounds go backwards; ComfyUI's own comes first in the first, for the others to be compared with.
            for row in rows if turn % 2 == 0 else reversed(rows):
                run, session = self._measure(row, latent, results[row.name])
                if row.name == REFERENCE:
                    reference = run if reference is None else reference
                elif reference is not None and row.compared and run is not None:
                    _compare(results[row.name], run, reference)
                if run is not None and row.options is not None:
                    self._count(results[row.name], row.options, session)
                self._say(results[row.name])
                entry["rows"] = [result.record() for result in results.values()]
                self.save()
        self._table(list(results.values()))

    def _measure(self, row: Row, latent: Sequence[int], result: Result) -> tuple[Run | None, Any]:
        steps = self.arguments.steps
        whole = row.options is not None or row.name == REFERENCE or not self.arguments.peer_steps
        last = steps if whole else min(steps, self.arguments.peer_steps)
        try:
            run, session = self._sample(row, latent, steps, last)
        except Exception as error:
            if row.options is not None or row.name == REFERENCE:
                raise
            result.text = f"failed: {type(error).__name__}: {str(error)[:300]}"
            return None, None
        result.seconds.append(run.seconds)
        result.phases = phases(steps, row.options) if row.options is not None else ["plain"] * len(run.seconds)
        result.peak_bytes = max(run.peak_bytes, result.peak_bytes or 0) if run.peak_bytes is not None else None
        if row.compared and not all(bool(torch.isfinite(x).all()) for x in (run.latent, *run.denoised)):
            self._problem(result, "the latent is not finite")
        return run, session

    def _count(self, result: Result, options: PatchOptions, session: Any) -> None:
        """Compare what the node counted with what the schedule says."""
        stats, steps = session.stats, self.arguments.steps
        branches = 1 if self.arguments.cfg == 1.0 else 2
        result.expected = expected(steps, options, self.scale.network["num_layers"], branches)
        result.counts = {name: getattr(stats, name) for name in _PHASE_OF} | {"declined": stats.declined["short"]}
        result.text = stats.summary()
        if result.counts != result.expected:
            self._problem(result, f"the node counted {result.counts}, and the schedule says {result.expected}")
        elif set(stats.declined) - {"short"} or stats.unkept:
            self._problem(result, f"the node declined {dict(stats.declined)} and could not keep {stats.unkept}")
        if stats.steps != dict(enumerate(result.phases)):
            self._problem(result, f"the node's steps were {stats.steps}, and the schedule says {result.phases}")

    def _problem(self, result: Result, sentence: str) -> None:
        self.failed = True
        result.problems.append(sentence)
        print(f"    {result.row}: {sentence}.", flush=True)

    def _say(self, result: Result) -> None:
        times = " ".join(f"{took:.3f}" for took in result.seconds[-1]) if result.seconds else ""
        print(f"  {result.row}: {times or result.text}", flush=True)

    def _table(self, results: Sequence[Result]) -> None:
        base = {result.row: result.median("plain") for result in results}
        at = min((len(r.error_denoised) for r in results if r.error_denoised), default=0)
        own = [took for row, took in base.items() if row.split(":")[0] == REFERENCE and took is not None]
        best, flash = min(own, default=None), base.get("fa4")
        print(
            "\n| | s/step | grouping step | reuse step | x ComfyUI's best | x FA4 | whole run, s | GB at most "
            f"| L2 at step {at} | final L2 | final PSNR, dB | calls grouped / reused / plain / declined |\n"
            "|---|---|---|---|---|---|---|---|---|---|---|---|"
        )
        for result in results:
            plain = base[result.row]
            cells = [
                result.title,
                _number(plain, 3),
                _number(result.median("group"), 3),
                _number(result.median("reuse"), 3),
                _number(best / plain if best and plain else None, 2),
                _number(flash / plain if flash and plain else None, 2),
                _number(self._whole(result), 1),
                _number(None if result.peak_bytes is None else result.peak_bytes / 1e9, 1),
                _number(result.error_denoised[at - 1] if result.error_denoised else None, 5),
                _number(result.error_final, 5),
                _number(result.psnr_final, 1),
                " / ".join(map(str, result.counts.values())),
            ]
            print("| " + " | ".join(cells) + " |", flush=True)

    def _whole(self, result: Result) -> float | None:
        """Seconds of a whole run of `--steps` steps: measured, or for a peer that stopped early its steps' median."""
        full = [sum(run) for run in result.seconds if len(run) == self.arguments.steps]
        plain = result.median("plain")
        return statistics.median(full) if full else None if plain is None else plain * self.arguments.steps

    def save(self) -> None:
        """Write the JSON file, if one was asked for."""
        if self.arguments.json is None:
            return
        partial = self.arguments.json.with_suffix(".part")
        partial.write_text(json.dumps({**machine(self.scale), "shapes": self.results}, indent=1))
        partial.replace(self.arguments.json)


def _compare(result: Result, run: Run, reference: Run) -> None:
    pairs = zip(run.denoised, reference.denoised, strict=False)
    result.error_denoised = [relative(ours, own) for ours, own in pairs]
    if len(run.denoised) == len(reference.denoised):
        result.error_final = relative(run.latent, reference.latent)
        result.psnr_final = psnr(run.latent, reference.latent)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def machine(scale: Scale) -> dict[str, Any]:
    """What the numbers were measured on."""
    import comfyui_version

    device = torch.cuda.get_device_name() if scale.device == "cuda" else "CPU"
    found = {"device": device, "torch": torch.__version__, "ComfyUI": comfyui_version.__version__}
    for package in ("flash-attn-4", "comfy-kitchen"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def choose(rows: Sequence[Row], missing: dict[str, str], wanted: str) -> list[Row]:
    """The rows named in `wanted` ("" for all), ComfyUI's own always among them and first. Raises ValueError."""
    names = [name for name in wanted.split(",") if name]
    for name, why in missing.items():
        if not names or name in names:
            print(f"{name} is left out: {why}")
    known = {row.name for row in rows}
    unknown = [name for name in names if name not in known and name not in missing]
    if unknown:
        raise ValueError(f"There is no row {', '.join(unknown)} here; the rows are {', '.join(sorted(known))}.")
    return [row for row in rows if not names or row.name in names or row.name == REFERENCE]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True, metavar="DIR")
    parser.add_argument("--kernels", type=Path, help="folder of cubins, instead of the installed ones")
    parser.add_argument("--shapes", default="480p,720p")
    parser.add_argument("--rows", default="", help="names separated by commas; all by default")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peer-steps", type=int, default=3, help="steps that a peer runs of the schedule; 0: all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cfg", type=float, default=1.0, help="other than 1, every step computes two branches")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to see that everything works")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    if min(arguments.steps, arguments.rounds) < 1 or arguments.peer_steps < 0:
        parser.error("--steps and --rounds must be at least 1, and --peer-steps at least 0.")
    known = comfyui_model.FULL.shapes
    if not arguments.shapes or any(name not in known for name in arguments.shapes.split(",")):
        parser.error(f"--shapes takes {', '.join(known)}, separated by commas.")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    scale = comfyui_model.TINY if arguments.tiny else comfyui_model.FULL
    if scale.device == "cuda" and not torch.cuda.is_available():
        print("There is no NVIDIA GPU that torch can use; --tiny runs a small model on the CPU.")
        return 2
    if arguments.kernels:
        attend.PREBUILT = arguments.kernels
    try:
        tiny_models.import_comfy(arguments.comfyui, ("--cpu",) if scale.device == "cpu" else ())
        rows = choose(*comfyui_rows.all_rows(scale), arguments.rows)
    except (FileNotFoundError, ValueError) as error:
        print(error)
        return 2
    for row in rows:
        for plan in () if row.options is None else row.options.plans(scale.device)[:1]:
            verdict = supports(scale.device, plan, dtype=scale.dtype, backend=scale.backend)
            if isinstance(verdict, Reason):
                print(f"{row.name} cannot run here: {verdict.text}")
                return 2
    print(", ".join(f"{name} {value}" for name, value in machine(scale).items()))
    start = time.perf_counter()
    bench = Bench(arguments, scale)
    count = sum(parameter.numel() for parameter in bench.model.model.diffusion_model.parameters())
    print(f"{count / 1e9:.2f} billion weights in {time.perf_counter() - start:.0f} s", flush=True)
    bench.run(rows, arguments.shapes.split(","))
    print(f"\n{time.perf_counter() - start:.0f} s altogether; {'FAILED' if bench.failed else 'passed'}")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
