"""What ours is compared with: each from bf16 q, k, v [B, H, L, D] to the bf16 output, as a user calls it."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...kernels.timing import Call, one_line
from .results import CUDNN, FLASH_2, FLASH_4

Maker = Callable[[Tensor, Tensor, Tensor], Call]


@dataclass(frozen=True)
class Peer:
    """One row. package: the distribution that it comes from. make: its call on given tensors; raises when absent.

    capability: the only one that it is for, None for any.
    """

    row: str
    package: str
    make: Maker
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Found:
    """calls: row -> call. versions: row -> version of its package. missing: row -> why it is not there."""

    calls: dict[str, Call]
    versions: dict[str, str]
    missing: dict[str, str]


def _sdpa(backend: Any) -> Maker:
    def make(q: Tensor, k: Tensor, v: Tensor) -> Call:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        return run

    return make


def _flash4(q: Tensor, k: Tensor, v: Tensor) -> Call:
    function = importlib.import_module("flash_attn.cute.interface").flash_attn_func
    tokens_first = [x.transpose(1, 2) for x in (q, k, v)]

    def run() -> Tensor:
        out = function(*tokens_first)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def _kitchen(q: Tensor, k: Tensor, v: Tensor) -> Call:
    function = importlib.import_module("comfy_kitchen").int8_attention
    return lambda: function(q, k, v)


def _sage(name: str, **options: Any) -> Maker:
    def make(q: Tensor, k: Tensor, v: Tensor) -> Call:
        function = getattr(importlib.import_module("sageattention"), name)
        tokens_first = [x.transpose(1, 2) for x in (q, k, v)]
        return lambda: function(*tokens_first, tensor_layout="NHD", is_causal=False, **options).transpose(1, 2)

    return make


PEERS = (
    Peer(FLASH_4, "flash-attn-4", _flash4),
    Peer(CUDNN, "torch", _sdpa(SDPBackend.CUDNN_ATTENTION)),
    Peer(FLASH_2, "torch", _sdpa(SDPBackend.FLASH_ATTENTION)),
    Peer("comfy-kitchen INT8", "comfy-kitchen", _kitchen),
    Peer("SageAttention (auto)", "sageattention", _sage("sageattn")),
    Peer(
        "SageAttention INT8/FP8 sm_90",
        "sageattention",
        _sage("sageattn_qk_int8_pv_fp8_cuda_sm90", pv_accum_dtype="fp32+fp32"),
        (9, 0),
    ),
)


def find(q: Tensor, k: Tensor, v: Tensor, capability: tuple[int, int] | None) -> Found:
    """Every peer of a card of this compute capability, on these tensors; what cannot be imported is named."""
    found = Found({}, {}, {})
    for peer in PEERS:
        if peer.capability not in (None, capability):
            continue
        try:
            found.calls[peer.row] = peer.make(q, k, v)
            found.versions[peer.row] = version(peer)
        # An installed package fails to import in ways of its own (a library, a version); it costs only its row.
        except Exception as error:
            found.missing[peer.row] = f"{peer.package} cannot be used ({one_line(error)})"
    return found


def version(peer: Peer) -> str:
    """The version of the package of a peer; of cuDNN itself for its row."""
    if peer.row == CUDNN:
        return f"cuDNN {torch.backends.cudnn.version()}"
    if peer.package == "torch":
        return f"torch {torch.__version__}"
    try:
        return f"{peer.package} {importlib.metadata.version(peer.package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{peer.package}, version unknown"
