"""VC-Attention for ComfyUI. ComfyUI reads `comfy_entrypoint` and `WEB_DIRECTORY` here and nothing else."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """Return the ComfyUI V3 extension. Nothing of ComfyUI or torch is imported before ComfyUI asks for it."""
    from .nodes import VCAttentionExtension

    return VCAttentionExtension()
