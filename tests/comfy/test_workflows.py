"""Workflow drift: widget values are positional, so every released workflow must still load with the same values.

Each file of tests/known_failures/released is frozen when its version is released: a change of the node that moves a
value between widgets fails here. A new release adds a file; none is ever changed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vc_attention.nodes.options import PatchOptions
from vc_attention.tools.workflow import to_prompt

pytestmark = pytest.mark.comfy

ROOT = Path(__file__).resolve().parents[2]
RELEASED = sorted((ROOT / "tests" / "known_failures" / "released").glob("*.json"))
#: The nodes whose widgets are those of VC-Attention Patch.
SAME_WIDGETS = ("VCAttentionPatch", "VCAttentionWanVideoWrapper")
SHIPPED = sorted((ROOT / "workflows").glob("*.json"))


@pytest.fixture(scope="module")
def patch_node():
    from vc_attention.nodes.patch import VCAttentionPatch

    return VCAttentionPatch


@pytest.fixture(scope="module")
def definition(patch_node):
    """The node's entry in ComfyUI's /object_info."""
    return {"VCAttentionPatch": patch_node.GET_NODE_INFO_V1()}


def test_there_is_a_fixture_for_the_current_widgets():
    assert RELEASED
    newest = json.loads(RELEASED[-1].read_text(encoding="utf-8"))
    fields = [name for name, field in PatchOptions.__dataclass_fields__.items() if field.init and name != "plan"]
    assert list(newest["values"]) == fields


@pytest.mark.parametrize("file", RELEASED, ids=lambda path: path.stem)
def test_released_workflows_load_with_their_values(definition, file):
    released = json.loads(file.read_text(encoding="utf-8"))
    loader = {"input": {"required": {"unet_name": [["model.safetensors"]], "weight_dtype": [["default"]]}}}
    prompt = to_prompt(released["workflow"], {"UNETLoader": loader, **definition})
    inputs = dict(prompt["2"]["inputs"])
    assert inputs.pop("model") == ["1", 0]
    # inputs that were added later come with their defaults; those of the release keep their values, in order
    assert {name: inputs[name] for name in released["values"]} == released["values"]
    assert list(inputs)[: len(released["values"])] == list(released["values"])


@pytest.mark.parametrize("file", RELEASED, ids=lambda path: path.stem)
def test_released_values_run_and_defaults_are_kept(patch_node, definition, file):
    """The values still make options; a default never changes under a creator's saved workflow."""
    released = json.loads(file.read_text(encoding="utf-8"))
    made = PatchOptions(**released["values"])
    assert {name: getattr(made, name) for name in released["values"]} == released["values"]
    required = definition["VCAttentionPatch"]["input"]["required"]
    for name, default in released["defaults"].items():
        assert required[name][1]["default"] == default, name
        assert getattr(PatchOptions(), name) == default, name


def test_combos_do_not_depend_on_this_machine(definition):
    """A workflow made on one card opens on any other: the choices are the same everywhere."""
    required = definition["VCAttentionPatch"]["input"]["required"]
    choices = {name: spec[1].get("options", spec[0]) for name, spec in required.items() if spec[0] == "COMBO"}
    choices |= {name: spec[0] for name, spec in required.items() if isinstance(spec[0], list)}
    assert choices == {
        "precision": ["auto", "8-bit", "4-bit", "off"],
        "quality": ["fast", "faithful"],
        "grouping": ["first steps", "all steps", "off"],
        "on_problem": ["fall back", "stop"],
        "backend": ["auto", "spec"],
    }


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.stem)
def test_shipped_workflows_have_valid_values(file):
    """Each template of the pack holds one value for each widget, and the values make options."""
    nodes = [n for n in json.loads(file.read_text(encoding="utf-8"))["nodes"] if n["type"] in SAME_WIDGETS]
    assert nodes
    fields = [name for name, field in PatchOptions.__dataclass_fields__.items() if field.init and name != "plan"]
    for node in nodes:
        PatchOptions(**dict(zip(fields, node["widgets_values"], strict=True)))
