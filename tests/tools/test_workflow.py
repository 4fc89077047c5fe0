"""From the editor's workflow to the API's prompt, against a recorded /object_info of ComfyUI 0.3.75 with the pack."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from vc_attention.nodes.options import PatchOptions
from vc_attention.tools.messages import ToolError
from vc_attention.tools.workflow import BYPASSED, MUTED, WorkflowError, to_prompt, widget_inputs

HERE = Path(__file__).resolve().parent
INFO = json.loads((HERE / "data" / "object_info_0.3.75.json").read_text())
SHIPPED = json.loads((HERE.parents[1] / "workflows" / "wan2.2_t2v.json").read_text())
PATCH_WIDGETS = [
    *("precision", "quality", "grouping", "group_fraction", "reuse_steps", "groups", "min_tokens", "dense_blocks"),
    *("start_percent", "end_percent", "state_budget_gb", "on_problem", "backend"),
]


def node(number: int, kind: str, widgets: Any = None, inputs: dict[str, tuple[str, int]] | None = None, **more: Any):
    slots = [{"name": name, "type": t, "link": link} for name, (t, link) in (inputs or {}).items()]
    return {"id": number, "type": kind, "mode": 0, "inputs": slots, "widgets_values": widgets, **more}


def small(*extra: dict[str, Any], model_link: tuple[int, int] = (1, 0)) -> dict[str, Any]:
    """A loader (1) and a patch (5) with link 1 between them, and further nodes."""
    values = ["auto", "fast", "first steps", 0.25, 4, 0, 4096, "", 0.0, 1.0, 1.0, "fall back", "auto"]
    nodes = [
        node(1, "UNETLoader", ["a.safetensors", "default"]),
        node(5, "VCAttentionPatch", values, {"model": ("MODEL", 1)}),
        *extra,
    ]
    return {"nodes": nodes, "links": [[1, *model_link, 5, 0, "MODEL"]]}


@pytest.fixture
def prompt() -> dict[str, Any]:
    return to_prompt(SHIPPED, INFO)


def test_the_shipped_workflow_has_every_node_but_the_notes(prompt):
    kinds = sorted(entry["class_type"] for entry in prompt.values())
    expected = sorted(n["type"] for n in SHIPPED["nodes"] if n["type"] != "MarkdownNote")
    assert kinds == expected
    assert len(kinds) == 16


def test_the_value_behind_a_seed_is_no_widget(prompt):
    first = prompt["12"]["inputs"]
    assert (first["add_noise"], first["noise_seed"], first["steps"], first["cfg"]) == ("enable", 1, 20, 3.5)
    assert (first["start_at_step"], first["end_at_step"], first["return_with_leftover_noise"]) == (0, 10, "enable")
    second = prompt["13"]["inputs"]
    assert (second["add_noise"], second["start_at_step"], second["latent_image"]) == ("disable", 10, ["12", 0])


def test_links_name_the_node_and_its_output(prompt):
    chain = [prompt[n]["inputs"]["model"] for n in ("5", "7", "12", "6", "8", "13")]
    assert chain == [["1", 0], ["5", 0], ["7", 0], ["2", 0], ["6", 0], ["8", 0]]
    assert prompt["14"]["inputs"] == {"samples": ["13", 0], "vae": ["4", 0]}


def test_the_patch_nodes_carry_the_defaults_in_the_order_of_the_widgets(prompt):
    assert [name for name, _, _ in widget_inputs(INFO["VCAttentionPatch"])] == PATCH_WIDGETS
    for number in ("5", "6"):
        values = {name: value for name, value in prompt[number]["inputs"].items() if name != "model"}
        assert list(values) == PATCH_WIDGETS
        assert PatchOptions(**values) == PatchOptions()


def test_titles_of_the_workflow_are_kept(prompt):
    assert prompt["5"]["_meta"]["title"] == "VC-Attention Patch (high noise)"
    assert prompt["14"]["_meta"]["title"] == INFO["VAEDecode"]["display_name"]


def test_every_loader_names_its_file_and_where_to_get_it():
    for loader in ("UNETLoader", "CLIPLoader", "VAELoader"):
        for entry in (n for n in SHIPPED["nodes"] if n["type"] == loader):
            (model,) = entry["properties"]["models"]
            assert model["name"] == entry["widgets_values"][0]
            assert model["url"].endswith(f"/{model['directory']}/{model['name']}")
            notes = "".join(n["widgets_values"][0] for n in SHIPPED["nodes"] if n["type"] == "MarkdownNote")
            assert model["name"] in notes and model["url"] in notes


def test_a_muted_node_and_what_it_feeds_are_left_out():
    workflow = copy.deepcopy(SHIPPED)
    next(n for n in workflow["nodes"] if n["id"] == 4)["mode"] = MUTED
    with pytest.raises(WorkflowError, match=r"Node 14 \(VAEDecode\) lacks vae"):
        to_prompt(workflow, INFO)
    next(n for n in workflow["nodes"] if n["id"] == 14)["mode"] = MUTED
    for number in (15, 16):
        next(n for n in workflow["nodes"] if n["id"] == number)["mode"] = MUTED
    assert {"4", "14", "15", "16"}.isdisjoint(to_prompt(workflow, INFO))


def test_a_bypassed_node_hands_its_model_on():
    workflow = copy.deepcopy(SHIPPED)
    next(n for n in workflow["nodes"] if n["id"] == 5)["mode"] = BYPASSED
    prompt = to_prompt(workflow, INFO)
    assert "5" not in prompt
    assert prompt["7"]["inputs"]["model"] == ["1", 0]


def test_a_bypassed_node_without_a_fitting_input_gives_nothing():
    workflow = copy.deepcopy(SHIPPED)
    next(n for n in workflow["nodes"] if n["id"] == 9)["mode"] = BYPASSED  # CLIP in, CONDITIONING out
    with pytest.raises(WorkflowError, match="lacks positive"):
        to_prompt(workflow, INFO)


def test_reroutes_are_looked_through():
    workflow = small(node(8, "Reroute", None, {"": ("*", 3)}), node(9, "Reroute", None, {"": ("*", 2)}))
    workflow["links"] = [[1, 8, 0, 5, 0, "MODEL"], [3, 9, 0, 8, 0, "*"], [2, 1, 0, 9, 0, "*"]]
    assert to_prompt(workflow, INFO)["5"]["inputs"]["model"] == ["1", 0]


def test_a_circle_of_reroutes_is_named():
    workflow = small(node(8, "Reroute", None, {"": ("*", 2)}), model_link=(8, 0))
    workflow["links"].append([2, 8, 0, 8, 0, "*"])
    with pytest.raises(WorkflowError, match="circle"):
        to_prompt(workflow, INFO)


def test_a_primitive_gives_its_value():
    workflow = small(node(8, "PrimitiveNode", [512, "fixed"]))
    workflow["nodes"][1]["inputs"].append({"name": "min_tokens", "type": "INT", "link": 2})
    workflow["links"].append([2, 8, 0, 5, 1, "INT"])
    prompt = to_prompt(workflow, INFO)
    assert prompt["5"]["inputs"]["min_tokens"] == 512
    assert "8" not in prompt


def test_a_widget_that_takes_a_link_still_has_its_place_among_the_values():
    workflow = small(node(8, "EmptyHunyuanLatentVideo", [64, 64, 5, 1]))
    workflow["nodes"][1]["inputs"].append({"name": "precision", "type": "COMBO", "link": 2})
    workflow["links"].append([2, 8, 0, 5, 1, "COMBO"])
    inputs = to_prompt(workflow, INFO)["5"]["inputs"]
    assert (inputs["precision"], inputs["quality"]) == (["8", 0], "fast")


def test_links_may_be_objects():
    workflow = small()
    workflow["links"] = [{"id": 1, "origin_id": 1, "origin_slot": 0, "target_id": 5, "target_slot": 0, "type": "MODEL"}]
    assert to_prompt(workflow, INFO)["5"]["inputs"]["model"] == ["1", 0]


def test_a_widget_that_a_later_version_added_gets_its_default():
    workflow = small()
    workflow["nodes"][1]["widgets_values"] = ["off", "faithful"]
    inputs = to_prompt(workflow, INFO)["5"]["inputs"]
    assert (inputs["precision"], inputs["quality"], inputs["min_tokens"], inputs["backend"]) == (
        "off",
        "faithful",
        4096,
        "auto",
    )


def test_values_saved_by_name():
    workflow = small()
    workflow["nodes"][0]["widgets_values"] = {"weight_dtype": "default", "unet_name": "b.safetensors", "preview": {}}
    assert to_prompt(workflow, INFO)["1"]["inputs"] == {"unet_name": "b.safetensors", "weight_dtype": "default"}


def test_the_value_of_an_upload_button_is_no_widget():
    workflow = small(node(8, "LoadImage", ["picture.png", "image"]))
    assert to_prompt(workflow, INFO)["8"]["inputs"] == {"image": "picture.png"}


def test_a_seed_saved_without_its_second_value():
    values = [7, 20, 3.5, "euler", "simple", 1.0]
    workflow = small(node(8, "KSampler", values, mode=0))
    with pytest.raises(WorkflowError, match="lacks model, positive, negative, latent_image"):
        to_prompt(workflow, INFO)
    inputs = dict.fromkeys(("model", "positive", "negative", "latent_image"), ("*", 1))
    workflow["nodes"][-1] = node(8, "KSampler", values, inputs)
    made = to_prompt(workflow, INFO)["8"]["inputs"]
    assert (made["seed"], made["steps"], made["cfg"], made["denoise"]) == (7, 20, 3.5, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w["nodes"].append(node(8, "SomeOtherPack")), r"Node 8 \(SomeOtherPack\): this ComfyUI has no node"),
        (lambda w: w["nodes"][0]["widgets_values"].append("extra"), r"has 3 widget values, .* takes 2"),
        (lambda w: w.update(links=[]), "Link 1 is used by a node but is not in the list"),
        (lambda w: w["links"][0].__setitem__(1, 77), "comes from node 77, which is not in the workflow"),
        (lambda w: w.update(definitions={"subgraphs": [{}]}), "subgraphs"),
        (lambda w: w["nodes"][1].update(inputs=[]), "lacks model"),
    ],
)
def test_what_the_server_would_not_understand_is_a_sentence(change, message):
    workflow = small()
    change(workflow)
    with pytest.raises(ToolError, match=message) as caught:
        to_prompt(workflow, INFO)
    assert caught.value.status == 2


def test_a_prompt_in_api_format_is_recognised(prompt):
    with pytest.raises(WorkflowError, match="API format"):
        to_prompt(prompt, INFO)


#: How ComfyUI 0.33 describes SaveVideo's format: a choice brings its own widgets along.
CODEC = ["COMFY_DYNAMICCOMBO_V3", {"options": [
    {"key": "auto", "inputs": {"required": {}}},
    {"key": "h264", "inputs": {"required": {"crf": ["INT", {"default": 23}]}}},
]}]  # fmt: skip
FORMAT = ["COMFY_DYNAMICCOMBO_V3", {"options": [{"key": "auto", "inputs": {"required": {"codec": CODEC}}}]}]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["auto", "auto"], {"format": "auto", "format.codec": "auto"}),
        (["auto", "h264", 18], {"format": "auto", "format.codec": "h264", "format.codec.crf": 18}),
        (["auto", "h264"], {"format": "auto", "format.codec": "h264", "format.codec.crf": 23}),
        ([], {"format": "auto", "format.codec": "auto"}),
    ],
)
def test_a_choice_brings_its_widgets_along(values, expected):
    info = copy.deepcopy(INFO)
    info["UNETLoader"]["input"] = {"required": {"format": FORMAT}}
    workflow = small()
    workflow["nodes"][0]["widgets_values"] = values
    assert to_prompt(workflow, info)["1"]["inputs"] == expected


def test_a_choice_that_this_comfyui_does_not_know():
    info = copy.deepcopy(INFO)
    info["UNETLoader"]["input"] = {"required": {"format": FORMAT}}
    workflow = small()
    workflow["nodes"][0]["widgets_values"] = ["gif"]
    with pytest.raises(WorkflowError, match="format is 'gif'; this ComfyUI knows auto"):
        to_prompt(workflow, info)


def test_inputs_that_multiply_are_refused():
    info = copy.deepcopy(INFO)
    info["UNETLoader"]["input"]["required"]["unet_name"] = ["COMFY_AUTOGROW_V3", {}]
    with pytest.raises(WorkflowError, match=r"COMFY_AUTOGROW_V3.*Export \(API\)"):
        to_prompt(small(), info)
