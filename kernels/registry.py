"""Which backend serves a call, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .cards import Verdict, describe
from .launch import call
from .plan import Plan
from .reasons import Ok, Reason

BACKENDS = ("cubin", "cute", "spec")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class BackendStatus:
    """One way to run attention on this machine. `reason` says what it is, or why it is not there."""

    name: str
    available: bool
    reason: str


def backends() -> list[BackendStatus]:
    """Every backend in the order in which "auto" tries them."""
    return [
        _cubin_status(),
        BackendStatus("cute", False, "This version of VC-Attention does not compile kernels while ComfyUI runs."),
        BackendStatus(
            "spec", True, "The specification in plain torch: runs anywhere, for checking only, never chosen by itself."
        ),
    ]


def _cubin_status() -> BackendStatus:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return BackendStatus("cubin", False, "The prebuilt kernels need an NVIDIA card, and torch sees none here.")
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = call.kernels_for(device)
    if isinstance(kernels, Reason):
        return BackendStatus("cubin", False, kernels.text)
    name = torch.cuda.get_device_name(device)
    return BackendStatus("cubin", True, f"{len(kernels.manifest.kernels)} prebuilt kernels for {name}.")


def supports(
    device: torch.device | str,
    plan: Plan,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Ok | Reason:
    """Whether `backend` ("auto", or a name of `backends()`) can run `plan` on `device` for this head_dim and dtype."""
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
    if device.type == "cuda" and torch.version.hip is None and backend in ("auto", "cubin"):
        refusal = call.refusal(device, plan, head_dim, dtype)
        if refusal is None:
            return Ok("cubin")
        if refusal.code == "head_dim":
            return refusal
        if refusal.code not in ("no_kernels", "no_kernel"):
            # Damaged or foreign files, an old driver, another plan: to the caller there is no kernel, and this is why.
            return Reason("no_kernel", refusal.text)
    card = describe_device(device)
    if backend == "auto":
        return Reason("no_kernel", card.text)
    status = next(b for b in backends() if b.name == backend)
    return Reason("no_kernel", f"{status.reason} {card.text}")


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
