"""What the pack's scripts do to the rest of the editor (nothing), to its templates, and for those who cannot see."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from browser_cases import PATCH, VALUES, tiny_run
from vc_attention.nodes.messages import REASONS
from vc_attention.tools.templates import definitions

pytestmark = [pytest.mark.comfy, pytest.mark.browser, pytest.mark.timeout(180), pytest.mark.xdist_group("browser")]
ROOT = Path(__file__).resolve().parents[2]
#: Node types of newer cores and of WanVideoWrapper, which this server does not have.
ELSEWHERE = {*definitions.NEWER, *definitions.WRAPPER, "VCAttentionWanVideoWrapper"}
TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))

#: Everything about a node type, and about a fresh node of it, that a hook could have changed.
_DEFINITIONS = """
() => {
    const plain = (value, depth = 0) => {
        if (typeof value === 'function') return 'function ' + value.toString();
        if (value === null || typeof value !== 'object') return String(value);
        if (value instanceof Node || depth > 4) return Object.prototype.toString.call(value);
        const entries = Object.getOwnPropertyNames(value).sort().map(name => {
            const d = Object.getOwnPropertyDescriptor(value, name);
            return [name, 'value' in d ? plain(d.value, depth + 1) : `${plain(d.get)} ${plain(d.set)}`];
        });
        return Object.fromEntries(entries);
    };
    const types = {};
    for (const [name, type] of Object.entries(LiteGraph.registered_node_types)) {
        const own = Object.getOwnPropertyNames(type).filter(n => n !== 'prototype').sort();
        types[name] = {
            nodeData: JSON.stringify(type.nodeData ?? null),
            statics: Object.fromEntries(own.map(n => [n, typeof type[n] === 'function' ? String(type[n]) : 0])),
            prototype: plain(type.prototype, 3),
        };
    }
    const nodes = {};
    for (const name of __some) {
        const node = LiteGraph.createNode(name);
        nodes[name] = {
            keys: Object.keys(node).sort(),
            methods: Object.fromEntries(Object.keys(node).filter(k => typeof node[k] === 'function')
                .map(k => [k, String(node[k])])),
            widgets: (node.widgets ?? []).map(w => [w.name, w.type, String(w.value), String(w.callback),
                String(w.serialize), String(w.draw)]),
            size: [...node.size],
        };
    }
    const base = [LiteGraph.LGraphNode, LiteGraph.LGraph, LiteGraph.LGraphCanvas, LiteGraph.LLink]
        .map(type => plain(type?.prototype, 3));
    return { types, nodes, base };
}
"""


def test_foreign_nodes_are_the_same_with_and_without_this_pack(open_editor, site):
    """Another pack's web hook once scrambled every node's widgets: here the two editors are compared in full.

    Both get one copy of the server's definitions: some of those list folders, in an order that changes.
    """
    found = []
    definitions = json.dumps(site.object_info())
    for blocked in ("", "/extensions/ComfyUI-VC-Attention/vc_attention.js"):
        editor = open_editor(blocked, definitions)
        editor.run("window.__some = ['KSampler', 'CLIPTextEncode', 'LoadImage', 'UNETLoader', 'VCAttentionQuality']")
        with_pack = editor.run("app.extensions.some(e => e.name === 'vc_attention.timeline')")
        assert with_pack == (blocked == "")
        found.append(editor.run(_DEFINITIONS))
        editor.page.close()
    ours, without = found
    assert len(ours["types"]) > 300 and ours["types"].keys() == without["types"].keys()
    assert [name for name in ours["types"] if ours["types"][name] != without["types"][name]] == []
    assert ours["nodes"] == without["nodes"]
    assert ours["base"] == without["base"] and "serialize" in ours["base"][0]


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda path: path.stem)
def test_templates_load_without_a_missing_widget(editor, file):
    flow = json.loads(file.read_text(encoding="utf-8"))
    editor.load(flow)
    saved = {node["id"]: node for node in editor.run("JSON.parse(JSON.stringify(app.graph.serialize()))")["nodes"]}
    patches = [node for node in flow["nodes"] if node["type"] == "VCAttentionPatch"]
    assert patches or file.stem.startswith("longcat")
    for node in patches:
        assert saved[node["id"]]["widgets_values"] == node["widgets_values"]
        assert editor.run("id => __timeline(id) !== undefined", node["id"])
    known = set(editor.run("Object.keys(LiteGraph.registered_node_types)"))
    notes = {"Note", "MarkdownNote", "PrimitiveNode", "Reroute"}
    assert {node["type"] for node in flow["nodes"]} - known <= notes | ELSEWHERE


def test_every_reason_has_its_place_on_the_help_page(chromium, site, pictures):
    page = chromium.new_page()
    try:
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{site.url}/extensions/ComfyUI-VC-Attention/help.html#guard")
        page.wait_for_selector("tr#guard")
        assert page.locator("h1").inner_text() == "VC-Attention Patch"
        assert set(page.evaluate("[...document.querySelectorAll('tr[id]')].map(row => row.id)")) >= set(REASONS)
        assert page.evaluate("document.querySelector(':target')?.id") == "guard"
        assert page.evaluate("document.querySelector('#guard').getBoundingClientRect().top < innerHeight")
        assert errors == []
        page.screenshot(path=str(pictures / "help.png"))
    finally:
        page.close()


#: Contrast as the guidelines define it, of what the browser really drew.
_CONTRAST = """
() => {
    const rgb = colour => colour.match(/[\\d.]+/g).map(Number);
    const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ratio = (a, b) => {
        const [x, y] = [luminance(a), luminance(b)].sort((m, n) => n - m);
        return (x + 0.05) / (y + 0.05);
    };
    const element = __timeline(2);
    const panel = rgb(getComputedStyle(element.querySelector('.vca-inner')).backgroundColor);
    const texts = [...element.querySelectorAll('*')].filter(e => e.offsetHeight
        && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()));
    const shapes = [...element.querySelectorAll('.vca-cell, .vca-mark')];
    return {
        opaque: panel.length === 3 || panel[3] === 1,
        texts: texts.map(e => [e.className || e.tagName, ratio(rgb(getComputedStyle(e).color), panel)]),
        shapes: shapes.map(e => [e.dataset.phase, ratio(rgb(getComputedStyle(e).borderTopColor), panel)]),
    };
}
"""


def test_accessible(editor, pictures):
    """Labels, contrast and the rules of axe-core, in four of the frontend's themes and both of its renderers."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="browser: axe is not installed")
    values = (*VALUES[:3], 0.5, 2, *VALUES[5:9], 0.8, *VALUES[10:-1], "auto")  # all four phases
    editor.load(tiny_run(10, 96, values).json())
    editor.run("app.queuePrompt(0, 1)")
    editor.wait_text("vca-state", "as it ran")
    editor.wait_text("vca-declined", "declined")
    for palette, renderer in itertools.product(("dark", "light", "solarized", "nord"), ("canvas", "vue")):
        editor.setting("Comfy.ColorPalette", palette)
        editor.setting("Comfy.VueNodes.Enabled", renderer == "vue")
        for backend, state in (("auto", "as it ran"), ("spec", "expected")):
            editor.widget(PATCH, "backend", backend)
            editor.wait_text("vca-state", state)
            editor.show()
            found = editor.run(_CONTRAST)
            where = (palette, renderer, state)
            assert found["opaque"] and len(found["texts"]) > 4 and len(found["shapes"]) > 10, where
            assert [entry for entry in found["texts"] if entry[1] < 4.5] == [], where
            assert [entry for entry in found["shapes"] if entry[1] < 3] == [], where
            result = axe.Axe().run(editor.page, context=".vc-attention")
            assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in result.response["violations"]] == [], where
            editor.picture(pictures / f"{palette}_{renderer}_{state[:2]}.png")
        assert set(editor.rows()[0]) == set("grpd")
        themes = editor.run("__timeline(2).dataset.theme")
        assert themes == ("light" if palette == "light" else "dark")


def test_by_keyboard(editor):
    """The steps are reached with Tab, and the arrow keys say what each of them does."""
    editor.load(tiny_run(20).json())
    editor.wait_rows(["grrrg" + "p" * 15])
    label = editor.run("__timeline(2).querySelector('.vca-row').getAttribute('aria-label')")
    assert label == "expected: 20 steps, 2 group, 3 reuse, 15 plain"
    editor.run("__timeline(2).querySelector('.vca-row').focus()")
    assert editor.run("document.activeElement.getAttribute('role')") == "listbox"
    editor.page.keyboard.press("ArrowRight")
    editor.page.keyboard.press("ArrowRight")
    assert editor.text("vca-detail") == "Step 2: reuse, earlier groups serve"
    active = editor.run("document.getElementById(document.activeElement.getAttribute('aria-activedescendant')).title")
    assert active == "Step 2: reuse, earlier groups serve"
    editor.page.keyboard.press("End")
    assert editor.text("vca-detail") == "Step 20: plain, low-bit without groups"
    editor.page.keyboard.press("ArrowRight")
    assert editor.text("vca-detail").startswith("Step 20")
    outline = editor.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    editor.page.keyboard.press("Tab")
    assert editor.text("vca-detail") == ""
