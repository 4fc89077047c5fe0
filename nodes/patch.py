"""The node "VC-Attention Patch": MODEL in, MODEL out."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..kernels import Ok, set_folder, supports
from . import host, live
from .hook import attach, session_of
from .messages import DESCRIPTION, DISPLAY_NAME, OFF, TOOLTIPS, degraded, ready
from .options import (
    BACKENDS,
    GROUPINGS,
    MAX_BUDGET_GB,
    MAX_GROUPS,
    MAX_REUSE_STEPS,
    MAX_TOKENS,
    ON_PROBLEM,
    PRECISIONS,
    QUALITIES,
    PatchOptions,
    parse_blocks,
)
from .schema import known

#: Widget order is part of every saved workflow: it never changes, and additions go last, with a default.
DEFAULTS = PatchOptions()


def widgets() -> list[Any]:
    """The widgets of the node, one for each field of `PatchOptions`, in its order."""

    def combo(name: str, options: tuple[str, ...], **keywords: Any) -> Any:
        return known(
            io.Combo.Input,
            name,
            options=list(options),
            default=getattr(DEFAULTS, name),
            tooltip=TOOLTIPS[name],
            **keywords,
        )

    def number(kind: Any, name: str, low: float, high: float, step: float, **keywords: Any) -> Any:
        return known(
            kind.Input,
            name,
            default=getattr(DEFAULTS, name),
            min=low,
            max=high,
            step=step,
            tooltip=TOOLTIPS[name],
            **keywords,
        )

    return [
        combo("precision", PRECISIONS),
        combo("quality", QUALITIES),
        combo("grouping", GROUPINGS),
        number(io.Float, "group_fraction", 0.0, 1.0, 0.05),
        number(io.Int, "reuse_steps", 1, MAX_REUSE_STEPS, 1),
        number(io.Int, "groups", 0, MAX_GROUPS, 1),
        number(io.Int, "min_tokens", 0, MAX_TOKENS, 256, advanced=True),
        known(
            io.String.Input,
            "dense_blocks",
            default=DEFAULTS.dense_blocks,
            tooltip=TOOLTIPS["dense_blocks"],
            advanced=True,
        ),
        number(io.Float, "start_percent", 0.0, 1.0, 0.01, advanced=True),
        number(io.Float, "end_percent", 0.0, 1.0, 0.01, advanced=True),
        number(io.Float, "state_budget_gb", 0.0, MAX_BUDGET_GB, 0.1, advanced=True),
        combo("on_problem", ON_PROBLEM, advanced=True),
        combo("backend", BACKENDS, advanced=True),
    ]


class VCAttentionPatch(io.ComfyNode):
    """Low-bit attention with value smoothing for video models."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node as ComfyUI shows it; the same on every machine, whatever its card can do."""
        return known(
            io.Schema,
            node_id="VCAttentionPatch",
            display_name=DISPLAY_NAME,
            category="advanced/attention",
            description=DESCRIPTION,
            search_aliases=["vc attention", "low-bit attention", "sage attention", "faster video", "wan speed"],
            inputs=[known(io.Model.Input, "model", tooltip=TOOLTIPS["model"]), *widgets()],
            outputs=[known(io.Model.Output, display_name="model", tooltip=TOOLTIPS["output"])],
            hidden=[io.Hidden.unique_id],
            # The output knows the node that shows its runs, so ComfyUI's cache may not give it to an equal node.
            not_idempotent=True,
        )

    @classmethod
    def validate_inputs(cls, dense_blocks: str = "") -> bool | str:
        """Say what is wrong with dense_blocks before anything runs; ComfyUI checks the other widgets itself."""
        return check_blocks(dense_blocks)

    @classmethod
    def execute(cls, model: Any, **values: Any) -> Any:
        """Patch a clone of `model`; the node says at once when this machine cannot run what was chosen."""
        options = PatchOptions(**values)
        node_id = getattr(cls.hidden, "unique_id", None)
        set_folder(host.user_folder())
        patched = attach(model, options, None if node_id is None else str(node_id))
        host.show_text(OFF if session_of(patched) is None else first_words(patched, options, node_id), node_id)
        return io.NodeOutput(patched)


def check_blocks(dense_blocks: str) -> bool | str:
    """True, or what is wrong with the widget dense_blocks."""
    try:
        parse_blocks(dense_blocks)
    except ValueError as error:
        return str(error)
    return True


def first_words(patched: Any, options: PatchOptions, node_id: str | None) -> str:
    """What the node says before the first run. Kernels are loaded and tested, and compiled if need be, here."""
    device = getattr(patched, "load_device", torch.device("cpu"))
    plans = options.plans(device)
    progress = host.progress(node_id)
    verdicts = [supports(device, plan, backend=options.backend, progress=progress) for plan in plans]
    verdict, text = verdicts[0], str(verdicts[0])
    for index, found in enumerate(verdicts):
        if isinstance(found, Ok):
            verdict, text = found, ready(found.backend, found.note) if index == 0 else degraded(plans[0])
            break
    live.ready(node_id, device, verdict, text)
    return text
