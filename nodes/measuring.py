"""The nodes that look at a run: VC-Attention Quality, VC-Attention Quality Report and VC-Attention Capture.

What they share with their twins for WanVideoWrapper (`wrapper_measuring`) is here too: a `Side` says what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from comfy_api.latest import io, ui

from . import host
from .capture import MAX_MB, MAX_STEP, Capture, CaptureOptions
from .families import family_of
from .hook import session_of
from .messages import (
    CAPTURE_READY,
    NO_PATCH,
    NO_QUALITY,
    NO_RUN,
    QUALITY_READY,
    profile_loaded,
    profile_not_for,
    profile_saved,
)
from .profile import Profile, ProfileError, check_name, load, path_of, save
from .quality import MAX_BUDGET_DB, Quality, QualityOptions
from .quality_report import plot, table, to_json
from .schema import node_input, node_output, node_schema, unique_id
from .session import Session
from .watch import Watcher, watch, watchers_of


class Side(NamedTuple):
    """Whose models a node takes: their socket, how to find VC-Attention and the family, and how to watch a clone.

    absent: the sentence for a model that VC-Attention is not on.
    """

    socket: Any
    session_of: Callable[[Any], Session | None]
    family_of: Callable[[Any], str]
    watch: Callable[[Any, Watcher], Any]
    absent: str


#: The socket of ComfyUI-WanVideoWrapper's models.
WANVIDEOMODEL = io.Custom("WANVIDEOMODEL")
COMFYUI = Side(io.Model, session_of, family_of, watch, NO_PATCH)


def sentence(make: Any, *args: Any, **values: Any) -> bool | str:
    """True, or the sentence of the ValueError that `make` raises."""
    try:
        make(*args, **values)
    except ValueError as error:
        return str(error)
    return True


def quality_schema(node: str, side: Side) -> Any:
    """Quality as ComfyUI shows it. Widget order is part of every saved workflow: additions go last."""
    defaults = QualityOptions()
    return node_schema(
        node,
        search_aliases=["attention quality", "psnr", "profile"],
        inputs=[
            node_input(side.socket, node, "model"),
            node_input(io.String, node, "layers", default=defaults.layers),
            node_input(io.String, node, "steps", default=defaults.steps),
            node_input(io.Float, node, "budget_db", default=defaults.budget_db, min=0.0, max=MAX_BUDGET_DB, step=1.0),
            node_input(io.String, node, "profile", default=defaults.profile),
        ],
        outputs=[node_output(side.socket, node, "model")],
    )


def profile_stamp(profile: str) -> str:
    """What changes when a profile is saved anew, so that it is read anew."""
    if not (profile or "").strip():
        return ""
    try:
        found = path_of(profile).stat()
    except (OSError, ProfileError):
        return "missing"
    return f"{found.st_mtime_ns} {found.st_size}"


def measured(model: Any, values: dict[str, Any], node_id: str | None, side: Side) -> Any:
    """A clone of `model` with a measuring watcher on it, or `model` itself where VC-Attention is not on it."""
    options = QualityOptions(**values)
    if side.session_of(model) is None:
        host.show_text(side.absent, node_id)
        return model
    profile, notes = _profile(options.profile, model, side)
    host.show_text("\n".join([QUALITY_READY, *notes]), node_id)
    return side.watch(model, Quality(options, node_id, profile, notes))


def _profile(name: str, model: Any, side: Side) -> tuple[Profile | None, list[str]]:
    """The profile to use, if any, and what to say of it."""
    if not name.strip():
        return None, []
    try:
        profile = load(name)
    except ProfileError as error:
        host.log.warning("VC-Attention Quality: %s", error)
        return None, [str(error)]
    family = side.family_of(getattr(getattr(model, "model", None), "diffusion_model", None))
    if profile.family != family:
        return None, [profile_not_for(f"the family {profile.family[:60]}", f"the family {family}")]
    return profile, [profile_loaded(check_name(name), len(profile.dense), len(profile.layers))]


def capture_schema(node: str, side: Side) -> Any:
    """Capture as ComfyUI shows it. Widget order is part of every saved workflow: additions go last."""
    defaults = CaptureOptions()
    return node_schema(
        node,
        search_aliases=["save attention", "replay", "debug attention"],
        inputs=[
            node_input(side.socket, node, "model"),
            node_input(io.String, node, "layer", default=defaults.layer),
            node_input(io.Int, node, "step", default=defaults.step, min=1, max=MAX_STEP),
            node_input(io.Int, node, "max_mb", default=defaults.max_mb, min=1, max=MAX_MB, step=64),
            node_input(io.String, node, "filename_prefix", default=defaults.filename_prefix),
        ],
        outputs=[node_output(side.socket, node, "model")],
    )


def capturing(model: Any, values: dict[str, Any], node_id: str | None, side: Side) -> Any:
    """A clone of `model` with a capturing watcher on it, or `model` itself where VC-Attention is not on it."""
    options = CaptureOptions(**values)
    if side.session_of(model) is None:
        host.show_text(side.absent, node_id)
        return model
    host.show_text(CAPTURE_READY, node_id)
    return side.watch(model, Capture(options, node_id))


class VCAttentionQuality(io.ComfyNode):
    """Measures low-bit attention while the sampler runs."""

    @classmethod
    def define_schema(cls) -> Any:
        """MODEL in, MODEL out."""
        return quality_schema("VCAttentionQuality", COMFYUI)

    @classmethod
    def validate_inputs(cls, layers: str = "", steps: str = "", profile: str = "") -> bool | str:
        """Say what is wrong with a widget before anything runs."""
        return sentence(QualityOptions, layers=layers, steps=steps, profile=profile)

    @classmethod
    def fingerprint_inputs(cls, profile: str = "", **_: Any) -> Any:
        """A profile that was saved anew is read anew."""
        return profile_stamp(profile)

    @classmethod
    def execute(cls, model: Any, **values: Any) -> Any:
        """Put a measuring watcher on a clone of `model`."""
        return io.NodeOutput(measured(model, values, unique_id(cls), COMFYUI))


class VCAttentionQualityReport(io.ComfyNode):
    """Shows what was measured, once the sampler is done."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node as ComfyUI shows it. The latent makes it wait for the sampler."""
        node = "VCAttentionQualityReport"
        return node_schema(
            node,
            search_aliases=["attention quality", "psnr", "profile"],
            is_output_node=True,
            inputs=[
                node_input(io.Latent, node, "latent"),
                # the wrapper's model, too: one report serves both
                node_input(io.MultiType, node, "model", types=[io.Model, WANVIDEOMODEL]),
                node_input(io.String, node, "save_profile", default=""),
            ],
            outputs=[
                node_output(io.Latent, node, "latent"),
                node_output(io.Image, node, "plot"),
                node_output(io.String, node, "json"),
            ],
        )

    @classmethod
    def validate_inputs(cls, save_profile: str = "") -> bool | str:
        """Say what is wrong with the profile's name before anything runs."""
        return sentence(check_name, save_profile) if save_profile.strip() else True

    @classmethod
    def execute(cls, latent: Any, model: Any, save_profile: str = "") -> Any:
        """The report of the latest prompt's runs. A problem with the profile is a sentence, never an error."""
        found = watchers_of(model, Quality)
        runs = found[-1].results() if found else []
        budget = found[-1].options.budget_db if found else 0.0
        text = table(runs) if runs else NO_RUN if found else NO_QUALITY
        if save_profile.strip() and runs:
            text = f"{_save(found[-1], save_profile)}\n\n{text}"
        image = plot(runs, budget, text).tensor()
        return io.NodeOutput(latent, image, to_json(runs, budget), ui=ui.PreviewText(text))


def _save(quality: Quality, name: str) -> str:
    profile = quality.to_profile()
    try:
        save(profile, path_of(name))
    except ProfileError as error:
        host.log.warning("VC-Attention Quality: %s", error)
        return str(error)
    return profile_saved(check_name(name), len(profile.dense), len(profile.layers))


class VCAttentionCapture(io.ComfyNode):
    """Saves one attention call of a run."""

    @classmethod
    def define_schema(cls) -> Any:
        """MODEL in, MODEL out."""
        return capture_schema("VCAttentionCapture", COMFYUI)

    @classmethod
    def validate_inputs(cls, layer: str = "0", filename_prefix: str = "x") -> bool | str:
        """Say what is wrong with a widget before anything runs."""
        return sentence(CaptureOptions, layer=layer, filename_prefix=filename_prefix)

    @classmethod
    def execute(cls, model: Any, **values: Any) -> Any:
        """Put a capturing watcher on a clone of `model`."""
        return io.NodeOutput(capturing(model, values, unique_id(cls), COMFYUI))
