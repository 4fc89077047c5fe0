"""One attention call as ComfyUI makes it, read without touching its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_POSITIONAL = ("q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")


@dataclass
class Call:
    """q, k, v as given: [B, L, H * D], or [B, H, L, D] with skip_reshape. `keywords` holds the rest."""

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    mask: Any
    skip_reshape: bool
    skip_output_reshape: bool
    keywords: Mapping[str, Any]

    @property
    def lq(self) -> int:
        """Query tokens."""
        return self.q.shape[-2]

    @property
    def lkv(self) -> int:
        """Key and value tokens."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.q.shape[-1] if self.skip_reshape else self.q.shape[-1] // self.heads

    @property
    def options(self) -> dict[str, Any]:
        """The call's transformer_options."""
        return self.keywords.get("transformer_options") or {}

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as views [B, H, L, D]."""
        if self.skip_reshape:
            return self.q, self.k, self.v
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q, self.k, self.v))
        return q, k, v

    def output(self, out: Tensor) -> Tensor:
        """`out` [B, H, L, D] in the layout that the caller expects."""
        if self.skip_output_reshape:
            return out
        b, h, length, d = out.shape
        return out.transpose(1, 2).reshape(b, length, h * d)


def read_call(args: Sequence[Any], keywords: Mapping[str, Any]) -> Call | None:
    """Read an override's arguments, positional or by keyword, tensors or containers. None: not an attention call."""
    named = dict(zip(_POSITIONAL, args, strict=False))
    named.update((name, keywords[name]) for name in _POSITIONAL if name in keywords)
    if len(args) > len(_POSITIONAL):
        return None
    tensors = [t if isinstance(t, Tensor) else _peek(t) for t in (named.get("q"), named.get("k"), named.get("v"))]
    heads = named.get("heads")
    if any(t is None for t in tensors) or not isinstance(heads, int) or heads < 1:
        return None
    q, k, v = tensors
    return Call(
        q,  # type: ignore[arg-type]
        k,  # type: ignore[arg-type]
        v,  # type: ignore[arg-type]
        heads,
        named.get("mask"),
        bool(named.get("skip_reshape", False)),
        bool(named.get("skip_output_reshape", False)),
        keywords,
    )


def _peek(container: Any) -> Tensor | None:
    """The tensor of a single-owner container (ComfyUI 0.33 and later), left in it."""
    peek = getattr(container, "peek", None)
    tensor = peek() if callable(peek) else None
    return tensor if isinstance(tensor, Tensor) else None
