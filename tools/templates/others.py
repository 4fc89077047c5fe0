"""The templates of HunyuanVideo-1.5, MiniMax-H3 and LongCat-Video."""

from __future__ import annotations

from . import files
from .graph import GREEN, Graph
from .parts import DEFAULTS, NEGATIVE, PROMPT, Places, about, diffusion_model, patch, save, texts

WRAPPER_PAGE = "https://github.com/kijai/ComfyUI-WanVideoWrapper"


def hunyuan_15(name: str) -> Graph:
    """HunyuanVideo-1.5, 720p text to video."""
    at = Places(name)
    model = diffusion_model(at.load, files.HUNYUAN)
    clip = at.load.add(
        "DualCLIPLoader",
        clip_name1=files.HUNYUAN_TEXT,
        clip_name2=files.HUNYUAN_GLYPHS,
        type="hunyuan_video_15",
        device="default",
    )
    vae = at.load.add("VAELoader", vae_name=files.HUNYUAN_VAE)
    patched = patch(at.own, model["MODEL"])
    positive, negative = texts(at.prompt, clip["CLIP"], negative="")
    latent = at.size.add("EmptyHunyuanVideo15Latent", width=1280, height=720, length=121, batch_size=1)
    shifted = at.sample.add("ModelSamplingSD3", model=patched["model"], shift=7.0)
    guider = at.sample.add(
        "CFGGuider",
        model=shifted["MODEL"],
        positive=positive["CONDITIONING"],
        negative=negative["CONDITIONING"],
        cfg=6.0,
    )
    sampler = at.sample.add("KSamplerSelect", sampler_name="euler")
    sigmas = at.sample.add("BasicScheduler", model=shifted["MODEL"], scheduler="simple", steps=20, denoise=1.0)
    noise = at.sample.add("RandomNoise", noise_seed=1)
    samples = at.sample.add(
        "SamplerCustomAdvanced",
        noise=noise["NOISE"],
        guider=guider["GUIDER"],
        sampler=sampler["SAMPLER"],
        sigmas=sigmas["SIGMAS"],
        latent_image=latent["LATENT"],
    )
    images = at.clip.add("VAEDecode", samples=samples["output"], vae=vae["VAE"])
    save(at.clip, images["IMAGE"], 24.0, "video/hunyuanvideo1.5_vc_attention")
    return at.finish(
        about(
            "One node behind the model loader. HunyuanVideo joins text and video in one attention; VC-Attention groups "
            "the video's tokens and the text's alike.",
            "The workflow makes 1280 x 720, 121 frames: 111,600 tokens and the text. That is a long sequence, where "
            "attention is most of the time; for a first try take 848 x 480.",
        ),
        440,
    )


def minimax_h3(name: str) -> Graph:
    """MiniMax-H3, text to video with sound."""
    at = Places(name, "0.33.0")
    model = diffusion_model(at.load, files.H3)
    clip = at.load.add("CLIPLoader", clip_name=files.H3_TEXT, type="minimax", device="default")
    vae = at.load.add("VAELoader", "Load VAE (video)", vae_name=files.H3_VAE)
    audio_vae = at.load.add("VAELoader", "Load VAE (audio)", vae_name=files.H3_AUDIO_VAE)
    patched = patch(at.own, model["MODEL"])
    at.prompt.title, at.size.title = "3  Prompt, size and length", None
    video = at.prompt.add(
        "MiniMaxH3ImageToVideo",
        colours=GREEN,
        clip=clip["CLIP"],
        vae=vae["VAE"],
        prompt=f"{PROMPT} Sound: rain, distant traffic, running water.",
        width=1344,
        height=768,
        length=124,
    )
    at.sample.title, at.clip.title = "4  Sample", "5  Clip"
    guider = at.sample.add("BasicGuider", model=patched["model"], conditioning=video["positive"])
    sampler = at.sample.add("KSamplerSelect", sampler_name="res_multistep")
    sigmas = at.sample.add("BasicScheduler", model=patched["model"], scheduler="simple", steps=20, denoise=1.0)
    noise = at.sample.add("RandomNoise", noise_seed=1)
    samples = at.sample.add(
        "SamplerCustomAdvanced",
        noise=noise["NOISE"],
        guider=guider["GUIDER"],
        sampler=sampler["SAMPLER"],
        sigmas=sigmas["SIGMAS"],
        latent_image=video["LATENT"],
    )
    images = at.clip.add("VAEDecode", samples=samples["output"], vae=vae["VAE"])
    audio = at.clip.add("VAEDecodeAudio", samples=samples["output"], vae=audio_vae["VAE"])
    save(at.clip, images["IMAGE"], 24.0, "video/minimax_h3_vc_attention", audio=audio["AUDIO"])
    return at.finish(
        about(
            "One node behind the model loader. MiniMax-H3 attends over text, sound and picture at once; all of it goes "
            "through VC-Attention. It needs ComfyUI 0.33 or newer.",
            "The workflow makes 1344 x 768, 124 frames (5 seconds at 24 a second): 37,710 tokens and the text. The "
            "length is 5 more than a multiple of 17, the sides are multiples of 32; for a first try take 864 x 480.",
        ),
        460,
    )


def longcat(name: str) -> Graph:
    """LongCat-Video through WanVideoWrapper, with its distillation LoRA."""
    at = Places(name)
    lora = at.load.add(
        "WanVideoLoraSelect", lora=files.LONGCAT_LORA, strength=1.0, low_mem_load=False, merge_loras=False
    )
    swap = at.load.add(
        "WanVideoBlockSwap",
        blocks_to_swap=20,
        offload_img_emb=False,
        offload_txt_emb=False,
        use_non_blocking=False,
        vace_blocks_to_swap=0,
        prefetch_blocks=1,
        block_swap_debug=False,
    )
    model = at.load.add(
        "WanVideoModelLoader",
        model=files.LONGCAT,
        base_precision="bf16",
        quantization="disabled",
        load_device="offload_device",
        attention_mode="sdpa",
        rms_norm_function="default",
        lora=lora["lora"],
        block_swap_args=swap["block_swap_args"],
    )
    text = at.load.add(
        "LoadWanVideoT5TextEncoder",
        model_name=files.LONGCAT_TEXT,
        precision="bf16",
        load_device="offload_device",
        quantization="disabled",
    )
    vae = at.load.add(
        "WanVideoVAELoader", model_name=files.LONGCAT_VAE, precision="bf16", use_cpu_cache=False, verbose=False
    )
    patched = at.own.add("VCAttentionWanVideoWrapper", model=model["model"], **DEFAULTS)
    encoded = at.prompt.add(
        "WanVideoTextEncode",
        colours=GREEN,
        positive_prompt=PROMPT,
        negative_prompt=NEGATIVE,
        t5=text["wan_t5_model"],
        force_offload=True,
        use_disk_cache=False,
        device="gpu",
    )
    empty = at.size.add("WanVideoEmptyEmbeds", width=832, height=480, num_frames=93)
    samples = at.sample.add(
        "WanVideoSampler",
        model=patched["model"],
        image_embeds=empty["image_embeds"],
        text_embeds=encoded["text_embeds"],
        steps=16,
        cfg=1.0,
        shift=12.0,
        seed=1,
        force_offload=True,
        scheduler="longcat_distill_euler",
        riflex_freq_index=0,
        denoise_strength=1.0,
        batched_cfg=False,
        rope_function="comfy",
        start_step=0,
        end_step=-1,
        add_noise_to_samples=False,
    )
    images = at.clip.add(
        "WanVideoDecode",
        vae=vae["vae"],
        samples=samples["samples"],
        enable_vae_tiling=False,
        tile_x=272,
        tile_y=272,
        tile_stride_x=144,
        tile_stride_y=128,
        normalization="default",
    )
    save(at.clip, images["images"], 15.0, "video/longcat_vc_attention")
    return at.finish(
        about(
            "LongCat-Video is not in ComfyUI's core; it runs through "
            f"[ComfyUI-WanVideoWrapper]({WRAPPER_PAGE}), which has to be installed. This node takes and gives the "
            "wrapper's own kind of model; it is there only when the wrapper is.",
            "The workflow makes 832 x 480, 93 frames: 37,440 tokens, in 16 steps at cfg 1, for which the LoRA is made. "
            "Fewer swapped blocks are faster and take more memory on the card.",
            "VC-Attention for WanVideoWrapper",
        ),
        500,
    )
