"""Tiny random-weight video models that a real ComfyUI detects, loads and samples from in about a second.

They have the real architectures at two layers and two heads of 128, so everything that ComfyUI does around attention
(detection, batching of branches, samplers, context windows, patches) is the real thing, and only the picture is noise.

    python tools/tiny_models.py wan22_t2v OUT_DIR --comfyui DIR     writes OUT_DIR/tiny_wan22_t2v.safetensors

The module needs ComfyUI's `comfy` to be importable; `import_comfy` does that the way its own `main.py --cpu` would.

Weights are drawn so that attention decides a visible part of the sampled latent, see `fill`. Measured on 4 euler
steps with CFG 4, as the largest change relative to the largest value of the latent: self-attention replaced by zero
0.50 to 0.87, K permuted without V 0.17 to 0.87, attention times 1.01 0.003 to 0.011, K and V permuted together less
than 2e-6. Everything stays finite; latents have a standard deviation of 1 to 3.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Family(NamedTuple):
    """`latent`: shape of an empty latent. `text_dim`: width of the text conditioning. `tokens`: self-attention keys
    of that latent without text. `layers`: attention blocks that the hook can accelerate. `module`: where its network
    lives; a ComfyUI without that module is too old for this family."""

    latent: tuple[int, ...]
    text_dim: int
    tokens: int
    layers: int
    module: str


FAMILIES: dict[str, Family] = {
    "wan22_t2v": Family((1, 16, 3, 8, 12), 4096, 72, 2, "comfy.ldm.wan.model"),
    # 288 tokens, so that the 257 tokens of the image cross attention stay below a threshold that the video passes
    "wan_i2v": Family((1, 16, 3, 16, 24), 4096, 288, 2, "comfy.ldm.wan.model"),
    "wan22_5b": Family((1, 48, 3, 8, 12), 4096, 72, 2, "comfy.ldm.wan.model"),
    "wan_vace": Family((1, 16, 3, 8, 12), 4096, 72, 3, "comfy.ldm.wan.model"),
    "hunyuan_video": Family((1, 16, 3, 8, 12), 64, 72, 4, "comfy.ldm.hunyuan_video.model"),
    "hunyuan_video_15": Family((1, 32, 3, 4, 6), 64, 72, 2, "comfy.ldm.hunyuan_video.model"),
    "minimax_h3": Family((1, 24, 7, 8, 12), 64, 242, 2, "comfy.ldm.minimax.model"),
    "wan_animate2": Family((1, 16, 4, 8, 12), 4096, 96, 2, "comfy.ldm.wan.model_animate2"),
    "wan_s2v": Family((1, 16, 3, 8, 12), 4096, 96, 2, "comfy.ldm.minimax.model"),  # reaches the hook where H3 exists
}
NAMES = tuple(FAMILIES)
AUDIO_LATENT = (1, 32, 2, 37)  # MiniMax-H3's second stream: 32 channels, stereo, 37 steps for 22 frames

_WAN = {"dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2, "text_dim": 4096, "in_dim": 16, "out_dim": 16}
_HUNYUAN = {
    **{"in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 64, "vision_in_dim": None},
    **{"hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2},
    **{"axes_dim": [16, 56, 56], "theta": 256, "patch_size": [1, 2, 2], "qkv_bias": True, "guidance_embed": True},
    **{"byt5": False, "meanflow": False, "use_cond_type_embedding": False},
}
_HUNYUAN_15 = {
    **_HUNYUAN,
    **{"in_channels": 65, "out_channels": 32, "vec_in_dim": None, "vision_in_dim": 1152, "patch_size": [1, 1, 1]},
    **{"depth_single_blocks": 0, "byt5": True, "use_cond_type_embedding": True, "guidance_embed": False},
}
_H3 = {
    **{"hidden_size": 256, "num_layers": 2, "token_refiner_num_layers": 2, "ffn_hidden_size": 512},
    **{"num_attention_heads": 2, "attention_head_dim": 128, "latents_dim": 24, "audio_latents_dim": 32},
    **{"text_dim": 64, "timestep_input_dim": 64, "time_embed_hidden_size": 64, "time_embed_dim": 32},
    "rope_inv_freq_len": 16,
}


def import_comfy(directory: str | Path, flags: Sequence[str] = ("--cpu",)) -> None:
    """Make `comfy` of the ComfyUI checkout at `directory` importable, whatever this process's argv is.

    flags: what `main.py` would be started with; without "--cpu" ComfyUI takes the GPU. Import-only stand-ins for
    torchvision and torchaudio (`tools/stubs`) are used where those packages are missing.
    Raises FileNotFoundError when there is no ComfyUI there. Must be called before anything imports `comfy`.
    """
    root = Path(directory).resolve()
    if not (root / "comfy" / "sd.py").is_file():
        raise FileNotFoundError(f"{root} holds no ComfyUI (comfy/sd.py is missing); pass a checkout with --comfyui.")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    stubs = Path(__file__).resolve().parent / "stubs"
    if stubs.is_dir() and importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(stubs))
    argv = sys.argv
    sys.argv = [argv[0], *flags]  # ComfyUI reads its options from argv while it is imported
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args
    finally:
        sys.argv = argv


def available() -> tuple[str, ...]:
    """The families that the importable ComfyUI knows; an older one lacks the newest models."""
    return tuple(name for name, family in FAMILIES.items() if _has_module(family.module))


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _network(name: str) -> tuple[torch.nn.Module, dict[str, str] | None]:
    """An uninitialised network of the family, and the safetensors metadata its detection needs (or None)."""
    import comfy.ops

    made: dict[str, Any] = {"operations": comfy.ops.disable_weight_init, "dtype": torch.float32, "device": "cpu"}
    if name == "minimax_h3":
        from comfy.ldm.minimax.model import MiniMaxH3Model

        return MiniMaxH3Model(**_H3, **made), None
    if name.startswith("hunyuan"):
        from comfy.ldm.hunyuan_video.model import HunyuanVideo, HunyuanVideoParams

        options = _HUNYUAN_15 if name.endswith("15") else _HUNYUAN
        # newer cores added a field to the parameters
        extra = {"meanflow_sum": False} if "meanflow_sum" in HunyuanVideoParams.__dataclass_fields__ else {}
        return HunyuanVideo(**options, **extra, **made), None
    import comfy.ldm.wan.model as wan

    if name == "wan22_t2v":
        return wan.WanModel(model_type="t2v", **_WAN, **made), None
    if name == "wan_i2v":
        return wan.WanModel(model_type="i2v", **{**_WAN, "in_dim": 36}, **made), None
    if name == "wan22_5b":
        return wan.WanModel(model_type="t2v", **{**_WAN, "in_dim": 48, "out_dim": 48}, **made), None
    if name == "wan_vace":
        return wan.VaceWanModel(vace_layers=1, vace_in_dim=96, **_WAN, **made), None
    if name == "wan_s2v":
        return wan.WanModel_S2V(**_WAN, **made), None
    from comfy.ldm.wan.model_animate2 import WanAnimate2Model

    metadata = {"config": json.dumps({"transformer": {"model_type": "animate2"}})}
    return WanAnimate2Model(**{**_WAN, "in_dim": 36}, **made), metadata


def fill(network: torch.nn.Module, seed: int) -> None:
    """Draw weights in place, on their own device. Everything is scaled by 1/sqrt(fan in) so that activations keep unit
    size; then

    - norm weights are 1, and those of q and k are 1.25, which makes the scores 1.6 nats wide: rows of attention pick
      out a few tokens, so that a wrong permutation changes them;
    - the gates of the attention and feed-forward branches are near 1 (a bias), so that every block contributes;
    - the value and output projections of self-attention have gain 1.5;
    - the last projection has gain 0.5, so that a step does not amplify rounding noise.
    """
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in [*network.named_parameters(), *network.named_buffers()]:
            if not parameter.is_floating_point():
                continue
            if name == "rope.inv_freq":
                steps = torch.arange(parameter.numel()) / parameter.numel()
                parameter.copy_(1.0 / 10000.0**steps)
                continue
            noise = torch.randn(parameter.shape, generator=generator, device=device)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(noise * 0.02)
            _special(name, parameter)


def _special(name: str, parameter: torch.Tensor) -> None:
    """The exceptions of `fill`, by parameter name."""
    leaf = name.rsplit(".", 1)[-1]
    owner = name.rsplit(".", 2)[-2] if "." in name else ""
    if any(part in name for part in ("norm_q", "norm_k", "q_norm", "k_norm", "query_norm", "key_norm")):
        parameter.fill_(1.25)
    elif parameter.ndim == 1 and leaf in ("weight", "scale"):
        parameter.fill_(1.0)
    elif leaf == "modulation" and parameter.shape[1] == 6:  # Wan blocks: shift, scale, gate for attention, then for ffn
        parameter.mul_(0.3)
        parameter[:, 2] += 1.0
        parameter[:, 5] += 0.5
    elif leaf == "weight" and (
        "time_projection" in name
        or "_mod.lin" in name
        or ".modulation.lin" in name
        or "adaLN" in name
        or "adaln" in name
    ):
        parameter.mul_(0.2)
    elif leaf == "bias" and ("_mod.lin" in name or ".modulation.lin" in name):
        gates = parameter.view(-1, 3, parameter.numel() // (6 if "_mod.lin" in name else 3))
        gates[:, 2] += 1.0
    elif (
        leaf == "bias" and "adaln_proj" in name and "blocks" in name
    ):  # H3: three modalities of two (shift, scale, gate)
        parameter.view(3, 2, 3, -1)[:, :, 2] += 1.0
    elif leaf == "weight" and (
        ("self_attn" in name and owner in ("v", "o"))
        or (owner in ("proj", "out_proj") and "attn" in name)
        or owner == "linear2"
    ):
        parameter.mul_(1.5)
    elif leaf == "weight" and owner in ("qkv", "qkv_proj"):
        parameter[2 * parameter.shape[0] // 3 :].mul_(1.5)
    elif leaf == "weight" and name in _OUTPUT_PROJECTIONS:
        parameter.mul_(0.5)


_OUTPUT_PROJECTIONS = (
    "head.head.weight",
    "final_layer.linear.weight",
    "final_layer.video_out.weight",
    "final_layer.audio_out.weight",
)


def path_of(name: str, directory: str | Path) -> Path:
    """Where `build` writes the checkpoint of `name`."""
    return Path(directory) / f"tiny_{name}.safetensors"


def build(name: str, directory: str | Path, seed: int = 0) -> Path:
    """Write the checkpoint of family `name` (13 to 66 MB) into `directory` and return its path.

    Raises ValueError for a name that is unknown or that the importable ComfyUI does not support.
    """
    import safetensors.torch

    if name not in FAMILIES:
        raise ValueError(f"{name!r} is not a tiny model; the names are {', '.join(NAMES)}.")
    if name not in available():
        raise ValueError(f"This ComfyUI does not have the model behind {name!r}; a newer one does.")
    network, metadata = _network(name)
    fill(network, seed)
    path = path_of(name, directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    tensors = {key: value.detach().contiguous().float() for key, value in network.state_dict().items()}
    safetensors.torch.save_file(tensors, str(partial), metadata=metadata)
    partial.replace(path)
    return path


def load(name: str, directory: str | Path) -> Any:
    """Load the checkpoint through ComfyUI's own loader, building it first if it is missing. Returns a ModelPatcher."""
    import comfy.sd

    path = path_of(name, directory)
    if not path.is_file():
        build(name, directory)
    return comfy.sd.load_diffusion_model(str(path))


def _noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class _ClipVision:
    """What ComfyUI's image encoder node hands on, with random features."""

    last_hidden_state = _noise(1, 257, 1280, seed=7)
    penultimate_hidden_states = last_hidden_state


def empty_latent(name: str, frames: int | None = None) -> Any:
    """Zeros `[1, C, T, H, W]` (H3: a nested pair of video and audio latents); `frames` overrides T."""
    shape = list(FAMILIES[name].latent)
    if frames is not None:
        shape[2] = frames
    if name != "minimax_h3":
        return torch.zeros(shape)
    import comfy.nested_tensor

    return comfy.nested_tensor.NestedTensor((torch.zeros(shape), torch.zeros(AUDIO_LATENT)))


def conditioning(
    name: str, tokens: int = 20, seed: int = 1, latent: Any = None, masked: int = 0, keyframe: bool = False
) -> list[list[Any]]:
    """A ComfyUI conditioning `[[text [1, tokens, text_dim], options]]` with what the family needs besides text.

    masked: HunyuanVideo: hide this many tokens at the end of the prompt behind an attention mask.
    keyframe: MiniMax-H3: condition on one given frame.
    """
    latent = empty_latent(name) if latent is None else latent
    options: dict[str, Any] = {}
    if name == "minimax_h3":
        if keyframe:
            _, channels, _, height, width = FAMILIES[name].latent
            frame = _noise(1, channels, 1, height, width, seed=5)
            options["minimax_keyframes"] = [{"resolved_frame_index": 0, "latent": frame}]
    else:
        batch, _, frames, height, width = latent.shape
        if name.startswith("hunyuan"):
            options["pooled_output"] = torch.zeros(batch, 768)
            if masked:
                seen = torch.ones(1, tokens, dtype=torch.long)
                seen[:, tokens - masked :] = 0
                options["attention_mask"] = seen
        if name == "hunyuan_video_15":
            options["conditioning_byt5small"] = _noise(1, 6, 1472, seed=3)
        if name in ("wan_i2v", "wan_animate2"):
            options["clip_vision_output"] = _ClipVision
            options["concat_latent_image"] = torch.zeros(batch, 16, frames, height, width)
            options["concat_mask"] = torch.ones(batch, 1, frames, height, width)
        if name == "wan_animate2":
            options["pose_video_latent"] = _noise(batch, 16, frames - 1, height, width, seed=6)
        if name == "wan_vace":
            options["vace_frames"] = [_noise(batch, 32, frames, height, width, seed=8)]
            options["vace_mask"] = [torch.ones(batch, 64, frames, height, width)]
            options["vace_strength"] = [1.0]
        if name == "wan_s2v":
            options["audio_embed"] = _noise(1, 25, 1024, 4 * frames, seed=9)
            options["reference_latents"] = [_noise(1, 16, 1, height, width, seed=10)]
    return [[_noise(1, tokens, FAMILIES[name].text_dim, seed=seed), options]]


def sample(
    model: Any,
    name: str,
    steps: int = 4,
    cfg: float = 4.0,
    sampler: str = "euler",
    scheduler: str = "simple",
    seed: int = 0,
    positive: Any = None,
    negative: Any = None,
    latent: Any = None,
    noise: Any = None,
    **options: Any,
) -> Any:
    """Sample as the KSampler node does and return the latent. `options` go to `comfy.sample.sample`
    (denoise, start_step, last_step, disable_noise, force_full_denoise, callback)."""
    import comfy.sample

    latent = empty_latent(name) if latent is None else latent
    positive = conditioning(name, 20, 1, latent) if positive is None else positive
    negative = conditioning(name, 20, 2, latent) if negative is None else negative
    noise = comfy.sample.prepare_noise(latent, seed) if noise is None else noise
    with torch.no_grad():
        return comfy.sample.sample(
            model,
            noise,
            steps,
            cfg,
            sampler,
            scheduler,
            positive,
            negative,
            latent,
            disable_pbar=True,
            seed=seed,
            **options,
        )


def flat(latent: Any) -> torch.Tensor:
    """All values of a latent in one vector; H3's nested pair is concatenated."""
    if getattr(latent, "is_nested", False):
        return torch.cat([part.flatten() for part in latent.unbind()])
    return latent.flatten()


def main() -> int:
    """Command line: build one model, or all that this ComfyUI supports."""
    parser = argparse.ArgumentParser(description="Write a tiny random-weight video model for ComfyUI.")
    parser.add_argument("name", choices=[*NAMES, "all"])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--comfyui", type=Path, help="ComfyUI checkout; not needed where `comfy` is importable")
    args = parser.parse_args()
    try:
        import_comfy(args.comfyui) if args.comfyui else import_comfy(Path.cwd())
        for name in available() if args.name == "all" else (args.name,):
            print(build(name, args.out_dir))
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
