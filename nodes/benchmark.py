"""One attention call of a model's size, timed on ComfyUI's backends and on VC-Attention's kernels."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ..kernels import Ok, Plan, attention, group, measures, sampled_sums, supports, timing
from . import host
from .families import attention_size, family_of, latent_cell
from .messages import NO_ATTENTION_SIZE, NO_PIXELS, fell_back, no_room, too_slow_here
from .options import PatchOptions
from .quality_run import device_name

ROUNDS = 3
#: Timings of a row in a round, at least: long calls are few, so that Cancel does not wait long.
LEAST = 2
#: Operations of one call above which a CPU is not asked: a second or two on a small one.
MOST_CPU_WORK = 4e10
#: What ComfyUI always registers for lack of anything better; timed only where it is in use.
SLOW = ("sub_quad", "split")
#: Those that hand a call on to torch's attention when they cannot take it.
FALL_BACK = ("sage", "sage3", "flash", "xformers", "comfy_kitchen_int8")
#: ComfyUI's names -> as its users know them.
NAMES = {
    "pytorch": "PyTorch SDPA",
    "sage": "SageAttention",
    "sage3": "SageAttention 3",
    "flash": "FlashAttention",
    "xformers": "xFormers",
    "comfy_kitchen_int8": "comfy-kitchen INT8",
    "sub_quad": "sub-quadratic",
    "split": "split",
}

Run = Callable[[], Tensor]
Show = Callable[[int, int, str], None]


class FellBackError(RuntimeError):
    """A backend handed its call on to torch's attention; the text is a sentence."""


@dataclass(frozen=True)
class Row:
    """What was timed. ms: median of one call; low, high: quartiles. error: relative L2, None where not finite."""

    name: str
    ours: bool
    in_use: bool
    ms: float
    low: float
    high: float
    timings: int
    error: float | None


@dataclass
class Benchmark:
    """Everything that one execution found out. missing: row -> why it was not timed. problem: why nothing was."""

    family: str = ""
    device: str = ""
    dtype: str = ""
    heads: int = 0
    head_dim: int = 0
    tokens: int = 0
    latent: tuple[int, int, int] = (0, 0, 0)
    patch: tuple[int, int, int] = (0, 0, 0)
    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def reference(self) -> Row | None:
        """The attention that ComfyUI uses now, if it was timed."""
        return next((row for row in self.rows if row.in_use), None)

    @property
    def work(self) -> int:
        """Operations of one call: 4 H L^2 D."""
        return 4 * self.heads * self.tokens**2 * self.head_dim


class _SeesTorch(TorchFunctionMode):
    """Notices torch's own attention: some of ComfyUI's backends fall back to it with no more than a line in the log."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func is scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def latent_size(latent: Any, model: Any, pixels: tuple[int, int, int]) -> tuple[int, int, int] | str:
    """Frames, height and width of the latent: of `latent` (LATENT or None), else from pixels (width, height, frames).

    Returns a sentence where the model's latents are not known.
    """
    if latent is not None:
        samples = latent["samples"]
        if getattr(samples, "is_nested", False) and not isinstance(samples, Tensor):
            samples = samples.unbind()[0]  # a second stream is audio
        shape = tuple(int(side) for side in samples.shape[2:][-3:])
        return (1,) * (3 - len(shape)) + shape  # type: ignore[return-value]
    cell = latent_cell(getattr(model, "latent_format", None))
    if cell is None:
        return NO_PIXELS
    width, height, frames = pixels
    return (frames - 1) // cell[0] + 1, -(-height // cell[1]), -(-width // cell[1])


def prepare(patcher: Any, latent: Any, pixels: tuple[int, int, int]) -> Benchmark:
    """The size to time for a model (a ModelPatcher), or the `problem`: nothing has been allocated yet."""
    model = patcher.model
    network = getattr(model, "diffusion_model", None)
    device = torch.device(getattr(patcher, "load_device", "cpu"))
    found = Benchmark(family=family_of(network), device=device_name(device), dtype=_name(_dtype(model, device)))
    size = attention_size(network)
    if size is None:
        found.problem = NO_ATTENTION_SIZE
        return found
    cells = latent_size(latent, model, pixels)
    if isinstance(cells, str):
        found.problem = cells
        return found
    found.heads, found.head_dim, found.patch, found.latent = size.heads, size.head_dim, size.patch, cells
    found.tokens = size.tokens(*cells)
    if device.type == "cpu" and found.work > MOST_CPU_WORK:
        found.problem = too_slow_here(found.device, found.tokens)
        return found
    needed = needed_bytes(found, _dtype(model, device).itemsize)
    free = host.make_room(needed, device)
    if free is not None and free < needed:
        found.problem = no_room(needed, free, found.device)
    return found


def needed_bytes(found: Benchmark, itemsize: int) -> int:
    """What the tensors, the low-bit copies of them and one backend's temporaries take, and a little more."""
    elements = found.heads * found.tokens * found.head_dim
    # q, k, v, the output, a copy of both in another order; 8-bit q, k, v, labels and sorted copies
    return elements * (6 * itemsize + 6) + (256 << 20)


def measure(
    found: Benchmark, patcher: Any, options: PatchOptions, seconds: float, show: Show, compiling: Show | None = None
) -> None:
    """Fill in the rows of a prepared benchmark.

    seconds: for each row in each round. show: called as (done, of, what is at work); compiling: as `host.progress`.
    What they raise passes through.
    """
    device = torch.device(getattr(patcher, "load_device", "cpu"))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        try:
            _measure(found, device, _dtype(patcher.model, device), options, seconds, show, compiling)
        except torch.OutOfMemoryError:
            needed = needed_bytes(found, _dtype(patcher.model, device).itemsize)
            found.problem = no_room(needed, host.free_memory(device) or 0, found.device)


def _measure(
    found: Benchmark,
    device: torch.device,
    dtype: torch.dtype,
    options: PatchOptions,
    seconds: float,
    show: Show,
    compiling: Show | None,
) -> None:
    show(0, 1, "making random data")
    q, k, v = timing.stand_ins(found.tokens, found.heads, found.head_dim, device, dtype)
    mine = ours(found, options, q, k, v, compiling)
    theirs, in_use = backends(q, k, v)
    calls = mine | theirs
    fall_back = {NAMES[name] for name in FALL_BACK}
    errors: dict[str, float | None] = {}
    total, done = (ROUNDS + 2) * max(len(calls), 1), 0

    def step(text: str) -> None:
        nonlocal done
        show(done, total, text)
        done += 1

    for name, call in list(calls.items()):
        step(f"checking {name}")
        try:
            out, fallen = _first(call)
            if fallen and name in fall_back:
                raise FellBackError(fell_back(name))
            shaped = out.unflatten(-1, (found.heads, -1)).transpose(1, 2)
            error = measures(sampled_sums(q, k, v, shaped).tolist())["relative_l2"]
            errors[name] = error if error is not None and math.isfinite(error) else None
            del out, shaped
        # A backend that does not take this call, for whatever reason of its own, costs its row and not the others.
        except Exception as problem:
            if host.is_interrupt(problem):
                raise
            found.missing[name] = str(problem) if isinstance(problem, FellBackError) else timing.one_line(problem)
            del calls[name]
    clock = timing.Cuda(watch=False) if device.type == "cuda" else timing.Clock(_waiter(device))
    timings, failed = timing.take_turns(
        {name: _stoppable(call) for name, call in calls.items()}, clock, seconds, ROUNDS, step, LEAST
    )
    found.missing.update(failed)
    for name, one in timings.items():
        low, high = one.quartiles
        row = Row(name, name in mine, name == in_use, one.ms, low, high, len(one.values), errors[name])
        found.rows.append(row)


def _first(call: Run) -> tuple[Tensor, bool]:
    """The result of a first call, and whether torch's attention computed it."""
    with _SeesTorch() as mode:
        return call(), mode.seen


def _stoppable(call: Run) -> Run:
    def run() -> Tensor:
        host.stop_if_cancelled()
        return call()

    return run


def backends(q: Tensor, k: Tensor, v: Tensor) -> tuple[dict[str, Run], str]:
    """Row -> call for each attention that this ComfyUI has registered, and the row that it uses now.

    q, k, v: views [1, H, L, D] of [1, L, H, D], handed over as models do, as [1, L, H * D]; so is the result.
    """
    from comfy.ldm.modules import attention as module

    heads = q.shape[1]
    flat = tuple(t.transpose(1, 2).flatten(2) for t in (q, k, v))
    known: dict[str, Callable[..., Tensor]] = dict(getattr(module, "REGISTERED_ATTENTION_FUNCTIONS", {}))
    using = module.optimized_attention
    # what another pack put in its place is in no list, and may carry the name of what it replaced
    replaced = f"{getattr(using, '__name__', 'attention').removeprefix('attention_')} (replaced)"
    current = next((name for name, function in known.items() if function is using), replaced)
    known.setdefault(current, using)
    found: dict[str, Run] = {}
    for name, function in known.items():
        if name not in SLOW or name == current:
            found[NAMES.get(name, name)] = functools.partial(function, *flat, heads)
    return found, NAMES.get(current, current)


def ours(
    found: Benchmark, options: PatchOptions, q: Tensor, k: Tensor, v: Tensor, compiling: Show | None = None
) -> dict[str, Run]:
    """Row -> call for each kind of step of VC-Attention, in the first plan of `options` that this device can run."""
    refusal = ""
    for chosen in options.plans(q.device):
        # fp32 goes to the kernels as bf16 where they do not take it, as in a run
        for dtype in (q.dtype, torch.bfloat16) if q.dtype == torch.float32 else (q.dtype,):
            verdict = supports(q.device, chosen, q.shape[-1], dtype, progress=compiling)
            if isinstance(verdict, Ok):
                return _steps(chosen, options, dtype, q, k, v)
            refusal = refusal or verdict.text
    found.missing["VC-Attention"] = refusal
    return {}


def _steps(chosen: Plan, options: PatchOptions, dtype: torch.dtype, *given: Tensor) -> dict[str, Run]:
    title = f"VC-Attention {plan_name(chosen)}"
    kept = group(given[2].to(dtype), options.groups).labels

    def run(labels: Callable[[Tensor], Tensor | None]) -> Tensor:
        q, k, v = (t.to(dtype) for t in given)
        out = attention(q, k, v, chosen, labels(v))
        return out.to(given[0].dtype).transpose(1, 2).flatten(2)

    return {
        f"{title}, plain step": lambda: run(lambda v: None),
        f"{title}, reuse step": lambda: run(lambda v: kept),
        f"{title}, grouping step": lambda: run(lambda v: group(v, options.groups).labels),
    }


def plan_name(chosen: Plan) -> str:
    """A plan in the words of the node's widgets."""
    if chosen.values == "nvfp4":
        return "4-bit"
    return f"8-bit {'faithful' if chosen.probability == 'exp2' else 'fast'}"


def _dtype(model: Any, device: torch.device) -> torch.dtype:
    """The number format that this model's attention gets on `device`."""
    dtype = getattr(model, "manual_cast_dtype", None)
    if dtype is None:
        dtype = model.get_dtype()
    if dtype in (torch.float32, torch.bfloat16, torch.float16):
        return dtype
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _waiter(device: torch.device) -> Callable[[], None]:
    """What waits for `device`."""
    wait = getattr(getattr(torch, device.type, None), "synchronize", None)
    return wait if callable(wait) and device.type != "cpu" else lambda: None
