"""A model, a patcher and an attention function, as far as `nodes/` sees them, without ComfyUI.

Imitated facts of ComfyUI 0.3.75: `clone()` deep-copies model_options and copies the callback lists; a forward pass gets
its own transformer_options with uuids, sigmas and sample_sigmas; APPLY_MODEL wrappers run around the model with
transformer_options as the sixth positional argument; an attention function looks for the override in
transformer_options, once, and passes itself and `_inside_attn_wrapper` to it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vc_attention.kernels import EXACT
from vc_attention.nodes.options import PatchOptions

OVERRIDE = "optimized_attention_override"
HEADS, DIM = 2, 64


class FlowSampling:
    """Flow matching with a shift, as Wan and HunyuanVideo sample."""

    sigma_max = torch.tensor(1.0)

    def __init__(self, shift: float = 8.0) -> None:
        self.shift = shift

    def percent_to_sigma(self, percent: float) -> float:
        if percent <= 0.0:
            return 1.0
        if percent >= 1.0:
            return 0.0
        t = 1.0 - percent
        return self.shift * t / (1 + (self.shift - 1) * t)

    def simple(self, steps: int) -> Tensor:
        """The schedule "simple" with `steps` steps."""
        return torch.tensor([self.percent_to_sigma(i / steps) for i in range(steps)] + [0.0])


class FakePatcher:
    """ModelPatcher: model_options, callbacks, clone."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(diffusion_model=SimpleNamespace(), model_sampling=FlowSampling())
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.callbacks: dict[str, dict[str, list[Callable]]] = {}
        self.load_device = torch.device("cpu")

    def clone(self) -> FakePatcher:
        other = FakePatcher()
        other.model = self.model
        other.model_options = copy.deepcopy(self.model_options)
        other.callbacks = {event: {k: list(c) for k, c in keys.items()} for event, keys in self.callbacks.items()}
        return other

    def add_callback_with_key(self, event: str, key: str, callback: Callable) -> None:
        self.callbacks.setdefault(event, {}).setdefault(key, []).append(callback)

    def fire(self, event: str, *args: Any) -> None:
        for callbacks in self.callbacks.get(event, {}).values():
            for callback in callbacks:
                callback(self, *args)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask=None,
    attn_precision=None,
    skip_reshape=False,
    skip_output_reshape=False,
    **kwargs: Any,
) -> Tensor:
    """The attention below the hook: exact, in the caller's layout."""
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scale"))
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def wrapped(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """ComfyUI's wrapper around every attention function."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        if "_inside_attn_wrapper" not in kwargs:
            kwargs["_inside_attn_wrapper"] = True
            options = kwargs.get("transformer_options")
            if options is not None and OVERRIDE in options:
                return options[OVERRIDE](func, *args, **kwargs)
        return func(*args, **kwargs)

    return wrapper


optimized_attention = wrapped(plain_attention)


@dataclass
class Layer:
    """One attention call of the fake model. `given` are further keywords; `made` collects its outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    block: tuple[Any, Any] = ("double", 0)
    given: dict[str, Any] = field(default_factory=dict)
    attention: Callable[..., Tensor] = optimized_attention


def tokens(length: int = 96, batch: int = 1, seed: int = 0, heads: int = HEADS) -> Tensor:
    """Gaussian [B, L, H * D]."""
    return torch.randn(batch, length, heads * DIM, generator=torch.Generator().manual_seed(seed))


def self_attention(length: int = 96, batch: int = 1, seed: int = 0, block=("double", 0), **given: Any) -> Layer:
    """A self-attention layer."""
    q, k, v = (tokens(length, batch, seed * 3 + i) for i in range(3))
    return Layer(q, k, v, block, given)


def forward(
    patcher: FakePatcher,
    layers: Sequence[Layer],
    sigma: float,
    sample_sigmas: Tensor | None,
    uuids: Sequence[Any] = ("a",),
    between: Callable[[dict[str, Any]], None] | None = None,
    **more: Any,
) -> list[Tensor]:
    """One forward pass: the layers' outputs. between: changes transformer_options before the wrappers run. more: keys
    of transformer_options, or keywords of apply_model when they start with `model_`."""
    options = copy.copy(patcher.model_options["transformer_options"])
    options["wrappers"] = {event: dict(keys) for event, keys in options.get("wrappers", {}).items()}
    keywords = {name.removeprefix("model_"): more.pop(name) for name in list(more) if name.startswith("model_")}
    options.update(uuids=list(uuids), sigmas=torch.tensor([sigma] * max(len(uuids), 1)), **more)
    if sample_sigmas is not None:
        options["sample_sigmas"] = sample_sigmas
    if between is not None:
        between(options)

    def model(x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        outs = []
        for layer in layers:
            transformer_options["block_type"], transformer_options["block_index"] = layer.block
            given = {"transformer_options": transformer_options, **layer.given}
            outs.append(layer.attention(layer.q, layer.k, layer.v, HEADS, **given))
        return outs

    call: Callable[..., Any] = model
    for wrapper in [w for ws in options["wrappers"].get("apply_model", {}).values() for w in ws][::-1]:
        call = _executor(wrapper, call, patcher.model)
    return call(torch.zeros(1), options["sigmas"], None, None, None, options, **keywords)


def _executor(wrapper: Callable, inner: Callable, model: Any) -> Callable:
    class Executor:
        class_obj = model

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

    return lambda *args, **kwargs: wrapper(Executor(), *args, **kwargs)


def run(patcher: FakePatcher, layers: Sequence[Layer], sigmas: Tensor, **more: Any) -> list[list[Tensor]]:
    """A whole sampler run: PRE_RUN, one forward pass for each step, CLEANUP."""
    patcher.fire("on_pre_run")
    try:
        return [forward(patcher, layers, float(s), sigmas, **more) for s in sigmas[:-1]]
    finally:
        patcher.fire("on_cleanup")


def options(**chosen: Any) -> PatchOptions:
    """Permutation only, on the specification, from 16 keys on."""
    return PatchOptions(**{"plan": EXACT, "backend": "spec", "min_tokens": 16, "groups": 4, **chosen})
