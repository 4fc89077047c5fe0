"""Archives that no release of ours is: refused before anything is written, wherever they come from."""

from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path

import pytest
import small_wheels
from small_wheels import check_build
from vc_attention.kernels.install import archive, pins, store
from vc_attention.kernels.install.trouble import Trouble

TOP = "vc_attention_kernels_hopper"
GOOD = small_wheels.files_of("hopper")


def pinned(data: bytes) -> pins.Wheel:
    """The pin of these bytes."""
    entry = small_wheels.pins({"hopper": data})["wheels"][0]
    return pins.Wheel(entry["family"], entry["file"], entry["size"], entry["sha256"], tuple(entry["archs"]))


def with_member(name: str, mode: int = 0, data: bytes = b"x") -> bytes:
    """A good wheel and one more member, its name exactly as given."""
    buffer = io.BytesIO(small_wheels.zipped(GOOD))
    with zipfile.ZipFile(buffer, "a") as file:
        member = zipfile.ZipInfo("x")
        member.filename = name  # ZipInfo would make it harmless
        member.external_attr = mode << 16
        file.writestr(member, data)
    return buffer.getvalue()


HOSTILE = {
    "parent": "../evil",
    "parent inside": f"{TOP}/../../evil",
    "parent at the end": f"{TOP}/sm_90a/..",
    "absolute": "/tmp/evil",
    "drive": "C:/evil",
    "drive inside": f"{TOP}/C:evil",
    "backslash": f"{TOP}\\..\\..\\evil",
    "stream": f"{TOP}/sm_90a/manifest.json:evil",
    "device": f"{TOP}/sm_90a/NUL",
    "device with an ending": f"{TOP}/sm_90a/com1.cubin",
    "trailing dot": f"{TOP}/sm_90a/manifest.json.",
    "trailing space": f"{TOP}/sm_90a/manifest.json ",
    "control character": f"{TOP}/sm_90a/a\x01b",
    "zero": f"{TOP}/sm_90a/a\0b",
    "look-alike": f"{TOP}/sm_90a/m\u0430nifest.json",
    "empty part": f"{TOP}//evil",
    "dot": f"{TOP}/./evil",
    "deep": f"{TOP}/a/b/c/d",
    "other letters' case": f"{TOP}/sm_90a/MANIFEST.JSON",
    "twice": f"{TOP}/sm_90a/manifest.json",
    "empty": "",
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_that_lead_elsewhere(tmp_path: Path, case: str) -> None:
    refused(tmp_path, with_member(HOSTILE[case]))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK, stat.S_IFDIR])
def test_links_and_devices(tmp_path: Path, kind: int) -> None:
    refused(tmp_path, with_member(f"{TOP}/sm_90a/link", kind | 0o777, b"/etc/passwd"), "is a link or a device")


def test_absurd_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = small_wheels.zipped({**GOOD, f"{TOP}/sm_90a/bomb": bytes(10 << 20)})
    assert len(bomb) < 60000
    monkeypatch.setattr(archive, "LARGEST", 5 << 20)
    refused(tmp_path, bomb, "absurdly large")


def test_a_member_that_lies_about_its_size(tmp_path: Path) -> None:
    data = bytearray(small_wheels.zipped({**GOOD, f"{TOP}/sm_90a/bomb": bytes(1 << 20)}))
    real, lie = (1 << 20).to_bytes(4, "little"), (1000).to_bytes(4, "little")
    for record, size_at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = data.rindex(record) + size_at  # the last member's
        assert data[at : at + 4] == real
        data[at : at + 4] = lie
    refused(tmp_path, bytes(data))


def test_too_many_files(tmp_path: Path) -> None:
    many = {f"{TOP}/sm_90a/f{number}": b"" for number in range(5000)}
    refused(tmp_path, small_wheels.zipped(many), "it holds 5000 files")


@pytest.mark.parametrize("length", [0, 4, 22, 100, -100, -1])
def test_truncated_archives(tmp_path: Path, length: int) -> None:
    refused(tmp_path, small_wheels.zipped(GOOD)[:length])


def test_a_bit_that_flipped(tmp_path: Path) -> None:
    data = bytearray(small_wheels.zipped(GOOD))
    data[len(data) // 2] ^= 4
    refused(tmp_path, bytes(data))


def test_encrypted_members(tmp_path: Path) -> None:
    data = bytearray(small_wheels.zipped(GOOD))
    at = data.rindex(b"PK\x01\x02")
    data[at + 8] |= 1
    refused(tmp_path, bytes(data), "is encrypted")


@pytest.mark.parametrize(
    "change",
    [
        {f"{TOP}/sm_90a/manifest.json": None},
        {f"{TOP}/sm_90a/kernel_1.cubin": None},
        {f"{TOP}/sm_90a/kernel_1.cubin": b"other"},
        {f"{TOP}/sm_90a/manifest.json": b"{"},
        {f"{TOP}/sm_90a/manifest.json": b'{"arch": "sm_90a", "kernels": []}'},
        {f"{TOP}/sm_90a/manifest.json": GOOD[f"{TOP}/sm_90a/manifest.json"].replace(b"sm_90a", b"sm_80a")},
        {f"{TOP}/sm_90a/manifest.json": GOOD[f"{TOP}/sm_90a/manifest.json"].replace(b"kernel_1.c", b"../sm_90a/c")},
    ],
    ids=["no manifest", "no cubin", "another cubin", "no JSON", "no kernels", "another arch", "a file elsewhere"],
)
def test_a_wheel_whose_manifest_does_not_hold(tmp_path: Path, change: dict[str, bytes | None]) -> None:
    files = {name: data for name, data in {**GOOD, **change}.items() if data is not None}
    refused(tmp_path, small_wheels.zipped(files), "is incomplete")


def refused(folder: Path, data: bytes, words: str = "is not unpacked") -> None:
    """The wheel is refused with a sentence, nothing is outside of the folder, and the build before stays."""
    prebuilt = folder / "a" / "b" / "prebuilt"
    old = small_wheels.wheel(version="0.0.9")
    store.put(prebuilt, pinned_old(old), "0.0.9", old)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(Trouble) as caught:
        store.put(prebuilt, pinned(data), "0.1.0", data)
    assert words in caught.value.text
    assert caught.value.text.endswith(".") and "\n" not in caught.value.text
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    check_build(prebuilt, data=old)


def pinned_old(data: bytes) -> pins.Wheel:
    entry = small_wheels.pins({"hopper": data}, "0.0.9")["wheels"][0]
    return pins.Wheel(entry["family"], entry["file"], entry["size"], entry["sha256"], tuple(entry["archs"]))


def test_the_good_wheel_of_these_tests_is_taken(tmp_path: Path) -> None:
    data = small_wheels.zipped(GOOD)
    store.put(tmp_path, pinned(data), "0.1.0", data)
    check_build(tmp_path, data=data)
