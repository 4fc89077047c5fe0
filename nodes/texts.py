"""Names, descriptions and tooltips of the nodes that measure. `locales/en/nodeDefs.json` says the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .messages import TOOLTIPS


@dataclass(frozen=True)
class NodeTexts:
    """What a node says of itself. inputs and outputs: name -> tooltip, in the order of the node's schema."""

    display_name: str
    description: str
    inputs: dict[str, str]
    outputs: dict[str, str]


NODES: dict[str, NodeTexts] = {
    "VCAttentionQuality": NodeTexts(
        "VC-Attention Quality",
        "Measures, while the sampler runs, how close VC-Attention's low-bit attention is to exact attention, layer by "
        "layer and step by step, on sampled query rows. With a budget, layers that fall below it go back to 16 bit. "
        "VC-Attention Quality Report, behind the sampler, gives the table, a plot and JSON.",
        {
            "model": "The model that comes out of VC-Attention Patch; connect the output to the sampler.",
            "layers": "Transformer blocks to measure, such as 0-2, 38, single:3. Empty: all, which costs a few "
            "percent of the attention's time at most. Where the model does not number its blocks: calls of a pass, "
            "from 1.",
            "steps": "Steps to measure, such as 1-4, 10. Empty: all.",
            "budget_db": "Layers whose PSNR against exact attention is measured below this go back to 16 bit for the "
            "rest of the run: closer to the 16-bit clip, and slower. 0: only measure.",
            "profile": "The name of a profile that VC-Attention Quality Report saved: its layers stay in 16 bit from "
            "the first step. Empty: none.",
        },
        {"model": "The model, measured while it runs."},
    ),
    "VCAttentionQualityReport": NodeTexts(
        "VC-Attention Quality Report",
        "Shows what VC-Attention Quality measured in the run that made this latent: the table on the node, a plot, and "
        "everything as JSON. Can save the layers' decisions as a profile.",
        {
            "latent": "The latent that comes out of the sampler; it passes through unchanged.",
            "model": "The model that comes out of VC-Attention Quality.",
            "save_profile": "Save which layers stay in 16 bit under this name, in vc_attention/profiles of the output "
            "folder, in the place of an older profile of that name. Empty: save nothing.",
        },
        {
            "latent": "The latent, unchanged.",
            "plot": "PSNR of each layer and of each step.",
            "json": "Every measurement, as JSON.",
        },
    ),
    "VCAttentionCapture": NodeTexts(
        "VC-Attention Capture",
        "Saves q, k and v of one attention layer at one step to the output folder, so that 'python3 run.py replay' and "
        "a bug report can compute the same call again. The file holds numbers made from your prompt and images, and no "
        "names or paths.",
        {
            "model": "The model that comes out of VC-Attention Patch; connect the output to the sampler.",
            "layer": "The transformer block, such as 12 or single:3. Where the model does not number its blocks: the "
            "call of a pass, from 1.",
            "step": "The step, from 1.",
            "max_mb": "Largest size of the file in MB. What does not fit is left out by whole heads; all tokens stay.",
            "filename_prefix": "Where in the output folder, and the beginning of the file's name. No file is ever "
            "overwritten.",
        },
        {"model": "The model, unchanged in what it computes."},
    ),
    "VCAttentionCompare": NodeTexts(
        "VC-Attention Compare",
        "Compares two clips of one size frame by frame: PSNR and SSIM of every frame and of the whole clip, both clips "
        "side by side, a plot and JSON. Put a clip with VC-Attention on one input and the 16-bit clip of the same seed "
        "on the other.",
        {
            "images_a": "The first clip: the one to compare with, such as the 16-bit clip.",
            "images_b": "The second clip, of the same frame size. Where one is longer, the frames that both have are "
            "compared.",
            "label_a": "The words above the first clip.",
            "label_b": "The words above the second clip.",
            "strip": "all frames: a clip with both side by side, which takes twice the memory of one of them. lowest "
            "frame: one picture, of the frame with the lowest PSNR.",
            "lpips": "Measure LPIPS as well, which is closer to what people see and slower. Needs the package lpips in "
            "ComfyUI's Python, which downloads AlexNet's weights at its first use.",
        },
        {
            "strip": "Both clips side by side, with labels and each frame's numbers.",
            "plot": "PSNR and SSIM of every frame.",
            "json": "Every number, as JSON.",
        },
    ),
    "VCAttentionBenchmark": NodeTexts(
        "VC-Attention Benchmark",
        "Times one attention call of this model's size on this card: on every attention backend that this ComfyUI has, "
        "and on VC-Attention's kernels. Uses random data and renders nothing.",
        {
            "model": "The model whose attention size is timed. Behind VC-Attention Patch, its precision and quality "
            "are timed; else 8-bit fast.",
            "latent": "The latent that the sampler would get: its size counts. Not connected: the widgets below.",
            "width": "Width of the clip in pixels, if no latent is connected.",
            "height": "Height of the clip in pixels, if no latent is connected.",
            "frames": "Frames of the clip, if no latent is connected.",
            "seconds": "How long each backend is timed in each of three rounds, at least. Longer evens out other work "
            "on the card.",
        },
        {
            "plot": "Milliseconds of one call on each backend.",
            "json": "Every number, as JSON.",
        },
    ),
    "VCAttentionWanVideoWrapper": NodeTexts(
        "VC-Attention for WanVideoWrapper",
        "VC-Attention Patch for the models of ComfyUI-WanVideoWrapper: LongCat-Video, and Wan through the wrapper. "
        "After each run the node shows what was accelerated and what was not, and why.",
        {
            "model": "The wrapper's model: put this node between its model loader (and LoRAs) and its sampler.",
            **{name: text for name, text in TOOLTIPS.items() if name not in ("model", "output")},
        },
        {"model": TOOLTIPS["output"]},
    ),
}

#: The twins for WanVideoWrapper have the widgets of the node they are a twin of, and its words for them.
_BRIDGED = "The wrapper's model that comes out of VC-Attention for WanVideoWrapper; connect the output to its sampler."
for _name, _title, _description in (
    (
        "VCAttentionQuality",
        "VC-Attention Quality for WanVideoWrapper",
        "VC-Attention Quality for the models of ComfyUI-WanVideoWrapper: measures, while its sampler runs, how close "
        "low-bit attention is to exact attention. VC-Attention Quality Report shows the result.",
    ),
    (
        "VCAttentionCapture",
        "VC-Attention Capture for WanVideoWrapper",
        "VC-Attention Capture for the models of ComfyUI-WanVideoWrapper: saves q, k and v of one attention layer at "
        "one step to the output folder.",
    ),
):
    NODES[f"{_name}WanVideoWrapper"] = replace(
        NODES[_name],
        display_name=_title,
        description=_description,
        inputs={**NODES[_name].inputs, "model": _BRIDGED},
    )
