"""Two small files that make the demo's clip worth looking at: a Wan2.2 text-to-video model and a Wan VAE.

Nobody can ship Wan2.2 (14 billion weights), and a model of purely random weights only returns its noise. So these
weights are random where it does not matter and set by hand where the picture is made:

- the model (4 blocks, 2 heads of 128) is a denoiser whose only tool is self-attention: rotary position scores make each
  token look at a soft neighbourhood in space and time, the first block averages the noisy colours there, and the later
  blocks look along a direction of motion. Take attention away and nothing but noise is left;
- the VAE (7 channels instead of 96) maps latents to colour linearly, magnifies smoothly and saturates softly.

ComfyUI detects and loads both with its own loaders. The architecture, shapes and arithmetic are the real ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

HIDDEN = 256
HEADS = 2
HEAD_DIM = HIDDEN // HEADS
LAYERS = 4
CHANNELS = 16
PIXELS = 4 * CHANNELS  # values of one 2x2 patch of the latent
ROPE_PAIRS = (22, 21, 21)  # rotary pairs that Wan gives to time, height and width of a 128 wide head
NORM_WEIGHT = 1.4  # of the query and key norms: scores reach NORM_WEIGHT^2 * sqrt(HEAD_DIM)
CONTENT_SHARE = 0.15  # of the energy of q and k that depends on the token; the rest is position
VAE_CHANNELS = 7


@dataclass(frozen=True)
class Look:
    """Where one head looks: the width of its neighbourhood (standard deviation, in tokens) and the offset of its
    centre, both as (time, height, width)."""

    width: tuple[float, float, float]
    offset: tuple[float, float, float] = (0.0, 0.0, 0.0)


# Per block, per head. Block 0 gathers; the others follow a drift of about two tokens per latent frame.
LOOKS = (
    (Look((1.0, 1.15, 1.3)), Look((1.1, 2.5, 2.8))),
    (Look((0.8, 1.0, 1.2), (1.0, 0.5, 1.8)), Look((0.8, 1.0, 1.2), (-1.0, -0.5, -1.8))),
    (Look((0.9, 1.2, 1.2), (1.0, 0.5, 1.8)), Look((0.9, 1.2, 1.2), (-1.0, -0.5, -1.8))),
    (Look((0.8, 0.9, 0.9)), Look((1.1, 1.3, 1.6))),
)
# Rotary frequencies used per axis: low enough that one period covers the clip, so a head has one neighbourhood.
AXIS_PAIRS = ((1,), (1, 2), (2, 3))


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    q, _ = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))
    return q[:, :columns].float()


def _frequencies(axis: int) -> list[float]:
    pairs = ROPE_PAIRS[axis]
    return [10000.0 ** (-i / pairs) for i in range(pairs)]


def _position(look: Look) -> tuple[torch.Tensor, torch.Tensor]:
    """Biases of q and k of one head [HEAD_DIM]: their rotated product is a bump of the width and centre of `look`.

    exp(sum_i s_i cos(theta_i d)) is near a Gaussian of variance 1 / sum_i s_i theta_i^2.
    """
    q = torch.zeros(HEAD_DIM // 2, 2)
    k = torch.zeros(HEAD_DIM // 2, 2)
    unit = math.sqrt(HEAD_DIM) / NORM_WEIGHT**2  # energy of a pair per unit of score
    left = HEAD_DIM * (1.0 - CONTENT_SHARE)
    first = 0
    for axis, pairs in enumerate(ROPE_PAIRS):
        theta = _frequencies(axis)
        strength = 1.0 / (look.width[axis] ** 2 * sum(theta[i] ** 2 for i in AXIS_PAIRS[axis]))
        for i in AXIS_PAIRS[axis]:
            energy = strength * unit
            left -= energy
            phase = theta[i] * look.offset[axis]
            k[first + i] = math.sqrt(energy) * torch.tensor([math.cos(phase), math.sin(phase)])
            q[first + i, 0] = math.sqrt(energy)
        first += pairs
    if left < 0:
        raise ValueError(f"{look} asks for more score than q and k can carry; widen it.")
    # What is left is the same for every token and changes no weight: the key bias that SmoothK removes in real models.
    slow = HEAD_DIM // 2 - 1
    q[slow, 0] = k[slow, 0] = math.sqrt(left)
    return q.flatten(), k.flatten()


def _content(generator: torch.Generator) -> torch.Tensor:
    """A random projection [HEAD_DIM, HIDDEN] onto rotary pairs that hardly turn; unit hidden states give it
    CONTENT_SHARE of the head's energy."""
    weight = torch.zeros(HEAD_DIM, HIDDEN)
    rows = [2 * (sum(ROPE_PAIRS[:axis]) + i) for axis in range(3) for i in range(12, ROPE_PAIRS[axis] - 1)]
    rows += [row + 1 for row in rows]
    scale = math.sqrt(CONTENT_SHARE * HEAD_DIM / len(rows) / HIDDEN)
    weight[rows] = scale * torch.randn(len(rows), HIDDEN, generator=generator)
    return weight


class _Parts:
    """Orthonormal directions of the hidden state: the noisy patch, the clean colour, and the rest."""

    def __init__(self, generator: torch.Generator) -> None:
        basis = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
        basis[:, 0] = 1.0  # LayerNorm removes this direction
        q = torch.linalg.qr(basis).Q.float()
        self.noisy = q[:, 1 : 1 + PIXELS]  # [HIDDEN, channel * 4 + pixel]
        self.clean = q[:, 1 + PIXELS : 1 + PIXELS + CHANNELS]  # [HIDDEN, channel]
        self.anchor = q[:, 1 + PIXELS + CHANNELS]  # [HIDDEN]
        self.rest = q[:, 2 + PIXELS + CHANNELS :]
        # [HIDDEN, channel]: the sum of a patch's four pixels, unit length
        self.colour = self.noisy.reshape(HIDDEN, CHANNELS, 4).sum(-1) / 2.0


def _attention(block: int, parts: _Parts, generator: torch.Generator) -> dict[str, torch.Tensor]:
    q_bias, k_bias, v_bias, q_weight, k_weight, v_weight = [], [], [], [], [], []
    output = torch.zeros(HIDDEN, HIDDEN)
    source = parts.colour if block == 0 else parts.clean
    gains = GATHER_GAIN if block == 0 else FOLLOW_GAIN
    for head, look in enumerate(LOOKS[block]):
        q, k = _position(look)
        q_bias.append(q)
        k_bias.append(k)
        q_weight.append(_content(generator))
        k_weight.append(_content(generator))
        carry = _orthonormal(HEAD_DIM, CHANNELS, generator)
        noise = VALUE_NOISE * torch.randn(HEAD_DIM, HIDDEN, generator=generator) / math.sqrt(HIDDEN)
        noise = noise - noise @ parts.anchor[:, None] * parts.anchor
        bias = 0.3 * torch.randn(HEAD_DIM, generator=generator)
        v_bias.append(bias - carry @ (carry.T @ bias))
        v_weight.append(carry @ source.T + noise - carry @ (carry.T @ noise))
        columns = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        output[:, columns] = gains[head] * parts.clean @ carry.T
        mix = torch.randn(parts.rest.shape[1], HEAD_DIM, generator=generator) / math.sqrt(HEAD_DIM)
        output[:, columns] += REST_GAIN * parts.rest @ mix
    return {
        "q.weight": torch.cat(q_weight),
        "q.bias": torch.cat(q_bias),
        "k.weight": torch.cat(k_weight),
        "k.bias": torch.cat(k_bias),
        "v.weight": torch.cat(v_weight),
        "v.bias": torch.cat(v_bias),
        "o.weight": output,
        "o.bias": torch.zeros(HIDDEN),
        "norm_q.weight": torch.full((HIDDEN,), NORM_WEIGHT),
        "norm_k.weight": torch.full((HIDDEN,), NORM_WEIGHT),
    }


GATHER_GAIN = (1.1, -1.0)
FOLLOW_GAIN = (0.45, 0.45)
VALUE_NOISE = 0.5
ANCHOR = 16.0
REST_GAIN = 0.15
KEEP = 2.7  # how strongly the output follows the noisy latent,
CLEAN = 2.2  # and how strongly the clean estimate


def model_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Weights for a Wan text-to-video network with the given parameter shapes (those of HIDDEN, LAYERS, ...)."""
    generator = torch.Generator().manual_seed(seed)
    parts = _Parts(generator)
    weights = {}
    for name, shape in shapes.items():
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else 1
        scale = 0.1 / math.sqrt(fan_in) if len(shape) > 1 else 0.0
        weights[name] = scale * torch.randn(shape, generator=generator)
        if name.endswith(("norm3.weight", "cross_attn.norm_q.weight", "cross_attn.norm_k.weight")):
            weights[name] = torch.ones(shape)
    # Conv3d weight [HIDDEN, channel, 1, 2, 2]: the patch goes to its own directions, unchanged.
    weights["patch_embedding.weight"] = parts.noisy.reshape(HIDDEN, CHANNELS, 1, 2, 2).clone()
    weights["patch_embedding.bias"] = ANCHOR * parts.anchor
    for block in range(LAYERS):
        prefix = f"blocks.{block}."
        for name, value in _attention(block, parts, generator).items():
            weights[prefix + "self_attn." + name] = value
        gates = torch.zeros(1, 6, HIDDEN)
        gates[:, 2] = 1.0
        gates[:, 5] = 1.0
        weights[prefix + "modulation"] = gates
        ffn_in = weights[prefix + "ffn.0.weight"].shape
        read = torch.cat([parts.clean, parts.rest], dim=1)
        weights[prefix + "ffn.0.weight"] = (
            torch.randn(ffn_in[0], read.shape[1], generator=generator) @ read.T / math.sqrt(read.shape[1])
        )
        write = torch.randn(CHANNELS, ffn_in[0], generator=generator) / math.sqrt(ffn_in[0])
        write = write - write.mean(dim=1, keepdim=True)
        weights[prefix + "ffn.2.weight"] = 0.25 * parts.clean @ write
    # Patches leave as [pixel, channel]; v = KEEP * noisy - CLEAN * clean.
    out = KEEP * parts.noisy.reshape(HIDDEN, CHANNELS, 4).permute(2, 1, 0).reshape(PIXELS, HIDDEN)
    out = out - CLEAN * parts.clean.T.repeat(4, 1)
    weights["head.head.weight"] = out.contiguous()
    weights["head.head.bias"] = torch.zeros(PIXELS)
    weights["head.modulation"] = torch.zeros(1, 2, HIDDEN)
    return weights


def vae_weights(shapes: dict[str, tuple[int, ...]], mean: torch.Tensor, std: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weights for a Wan 2.1 VAE of VAE_CHANNELS channels with the given parameter shapes.

    mean, std: the 16 latent statistics with which ComfyUI scales Wan latents; the decoder takes them off again.

    The decoder carries four channels, red, green, blue and a constant, and magnifies them with smooth kernels. The
    last norm divides colour by sqrt(2 |colour|^2 + constant^2), a soft saturation. Each colour arrives there with both
    signs, so that SiLU, which is not linear, cancels: silu(a) - silu(-a) = a.
    """
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name.endswith("gamma"):
            weights[name] = torch.ones(shape)
    mix = PALETTE_GAIN * _orthonormal(CHANNELS, 3, torch.Generator().manual_seed(PALETTE_SEED)).T  # [3, channel]
    scaled = mix / std
    weights["conv2.weight"][:3, :, 0, 0, 0] = scaled
    weights["conv2.bias"][:3] = -scaled @ mean
    weights["conv2.bias"][3] = 1.0
    blur = torch.tensor([1.0, 2.0, 1.0]) / 4.0
    plane = blur[:, None] * blur[None, :]
    for i in range(4):
        weights["decoder.conv1.weight"][i, i, 2] = plane
        # wider stages begin with a 1x1 shortcut
        for name in shapes:
            if name.startswith("decoder.") and name.endswith("shortcut.weight"):
                weights[name][i, i] = 1.0
            elif name.startswith("decoder.") and name.endswith("time_conv.weight"):
                half = shapes[name][0] // 2  # two frames leave: halfway to the newest frame, and the newest
                weights[name][i, i, 1:, 0, 0] = 0.5
                weights[name][half + i, i, 2, 0, 0] = 1.0
    resamples = [name for name in shapes if name.startswith("decoder.") and name.endswith("resample.1.weight")]
    for name in resamples[:-1]:
        for i in range(4):
            weights[name][i, i] = plane
    for i in range(3):
        weights[resamples[-1]][2 * i, i] = plane
        weights[resamples[-1]][2 * i + 1, i] = -plane
        weights["decoder.head.2.weight"][i, 2 * i, 2, 1, 1] = 1.0
        weights["decoder.head.2.weight"][i, 2 * i + 1, 2, 1, 1] = -1.0
    weights[resamples[-1]][6, 3] = plane
    weights["decoder.head.0.gamma"] /= math.sqrt(2.0 * VAE_CHANNELS) / CONTRAST
    return weights


PALETTE_SEED = 3
PALETTE_GAIN = 0.3
CONTRAST = 1.6
