"""What is known of model classes: the name of their family, and the size of their attention.

A name is for texts, never a condition: unknown models work as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Class name of the diffusion model -> family, as its users call it.
FAMILIES: dict[str, str] = {
    "WanModel": "Wan",
    "VaceWanModel": "Wan VACE",
    "CameraWanModel": "Wan Camera",
    "WanModel_S2V": "Wan S2V",
    "HumoWanModel": "HuMo",
    "AnimateWanModel": "Wan Animate",
    "WanAnimate2Model": "Wan Animate 2",
    "SCAILWanModel": "SCAIL",
    "SCAIL2WanModel": "SCAIL 2",
    "WanDancerModel": "WanDancer",
    "CausalWanModel": "Wan (autoregressive)",
    "HunyuanVideo": "HunyuanVideo",
    "MiniMaxH3Model": "MiniMax-H3",
}

HUNYUAN_VIDEO_15 = "HunyuanVideo 1.5"


def family_of(diffusion_model: object) -> str:
    """The family name of a diffusion model, or "unknown family (ClassName)".

    HunyuanVideo and 1.5 share one class; 1.5 is told by its vision tower input.
    """
    model = getattr(diffusion_model, "_orig_mod", diffusion_model)  # torch.compile's wrapper
    name = type(model).__name__
    if name == "HunyuanVideo" and getattr(model, "vision_in", None) is not None:
        return HUNYUAN_VIDEO_15
    return FAMILIES.get(name, f"unknown family ({name})")


@dataclass(frozen=True)
class AttentionSize:
    """How a model cuts a latent into tokens (frames, rows, columns of a patch) and its self-attention into heads."""

    heads: int
    head_dim: int
    patch: tuple[int, int, int]

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Tokens of a latent of this size; models fill the last patch up."""
        sides = zip((frames, height, width), self.patch, strict=True)
        counts = [-(-side // patch) for side, patch in sides]
        return counts[0] * counts[1] * counts[2]


def attention_size(diffusion_model: Any) -> AttentionSize | None:
    """The attention size of a diffusion model, or None where it does not say.

    Wan has num_heads and dim, HunyuanVideo num_heads and hidden_size; MiniMax-H3 has them on its attention modules
    only, as heads and head_dim.
    """
    model = getattr(diffusion_model, "_orig_mod", diffusion_model)
    patch = _patch(getattr(model, "patch_size", None))
    if patch is None:
        return None
    heads = getattr(model, "num_heads", None)
    width = getattr(model, "dim", None) or getattr(model, "hidden_size", None)
    if isinstance(heads, int) and heads > 0 and isinstance(width, int) and width % heads == 0:
        return AttentionSize(heads, width // heads, patch)
    for block in getattr(model, "blocks", ()):
        attention = getattr(block, "attn", None)
        heads, head_dim = getattr(attention, "heads", None), getattr(attention, "head_dim", None)
        if isinstance(heads, int) and heads > 0 and isinstance(head_dim, int) and head_dim > 0:
            return AttentionSize(heads, head_dim, patch)
    return None


def _patch(size: Any) -> tuple[int, int, int] | None:
    """A patch size as models write it: one number, rows and columns, or frames, rows and columns."""
    sides = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, (list, tuple)) else ()
    if len(sides) == 2:
        sides = (1, *sides)
    if len(sides) != 3 or not all(isinstance(side, int) and side > 0 for side in sides):
        return None
    return sides[0], sides[1], sides[2]


#: Latent format -> frames and pixels of one latent cell, for a ComfyUI whose formats do not say so themselves.
CELLS: dict[str, tuple[int, int]] = {
    "Wan21": (4, 8),
    "Wan22": (4, 16),
    "HunyuanVideo": (4, 8),
    "HunyuanVideo15": (4, 16),
}


def latent_cell(latent_format: Any) -> tuple[int, int] | None:
    """Frames and pixels that one latent cell stands for, or None where that is not known."""
    frames = getattr(latent_format, "temporal_downscale_ratio", None)
    pixels = getattr(latent_format, "spacial_downscale_ratio", None)  # as ComfyUI spells it
    if isinstance(frames, int) and isinstance(pixels, int):
        return frames, pixels
    return CELLS.get(type(latent_format).__name__)


def wrapper_family(transformer: object) -> str:
    """The family name of a transformer of ComfyUI-WanVideoWrapper, which has one class for all of them."""
    return "LongCat-Video" if getattr(transformer, "is_longcat", False) else "Wan in WanVideoWrapper"
