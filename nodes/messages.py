"""Every reason and sentence that a creator can meet, in one place. The help page explains the same codes."""

from __future__ import annotations

from ..kernels import Plan, Reason

#: Why one attention call stays with ComfyUI's own attention: code -> sentence. `web/docs` has one entry for each code.
REASONS: dict[str, Reason] = {
    reason.code: reason
    for reason in (
        Reason(
            "no_context",
            "An attention call came from outside the sampled model's own pass (a ControlNet, for example), so "
            "ComfyUI's own attention ran there.",
        ),
        Reason(
            "mask", "An attention call carries a mask, which low-bit attention cannot honour, so ComfyUI's own is used."
        ),
        Reason(
            "low_precision",
            "The model asks for full precision in an attention call (image cross-attention), so ComfyUI's own ran.",
        ),
        Reason("gqa", "An attention call shares keys between heads (GQA), so ComfyUI's own attention ran."),
        Reason("shape", "An attention call has a shape that VC-Attention does not know, so ComfyUI's own ran."),
        Reason(
            "short",
            "Calls with fewer keys than min_tokens (text and image cross-attention) stay with ComfyUI's own attention, "
            "which is fast and exact there.",
        ),
        Reason("head_dim", "VC-Attention takes head dimensions 64 and 128; other calls stay with ComfyUI's own."),
        Reason("dtype", "VC-Attention takes bf16, fp16 and fp32 tensors; other calls stay with ComfyUI's own."),
        Reason("scale", "An attention call has a scale that is not a plain number, so ComfyUI's own attention ran."),
        Reason("training", "A call needs gradients, which low-bit attention does not give, so ComfyUI's own ran."),
        Reason("capture", "ComfyUI is recording a CUDA graph, which would freeze the grouping, so its own ran."),
        Reason("step_range", "This step lies outside start_percent to end_percent, so it ran in 16 bit as you asked."),
        Reason("dense_block", "This block is listed in dense_blocks, so it ran in 16 bit as you asked."),
        Reason(
            "budget",
            "This layer's measured quality was below the budget of VC-Attention Quality, in this run or in the profile "
            "that is loaded, so it ran in 16 bit.",
        ),
        Reason("no_kernel", "There is no VC-Attention kernel for this device, so ComfyUI's own attention ran."),
        Reason("memory", "VC-Attention ran out of memory, freed what it held, and ComfyUI's own attention took over."),
        Reason(
            "guard",
            "The result of VC-Attention did not agree with exact attention, so ComfyUI's own attention runs for the "
            "rest of this run.",
        ),
        Reason("error", "VC-Attention met a problem, and ComfyUI's own attention took over for the rest of this run."),
    )
}

#: A few words for each code, for the counts on the node.
SHORT: dict[str, str] = {
    "no_context": "outside the model's pass",
    "mask": "masked",
    "low_precision": "full precision asked for",
    "gqa": "shared keys",
    "shape": "unknown shape",
    "short": "text or image cross-attention",
    "head_dim": "head dimension",
    "dtype": "number format",
    "scale": "scale",
    "training": "gradients",
    "capture": "CUDA graph",
    "step_range": "outside start/end percent",
    "dense_block": "dense_blocks",
    "budget": "below the quality budget",
    "no_kernel": "no kernel for this device",
    "memory": "out of memory",
    "guard": "failed the numeric check",
    "error": "problem, see the log",
}

DISPLAY_NAME = "VC-Attention Patch"
DESCRIPTION = (
    "Runs the self-attention of video models (Wan, HunyuanVideo, MiniMax-H3 and others) in 8 or 4 "
    "bit, with smoothed values, so that the same clip comes faster and stays close to 16 bit. After each run "
    "the node shows what was accelerated and what was not, and why."
)

TOOLTIPS = {
    "model": "The video model to accelerate: put this node between the model loader and the sampler.",
    "precision": "Number format of the attention. auto: the best that your card can run, 8-bit today. 4-bit is faster "
    "on cards that have it and differs more from the 16-bit clip. off: the model passes through unchanged.",
    "quality": "fast: value smoothing and ExpCast, a softmax made of integer steps. faithful: value smoothing with an "
    "exact softmax, closer to the 16-bit clip and somewhat slower.",
    "grouping": "Sort similar tokens together before quantising, which makes value smoothing work. first steps: in the "
    "early steps, where the clip takes shape. all steps: throughout, slower. off: never.",
    "group_fraction": "With 'first steps': the share of the sampling steps, from the first, in which tokens are "
    "grouped. More is closer to 16 bit and slower.",
    "reuse_steps": "For how many steps one grouping serves before it is computed again. 1 is the most exact and the "
    "slowest.",
    "groups": "Token groups for each attention head. 0 chooses by the length of the clip.",
    "min_tokens": "Attention over fewer keys than this (text and image cross-attention) stays in 16 bit.",
    "dense_blocks": "Transformer blocks that stay in 16 bit, such as 0-2, 38, single:3. Empty: none.",
    "start_percent": "Part of the denoising before which attention stays in 16 bit: 0 is the start.",
    "end_percent": "Part of the denoising after which attention stays in 16 bit: 1 is the end.",
    "state_budget_gb": "Memory, in GB, that groupings may take between steps. Too little only means that they are "
    "computed again, which costs a little time.",
    "on_problem": "fall back: any problem is written to the log and ComfyUI's own attention takes over. stop: the run "
    "ends with the full error.",
    "backend": "auto: the kernels for your card. spec: a slow emulation in plain torch, for checking results on any "
    "machine.",
    "output": "The model with VC-Attention in it.",
}

OFF = "VC-Attention is off: ComfyUI's own attention runs."
NO_BLOCK_NUMBERS = (
    "This model does not number its blocks in this ComfyUI version, so dense_blocks has no effect; update ComfyUI or "
    "clear dense_blocks."
)
NO_CALLS = (
    "No attention call of this model reached VC-Attention: another node replaced the attention hook during the run, or "
    "this model does not use ComfyUI's attention. Remove that node, or see the help page."
)
NOT_KEPT = (
    "Some token groups were not kept between steps (state_budget_gb or free memory is too small) and were computed "
    "again where they were needed; that costs a little time, not quality."
)
DEGRADED = "4-bit has no kernel for this device, so 8-bit runs instead."
KEYLESS = "Key means have no kernel for this device, so the same plan runs without them."


def degraded(asked: Plan) -> str:
    """What runs instead of the plan that was asked for and that this device has no kernel for."""
    return DEGRADED if asked.values == "nvfp4" else KEYLESS


#: On the nodes that look at a run.
NO_PATCH = (
    "VC-Attention is not on this model, so there is nothing to look at: put this node behind VC-Attention Patch (with "
    "precision other than off), between it and the sampler. The model passes through unchanged."
)
NO_BRIDGE = (
    "VC-Attention is not on this model, so there is nothing to look at: put this node behind VC-Attention for "
    "WanVideoWrapper (with precision other than off), between it and the sampler. The model passes through unchanged."
)
QUALITY_READY = "VC-Attention Quality is ready; the numbers come while the sampler runs."
NOTHING_MEASURED = (
    "Nothing was measured: VC-Attention accelerated no attention call of the chosen layers and steps. The text on "
    "VC-Attention Patch, or on VC-Attention for WanVideoWrapper, says why calls were declined."
)
NO_QUALITY = (
    "There is nothing to report: connect the model that comes out of VC-Attention Quality, and a latent that comes out "
    "of its sampler."
)
NO_RUN = "VC-Attention Quality has not seen a run yet: connect a latent that comes out of its sampler."
PROFILE_OTHER_PLAN = (
    "The profile was measured with another precision or quality than this run's; its layers stay in 16 bit all the "
    "same. Measure again to be sure of the others."
)
CAPTURE_READY = "VC-Attention Capture is ready; the file is written while the sampler runs."

#: On VC-Attention Compare.
SSIM_ABSENT = (
    "SSIM needs kornia, one of ComfyUI's optional packages, and it cannot be imported here, so only PSNR was measured. "
    "Install ComfyUI's requirements again to get it."
)
LPIPS_ABSENT = (
    "LPIPS needs the package lpips, which is not installed in ComfyUI's Python, so it was not measured. Install it "
    "there with pip, or switch lpips off."
)
NO_FRAMES = "There are no frames to compare."

#: On VC-Attention Benchmark.
NO_ATTENTION_SIZE = (
    "This model does not say how many attention heads it has, so there is no size to time. Please report the model."
)
NO_PIXELS = (
    "How many pixels one latent cell of this model stands for is not known here: connect the latent that the sampler "
    "gets, and the widgets for the size are not needed."
)

#: On VC-Attention for WanVideoWrapper.
NOT_THE_WRAPPERS = (
    "VC-Attention does not know this model's self-attention, so the model passes through unchanged: connect a model of "
    "ComfyUI-WanVideoWrapper, and update the wrapper if it is older than LongCat-Video (November 2025)."
)
FULLGRAPH = (
    "fullgraph is on in WanVideo Torch Compile Settings, and VC-Attention cannot be compiled into one graph with the "
    "model, so the model passes through unchanged. Turn fullgraph off there to use both."
)
OTHER_PATCH = (
    "Another node replaced the self-attention of this model's blocks; VC-Attention leaves those blocks to it. Remove "
    "that node to accelerate them."
)


def not_measured(problem: str) -> str:
    """Measuring met a problem."""
    return (
        f"Measuring stopped in the middle of this run ({problem}); the run itself went on. The numbers below are those "
        "from before."
    )


def profile_not_for(profile: str, model: str) -> str:
    """The profile is of another model: a word for what it has, and what this model has."""
    return f"The profile is for a model with {profile}, and this one has {model}, so the run goes on without it."


def profile_loaded(name: str, dense: int, layers: int) -> str:
    """What a loaded profile decides."""
    return f"Profile {name}: {dense} of {layers} layers stay in 16 bit."


def profile_saved(name: str, dense: int, layers: int) -> str:
    """A profile was saved."""
    return (
        f"Saved as profile {name} ({dense} of {layers} layers in 16 bit). To use it, write that name into the profile "
        "widget of VC-Attention Quality."
    )


def captured(file: str, layer: str, step: int, heads: int, of_heads: int, clips: int, of_clips: int) -> str:
    """A call was captured into `file`, a path below the output folder. step: from 1."""
    part = f"{heads} of {of_heads} heads" + ("" if clips == of_clips else f", {clips} of {of_clips} clips of the batch")
    return f"Saved {layer}, step {step} ({part}) to {file} in the output folder. Try: python3 run.py replay FILE"


def not_captured(layer: str, step: int) -> str:
    """The chosen call did not come."""
    return (
        f"Nothing was captured: VC-Attention accelerated no attention call of layer {layer} at step {step} of this "
        "run. Choose another layer or step, or see on VC-Attention Patch, or on VC-Attention for WanVideoWrapper, why "
        "calls were declined."
    )


def too_small(needed_mb: int, max_mb: int) -> str:
    """max_mb does not hold one head of one clip."""
    return (
        f"Nothing was captured: one head of this call needs {needed_mb} MB, and max_mb is {max_mb}. Raise max_mb to "
        f"{needed_mb} or more."
    )


def capture_failed(why: str) -> str:
    """The file could not be written, or memory was short."""
    return f"Nothing was captured ({why}); the run went on. Free some space or memory, or lower max_mb."


def chained(name: str) -> str:
    """Another node's hook was found in the slot."""
    return f"Another attention hook ({name}) is on this model; it runs only for the calls that VC-Attention declines."


def compiling(done: int, total: int, name: str) -> str:
    """Kernels are being compiled on this machine."""
    if not total:
        return f"VC-Attention compiles its kernels for this card, once, which takes a minute or two: {name}."
    return f"VC-Attention compiles its kernels for this card, once: {done + 1} of {total} ({name})."


def ready(backend: str, note: str) -> str:
    """The node can run what was chosen. note: why better kernels are not used."""
    return f"VC-Attention is ready ({backend}).{f' {note}' if note else ''}"


def failed(error: BaseException) -> str:
    """The one sentence of a caught problem."""
    return (
        f"VC-Attention met a problem ({type(error).__name__}: {_first_line(error)}), so ComfyUI's own attention runs "
        "for the rest of this run. Set on_problem to stop to see the full error."
    )


def stopped(error: BaseException) -> str:
    """The error of on_problem = stop."""
    return (
        f"VC-Attention stopped this run because on_problem is set to stop: {type(error).__name__}: "
        f"{_first_line(error)}. Set on_problem to 'fall back' to continue on ComfyUI's own attention instead."
    )


#: Phase of a step -> how the numeric guard names it.
_PHASES = {"group": "tokens grouped", "reuse": "groups reused", "plain": "no groups"}


def disagreement(layer: str, step: int, phase: str, found: float, least: float) -> str:
    """What the numeric guard found in `layer`: an agreement below `least`."""
    return (
        f"VC-Attention's result did not agree with exact attention in {layer} at step {step + 1} "
        f"({_PHASES.get(phase, phase)}): agreement {found:.3f}, at least {least:g} is expected"
    )


def disagreed(finding: str, failing: int, checked: int, repeated: bool, dense: str) -> str:
    """The whole text of a `finding`: `failing` of `checked` calls of one pass disagree.

    repeated: the step was computed again. dense: the block as dense_blocks takes it, or empty.
    """
    others = f" ({failing} of {checked} calls disagree)" if failing > 1 else ""
    step = "this step was computed again" if repeated else "this step stays as it is and may be damaged"
    keep = f"add {dense} to dense_blocks, which leaves that block in 16 bit, or " if dense and failing == 1 else ""
    return (
        f"{finding}{others}. ComfyUI's own attention runs for the rest of this run; {step}. Please report this line "
        f"with the output of 'python3 run.py doctor'; until then {keep}set precision to off."
    )


def non_finite(step: int, repeated: bool, layer: str = "") -> str:
    """The low-bit path gave NaN or infinity at `step`, in `layer` where that is known."""
    where = f" in {layer}" if layer else ""
    rescue = (
        "the step was computed again"
        if repeated
        else "the clip may be damaged: run it again with precision off to compare"
    )
    return f"attention gave numbers that are not finite at step {step + 1}{where}; {rescue}"


def frame_small(name: str, least: int) -> str:
    """A metric needs larger frames."""
    return f"{name} needs frames of at least {least} pixels each way, so it was not measured."


def lpips_failed(error: BaseException) -> str:
    """The package lpips is there and does not work."""
    return (
        f"LPIPS could not be measured ({type(error).__name__}: {_first_line(error)}). At its first use the package "
        "downloads AlexNet's weights; try again with a connection, or switch lpips off."
    )


def other_sizes(labels: tuple[str, str], a: tuple[int, int, int], b: tuple[int, int, int]) -> str:
    """Two clips of different frame sizes (frames, height, width)."""
    return (
        f"{labels[0]} has frames of {a[2]} x {a[1]} pixels and {labels[1]} of {b[2]} x {b[1]}, so they cannot be "
        "compared pixel by pixel. Render both at one size, or crop or scale one of them first."
    )


def other_counts(labels: tuple[str, str], a: int, b: int) -> str:
    """Two clips of different length."""
    return f"{labels[0]} has {a} frames and {labels[1]} has {b}: the first {min(a, b)} of both were compared."


def not_finite_frames(count: int, first: int) -> str:
    """Frames with NaN or infinity. first: from 1."""
    which = f"Frame {first} holds" if count == 1 else f"{count} frames, the first of them frame {first}, hold"
    return f"{which} numbers that are not finite and could not be measured; the overall numbers are without them."


def no_room(needed: int, free: int, device: str) -> str:
    """The tensors of a benchmark do not fit. In bytes."""
    return (
        f"Nothing was timed: this size needs about {needed / 1e9:.1f} GB on {device}, and {free / 1e9:.1f} GB are "
        "free. Choose fewer frames or a smaller picture."
    )


def too_slow_here(device: str, tokens: int) -> str:
    """A CPU would take minutes for one call."""
    return (
        f"Nothing was timed: ComfyUI runs on {device} here, where one attention call over {tokens:,} tokens takes far "
        "too long. Choose a small size (such as 256 x 256 and 9 frames) to see that everything works; times that "
        "matter come from a card."
    )


def fell_back(name: str) -> str:
    """A backend of ComfyUI's quietly ran torch's attention."""
    return f"ComfyUI's {name} gave the call on to PyTorch's attention, so it has no time of its own; the log says why"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"
