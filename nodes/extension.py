"""The list of the pack's nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .comparing import VCAttentionBenchmark, VCAttentionCompare
from .measuring import VCAttentionCapture, VCAttentionQuality, VCAttentionQualityReport
from .patch import VCAttentionPatch


class VCAttentionExtension(ComfyExtension):
    """The pack's nodes, as ComfyUI asks for them."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """All nodes of the pack."""
        return [
            VCAttentionPatch,
            VCAttentionQuality,
            VCAttentionQualityReport,
            VCAttentionCapture,
            VCAttentionCompare,
            VCAttentionBenchmark,
        ]
