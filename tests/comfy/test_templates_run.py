"""Every template that has a tiny model, run by ComfyUI's real server: its loaders, LoRAs, samplers and our node, as the
file connects them. Only what cannot be small is exchanged: the text encoder, the VAE behind the sampler, the size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from vc_attention.tools import tiny_models
from vc_attention.tools.demo import FILES
from vc_attention.tools.server import Server
from vc_attention.tools.workflow import to_prompt

pytestmark = pytest.mark.comfy

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
#: Template -> its tiny model, what stands for its text, and a size of about 72 tokens (H3: 242).
CASES = {
    "wan2.2_t2v": ("wan22_t2v", "wan22_t2v", {"width": 96, "height": 64, "length": 9}),
    "wan2.2_t2v_4steps": ("wan22_t2v", "wan22_t2v", {"width": 96, "height": 64, "length": 9}),
    "wan2.2_i2v": ("wan_i2v", "wan22_t2v", {"width": 96, "height": 64, "length": 9}),
    "wan2.2_5b": ("wan22_5b", "wan22_5b", {"width": 192, "height": 128, "length": 9}),
    "compare_off_on": ("wan22_5b", "wan22_5b", {"width": 192, "height": 128, "length": 9}),
    "hunyuanvideo1.5_t2v": ("hunyuan_video_15", "hunyuan_video_15", {"width": 96, "height": 64, "length": 9}),
    "minimax_h3": ("minimax_h3", "minimax_h3", {"width": 192, "height": 128, "length": 22}),
}
ENCODERS = ("CLIPLoader", "DualCLIPLoader")
BEHIND = ("VAEDecode", "VAEDecodeAudio", "CreateVideo", "SaveVideo", "VCAttentionCompare", "PreviewImage")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user folder with the files that the templates name, tiny."""
    folder = tmp_path_factory.mktemp("templates")
    models = folder / "models"
    made = {name: tiny_models.build(name, folder / "tiny") for name in tiny_models.available()}
    from vc_attention.tools.demo.write_models import write

    write(comfy_directory(), folder / "demo")
    for name, (family, _, _) in CASES.items():
        for node in workflow(name)["nodes"]:
            for model in node["properties"].get("models", ()):
                file = models / model["directory"] / model["name"]
                file.parent.mkdir(parents=True, exist_ok=True)
                if model["directory"] == "diffusion_models" and family in made:
                    file.write_bytes(made[family].read_bytes())
                elif model["directory"] == "vae":
                    file.write_bytes((folder / "demo" / "vae" / FILES["vae"]).read_bytes())
                elif model["directory"] == "loras":
                    save_file(lora(), str(file))
                else:
                    file.touch()
    (folder / "input").mkdir()
    Image.new("RGB", (64, 48), "teal").save(folder / "input" / "example.png")  # ComfyUI brings one of that name
    return folder


def comfy_directory() -> Path:
    """Where `comfy` was imported from."""
    import comfy.sd

    return Path(comfy.sd.__file__).resolve().parents[1]


def lora() -> dict[str, torch.Tensor]:
    """A LoRA of rank 4 on one layer of tiny Wan."""
    generator = torch.Generator().manual_seed(1)
    key = "diffusion_model.blocks.0.self_attn.q"
    return {
        f"{key}.lora_A.weight": 0.1 * torch.randn(4, 256, generator=generator),
        f"{key}.lora_B.weight": 0.1 * torch.randn(256, 4, generator=generator),
    }


@pytest.fixture(scope="module")
def server(folder):
    """ComfyUI with the pack and the stand-in for text encoders."""
    packs = (ROOT, ROOT / "tests" / "support" / "tiny_nodes")
    with Server(comfy_directory(), Path(sys.executable), user_dir=folder, custom_nodes=packs) as running:
        yield running


def workflow(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


def small(prompt: dict[str, Any], name: str) -> dict[str, Any]:
    """The prompt with tiny parts; what each sampler that feeds a decoder gives is saved, in the order of node ids."""
    _, family, size = CASES[name]
    results = [e["inputs"]["samples"] for e in prompt.values() if e["class_type"] == "VAEDecode"]
    made: dict[str, Any] = {}
    for number, entry in prompt.items():
        kind, inputs = entry["class_type"], dict(entry["inputs"])
        if kind in ENCODERS or kind in BEHIND:
            continue
        if kind == "CLIPTextEncode":
            kind, inputs = "TinyConditioning", {"family": family, "text": inputs["text"]}
        if kind == "MiniMaxH3ImageToVideo":  # it encodes the prompt itself: conditioning and latent, apart
            made["text"] = {"class_type": "TinyConditioning", "inputs": {"family": family, "text": inputs["prompt"]}}
            kind, inputs = "EmptyMiniMaxH3LatentAV", dict(size)
        inputs.update({key: value for key, value in size.items() if key in inputs})
        if kind in ("KSampler", "KSamplerAdvanced", "BasicScheduler"):
            for key in ("start_at_step", "end_at_step"):
                if inputs.get(key) == inputs["steps"] // 2:
                    inputs[key] = min(STEPS, inputs["steps"]) // 2
            inputs["steps"] = min(STEPS, inputs["steps"])
        if kind == "VCAttentionPatch":
            inputs.update(min_tokens=64, backend="spec", on_problem="stop")
        made[number] = {"class_type": kind, "inputs": inputs}
    if "text" in made:
        _rewire_h3(made)
    for place, source in enumerate(results):
        made[f"save{place}"] = {"class_type": "SaveLatent", "inputs": {"samples": source, "filename_prefix": name}}
        if name == "minimax_h3":
            made["part"] = {"class_type": "LTXVSeparateAVLatent", "inputs": {"av_latent": source}}
            made[f"save{place}"]["inputs"]["samples"] = ["part", 0]
    used = {value[0] for entry in made.values() for value in entry["inputs"].values() if isinstance(value, list)}
    loaders = ("VAELoader", "LoadImage")
    return {k: e for k, e in made.items() if e["class_type"] not in loaders or k in used}


def _rewire_h3(prompt: dict[str, Any]) -> None:
    latent = next(k for k, e in prompt.items() if e["class_type"] == "EmptyMiniMaxH3LatentAV")
    for entry in prompt.values():
        for key, value in entry["inputs"].items():
            if value == [latent, 0]:
                entry["inputs"][key] = ["text", 0]
            elif value == [latent, 1]:
                entry["inputs"][key] = [latent, 0]


def saved(server: Server, folder: Path, prompt: dict[str, Any]) -> list[torch.Tensor]:
    outputs = server.queue(prompt)
    made = [outputs[key]["latents"][0] for key in sorted(outputs) if key.startswith("save")]
    return [load_file(folder / "output" / m["subfolder"] / m["filename"])["latent_tensor"] for m in made]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(CASES))
def test_the_template_runs(server, folder, name):
    """With our node on, the clip is near the one with it off and not the same: the attention went through it."""
    if CASES[name][0] not in tiny_models.available():
        pytest.skip(f"comfy: this ComfyUI has no model behind {name}")
    info = server.object_info()
    prompt = small(to_prompt(workflow(name), info), name)
    patches = [entry for entry in prompt.values() if entry["class_type"] == "VCAttentionPatch"]
    on = saved(server, folder, prompt)
    assert len(on) == (2 if name == "compare_off_on" else 1)
    for entry in patches:
        entry["inputs"]["precision"] = "off"
    off = saved(server, folder, prompt)
    if name == "compare_off_on":
        assert torch.equal(on[0], off[0])  # A is off in the file
    assert on[-1].shape == off[-1].shape and on[-1].isfinite().all()
    error = float((on[-1] - off[-1]).norm() / off[-1].norm())
    assert 1e-6 < error < 0.2, error
    assert "lora key not loaded" not in server.log_tail(2000)
