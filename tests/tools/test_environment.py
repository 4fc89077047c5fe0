"""`.venv`: made once, checked each time, repaired with one sentence, never half made. A real pip, no network."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from vc_attention.tools import environment
from vc_attention.tools.messages import ToolError

pytestmark = pytest.mark.timeout(180)


def wheel(folder: Path, version: str) -> None:
    """A package `tiny` of one module, as a wheel."""
    info = f"tiny-{version}.dist-info"
    with zipfile.ZipFile(folder / f"tiny-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        names = ["tiny.py", *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD"))]
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """An environment with tiny 1.0 that was made once; tests work on copies of it."""
    folder = tmp_path_factory.mktemp("made with spaces")
    shelf = folder / "shelf"
    shelf.mkdir()
    wheel(shelf, "1.0")
    wheel(shelf, "2.0")
    requirements = folder / "tiny.txt"
    requirements.write_text('# comment\ntiny==1.0\nnot-here==9; python_version < "3"\n')
    with pytest.MonkeyPatch.context() as patch:
        offline(patch, folder, shelf)
        result = environment.make(folder / ".venv", [requirements])
    return SimpleNamespace(folder=folder, shelf=shelf, venv=result.folder)


def offline(patch: pytest.MonkeyPatch, folder: Path, shelf: Path) -> None:
    """pip finds what is in `shelf` and nothing else; our caches are in `folder`; no space is asked for."""
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", shelf.as_uri())  # the setting is a list with spaces between
    patch.setenv("PIP_CONFIG_FILE", os.devnull)
    patch.setattr(environment, "CACHE", folder / "cache")
    patch.setattr(environment, "NEW_ENVIRONMENT_BYTES", 0)
    patch.setattr(environment, "MORE_PACKAGES_BYTES", 0)
    patch.setattr(environment, "PAUSE", 0.0)


@pytest.fixture
def here(made: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A copy of the made environment: `venv`, `requirements`, and `make()`."""
    offline(monkeypatch, tmp_path, made.shelf)
    venv, requirements = tmp_path / ".venv", tmp_path / "tiny.txt"
    shutil.copytree(made.venv, venv, symlinks=True)
    shutil.copy2(made.folder / "tiny.txt", requirements)
    return SimpleNamespace(
        venv=venv,
        requirements=requirements,
        stamp=venv / environment.STAMP,
        tiny=next(venv.rglob("tiny.py")),
        state=lambda: environment.state(venv, [requirements]),
        make=lambda: environment.make(venv, [requirements]),
        version=lambda: version_of(venv),
    )


def version_of(venv: Path) -> str:
    command = [str(environment.interpreter(venv)), "-c", "import tiny; print(tiny.VERSION)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_second_run_changes_nothing(here: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    before = here.stamp.stat().st_mtime_ns
    result = here.make()
    assert result.python == environment.interpreter(here.venv) and result.folder == here.venv
    assert here.stamp.stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


def test_a_changed_pin_is_installed_without_starting_over(here: SimpleNamespace) -> None:
    marker = here.venv / "still the same environment"
    marker.touch()
    here.requirements.write_text("tiny==2.0\n")
    here.make()
    assert here.version() == "2.0" and marker.exists()


def test_a_package_changed_by_hand_is_set_right_with_a_sentence(here: SimpleNamespace, capsys) -> None:
    info = next(here.venv.rglob("tiny-1.0.dist-info"))
    info.rename(info.with_name("tiny-0.5.dist-info"))
    metadata = info.with_name("tiny-0.5.dist-info") / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 0.5"))
    record = metadata.with_name("RECORD")
    record.write_text(record.read_text().replace("tiny-1.0", "tiny-0.5"))
    here.make()
    assert here.version() == "1.0" and here.state() is None
    assert "tiny is 0.5 instead of 1.0" in capsys.readouterr().err


def lose_python(here: SimpleNamespace) -> None:
    environment.interpreter(here.venv).unlink()


def lose_a_file(here: SimpleNamespace) -> None:
    here.tiny.unlink()


def lose_pip(here: SimpleNamespace) -> None:
    shutil.rmtree(next(here.venv.rglob("site-packages")) / "pip")


def change_python(here: SimpleNamespace) -> None:
    here.stamp.write_text(json.dumps({**json.loads(here.stamp.read_text()), "python": "3.9.1"}))


def cut_off(here: SimpleNamespace) -> None:
    here.stamp.write_text(json.dumps({"made_by": "run.py"}))


def damage_the_stamp(here: SimpleNamespace) -> None:
    here.stamp.write_text("{")


def empty_the_folder(here: SimpleNamespace) -> None:
    shutil.rmtree(here.venv)
    here.venv.mkdir()


def become_a_file(here: SimpleNamespace) -> None:
    shutil.rmtree(here.venv)
    here.venv.write_text("oops")


def become_a_dead_link(here: SimpleNamespace) -> None:
    shutil.rmtree(here.venv)
    here.venv.symlink_to(here.venv.parent / "gone")


HARM = {
    "Python gone": (lose_python, "its Python does not start"),
    "file gone": (lose_a_file, "tiny has lost tiny.py"),
    "pip gone": (lose_pip, "its Python does not start"),
    "other Python": (change_python, "it was made with Python 3.9.1 and now runs"),
    "cut off": (cut_off, "it was never finished"),
    "stamp damaged": (damage_the_stamp, "it was never finished"),
    "empty": (empty_the_folder, "it holds no working Python"),
    "a file": (become_a_file, "it holds no working Python"),
    "a dead link": (become_a_dead_link, "it holds no working Python"),
}


@pytest.mark.parametrize("name", HARM)
def test_a_broken_environment_is_recognised(name: str, here: SimpleNamespace) -> None:
    harm, words = HARM[name]
    harm(here)
    problem = here.state()
    assert problem is not None and problem.again and words in problem.text


@pytest.mark.parametrize("name", ["file gone", "a dead link"])
def test_a_broken_environment_is_made_again_with_one_sentence(name: str, here: SimpleNamespace, capsys) -> None:
    harm, words = HARM[name]
    harm(here)
    here.make()
    assert here.version() == "1.0" and here.state() is None
    told = [line for line in capsys.readouterr().err.splitlines() if "not usable" in line]
    assert len(told) == 1 and words in told[0] and "making it again" in told[0]


def test_an_environment_of_the_user_is_left_alone(here: SimpleNamespace) -> None:
    here.stamp.unlink()
    with pytest.raises(ToolError, match="did not make, so it was left alone"):
        here.make()
    assert here.version() == "1.0"


def test_a_folder_that_is_no_environment_is_left_alone(here: SimpleNamespace) -> None:
    shutil.rmtree(here.venv)
    here.venv.mkdir()
    (here.venv / "thesis.txt").write_text("important")
    with pytest.raises(ToolError, match="is in the way"):
        here.make()
    assert (here.venv / "thesis.txt").read_text() == "important"


def test_a_failed_download_is_tried_again_then_one_sentence_and_the_next_run_works(
    here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    runs = []
    run_pip = environment._run_pip
    monkeypatch.setattr(environment, "_run_pip", lambda *given: runs.append(1) or run_pip(*given))
    with monkeypatch.context() as patch:
        patch.delenv("PIP_NO_INDEX")
        patch.delenv("PIP_FIND_LINKS")
        patch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed}/")
        patch.setenv("NO_PROXY", "127.0.0.1")
        here.requirements.write_text("tiny==2.0\n")
        with pytest.raises(ToolError, match=r"The download of tiny==2\.0 failed 3 times") as failed:
            here.make()
    assert "network" in str(failed.value) and "\n" not in str(failed.value) and len(runs) == 3
    assert "Installing tiny: failed" in capsys.readouterr().err
    here.make()
    assert here.version() == "2.0" and here.state() is None


def test_an_index_that_answers_nonsense_is_one_sentence(here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nonsense(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>Please log in to the hotel's network</html>")

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Nonsense)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        here.requirements.write_text("tiny==3.0\n")
        with pytest.raises(ToolError, match=r"pip could not install tiny==3\.0: No matching distribution") as failed:
            here.make()
    finally:
        server.shutdown()
    assert "\n" not in str(failed.value)


def test_too_little_disk_is_said_before_anything_is_made(
    here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(here.venv)
    monkeypatch.setattr(environment, "NEW_ENVIRONMENT_BYTES", 3e9)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda place: SimpleNamespace(free=1.5 * 2**30))
    with pytest.raises(ToolError, match=r"Not enough disk space to make .*2\.8 GB are needed and 1\.5 GB are free"):
        here.make()
    assert not here.venv.exists()


def small_disk(folder: Path, size: str) -> bool:
    """Mount a small tmpfs on `folder`; False where that is not allowed."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    return subprocess.run(mount, capture_output=True, check=False).returncode == 0


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(
    here: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    real = small_disk(disk, "2m")
    if not real:
        # an account that may not mount: the environment module of Python as it fails on a full disk
        full = "OSError: [Errno 28] No space left on device"
        monkeypatch.setattr(
            environment.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=1, stdout="", stderr=full)
        )
    try:
        with pytest.raises(ToolError, match="The disk is full") as failed:
            environment.make(disk / ".venv", [here.requirements])
        assert "\n" not in str(failed.value)
        assert not (disk / ".venv").exists()
    finally:
        if real:
            subprocess.run(["umount", str(disk)], check=True)


def test_pip_on_a_full_disk_is_one_sentence(here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["Collecting torch==2.13.0", "ERROR: Could not install packages: [Errno 28] No space left on device"]
    monkeypatch.setattr(environment, "_run_pip", lambda *given: (1, lines))
    here.requirements.write_text("tiny==2.0\n")
    with pytest.raises(ToolError, match="The disk is full"):
        here.make()


def test_a_python_without_venv_says_what_to_install(here: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    here.stamp.write_text("{}")
    no_module = "The virtual environment was not created successfully because ensurepip is not available."
    run = environment.subprocess.run

    def faked(command: list[str], **options: object) -> object:
        if "venv" in command:
            return SimpleNamespace(returncode=1, stdout=no_module, stderr="")
        return run(command, **options)

    monkeypatch.setattr(environment.subprocess, "run", faked)
    with pytest.raises(ToolError, match=r"sudo apt install python3\.\d+-venv"):
        here.make()
    assert not here.venv.exists()


def test_a_given_python_is_used_as_it_is(tmp_path: Path) -> None:
    result = environment.prepare(["comfyui-0.3.75.txt"], python=sys.executable)
    assert result.folder is None and result.python == Path(os.path.abspath(sys.executable))
    for wrong in ("no-such-python", str(tmp_path)):
        with pytest.raises(ToolError, match="not a Python that starts") as refused:
            environment.prepare([], python=wrong)
        assert refused.value.status == 2


def test_pip_settings_that_install_elsewhere_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_TARGET", "PIP_USER", "PYTHONPATH", "PYTHONHOME"):
        monkeypatch.setenv(name, "/elsewhere")
    monkeypatch.setenv("PIP_PROXY", "http://proxy")
    variables = environment._variables()
    assert "/elsewhere" not in variables.values() and variables["PIP_PROXY"] == "http://proxy"


@pytest.mark.parametrize(
    ("line", "summary"),
    [
        ("Collecting torch==2.13.0 (from -r x.txt (line 2))", "looking up torch"),
        ("  Downloading av-18.1.0-cp311-cp311-manylinux_2_28_x86_64.whl (34.1 MB)", "downloading av 18.1.0 (34.1 MB)"),
        ("  Using cached numpy-2.4.6-cp311-cp311-linux.whl (16 MB)", "taking from the cache numpy 2.4.6 (16 MB)"),
        ("Installing collected packages: a, b, c", "unpacking 3 packages"),
        ("Requirement already satisfied: a", None),
        ("", None),
    ],
)
def test_pip_output_is_summed_up(line: str, summary: str | None) -> None:
    assert environment.summarise(line) == summary
