"""VC-Attention Compare against the formulas and against scikit-image, its texts, its strip and its plot."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from types import ModuleType

import pytest
import torch
from vc_attention.nodes import compare, compare_report, host
from vc_attention.nodes.strip import Strip

HAS_KORNIA = importlib.util.find_spec("kornia") is not None
needs_kornia = pytest.mark.skipif(not HAS_KORNIA, reason="kornia is not installed")
LABELS = ("16 bit", "8-bit")


def clips(frames: int = 3, height: int = 40, width: int = 56, noise: float = 0.05):
    """A smooth clip, and the same with noise that grows from frame to frame."""
    g = torch.Generator().manual_seed(frames)
    coarse = torch.rand(frames, 3, 5, 7, generator=g)
    a = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1).movedim(1, -1)
    strength = noise * torch.arange(1, frames + 1)[:, None, None, None] / frames
    return a, (a + strength * torch.randn(a.shape, generator=g)).clamp(0, 1)


def run(a, b, **keywords):
    found, frames = compare.start(a, b, LABELS, **keywords)
    found.frames.extend(frames())
    return found


def test_psnr_is_the_formula_for_each_frame_and_for_the_clip_as_one_signal():
    a, b = clips()
    found = run(a, b)
    errors = (a.double() - b.double()).square().mean(dim=(1, 2, 3))
    assert [frame.psnr for frame in found.frames] == pytest.approx((-10 * errors.log10()).tolist(), abs=1e-4)
    assert found.psnr == pytest.approx(float(10 * torch.log10(1 / (a.double() - b.double()).square().mean())), abs=1e-4)
    assert found.lowest == 2
    # a constant difference of 0.1 is 20 dB
    assert run(torch.zeros(1, 16, 16, 3), torch.full((1, 16, 16, 3), 0.1)).psnr == pytest.approx(20.0, abs=1e-4)


@needs_kornia
@pytest.mark.parametrize("at_once", [1 << 20, 56 * 4, 1])
def test_ssim_is_scikit_images_whatever_part_of_a_frame_is_looked_at_at_once(monkeypatch, at_once):
    metrics = pytest.importorskip("skimage.metrics")
    monkeypatch.setattr(compare, "_AT_ONCE", at_once)
    a, b = clips()
    a[0, :20] = 0.0  # flat and black, where the constants decide
    expected = [
        metrics.structural_similarity(
            x.double().numpy(), y.double().numpy(), data_range=1.0, channel_axis=2, gaussian_weights=True, sigma=1.5,
            use_sample_covariance=False,
        )
        for x, y in zip(a, b, strict=True)
    ]  # fmt: skip
    found = run(a, b)
    assert [frame.ssim for frame in found.frames] == pytest.approx(expected, abs=1e-5)
    assert found.mean("ssim") == pytest.approx(sum(expected) / 3, abs=1e-5)
    assert 0.2 < min(expected) < max(expected) < 0.999


def test_identical_clips_are_called_identical_and_the_json_has_null():
    a, _ = clips()
    found = run(a, a.clone())
    assert found.identical and found.psnr == math.inf and found.lowest is None
    assert "16 bit and 8-bit are identical." in compare_report.table(found)
    told = json.loads(compare_report.to_json(found))
    assert told["identical"] is True and told["psnr_db"] is None and told["lowest_frame"] is None
    assert [(f["frame"], f["psnr_db"], f["finite"]) for f in told["frames"]] == [(i, None, True) for i in (1, 2, 3)]
    if HAS_KORNIA:
        assert told["ssim"] == pytest.approx(1.0, abs=1e-6)


def test_one_equal_frame_does_not_make_the_clips_identical():
    a, b = clips()
    b[1] = a[1]
    found = run(a, b)
    told = json.loads(compare_report.to_json(found))
    assert not told["identical"] and told["frames"][1]["psnr_db"] is None and told["lowest_frame"] == 3
    assert told["psnr_db"] == pytest.approx(-10 * math.log10((a - b).square().mean()), abs=1e-3)
    text = compare_report.table(found)
    assert "frame 2" not in text and text.endswith("and 1 frame more")
    assert compare_report.plot(found).tensor().shape == (1, 900, 1200, 3)


def test_the_longer_clip_is_cut_and_the_node_says_so():
    a, b = clips()
    found = run(a, b[:2])
    assert len(found.frames) == 2
    assert "16 bit has 3 frames and 8-bit has 2: the first 2 of both were compared." in compare_report.table(found)
    told = json.loads(compare_report.to_json(found))
    assert (told["a"]["frames"], told["b"]["frames"], told["frames_compared"]) == (3, 2, 2)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ((2, 40, 56, 3), (2, 40, 48, 3), "16 bit has frames of 56 x 40 pixels and 8-bit of 48 x 40"),
        ((0, 40, 56, 3), (2, 40, 56, 3), "There are no frames to compare."),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(a, b, words):
    found = run(torch.rand(a), torch.rand(b))
    assert not found.frames and words in compare_report.table(found)
    told = json.loads(compare_report.to_json(found))
    assert words in told["problem"] and told["psnr_db"] is None and told["frames"] == []
    assert compare_report.plot(found).tensor().min() < 0.5  # the sentence is in the plot


def test_frames_that_are_not_finite_are_named_and_left_out():
    a, b = clips()
    clean = run(a[[0, 2]], b[[0, 2]])
    b[1, 0, 0, 0] = math.nan
    found = run(a, b)
    assert found.psnr == pytest.approx(clean.psnr) and found.mean("ssim") == pytest.approx(clean.mean("ssim"))
    assert "Frame 2 holds numbers that are not finite" in compare_report.table(found)
    told = json.loads(compare_report.to_json(found))
    assert [f["finite"] for f in told["frames"]] == [True, False, True] and told["frames"][1]["ssim"] is None
    every = run(a, torch.full_like(a, math.inf))
    assert every.psnr is None and "none could be measured" in compare_report.table(every)


def test_alpha_is_left_out():
    a, b = clips()
    other = torch.cat((b, torch.rand(*b.shape[:3], 1)), -1)
    assert [f.mse for f in run(a, other).frames] == [f.mse for f in run(a, b).frames]


def test_without_kornia_there_is_psnr_and_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "kornia.metrics", None)
    found = run(*clips())
    assert found.psnr is not None and found.mean("ssim") is None
    assert "SSIM needs kornia" in compare_report.table(found)
    assert json.loads(compare_report.to_json(found))["ssim"] is None


def test_a_broken_kornia_costs_ssim_only(monkeypatch):
    """It is installed, and fails in a way of its own when it is imported."""
    broken = ModuleType("kornia.metrics")

    def fail(name: str):
        raise RuntimeError("operator torchvision::nms does not exist")

    broken.__getattr__ = fail
    monkeypatch.setitem(sys.modules, "kornia.metrics", broken)
    found = run(*clips())
    assert found.psnr is not None and "SSIM needs kornia" in compare_report.table(found)


@pytest.mark.parametrize(
    ("device", "free", "chosen"),
    [
        ("cuda:0", (2 << 30) + 8001, "cuda:0"),
        ("cuda:0", (2 << 30) + 8000, "cpu"),
        ("cuda:0", None, "cpu"),
        ("mps", 64 << 30, "cpu"),
        ("cpu", None, "cpu"),
    ],
)
def test_frames_go_to_a_card_that_has_room_beside_the_models(monkeypatch, device, free, chosen):
    monkeypatch.setattr(host, "compute_device", lambda: torch.device(device))
    monkeypatch.setattr(host, "free_memory", lambda _: free)
    assert compare.device_for(1000) == torch.device(chosen)


def test_small_frames_have_no_ssim():
    found = run(torch.rand(1, 10, 40, 3), torch.rand(1, 10, 40, 3))
    assert found.mean("ssim") is None and "SSIM needs frames of at least 11 pixels" in compare_report.table(found)


def test_lpips_only_when_it_is_asked_for_and_there(monkeypatch):
    a, b = clips(2, 64, 64)
    monkeypatch.setitem(sys.modules, "lpips", None)
    assert "LPIPS" not in compare_report.table(run(a, b))
    assert "LPIPS needs the package lpips" in compare_report.table(run(a, b, lpips=True))

    class Network(torch.nn.Module):
        """As lpips.LPIPS: two pictures [N, 3, H, W] in 0..1 with normalize, one distance for each."""

        def __init__(self, net: str, verbose: bool) -> None:
            super().__init__()
            assert net == "alex" and verbose is False

        def forward(self, x, y, normalize):
            assert normalize and x.shape == y.shape == (1, 3, 64, 64) and x.dtype == torch.float32
            return (x - y).abs().mean()[None, None, None, None]

    package = ModuleType("lpips")
    package.LPIPS = Network
    monkeypatch.setitem(sys.modules, "lpips", package)
    found = run(a, b, lpips=True)
    assert [f.lpips for f in found.frames] == pytest.approx((a - b).abs().mean(dim=(1, 2, 3)).tolist())
    assert "LPIPS" in compare_report.table(found) and json.loads(compare_report.to_json(found))["lpips"] is not None

    def offline(**_: object):
        raise OSError("no route to host")

    package.LPIPS = offline
    assert "LPIPS could not be measured (OSError: no route to host)" in compare_report.table(run(a, b, lpips=True))


def test_a_long_clip_is_held_one_pair_of_frames_at_a_time():
    """Views of one frame stand for a clip of 200,000 frames, 500 GB: whatever copied it as a whole would fail."""
    a, b = (t[:1].expand(200_000, -1, -1, -1) for t in clips(1, 400, 525))
    _, frames = compare.start(a, b, LABELS)
    first = frames()
    assert next(first).mse == next(first).mse > 0


def test_the_table_is_lowest_first_and_short():
    a, b = clips(20)
    lines = compare_report.table(run(a, b)).splitlines()
    assert lines[0].startswith("20 frames compared: PSNR ") and lines[0].endswith("in frame 20.")
    head, overall, *rows = lines[lines.index("") + 1 : -1]
    assert head.split()[0] == "PSNR" and overall.startswith("overall")
    assert [row.split()[1] for row in rows] == [str(i) for i in range(20, 8, -1)]
    assert lines[-1] == "and 8 frames more"


def test_the_strip_has_both_pictures_untouched_under_a_bar():
    a, b = clips()
    strip = Strip(3, ((40, 56), (40, 56)), LABELS)
    for i in range(3):
        strip.put(i, a[i], b[i])
    height = strip.bar
    assert strip.tensor.shape == (3, 40 + height, 56 + 4 + 56, 3) and (40 + height) % 2 == 0
    assert torch.equal(strip.tensor[:, height:, :56], a) and torch.equal(strip.tensor[:, height:, 60:], b)
    assert strip.tensor[0, :height, :56].max() > 0.5  # the label
    empty = Strip(1, ((40, 56), (40, 56)), ("", ""))
    empty.put(0, a[0], b[0])
    assert empty.tensor[0, :height].max() < 0.2


def test_the_strip_takes_other_sizes_odd_heights_alpha_long_labels_and_nan():
    a, b = torch.rand(41, 30, 4), torch.rand(20, 50, 1)
    b[0, 0, 0], b[1, 0, 0] = math.nan, 7.0
    strip = Strip(1, ((41, 30), (20, 50)), ("a label that is much longer than its picture", "B"))
    strip.put(0, a, b, "31.20 dB   SSIM 0.9712")
    row = strip.tensor[0]
    assert (41 + strip.bar) % 2 == 0 and torch.equal(row[strip.bar :, :30], a[..., :3])
    assert row.isfinite().all() and row.max() <= 1 and row[strip.bar, 34].max() == 0
    assert torch.equal(row[strip.bar + 2 : strip.bar + 20, 34:], b[2:].expand(-1, -1, 3))
    assert row[: strip.bar, 30:34].std() < 0.01  # the long label was cut at its picture
