"""Starting, asking and stopping a ComfyUI: with a stand-in for each thing that goes wrong, and with the real one."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import types
from pathlib import Path

import pytest
from vc_attention.tools import comfyui, server
from vc_attention.tools.messages import ToolError
from vc_attention.tools.server import Server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A ComfyUI folder with the stand-in as its main.py."""
    folder = tmp_path / "Comfy UI"
    folder.mkdir()
    shutil.copy2(ROOT / "tests" / "support" / "fake_comfyui.py", folder / "main.py")
    return folder


def make(fake: Path, mode: str = "", **options) -> Server:
    variables = {**os.environ, "FAKE_COMFYUI": mode}
    defaults = {"user_dir": fake.parent / "base", "variables": variables, "device": "cpu"}
    return Server(fake, Path(sys.executable), **{**defaults, **options})


def test_a_prompt_runs_to_its_outputs(fake: Path) -> None:
    with make(fake, arguments=["--lowvram"]) as running:
        assert "VCAttentionPatch" in running.object_info()
        outputs = running.queue({"1": {"class_type": "works"}})
        assert outputs == {"9": {"images": [{"filename": "a.webp"}]}}
        assert running.view(outputs["9"]["images"][0]).startswith(b"RIFF/view?filename=a.webp")
        arguments = running.request("/system_stats")["argv"]
        base = str(fake.parent / "base")
        assert arguments[arguments.index("--base-directory") + 1] == base
        assert arguments[arguments.index("--database-url") + 1].startswith("sqlite:///")
        assert "--cpu" in arguments and "--lowvram" in arguments
        assert (fake.parent / "base" / "custom_nodes" / server.PACK_NAME / "__init__.py").is_file()
        process = running._process
    assert process.poll() is not None and not running.running
    assert sorted(path.name for path in fake.iterdir()) == ["main.py"], "the ComfyUI folder was written to"


def test_without_a_gpu_cpu_is_asked_for_and_only_then(fake: Path) -> None:
    assert "--cpu" in make(fake, device="cpu").command_line()
    assert "--cpu" not in make(fake, device="cuda").command_line()


def test_a_refused_and_a_failed_prompt_say_which_node_and_why(fake: Path) -> None:
    with make(fake) as running:
        with pytest.raises(ToolError, match=r"node 1 \(KSampler\): Value not in list sampler: 'x'"):
            running.queue({"1": {"class_type": "refused"}})
        with pytest.raises(ToolError, match=r"Node 1 \(KSampler\) failed: ValueError: no$"):
            running.queue({"1": {"class_type": "fails"}})


def test_a_server_that_dies_under_a_prompt_is_noticed(fake: Path) -> None:
    with make(fake) as running, pytest.raises(ToolError, match="ComfyUI stopped"):
        running.queue({"1": {"class_type": "dies"}})


def test_a_server_that_dies_shows_the_end_of_its_log(fake: Path) -> None:
    with pytest.raises(ToolError, match=r"(?s)exit status 3.*ImportError: something is missing"):
        make(fake, "die").start()


def test_a_server_that_never_answers_is_given_up_and_ended(fake: Path) -> None:
    deaf = make(fake, "deaf")
    with pytest.raises(ToolError, match=r"(?s)did not answer within 1 s.*fake ComfyUI starts"):
        deaf.start(timeout=1)
    assert not deaf.running


def test_a_server_that_ignores_the_polite_end_is_killed(fake: Path) -> None:
    stubborn = make(fake, "stubborn")
    stubborn.start()
    stubborn.stop(timeout=0.5)
    assert not stubborn.running


def test_a_busy_port_is_one_sentence_before_anything_starts(fake: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ToolError, match=f"Port {port} is in use by another program"):
            make(fake, port=port).start()
    assert not (fake.parent / "base").exists()
    make(fake, port=port)
    server.require_free(port)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_does_not_exist(fake: Path, port: int) -> None:
    with pytest.raises(ToolError, match="ports go from 1 to 65535") as refused:
        make(fake, port=port).start()
    assert refused.value.status == 2


def test_the_pack_is_linked_again_each_time(tmp_path: Path) -> None:
    for _ in range(2):
        server.make_user_dir(tmp_path, [ROOT])
    link = tmp_path / "custom_nodes" / server.PACK_NAME
    assert (link / "install.py").samefile(ROOT / "install.py")
    comfyui.remove(tmp_path / "custom_nodes" / server.PACK_NAME)
    assert (ROOT / "install.py").is_file()


def test_without_links_the_pack_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **keywords: object) -> None:
        raise OSError("no right to make links")

    monkeypatch.setattr(server.os, "symlink", refused)
    target = tmp_path / "pack"
    for _ in range(2):
        assert server.link_folder(ROOT, target) == "copy"
    assert (target / "kernels" / "spec").is_dir() and not (target / "tests").exists()
    assert not (target / ".venv").exists() and not list(target.rglob("__pycache__"))


def test_windows_uses_a_junction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    junctions = types.SimpleNamespace(CreateJunction=lambda source, link: made.append((source, link)))
    monkeypatch.setitem(sys.modules, "_winapi", junctions)
    monkeypatch.setattr(server.sys, "platform", "win32")
    assert server.link_folder(ROOT, tmp_path / "pack") == "junction"
    assert made == [(str(ROOT), str(tmp_path / "pack"))]


@pytest.mark.comfy
@pytest.mark.timeout(300)
def test_the_real_one_shows_the_node(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    directory = Path(request.config.getoption("--comfyui") or comfyui.CACHE / f"comfyui-{comfyui.VERSION}")
    with Server(directory, Path(sys.executable), user_dir=tmp_path) as running:
        node = running.object_info("VCAttentionPatch")
        assert node["VCAttentionPatch"]["display_name"] == "VC-Attention Patch"
        assert running.log_tail(1000).count("IMPORT FAILED: ComfyUI-VC-Attention") == 0
        prompt = {
            "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 9}},
            "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "t"}},
        }
        image = running.queue(prompt)["2"]["images"][0]
        assert running.view(image).startswith(b"\x89PNG")
        assert (tmp_path / "output" / image["filename"]).is_file()
