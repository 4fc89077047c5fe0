"""The demo's own conduct: the last good result stays, failures are sentences, models are made once."""

from __future__ import annotations

import argparse
import errno
import sys
import urllib.error
from pathlib import Path

import pytest
from vc_attention.tools import comfyui
from vc_attention.tools.demo import FILES, command
from vc_attention.tools.demo.substitute import Settings
from vc_attention.tools.messages import ToolError


@pytest.fixture
def demo(tmp_path):
    found = comfyui.ComfyUI(tmp_path / "comfyui", "0.3.75", ".venv", (), ours=True)
    output = tmp_path / "output" / "demo"
    output.mkdir(parents=True)
    (output / "report.html").write_text("the last good report")
    return command.Demo(found, Path(sys.executable), tmp_path / "base", output, None, Settings())


def neighbours(demo):
    return sorted(path.name for path in demo.output.parent.iterdir())


def test_a_new_result_replaces_the_old_one_whole(tmp_path):
    part, target = tmp_path / "demo.part", tmp_path / "demo"
    for folder, name in ((part, "new"), (target, "old")):
        folder.mkdir()
        (folder / name).write_text(name)
    command.put_in_place(part, target)
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_rename_that_fails_leaves_the_old_result(tmp_path, monkeypatch):
    part, target = tmp_path / "demo.part", tmp_path / "demo"
    for folder, name in ((part, "new"), (target, "old")):
        folder.mkdir()
        (folder / name).write_text(name)
    rename = Path.rename

    def refuse(self, to):
        if self == part:
            raise OSError(errno.EACCES, "Permission denied")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError):
        command.put_in_place(part, target)
    assert [path.name for path in target.iterdir()] == ["old"]


def test_a_report_that_fails_leaves_the_old_result(demo, tmp_path):
    with pytest.raises(ToolError, match="Drawing the report failed"):
        demo._report(tmp_path / "no such run", {})
    assert (demo.output / "report.html").read_text() == "the last good report"
    assert neighbours(demo) == ["demo"]


def test_a_child_that_fails_is_told_with_its_last_words():
    program = "import sys; print('first'); print('the reason'); sys.exit(3)"
    with pytest.raises(ToolError, match=r"Trying failed \(exit status 3\):\nfirst\nthe reason"):
        command._child([sys.executable, "-c", program], {}, "Trying")


def test_a_full_disk_is_a_sentence(tmp_path):
    with (
        pytest.raises(ToolError, match=r"could not write its files \(clip\): No space left.*Free some space"),
        command._disk(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "clip")


@pytest.mark.parametrize(("running", "words"), [(False, "ComfyUI stopped"), (True, "ComfyUI does not answer")])
@pytest.mark.parametrize(
    "error",
    [ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), urllib.error.URLError("refused")],
)
def test_a_server_that_goes_away_is_told_with_its_log(tmp_path, running, words, error):
    class Server:
        def log_tail(self):
            return "Killed"

    Server.running = running
    message = rf"{words} \(.*\nKilled"
    with pytest.raises(ToolError, match=message), command._disk(tmp_path), command._connection(Server()):
        raise error


def test_models_are_written_once_and_again_when_one_is_missing(demo, monkeypatch):
    written = []

    def child(arguments, variables, title):
        written.append(title)
        for name, folder in command._FOLDERS.items():
            path = Path(arguments[-1]) / folder / FILES[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")

    monkeypatch.setattr(command, "_child", child)
    demo._write_models({})
    demo._write_models({})
    assert len(written) == 1
    (demo.base / "models" / "vae" / FILES["vae"]).unlink()
    demo._write_models({})
    assert len(written) == 2
    (demo.base / "models" / "vc-attention-demo.txt").write_text("made by another version")
    demo._write_models({})
    assert len(written) == 3


def test_models_that_fail_leave_no_stamp(demo, monkeypatch):
    def child(arguments, variables, title):
        raise ToolError("no")

    stamp = demo.base / "models" / "vc-attention-demo.txt"
    stamp.parent.mkdir(parents=True)
    stamp.write_text("an earlier version, of which some files may now be replaced")
    monkeypatch.setattr(command, "_child", child)
    with pytest.raises(ToolError):
        demo._write_models({})
    assert not stamp.exists()


def test_a_server_without_the_pack_is_told_with_the_log(demo, tmp_path):
    class Server:
        def object_info(self):
            return {"VCDemoRecord": {}}

        def log_tail(self, lines):
            return "ImportError: because"

    with pytest.raises(ToolError, match=r"VCAttentionPatch did not load.*\nImportError: because"):
        demo._clips(Server(), {}, tmp_path, "cpu")


def test_the_clip_is_found_among_the_outputs():
    outputs = {"3": {"text": ["x"]}, "16": {"images": [{"filename": "plain_00001_.webp"}]}}
    assert command._clip(outputs) == {"filename": "plain_00001_.webp"}
    with pytest.raises(ToolError, match="saved no clip"):
        command._clip({"3": {"images": [{"filename": "a.png"}]}})


def test_a_machine_without_a_gpu_uses_the_specification(demo):
    assert demo._backend("cpu", {}) == "spec"


def test_the_options():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert parser.parse_args([]).seed == Settings().seed
    given = parser.parse_args(["--comfyui", "X", "--port", "8200", "--seed", "3"])
    assert (given.comfyui, given.port, given.seed) == ("X", 8200, 3)
