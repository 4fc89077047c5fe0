"""install.py as ComfyUI Manager runs it: any folder, any number of times; never a failure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_wheels
from install_cases import NAME, NEW, OLD, beside, with_old
from installing import Pack, start
from small_wheels import check_build
from wheel_server import serving

OWN = "ComfyUI's own attention runs"


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """A pack that pins one small wheel, in a folder with spaces and letters that ASCII lacks."""
    pack = Pack(tmp_path / "custom nodes" / "\u00dcbung \u4e2d\u6587 VC")
    pack.pin({"hopper": NEW})
    return pack


def test_a_wheel_beside_the_pack_is_installed_once(pack: Pack, tmp_path: Path) -> None:
    beside(pack)
    line = pack.run(cwd=tmp_path)
    assert line == (
        "VC-Attention: NVIDIA H200 (compute capability 9.0): the 8-bit kernels for Hopper (H100, H200) are installed "
        f"now (version 0.1.0, from {pack.folder / 'wheels' / NAME}). Restart ComfyUI to use them."
    )
    check_build(pack.prebuilt, data=NEW)
    before, began = pack.tree(), time.monotonic()
    assert "are installed (version 0.1.0); there is nothing to do." in pack.run(cwd=tmp_path / "custom nodes")
    assert time.monotonic() - began < 1
    assert pack.tree() == before
    build = f"hopper/{small_wheels.pins({'hopper': NEW})['wheels'][0]['sha256'][:12]}"
    assert pack.installed() == {
        "hopper.json",
        f"{build}/provenance.json",
        *(f"{build}/sm_90a/{name}" for name in ("manifest.json", *(f"kernel_{n}.cubin" for n in range(3)))),
    }


def test_a_newer_version_takes_the_place_of_the_old_one(pack: Pack) -> None:
    with_old(pack)
    assert check_build(pack.prebuilt, data=OLD)["version"] == "0.0.9"
    beside(pack)
    assert "version 0.1.0" in pack.run()
    assert check_build(pack.prebuilt, data=NEW)["version"] == "0.1.0"
    assert len(list((pack.prebuilt / "hopper").iterdir())) == 1  # the old build is gone


@pytest.mark.parametrize("how", ["folder", "file", "file address", "relative"])
def test_from_a_place_on_this_machine(pack: Pack, tmp_path: Path, how: str) -> None:
    file = tmp_path / "a stick" / "k\u00f6rner" / (NAME if how != "file" else "downloaded (1).whl")
    file.parent.mkdir(parents=True)
    file.write_bytes(NEW)
    given = {"folder": file.parent, "file": file, "file address": file.parent.as_uri(), "relative": file.parent.name}
    assert "are installed now" in pack.run("--from", str(given[how]), cwd=file.parents[1])
    check_build(pack.prebuilt, data=NEW)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("missing", "--from missing: there is no such file or folder."),
        ("empty", f"There is no {NAME} in empty."),
        ("ftp://host/wheels", "There is no way to fetch from ftp addresses"),
        ("wrong", f"is not the file that this version of the pack pins (it has 3 bytes instead of {len(NEW)})"),
        ("forged", "is not the file that this version of the pack pins (its hash differs)"),
    ],
)
def test_a_place_without_the_wheel_is_named_and_the_next_one_serves(
    pack: Pack, tmp_path: Path, given: str, words: str
) -> None:
    for folder, data in (("wrong", b"abc"), ("forged", NEW[:-1] + b"x"), ("empty", None)):
        (tmp_path / folder).mkdir()
        if data:
            (tmp_path / folder / NAME).write_bytes(data)
    with_old(pack)
    line = pack.run("--from", given, cwd=tmp_path)
    assert words in line and "Version 0.0.9, installed before, stays in use." in line
    assert "127.0.0.1:9 cannot be reached (Connection refused)" in line and "run install.py --from FOLDER" in line
    check_build(pack.prebuilt, data=OLD)
    beside(pack)
    assert "are installed now" in pack.run("--from", given, cwd=tmp_path)
    check_build(pack.prebuilt, data=NEW)


def test_without_an_earlier_build_the_line_says_what_runs(pack: Pack) -> None:
    line = pack.run()
    assert "could not be installed. " in line and f"Until then {OWN}." in line
    assert pack.installed() == set()


def test_a_damaged_build_is_brought_anew(pack: Pack) -> None:
    beside(pack)
    pack.run()
    (cubin,) = pack.prebuilt.glob("hopper/*/sm_90a/kernel_1.cubin")
    for harm in (cubin.unlink, lambda: cubin.write_bytes(b"x"), lambda: shutil.rmtree(cubin.parents[1])):
        harm()
        assert "are installed now" in pack.run()
        check_build(pack.prebuilt, data=NEW)
    for text in (
        "",
        "[]",
        "{}",
        '{"schema": 1, "folder": "../../x"}',
        (pack.prebuilt / "hopper.json").read_text()[:40],
    ):
        (pack.prebuilt / "hopper.json").write_text(text)
        assert "are installed now" in pack.run()
        check_build(pack.prebuilt, data=NEW)


def test_a_wheel_that_python_has_as_a_package_needs_no_install(pack: Pack, tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name, data in small_wheels.files_of("hopper").items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)
    (site / "vc_attention_kernels_hopper" / "__init__.py").write_text("raise SystemExit('this code must not run')")
    line = pack.line(pack.start(variables={"PYTHONPATH": str(site)}))
    assert "are installed (version 0.1.0, as a Python package); there is nothing to do." in line
    assert not pack.prebuilt.exists()
    (site / "vc_attention_kernels_hopper" / "sm_90a" / "kernel_0.cubin").write_bytes(b"")
    beside(pack)
    assert "are installed now" in pack.line(pack.start(variables={"PYTHONPATH": str(site)}))


def test_two_different_cards_get_their_wheels(pack: Pack) -> None:
    rtx = small_wheels.wheel("blackwell-rtx")
    pack.pin({"hopper": NEW, "blackwell-rtx": rtx})
    beside(pack)
    beside(pack, rtx, NAME.replace("hopper", "blackwell_rtx"))
    hopper, blackwell = pack.run(machine="two-families").split(" | ")
    assert "NVIDIA H200" in hopper and "Hopper (H100, H200) are installed now" in hopper
    assert "NVIDIA GeForce RTX 5090" in blackwell and "GB10) are installed now" in blackwell
    check_build(pack.prebuilt, "hopper", NEW)
    check_build(pack.prebuilt, "blackwell-rtx", rtx)
    assert "RTX Blackwell" in pack.run(machine="12.0")
    check_build(pack.prebuilt, "hopper", NEW)  # the card is gone, its kernels need not be


@pytest.mark.parametrize("machine", ["cpu", "8.6", "12.0", "amd"])
def test_a_machine_without_a_card_for_the_wheels_gets_none(pack: Pack, machine: str) -> None:
    beside(pack)
    assert OWN in pack.run(machine=machine)
    assert not pack.prebuilt.exists()


def test_an_image_is_built_where_no_card_is_seen(pack: Pack) -> None:
    beside(pack)
    line = pack.run("--family", "hopper", "--family", "blackwell-rtx", machine="cpu")
    assert "The 8-bit kernels for Hopper (H100, H200) are installed now" in line
    assert line.endswith("There are no released kernels for blackwell-rtx yet.")
    check_build(pack.prebuilt, data=NEW)


def test_a_driver_that_is_too_old_is_said(pack: Pack) -> None:
    beside(pack)
    line = pack.run(cuda=12020)
    assert "serves CUDA 12.2, and the kernels are made for 12.4 or newer: update the driver." in line


def test_remove_and_list(pack: Pack) -> None:
    assert "nothing to remove" in pack.run("--remove")
    beside(pack)
    pack.run()
    listed = start(pack.command("--list"), pack.folder).communicate(timeout=60)[0].splitlines()
    assert len(listed) == 8
    (hopper,) = (row for row in listed if row.startswith("Hopper"))
    assert hopper.endswith("8-bit kernels released, installed, version 0.1.0, every file as it was built")
    by_hand = pack.prebuilt / "sm_90a" / "manifest.json"
    by_hand.parent.mkdir()
    by_hand.write_text("{}")
    assert "would be removed" in pack.run("--remove", "--dry-run")
    check_build(pack.prebuilt, data=NEW)
    assert "kernels for hopper are removed" in pack.run("--remove")
    assert pack.installed() == {"sm_90a/manifest.json"}  # what somebody built by hand stays
    assert "are installed now" in pack.run()


def test_dry_run_changes_nothing_and_asks_nobody(pack: Pack) -> None:
    with serving({NAME: NEW}) as server:
        pack.repository(server.address)
        before = pack.tree()
        line = pack.run("--dry-run")
        assert f"would be installed ({NAME}, {round(len(NEW) / 1e3)} KB, from {server.address}releases/" in line
        assert server.requests == [] and pack.tree() == before and not pack.prebuilt.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"schema": 2, "version": "1", "wheels": []}', "path", "size", "family"]
)
def test_damaged_pins_are_a_sentence(pack: Pack, text: str) -> None:
    data = small_wheels.pins({"hopper": NEW})
    if text == "path":
        data["wheels"][0]["file"] = "../x.whl"
    elif text == "size":
        data["wheels"][0]["size"] = 1 << 60
    elif text == "family":
        data["wheels"][0]["family"] = "../x"
    pins = pack.folder / "kernels" / "wheels.json"
    pins.write_text(json.dumps(data) if text in ("path", "size", "family") else text)
    assert "wheels.json is damaged. Reinstall or update the pack." in pack.run() and not pack.prebuilt.exists()


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "kernels" / "cards.py").write_text("this is not Python"),
        lambda folder: (folder / "kernels" / "cards.py").write_text(""),
        lambda folder: shutil.rmtree(folder / "kernels"),
    ],
    ids=["damaged", "empty", "missing"],
)
def test_a_damaged_pack_ends_with_status_0_and_a_sentence(pack: Pack, harm) -> None:
    harm(pack.folder)
    process = pack.start()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == "" and out.count("\n") == 1
    assert out.startswith("VC-Attention: install.py could not finish (")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--list"], ["--no-such-option"], ["--list=3"], ["--timeout", "0"], ["--family", "x"]]
)
def test_every_option_ends_with_status_0(pack: Pack, arguments: list[str]) -> None:
    process = pack.start(*arguments, machine="cpu")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and (out or err) and "Traceback" not in err


def test_a_console_without_the_letters_is_no_problem(pack: Pack) -> None:
    beside(pack)
    line = pack.line(pack.start(variables={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}))
    assert "?bung ?? VC" in line and "are installed now" in line


def test_nobody_listens(pack: Pack) -> None:
    beside(pack)
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(pack.command(), stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert process.communicate(timeout=60)[1] == b"" and process.returncode == 0
    check_build(pack.prebuilt, data=NEW)


def test_an_old_python_gets_a_sentence(pack: Pack) -> None:
    code = (
        "import sys, runpy; sys.version_info = (3, 9, 18, 'final', 0); runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    process = start([sys.executable, "-c", code, str(pack.folder / "install.py")], pack.folder)
    assert "it needs 3.10 or newer" in pack.line(process)


def test_it_needs_no_installed_package_and_writes_nowhere_else(pack: Pack, tmp_path: Path) -> None:
    """Isolated mode: no site-packages, no environment, no folder of the pack on sys.path."""
    beside(pack)
    command = [sys.executable, "-I", "-S", str(pack.folder / "install.py"), "--family", "hopper"]
    before = set(pack.tree())
    assert "are installed now" in pack.line(start(command, tmp_path))
    check_build(pack.prebuilt, data=NEW)
    assert all(name.startswith("kernels/prebuilt/") for name in set(pack.tree()) - before)
