"""Sorting and grouping by the project's own launchers on the interpreter, for the kernels of any architecture."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from vc_attention.kernels.launch import prepare as launch
from vc_attention.kernels.spec import grouping as spec_grouping

from . import on_torch


def check_sorting(folder: Path) -> None:
    """The token order is the stable argsort, over more than one chunk of 4096 tokens."""
    labels = torch.randint(256, (1, 1, 4200), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    library = on_torch.InterpretedLibrary(folder, schedule="random")
    with library.in_use():
        order = launch.token_order(library, labels)
    assert isinstance(order, Tensor)
    assert torch.equal(order.long(), torch.argsort(labels, dim=-1, stable=True))


def grouping(
    folder: Path, v: Tensor, groups: int, previous: Tensor | None = None, poison: int = 0xA5, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Labels and centroids of v. previous: centroids of a warm start. poison: of memory that nobody has written."""
    library = on_torch.InterpretedLibrary(folder, poison, schedule="random", seed=seed)
    with library.in_use():
        found = launch.group(library, v, groups, previous)
    assert isinstance(found, tuple)
    labels, centroids = found
    for tensor in (labels, *([] if groups else [centroids])):
        assert torch.isfinite(tensor).all()
    return labels, centroids


def check_grouping(folder: Path, dtype: torch.dtype) -> None:
    """Cold and warm start: the specification's labels; nothing that was never written has a say."""
    g = torch.Generator().manual_seed(3)
    centres, pick = torch.randn(1, 1, 7, 128, generator=g), torch.randint(7, (1, 1, 300), generator=g)
    v = (torch.randn(1, 1, 300, 128, generator=g) + 2 * centres[0, 0][pick]).to(dtype)
    labels, centroids = grouping(folder, v, 7)
    again = grouping(folder, v, 7, poison={torch.bfloat16: 0xFF, torch.float16: 0x7F}[dtype], seed=1)
    assert torch.equal(again[0], labels)
    assert torch.equal(again[1], centroids)
    theirs, their_centroids = spec_grouping.group(v, 7)
    assert torch.equal(labels, theirs)
    assert torch.allclose(centroids, their_centroids, atol=1e-5)
    warm, moved = grouping(folder, v, 0, centroids)
    theirs, their_centroids = spec_grouping.group(v, previous=centroids)
    assert torch.equal(warm, theirs)
    assert torch.allclose(moved, their_centroids, atol=1e-5)
