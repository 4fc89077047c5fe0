"""The list of the pack's nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .comparing import VCAttentionBenchmark, VCAttentionCompare
from .measuring import VCAttentionCapture, VCAttentionQuality, VCAttentionQualityReport
from .patch import VCAttentionPatch
from .wrapper import VCAttentionWanVideoWrapper, wrapper_is_here
from .wrapper_measuring import VCAttentionCaptureWanVideoWrapper, VCAttentionQualityWanVideoWrapper


class VCAttentionExtension(ComfyExtension):
    """The pack's nodes, as ComfyUI asks for them."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """All nodes of the pack; those for WanVideoWrapper only beside it."""
        nodes: list[type[io.ComfyNode]] = [
            VCAttentionPatch,
            VCAttentionQuality,
            VCAttentionQualityReport,
            VCAttentionCapture,
            VCAttentionCompare,
            VCAttentionBenchmark,
        ]
        if wrapper_is_here():
            nodes += [VCAttentionWanVideoWrapper, VCAttentionQualityWanVideoWrapper, VCAttentionCaptureWanVideoWrapper]
        return nodes
