"""Where a wheel may come from, in the order in which the places are tried."""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from .address import local_path, shown
from .pins import Pins, Wheel, release_address
from .trouble import Trouble

_ELSEWHERE = "Get the file that kernels/wheels.json names, and run install.py --from FOLDER."


@dataclass(frozen=True)
class Place:
    """A file of this machine (`path`) or an address of a server (`url`)."""

    path: Path | None = None
    url: str = ""

    def __str__(self) -> str:
        return str(self.path) if self.path else shown(self.url)

    def get(self, wheel: Wheel, part: Path, timeout: float) -> bytes:
        """The wheel's bytes, size and hash checked. Raises Trouble."""
        if self.path:
            return read(self.path, wheel)
        try:
            # The registry's archive brings the wheels and leaves this one file out: its scanner takes any download for
            # a danger.
            from . import download
        except ImportError as error:
            raise Trouble(
                "This copy of the pack downloads nothing by itself.",
                f"Get {self} with a browser, and run install.py --from FOLDER.",
            ) from error
        return download.fetch(self.url, part, wheel, timeout)


def places_of(pack: Path, pins: Pins, wheel: Wheel, given: str | None) -> list[Place | Trouble]:
    """given: what --from names: a folder, a wheel, or the address of either. A Trouble is a place that is none."""
    places: list[Place | Trouble] = []
    if given:
        try:
            places.append(_given(given, wheel))
        except Trouble as trouble:
            places.append(trouble)
        except ValueError as error:
            places.append(Trouble(f"What --from names is not an address ({error}).", _ELSEWHERE))
    beside = pack / "wheels" / wheel.file
    if beside.is_file():
        places.append(Place(beside))
    release = release_address(pack, pins.version)
    if release:
        places.append(Place(url=release + wheel.file))
    return places


def _given(text: str, wheel: Wheel) -> Place:
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", text)
    scheme = found[1].lower() if found else ""
    if scheme in ("http", "https"):
        address = urllib.parse.urlsplit(text)
        if address.path.endswith(".whl"):
            return Place(url=text)
        below = address.path.rstrip("/") + "/" + urllib.parse.quote(wheel.file)
        return Place(url=urllib.parse.urlunsplit(address._replace(path=below, fragment="")))
    if scheme not in ("", "file"):
        raise Trouble(f"There is no way to fetch from {scheme} addresses, as --from names one.", _ELSEWHERE)
    path = local_path(text) if scheme else Path(text).expanduser()
    if path.is_dir():
        path = path / wheel.file
        if not path.exists():
            raise Trouble(f"There is no {wheel.file} in {path.parent}.", _ELSEWHERE)
    if not path.exists():
        raise Trouble(f"--from {text}: there is no such file or folder.", _ELSEWHERE)
    return Place(path)


def read(path: Path, wheel: Wheel) -> bytes:
    """The bytes of a wheel on this machine, checked. Raises Trouble."""
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size == wheel.size else b""
    except OSError as error:
        raise Trouble(f"{path} cannot be read ({error.strerror or error}).", _ELSEWHERE) from error
    if size != wheel.size or hashlib.sha256(data).hexdigest() != wheel.sha256:
        why = "its hash differs" if size == wheel.size else f"it has {size} bytes instead of {wheel.size}"
        raise Trouble(f"{path} is not the file that this version of the pack pins ({why}).", _ELSEWHERE)
    return data
