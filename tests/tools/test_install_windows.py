"""The branches of install.py that only Windows takes, with fakes of what they meet there."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import small_wheels
from fake_windows import FakeMsvcrt, busy
from installing import Pack
from small_wheels import check_build
from vc_attention.kernels.install import address, command, files, places, store
from vc_attention.kernels.install.lock import Lock
from vc_attention.kernels.install.trouble import Trouble

OLD, NEW = small_wheels.wheel(version="0.0.9"), small_wheels.wheel()
NAME = "vc_attention_kernels_hopper-0.1.0-py3-none-any.whl"


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.platform and msvcrt of Windows."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", FakeMsvcrt())


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """A pack with the old build installed and the new wheel beside it."""
    pack = Pack(tmp_path / "pack")
    (pack.folder / "wheels").mkdir()
    for data, version in ((OLD, "0.0.9"), (NEW, "0.1.0")):
        (pack.folder / "wheels" / NAME.replace("0.1.0", version)).write_bytes(data)
    pack.pin({"hopper": OLD}, "0.0.9")
    command.main(pack.folder, ["--family", "hopper"])
    check_build(pack.prebuilt, data=OLD)
    pack.pin({"hopper": NEW})
    return pack


def test_from_its_driver_library_to_an_os_replace_that_is_held_up(pack: Pack) -> None:
    assert "NVIDIA H200 (compute capability 9.0): the 8-bit kernels for Hopper" in pack.run(windows=True)
    check_build(pack.prebuilt, data=NEW)
    assert "there is nothing to do" in pack.run(windows=True)


def test_a_lock_is_waited_for(windows: None, tmp_path: Path) -> None:
    waited: list[str] = []
    order: list[str] = []

    def second() -> None:
        with Lock(tmp_path / "deep" / ".lock", lambda: waited.append("second")) as lock:
            order.append("second")
            assert lock.held

    with Lock(tmp_path / "deep" / ".lock", lambda: waited.append("first")) as lock:
        assert lock.held
        thread = threading.Thread(target=second)
        thread.start()
        while not waited:
            thread.join(0.01)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"] and waited == ["second"]


def test_a_lock_that_is_never_given_back_is_a_sentence(windows: None, tmp_path: Path) -> None:
    with Lock(tmp_path / ".lock", lambda: None), pytest.raises(Trouble, match="has been at work in this pack"):
        Lock(tmp_path / ".lock", lambda: None, patience=0.1).__enter__()
    with Lock(tmp_path / ".lock", lambda: None, patience=0.1) as lock:
        assert lock.held


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch, windows: None, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(45, "Operation not supported")

    monkeypatch.setattr(sys.modules["msvcrt"], "locking", refuse, raising=False)
    with Lock(tmp_path / ".lock", lambda: None) as lock:
        assert not lock.held


def test_a_target_that_a_scanner_holds(windows: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, target = tmp_path / "new", tmp_path / "old"
    source.write_text("new")
    target.write_text("old")
    pauses: list[float] = []
    monkeypatch.setattr(files.os, "replace", busy(os.replace, 5))
    files.replace(source, target, pauses.append)
    assert target.read_text() == "new" and len(pauses) == 5 and sum(pauses) < 2
    source.write_text("newer")
    monkeypatch.setattr(files.os, "replace", busy(os.replace, 100))
    with pytest.raises(PermissionError):
        files.replace(source, target, pauses.append)
    assert target.read_text() == "new"


def test_elsewhere_a_refused_replace_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(files.os, "replace", busy(os.replace, 1))
    with pytest.raises(PermissionError):
        files.replace(tmp_path / "a", tmp_path / "b", pauses.append)
    assert pauses == []


def test_the_pointer_is_held_for_good(
    windows: None, pack: Pack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new build is complete but cannot become the one: the last good one stays, and the next run takes the new."""
    replace = os.replace

    def held(source: Path, target: Path) -> None:
        if Path(target).name == "hopper.json":
            raise PermissionError(13, "Access is denied", str(target))
        replace(source, target)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", held)
        patch.setattr(files, "_WAITS", (0.001,))
        command.main(pack.folder, ["--family", "hopper"])
    line = capsys.readouterr().out
    assert "cannot be written to (Access is denied)." in line and "Close ComfyUI" in line and "Version 0.0.9" in line
    check_build(pack.prebuilt, data=OLD)
    assert not list(pack.prebuilt.glob("*.tmp"))
    command.main(pack.folder, ["--family", "hopper"])
    check_build(pack.prebuilt, data=NEW)


def test_old_files_that_comfyui_holds_go_the_next_time(
    windows: None, pack: Pack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda folder, ignore_errors: None)
        command.main(pack.folder, ["--family", "hopper"])
        assert "are installed now" in capsys.readouterr().out
        check_build(pack.prebuilt, data=NEW)
        assert len(list((pack.prebuilt / "hopper").iterdir())) == 2
    command.main(pack.folder, ["--family", "hopper"])
    assert "there is nothing to do" in capsys.readouterr().out
    assert len(list((pack.prebuilt / "hopper").iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda folder, ignore_errors: None)
        command.main(pack.folder, ["--remove"])
        line = capsys.readouterr().out
        assert "Some files stay until ComfyUI is closed and install.py --remove runs again" in line
        assert store.installed(pack.prebuilt, "hopper") is None  # nothing loads them any more
    command.main(pack.folder, ["--remove"])
    assert {path.name for path in pack.prebuilt.iterdir()} == {".lock"}


def test_folders_are_not_opened(windows: None, tmp_path: Path) -> None:
    files.sync_folder(tmp_path / "not there")  # elsewhere this raises


@pytest.mark.parametrize("given", ["C:\\wheels", "\\\\server\\share\\wheels", "D:/wheels"])
def test_paths_of_windows_are_no_addresses(pack: Pack, given: str) -> None:
    pins = command.read_pins(pack.folder / "kernels")
    first = places.places_of(pack.folder, pins, pins.wheels[0], given)[0]
    assert isinstance(first, Trouble) and first.text == f"--from {given}: there is no such file or folder."


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///C:/a%20folder/w%C3%BC", "C:/a folder/w\u00fc"),
        ("file://server/share/wheels", "//server/share/wheels"),
        ("file://localhost/wheels", "/wheels"),
        ("file:///wheels", "/wheels"),
    ],
)
def test_file_addresses_of_windows(url: str, path: str) -> None:
    assert address.local_path(url) == Path(path)
