"""install.py where it cannot write: read-only folders, another owner, a full disk. Real mounts where they are allowed.

Mounts live in a mount namespace of their own, which ends with the process: nothing is left behind, whatever happens.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import small_wheels
from installing import Pack, start
from small_wheels import check_build
from vc_attention.kernels.install import command, files
from vc_attention.kernels.install.trouble import of_writing
from wheel_server import serving

OLD, NEW = small_wheels.wheel(version="0.0.9"), small_wheels.wheel(size=60000)
NAME = "vc_attention_kernels_hopper-0.1.0-py3-none-any.whl"
KEPT = "Version 0.0.9, installed before, stays in use."
NO_MOUNTS = "mount namespaces are not permitted here"


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """A pack with the old build installed and the new wheel in a folder of its own."""
    return made(tmp_path / "pack")


def made(folder: Path) -> Pack:
    pack = Pack(folder)
    pack.pin({"hopper": OLD}, "0.0.9")
    (folder / "wheels").mkdir()
    (folder / "wheels" / NAME.replace("0.1.0", "0.0.9")).write_bytes(OLD)
    assert "are installed now" in pack.run()
    pack.pin({"hopper": NEW})
    (folder / "wheels" / NAME).write_bytes(NEW)
    return pack


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """The start of a command that may mount, for itself alone."""
    for start_of_it in (["unshare", "-m"], ["unshare", "-rm"]):
        probe = [*start_of_it, "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
        try:
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return start_of_it
        except OSError:
            break
    pytest.skip(NO_MOUNTS)


def in_namespace(namespace: list[str], pack: Pack, script: str, result: Path, *arguments: str) -> str:
    """The line of install.py after `script` has mounted something over $P (prebuilt) or $F (the pack); `result` is what
    prebuilt holds then.
    """
    shell = f'set -e; {script}; "$@"; mkdir "$R"; cp -a "$P/." "$R"'
    whole = [*namespace, "sh", "-c", shell, "sh", *pack.command(*arguments)]
    variables = {"P": str(pack.prebuilt), "F": str(pack.folder), "R": str(result)}
    return pack.line(start(whole, pack.folder, variables))


READ_ONLY = {
    "the whole pack": 'mount --bind "$F" "$F"; mount -o remount,bind,ro "$F"',
    "prebuilt": 'mount --bind "$P" "$P"; mount -o remount,bind,ro "$P"',
}


@pytest.mark.parametrize("what", READ_ONLY)
def test_a_read_only_folder(namespace: list[str], pack: Pack, tmp_path: Path, what: str) -> None:
    line = in_namespace(namespace, pack, READ_ONLY[what], tmp_path / "result")
    assert f"{pack.prebuilt} cannot be written to (Read-only file system)." in line and KEPT in line
    assert "make the folder writable or become its owner, and run install.py again" in line
    check_build(tmp_path / "result", data=OLD)
    assert "are installed now" in pack.run()


def test_nothing_to_do_in_a_read_only_folder(namespace: list[str], pack: Pack, tmp_path: Path) -> None:
    assert "are installed now" in pack.run()
    line = in_namespace(namespace, pack, READ_ONLY["the whole pack"], tmp_path / "result")
    assert "there is nothing to do" in line
    line = in_namespace(namespace, pack, READ_ONLY["the whole pack"], tmp_path / "second", "--remove")
    assert "cannot be written to" in line
    check_build(tmp_path / "second", data=NEW)


#: KB of the disk, and whether the wheel is downloaded. Room for the old build and: a part of the new one; a part of
#: the download; the download and a part of what is in it.
DISKS = {"from the wheels folder": (120, False), "download": (100, True), "unpacking": (340, True)}


@pytest.mark.parametrize("where", DISKS)
def test_a_full_disk(namespace: list[str], pack: Pack, tmp_path: Path, where: str) -> None:
    room, download = DISKS[where]
    script = f'cp -a "$P" "$R.seed"; mount -t tmpfs -o size={room}k none "$P"; cp -a "$R.seed/." "$P"'
    with serving({NAME: NEW}) as server:
        if download:
            shutil.rmtree(pack.folder / "wheels")
            pack.repository(server.address)
        line = in_namespace(namespace, pack, script, tmp_path / "result")
        assert f"The disk that holds {pack.prebuilt}" in line and "is full." in line and KEPT in line
        assert "Free some space and run install.py again." in line
        check_build(tmp_path / "result", data=OLD)
        left = {path.name for path in (tmp_path / "result").rglob("*") if path.is_file()} - {".lock"}
        # what was fetched whole waits for the next run; halves and drafts are gone
        kept = {name for name in left if name.endswith(".part")}
        assert bool(kept) == (where == "unpacking") and not [name for name in left if name.endswith(".tmp")]
        assert "are installed now" in pack.run()
    check_build(pack.prebuilt, data=NEW)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every account of this machine may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="vc install ") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_as_an_account_that_does_not_own_the_folder(open_folder: Path) -> None:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another account")
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    # the interpreter and this checkout may lie in folders of root's alone; the system's Python and a copy do not
    python = next((path for path in ("/usr/bin/python3", sys.executable) if can_run([*nobody, path])), None)
    if python is None:
        pytest.skip("no Python of this machine can be started by another account")
    pack = made(open_folder / "pack")
    wanted = [*nobody, python, "-I", "-S", str(pack.folder / "install.py"), "--family", "hopper"]
    line = pack.line(start(wanted, open_folder))
    assert "cannot be written to (Permission denied)." in line and KEPT in line
    check_build(pack.prebuilt, data=OLD)
    shutil.rmtree(pack.prebuilt)
    assert "cannot be written to (Permission denied)." in pack.line(start(wanted, open_folder))
    assert "are installed now" in pack.run()
    assert "there is nothing to do" in pack.line(start(wanted, open_folder))  # and what root brought can be read
    check_build(pack.prebuilt, data=NEW)


def can_run(python: list[str]) -> bool:
    """Whether this Python starts and is new enough."""
    code = "import sys, ctypes; sys.exit(sys.version_info < (3, 10))"
    return subprocess.run([*python, "-I", "-S", "-c", code], capture_output=True, check=False).returncode == 0


def failing(code: int, after: int) -> Callable[[int], None]:
    """os.fsync of a disk that gives out at the write after so many."""
    count = 0

    def fsync(handle: int) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(code, os.strerror(code))

    return fsync


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_gives_out_at_any_write(
    pack: Pack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    """In this process, without mounts: whichever write fails, the pointer names a whole build and no draft stays."""
    for after in range(12):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", failing(code, after))
            command.main(pack.folder, ["--family", "hopper"])
        line = capsys.readouterr().out
        check_build(pack.prebuilt)
        if "are installed now" in line:
            break
        words = {errno.ENOSPC: "is full", errno.EDQUOT: "is full", errno.EROFS: "cannot be written to"}
        assert words.get(code, "failed (Input/output error)") in line
        assert not list(pack.prebuilt.rglob("*.tmp"))
    assert 6 <= after < 11  # six files and the pointer; folders may fail
    check_build(pack.prebuilt, data=NEW)


def test_a_file_in_the_way_of_the_folder(pack: Pack) -> None:
    shutil.rmtree(pack.prebuilt)
    pack.prebuilt.write_text("in the way")
    assert "prebuilt" in pack.run() and pack.prebuilt.read_text() == "in the way"


def test_a_reason_without_a_text() -> None:
    assert of_writing(OSError("odd"), Path("x")).text == "Writing in x failed (odd)."
