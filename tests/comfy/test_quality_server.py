"""A workflow with VC-Attention Quality, Capture and the Report through ComfyUI's real server, with its caching."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
from vc_attention.tools import comfyui, tiny_models
from vc_attention.tools.server import Server

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
PROMPT = {
    "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "", "weight_dtype": "default"}},
    "2": {
        "class_type": "VCAttentionPatch",
        "inputs": {
            "model": ["1", 0], "precision": "auto", "quality": "fast", "grouping": "first steps",
            "group_fraction": 0.25, "reuse_steps": 4, "groups": 0, "min_tokens": 64, "dense_blocks": "",
            "start_percent": 0.0, "end_percent": 1.0, "state_budget_gb": 1.0, "on_problem": "stop", "backend": "spec",
        },
    },
    "3": {
        "class_type": "VCAttentionQuality",
        "inputs": {"model": ["2", 0], "layers": "", "steps": "", "budget_db": 0.0, "profile": ""},
    },
    "4": {
        "class_type": "VCAttentionCapture",
        "inputs": {
            "model": ["3", 0], "layer": "1", "step": 2, "max_mb": 64, "filename_prefix": "vc_attention/capture",
        },
    },
    "5": {"class_type": "VCDemoConditioning", "inputs": {"text": "a boat"}},
    "6": {"class_type": "VCDemoConditioning", "inputs": {"text": "a storm"}},
    "7": {
        "class_type": "EmptyHunyuanLatentVideo",
        "inputs": {"width": 96, "height": 96, "length": 5, "batch_size": 1},
    },
    "8": {
        "class_type": "KSampler",
        "inputs": {
            "model": ["4", 0], "positive": ["5", 0], "negative": ["6", 0], "latent_image": ["7", 0], "seed": 1,
            "steps": STEPS, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
        },
    },
    "9": {
        "class_type": "VCAttentionQualityReport",
        "inputs": {"latent": ["8", 0], "model": ["3", 0], "save_profile": "first"},
    },
    "10": {"class_type": "SaveImage", "inputs": {"images": ["9", 1], "filename_prefix": "plot"}},
    "11": {"class_type": "PreviewAny", "inputs": {"source": ["9", 2]}},
}  # fmt: skip


@pytest.mark.comfy
@pytest.mark.timeout(300)
def test_a_workflow_through_the_real_server(request, tmp_path):
    given = request.config.getoption("--comfyui")
    directory = Path(given or ROOT / ".cache" / f"comfyui-{comfyui.VERSION}")
    models = tmp_path / "models" / "diffusion_models"
    models.mkdir(parents=True)
    file = tiny_models.build("wan22_t2v", models)
    prompt = copy.deepcopy(PROMPT)
    prompt["1"]["inputs"]["unet_name"] = file.name
    packs = (ROOT, ROOT / "tools" / "demo" / "vc_demo_nodes")
    with Server(directory, Path(sys.executable), user_dir=tmp_path, custom_nodes=packs) as server:
        # core's own optional nodes may not load beside stubs; from here on nothing may go wrong
        loading = server.log_tail(2000)
        assert "IMPORT FAILED: ComfyUI-VC-Attention" not in loading
        outputs = server.queue(prompt)
        (table,) = outputs["9"]["text"]
        assert table.startswith("Saved as profile first (0 of 2 layers in 16 bit)")
        (run,) = json.loads(outputs["11"]["text"][0])["runs"]
        assert run["family"] == "Wan" and run["steps"] == STEPS and run["finished"]
        assert len(run["calls"]) == 2 * STEPS and all(call["psnr_db"] > 20 for call in run["calls"])
        assert all(layer["layer"] in table for layer in run["layers"])
        assert server.view(outputs["10"]["images"][0]).startswith(b"\x89PNG")
        saved = tmp_path / "output" / "vc_attention"
        assert (saved / "capture_00001_.safetensors").is_file() and (saved / "profiles" / "first.safetensors").is_file()

        # a budget above every layer: all go to 16 bit after the first pass, and the profile keeps that
        prompt["3"]["inputs"]["budget_db"] = 120.0
        (table,) = server.queue(prompt)["9"]["text"]
        assert table.startswith("Saved as profile first (2 of 2 layers in 16 bit)")
        assert table.count("after step 1") == 2

        # the profile alone: no call is measured, and none accelerated
        prompt["3"]["inputs"].update(budget_db=0.0, profile="first")
        prompt["9"]["inputs"]["save_profile"] = ""
        outputs = server.queue(prompt)
        assert "Profile first: 2 of 2 layers stay in 16 bit." in outputs["9"]["text"][0]
        (run,) = json.loads(outputs["11"]["text"][0])["runs"]
        assert run["calls"] == [] and {layer["in_16_bit"] for layer in run["layers"]} == {"profile"}

        # nothing changed: nothing runs again; a profile that was replaced is read again
        assert server.queue(prompt).get("9", outputs["9"]) == outputs["9"]
        captures = len(list(saved.glob("*.safetensors")))
        (saved / "profiles" / "first.safetensors").write_bytes(b"damaged")
        (table,) = server.queue(prompt)["9"]["text"]
        assert "The profile first is damaged" in table and f"{2 * STEPS} calls measured" in table
        assert len(list(saved.glob("*.safetensors"))) == captures + 1
        assert server.log_tail(2000).count("Traceback") == loading.count("Traceback")
