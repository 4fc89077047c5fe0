"""The node for WanVideoWrapper in real ComfyUI: its definition, its outcome, and when it is there at all."""

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


def test_without_the_wrapper_there_is_no_node(custom_nodes):
    assert ids()[0] == "VCAttentionPatch" and NODE not in ids()
    (custom_nodes / "readme.txt").write_text("a file")
    install(custom_nodes, "ComfyUI-WanVideoWrapper", FILES[:1])  # half of a download
    install(custom_nodes, "ComfyUI-WanVideoWrapper.disabled")
    assert NODE not in ids()


@pytest.mark.parametrize("name", ["ComfyUI-WanVideoWrapper", "comfyui-wanvideowrapper", "zz renamed"])
def test_with_the_wrappers_folder_the_node_is_there_before_the_wrapper_is_loaded(custom_nodes, name):
    install(custom_nodes, name)
    assert ids()[-1] == NODE


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
