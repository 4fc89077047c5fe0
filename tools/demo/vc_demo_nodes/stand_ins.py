"""Demo nodes: a prompt without its text encoder, a recorder of attention errors, and a control without attention."""

from __future__ import annotations

import hashlib
import json
import os

import folder_paths
import torch

from .recorder import Recorder, pack_module

TEXT_WIDTH = 4096
TEXT_TOKENS = 32
TEXT_SCALE = 0.3
COUNTS = ("accelerated", "grouped", "reused", "plain", "forwards", "unkept")


class VCDemoConditioning:
    """A conditioning that depends on the text in nothing but being different for different texts."""

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"text": ("STRING", {"multiline": True})}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "encode"
    CATEGORY = "vc-attention/demo"

    def encode(self, text):
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
        noise = torch.randn(1, TEXT_TOKENS, TEXT_WIDTH, generator=torch.Generator().manual_seed(seed))
        return ([[TEXT_SCALE * noise, {}]],)


class VCDemoRecord:
    """Watches every accelerated attention call of a patched model."""

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"model": ("MODEL",), "stage": ("STRING", {"default": ""})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "watch"
    CATEGORY = "vc-attention/demo"

    def watch(self, model, stage):
        session = pack_module("nodes.hook").session_of(model)
        if session is None:
            raise RuntimeError("VCDemoRecord needs a model that the VC-Attention Patch node has patched.")
        session.observers[:] = [Recorder(stage, pack_module("kernels").attention)]
        return (model,)


class VCDemoWrite:
    """Writes what the recorder saw in one sampler run, and the run's counts, into the output folder."""

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {
            "required": {
                "samples": ("LATENT",),
                "model": ("MODEL",),
                "stage": ("STRING", {"default": ""}),
                "file": ("STRING", {"default": "records.json"}),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "write"
    CATEGORY = "vc-attention/demo"

    def write(self, samples, model, stage, file):
        session = pack_module("nodes.hook").session_of(model)
        reasons = pack_module("nodes.messages").REASONS
        calls = [call for watcher in session.observers for call in getattr(watcher, "calls", ())]
        stats = session.stats
        record = {
            "stage": stage,
            "summary": stats.summary(),
            "engine": stats.engine,
            "family": stats.family,
            "counts": {name: getattr(stats, name) for name in COUNTS},
            "declined": dict(stats.declined),
            "reasons": {code: reasons[code].text for code in stats.declined if code in reasons},
            "steps": stats.step_count,
            "phases": {str(step): phase for step, phase in stats.steps.items()},
            "notes": list(stats.notes),
            "calls": calls,
        }
        path = os.path.join(folder_paths.get_output_directory(), os.path.basename(file))
        with open(path, "w", encoding="utf-8") as out:
            json.dump(record, out)
        return (samples,)


class VCDemoNoAttention:
    """The control of the demo: self-attention that returns zero."""

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "remove"
    CATEGORY = "vc-attention/demo"

    def remove(self, model):
        def override(func, q, k, v, heads, *args, **kwargs):
            return torch.zeros_like(q) if q.shape[1] == k.shape[1] else func(q, k, v, heads, *args, **kwargs)

        patched = model.clone()
        patched.model_options.setdefault("transformer_options", {})["optimized_attention_override"] = override
        return (patched,)


NODE_CLASS_MAPPINGS = {
    node.__name__: node for node in (VCDemoConditioning, VCDemoRecord, VCDemoWrite, VCDemoNoAttention)
}
