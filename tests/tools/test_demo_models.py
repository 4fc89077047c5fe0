"""The demo's tiny model and VAE: what their hand-set weights promise, in real ComfyUI."""

from __future__ import annotations

import pytest
import torch
from vc_attention.tools.demo import FILES, models


def test_position_scores_peak_where_the_head_looks():
    for looks in models.LOOKS:
        for look in looks:
            q, k = models._position(look)
            assert q.square().sum() == pytest.approx((1 - models.CONTENT_SHARE) * models.HEAD_DIM, rel=1e-4)
            for axis in range(3):
                scores = [_score(q, k, axis, distance) for distance in torch.arange(-3.0, 3.01, 0.05)]
                best = -3 + 0.05 * scores.index(max(scores))
                assert best == pytest.approx(look.offset[axis], abs=0.051)


def test_the_neighbourhood_has_the_width_that_was_asked_for():
    look = models.Look((1.0, 1.5, 1.7))
    q, k = models._position(look)
    for axis, width in enumerate(look.width):
        drop = _score(q, k, axis, 0.0) - _score(q, k, axis, 0.5)
        assert drop == pytest.approx(0.5**2 / (2 * width**2), rel=0.05)


def test_a_look_that_is_too_narrow_is_refused():
    with pytest.raises(ValueError, match="widen it"):
        models._position(models.Look((0.2, 0.2, 0.2)))


def _score(q: torch.Tensor, k: torch.Tensor, axis: int, distance: float) -> float:
    """Score of a query at `distance` along one axis from the key, as rotary embedding makes it."""
    q, k = (models.NORM_WEIGHT * torch.view_as_complex(t.view(-1, 2)) for t in (q, k))
    angles = torch.zeros(models.HEAD_DIM // 2)
    first = sum(models.ROPE_PAIRS[:axis])
    pairs = models.ROPE_PAIRS[axis]
    angles[first : first + pairs] = float(distance) * torch.tensor(models._frequencies(axis))
    turned = q * torch.polar(torch.ones_like(angles), angles)
    return float((turned * k.conj()).real.sum()) / models.HEAD_DIM**0.5


@pytest.fixture(scope="module")
def written(request, tmp_path_factory):
    from vc_attention.tools.demo import write_models
    from vc_attention.tools.tiny_models import import_comfy  # noqa: F401 - conftest has called it

    folder = tmp_path_factory.mktemp("demo_models")
    write_models.write(_comfyui(request.config), folder)
    return folder


def _comfyui(config):
    import pathlib

    import comfy

    given = config.getoption("--comfyui")
    return given or pathlib.Path(next(iter(comfy.__path__))).parent


@pytest.mark.comfy
def test_comfyui_detects_and_loads_both(written):
    import comfy.sd
    import comfy.utils

    for name in ("high", "low"):
        patcher = comfy.sd.load_diffusion_model(str(written / "diffusion_models" / FILES[name]))
        network = patcher.model.diffusion_model
        assert (len(network.blocks), network.num_heads, type(patcher.model).__name__) == (4, 2, "WAN21")
    assert sum(path.stat().st_size for path in written.rglob("*.safetensors")) < 100e6


@pytest.mark.comfy
def test_the_vae_turns_a_colour_into_that_colour(written):
    """A constant latent gives a constant picture, a larger one a stronger colour that never saturates hard."""
    import comfy.latent_formats
    import comfy.sd
    import comfy.utils

    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(written / "vae" / FILES["vae"])))
    statistics = comfy.latent_formats.Wan21()
    direction = torch.randn(1, 16, 1, 1, 1, generator=torch.Generator().manual_seed(2))
    pictures = []
    for strength in (0.0, 1.0, 4.0):
        latent = statistics.process_out(strength * direction).expand(1, 16, 2, 6, 8)
        with torch.no_grad():
            picture = vae.decode(latent)
        assert picture.shape == (1, 5, 48, 64, 3)
        assert picture.flatten(0, 3).std(dim=0).max() < 1e-3
        pictures.append(picture[0, 0, 24, 32])
    grey, soft, strong = pictures
    assert torch.allclose(grey, torch.full((3,), 0.5), atol=1e-3)
    assert (strong - 0.5).norm() > 1.5 * (soft - 0.5).norm() > 0.05
    assert strong.min() > 0 and strong.max() < 1
