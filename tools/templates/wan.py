"""The templates of Wan2.2, and the one that compares on it."""

from __future__ import annotations

from . import files
from .files import ModelFile
from .graph import BROWN, Graph, Output
from .parts import Places, about, diffusion_model, patch, save, texts, two_samplers

Pair = tuple[Output, Output]


def _load_14b(at: Places, high: ModelFile, low: ModelFile) -> tuple[Pair, Output, Output]:
    """Loaders of the two models, the text encoder and the VAE: ((high noise, low noise), clip, vae)."""
    models = (
        diffusion_model(at.load, high, "Wan2.2, high noise")["MODEL"],
        diffusion_model(at.load, low, "Wan2.2, low noise")["MODEL"],
    )
    return models, *_encoders(at, files.WAN_VAE)


def _encoders(at: Places, vae: ModelFile) -> tuple[Output, Output]:
    clip = at.load.add("CLIPLoader", clip_name=files.WAN_TEXT, type="wan", device="default")
    return clip["CLIP"], at.load.add("VAELoader", vae_name=vae)["VAE"]


def _patch_14b(at: Places, models: Pair, shift: float) -> Pair:
    """VC-Attention on both models, and behind it the shift of the schedule."""
    high = patch(at.own, models[0], "VC-Attention Patch (high noise)")
    low = patch(at.own, models[1], "VC-Attention Patch (low noise)")
    first = at.sample.add("ModelSamplingSD3", model=high["model"], shift=shift)
    second = at.sample.add("ModelSamplingSD3", model=low["model"], shift=shift)
    return first["MODEL"], second["MODEL"]


def _clip(at: Places, samples: Output, vae: Output, fps: float, prefix: str) -> None:
    images = at.clip.add("VAEDecode", samples=samples, vae=vae)
    save(at.clip, images["IMAGE"], fps, prefix)


def wan_t2v(name: str) -> Graph:
    """Wan2.2 14B, text to video, 20 steps with two models."""
    at = Places(name)
    models, clip, vae = _load_14b(at, files.WAN_T2V_HIGH, files.WAN_T2V_LOW)
    shifted = _patch_14b(at, models, 8.0)
    positive, negative = texts(at.prompt, clip)
    latent = at.size.add("EmptyHunyuanLatentVideo", width=832, height=480, length=81, batch_size=1)
    conditions = (positive["CONDITIONING"], negative["CONDITIONING"])
    samples = two_samplers(at.sample, shifted, conditions, latent["LATENT"], 20, 3.5)
    _clip(at, samples, vae, 16.0, "video/wan2.2_vc_attention")
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
    models, clip, vae = _load_14b(at, files.WAN_T2V_HIGH, files.WAN_T2V_LOW)
    loras = [
        at.load.add(
            "LoraLoaderModelOnly", f"4-step LoRA, {which} noise", model=model, lora_name=file, strength_model=1.0
        )["MODEL"]
        for which, model, file in zip(("high", "low"), models, (files.WAN_LORA_HIGH, files.WAN_LORA_LOW), strict=True)
    ]
    shifted = _patch_14b(at, (loras[0], loras[1]), 5.0)
    positive, negative = texts(at.prompt, clip)
    latent = at.size.add("EmptyHunyuanLatentVideo", width=832, height=480, length=81, batch_size=1)
    conditions = (positive["CONDITIONING"], negative["CONDITIONING"])
    samples = two_samplers(at.sample, shifted, conditions, latent["LATENT"], 4, 1.0)
    _clip(at, samples, vae, 16.0, "video/wan2.2_4steps_vc_attention")
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
    models, clip, vae = _load_14b(at, files.WAN_I2V_HIGH, files.WAN_I2V_LOW)
    picture = at.load.add("LoadImage", "First frame: choose your picture", image="example.png")
    shifted = _patch_14b(at, models, 8.0)
    positive, negative = texts(
        at.prompt,
        clip,
        "The camera moves slowly closer, hair and cloth stir in a light wind, the light stays as it is, steady motion.",
    )
    latent = at.size.add(
        "WanImageToVideo",
        positive=positive["CONDITIONING"],
        negative=negative["CONDITIONING"],
        vae=vae,
        start_image=picture["IMAGE"],
        width=832,
        height=480,
        length=81,
        batch_size=1,
    )
    conditions = (latent["positive"], latent["negative"])
    samples = two_samplers(at.sample, shifted, conditions, latent["latent"], 20, 3.5)
    _clip(at, samples, vae, 16.0, "video/wan2.2_i2v_vc_attention")
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
    clip, vae = _encoders(at, files.WAN_5B_VAE)
    picture = at.load.add("LoadImage", "First frame, for image to video (Ctrl+B)", bypassed=True, image="example.png")
    patched = patch(at.own, model["MODEL"])
    shifted = at.sample.add("ModelSamplingSD3", model=patched["model"], shift=8.0)
    positive, negative = texts(at.prompt, clip)
    latent = at.size.add(
        "Wan22ImageToVideoLatent",
        vae=vae,
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
    _clip(at, samples["LATENT"], vae, 24.0, "video/wan2.2_5b_vc_attention")
    return at.finish(
        about(
            "One node behind the model loader. For image to video select the node *First frame*, press Ctrl+B to "
            "switch it on, and choose a picture.",
            "The workflow makes 1280 x 704, 121 frames. The 5B model's VAE packs 16 x 16 pixels into one cell, so that "
            "is only 27,280 tokens.",
        ),
        440,
    )


def compare(name: str) -> Graph:
    """Wan2.2 5B twice with one seed, without VC-Attention and with it, and how far the clips are apart."""
    at = Places(name)
    model = diffusion_model(at.load, files.WAN_5B)
    clip, vae = _encoders(at, files.WAN_5B_VAE)
    seed = at.load.add("PrimitiveInt", "One seed for both", colours=BROWN, value=1)
    patched = [
        patch(at.own, model["MODEL"], "A: off", precision="off"),
        patch(at.own, model["MODEL"], "B: on"),
    ]
    positive, negative = texts(at.prompt, clip)
    latent = at.size.add("Wan22ImageToVideoLatent", vae=vae, width=1280, height=704, length=121, batch_size=1)
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
        frames.append(at.clip.add("VAEDecode", f"Frames {letter}", samples=samples["LATENT"], vae=vae)["IMAGE"])
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
