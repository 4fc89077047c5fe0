"""Number formats: E4M3, E2M1, NVFP4 and INT8, each as codes on the format's grid and a scale.

Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3), OCP Microscaling Formats 1.0 (E2M1), NVIDIA NVFP4 (groups
of 16 elements with an E4M3 scale and an fp32 second level). All rounding is to nearest, ties to even, saturating.
A quantised tensor is kept as a pair (codes, scale) of fp32 tensors with `codes * scale` the value it stands for.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
INT8_MAX = 127.0
NVFP4_GROUP = 16

#: A scale that underflows to zero would divide by zero. Data this small is zero in every format here.
_TINY = torch.finfo(torch.float32).tiny


def e4m3(x: Tensor) -> Tensor:
    """Round fp32 `x` (any shape) to E4M3, saturating at +-448. Returns fp32 values; NaN stays NaN."""
    return e4m3_encode(x).to(torch.float32)


def e4m3_encode(x: Tensor) -> Tensor:
    """Round fp32 `x` (any shape) to a `torch.float8_e4m3fn` tensor, saturating at +-448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e4m3_decode(codes: Tensor) -> Tensor:
    """Values (fp32) of E4M3 bytes `codes` (uint8, any shape). Bytes 0x7F and 0xFF are NaN."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def e2m1(x: Tensor) -> Tensor:
    """Round fp32 `x` (any shape) to E2M1 {0, .5, 1, 1.5, 2, 3, 4, 6} with sign, saturating at +-6. Returns fp32."""
    magnitude = x.abs()
    # The spacing is .5 below 2, 1 below 4, 2 above; rounding x / spacing half-to-even is half-to-even on the mantissa.
    spacing = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign((torch.round(magnitude / spacing) * spacing).clamp(max=E2M1_MAX), x)


def int8(x: Tensor, scale: Tensor) -> Tensor:
    """INT8 codes (fp32 tensor of integers in -127..127) of `x / scale`; `scale` broadcasts to `x`."""
    return torch.round(x / scale).clamp(-INT8_MAX, INT8_MAX)


def amax_scale(amax: Tensor, largest: float) -> Tensor:
    """The scale that maps `amax` (fp32, >= 0) onto `largest`; 1 where `amax` is zero, so that zeros stay zeros."""
    scale = amax / largest
    return torch.where(scale > _TINY, scale, torch.ones_like(scale))


def nvfp4_second_level(x: Tensor) -> Tensor:
    """The fp32 second-level scale of NVFP4, amax / (448 * 6) of each batch and head: x [B, H, L, D] -> [B, H, 1, 1]."""
    return amax_scale(x.abs().amax(dim=(-2, -1), keepdim=True), E4M3_MAX * E2M1_MAX)


def nvfp4(x: Tensor, second_level: Tensor | float, adaptive: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise `x` (fp32, [..., n]) to NVFP4 in groups of 16 along the last dimension.

    The group scale is E4M3(amax / 6 / second_level), and elements are divided by that **rounded** scale. A last group
    shorter than 16 is a group of its own. `second_level` broadcasts to [..., n].
    adaptive: a group may put its amax on 4 instead of 6, whichever has the smaller squared error: between 4 and 6 E2M1
    has nothing, so values near 5/6 of the amax fare badly on 6 ("Four Over Six", arXiv 2512.02010).
    Returns codes [..., n] on the E2M1 grid and scales [..., n], both fp32, with codes * scales the value.
    """
    n = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -n % NVFP4_GROUP))
    groups = padded.unflatten(-1, (-1, NVFP4_GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    if isinstance(second_level, Tensor):
        second_level = second_level.unsqueeze(-1)
    codes, scale = _nvfp4_groups(groups, amax / E2M1_MAX, second_level)
    if adaptive:
        codes_4, scale_4 = _nvfp4_groups(groups, amax / 4, second_level)
        error = (codes * scale - groups).square().sum(-1, keepdim=True)
        error_4 = (codes_4 * scale_4 - groups).square().sum(-1, keepdim=True)
        codes, scale = torch.where(error_4 < error, codes_4, codes), torch.where(error_4 < error, scale_4, scale)
    return codes.flatten(-2)[..., :n], scale.expand_as(groups).flatten(-2)[..., :n]


def _nvfp4_groups(groups: Tensor, scale: Tensor, second_level: Tensor | float) -> tuple[Tensor, Tensor]:
    """Codes of groups [..., 16] and their scales [..., 1] as E4M3 of `second_level` stores them."""
    scale = e4m3(scale / second_level) * second_level
    return e2m1(torch.where(scale > 0, groups / torch.where(scale > 0, scale, 1.0), 0.0)), scale
