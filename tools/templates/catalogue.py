"""The templates, one function each. File names, node types and settings are those that the models' publishers and
ComfyUI's own templates use; the graphs are drawn here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import files
from .graph import BROWN, GREEN, Graph
from .parts import (
    DEFAULTS,
    NEGATIVE,
    PROMPT,
    Places,
    about,
    diffusion_model,
    patch,
    save,
    texts,
    two_samplers,
)

WRAPPER_PAGE = "https://github.com/kijai/ComfyUI-WanVideoWrapper"


@dataclass(frozen=True)
class Template:
    """One template. name: of its files, which the template browser shows; title, detail: on its thumbnail.

    needs: the oldest ComfyUI core that has its nodes. steps: denoising steps of one render.
    """

    name: str
    title: str
    detail: str
    steps: int
    build: Callable[[str], Graph]
    needs: str = "0.3.75"
    other_packs: tuple[str, ...] = ()


def wan_t2v(name: str) -> Graph:
    """Wan2.2 14B, text to video, 20 steps with two models."""
    at = Places(name)
    high = diffusion_model(at.load, files.WAN_T2V_HIGH, "Wan2.2, high noise")
    low = diffusion_model(at.load, files.WAN_T2V_LOW, "Wan2.2, low noise")
    clip = at.load.add("CLIPLoader", clip_name=files.WAN_TEXT, type="wan", device="default")
    vae = at.load.add("VAELoader", vae_name=files.WAN_VAE)
    first = patch(at.own, high["MODEL"], "VC-Attention Patch (high noise)")
    second = patch(at.own, low["MODEL"], "VC-Attention Patch (low noise)")
    shifted = [at.sample.add("ModelSamplingSD3", model=node["model"], shift=8.0)["MODEL"] for node in (first, second)]
    positive, negative = texts(at.prompt, clip["CLIP"])
    latent = at.size.add("EmptyHunyuanLatentVideo", width=832, height=480, length=81, batch_size=1)
    conditions = (positive["CONDITIONING"], negative["CONDITIONING"])
    samples = two_samplers(at.sample, (shifted[0], shifted[1]), conditions, latent["LATENT"], 20, 3.5)
    images = at.clip.add("VAEDecode", samples=samples, vae=vae["VAE"])
    save(at.clip, images["IMAGE"], 16.0, "video/wan2.2_vc_attention")
    return at.finish(
        about(
            "One node behind each model loader: Wan2.2 has two models, one for the noisy half of the steps and one "
            "for the rest.",
            "The workflow makes 832 x 480, 81 frames: 32,760 tokens. The longer the clip, the more there is to gain.",
        )
    )


def wan_t2v_4steps(name: str) -> Graph:
    """Wan2.2 14B, text to video, 4 steps with a LoRA on each model."""
    at = Places(name)
    high = diffusion_model(at.load, files.WAN_T2V_HIGH, "Wan2.2, high noise")
    low = diffusion_model(at.load, files.WAN_T2V_LOW, "Wan2.2, low noise")
    clip = at.load.add("CLIPLoader", clip_name=files.WAN_TEXT, type="wan", device="default")
    vae = at.load.add("VAELoader", vae_name=files.WAN_VAE)
    loras = [
        at.load.add(
            "LoraLoaderModelOnly", f"4-step LoRA, {which} noise", model=m["MODEL"], lora_name=f, strength_model=1.0
        )
        for which, m, f in (("high", high, files.WAN_LORA_HIGH), ("low", low, files.WAN_LORA_LOW))
    ]
    first = patch(at.own, loras[0]["MODEL"], "VC-Attention Patch (high noise)")
    second = patch(at.own, loras[1]["MODEL"], "VC-Attention Patch (low noise)")
    shifted = [at.sample.add("ModelSamplingSD3", model=node["model"], shift=5.0)["MODEL"] for node in (first, second)]
    positive, negative = texts(at.prompt, clip["CLIP"])
    latent = at.size.add("EmptyHunyuanLatentVideo", width=832, height=480, length=81, batch_size=1)
    conditions = (positive["CONDITIONING"], negative["CONDITIONING"])
    samples = two_samplers(at.sample, (shifted[0], shifted[1]), conditions, latent["LATENT"], 4, 1.0)
    images = at.clip.add("VAEDecode", samples=samples, vae=vae["VAE"])
    save(at.clip, images["IMAGE"], 16.0, "video/wan2.2_4steps_vc_attention")
    return at.finish(
        about(
            "Each node stands behind its model and its LoRA. With four steps, the first quarter is one step: it groups "
            "the tokens, and the other three run without groups.",
            "The workflow makes 832 x 480, 81 frames: 32,760 tokens. At cfg 1 the negative prompt has no effect; the "
            "LoRAs are made for that.",
        ),
        420,
    )


def wan_i2v(name: str) -> Graph:
    """Wan2.2 14B, image to video, 20 steps with two models."""
    at = Places(name)
    high = diffusion_model(at.load, files.WAN_I2V_HIGH, "Wan2.2, high noise")
    low = diffusion_model(at.load, files.WAN_I2V_LOW, "Wan2.2, low noise")
    clip = at.load.add("CLIPLoader", clip_name=files.WAN_TEXT, type="wan", device="default")
    vae = at.load.add("VAELoader", vae_name=files.WAN_VAE)
    picture = at.load.add("LoadImage", "First frame: choose your picture", image="example.png")
    first = patch(at.own, high["MODEL"], "VC-Attention Patch (high noise)")
    second = patch(at.own, low["MODEL"], "VC-Attention Patch (low noise)")
    shifted = [at.sample.add("ModelSamplingSD3", model=node["model"], shift=8.0)["MODEL"] for node in (first, second)]
    positive, negative = texts(
        at.prompt,
        clip["CLIP"],
        "The camera moves slowly closer, hair and cloth stir in a light wind, the light stays as it is, steady motion.",
    )
    latent = at.size.add(
        "WanImageToVideo",
        positive=positive["CONDITIONING"],
        negative=negative["CONDITIONING"],
        vae=vae["VAE"],
        start_image=picture["IMAGE"],
        width=832,
        height=480,
        length=81,
        batch_size=1,
    )
    conditions = (latent["positive"], latent["negative"])
    samples = two_samplers(at.sample, (shifted[0], shifted[1]), conditions, latent["latent"], 20, 3.5)
    images = at.clip.add("VAEDecode", samples=samples, vae=vae["VAE"])
    save(at.clip, images["IMAGE"], 16.0, "video/wan2.2_i2v_vc_attention")
    return at.finish(
        about(
            "One node behind each model loader. The picture that the clip starts from enters as part of the latent, so "
            "it takes part in the same self-attention.",
            "The workflow makes 832 x 480, 81 frames: 32,760 tokens. Choose width and height near the shape of your "
            "picture, which is cropped to fit; both are multiples of 16.",
        ),
        440,
    )


def wan_5b(name: str) -> Graph:
    """Wan2.2 5B, text or image to video."""
    at = Places(name)
    model = diffusion_model(at.load, files.WAN_5B)
    clip = at.load.add("CLIPLoader", clip_name=files.WAN_TEXT, type="wan", device="default")
    vae = at.load.add("VAELoader", vae_name=files.WAN_5B_VAE)
    picture = at.load.add("LoadImage", "First frame, for image to video (Ctrl+B)", bypassed=True, image="example.png")
    patched = patch(at.own, model["MODEL"])
    shifted = at.sample.add("ModelSamplingSD3", model=patched["model"], shift=8.0)
    positive, negative = texts(at.prompt, clip["CLIP"])
    latent = at.size.add(
        "Wan22ImageToVideoLatent",
        vae=vae["VAE"],
        start_image=picture["IMAGE"],
        width=1280,
        height=704,
        length=121,
        batch_size=1,
    )
    samples = at.sample.add(
        "KSampler",
        model=shifted["MODEL"],
        positive=positive["CONDITIONING"],
        negative=negative["CONDITIONING"],
        latent_image=latent["LATENT"],
        seed=1,
        steps=20,
        cfg=5.0,
        sampler_name="uni_pc",
        scheduler="simple",
        denoise=1.0,
    )
    images = at.clip.add("VAEDecode", samples=samples["LATENT"], vae=vae["VAE"])
    save(at.clip, images["IMAGE"], 24.0, "video/wan2.2_5b_vc_attention")
    return at.finish(
        about(
            "One node behind the model loader. For image to video select the node *First frame*, press Ctrl+B to "
            "switch it on, and choose a picture.",
            "The workflow makes 1280 x 704, 121 frames. The 5B model's VAE packs 16 x 16 pixels into one cell, so that "
            "is only 27,280 tokens.",
        ),
        440,
    )


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


def compare(name: str) -> Graph:
    """Wan2.2 5B twice with one seed, without VC-Attention and with it, and how far the clips are apart."""
    at = Places(name)
    model = diffusion_model(at.load, files.WAN_5B)
    clip = at.load.add("CLIPLoader", clip_name=files.WAN_TEXT, type="wan", device="default")
    vae = at.load.add("VAELoader", vae_name=files.WAN_5B_VAE)
    seed = at.load.add("PrimitiveInt", "One seed for both", colours=BROWN, value=1)
    patched = [
        patch(at.own, model["MODEL"], "A: off", precision="off"),
        patch(at.own, model["MODEL"], "B: on"),
    ]
    positive, negative = texts(at.prompt, clip["CLIP"])
    latent = at.size.add("Wan22ImageToVideoLatent", vae=vae["VAE"], width=1280, height=704, length=121, batch_size=1)
    frames = []
    for letter, node in zip("AB", patched, strict=True):
        shifted = at.sample.add("ModelSamplingSD3", model=node["model"], shift=8.0)
        samples = at.sample.add(
            "KSampler",
            f"Sample {letter}",
            model=shifted["MODEL"],
            positive=positive["CONDITIONING"],
            negative=negative["CONDITIONING"],
            latent_image=latent["LATENT"],
            seed=seed["INT"],
            steps=20,
            cfg=5.0,
            sampler_name="uni_pc",
            scheduler="simple",
            denoise=1.0,
        )
        frames.append(at.clip.add("VAEDecode", f"Frames {letter}", samples=samples["LATENT"], vae=vae["VAE"])["IMAGE"])
    at.clip.title = "6  Clips"
    for letter, images in zip("AB", frames, strict=True):
        save(at.clip, images, 24.0, f"video/compare_{letter.lower()}_vc_attention", title=f"Clip {letter}")
    result = at.graph.area(6, "7  Compare", 480, at.own.colour)
    compared = result.add(
        "VCAttentionCompare",
        images_a=frames[0],
        images_b=frames[1],
        label_a="off",
        label_b="on",
        strip="all frames",
        lpips=False,
    )
    result.add("PreviewImage", "Likeness, frame by frame", images=compared["plot"])
    save(result, compared["strip"], 24.0, "video/compare_vc_attention", title="Side by side")
    return at.finish(
        about(
            "Both clips come from one model, one prompt and one seed; only the node differs. **A** is off: ComfyUI's "
            "own attention. **B** is on. Change B to see what faithful, 4-bit or a longer grouping cost.",
            "A low-bit clip is a similar clip, not the same one: a small change early in the denoising moves details. "
            "Look at both before you look at the numbers. The workflow renders 1280 x 704, 121 frames twice; a second "
            "run with changed settings on B renders only B again.",
        ),
        520,
    )


TEMPLATES = (
    Template("wan2.2_t2v", "Wan2.2 14B", "Text to video, 20 steps", 20, wan_t2v),
    Template("wan2.2_t2v_4steps", "Wan2.2 14B", "Text to video, 4-step LoRAs", 4, wan_t2v_4steps),
    Template("wan2.2_i2v", "Wan2.2 14B", "Image to video, 20 steps", 20, wan_i2v),
    Template("wan2.2_5b", "Wan2.2 5B", "Text or image to video", 20, wan_5b),
    Template("hunyuanvideo1.5_t2v", "HunyuanVideo-1.5", "Text to video, 720p", 20, hunyuan_15),
    Template("minimax_h3", "MiniMax-H3", "Text to video with sound", 20, minimax_h3, "0.33.0"),
    Template(
        "longcat_wanvideowrapper",
        "LongCat-Video",
        "Text to video, WanVideoWrapper",
        16,
        longcat,
        other_packs=("ComfyUI-WanVideoWrapper",),
    ),
    Template("compare_off_on", "Off and on", "Wan2.2 5B twice, compared", 20, compare),
)
