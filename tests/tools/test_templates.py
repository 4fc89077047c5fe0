"""The templates in `workflows/` and what builds them: what can be said without ComfyUI."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from template_nodes import differences, recorded
from vc_attention.nodes.options import PatchOptions
from vc_attention.tools.templates import command, definitions, files
from vc_attention.tools.templates.catalogue import TEMPLATES, Template
from vc_attention.tools.templates.graph import Graph
from vc_attention.tools.templates.thumbnails import SIDE, phases, thumbnail
from vc_attention.tools.workflow import BYPASSED

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "workflows"
NAMES = [template.name for template in TEMPLATES]
OWN = ("VCAttentionPatch", "VCAttentionWanVideoWrapper")
SAMPLERS = ("KSampler", "KSamplerAdvanced", "BasicGuider", "CFGGuider", "BasicScheduler", "WanVideoSampler")
PERSONAL = re.compile(r"(/home/|/Users/|/root|/mnt/|/tmp|[A-Za-z]:\\\\|\\\\\\\\|file:|@)")

everyone = pytest.mark.parametrize("template", TEMPLATES, ids=NAMES)


def load(template: Template) -> dict[str, Any]:
    return json.loads((FOLDER / f"{template.name}.json").read_text(encoding="utf-8"))


def nodes_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    """All but the notes."""
    return [node for node in workflow["nodes"] if node["type"] != "MarkdownNote"]


@everyone
def test_the_file_is_what_its_description_gives(template):
    assert (FOLDER / f"{template.name}.json").read_bytes() == template.build(template.name).text().encode("ascii")


def test_there_is_no_other_file_and_the_models_that_were_asked_for_are_there():
    assert {file.name for file in FOLDER.iterdir()} == {f"{name}.{end}" for name in NAMES for end in ("json", "jpg")}
    assert {"wan2.2_t2v", "wan2.2_t2v_4steps", "wan2.2_i2v", "wan2.2_5b"} <= set(NAMES)
    assert {"hunyuanvideo1.5_t2v", "minimax_h3", "longcat_wanvideowrapper", "compare_off_on"} <= set(NAMES)


def test_comfyui_looks_into_one_folder_only():
    """With two of its folder names in a pack, the files of the second are not found."""
    assert [n for n in ("example_workflows", "example", "examples", "workflow") if (ROOT / n).exists()] == []


def test_check_names_what_differs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0
    (tmp_path / "wan2.2_5b.json").write_text("{}")
    (tmp_path / "other.json").write_text("{}")
    capsys.readouterr()
    assert command.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == ["other: not described", "wan2.2_5b: differs"]


@everyone
def test_no_personal_path(template):
    text = (FOLDER / f"{template.name}.json").read_text(encoding="utf-8")
    assert PERSONAL.search(text) is None
    for node in nodes_of(json.loads(text)):
        prefixes = [v for v in node["widgets_values"] if isinstance(v, str) and "_vc_attention" in v]
        assert all(re.fullmatch(r"video/[\w.]+", prefix) for prefix in prefixes)


def test_ids_differ_between_the_files():
    assert len({load(template)["id"] for template in TEMPLATES}) == len(TEMPLATES)


@everyone
def test_links_and_slots_agree(template):
    """Every link leaves and arrives where it says, with one type; ids are unique, the counters are the largest ids."""
    workflow = load(template)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: link for link in workflow["links"]}
    assert len(nodes) == len(workflow["nodes"]) and len(links) == len(workflow["links"])
    assert workflow["last_node_id"] == max(nodes) and workflow["last_link_id"] == max(links)
    arrived = Counter(slot["link"] for node in nodes.values() for slot in node["inputs"] if slot["link"] is not None)
    assert arrived == Counter(list(links))
    left = Counter(link for node in nodes.values() for slot in node["outputs"] for link in slot["links"] or ())
    assert left == Counter(list(links))
    for number, origin, slot, target, entry, kind in workflow["links"]:
        assert nodes[origin]["outputs"][slot]["type"] == kind
        assert number in nodes[origin]["outputs"][slot]["links"]
        assert nodes[target]["inputs"][entry]["link"] == number
        assert nodes[target]["inputs"][entry]["type"] in (kind, "*")
        assert nodes[origin]["order"] < nodes[target]["order"]
    assert sorted(node["order"] for node in nodes.values()) == list(range(len(nodes)))


@everyone
def test_every_node_has_a_value_for_each_widget(template):
    for node in nodes_of(load(template)):
        definition = definitions.define(node["type"])
        expected = len(definition.widgets) + sum(item.extra is not None for item in definition.widgets)
        assert len(node["widgets_values"]) == expected, node["type"]
        assert None not in node["widgets_values"]
        missing = [
            item.name
            for item, slot in zip(definition.slots, node["inputs"], strict=True)
            if not item.widget and not item.optional and slot["link"] is None
        ]
        assert missing == [], node["type"]


@everyone
def test_nothing_overlaps_and_every_node_is_in_a_group(template):
    workflow = load(template)
    boxes = {
        node["id"]: (
            node["pos"][0],
            node["pos"][1] - 30,
            node["pos"][0] + node["size"][0],
            node["pos"][1] + node["size"][1],
        )
        for node in workflow["nodes"]
    }
    for a, box in boxes.items():
        for b, other in boxes.items():
            apart = box[2] <= other[0] or other[2] <= box[0] or box[3] <= other[1] or other[3] <= box[1]
            assert a == b or apart, (a, b)
    frames = [(x, y, x + w, y + h) for x, y, w, h in (group["bounding"] for group in workflow["groups"])]
    for node in nodes_of(workflow):
        box = boxes[node["id"]]
        holds = [f for f in frames if f[0] <= box[0] and f[1] <= box[1] and f[2] >= box[2] and f[3] >= box[3]]
        assert len(holds) == 1, node["type"]
    assert [int(group["title"].split()[0]) for group in workflow["groups"]] == list(range(1, len(frames) + 1))


@everyone
def test_the_note_names_every_file_with_its_folder_and_address(template):
    workflow = load(template)
    notes = {node["title"]: node["widgets_values"][0] for node in workflow["nodes"] if node["type"] == "MarkdownNote"}
    assert list(notes) == ["Model files", "What VC-Attention does here"]
    text = notes["Model files"]
    named = [model for node in nodes_of(workflow) for model in node["properties"].get("models", ())]
    assert named
    for model in named:
        assert f"[{model['name']}]({model['url']})" in text
        assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith("/" + model["name"])
        part = text.partition(f"**models/{model['directory']}**\n")[2].partition("**models/")[0]
        assert f"- [{model['name']}]" in part
        assert f"\n  {model['directory']}/\n" in text and f"\n    {model['name']}\n" in text
    # a loader's file is not just in its value: the editor offers to download what `models` names
    values = [v for node in nodes_of(workflow) for v in node["widgets_values"] if str(v).endswith(".safetensors")]
    assert sorted(values) == sorted(model["name"] for model in named)


@everyone
def test_every_sampler_gets_its_model_through_vc_attention(template):
    """Also behind the LoRA, and before the node that shifts the schedule, as the README says."""
    workflow = load(template)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: link for link in workflow["links"]}

    def above(node: dict[str, Any]) -> list[str]:
        link = next((slot["link"] for slot in node["inputs"] if slot["name"] == "model"), None)
        if link is None or links[link][5] not in ("MODEL", "WANVIDEOMODEL"):
            return []
        source = nodes[links[link][1]]
        return [source["type"], *above(source)]

    samplers = [node for node in nodes.values() if node["type"] in SAMPLERS]
    assert samplers
    for sampler in samplers:
        way = above(sampler)
        assert sum(kind in OWN for kind in way) == 1, way
        assert way[-1] in ("UNETLoader", "WanVideoModelLoader")
        own = next(i for i, kind in enumerate(way) if kind in OWN)
        assert all(kind in ("LoraLoaderModelOnly", "UNETLoader", "WanVideoModelLoader") for kind in way[own + 1 :])


@everyone
def test_our_nodes_have_their_defaults(template):
    """Only the template that compares switches one off; a second render differs in nothing else."""
    own = [node for node in nodes_of(load(template)) if node["type"] in OWN]
    default = [
        field.default for name, field in PatchOptions.__dataclass_fields__.items() if field.init and name != "plan"
    ]
    changed = [values for node in own if (values := node["widgets_values"]) != default]
    assert changed == ([["off", *default[1:]]] if template.name == "compare_off_on" else [])


def test_both_renders_of_the_comparison_differ_in_the_node_only():
    workflow = load(next(t for t in TEMPLATES if t.name == "compare_off_on"))
    links = {link[0]: link for link in workflow["links"]}
    a, b = (node for node in workflow["nodes"] if node["type"] == "KSampler")
    assert a["widgets_values"] == b["widgets_values"]
    for one, other in zip(a["inputs"], b["inputs"], strict=True):
        sources = [None if slot["link"] is None else links[slot["link"]][1:3] for slot in (one, other)]
        assert (sources[0] == sources[1]) == (one["name"] != "model"), one["name"]
    seed = next(slot for slot in a["inputs"] if slot["name"] == "seed")
    assert links[seed["link"]][5] == "INT"


def test_only_the_first_frame_of_the_5b_model_is_bypassed():
    off = {t.name: [n["type"] for n in load(t)["nodes"] if n["mode"]] for t in TEMPLATES}
    assert {name: found for name, found in off.items() if found} == {"wan2.2_5b": ["LoadImage"]}
    assert BYPASSED == 4


@pytest.mark.parametrize("name", ["0.33.0", "wanvideowrapper"])
def test_the_table_of_definitions_is_what_was_recorded(name):
    info = recorded(name)
    tables = {**definitions.CORE, **definitions.NEWER, **definitions.WRAPPER}
    assert set(definitions.NEWER if name == "0.33.0" else definitions.WRAPPER) <= set(info) <= set(tables)
    for kind, entry in info.items():
        assert differences(definitions.define(kind), entry) == [], kind


def test_differences_are_seen():
    info = recorded("0.33.0")["VAEDecode"]
    define = definitions.define
    assert differences(define("VAEDecode"), info) == []
    assert differences(define("VAEDecodeAudio"), info) == ["outputs ['AUDIO'] instead of ['IMAGE']"]
    assert differences(define("VAELoader"), info)
    assert differences(define("KSamplerSelect"), recorded("0.33.0")["RandomNoise"])


@everyone
def test_the_thumbnail_shows_the_file(template):
    """Not to the bit: another libjpeg or FreeType rounds in another way."""
    with Image.open(FOLDER / f"{template.name}.jpg") as image:
        assert image.format == "JPEG" and image.size == (SIDE, SIDE) and not image.getexif()
        kept = np.asarray(image.convert("RGB"), dtype=np.float64)
    drawn = np.asarray(thumbnail(template, load(template)), dtype=np.float64)
    assert np.abs(kept - drawn).mean() < 3
    others = [np.asarray(thumbnail(t, load(t)), dtype=np.float64) for t in TEMPLATES if t is not template][:2]
    assert all(np.abs(kept - other).mean() > 3 for other in others)


def test_the_steps_of_a_thumbnail_are_those_of_the_schedule():
    assert phases(4) == ["group", "plain", "plain", "plain"]
    assert phases(20) == ["group", "reuse", "reuse", "reuse", "group", *["plain"] * 15]


def test_the_builder_refuses_what_does_not_fit():
    graph = Graph("test", "0.3.75")
    area = graph.area(0, "1  Test", 300)
    vae = area.add("VAELoader", vae_name=files.WAN_VAE)
    with pytest.raises(TypeError, match=r"lacks \['weight_dtype'\]"):
        area.add("UNETLoader", unet_name=files.WAN_5B)
    with pytest.raises(TypeError, match="does not know \\['speed'\\]"):
        area.add("VAELoader", vae_name=files.WAN_VAE, speed=1)
    with pytest.raises(TypeError, match="takes MODEL, and VAELoader gives VAE"):
        area.add("ModelSamplingSD3", model=vae["VAE"], shift=1.0)
    with pytest.raises(KeyError, match="has the outputs VAE, not MODEL"):
        vae["MODEL"]
    with pytest.raises(KeyError, match="NoSuchNode"):
        area.add("NoSuchNode")
