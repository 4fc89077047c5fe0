"""Which backend serves a call, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .cards import OWN_ATTENTION, Verdict, describe
from .cute import selection
from .families import arch_of
from .launch import call
from .launch.chain import Attempt
from .launch.compile import Progress
from .plan import Plan
from .reasons import Ok, Reason

BACKENDS = ("cubin", "cute", "spec")
_NOTHING_THERE = ("no_kernels", "no_compiler", "no_folder")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class BackendStatus:
    """One way to run attention on this machine. `reason` says what it is, or why it is not there."""

    name: str
    available: bool
    reason: str


def backends(device: torch.device | str | None = None, self_test: bool = False) -> list[BackendStatus]:
    """Everything that can run attention on `device` (torch's current one if None), in the order "auto" tries it.

    Each set of kernels has a row: "cubin" once for each place that has some, "cute", "spec". self_test: load and test
    the kernels now; else this loads, tests and compiles nothing, and tells what earlier tests said.
    """
    spec = BackendStatus(
        "spec", True, "The specification in plain torch: runs anywhere, for checking only, never chosen by itself."
    )
    if not torch.cuda.is_available() or torch.version.hip is not None:
        why = "VC-Attention's kernels need an NVIDIA card, and torch sees none here."
        return [BackendStatus("cubin", False, why), BackendStatus("cute", False, why), spec]
    device = torch.device("cuda" if device is None else device)
    rows = [_status(attempt) for attempt in call.attempts(device, self_test)]
    names = {row.name for row in rows}
    for name in ("cute", "cubin"):
        if name not in names:
            card = torch.cuda.get_device_name(device)
            rows.insert(0, BackendStatus(name, False, f"No kernels for {card} are installed."))
    return [*rows, spec]


def _status(attempt: Attempt) -> BackendStatus:
    """One row: what it is, and why it is not there or what its self-test said."""
    what = attempt.what[0].upper() + attempt.what[1:]
    if attempt.reason is not None:
        return BackendStatus(attempt.backend, False, f"{what}: {attempt.reason.text}")
    if not attempt.count:
        return BackendStatus(attempt.backend, False, f"{what}: not yet; that happens at their first use.")
    return BackendStatus(attempt.backend, True, f"{what}: {attempt.count} kernels. {attempt.tested}".rstrip())


def preset(name: str, device: torch.device | str | None = None) -> Plan:
    """The plan that the preset `name` (of `PRESETS`) means on `device`, whichever backend computes it.

    Cards differ in which 8-bit format of Q and K is fast (`cute.selection`). Without an NVIDIA card: the preset itself.
    """
    card = device is not None and torch.device(device).type == "cuda"
    if not card or torch.version.hip is not None or not torch.cuda.is_available():
        return selection.preset(None, name)
    return selection.preset(arch_of(torch.cuda.get_device_capability(device)), name)


def supports(
    device: torch.device | str,
    plan: Plan,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    progress: Progress | None = None,
) -> Ok | Reason:
    """Whether `backend` ("auto", or a name of `backends()`) can run `plan` on `device` for this head_dim and dtype.

    The first question about a card finds its kernels, loads and tests them (about a second), and compiles them first
    where there are none and nvidia-cutlass-dsl is installed (a minute or two). progress: called meanwhile with (done,
    total, name); what it raises stops the compiler and passes through.
    """
    if backend not in ("auto", *BACKENDS):
        return Reason("backend", f"There is no backend called {backend!r}; choose auto, {', '.join(BACKENDS)}.")
    if dtype not in _DTYPES:
        return Reason("dtype", f"VC-Attention takes fp32, bf16 and fp16; this call is {str(dtype)[6:]}.")
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
        return Reason(
            "head_dim", f"VC-Attention takes head dimensions 16, 32, 64, 128 and 256; this call has {head_dim}."
        )
    if backend == "spec":
        return Ok("spec")
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip is not None:
        return Reason("no_kernel", describe_device(device).text)
    chosen = call.choose(device, backend, progress=progress)
    if not isinstance(chosen, Reason):
        refusal = call.lacks(chosen.kernels, plan, head_dim, dtype)
        if refusal is None:
            return Ok(chosen.backend, " ".join(reason.text for reason in chosen.skipped))
        return Reason("head_dim" if refusal.code == "head_dim" else "no_kernel", _instead(refusal))
    if chosen.code in _NOTHING_THERE:
        # The card table says what this card would need; a backend that was asked for by name adds its own reason.
        card = describe_device(device).text
        return Reason("no_kernel", card if backend == "auto" else f"{chosen.text} {card}")
    return Reason("no_kernel", _instead(chosen))


def _instead(reason: Reason) -> str:
    return f"{reason.text.rstrip('. ')}. {OWN_ATTENTION}."


def describe_device(device: torch.device) -> Verdict:
    """Which path runs on `device`, and why: `cards.describe` of what torch says about it."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.version.hip is not None:
            return describe(name, vendor="amd")
        return describe(name, torch.cuda.get_device_capability(device))
    vendor = {"cpu": "cpu", "mps": "apple", "xpu": "intel"}.get(device.type, device.type)
    name = {"cpu": "CPU", "mps": "Apple GPU"}.get(device.type, f"a device of type {device.type}")
    return describe(name, vendor=vendor)
