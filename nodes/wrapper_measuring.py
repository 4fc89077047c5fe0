"""The nodes "VC-Attention Quality for WanVideoWrapper" and "VC-Attention Capture for WanVideoWrapper".

Nodes of their own, because a socket of two types would have to be one of two types at the output as well, and a
released output never changes its type. What they do is what their twins in `measuring` do.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .capture import CaptureOptions
from .families import wrapper_family
from .measuring import (
    WANVIDEOMODEL,
    Side,
    capture_schema,
    capturing,
    measured,
    profile_stamp,
    quality_schema,
    sentence,
)
from .messages import NO_BRIDGE
from .quality import QualityOptions
from .schema import unique_id
from .wrapper_hook import bridge_session, watch_bridge

WRAPPER = Side(WANVIDEOMODEL, bridge_session, wrapper_family, watch_bridge, NO_BRIDGE)


class VCAttentionQualityWanVideoWrapper(io.ComfyNode):
    """Measures low-bit attention while the wrapper's sampler runs."""

    @classmethod
    def define_schema(cls) -> Any:
        """WANVIDEOMODEL in, WANVIDEOMODEL out; the widgets are those of VC-Attention Quality."""
        return quality_schema("VCAttentionQualityWanVideoWrapper", WRAPPER)

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
        return io.NodeOutput(measured(model, values, unique_id(cls), WRAPPER))


class VCAttentionCaptureWanVideoWrapper(io.ComfyNode):
    """Saves one attention call of a run of the wrapper's sampler."""

    @classmethod
    def define_schema(cls) -> Any:
        """WANVIDEOMODEL in, WANVIDEOMODEL out; the widgets are those of VC-Attention Capture."""
        return capture_schema("VCAttentionCaptureWanVideoWrapper", WRAPPER)

    @classmethod
    def validate_inputs(cls, layer: str = "0", filename_prefix: str = "x") -> bool | str:
        """Say what is wrong with a widget before anything runs."""
        return sentence(CaptureOptions, layer=layer, filename_prefix=filename_prefix)

    @classmethod
    def execute(cls, model: Any, **values: Any) -> Any:
        """Put a capturing watcher on a clone of `model`."""
        return io.NodeOutput(capturing(model, values, unique_id(cls), WRAPPER))
