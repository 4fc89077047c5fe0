"""One wording everywhere: the node's tooltips, the locale file, and the help page."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
from vc_attention.kernels import cards
from vc_attention.nodes.capture import CaptureOptions
from vc_attention.nodes.families import FAMILIES, HUNYUAN_VIDEO_15
from vc_attention.nodes.messages import DESCRIPTION, DISPLAY_NAME, REASONS, SHORT, TOOLTIPS
from vc_attention.nodes.options import PatchOptions
from vc_attention.nodes.quality import QualityOptions
from vc_attention.nodes.texts import NODES

ROOT = Path(__file__).resolve().parents[2]
WIDGETS = [f.name for f in dataclasses.fields(PatchOptions) if f.init and f.name != "plan"]


def locale() -> dict:
    return json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))


def test_locale_says_what_the_node_says():
    node = locale()["VCAttentionPatch"]
    assert node["display_name"] == DISPLAY_NAME and node["description"] == DESCRIPTION
    assert list(node["inputs"]) == ["model", *WIDGETS]
    assert {name: entry["tooltip"] for name, entry in node["inputs"].items()} == {
        name: TOOLTIPS[name] for name in ("model", *WIDGETS)
    }
    assert node["outputs"]["0"]["tooltip"] == TOOLTIPS["output"]


def test_every_widget_has_a_tooltip_and_a_row_in_the_help_page():
    page = (ROOT / "web" / "docs" / "VCAttentionPatch.md").read_text(encoding="utf-8")
    assert set(TOOLTIPS) == {"model", "output", *WIDGETS}
    for name in WIDGETS:
        assert TOOLTIPS[name].endswith(".") and any(f"`{name}`" in line for line in page.splitlines() if "|" in line)


@pytest.mark.parametrize("node", NODES)
def test_the_other_nodes_say_the_same_in_the_locale(node):
    texts, entry = NODES[node], locale()[node]
    assert entry["display_name"] == texts.display_name and entry["description"] == texts.description
    assert [(name, item["tooltip"]) for name, item in entry["inputs"].items()] == list(texts.inputs.items())
    assert [(item["name"], item["tooltip"]) for item in entry["outputs"].values()] == list(texts.outputs.items())
    assert all(text.endswith(".") for text in (texts.description, *texts.inputs.values(), *texts.outputs.values()))


@pytest.mark.parametrize(
    ("node", "widgets"),
    [
        ("VCAttentionQuality", [f.name for f in dataclasses.fields(QualityOptions) if f.init]),
        ("VCAttentionQualityReport", ["save_profile"]),
        ("VCAttentionCapture", [f.name for f in dataclasses.fields(CaptureOptions) if f.init]),
        ("VCAttentionCompare", ["images_a", "images_b", "label_a", "label_b", "strip", "lpips"]),
        ("VCAttentionBenchmark", ["width", "height", "frames", "seconds"]),
        ("VCAttentionWanVideoWrapper", WIDGETS),
        ("VCAttentionQualityWanVideoWrapper", [f.name for f in dataclasses.fields(QualityOptions) if f.init]),
        ("VCAttentionCaptureWanVideoWrapper", [f.name for f in dataclasses.fields(CaptureOptions) if f.init]),
    ],
)
def test_each_widget_of_the_other_nodes_has_a_row_in_its_help_page(node, widgets):
    page = (ROOT / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {NODES[node].display_name}\n")
    assert [name for name in NODES[node].inputs if name not in ("model", "latent")] == widgets
    for name in widgets:
        assert any(f"`{name}`" in line for line in page.splitlines() if line.startswith("|"))


PATCH = ROOT / "web" / "docs" / "VCAttentionPatch.md"


def patch_page(language: str = "") -> str:
    path = PATCH.with_suffix("") / f"{language}.md" if language else PATCH
    return path.read_text(encoding="utf-8")


def section(page: str, number: int) -> str:
    """The text below the given second-level heading, from 1: translated pages have the same sections in order."""
    return re.split(r"^## .*$", page, flags=re.MULTILINE)[number]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row of a text, without the heads."""
    lines = text.splitlines()
    found = [
        line for line, before in zip(lines[1:], lines, strict=False) if line.startswith("|") and before.startswith("|")
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found if not set(line) <= set("|- ")]


def sections() -> dict[str, int]:
    titles = re.findall(r"^## (.*)$", patch_page(), re.MULTILINE)
    return {title: number for number, title in enumerate(titles, 1)}


PAGES = ["", *sorted(path.stem for path in PATCH.with_suffix("").glob("*.md"))]


def kernel_codes() -> set[str]:
    """The codes of every Reason and Verdict that `kernels` makes."""
    found = set()
    for file in sorted((ROOT / "kernels").rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = getattr(call, "func", None)
            if isinstance(call, ast.Call) and getattr(name, "id", getattr(name, "attr", "")) in ("Reason", "Verdict"):
                first = call.args[0] if call.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.add(first.value)
    return found - {"ok"}


@pytest.mark.parametrize("language", PAGES)
def test_every_reason_has_its_row_in_the_help_page(language):
    """A row that begins with the code alone is its anchor: the timeline on the node links to it."""
    declined = rows(section(patch_page(language), sections()["Why was a call declined?"]))
    assert len(declined) == len(REASONS)
    assert {row[0].strip("`"): len(row) for row in declined} == dict.fromkeys(REASONS, 3)
    assert set(SHORT) == set(REASONS)
    for code, words, meaning in declined:
        assert words == SHORT[code.strip("`")] and meaning


@pytest.mark.parametrize("language", PAGES)
def test_every_reason_of_the_kernels_has_a_row(language):
    absent = rows(section(patch_page(language), sections()["Why does no kernel run here?"]))
    codes = [row[0].strip("`") for row in absent]
    assert len(codes) == len(set(codes)) and all(len(row) == 3 and all(row) for row in absent)
    assert not set(codes) & set(REASONS), "a code has one row, so that a link to it is clear"
    assert set(codes) == kernel_codes() - set(REASONS)


def test_kernel_codes_are_found():
    assert {"self_test", "kernels_damaged", "card_unknown", "compile_failed", "no_kernel"} <= kernel_codes()


@pytest.mark.parametrize("language", PAGES)
def test_help_page_has_every_widget_card_and_model(language):
    page = patch_page(language)
    widgets = " ".join(row[0] for row in rows(section(page, sections()["Widgets"])))
    assert re.findall(r"`(\w+)`", widgets) == WIDGETS
    named = " ".join(row[0] for row in rows(section(page, sections()["Which cards"])))
    for family in cards.FAMILIES:
        nicknames = re.findall(r"[A-Z][\w ]*\d\w*|Jetson Thor", family.title)
        assert any(name in named for name in nicknames), f"{family.title} is not in the table of cards"
        assert not family.modes or nicknames[0] in named
    models = " ".join(row[0] for row in rows(section(page, sections()["Which models"])))
    assert [name for name in (*FAMILIES.values(), HUNYUAN_VIDEO_15) if name not in models] == []


@pytest.mark.parametrize("language", PAGES)
def test_seconds_on_the_help_page_are_the_measured_ones(language):
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    table = results.partition("## Wan2.2 14B in ComfyUI on NVIDIA H200")[2].partition("\n## ")[0]
    measured = {row[0]: (float(row[1]), float(row[4])) for row in rows(table) if re.fullmatch(r"[\d.]+", row[1])}
    names = ("ComfyUI, its default", "ComfyUI, its backend", "FlashAttention-4", "Patch, fast", "faithful", "left out")
    expected = [next(pair for name, pair in measured.items() if part in name) for part in names]
    shown = rows(section(patch_page(language), sections()["How fast, how close"]))
    assert [(float(row[1]), float(row[2])) for row in shown] == [tuple(round(n, 2) for n in pair) for pair in expected]
    default, int8, *_ = expected
    fast = expected[3]
    for ratio in (f"{default[1] / fast[1]:.1f}", f"{int8[1] / fast[1]:.2f}", f"{default[0] / fast[0]:.2f}"):
        assert ratio in section(patch_page(language), sections()["How fast, how close"])


@pytest.mark.parametrize("language", PAGES)
def test_help_page_keeps_to_the_markdown_that_both_readers_know(language):
    """ComfyUI's panel and our own page (web/help.html) show it; the latter knows no links, pictures, HTML, fences."""
    page = patch_page(language)
    assert not re.search(r"\]\(|<\w|^```|^\d+\. |^ +- ", page, re.MULTILINE)
    assert len(re.findall(r"^## ", page, re.MULTILINE)) == len(sections())
    for part in re.split(r"\n{2,}", page.strip()):
        lines = part.splitlines()
        assert not lines[0].startswith("#") or len(lines) == 1, f"no empty line below {lines[0]}"
        if lines[0].startswith("|"):
            assert {line.strip("|").count("|") for line in lines} == {lines[0].strip("|").count("|")}, lines[0]
        else:
            assert not any(line.startswith(("|", "#")) for line in lines[1:]), lines[0]


@pytest.mark.parametrize("language", PAGES[1:])
def test_tables_of_a_translated_page_have_the_same_rows_and_numbers(language):
    english, own = rows(patch_page()), rows(patch_page(language))
    assert len(own) == len(english)
    for before, after in zip(english, own, strict=True):
        assert len(after) == len(before)
        numbers = [sorted(set(re.findall(r"\d+(?:\.\d+)?", " ".join(row)))) for row in (before, after)]
        assert numbers[0] == numbers[1], f"{before[0]} was changed in English only, or in {language} only"


def sayings() -> list[list[str]]:
    """Every text in `nodes` as words; one that is filled in at run time holds a NUL."""
    found = []
    for file in sorted((ROOT / "nodes").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value.split())
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(map(str, parts)).split())
    return found


def is_said(piece: str, texts: list[list[str]]) -> bool:
    words = piece.split()
    return any(
        all("\0" in text[at + i] or text[at + i].strip(".,:;") == word.strip(".,:;") for i, word in enumerate(words))
        for text in texts
        for at in range(len(text) - len(words) + 1)
    )


@pytest.mark.parametrize("page", sorted((ROOT / "web" / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_what_a_help_page_quotes_is_really_said(page):
    """Bold quotes are sentences of the nodes; what differs each time is ... or in brackets."""
    texts = sayings()
    for quoted in re.findall(r'\*\*"(.+?)"', page.read_text(encoding="utf-8").replace("\n", " ")):
        for piece in filter(None, (part.strip() for part in re.split(r"\.\.\.|\(.*?\)", quoted))):
            assert is_said(piece, texts), f"{page.name} quotes {piece!r}"


def test_a_quote_that_nobody_says_is_noticed():
    texts = sayings()
    assert is_said("Nothing was captured", texts) and is_said(
        "the family Wan, and this", [["the", "family", "\0", "and", "this"]]
    )
    assert not is_said("Nothing was ever captured", texts) and not is_said("another hook is here", texts)
