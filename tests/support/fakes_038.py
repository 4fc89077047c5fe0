"""What only ComfyUI 0.38 does, imitated: read in its sources, not executed. Contract tests use these fakes.

Imitated facts (comfy/ldm/modules/attention.py, comfy/model_prefetch.py, comfy/ldm/minimax/model.py,
comfy_extras/nodes_sparse_attention.py, comfy/model_patcher.py of August and September 2026):

- q, k, v may come in single-owner containers with `take()` (once; a second one raises) and `peek()`. An override with
  an attribute `container_function` is called as container_function(*args, **kwargs), without func; any other override
  gets the taken tensors. Below the override, an attention function's own container_function goes first.
- `preferred_attention` is a keyword that the wrapper removes before the override sees the call. It is used only where
  there is no override.
- MiniMax-H3 writes `minimax_h3_layout` (with `segments` and `signature`) and `block_index` into transformer_options
  inside its forward pass, after APPLY_MODEL wrappers began.
- Between malloc_graph_begin and _end, allocations of a block are recorded and expected back at its end.
  `comfy.model_prefetch.pause_malloc_graph()` is a context in which they are not recorded.
- The sparse attention node puts its override on top of the slot, at patch time and again in ON_PREPARE_STATE
  (3 arguments: patcher, timestep, model_options) unless one of its own is there.
- The attention backend node replaces the slot by a function that calls one backend, with that backend's
  container_function.
"""

from __future__ import annotations

import contextlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from node_fakes import OVERRIDE, FakePatcher, plain_attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Container:
    """A tensor with one owner."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.takes = 0

    def peek(self) -> Tensor:
        if self.tensor is None:
            raise RuntimeError("already consumed")
        return self.tensor

    def take(self) -> Tensor:
        tensor = self.peek()
        self.tensor = None
        self.takes += 1
        return tensor


class Attention:
    """optimized_attention of 0.38. `log` says which path below the override ran: "function" or "containers"."""

    def __init__(self, own_containers: bool = False) -> None:
        self.log: list[str] = []
        self.keywords: list[dict[str, Any]] = []
        self.own_containers = own_containers

    def func(self, q: Any, k: Any, v: Any, heads: int, **kwargs: Any) -> Tensor:
        assert isinstance(q, Tensor)
        self.log.append("function")
        self.keywords.append(kwargs)
        return plain_attention(q, k, v, heads, **kwargs)

    def container_function(self, q: Container, k: Container, v: Container, heads: int, **kwargs: Any) -> Tensor:
        self.log.append("containers")
        self.keywords.append(kwargs)
        return plain_attention(q.take(), k.take(), v.take(), heads, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        preferred = kwargs.pop("preferred_attention", None)
        boxed = isinstance(args[0], Container)
        if "_inside_attn_wrapper" not in kwargs:
            kwargs["_inside_attn_wrapper"] = True
            override = (kwargs.get("transformer_options") or {}).get(OVERRIDE)
            if override is not None:
                if boxed and hasattr(override, "container_function"):
                    return override.container_function(*args, **kwargs)
                if boxed:
                    args = (*(c.take() for c in args[:3]), *args[3:])
                return override(self.func, *args, **kwargs)
            if preferred is not None:
                return preferred(*args, **kwargs)
        if boxed and self.own_containers:
            return self.container_function(*args, **kwargs)
        if boxed:
            args = (*(c.take() for c in args[:3]), *args[3:])
        return self.func(*args, **kwargs)


def layout(*segments: tuple[int, int, str]) -> SimpleNamespace:
    """A MiniMax-H3 token layout."""
    return SimpleNamespace(segments=list(segments), signature=(segments[0][1], segments[-1][1]))


class MallocGraph(TorchDispatchMode):
    """Remembers which allocations happened while recording: they must be gone when the block ends."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = 0
        self.recorded: dict[int, torch.UntypedStorage] = {}

    def module(self) -> ModuleType:
        """A stand-in for comfy.model_prefetch."""
        module = ModuleType("comfy.model_prefetch")
        module.pause_malloc_graph = self.pause  # type: ignore[attr-defined]
        return module

    @contextlib.contextmanager
    def pause(self):
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and not self.paused and tensor.untyped_storage().data_ptr() not in given:
                storage = tensor.untyped_storage()
                self.recorded[storage.data_ptr()] = storage
        return out

    def leaked(self, kept: list[Tensor]) -> list[Tensor]:
        """Tensors that outlive the block although they were made while recording."""
        return [t for t in kept if t.untyped_storage().data_ptr() in self.recorded]


class SparseNode:
    """The sparse attention node: takes calls of at least `tokens` queries, and says so in `ran`."""

    def __init__(self, tokens: int = 0) -> None:
        self.tokens = tokens
        self.ran = 0
        self.installed: list[Any] = []

    def override(self, previous: Any) -> Any:
        def sparse(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, **kwargs: Any) -> Tensor:
            if mask is None and q.shape[1] >= self.tokens:
                self.ran += 1
                return plain_attention(q, k, v, heads)
            if previous is None:
                return func(q, k, v, heads, mask=mask, **kwargs)
            return previous(func, q, k, v, heads, mask=mask, **kwargs)

        self.installed.append(sparse)
        return sparse

    def install(self, transformer_options: dict[str, Any]) -> None:
        current = transformer_options.get(OVERRIDE)
        if current not in self.installed:
            transformer_options[OVERRIDE] = self.override(current)

    def apply(self, model: FakePatcher) -> FakePatcher:
        patched = model.clone()
        self.install(patched.model_options["transformer_options"])
        patched.add_callback_with_key(
            "on_prepare_state",
            "sparse",
            lambda patcher, timestep, options: self.install(options["transformer_options"]),
        )
        return patched


def attention_backend_node(model: FakePatcher, backend: Attention) -> FakePatcher:
    """The attention backend node: overwrites the slot, whatever is in it."""

    def chosen(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        return backend(*args, **kwargs)

    chosen.container_function = backend  # type: ignore[attr-defined]
    patched = model.clone()
    patched.model_options["transformer_options"][OVERRIDE] = chosen
    return patched
