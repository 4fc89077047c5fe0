"""The node "VC-Attention for WanVideoWrapper": WANVIDEOMODEL in, WANVIDEOMODEL out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..kernels import set_folder
from . import host
from .messages import OFF
from .options import PatchOptions
from .patch import check_blocks, first_words, widgets
from .schema import known
from .texts import NODES
from .wrapper_hook import attach_bridge, obstacle

NODE_ID = "VCAttentionWanVideoWrapper"

#: A node that only the wrapper has, and files that only its folder has, whatever that is called.
_LOADER = "WanVideoModelLoader"
_FILES = ("nodes_model_loading.py", "wanvideo/modules/model.py")


def wrapper_is_here() -> bool:
    """Whether ComfyUI-WanVideoWrapper is loaded, or will be: ComfyUI loads custom nodes in no fixed order."""
    if _LOADER in getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {}):
        return True
    return any(_is_wrapper(folder) for folder in host.custom_node_folders())


def _is_wrapper(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


class VCAttentionWanVideoWrapper(io.ComfyNode):
    """Low-bit attention with value smoothing for the models of WanVideoWrapper."""

    @classmethod
    def define_schema(cls) -> Any:
        """The widgets of VC-Attention Patch, in the same order."""
        texts, model = NODES[NODE_ID], io.Custom("WANVIDEOMODEL")
        return known(
            io.Schema,
            node_id=NODE_ID,
            display_name=texts.display_name,
            category="advanced/attention",
            description=texts.description,
            search_aliases=["vc attention", "longcat", "wanvideowrapper", "wan speed", "low-bit attention"],
            inputs=[known(model.Input, "model", tooltip=texts.inputs["model"]), *widgets()],
            outputs=[known(model.Output, display_name="model", tooltip=texts.outputs["model"])],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # as in VC-Attention Patch: the output knows its node
        )

    @classmethod
    def validate_inputs(cls, dense_blocks: str = "") -> bool | str:
        """Say what is wrong with dense_blocks before anything runs."""
        return check_blocks(dense_blocks)

    @classmethod
    def execute(cls, model: Any, **values: Any) -> Any:
        """Patch a clone of `model`, or pass it on and say why not."""
        options = PatchOptions(**values)
        found = getattr(cls.hidden, "unique_id", None)
        node_id = None if found is None else str(found)
        set_folder(host.user_folder())
        reason = obstacle(model) if options.enabled else None
        if reason is not None:
            host.log.warning("VC-Attention: %s", reason)
            host.show_text(reason, node_id)
            return io.NodeOutput(model)
        patched = attach_bridge(model, options, node_id)
        host.show_text(first_words(patched, options, node_id) if options.enabled else OFF, node_id)
        return io.NodeOutput(patched)
