"""Inputs and outputs of every node that a template uses, in the order in which the editor keeps them.

A line reads `inputs -> outputs`, each `name:TYPE`. Behind an input's type: `?` optional, `*` a seed (the editor keeps
"fixed" or "randomize" behind its value), `^` a widget with an upload button (one more value too), `!` a socket though
its type is a widget's.

Where the lines come from, and what checks them: CORE is /object_info of ComfyUI 0.3.75, and tests/comfy compares it
with whatever ComfyUI the tests run in. NEWER lists nodes that came later, as ComfyUI 0.33.0 defines them
(comfy_extras/nodes_minimax_h3.py). WRAPPER is kijai/ComfyUI-WanVideoWrapper (nodes.py, nodes_model_loading.py,
nodes_sampler.py, as of 2026), which our tests cannot run. OURS is compared with the nodes of this pack.
"""

from __future__ import annotations

from dataclasses import dataclass

WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")

CORE = {
    "UNETLoader": "unet_name:COMBO weight_dtype:COMBO -> MODEL:MODEL",
    "CLIPLoader": "clip_name:COMBO type:COMBO device:COMBO? -> CLIP:CLIP",
    "DualCLIPLoader": "clip_name1:COMBO clip_name2:COMBO type:COMBO device:COMBO? -> CLIP:CLIP",
    "VAELoader": "vae_name:COMBO -> VAE:VAE",
    "LoraLoaderModelOnly": "model:MODEL lora_name:COMBO strength_model:FLOAT -> MODEL:MODEL",
    "ModelSamplingSD3": "model:MODEL shift:FLOAT -> MODEL:MODEL",
    "CLIPTextEncode": "text:STRING clip:CLIP -> CONDITIONING:CONDITIONING",
    "LoadImage": "image:COMBO^ -> IMAGE:IMAGE MASK:MASK",
    "EmptyHunyuanLatentVideo": "width:INT height:INT length:INT batch_size:INT -> LATENT:LATENT",
    "EmptyHunyuanVideo15Latent": "width:INT height:INT length:INT batch_size:INT -> LATENT:LATENT",
    "Wan22ImageToVideoLatent": (
        "vae:VAE width:INT height:INT length:INT batch_size:INT start_image:IMAGE? -> LATENT:LATENT"
    ),
    "WanImageToVideo": (
        "positive:CONDITIONING negative:CONDITIONING vae:VAE width:INT height:INT length:INT batch_size:INT "
        "clip_vision_output:CLIP_VISION_OUTPUT? start_image:IMAGE? "
        "-> positive:CONDITIONING negative:CONDITIONING latent:LATENT"
    ),
    "KSampler": (
        "model:MODEL seed:INT* steps:INT cfg:FLOAT sampler_name:COMBO scheduler:COMBO positive:CONDITIONING "
        "negative:CONDITIONING latent_image:LATENT denoise:FLOAT -> LATENT:LATENT"
    ),
    "KSamplerAdvanced": (
        "model:MODEL add_noise:COMBO noise_seed:INT* steps:INT cfg:FLOAT sampler_name:COMBO scheduler:COMBO "
        "positive:CONDITIONING negative:CONDITIONING latent_image:LATENT start_at_step:INT end_at_step:INT "
        "return_with_leftover_noise:COMBO -> LATENT:LATENT"
    ),
    "KSamplerSelect": "sampler_name:COMBO -> SAMPLER:SAMPLER",
    "BasicScheduler": "model:MODEL scheduler:COMBO steps:INT denoise:FLOAT -> SIGMAS:SIGMAS",
    "RandomNoise": "noise_seed:INT* -> NOISE:NOISE",
    "CFGGuider": "model:MODEL positive:CONDITIONING negative:CONDITIONING cfg:FLOAT -> GUIDER:GUIDER",
    "BasicGuider": "model:MODEL conditioning:CONDITIONING -> GUIDER:GUIDER",
    "SamplerCustomAdvanced": (
        "noise:NOISE guider:GUIDER sampler:SAMPLER sigmas:SIGMAS latent_image:LATENT "
        "-> output:LATENT denoised_output:LATENT"
    ),
    "VAEDecode": "samples:LATENT vae:VAE -> IMAGE:IMAGE",
    "VAEDecodeAudio": "samples:LATENT vae:VAE -> AUDIO:AUDIO",
    "CreateVideo": "images:IMAGE fps:FLOAT audio:AUDIO? -> VIDEO:VIDEO",
    "SaveVideo": "video:VIDEO filename_prefix:STRING format:COMBO codec:COMBO ->",
    "PrimitiveInt": "value:INT* -> INT:INT",
    "PreviewImage": "images:IMAGE ->",
}

NEWER = {
    "MiniMaxH3ImageToVideo": (
        "clip:CLIP vae:VAE prompt:STRING width:INT height:INT length:INT first_frame:IMAGE? last_frame:IMAGE? "
        "-> positive:CONDITIONING LATENT:LATENT"
    ),
}

WRAPPER = {
    "WanVideoModelLoader": (
        "model:COMBO base_precision:COMBO quantization:COMBO load_device:COMBO attention_mode:COMBO? "
        "compile_args:WANCOMPILEARGS? block_swap_args:BLOCKSWAPARGS? lora:WANVIDLORA? "
        "vram_management_args:VRAM_MANAGEMENTARGS? extra_model:VACEPATH? fantasytalking_model:FANTASYTALKINGMODEL? "
        "multitalk_model:MULTITALKMODEL? fantasyportrait_model:FANTASYPORTRAITMODEL? rms_norm_function:COMBO? "
        "-> model:WANVIDEOMODEL"
    ),
    "WanVideoLoraSelect": (
        "lora:COMBO strength:FLOAT prev_lora:WANVIDLORA? blocks:SELECTEDBLOCKS? low_mem_load:BOOLEAN? "
        "merge_loras:BOOLEAN? -> lora:WANVIDLORA"
    ),
    "WanVideoBlockSwap": (
        "blocks_to_swap:INT offload_img_emb:BOOLEAN offload_txt_emb:BOOLEAN use_non_blocking:BOOLEAN? "
        "vace_blocks_to_swap:INT? prefetch_blocks:INT? block_swap_debug:BOOLEAN? -> block_swap_args:BLOCKSWAPARGS"
    ),
    "LoadWanVideoT5TextEncoder": (
        "model_name:COMBO precision:COMBO load_device:COMBO? quantization:COMBO? -> wan_t5_model:WANTEXTENCODER"
    ),
    "WanVideoVAELoader": (
        "model_name:COMBO precision:COMBO? compile_args:WANCOMPILEARGS? use_cpu_cache:BOOLEAN? verbose:BOOLEAN? "
        "-> vae:WANVAE"
    ),
    "WanVideoTextEncode": (
        "positive_prompt:STRING negative_prompt:STRING t5:WANTEXTENCODER? force_offload:BOOLEAN? "
        "model_to_offload:WANVIDEOMODEL? use_disk_cache:BOOLEAN? device:COMBO? -> text_embeds:WANVIDEOTEXTEMBEDS"
    ),
    "WanVideoEmptyEmbeds": (
        "width:INT height:INT num_frames:INT control_embeds:WANVIDIMAGE_EMBEDS? extra_latents:LATENT? "
        "-> image_embeds:WANVIDIMAGE_EMBEDS"
    ),
    "WanVideoSampler": (
        "model:WANVIDEOMODEL image_embeds:WANVIDIMAGE_EMBEDS steps:INT cfg:FLOAT shift:FLOAT seed:INT* "
        "force_offload:BOOLEAN scheduler:COMBO riflex_freq_index:INT text_embeds:WANVIDEOTEXTEMBEDS? samples:LATENT? "
        "denoise_strength:FLOAT? feta_args:FETAARGS? context_options:WANVIDCONTEXT? cache_args:CACHEARGS? "
        "flowedit_args:FLOWEDITARGS? batched_cfg:BOOLEAN? slg_args:SLGARGS? rope_function:COMBO? loop_args:LOOPARGS? "
        "experimental_args:EXPERIMENTALARGS? sigmas:SIGMAS? unianimate_poses:UNIANIMATE_POSE? "
        "fantasytalking_embeds:FANTASYTALKING_EMBEDS? uni3c_embeds:UNI3C_EMBEDS? multitalk_embeds:MULTITALK_EMBEDS? "
        "freeinit_args:FREEINITARGS? start_step:INT? end_step:INT? add_noise_to_samples:BOOLEAN? "
        "-> samples:LATENT denoised_samples:LATENT"
    ),
    "WanVideoDecode": (
        "vae:WANVAE samples:LATENT enable_vae_tiling:BOOLEAN tile_x:INT tile_y:INT tile_stride_x:INT "
        "tile_stride_y:INT normalization:COMBO? -> images:IMAGE"
    ),
}

_WIDGETS = (
    "precision:COMBO quality:COMBO grouping:COMBO group_fraction:FLOAT reuse_steps:INT groups:INT min_tokens:INT "
    "dense_blocks:STRING start_percent:FLOAT end_percent:FLOAT state_budget_gb:FLOAT on_problem:COMBO backend:COMBO"
)
OURS = {
    "VCAttentionPatch": f"model:MODEL {_WIDGETS} -> model:MODEL",
    "VCAttentionWanVideoWrapper": f"model:WANVIDEOMODEL {_WIDGETS} -> model:WANVIDEOMODEL",
    "VCAttentionCompare": (
        "images_a:IMAGE images_b:IMAGE label_a:STRING label_b:STRING strip:COMBO lpips:BOOLEAN "
        "-> strip:IMAGE plot:IMAGE json:STRING"
    ),
}

#: Which pack a node comes from: its id in the registry, by which ComfyUI Manager finds a missing one.
PACKS = ((CORE, "comfy-core"), (NEWER, "comfy-core"), (WRAPPER, "ComfyUI-WanVideoWrapper"), (OURS, "vc-attention"))


@dataclass(frozen=True)
class Input:
    """One input of a node. widget: it has a value on the node. extra: the value that the editor keeps behind it."""

    name: str
    kind: str
    optional: bool = False
    widget: bool = False
    extra: str | None = None


@dataclass(frozen=True)
class Definition:
    """A node: where it comes from, its inputs in the order of its definition, and (name, type) of its outputs."""

    pack: str
    inputs: tuple[Input, ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def widgets(self) -> tuple[Input, ...]:
        """The inputs with a value on the node, in the order of `widgets_values`."""
        return tuple(item for item in self.inputs if item.widget)

    @property
    def slots(self) -> tuple[Input, ...]:
        """The inputs in the order in which the editor numbers them: sockets first, then widgets."""
        return (*(item for item in self.inputs if not item.widget), *self.widgets)


def define(kind: str) -> Definition:
    """The definition of a node. Raises KeyError, with the node's name, for one that no template uses."""
    for table, pack in PACKS:
        if kind in table:
            inputs, _, outputs = table[kind].partition("->")
            return Definition(pack, tuple(map(_input, inputs.split())), tuple(map(_pair, outputs.split())))
    raise KeyError(f"{kind} is in none of the tables of definitions.py")


def _pair(text: str) -> tuple[str, str]:
    name, _, kind = text.partition(":")
    return name, kind


def _input(text: str) -> Input:
    name, rest = _pair(text)
    kind = rest.rstrip("?*^!") or "*"
    marks = rest[len(kind) :]
    extra = "fixed" if "*" in marks else "image" if "^" in marks else None
    return Input(name, kind, "?" in marks, kind in WIDGET_TYPES and "!" not in marks, extra)
