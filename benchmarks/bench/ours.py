"""The rows of VC-Attention: which kernels run on this card, and the calls of each kind of step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Plan, Reason, UnsupportedError
from ...kernels.families import arch_of
from ...kernels.launch import attend, call, prepare
from ...kernels.launch.loader import Library
from ...kernels.timing import Call

ALONE = "kernel alone"
REUSE = "reuse step"
#: The call whose memory is measured: what most steps of a grouped clip are.
TYPICAL = f"fast, {REUSE}"


def use(folder: Path | None) -> str:
    """Choose the kernels; returns why none of ours can run on the current device, empty when they can.

    folder: what `kernels/build.py` wrote, or the folder that holds it; None for the installed kernels.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    inside = None
    if folder is not None:
        capability = torch.cuda.get_device_capability(device)
        arch = arch_of(capability) or "sm_{}{}".format(*capability)
        inside = folder.absolute() if (folder / "manifest.json").is_file() else folder.absolute() / arch
        if inside.name != arch or not (inside / "manifest.json").is_file():
            return (
                f"{folder} holds no kernels for {torch.cuda.get_device_name(device)}: they would be in a folder called "
                f"{arch}, with a manifest.json."
            )
        attend.PREBUILT = inside.parent
    verdict = kernels.supports(device, kernels.preset("fast", device))
    if isinstance(verdict, Reason):
        return verdict.text
    loaded = library()
    if inside is not None and not loaded.manifest.folder.samefile(inside):
        return f"{folder} was asked for, but the kernels of {loaded.manifest.folder} would run."
    return ""


def library() -> Library:
    """The kernels in use. Raises UnsupportedError when there are none."""
    found = call.kernels_for(torch.device("cuda", torch.cuda.current_device()))
    if isinstance(found, Reason):
        raise UnsupportedError(found)
    return found


def provenance() -> dict[str, Any]:
    """Which kernels are in use: their architecture, the pack's version and the hash of their sources."""
    manifest = library().manifest
    return {
        "arch": manifest.arch,
        "package": manifest.package,
        "source": manifest.source,
        "kernels": len(manifest.kernels),
    }


def plans(device: torch.device, dtype: torch.dtype) -> dict[str, Plan]:
    """The presets as `device` computes them, and fast with key means where that is another plan and has a kernel."""
    fast, faithful = (kernels.preset(name, device) for name in ("fast", "faithful"))
    found = {"fast": fast, "fast + key means": replace(fast, key_means=True), "faithful": faithful}
    if fast.key_means or isinstance(kernels.supports(device, found["fast + key means"], dtype=dtype), Reason):
        del found["fast + key means"]
    return found


def rows(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Row -> call, each returning [B, H, L, D]. All but "kernel alone" start from q, k, v.

    Grouping steps group V and then attend; cold ones search from nothing, warm ones from the centroids before. Plain
    steps have no groups: block means are over the tokens in their own order.
    """
    warm = kernels.group(v)
    labels = warm.labels
    out = torch.empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3]), dtype=q.dtype, device=q.device)
    found: dict[str, Call] = {}
    for title, plan in plans(q.device, q.dtype).items():
        images = prepare.prepare(library(), q, k, v, plan, labels)
        if isinstance(images, Reason):
            raise UnsupportedError(images)

        def alone(plan: Plan = plan, images: Any = images) -> Tensor:
            reason = attend.attend(images, plan, out)
            if reason is not None:
                raise UnsupportedError(reason)
            return out.transpose(1, 2)

        def cold(plan: Plan = plan) -> Tensor:
            return kernels.attention(q, k, v, plan, kernels.group(v).labels)

        def warmed(plan: Plan = plan) -> Tensor:
            return kernels.attention(q, k, v, plan, kernels.group(v, 0, warm).labels)

        def reuse(plan: Plan = plan) -> Tensor:
            return kernels.attention(q, k, v, plan, labels)

        def plain(plan: Plan = plan) -> Tensor:
            return kernels.attention(q, k, v, plan)

        steps = {ALONE: alone, REUSE: reuse, "grouping step (cold)": cold, "grouping step (warm)": warmed}
        found.update({f"{title}, {step}": run for step, run in (steps | {"plain step": plain}).items()})
    return found
