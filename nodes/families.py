"""Which model class is which family. A name for the node's text, never a condition: unknown models work as well."""

from __future__ import annotations

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


def wrapper_family(transformer: object) -> str:
    """The family name of a transformer of ComfyUI-WanVideoWrapper, which has one class for all of them."""
    return "LongCat-Video" if getattr(transformer, "is_longcat", False) else "Wan in WanVideoWrapper"
