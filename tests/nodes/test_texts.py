"""The texts that exist twice are equal, and the files that ComfyUI's frontend reads are in place."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from vc_attention.nodes.messages import DESCRIPTION, DISPLAY_NAME, TOOLTIPS
from vc_attention.nodes.options import PatchOptions

ROOT = Path(__file__).resolve().parents[2]
WIDGETS = [f.name for f in dataclasses.fields(PatchOptions) if f.init and f.name != "plan"]


def test_locale_says_what_the_node_says():
    node = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))["VCAttentionPatch"]
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
