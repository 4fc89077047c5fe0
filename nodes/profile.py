"""A quality profile: which layers of one model stay in 16 bit, and how that was measured. A small safetensors file.

Tensors, one entry a layer: block_index int32 (-1 where the model does not number its blocks), block_type int32 (a
place in the metadata's list, -1 for none), ordinal int32, dense uint8 (1: stays in 16 bit), psnr_db fp32 (NaN: not
measured; infinite: equal to exact attention) and relative_l2 fp32. Everything else is in the metadata.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import host
from .files import FileError, write_whole
from .state import Layer

FORMAT = "vc_attention_profile"
SCHEMA = 1
FOLDER = Path("vc_attention") / "profiles"
SUFFIX = ".safetensors"
#: A profile holds a few numbers for each of some hundred layers; a larger file is something else.
LARGEST_BYTES = 4 << 20
MOST_LAYERS = 16384

_NAME = re.compile(r"\w[\w .+-]{0,79}")
_TENSORS = {
    "block_index": torch.int32,
    "block_type": torch.int32,
    "ordinal": torch.int32,
    "dense": torch.uint8,
    "psnr_db": torch.float32,
    "relative_l2": torch.float32,
}


class ProfileError(ValueError):
    """The profile cannot be used or saved; the text is the sentence for the creator."""


@dataclass(frozen=True)
class ProfileLayer:
    """What a profile says of one layer. psnr_db: NaN when it was not measured."""

    layer: Layer
    dense: bool
    psnr_db: float = math.nan
    relative_l2: float = math.nan


@dataclass(frozen=True)
class Profile:
    """Decisions for the layers of one model.

    family: as `families.family_of` names it. heads: of its self-attention, 0 when unknown. plan: the arithmetic that
    was measured, as `Plan.encode` writes it, empty when nothing was. budget_db: 0 for none. measured: how the numbers
    came about (steps, rows, tokens, backend), for people. version: the pack's.
    """

    family: str
    heads: int
    layers: tuple[ProfileLayer, ...]
    plan: str = ""
    budget_db: float = 0.0
    measured: dict[str, object] = field(default_factory=dict)
    version: str = ""

    @property
    def dense(self) -> frozenset[Layer]:
        """The layers that stay in 16 bit."""
        return frozenset(entry.layer for entry in self.layers if entry.dense)


def check_name(name: str) -> str:
    """The name without its suffix. ProfileError when it cannot be the name of a file in one folder."""
    plain = name.strip().removesuffix(SUFFIX)
    if not _NAME.fullmatch(plain) or plain != plain.rstrip(" ."):
        raise ProfileError(
            f"A profile cannot be called {name.strip()[:40]!r}: use letters, digits, spaces, and . + - _ in its name."
        )
    return plain


def path_of(name: str) -> Path:
    """Where the profile `name` lives: vc_attention/profiles in ComfyUI's output folder."""
    return host.output_folder() / FOLDER / (check_name(name) + SUFFIX)


def save(profile: Profile, path: Path) -> None:
    """Write `profile`, whole or not at all, in the place of an older one of that name. ProfileError if it cannot be."""
    types = sorted({str(e.layer.block_type) for e in profile.layers if e.layer.block_type is not None})
    rows = [
        (
            -1 if e.layer.block_index is None else e.layer.block_index,
            -1 if e.layer.block_type is None else types.index(str(e.layer.block_type)),
            e.layer.ordinal,
            e.dense,
            e.psnr_db,
            e.relative_l2,
        )
        for e in profile.layers
    ]
    columns = zip(*rows, strict=True) if rows else ((),) * len(_TENSORS)
    tensors = {
        name: torch.tensor(list(column), dtype=dtype)
        for (name, dtype), column in zip(_TENSORS.items(), columns, strict=True)
    }
    metadata = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "version": profile.version or host.pack_version(),
        "family": profile.family,
        "heads": str(profile.heads),
        "plan": profile.plan,
        "budget_db": repr(profile.budget_db),
        "block_types": json.dumps(types),
        "measured": json.dumps(profile.measured),
    }
    try:
        write_whole(path, tensors, metadata)
    except FileError as error:
        raise ProfileError(f"The profile {path.stem} was not saved: {error}.") from error


def load(name: str) -> Profile:
    """Read the profile called `name`. ProfileError, with the whole sentence, when it is missing, damaged or foreign."""
    path = path_of(name)
    shown = f"The profile {path.stem}"
    where = f"{FOLDER.as_posix()} in ComfyUI's output folder"
    if not path.is_file():
        raise ProfileError(f"{shown} is not in {where}, so the run goes on without it.")
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ValueError("too large")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ProfileError(f"{shown} is another kind of safetensors file, so the run goes on without it.")
            if metadata.get("schema") != str(SCHEMA):
                raise ProfileError(
                    f"{shown} was saved by another version of VC-Attention ({metadata.get('version', 'unknown')[:20]}) "
                    "in a form that this one does not read, so the run goes on without it."
                )
            return _read({key: file.get_tensor(key) for key in _TENSORS}, metadata)
    except ProfileError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ProfileError(f"{shown} is damaged ({type(error).__name__}), so the run goes on without it.") from error


def _read(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Profile:
    """The profile in a file's content; ValueError, KeyError or TypeError when it makes no sense."""
    count = tensors["dense"].numel()
    if count > MOST_LAYERS:
        raise ValueError("too many layers")
    for key, dtype in _TENSORS.items():
        if tensors[key].shape != (count,) or tensors[key].dtype != dtype:
            raise ValueError(key)
    types = json.loads(metadata["block_types"])
    measured = json.loads(metadata["measured"])
    if not isinstance(types, list) or not all(isinstance(t, str) for t in types) or not isinstance(measured, dict):
        raise ValueError("metadata")
    layers = []
    columns = (tensors[key].tolist() for key in _TENSORS)
    for index, kind, ordinal, dense, psnr, error in zip(*columns, strict=True):
        if min(index, kind) < -1 or ordinal < 0 or dense not in (0, 1) or kind >= len(types):
            raise ValueError("a layer")
        layer = Layer(None if kind < 0 else types[kind], None if index < 0 else index, ordinal)
        layers.append(ProfileLayer(layer, bool(dense), psnr, error))
    budget = float(metadata["budget_db"])
    if not math.isfinite(budget):
        raise ValueError("budget_db")
    return Profile(
        metadata["family"],
        int(metadata["heads"]),
        tuple(layers),
        metadata["plan"],
        budget,
        measured,
        metadata["version"],
    )
