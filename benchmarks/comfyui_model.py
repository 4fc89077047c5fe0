"""A Wan2.2 text-to-video model in a ComfyUI that is used as a library: random weights, made where they will run.

Nobody can ship Wan2.2's 14 billion weights, and a step takes the same time whatever their values are. So the network
is ComfyUI's own, at the published size, its weights are drawn on the device, and everything from there on is what a
workflow runs: ComfyUI's detection, ModelPatcher, KSampler and, between them, its attention.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vc_attention.tools import tiny_models

SEED = 0


@dataclass(frozen=True)
class Scale:
    """How large everything is. shapes: name -> size of the latent [B, C, T, H, W]; warm_up: one that is quick.

    text_tokens stays below min_tokens, which stays below the video tokens, so that the hook takes self-attention and
    nothing else. backend: of the node; "auto" picks kernels, "spec" runs anywhere.
    """

    network: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    warm_up: tuple[int, ...]
    text_tokens: int
    min_tokens: int
    backend: str
    device: str
    dtype: torch.dtype

    def tokens(self, latent: Sequence[int]) -> int:
        """Self-attention tokens of a latent of this size: patches of 1 x 2 x 2."""
        return latent[2] * (latent[3] // 2) * (latent[4] // 2)


_CHANNELS = {"in_dim": 16, "out_dim": 16, "text_dim": 4096, "freq_dim": 256}

#: Wan2.2 T2V A14B, either of its two models; 81 frames at 832 x 480 and at 1280 x 720.
FULL = Scale(
    network={"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40, **_CHANNELS},
    shapes={"480p": (1, 16, 21, 60, 104), "720p": (1, 16, 21, 90, 160)},
    warm_up=(1, 16, 3, 60, 104),
    text_tokens=512,
    min_tokens=4096,
    backend="auto",
    device="cuda",
    dtype=torch.bfloat16,
)

#: The same code in seconds on a CPU, for CI.
TINY = Scale(
    network={"dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 3, **_CHANNELS},
    shapes={"480p": (1, 16, 3, 8, 12), "720p": (1, 16, 3, 10, 18)},
    warm_up=(1, 16, 3, 8, 12),
    text_tokens=20,
    min_tokens=64,
    backend="spec",
    device="cpu",
    dtype=torch.float32,
)


def build(scale: Scale) -> Any:
    """A ModelPatcher with weights on `scale.device`, as ComfyUI's loader would leave it after a first run.

    The class and the settings are what ComfyUI's detection makes of the weights' shapes. Raises RuntimeError when it
    does not see a Wan model of the given size in them.
    """
    import comfy.ldm.wan.model
    import comfy.model_detection
    import comfy.model_patcher
    import comfy.ops

    empty = comfy.ldm.wan.model.WanModel(
        model_type="t2v", **scale.network, dtype=scale.dtype, device="meta", operations=comfy.ops.disable_weight_init
    )
    config = comfy.model_detection.model_config_from_unet(empty.state_dict(), "")
    read = {} if config is None else {name: config.unet_config.get(name, size) for name, size in scale.network.items()}
    if read != scale.network:
        raise RuntimeError(f"ComfyUI's model detection does not see the Wan model that was built; it read {read}.")
    config.set_inference_dtype(scale.dtype, None)
    device = torch.device(scale.device)
    model = config.get_model({}, "", device=device)
    tiny_models.fill(model.diffusion_model, SEED)
    # The same device twice: between two rows nothing may move 28 GB to the CPU and back.
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


@dataclass
class Run:
    """What one sampling gave. seconds: of each step, the device waited for at its end. latent: the sampler's result,
    denoised: what the model made of it at each step, all on the CPU. peak_bytes: the most that was allocated."""

    latent: torch.Tensor
    seconds: list[float] = field(default_factory=list)
    denoised: list[torch.Tensor] = field(default_factory=list)
    peak_bytes: int | None = None


def sample(
    model: Any, scale: Scale, latent: Sequence[int], steps: int, cfg: float, last_step: int | None = None
) -> Run:
    """Sample as the KSampler node does (euler, simple), timing every step.

    last_step: stop after so many steps of the schedule. The clock starts when the model is loaded and the sampler
    begins; copying the denoised latent away is not counted.
    """
    import comfy.patcher_extension

    run = Run(torch.empty(0))
    started = 0.0

    def begin(executor: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal started
        _wait(scale.device)
        started = time.perf_counter()
        return executor(*arguments, **keywords)

    def step_done(step: int, denoised: torch.Tensor, x: torch.Tensor, total: int) -> None:
        nonlocal started
        _wait(scale.device)
        run.seconds.append(time.perf_counter() - started)
        run.denoised.append(denoised.detach().float().cpu())
        started = time.perf_counter()

    timed = model.clone()
    timed.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.SAMPLER_SAMPLE, "benchmark_clock", begin)
    empty = torch.zeros(tuple(latent))
    prompts = [tiny_models.conditioning("wan22_t2v", scale.text_tokens, seed, empty) for seed in (1, 2)]
    cuda = scale.device == "cuda"
    if cuda:
        gc.collect()  # torch's cache stays as it is: a first step that waits for cudaMalloc would say nothing
        torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():  # as ComfyUI runs its nodes
        out = tiny_models.sample(
            timed,
            "wan22_t2v",
            steps,
            cfg,
            seed=SEED,
            positive=prompts[0],
            negative=prompts[1],
            latent=empty,
            callback=step_done,
            last_step=last_step,
        )
    run.latent = out.float().cpu()
    run.peak_bytes = torch.cuda.max_memory_allocated() if cuda else None
    return run


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
