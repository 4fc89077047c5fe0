"""Single attention calls through a patched model's real hook: ComfyUI's attention functions, our forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vc_attention.nodes.hook import attach, session_of


class Bench:
    """A patched model whose "network" is a function: `bench.forward(body)` runs `body(transformer_options)` where the
    diffusion model would run, at step `step` of a full schedule of `steps`."""

    def __init__(self, base: Any, opts: Any, steps: int = 8) -> None:
        self.model = attach(base, opts)
        self.session = session_of(self.model)
        top = float(self.model.get_model_object("model_sampling").sigma_max)
        self.sigmas = torch.linspace(top, 0, steps + 1)

    def forward(
        self,
        body: Callable[[dict[str, Any]], Any],
        step: int = 0,
        uuids: tuple[str, ...] = ("a",),
        window: Any = None,
        model: Any = None,
        **payload: Any,
    ) -> Any:
        """One pass. model: a clone to use instead, for what later nodes did to it."""
        import comfy.patcher_extension as extension

        patched = self.model if model is None else model
        options = {**patched.model_options["transformer_options"]}
        options["sigmas"] = self.sigmas[step : step + 1].expand(len(uuids))
        options["sample_sigmas"] = self.sigmas
        options["uuids"] = list(uuids)
        options["cond_or_uncond"] = list(range(len(uuids)))
        if window is not None:
            options["context_window"] = window

        def network(_self, x, t, c_concat, c_crossattn, control, transformer_options, **_):
            return body(transformer_options)

        wrappers = extension.get_all_wrappers(extension.WrappersMP.APPLY_MODEL, options)
        executor = extension.WrapperExecutor.new_class_executor(network.__get__(patched.model), patched.model, wrappers)
        x = torch.zeros(len(uuids), 1)
        return executor.execute(x, options["sigmas"], None, None, None, options, **payload)


def attention(*arguments: Any, **keywords: Any) -> Tensor:
    """ComfyUI's attention, as a model calls it."""
    from comfy.ldm.modules.attention import optimized_attention

    return optimized_attention(*arguments, **keywords)


def flat_qkv(
    lq: int = 96, lkv: int = 96, heads: int = 2, dim: int = 64, batch: int = 1, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v as Wan hands them over: [B, L, H * D]."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(batch, n, heads * dim, generator=generator).to(dtype) for n in (lq, lkv, lkv)]


def headed(tensors: list[Tensor], heads: int = 2) -> list[Tensor]:
    """The same as [B, H, L, D] views, as HunyuanVideo hands them over with skip_reshape."""
    return [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in tensors]
