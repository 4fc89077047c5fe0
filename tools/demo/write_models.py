"""Write the demo's tiny models, in ComfyUI's environment: `python -m tools.demo.write_models COMFYUI_DIR OUT_DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ..tiny_models import import_comfy
from . import FILES, models


def write(comfyui: Path, out: Path) -> None:
    """Write every file of `FILES` into the folders that ComfyUI's loaders read, each in one move."""
    import_comfy(comfyui)
    import comfy.latent_formats
    import comfy.ldm.wan.model
    import comfy.ldm.wan.vae
    import comfy.ops

    torch.set_num_threads(2)
    network = comfy.ldm.wan.model.WanModel(
        model_type="t2v",
        dim=models.HIDDEN,
        ffn_dim=2 * models.HIDDEN,
        num_heads=models.HEADS,
        num_layers=models.LAYERS,
        text_dim=4096,
        in_dim=models.CHANNELS,
        out_dim=models.CHANNELS,
        operations=comfy.ops.disable_weight_init,
        dtype=torch.float32,
        device="cpu",
    )
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    for seed, name in enumerate(("high", "low")):
        _save(models.model_weights(shapes, seed), out / "diffusion_models" / FILES[name])
    vae = comfy.ldm.wan.vae.WanVAE(
        dim=models.VAE_CHANNELS,
        z_dim=models.CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=2,
        attn_scales=[],
        temperal_downsample=[False, True, True],
    )
    statistics = comfy.latent_formats.Wan21()
    shapes = {name: tuple(value.shape) for name, value in vae.state_dict().items()}
    weights = models.vae_weights(shapes, statistics.latents_mean.flatten(), statistics.latents_std.flatten())
    _save(weights, out / "vae" / FILES["vae"])


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    import safetensors.torch

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    safetensors.torch.save_file({name: value.contiguous() for name, value in weights.items()}, str(part))
    part.replace(path)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
