"""Saving q, k and v of one attention call of a run, for `run.py replay` and for bug reports.

The tensors are the caller's: before grouping, before any cast, every token of them. What does not fit is left out by
whole heads (and then clips of the batch), which changes nothing for the heads that are saved.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import host
from .call import Call
from .files import FileError, write_numbered
from .forward import Forward
from .messages import capture_failed, captured, not_captured, too_small
from .options import BlockList, parse_blocks
from .quality_run import device_name
from .session import Route
from .state import Layer
from .watch import Watcher

FORMAT = "vc_attention_capture"
MAX_STEP = 10_000
MAX_MB = 65_536


@dataclass(frozen=True)
class CaptureOptions:
    """One field for each widget, in the widgets' order. Raises ValueError, in a sentence, on a value out of range.

    layer: one block, as dense_blocks writes it; where the model does not number its blocks, the call of the pass from
    1. step: from 1. max_mb: size of the tensors, in 10^6 bytes.
    """

    layer: str = "0"
    step: int = 1
    max_mb: int = 512
    filename_prefix: str = "vc_attention/capture"
    blocks: BlockList = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.step <= MAX_STEP or not 1 <= self.max_mb <= MAX_MB:
            raise ValueError(f"step must lie between 1 and {MAX_STEP}, and max_mb between 1 and {MAX_MB}.")
        if not self.filename_prefix.strip():
            raise ValueError("filename_prefix is empty; write a name such as vc_attention/capture.")
        blocks = parse_blocks(self.layer, "layer")
        if len(blocks.any_type) + len(blocks.typed) != 1:
            raise ValueError(f"layer is {self.layer.strip()!r}; it names one block, such as 12 or single:3.")
        object.__setattr__(self, "blocks", blocks)

    def takes(self, layer: Layer, step: int) -> bool:
        """Whether this is the chosen layer, and the chosen step (from 0)."""
        number = layer.block_index if layer.numbered else layer.ordinal + 1
        return step + 1 == self.step and (layer.block_type, number) in self.blocks


class Share(NamedTuple):
    """What of a call fits: `clips` of its batch, from the first, and these heads."""

    clips: int
    heads: tuple[int, ...]


def share(batch: int, heads: int, bytes_of_head: int, most: int) -> Share | None:
    """As many evenly spaced heads of the whole batch as `most` bytes hold; of its first clip alone, where not one does.

    bytes_of_head: q, k and v of one head of one clip. None: not even that fits.
    """
    for clips in sorted({batch, 1}, reverse=True):
        count = min(heads, most // (bytes_of_head * clips))
        if count:
            return Share(clips, tuple(i * heads // count for i in range(count)))
    return None


class _Taken(NamedTuple):
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    layer: Layer
    part: Share
    whole: tuple[int, int]


class Capture(Watcher):
    """The watcher of the node "VC-Attention Capture": one file a run, of the first matching call."""

    def __init__(self, options: CaptureOptions, node_id: str | None = None) -> None:
        self.options = options
        self.node_id = node_id
        self.lock = threading.Lock()
        #: What the node says after the run.
        self.text = ""
        self._taken = False
        self._open = False

    def begin_run(self, *_: object) -> None:
        """A sampler starts."""
        with self.lock:
            super().begin_run()
            self.text, self._taken, self._open = "", False, True

    def end_run(self, *_: object) -> None:
        """A sampler ends: the node says what was saved, or why nothing was."""
        with self.lock:
            was_open, self._open = self._open, False
            if not was_open:
                return
            if not self.text:
                self.text = not_captured(self.options.layer.strip(), self.options.step)
            text = self.text
        host.show_text(text, self.node_id)
        host.log.info("VC-Attention Capture: %s", text)

    def before(self, forward: Forward, layer: Layer, call: Call, route: Route) -> None:
        """Copy the chosen call on its device; the copy to the host waits for the end of the pass."""
        if self._taken or not self.options.takes(layer, forward.position.step):
            return
        with self.lock:
            if self._taken:
                return
            self._taken = True
        q, k, v = call.heads_first()
        batch, heads = q.shape[:2]
        of_head = sum(t.shape[2] * t.shape[3] * t.element_size() for t in (q, k, v))
        part = share(batch, heads, of_head, self.options.max_mb * 1_000_000)
        if part is None:
            self.text = too_small(-(-of_head // 1_000_000), self.options.max_mb)
            return
        with host.outside_malloc_graph():
            # Slices, not an index tensor: making one on the device would wait for it.
            tensors = {
                name: torch.stack([t[: part.clips, head] for head in part.heads], 1)
                for name, t in zip("qkv", (q, k, v), strict=True)
            }
        scale = call.keywords.get("scale")
        if scale is not None:
            tensors["scale"] = torch.tensor(float(scale), dtype=torch.float64)
        metadata = _metadata(forward, layer, call, route, part)
        forward.kept.setdefault(self, []).append(_Taken(tensors, metadata, layer, part, (batch, heads)))

    def end_pass(self, forward: Forward) -> None:
        """Write what the pass has left: one wait for the device."""
        for taken in forward.kept.pop(self, ()):
            tensors = {name: tensor.cpu().contiguous() for name, tensor in taken.tensors.items()}
            try:
                file = write_numbered(self.options.filename_prefix.strip(), tensors, taken.metadata)
            except FileError as error:
                self.text = capture_failed(str(error))
                host.log.warning("VC-Attention Capture: %s", self.text)
                continue
            (batch, heads), part = taken.whole, taken.part
            step = forward.position.step + 1
            self.text = captured(file.as_posix(), taken.layer.name, step, len(part.heads), heads, part.clips, batch)
            host.show_text(self.text, self.node_id)

    def fail(self, error: Exception) -> None:
        """Copying met a problem (mostly a lack of memory): the run goes on without a capture."""
        super().fail(error)
        why = "out of memory" if host.is_out_of_memory(error) else type(error).__name__
        self.text = capture_failed(why)


def _metadata(forward: Forward, layer: Layer, call: Call, route: Route, part: Share) -> dict[str, str]:
    """What a reader of the file has to know. Nothing in it names a person, a machine or a folder."""
    position = forward.position
    facts = {
        "format": FORMAT,
        "schema": "1",
        "version": host.pack_version(),
        "family": forward.session.stats.family,
        "layer": layer.name,
        "block_type": layer.block_type,
        "block_index": layer.block_index,
        "call": layer.ordinal + 1,
        "step": position.step + 1,
        "steps": position.steps,
        "phase": position.phase,
        "sigma": forward.sigma,
        "plan": route.plan.encode(),
        "backend": route.backend,
        "groups": forward.session.options.groups,
        "shape_q": [call.q.shape[0], call.heads, call.lq, call.head_dim],
        "shape_kv": [call.k.shape[0], call.heads, call.lkv, call.head_dim],
        "clips": part.clips,
        "heads": list(part.heads),
        "conditionings": len(forward.branches),
        "device": device_name(call.q.device),
        "torch": torch.__version__,
    }
    return {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in facts.items()}
