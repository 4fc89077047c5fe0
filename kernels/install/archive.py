"""A wheel's files, checked before the first one is written: it may write below one folder, small plain files only."""

from __future__ import annotations

import io
import re
import stat
import zipfile
import zlib
from pathlib import Path

from ..families import package_name
from .files import sync_folder, write_new
from .pins import LARGEST, Wheel
from .trouble import Trouble

_MOST_FILES = 4096
_DEEPEST = 4
#: What every file system takes and none reads as something else. The last character keeps Windows from trimming it.
_PART = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.+-]*[A-Za-z0-9_+-])?")
_WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def unpack(data: bytes, wheel: Wheel, folder: Path) -> None:
    """Write the kernels of a wheel's bytes into `folder`: `<arch>/...` and `provenance.json`.

    Raises Trouble when the wheel is not one that may be unpacked (then nothing is written), OSError when writing fails.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            chosen = _chosen(archive.infolist(), wheel)
            for name, member in chosen.items():
                target = folder.joinpath(*name.split("/"))
                target.parent.mkdir(parents=True, exist_ok=True)
                write_new(target, _content(archive, member, wheel))
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError, ValueError, zlib.error) as error:
        raise _refused(wheel, f"it is damaged: {error}") from error
    for parent in {folder, *(folder.joinpath(*name.split("/")).parent for name in chosen)}:
        sync_folder(parent)


def _chosen(members: list[zipfile.ZipInfo], wheel: Wheel) -> dict[str, zipfile.ZipInfo]:
    """Where each member that holds kernels goes; raises Trouble at the first member that no wheel of ours has."""
    top = package_name(wheel.family)
    if len(members) > _MOST_FILES:
        raise _refused(wheel, f"it holds {len(members)} files")
    if sum(member.file_size for member in members) > LARGEST:
        raise _refused(wheel, "its content is absurdly large")
    seen: set[str] = set()
    chosen = {}
    for member in members:
        # zipfile already cut the name at a NUL and made the system's separators slashes; the archive's own word counts
        name = member.orig_filename
        parts = name.removesuffix("/").split("/")
        if len(parts) > _DEEPEST or not all(map(_is_plain, parts)):
            raise _refused(wheel, f"{name!r} would be written outside its folder or under another name")
        if name.lower() in seen:
            raise _refused(wheel, f"{name!r} is in it twice")
        seen.add(name.lower())
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFDIR if name.endswith("/") else stat.S_IFREG):
            raise _refused(wheel, f"{name!r} is a link or a device")
        if member.flag_bits & 1:
            raise _refused(wheel, f"{name!r} is encrypted")
        if name.endswith("/") or parts[0] != top or parts[1:] == ["__init__.py"]:
            continue
        chosen["/".join(parts[1:])] = member
    return chosen


def _is_plain(part: str) -> bool:
    return _PART.fullmatch(part) is not None and _WINDOWS_DEVICES.fullmatch(part) is None


def _content(archive: zipfile.ZipFile, member: zipfile.ZipInfo, wheel: Wheel) -> bytes:
    """The bytes of a member, never more than it declares."""
    with archive.open(member) as file:
        content = file.read(member.file_size + 1)
    if len(content) != member.file_size:
        raise _refused(wheel, f"{member.filename!r} is not as long as it declares")
    return content


def _refused(wheel: Wheel, why: str) -> Trouble:
    return Trouble(f"{wheel.file} is not unpacked: {why}.", "Report this to the pack's authors.")
