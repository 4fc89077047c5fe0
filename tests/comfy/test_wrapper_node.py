"""The nodes for WanVideoWrapper in real ComfyUI: their definitions, their outcome, and when they are there at all."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fake_wrapper import sample, wan_model

pytestmark = pytest.mark.comfy

FILES = ("nodes_model_loading.py", "wanvideo/modules/model.py")


@pytest.fixture
def custom_nodes(tmp_path, monkeypatch) -> Path:
    """An empty folder of custom nodes, of a ComfyUI that loads them all, in a process without the wrapper."""
    import comfy.cli_args
    import folder_paths

    monkeypatch.setitem(folder_paths.folder_names_and_paths, "custom_nodes", ([str(tmp_path)], set()))
    monkeypatch.setattr(comfy.cli_args.args, "disable_all_custom_nodes", False)
    monkeypatch.setitem(sys.modules, "nodes", SimpleNamespace(NODE_CLASS_MAPPINGS={}))
    return tmp_path


def install(folder: Path, name: str = "ComfyUI-WanVideoWrapper", files=FILES) -> None:
    for file in files:
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise ImportError('it must not be imported to be found')\n")


def ids() -> list[str]:
    from vc_attention.nodes import VCAttentionExtension

    return [node.GET_SCHEMA().node_id for node in asyncio.run(VCAttentionExtension().get_node_list())]


NODE = "VCAttentionWanVideoWrapper"
MEASURING = ("VCAttentionQualityWanVideoWrapper", "VCAttentionCaptureWanVideoWrapper")


def test_without_the_wrapper_there_is_no_node(custom_nodes):
    assert ids()[0] == "VCAttentionPatch" and not {NODE, *MEASURING} & set(ids())
    (custom_nodes / "readme.txt").write_text("a file")
    install(custom_nodes, "ComfyUI-WanVideoWrapper", FILES[:1])  # half of a download
    install(custom_nodes, "ComfyUI-WanVideoWrapper.disabled")
    assert NODE not in ids()


@pytest.mark.parametrize("name", ["ComfyUI-WanVideoWrapper", "comfyui-wanvideowrapper", "zz renamed"])
def test_with_the_wrappers_folder_the_node_is_there_before_the_wrapper_is_loaded(custom_nodes, name):
    install(custom_nodes, name)
    assert ids()[-3:] == [NODE, *MEASURING]


def test_a_loaded_wrapper_is_found_wherever_its_folder_is(custom_nodes, monkeypatch):
    loaded = ModuleType("nodes")
    loaded.NODE_CLASS_MAPPINGS = {"WanVideoModelLoader": object}
    monkeypatch.setitem(sys.modules, "nodes", loaded)
    assert NODE in ids()


def test_a_wrapper_that_comfyui_is_told_to_skip_does_not_count(custom_nodes, monkeypatch):
    import comfy.cli_args

    install(custom_nodes)
    monkeypatch.setattr(comfy.cli_args.args, "disable_all_custom_nodes", True)
    monkeypatch.setattr(comfy.cli_args.args, "whitelist_custom_nodes", [])
    assert NODE not in ids()
    monkeypatch.setattr(comfy.cli_args.args, "whitelist_custom_nodes", ["ComfyUI-WanVideoWrapper"])
    assert NODE in ids()


def test_without_a_folder_of_custom_nodes_there_is_no_node(custom_nodes):
    custom_nodes.rmdir()
    assert NODE not in ids()


def test_the_widgets_are_those_of_the_patch_node():
    from vc_attention.nodes.patch import VCAttentionPatch
    from vc_attention.nodes.wrapper import VCAttentionWanVideoWrapper

    ours, theirs = VCAttentionWanVideoWrapper.GET_NODE_INFO_V1(), VCAttentionPatch.GET_NODE_INFO_V1()
    assert ours["name"] == NODE and ours["output"] == ["WANVIDEOMODEL"]
    assert ours["display_name"] == "VC-Attention for WanVideoWrapper"
    mine, wanted = dict(ours["input"]["required"]), dict(theirs["input"]["required"])
    assert mine.pop("model")[0] == "WANVIDEOMODEL" and wanted.pop("model")[0] == "MODEL"
    assert list(mine.items()) == list(wanted.items())
    assert VCAttentionWanVideoWrapper.validate_inputs(dense_blocks="3-1") is not True
    assert VCAttentionWanVideoWrapper.validate_inputs(dense_blocks="0-3") is True


def test_the_node_patches_a_clone_and_passes_on_what_it_cannot_patch(monkeypatch):
    from vc_attention.nodes import host
    from vc_attention.nodes.messages import FULLGRAPH, OFF
    from vc_attention.nodes.wrapper import VCAttentionWanVideoWrapper as Node
    from vc_attention.nodes.wrapper_hook import bridge_session

    shown = []
    monkeypatch.setattr(host, "show_text", lambda text, node_id: shown.append(text))
    plain = wan_model(is_longcat=True)
    patched = Node.execute(plain, quality="faithful", backend="spec", min_tokens=32, groups=4).args[0]
    assert patched is not plain and shown == ["VC-Attention is ready (spec)."]
    close, want = sample(patched, num_cond=1)[-1], sample(plain, num_cond=1)[-1]
    assert not torch.equal(close, want) and ((close - want).norm() / want.norm()).item() < 0.02
    assert bridge_session(patched).stats.accelerated == 16
    off = Node.execute(patched, precision="off").args[0]
    assert bridge_session(off) is None and shown[-1] == OFF
    one_graph = wan_model(compile_args={"fullgraph": True})
    assert Node.execute(one_graph).args[0] is one_graph and shown[-1] == FULLGRAPH


def test_the_measuring_nodes_have_the_widgets_of_their_twins():
    from vc_attention.nodes import measuring, wrapper_measuring

    for name, twin in zip(MEASURING, ("VCAttentionQuality", "VCAttentionCapture"), strict=True):
        node, other = getattr(wrapper_measuring, name), getattr(measuring, twin)
        ours, theirs = node.GET_NODE_INFO_V1(), other.GET_NODE_INFO_V1()
        assert ours["name"] == name and ours["output"] == ["WANVIDEOMODEL"] and theirs["output"] == ["MODEL"]
        mine, wanted = dict(ours["input"]["required"]), dict(theirs["input"]["required"])
        assert mine.pop("model")[0] == "WANVIDEOMODEL" and wanted.pop("model")[0] == "MODEL"
        assert list(mine.items()) == list(wanted.items())
    assert wrapper_measuring.VCAttentionQualityWanVideoWrapper.validate_inputs(layers="3-1") is not True
    assert wrapper_measuring.VCAttentionQualityWanVideoWrapper.fingerprint_inputs(profile="") == ""
    assert wrapper_measuring.VCAttentionCaptureWanVideoWrapper.validate_inputs(layer="0-3") is not True
    report = measuring.VCAttentionQualityReport.GET_NODE_INFO_V1()
    assert report["input"]["required"]["model"][0] == "MODEL,WANVIDEOMODEL"


def test_from_the_bridge_over_quality_and_capture_to_the_report(tmp_path, monkeypatch):
    """As a workflow with LongCat runs them: measure with a budget, save the profile, run with the profile."""
    import folder_paths
    from vc_attention.nodes.measuring import VCAttentionQualityReport as Report
    from vc_attention.nodes.wrapper import VCAttentionWanVideoWrapper as Node
    from vc_attention.nodes.wrapper_hook import bridge_session
    from vc_attention.nodes.wrapper_measuring import VCAttentionCaptureWanVideoWrapper as Capture
    from vc_attention.nodes.wrapper_measuring import VCAttentionQualityWanVideoWrapper as Quality

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    base = Node.execute(wan_model(is_longcat=True), backend="spec", min_tokens=32, groups=4).args[0]
    model = Quality.execute(base, layers="", steps="", budget_db=90.0, profile="").args[0]
    model = Capture.execute(model, layer="1", step=1, max_mb=4, filename_prefix="long/cat").args[0]
    latent = {"samples": sample(model, num_cond=1)[-1]}
    assert [path.name for path in (tmp_path / "long").iterdir()] == ["cat_00001_.safetensors"]
    node = Report.execute(latent, model, save_profile="longcat")
    shown = node.ui.as_dict()["text"][0]
    assert "Saved as profile longcat (2 of 2 layers in 16 bit)" in shown and "2 calls measured in 2 layers" in shown
    model = Quality.execute(base, layers="", steps="", budget_db=0.0, profile="longcat").args[0]
    sample(model, num_cond=1)
    stats = bridge_session(model).stats
    assert stats.declined["budget"] == 16 and stats.accelerated == 0
    assert "from the start (profile)" in Report.execute(latent, model).ui.as_dict()["text"][0]


def test_without_the_bridge_the_wrappers_model_passes_through(monkeypatch):
    """Also a profile of ComfyUI's own models is a sentence, and the run goes on without it."""
    from vc_attention.nodes import host
    from vc_attention.nodes.wrapper_measuring import VCAttentionCaptureWanVideoWrapper as Capture
    from vc_attention.nodes.wrapper_measuring import VCAttentionQualityWanVideoWrapper as Quality

    shown = []
    monkeypatch.setattr(host, "show_text", lambda text, node_id: shown.append(text))
    plain = wan_model()
    assert Quality.execute(plain, layers="", steps="", budget_db=0.0, profile="").args[0] is plain
    assert Capture.execute(plain, layer="0", step=1, max_mb=1, filename_prefix="x").args[0] is plain
    assert len(shown) == 2 and all("behind VC-Attention for WanVideoWrapper" in text for text in shown)


def test_a_profile_of_comfyuis_own_wan_is_not_taken(tmp_path, monkeypatch):
    import folder_paths
    from vc_attention.nodes import host
    from vc_attention.nodes.profile import Profile, ProfileLayer, path_of, save
    from vc_attention.nodes.state import Layer
    from vc_attention.nodes.wrapper import VCAttentionWanVideoWrapper as Node
    from vc_attention.nodes.wrapper_hook import bridge_session
    from vc_attention.nodes.wrapper_measuring import VCAttentionQualityWanVideoWrapper as Quality

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    shown = []
    monkeypatch.setattr(host, "show_text", lambda text, node_id: shown.append(text))
    save(Profile("Wan", 2, (ProfileLayer(Layer(None, 0, 0), True),)), path_of("other"))
    base = Node.execute(wan_model(), backend="spec", min_tokens=32, groups=4).args[0]
    model = Quality.execute(base, layers="", steps="", budget_db=0.0, profile="other").args[0]
    assert "the family Wan, and this one has the family Wan in WanVideoWrapper" in shown[-1]
    sample(model, steps=1)
    assert not bridge_session(model).stats.declined
