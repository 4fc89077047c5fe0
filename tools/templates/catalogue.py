"""The list of the templates. File names, node types and settings are those that the models' publishers and
ComfyUI's own templates use; the graphs are drawn here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import others, wan
from .graph import Graph


@dataclass(frozen=True)
class Template:
    """One template. name: of its files, which the template browser shows; title, detail: on its thumbnail.

    needs: the oldest ComfyUI core that has its nodes. steps: denoising steps of one render.
    """

    name: str
    title: str
    detail: str
    steps: int
    build: Callable[[str], Graph]
    needs: str = "0.3.75"
    other_packs: tuple[str, ...] = ()


TEMPLATES = (
    Template("wan2.2_t2v", "Wan2.2 14B", "Text to video, 20 steps", 20, wan.wan_t2v),
    Template("wan2.2_t2v_4steps", "Wan2.2 14B", "Text to video, 4-step LoRAs", 4, wan.wan_t2v_4steps),
    Template("wan2.2_i2v", "Wan2.2 14B", "Image to video, 20 steps", 20, wan.wan_i2v),
    Template("wan2.2_5b", "Wan2.2 5B", "Text or image to video", 20, wan.wan_5b),
    Template("hunyuanvideo1.5_t2v", "HunyuanVideo-1.5", "Text to video, 720p", 20, others.hunyuan_15),
    Template("minimax_h3", "MiniMax-H3", "Text to video with sound", 20, others.minimax_h3, "0.33.0"),
    Template(
        "longcat_wanvideowrapper",
        "LongCat-Video",
        "Text to video, WanVideoWrapper",
        16,
        others.longcat,
        other_packs=("ComfyUI-WanVideoWrapper",),
    ),
    Template("compare_off_on", "Off and on", "Wan2.2 5B twice, compared", 20, wan.compare),
)
