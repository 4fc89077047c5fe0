"""The model files that templates name: where each is published, and the folder of ComfyUI/models that it belongs in."""

from __future__ import annotations

from dataclasses import dataclass

_HUB = "https://huggingface.co"
_WAN21 = f"{_HUB}/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"
_WAN22 = f"{_HUB}/Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files"
_HUNYUAN = f"{_HUB}/Comfy-Org/HunyuanVideo_1.5_repackaged/resolve/main/split_files"
_H3 = f"{_HUB}/Comfy-Org/MiniMax-H3/resolve/main"
_LONGCAT = f"{_HUB}/Kijai/LongCat-Video_comfy/resolve/main"
_WRAPPER = f"{_HUB}/Kijai/WanVideo_comfy/resolve/main"


@dataclass(frozen=True)
class ModelFile:
    """A file: its address, and `directory`, its folder under ComfyUI/models."""

    url: str
    directory: str

    @property
    def name(self) -> str:
        """The file's name, as a loader's widget shows it."""
        return self.url.rsplit("/", 1)[-1]


def _split(base: str, directory: str, name: str) -> ModelFile:
    return ModelFile(f"{base}/{directory}/{name}", directory)


WAN_T2V_HIGH = _split(_WAN22, "diffusion_models", "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors")
WAN_T2V_LOW = _split(_WAN22, "diffusion_models", "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors")
WAN_I2V_HIGH = _split(_WAN22, "diffusion_models", "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors")
WAN_I2V_LOW = _split(_WAN22, "diffusion_models", "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors")
WAN_5B = _split(_WAN22, "diffusion_models", "wan2.2_ti2v_5B_fp16.safetensors")
WAN_LORA_HIGH = _split(_WAN22, "loras", "wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors")
WAN_LORA_LOW = _split(_WAN22, "loras", "wan2.2_t2v_lightx2v_4steps_lora_v1.1_low_noise.safetensors")
WAN_TEXT = _split(_WAN21, "text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors")
WAN_VAE = _split(_WAN22, "vae", "wan_2.1_vae.safetensors")
WAN_5B_VAE = _split(_WAN22, "vae", "wan2.2_vae.safetensors")

HUNYUAN = _split(_HUNYUAN, "diffusion_models", "hunyuanvideo1.5_720p_t2v_fp16.safetensors")
HUNYUAN_TEXT = _split(_HUNYUAN, "text_encoders", "qwen_2.5_vl_7b_fp8_scaled.safetensors")
HUNYUAN_GLYPHS = _split(_HUNYUAN, "text_encoders", "byt5_small_glyphxl_fp16.safetensors")
HUNYUAN_VAE = _split(_HUNYUAN, "vae", "hunyuanvideo15_vae_fp16.safetensors")

H3 = _split(_H3, "diffusion_models", "minimax_h3_fl2va_pruned_int8_convrot.safetensors")
H3_TEXT = _split(_H3, "text_encoders", "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors")
H3_VAE = _split(_H3, "vae", "minimax_h3_video_vae_fp16.safetensors")
H3_AUDIO_VAE = _split(_H3, "vae", "minimax_h3_audio_vae_fp32.safetensors")

LONGCAT = ModelFile(f"{_LONGCAT}/LongCat_TI2V_comfy_fp8_e4m3fn_scaled_KJ.safetensors", "diffusion_models")
LONGCAT_LORA = ModelFile(f"{_LONGCAT}/LongCat_distill_lora_alpha64_bf16.safetensors", "loras")
LONGCAT_TEXT = ModelFile(f"{_WRAPPER}/umt5-xxl-enc-bf16.safetensors", "text_encoders")
LONGCAT_VAE = ModelFile(f"{_WRAPPER}/Wan2_1_VAE_bf16.safetensors", "vae")


def note(files: list[ModelFile]) -> str:
    """Markdown for a note: each folder with links to its files, and the tree that they make."""
    folders: dict[str, list[ModelFile]] = {}
    for file in files:
        folders.setdefault(file.directory, []).append(file)
    links = [
        f"**models/{folder}**\n" + "".join(f"- [{file.name}]({file.url})\n" for file in held)
        for folder, held in folders.items()
    ]
    tree = "".join(
        f"  {folder}/\n" + "".join(f"    {file.name}\n" for file in held) for folder, held in folders.items()
    )
    return "## Files this workflow needs\n\n" + "\n".join(links) + f"\n```\nComfyUI/models/\n{tree}```\n"
