"""Every template, as a prompt of the API, before the check that ComfyUI's server makes of a prompt.

The files that a template names lie in ComfyUI's folders as the pack's tiny models, or empty where there is none. Nodes
that the ComfyUI under test lacks are stand-ins (tests/support/template_nodes.py); a run with `--comfyui` of a newer
one puts the real nodes in their place.
"""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from template_nodes import differences, recorded, stand_in
from vc_attention.tools.templates import definitions
from vc_attention.tools.templates.catalogue import TEMPLATES
from vc_attention.tools.workflow import BYPASSED, to_prompt

pytestmark = pytest.mark.comfy

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
NAMES = [template.name for template in TEMPLATES]
NEEDS = {template.name: template for template in TEMPLATES}


def info_of(node: type) -> dict[str, Any]:
    """What /object_info says of a node's inputs."""
    if hasattr(node, "GET_NODE_INFO_V1"):
        return node.GET_NODE_INFO_V1()
    return {"input": node.INPUT_TYPES(), "output": list(node.RETURN_TYPES)}


@pytest.fixture(scope="module")
def core():
    """ComfyUI's own nodes and ours, by id; `nodes.NODE_CLASS_MAPPINGS` is as before at the end."""
    import nodes

    before = dict(nodes.NODE_CLASS_MAPPINGS)
    asyncio.run(nodes.init_builtin_extra_nodes())
    # our bridge is there when WanVideoWrapper is
    loader = "WanVideoModelLoader"
    nodes.NODE_CLASS_MAPPINGS[loader] = stand_in(loader, recorded("wanvideowrapper")[loader])
    from vc_attention.nodes.extension import VCAttentionExtension

    for node in asyncio.run(VCAttentionExtension().get_node_list()):
        nodes.NODE_CLASS_MAPPINGS[node.GET_SCHEMA().node_id] = node
    yield nodes.NODE_CLASS_MAPPINGS
    nodes.NODE_CLASS_MAPPINGS.clear()
    nodes.NODE_CLASS_MAPPINGS.update(before)


@pytest.fixture
def models(tmp_path, monkeypatch):
    """`models(workflow)` puts a file of each name that the loaders mention where ComfyUI looks for it."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "folder_names_and_paths", copy.deepcopy(folder_paths.folder_names_and_paths))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})

    def put(workflow: dict[str, Any]) -> None:
        for node in workflow["nodes"]:
            for model in node["properties"].get("models", ()):
                file = tmp_path / model["directory"] / model["name"]
                file.parent.mkdir(exist_ok=True)
                file.touch()
                folder_paths.add_model_folder_path(model["directory"], str(file.parent))
        folder_paths.filename_list_cache.clear()

    return put


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def kinds(workflow: dict[str, Any]) -> set[str]:
    return {node["type"] for node in workflow["nodes"] if node["type"] != "MarkdownNote"}


def complete(core: dict[str, type], workflow: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put stand-ins where this ComfyUI lacks nodes of a template; returns their ids."""
    import folder_paths

    missing = kinds(workflow) - set(core)
    put: list[str] = []
    for name in ("0.33.0", "wanvideowrapper"):
        info = recorded(name, folder_paths.get_filename_list)
        if missing & set(info):
            # with an older core all of them: its loaders do not know the newer model either
            for kind in kinds(workflow) & set(info):
                monkeypatch.setitem(core, kind, stand_in(kind, info[kind]))
                put.append(kind)
    return put


def check(prompt: dict[str, Any]) -> tuple[bool, Any]:
    """(valid, what is wrong) by the function that answers POST /prompt."""
    import execution

    valid, error, _, node_errors = asyncio.run(execution.validate_prompt("test", prompt, None))
    return valid and not node_errors, (error, node_errors)


@pytest.mark.parametrize("name", NAMES)
def test_the_server_accepts_the_template(core, models, monkeypatch, name):
    workflow = load(name)
    models(workflow)
    stand_ins = complete(core, workflow, monkeypatch)
    assert kinds(workflow) <= set(core)
    assert not {kind for kind in stand_ins if kind in definitions.OURS}
    if not NEEDS[name].other_packs and NEEDS[name].needs == "0.3.75":
        assert stand_ins == []
    prompt = to_prompt(workflow, {kind: info_of(core[kind]) for kind in kinds(workflow)})
    running = [n for n in workflow["nodes"] if n["type"] != "MarkdownNote" and n["mode"] != BYPASSED]
    assert len(prompt) == len(running)
    valid, wrong = check(prompt)
    assert valid, wrong


@pytest.mark.parametrize("name", NAMES)
def test_the_server_refuses_what_is_broken(core, models, monkeypatch, name):
    """The check above can fail: one link, one value and one file name broken at a time."""
    workflow = load(name)
    models(workflow)
    complete(core, workflow, monkeypatch)
    prompt = to_prompt(workflow, {kind: info_of(core[kind]) for kind in kinds(workflow)})
    seen = set()
    for number, entry in prompt.items():
        for key, value in entry["inputs"].items():
            broken = copy.deepcopy(prompt)
            if isinstance(value, list):
                what, broken[number]["inputs"][key] = "link", [next(k for k, e in prompt.items() if _loads_vae(e)), 0]
                if "vae" in key:
                    continue
            elif isinstance(value, str) and value.endswith(".safetensors"):
                what, broken[number]["inputs"][key] = "file", "absent.safetensors"
            elif key == "group_fraction":
                what, broken[number]["inputs"][key] = "value", 7.0
            else:
                continue
            if what in seen and what != "file":
                continue
            seen.add(what)
            assert not check(broken)[0], (number, key)
    assert seen == {"link", "file", "value"}


def _loads_vae(entry: dict[str, Any]) -> bool:
    return entry["class_type"] in ("VAELoader", "WanVideoVAELoader")


@pytest.mark.parametrize("kind", [*definitions.CORE, *definitions.OURS])
def test_the_table_of_definitions_is_what_the_nodes_say(core, kind):
    assert differences(definitions.define(kind), info_of(core[kind])) == []
