"""The part of `run.py replay` that needs torch: load a case, check it, run it, measure it.

python tools/pack.py replay_main REQUEST        REQUEST: what `replay.check` returns, as JSON
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .. import kernels
from ..kernels.registry import BACKENDS
from ..kernels.spec.smoothing import block_energy_removed
from ..nodes.eligibility import DTYPES, HEAD_DIMS
from ..nodes.messages import REASONS
from .messages import ToolError, time_text
from .progress import Step

#: Scores of the exact attention that are held at once: 2^25 fp32 numbers are 128 MB.
SCORES_AT_ONCE = 1 << 25


class BadCaseError(ToolError):
    """The case cannot be replayed; the text is the one line that says why."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, 2)


class Case(NamedTuple):
    """q [B, H, Lq, D], k and v [B, H, Lkv, D] of one dtype; scale: None for 1 / sqrt(D)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float | None


def load(path: str) -> Case:
    """Read and check a case. BadCaseError says what is wrong with it, by the rules of the node's own hook."""
    name = Path(path).name
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            missing = [wanted for wanted in "qkv" if wanted not in names]
            if missing:
                raise BadCaseError(f"{name} has no tensor named {' and none named '.join(missing)}.")
            if "mask" in names:
                raise BadCaseError(f"{name} has a mask. {REASONS['mask'].text}")
            tensors = [file.get_tensor(wanted) for wanted in "qkv"]
            scale = file.get_tensor("scale") if "scale" in names else None
    except (SafetensorError, OSError) as error:
        raise BadCaseError(f"{name} is not a readable safetensors file ({_one_line(error)}).") from error
    q, k, v = tensors
    for label, tensor in zip("qkv", tensors, strict=True):
        if tensor.dim() != 4:
            raise BadCaseError(
                f"{label} has {tensor.dim()} axes {list(tensor.shape)}; 4 are needed: batch, heads, tokens, dim."
            )
    _check_shapes(q, k, v)
    for label, tensor in zip("qkv", tensors, strict=True):
        if tensor.dtype not in DTYPES:
            raise BadCaseError(f"{label} is {str(tensor.dtype)[6:]}. {REASONS['dtype'].text}")
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise BadCaseError(f"{label} has {bad} values that are NaN or infinite, so there is nothing to compare.")
    # as the hook does: the call is computed in q's number format
    return Case(q, k.to(q.dtype), v.to(q.dtype), _scale(scale))


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise BadCaseError(f"An axis is empty: {shapes}.")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise BadCaseError(f"q, k and v must agree in the batch: {shapes}.")
    if k.shape[1] == v.shape[1] < q.shape[1] and q.shape[1] % k.shape[1] == 0:
        raise BadCaseError(f"{shapes}: {REASONS['gqa'].text}")
    if not q.shape[1] == k.shape[1] == v.shape[1]:
        raise BadCaseError(f"q, k and v must agree in the heads: {shapes}.")
    if k.shape[2] != v.shape[2]:
        raise BadCaseError(f"k and v must have the same number of tokens: {shapes}.")
    if not q.shape[3] == k.shape[3] == v.shape[3]:
        raise BadCaseError(f"q, k and v must agree in the head dimension: {shapes}.")


def _scale(scale: torch.Tensor | None) -> float | None:
    if scale is None:
        return None
    if scale.numel() != 1 or scale.is_complex() or scale.dtype == torch.bool:
        raise BadCaseError(f"scale must be one number; it is {str(scale.dtype)[6:]} of shape {list(scale.shape)}.")
    value = float(scale)
    if not math.isfinite(value) or value <= 0:
        raise BadCaseError(f"scale is {value}; it must be a positive number.")
    return value


def exact_attention(case: Case, show: Callable[[str], None] = lambda text: None) -> torch.Tensor:
    """softmax(q k^T scale) v in fp32, a few rows at a time, fp32 [B, H, Lq, D]. Shares no code with the kernels."""
    q, k, v = case.q, case.k, case.v
    batch, heads, lq, dim = q.shape
    scale = dim**-0.5 if case.scale is None else case.scale
    rows = max(1, SCORES_AT_ONCE // k.shape[2])
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h].float().T, v[b, h].float()
            for start in range(0, lq, rows):
                part = slice(start, start + rows)
                out[b, h, part] = ((q[b, h, part].float() @ keys) * scale).softmax(-1) @ values
                show(f"exact attention: head {b * heads + h + 1} of {batch * heads}")
    return out


def choose_backend(wanted: str, plan: kernels.Plan, case: Case) -> tuple[str, str]:
    """(backend, note). BadCaseError when the one that was asked for cannot run the case."""
    if wanted not in ("auto", *BACKENDS):
        raise BadCaseError(f"--backend {wanted}: choose auto, {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}.")
    verdict = kernels.supports(case.q.device, plan, case.q.shape[-1], case.q.dtype, wanted)
    if verdict:
        return verdict.backend, ""
    if wanted == "auto":
        # without a kernel the numbers are still worth seeing: the specification computes what a kernel would
        emulated = kernels.supports(case.q.device, plan, case.q.shape[-1], case.q.dtype, "spec")
        if emulated:
            return "spec", f"The specification stands in for a kernel (slow, same numbers). {verdict.text}"
        verdict = emulated
    raise BadCaseError(verdict.text)


class Job(NamedTuple):
    """A case on the device that will run it, and how. `groups`: None off, 0 automatic."""

    case: Case
    plan: kernels.Plan
    backend: str
    groups: int | None
    notes: list[str]


def prepare(request: dict[str, Any]) -> Job:
    """Everything that can be wrong with a request, checked before anything long starts."""
    case = load(request["case"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = kernels.preset(request["plan"], device)
    case = Case(*(tensor.to(device) for tensor in case[:3]), case.scale)
    backend, note = choose_backend(request["backend"], plan, case)
    notes = [note] if note else []
    if plan != kernels.PRESETS[request["plan"]]:
        means = " and key means" * plan.key_means
        notes.append(f"On this card {request['plan']} has {plan.scores.upper()} scores{means}.")
    lq, lkv, dim = case.q.shape[2], case.k.shape[2], case.q.shape[3]
    if dim not in HEAD_DIMS:
        notes.append(f"In ComfyUI the node leaves this call alone: {REASONS['head_dim'].text}")
    groups = request["groups"]
    if groups == 0 and 2 * lq < lkv:
        groups = None
        notes.append("Not grouped: with fewer than half as many queries as keys the pack does not group.")
    return Job(case, plan, backend, groups, notes)


def replay(
    request: dict[str, Any], job: Job, show: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, Any], torch.Tensor]:
    """Run a job: the numbers, and the result [B, H, Lq, D] on the CPU."""
    case, plan, backend = job.case, job.plan, job.backend
    device = case.q.device
    labels = None
    started = _clock(device)
    if job.groups is not None:
        show("grouping")
        labels = kernels.group(case.v, job.groups).labels
    seconds_grouping = _clock(device) - started
    show(f"{request['plan']} on {backend}")
    if device.type == "cuda":
        kernels.attention(case.q, case.k, case.v, plan, labels, case.scale, backend)  # loading is not timed
    started = _clock(device)
    out = kernels.attention(case.q, case.k, case.v, plan, labels, case.scale, backend)
    seconds = _clock(device) - started
    bad = int((~torch.isfinite(out)).sum())
    if bad:
        raise ToolError(f"The result has {bad} values that are NaN or infinite. Please report this case.")
    measured = out
    if request.get("rows") == "sampled":
        rows = kernels.sample_rows(case.q.shape[2], device)
        case, measured = case._replace(q=case.q[:, :, rows]), out[:, :, rows]
    exact = exact_attention(case, show)
    numbers: dict[str, Any] = {
        "case": request["case"],
        "plan": request["plan"],
        "backend": backend,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(case.q.dtype)[6:],
        "shape_q": list(job.case.q.shape),
        "rows": request.get("rows", "all"),
        "shape_kv": list(case.k.shape),
        "groups": None if labels is None else job.groups or kernels.auto_groups(case.k.shape[2]),
        **kernels.measures(kernels.error_sums(measured, exact).tolist()),
        "block_energy_removed": block_energy_removed(case.v, labels, clip=plan.clip_means) if plan.demean else 0.0,
        "seconds": seconds,
        "seconds_grouping": seconds_grouping,
        "notes": job.notes,
    }
    return numbers, out.cpu()


def _clock(device: torch.device) -> float:
    """Seconds, after everything queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def write(path: str, out: torch.Tensor, numbers: dict[str, Any]) -> None:
    """Save `out` whole or not at all, with the numbers as metadata."""
    part = f"{path}.part"
    try:
        save_file({"out": out.contiguous()}, part, {"vc_attention_replay": json.dumps(numbers)})
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        Path(part).unlink(missing_ok=True)
        raise ToolError(f"The result could not be written to {path} ({_one_line(error)}).", 2) from error


def text_of(numbers: dict[str, Any]) -> str:
    """The numbers for a person."""
    psnr = "equal" if numbers["psnr_db"] is None else f"{numbers['psnr_db']:.2f} dB"
    error = numbers["relative_l2"]
    groups = "off" if numbers["groups"] is None else f"{numbers['groups']} groups"
    rows = [
        ("case", Path(numbers["case"]).name),
        ("q; k and v", f"{numbers['shape_q']}; {numbers['shape_kv']}, {numbers['dtype']}"),
        ("rows measured", "all" if numbers["rows"] == "all" else "the sampled ones"),
        ("plan", f"{numbers['plan']} on {numbers['backend']} ({numbers['device']}), grouping {groups}"),
        ("relative L2 error", "(the exact result is zero)" if error is None else f"{error:.6f}"),
        ("cosine", f"{numbers['cosine']:.8f}"),
        ("PSNR", psnr),
        ("block energy removed", f"{100 * numbers['block_energy_removed']:.2f} %"),
        ("time", f"{time_text(numbers['seconds'])}, grouping {time_text(numbers['seconds_grouping'])}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"{name:<{width}}  {value}" for name, value in rows] + [f"Note: {n}" for n in numbers["notes"]])


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def main(arguments: Sequence[str]) -> int:
    """Exit status 0, 1 when this machine cannot do it, 2 when the case or the request is not usable."""
    request = json.loads(arguments[0])
    try:
        job = prepare(request)
        with Step("Replaying " + Path(request["case"]).name) as step:
            numbers, out = replay(request, job, step.show)
            if request["out"] is not None:
                write(request["out"], out, numbers)
    except ToolError as error:
        print(f"run.py replay: {error}", file=sys.stderr)
        return error.status
    except (ValueError, kernels.UnsupportedError) as error:
        print(f"run.py replay: {_one_line(error)}", file=sys.stderr)
        return 2
    except (MemoryError, torch.OutOfMemoryError):
        print("run.py replay: There is not enough memory for this case; try fewer heads or tokens.", file=sys.stderr)
        return 1
    print(json.dumps(numbers) if request["json"] else text_of(numbers))
    return 0
