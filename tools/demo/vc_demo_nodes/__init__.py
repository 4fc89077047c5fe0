"""Nodes for the demo's own ComfyUI server: stand-ins for what cannot be small, and a recorder. Not in the pack."""

from .stand_ins import NODE_CLASS_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS"]
