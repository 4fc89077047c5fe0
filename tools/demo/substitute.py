"""The workflow as shipped, made small enough for any machine: which nodes are exchanged for what, and why.

Works on the API prompt that `tools.workflow.to_prompt` makes. Standard library only.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from ..messages import ToolError

Prompt = dict[str, dict[str, Any]]

PATCH = "VCAttentionPatch"
SAMPLERS = ("KSampler", "KSamplerAdvanced")
#: The runs of the demo, in the order of their clips in the report.
PLAIN, PATCHED, FOUR_BIT, NO_ATTENTION = "plain", "vc_attention", "four_bit", "no_attention"


@dataclass(frozen=True)
class Settings:
    """Size of the demo. The clip has (length + 3) / 4 latent frames of (width / 16) x (height / 16) tokens."""

    width: int = 256
    height: int = 160
    length: int = 25
    steps: int = 10
    seed: int = 1
    min_tokens: int = 256
    fps: float = 8.0
    backend: str = "spec"

    @property
    def tokens(self) -> int:
        """Keys of one self-attention call."""
        return (self.width // 16) * (self.height // 16) * ((self.length + 3) // 4)


@dataclass(frozen=True)
class Change:
    """One line of the report's table: the node, what the workflow says, what the demo runs, and why."""

    node: str
    shipped: str
    demo: str
    why: str


def shrink(prompt: Prompt, files: dict[str, str], settings: Settings, run: str) -> tuple[Prompt, list[Change]]:
    """The prompt of one run of the demo, and what was changed.

    files: names of the tiny models, as `FILES`. run: PLAIN (without the patch node), PATCHED (as shipped, with
    the recorder), FOUR_BIT (the patch node set to 4-bit, without grouping) or NO_ATTENTION.
    Raises ToolError when the workflow lacks what the demo is about.
    """
    prompt = copy.deepcopy(prompt)
    if not _of(prompt, PATCH):
        raise ToolError(f"The workflow has no {PATCH} node, so the demo has nothing to show.")
    changes = [
        *_models(prompt, files),
        *_text(prompt),
        *_size(prompt, settings),
        *_sampling(prompt, settings),
        *_save(prompt, settings, run),
        *_patch(prompt, settings, run),
    ]
    return prompt, changes


def _of(prompt: Prompt, *kinds: str) -> list[str]:
    return [node for node, entry in prompt.items() if entry["class_type"] in kinds]


def _title(prompt: Prompt, node: str) -> str:
    return prompt[node].get("_meta", {}).get("title") or prompt[node]["class_type"]


def _rewire(prompt: Prompt, old: list[Any], new: list[Any], but: tuple[str, ...] = ()) -> None:
    """Make everything that reads output `old` read `new`."""
    for node, entry in prompt.items():
        if node not in but:
            entry["inputs"] = {name: new if value == old else value for name, value in entry["inputs"].items()}


def _add(prompt: Prompt, kind: str, title: str, **inputs: Any) -> str:
    """Insert a node; returns its id."""
    node = str(max((int(key) for key in prompt if key.isdigit()), default=0) + 1)
    prompt[node] = {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}
    return node


def _models(prompt: Prompt, files: dict[str, str]) -> list[Change]:
    changes = []
    for node in _of(prompt, "UNETLoader"):
        inputs = prompt[node]["inputs"]
        small = files["low" if "low" in inputs["unet_name"].lower() else "high"]
        why = "the real model has 14 billion weights; this one has 4 blocks of 2 heads, and loads the same way"
        changes.append(Change(_title(prompt, node), inputs["unet_name"], small, why))
        inputs.update(unet_name=small, weight_dtype="default")
    for node in _of(prompt, "VAELoader"):
        inputs = prompt[node]["inputs"]
        why = "the same network with 7 channels instead of 96, which turns latents into colour"
        changes.append(Change(_title(prompt, node), inputs["vae_name"], files["vae"], why))
        inputs["vae_name"] = files["vae"]
    return changes


def _text(prompt: Prompt) -> list[Change]:
    loaders = _of(prompt, "CLIPLoader")
    changes = [
        Change(
            _title(prompt, node),
            prompt[node]["inputs"]["clip_name"],
            "left out",
            "the text encoder takes 7 to 11 GB and cannot be small",
        )
        for node in loaders
    ]
    for node in _of(prompt, "CLIPTextEncode"):
        entry = prompt[node]
        changes.append(
            Change(_title(prompt, node), "CLIPTextEncode", "VCDemoConditioning", "random numbers in place of the text")
        )
        entry["class_type"] = "VCDemoConditioning"
        entry["inputs"] = {"text": entry["inputs"]["text"]}
    for node in loaders:
        del prompt[node]
    return changes


def _size(prompt: Prompt, settings: Settings) -> list[Change]:
    changes = []
    for node in _of(prompt, "EmptyHunyuanLatentVideo"):
        inputs = prompt[node]["inputs"]
        before = f"{inputs['width']} x {inputs['height']}, {inputs['length']} frames"
        after = f"{settings.width} x {settings.height}, {settings.length} frames"
        why = f"{settings.tokens:,} tokens, so that an emulation on a CPU is done in seconds"
        changes.append(Change(_title(prompt, node), before, after, why))
        inputs.update(width=settings.width, height=settings.height, length=settings.length)
    return changes


def _sampling(prompt: Prompt, settings: Settings) -> list[Change]:
    changes = []
    for node in _of(prompt, *SAMPLERS):
        inputs = prompt[node]["inputs"]
        before = inputs["steps"]
        for name in ("start_at_step", "end_at_step"):
            if name in inputs and inputs[name] < before:
                inputs[name] = round(inputs[name] * settings.steps / before)
        inputs["steps"] = settings.steps
        inputs["noise_seed" if "noise_seed" in inputs else "seed"] = settings.seed
        why = "fewer steps, split between the two models in the same place"
        changes.append(Change(_title(prompt, node), f"{before} steps", f"{settings.steps} steps", why))
    return changes


def _save(prompt: Prompt, settings: Settings, run: str) -> list[Change]:
    changes = []
    for node in _of(prompt, "SaveVideo"):
        video = prompt[prompt[node]["inputs"]["video"][0]]
        why = "a lossless animation that a browser shows and that can be compared pixel by pixel"
        changes.append(Change(_title(prompt, node), "CreateVideo, SaveVideo", "SaveAnimatedWEBP", why))
        images = video["inputs"]["images"]
        prompt[node] = {
            "class_type": "SaveAnimatedWEBP",
            "inputs": {
                "images": images,
                "filename_prefix": run,
                "fps": settings.fps,
                "lossless": True,
                "quality": 80,
                "method": "default",
            },
            "_meta": {"title": "Save the clip"},
        }
    for node in _of(prompt, "CreateVideo"):
        del prompt[node]
    return changes


def _patch(prompt: Prompt, settings: Settings, run: str) -> list[Change]:
    changes = []
    for number, node in enumerate(_of(prompt, PATCH)):
        inputs = prompt[node]["inputs"]
        if run in (PLAIN, NO_ATTENTION):
            source = inputs["model"]
            _rewire(prompt, [node, 0], source)
            del prompt[node]
            if run == NO_ATTENTION:
                control = _add(prompt, "VCDemoNoAttention", "Control: no self-attention", model=source)
                _rewire(prompt, source, [control, 0], but=(control,))
            continue
        before = f"min_tokens {inputs['min_tokens']}, backend {inputs['backend']}"
        # The control is of the arithmetic: where a card's kernels have no 4 bit, 8 bit would run in its place.
        backend = "spec" if run == FOUR_BIT else settings.backend
        inputs.update(min_tokens=settings.min_tokens, backend=backend)
        why = "the clip is short, and this machine has no kernel: the readable specification computes every call"
        if settings.backend != "spec":
            why = "the clip is short"
        after = f"min_tokens {settings.min_tokens}, backend {backend}"
        changes.append(Change(_title(prompt, node), before, after, why))
        if run == FOUR_BIT:
            inputs.update(precision="4-bit", grouping="off")
        else:
            _record(prompt, node, number)
    return changes


def _record(prompt: Prompt, patch: str, number: int) -> None:
    """Put a recorder behind a patch node, and a writer behind the sampler that its model reaches."""
    stage = _title(prompt, patch)
    recorder = _add(prompt, "VCDemoRecord", "Recorder", model=[patch, 0], stage=stage)
    _rewire(prompt, [patch, 0], [recorder, 0], but=(recorder,))
    sampler = _sampler_behind(prompt, recorder)
    writer = _add(
        prompt,
        "VCDemoWrite",
        "Write the records",
        samples=[sampler, 0],
        model=[recorder, 0],
        stage=stage,
        file=f"records_{number}.json",
    )
    _rewire(prompt, [sampler, 0], [writer, 0], but=(writer,))


def _sampler_behind(prompt: Prompt, node: str) -> str:
    reached = {node}
    while True:
        more = {
            key
            for key, entry in prompt.items()
            if any(isinstance(value, list) and value[0] in reached for value in entry["inputs"].values())
        }
        found = [key for key in more if prompt[key]["class_type"] in SAMPLERS]
        if found:
            return found[0]
        if more <= reached:
            raise ToolError(f"No sampler uses the model of node {node} ({_title(prompt, node)}) in the workflow.")
        reached |= more
