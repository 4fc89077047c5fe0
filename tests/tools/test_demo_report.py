"""The report, the strip and the numbers from a recorded run (data/demo_run) and drawn clips."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vc_attention.tools.demo import clips, report

DATA = Path(__file__).resolve().parent / "data" / "demo_run"
RUNS = ("plain", "vc_attention", "four_bit", "no_attention")


def draw(path: Path, offset: int = 0, frames: int = 6, still: int = 0) -> None:
    """An animated image of moving colour; `offset` shifts every value, the first `still` frames are the same."""
    y, x = np.mgrid[0:48, 0:64]
    pictures = []
    for t in range(frames):
        t = max(t, still)
        frame = np.stack([2 * x + 4 * t, 2 * y + 60, 120 - x + y], axis=-1) + offset
        pictures.append(Image.fromarray(np.clip(frame, 0, 255).astype(np.uint8)))
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=125, lossless=True)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(DATA, folder)
    for name, offset in zip(RUNS, (0, 1, 8, 60), strict=True):
        draw(folder / f"{name}.webp", offset)
    return folder


@pytest.fixture
def made(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    report.write(run, out)
    return out


class Page(HTMLParser):
    """Attributes that load something, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data", "srcset")]
        if tag not in ("meta", "img", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_all_files_are_there(made):
    assert {path.name for path in made.iterdir()} == {
        "plain.webp",
        "vc_attention.webp",
        "difference.png",
        "report.html",
        "numbers.json",
    }


def test_the_page_is_whole_and_loads_nothing(made):
    text = (made / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.loads and all(value.startswith(("data:image/", "#")) for value in page.loads)
    assert not re.search(r"url\((?!#)|@import|<script|<link", text)
    assert "$" not in re.sub(r"base64,[^\"]*", "", text)
    assert text.count("<svg ") == 2


def test_the_plots_take_their_colours_from_the_page(made):
    text = (made / "report.html").read_text(encoding="utf-8")
    assert "#0102" not in text
    used = set(re.findall(r"var\((--\w+)\)", text))
    light, dark = (set(re.findall(r"(--\w+):", block)) for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL))
    assert used <= light == dark


def test_the_counts_and_reasons_are_those_of_the_recording(made):
    words = " ".join(" ".join(Page((made / "report.html").read_text(encoding="utf-8")).words).split())
    stages = [json.loads(path.read_text()) for path in sorted(DATA.glob("records_*.json"))]
    counts = report.totals(stages)
    assert counts["accelerated"] == counts["grouped"] + counts["reused"] + counts["plain"] > 0
    assert f"{counts['accelerated']} attention calls of the run went through VC-Attention" in words
    assert all(counts[word] for word in ("grouped", "reused", "plain", "declined"))
    for stage in stages:
        assert stage["stage"] in words
        for code in stage["declined"]:
            assert stage["reasons"][code] in words


def test_steps_of_the_second_sampler_count_on(run):
    loaded = report.load(run)
    assert loaded.steps == sum(stage["steps"] for stage in loaded.stages)
    assert sorted({call["number"] for call in loaded.calls}) == list(range(1, loaded.steps + 1))
    assert loaded.switches == [loaded.stages[0]["steps"]]
    assert len(loaded.calls) == loaded.layers * loaded.steps


def test_the_heat_table_has_a_cell_for_each_call(made, run):
    text = (made / "report.html").read_text(encoding="utf-8")
    loaded = report.load(run)
    heat = text[text.index('<table class="heat">') :].partition("</table>")[0]
    assert heat.count("<td style") == len(loaded.calls)
    worst = max(loaded.calls, key=lambda call: call["error"])
    assert f">{100 * worst['error']:.2f}<" in heat


def test_the_gain_is_the_mean_over_smoothed_calls():
    calls = [
        {"phase": "group", "error": 0.01, "error_without_smoothing": 0.02},
        {"phase": "reuse", "error": 0.03, "error_without_smoothing": 0.04},
        {"phase": "plain", "error": 0.5, "error_without_smoothing": 0.5},
    ]
    assert report.smoothing_gain(calls) == (pytest.approx(0.02), pytest.approx(0.03))
    assert report.smoothing_gain(calls[2:]) is None
    assert report.smoothing_gain(calls, plain=True) == (0.5, 0.5)
    assert report.ungrouped_error(calls) is None
    assert report.ungrouped_error([{"error_without_grouping": 0.2}, {"error_without_grouping": None}]) == 0.2


def test_numbers_are_json_and_agree_with_the_clips(made):
    numbers = json.loads((made / "numbers.json").read_text())
    assert numbers["clips"]["vc_attention"]["largest"] == 1
    assert numbers["clips"]["vc_attention"]["psnr"] == pytest.approx(20 * math.log10(255), abs=0.05)
    assert numbers["clips"]["no_attention"]["psnr"] < numbers["clips"]["four_bit"]["psnr"]


def test_equal_clips_are_called_so(run, tmp_path):
    shutil.copy2(run / "plain.webp", run / "vc_attention.webp")
    report.write(run, tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "the same to the last pixel" in text and "identical" in text
    assert json.loads((tmp_path / "numbers.json").read_text())["clips"]["vc_attention"]["psnr"] is None


def test_smoothing_that_does_not_help_is_not_praised(run, tmp_path):
    path = run / "records_0.json"
    stage = json.loads(path.read_text())
    for call in stage["calls"]:
        call["error_without_smoothing"] = call["error"] / 2
    path.write_text(json.dumps(stage))
    report.write(run, tmp_path)
    assert "Smoothing did not help in this run" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_text_from_the_run_cannot_break_the_page(run, tmp_path):
    path = run / "records_1.json"
    stage = json.loads(path.read_text())
    stage["notes"] = ["<script>alert(1)</script> $x"]
    path.write_text(json.dumps(stage))
    report.write(run, tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;" in text and "<script" not in text


def test_a_run_without_accelerated_calls_says_what_the_node_said(run, tmp_path):
    for path in run.glob("records_*.json"):
        stage = json.loads(path.read_text())
        stage.update(calls=[], summary="No attention call was accelerated.\n8 declined: masked")
        path.write_text(json.dumps(stage))
    with pytest.raises(ValueError, match="8 declined: masked"):
        report.write(run, tmp_path)
    assert list(tmp_path.glob("*.html")) == []


def test_merged_frames_are_taken_apart(tmp_path):
    draw(tmp_path / "a.webp", frames=7, still=3)
    with Image.open(tmp_path / "a.webp") as image:
        assert image.n_frames == 4  # the writer made one frame of the first four
    clip = clips.read_clip(tmp_path / "a.webp")
    assert clip.shape == (7, 48, 64, 3)
    assert (clip[0] == clip[3]).all() and (clip[3] != clip[4]).any()


def test_comparison_of_known_clips():
    reference = np.full((3, 16, 16, 3), 100, np.uint8)
    clip = reference.copy()
    clip[1, :8] += 5
    compared = clips.compare(clip, reference)
    assert compared.psnr == pytest.approx(10 * math.log10(255**2 / (25 / 6)))
    assert compared.largest == 5 and compared.changed == pytest.approx(1 / 6)
    assert math.isinf(compared.psnr_of_frames[0]) and math.isfinite(compared.psnr_of_frames[1])
    assert compared.ssim < 1
    same = clips.compare(reference, reference)
    assert math.isinf(same.psnr) and same.ssim == 1.0 and same.largest == 0
    with pytest.raises(ValueError, match="differ in size"):
        clips.compare(clip[:2], reference)


def test_the_strip_shows_both_clips_and_the_magnified_difference():
    reference = np.full((4, 32, 40, 3), 90, np.uint8)
    clip = reference + 3
    picture = np.asarray(clips.strip(reference, clip, ("a", "b")))
    rows = [22 + 10 + i * (22 + 32) for i in range(3)]
    for frame in range(4):
        x = 4 + frame * 44 + 20
        assert [int(picture[row, x, 0]) for row in rows] == [90, 93, 128 + 3 * clips.GAIN]


def test_the_magnified_difference_does_not_wrap_around():
    low, high = np.zeros((1, 2, 2, 3), np.uint8), np.full((1, 2, 2, 3), 255, np.uint8)
    assert (clips.magnified(high, low) == 255).all() and (clips.magnified(low, high) == 0).all()
