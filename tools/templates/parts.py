"""What several templates have in common: our nodes at their defaults, prompts, samplers, the clip, and the notes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ...nodes.options import PatchOptions
from .files import ModelFile
from .graph import GREEN, RED, VIOLET, Area, Graph, Node, Output

PROMPT = (
    "A red paper boat drifts down a rain-filled gutter at dusk, neon signs ripple in the water, the camera follows low "
    "behind it, shallow focus, slow and steady motion."
)
NEGATIVE = (
    "static picture, blurred details, overexposed, grey and dull, compression artifacts, subtitles, watermark, "
    "deformed, extra limbs"
)
#: VC-Attention at its defaults. `plan` is for tests and has no widget.
DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(PatchOptions) if field.init and field.name != "plan"
}

WIDGETS = (
    "- **precision** auto takes the best that your card can do. off gives ComfyUI's own attention, for comparison.\n"
    "- **quality** fast or faithful: faithful is a little slower and a little closer to 16 bit.\n"
    "- **grouping** first steps: the tokens of each layer are grouped by value in the first quarter of the steps, "
    "where the picture is laid out. The groups serve for four steps, then they are made again.\n"
    "- The other settings rarely need a change; each has a tooltip.\n"
)
AFTER_RUN = "After a run the node tells how many attention calls it accelerated and why it left the others alone."


class Places:
    """The areas that every template has, from left to right."""

    def __init__(self, name: str, version: str = "0.3.75") -> None:
        self.graph = Graph(name, version)
        self.notes = self.graph.area(0, None, 470)
        self.load = self.graph.area(1, "1  Load the models", 400)
        self.own = self.graph.area(2, "2  VC-Attention", 380, VIOLET)
        self.prompt = self.graph.area(3, "3  Prompt", 420)
        self.size = self.graph.area(3, "4  Size and length", 420)
        self.sample = self.graph.area(4, "5  Sample", 320)
        self.clip = self.graph.area(5, "6  Clip", 480)

    def finish(self, about: str, height: int = 400) -> Graph:
        """Add the notes: which files, and what VC-Attention does here. height: of the second, in pixels."""
        files = self.graph.files()
        self.notes.note("Model files", self.graph.files_note(), 260 + 50 * len(files))
        self.notes.note("What VC-Attention does here", about, height)
        return self.graph


def about(placement: str, size: str, node: str = "VC-Attention Patch") -> str:
    """The text of the second note. placement: where the node is and why; size: what this template makes."""
    return f"## {node}\n\n{placement}\n\n{WIDGETS}\n{AFTER_RUN} Text cross-attention is always left alone.\n\n{size}\n"


def patch(area: Area, model: Output, title: str | None = None, **changed: Any) -> Node:
    """VC-Attention Patch at its defaults, but for `changed`."""
    return area.add("VCAttentionPatch", title, model=model, **{**DEFAULTS, **changed})


def diffusion_model(area: Area, file: ModelFile, title: str | None = None) -> Node:
    """The loader of a diffusion model."""
    return area.add("UNETLoader", title, unet_name=file, weight_dtype="default")


def texts(area: Area, clip: Output, positive: str = PROMPT, negative: str = NEGATIVE) -> tuple[Node, Node]:
    """The two prompts, green and red as in ComfyUI's own templates."""
    return (
        area.add("CLIPTextEncode", "Prompt", colours=GREEN, text=positive, clip=clip),
        area.add("CLIPTextEncode", "Negative prompt", tall=140, colours=RED, text=negative, clip=clip),
    )


def two_samplers(
    area: Area, models: tuple[Output, Output], conditions: tuple[Output, Output], latent: Output, steps: int, cfg: float
) -> Output:
    """Wan2.2's two samplers: the first half of the steps with the model for high noise, the rest with the other."""
    half = steps // 2
    common = {"steps": steps, "cfg": cfg, "sampler_name": "euler", "scheduler": "simple"}
    first = area.add(
        "KSamplerAdvanced",
        f"Steps 1 to {half}: high noise",
        model=models[0],
        positive=conditions[0],
        negative=conditions[1],
        latent_image=latent,
        add_noise="enable",
        noise_seed=1,
        start_at_step=0,
        end_at_step=half,
        return_with_leftover_noise="enable",
        **common,
    )
    second = area.add(
        "KSamplerAdvanced",
        f"Steps {half + 1} to {steps}: low noise",
        model=models[1],
        positive=conditions[0],
        negative=conditions[1],
        latent_image=first["LATENT"],
        add_noise="disable",
        noise_seed=0,
        start_at_step=half,
        end_at_step=10000,
        return_with_leftover_noise="disable",
        **common,
    )
    return second["LATENT"]


def save(area: Area, images: Output, fps: float, prefix: str, **more: Any) -> None:
    """Frames to a file that the node plays. more: `audio`, and `title` of the player."""
    title = more.pop("title", None)
    video = area.add("CreateVideo", images=images, fps=fps, **more)
    area.add("SaveVideo", title, video=video["VIDEO"], filename_prefix=prefix, format="auto", codec="auto")
