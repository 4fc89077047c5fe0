"""The nodes that look at a run: VC-Attention Quality, VC-Attention Quality Report and VC-Attention Capture."""

from __future__ import annotations

from typing import Any

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
from .schema import known
from .texts import NODES
from .watch import watch, watchers_of

CATEGORY = "advanced/attention"


def _input(kind: Any, node: str, name: str, **keywords: Any) -> Any:
    return known(kind.Input, name, tooltip=NODES[node].inputs[name], **keywords)


def _output(kind: Any, node: str, name: str) -> Any:
    return known(kind.Output, display_name=name, tooltip=NODES[node].outputs[name])


def _schema(node: str, **keywords: Any) -> Any:
    texts = NODES[node]
    return known(
        io.Schema,
        node_id=node,
        display_name=texts.display_name,
        category=CATEGORY,
        description=texts.description,
        hidden=[io.Hidden.unique_id],
        not_idempotent=True,  # as in VC-Attention Patch: the output knows its node
        **keywords,
    )


def _node_id(cls: Any) -> str | None:
    unique = getattr(cls.hidden, "unique_id", None)
    return None if unique is None else str(unique)


def _sentence(make: Any, *args: Any, **values: Any) -> bool | str:
    """True, or the sentence of the ValueError that `make` raises."""
    try:
        make(*args, **values)
    except ValueError as error:
        return str(error)
    return True


class VCAttentionQuality(io.ComfyNode):
    """Measures low-bit attention while the sampler runs."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node as ComfyUI shows it. Widget order is part of every saved workflow: additions go last."""
        node, defaults = "VCAttentionQuality", QualityOptions()
        return _schema(
            node,
            search_aliases=["attention quality", "psnr", "profile"],
            inputs=[
                _input(io.Model, node, "model"),
                _input(io.String, node, "layers", default=defaults.layers),
                _input(io.String, node, "steps", default=defaults.steps),
                _input(io.Float, node, "budget_db", default=defaults.budget_db, min=0.0, max=MAX_BUDGET_DB, step=1.0),
                _input(io.String, node, "profile", default=defaults.profile),
            ],
            outputs=[_output(io.Model, node, "model")],
        )

    @classmethod
    def validate_inputs(cls, layers: str = "", steps: str = "", profile: str = "") -> bool | str:
        """Say what is wrong with a widget before anything runs."""
        return _sentence(QualityOptions, layers=layers, steps=steps, profile=profile)

    @classmethod
    def fingerprint_inputs(cls, profile: str = "", **_: Any) -> Any:
        """A profile that was saved anew is read anew."""
        if not (profile or "").strip():
            return ""
        try:
            found = path_of(profile).stat()
        except (OSError, ProfileError):
            return "missing"
        return f"{found.st_mtime_ns} {found.st_size}"

    @classmethod
    def execute(cls, model: Any, **values: Any) -> Any:
        """Put a measuring watcher on a clone of `model`."""
        options, node_id = QualityOptions(**values), _node_id(cls)
        if session_of(model) is None:
            host.show_text(NO_PATCH, node_id)
            return io.NodeOutput(model)
        profile, notes = _profile(options.profile, model)
        quality = Quality(options, node_id, profile, notes)
        host.show_text("\n".join([QUALITY_READY, *notes]), node_id)
        return io.NodeOutput(watch(model, quality))


def _profile(name: str, model: Any) -> tuple[Profile | None, list[str]]:
    """The profile to use, if any, and what to say of it."""
    if not name.strip():
        return None, []
    try:
        profile = load(name)
    except ProfileError as error:
        host.log.warning("VC-Attention Quality: %s", error)
        return None, [str(error)]
    family = family_of(getattr(getattr(model, "model", None), "diffusion_model", None))
    if profile.family != family:
        return None, [profile_not_for(f"the family {profile.family[:60]}", f"the family {family}")]
    return profile, [profile_loaded(check_name(name), len(profile.dense), len(profile.layers))]


class VCAttentionQualityReport(io.ComfyNode):
    """Shows what was measured, once the sampler is done."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node as ComfyUI shows it. The latent makes it wait for the sampler."""
        node = "VCAttentionQualityReport"
        return _schema(
            node,
            search_aliases=["attention quality", "psnr", "profile"],
            is_output_node=True,
            inputs=[
                _input(io.Latent, node, "latent"),
                _input(io.Model, node, "model"),
                _input(io.String, node, "save_profile", default=""),
            ],
            outputs=[
                _output(io.Latent, node, "latent"),
                _output(io.Image, node, "plot"),
                _output(io.String, node, "json"),
            ],
        )

    @classmethod
    def validate_inputs(cls, save_profile: str = "") -> bool | str:
        """Say what is wrong with the profile's name before anything runs."""
        return _sentence(check_name, save_profile) if save_profile.strip() else True

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
        """The node as ComfyUI shows it. Widget order is part of every saved workflow: additions go last."""
        node, defaults = "VCAttentionCapture", CaptureOptions()
        return _schema(
            node,
            search_aliases=["save attention", "replay", "debug attention"],
            inputs=[
                _input(io.Model, node, "model"),
                _input(io.String, node, "layer", default=defaults.layer),
                _input(io.Int, node, "step", default=defaults.step, min=1, max=MAX_STEP),
                _input(io.Int, node, "max_mb", default=defaults.max_mb, min=1, max=MAX_MB, step=64),
                _input(io.String, node, "filename_prefix", default=defaults.filename_prefix),
            ],
            outputs=[_output(io.Model, node, "model")],
        )

    @classmethod
    def validate_inputs(cls, layer: str = "0", filename_prefix: str = "x") -> bool | str:
        """Say what is wrong with a widget before anything runs."""
        return _sentence(CaptureOptions, layer=layer, filename_prefix=filename_prefix)

    @classmethod
    def execute(cls, model: Any, **values: Any) -> Any:
        """Put a capturing watcher on a clone of `model`."""
        options, node_id = CaptureOptions(**values), _node_id(cls)
        if session_of(model) is None:
            host.show_text(NO_PATCH, node_id)
            return io.NodeOutput(model)
        host.show_text(CAPTURE_READY, node_id)
        return io.NodeOutput(watch(model, Capture(options, node_id)))
