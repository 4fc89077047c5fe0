"""One wording everywhere: the node's tooltips, the locale file, and the help pages in every language."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
from vc_attention.nodes.capture import CaptureOptions
from vc_attention.nodes.messages import DESCRIPTION, DISPLAY_NAME, TOOLTIPS
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


@pytest.mark.parametrize(
    "page", sorted((ROOT / "web" / "docs").rglob("*.md")), ids=lambda page: f"{page.parent.name}/{page.name}"
)
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
