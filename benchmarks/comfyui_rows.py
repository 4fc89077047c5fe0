"""The rows of `comfyui_gpu.py`: ways to compute the attention of one and the same model in ComfyUI.

Each row is a function from a ModelPatcher to a patched clone. ComfyUI's own backends go in through ComfyUI, ours
through the node's public `execute`, and peers that ComfyUI does not offer through the same slot that ours sits in,
`optimized_attention_override`. Every peer gets all attention calls of the model, text included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from vc_attention.benchmarks.comfyui_model import Scale
from vc_attention.kernels import preset
from vc_attention.nodes.hook import attach
from vc_attention.nodes.options import PatchOptions

OVERRIDE = "optimized_attention_override"
REFERENCE = "comfyui"

#: [B, Lq, H, D], [B, Lkv, H, D] twice, and the score scale or None -> [B, Lq, H, D].
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "float | None"], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """name: as `--rows` takes it. options: of the node, for rows of ours, and None for the others. compared: whether
    the latent means anything beside ComfyUI's own."""

    name: str
    title: str
    patch: Callable[[Any], Any]
    options: PatchOptions | None = None
    compared: bool = True


def all_rows(scale: Scale) -> tuple[list[Row], dict[str, str]]:
    """Every row that can run here, in the order of their turns; and why the others cannot, by name."""
    missing: dict[str, str] = {}
    peers: list[Row] = []
    for name, title, find in (
        ("fa4", "FlashAttention-4 BF16, through the hook", _flash4),
        ("cudnn", "cuDNN BF16, through the hook", _cudnn),
    ):
        found = find(scale)
        if isinstance(found, str):
            missing[name] = found
        else:
            peers.append(Row(name, title, _hooked(found)))
    # What the others are compared with comes first, and what a time-out may cost comes last.
    rows = [Row(REFERENCE, "ComfyUI, its default attention", lambda model: model.clone()), *peers[:1], *_ours(scale)]
    nothing = Row("none", "attention left out (what the rest of the model takes)", _hooked(_nothing), compared=False)
    return [*rows, nothing, *_own_backends(), *peers[1:]], missing


def _own_backends() -> list[Row]:
    """What ComfyUI registered besides its default. sub_quad and split are for cards without a fused kernel."""
    from comfy.ldm.modules import attention

    rows = []
    for name, function in attention.REGISTERED_ATTENTION_FUNCTIONS.items():
        if name not in ("sub_quad", "split") and function is not attention.optimized_attention:
            rows.append(Row(f"comfyui:{name}", f"ComfyUI, its backend {name}", _chosen(function)))
    return rows


def _chosen(function: Callable[..., Any]) -> Callable[[Any], Any]:
    def patch(model: Any) -> Any:
        patched = model.clone()
        if hasattr(patched, "set_model_optimized_attention"):  # what ComfyUI's Model Attention Backend node calls
            patched.set_model_optimized_attention(function)
        else:
            patched.model_options["transformer_options"][OVERRIDE] = lambda _, *args, **keywords: function(
                *args, **keywords
            )
        return patched

    return patch


def _ours(scale: Scale) -> list[Row]:
    """The node as a user sets it, and key means, which are no widget yet and so go past it."""

    def node(**widgets: Any) -> Callable[[Any], Any]:
        def patch(model: Any) -> Any:
            from vc_attention.nodes.patch import VCAttentionPatch

            return VCAttentionPatch.execute(model, **widgets).result[0]

        return patch

    chosen: dict[str, Any] = {"min_tokens": scale.min_tokens, "backend": scale.backend}
    fast, faithful = PatchOptions(quality="fast", **chosen), PatchOptions(quality="faithful", **chosen)
    keyed = PatchOptions(plan=replace(preset("fast", scale.device), key_means=True), **chosen)
    return [
        Row("vc:fast", "VC-Attention Patch, fast", node(quality="fast", **chosen), fast),
        Row("vc:keys", "VC-Attention, fast + key means", lambda model: attach(model, keyed), keyed),
        Row("vc:faithful", "VC-Attention Patch, faithful", node(quality="faithful", **chosen), faithful),
    ]


def _hooked(attention: Attention) -> Callable[[Any], Any]:
    """Put `attention` into the slot; masked calls, which Wan does not make, stay with ComfyUI."""

    def override(func: Callable[..., Any], q: Any, k: Any, v: Any, heads: int, *rest: Any, **keywords: Any) -> Any:
        if rest or keywords.get("mask") is not None or keywords.get("skip_reshape"):
            return func(q, k, v, heads, *rest, **keywords)
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        return attention(q, k, v, keywords.get("scale")).flatten(2)

    def patch(model: Any) -> Any:
        patched = model.clone()
        patched.model_options["transformer_options"][OVERRIDE] = override
        return patched

    return patch


def _cudnn(scale: Scale) -> Attention | str:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if scale.device != "cuda":
        return "it needs an NVIDIA GPU"

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)

    return attention


def _flash4(scale: Scale) -> Attention | str:
    if scale.device != "cuda":
        return "it needs an NVIDIA GPU"
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        return f"flash-attn-4 cannot be imported: {error}"

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        out = flash_attn_func(q, k, v, softmax_scale=scale)
        return out[0] if isinstance(out, tuple) else out

    return attention


def _nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    return torch.zeros_like(q)


def kernel_of(row: Row, model: Any, scale: Scale) -> str:
    """The CUDA kernel that takes most of the time of one self-attention call of this row; "" on a CPU.

    ComfyUI leaves the choice between several fused kernels to torch, so this is looked at and not assumed.
    """
    if scale.device != "cuda" or row.options is not None or not row.compared:
        return ""
    from comfy.ldm.modules.attention import optimized_attention
    from torch.profiler import ProfilerActivity, profile

    heads = scale.network["num_heads"]
    q, k, v = (torch.randn(1, 8192, heads * 128, dtype=scale.dtype, device=scale.device) for _ in range(3))
    options = row.patch(model).model_options["transformer_options"]
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen, torch.inference_mode():
            optimized_attention(q, k, v, heads=heads, transformer_options=options)
            torch.cuda.synchronize()
    except RuntimeError as error:  # some virtual machines keep the profiler's interface to themselves
        return f"its kernel cannot be seen: {str(error)[:100]}"
    kernels = sorted(seen.key_averages(), key=lambda event: event.self_device_time_total)
    return kernels[-1].key[:100] if kernels else ""
