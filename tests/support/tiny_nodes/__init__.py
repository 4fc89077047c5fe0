"""A custom node for the tests' ComfyUI server: the conditioning of a tiny model, in place of a text encoder."""

import importlib.util
from pathlib import Path

_FILE = Path(__file__).resolve().parents[3] / "tools" / "tiny_models.py"


class TinyConditioning:
    """The conditioning of a family of tools/tiny_models.py; other texts give other numbers."""

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"family": ("STRING", {}), "text": ("STRING", {})}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"
    CATEGORY = "vc-attention/tests"

    def encode(self, family, text):
        spec = importlib.util.spec_from_file_location("_vc_attention_tiny_models", _FILE)
        tiny_models = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tiny_models)
        return (tiny_models.conditioning(family, 20, 1 + len(text)),)


NODE_CLASS_MAPPINGS = {"TinyConditioning": TinyConditioning}
