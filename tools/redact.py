"""Take what is personal out of texts: accounts, host names, folders, addresses. Placeholders say what stood there."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import os
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ACCOUNTS = ("USER", "LOGNAME", "USERNAME", "SUDO_USER")
_HOSTS = ("HOSTNAME", "COMPUTERNAME", "USERDOMAIN", "USERDNSDOMAIN")
#: Names that say nothing about a person or a machine.
_PUBLIC = {"localhost", "localdomain", "workgroup"}
_WORD = r"[^\s/\\:*?\"'<>|,;()]+"
#: Up to four words: folders such as "Program Files" or "My Clips 2025".
_FOLDER = rf"{_WORD}(?: {_WORD}){{0,3}}"
#: The end of a path: with spaces only where an ending such as .mp4 shows how far the name goes.
_LAST = rf"(?:{_WORD}(?: {_WORD}){{0,3}}?\.\w+|{_WORD})"
_START = r"(?<![\w/\\<>.\-])"
_INSIDE = rf"(?:{_FOLDER}[\\/]+)*{_LAST}?[\\/]*"
#: Folders whose inside is a person's. What else lies in the pack, in ComfyUI or in Python is named by them.
_THEIRS = re.compile(
    rf"(<home>|<temp>|<comfyui>[\\/]+(?:models|input|output|temp|user[\\/]+default|custom_nodes))[\\/]+{_INSIDE}"
)
_PATHS = (
    re.compile(r"['\"](?:[A-Za-z]:[\\/]|/|\\\\|~)(?=[^'\"\s])[^'\"\n]*['\"]"),  # in quotes, with anything inside
    re.compile(rf"{_START}[A-Za-z]:[\\/]+{_INSIDE}"),
    re.compile(rf"{_START}\\\\+{_WORD}[\\/]+{_INSIDE}"),
    re.compile(rf"{_START}~(?:{_WORD})?[\\/]+{_INSIDE}"),
    re.compile(rf"{_START}/(?![/\s]){_INSIDE}"),
)
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b[a-z][a-z0-9+.\-]*://[^\s'\"<>)\]]+", re.IGNORECASE), "<address>"),
    (re.compile(r"\b[\w.+\-]+@[\w\-]+(?:\.[\w\-]+)*"), "<e-mail>"),
    (
        re.compile(r"(?<![\w/\\<])[^\s'\"<>|,;:()]+\.(?:safetensors|gguf|ckpt|mp4|mov|mkv|webm|png|jpe?g|webp|gif)\b"),
        "<file>",
    ),
    (re.compile(r"\b(?:hf|ghp|gho|github_pat|sk|glpat)[_-]\w{16,}"), "<secret>"),
    (re.compile(r"(?:GPU-|MIG-)?\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b", re.IGNORECASE), "<address>"),
    (re.compile(r"(?<![\w.+])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])"), "<address>"),
)
_COLONS = re.compile(r"(?<![\w:])[0-9a-f:]*:[0-9a-f]*:[0-9a-f:.]*(?![\w:])", re.IGNORECASE)
#: Longer texts are cut, before anything else: the patterns take time that grows with the square of the length.
_LONGEST = 3000
_PLACEHOLDER = re.compile(r"(<[a-z-]+>)")


@dataclass(frozen=True)
class Redactor:
    """Replaces what is known to be personal here, and whatever looks like a path, an address or a key.

    folders: (folder, placeholder), names: (word, placeholder). Public package addresses count as addresses too: what a
    reader needs is in the fields beside them.
    """

    folders: tuple[tuple[str, str], ...]
    names: tuple[tuple[str, str], ...]

    def text(self, text: str) -> str:
        """`text` without anything personal, and not longer than a sentence needs. Twice changes nothing more."""
        text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
        for pattern, placeholder in _PATTERNS[:1]:  # addresses first: they hold slashes, names and @
            text = pattern.sub(placeholder, text)
        for folder, placeholder in self.folders:
            text = _folder_pattern(folder).sub(placeholder, text)
        text = _THEIRS.sub(r"\1", text)
        for pattern in _PATHS:
            text = pattern.sub("<path>", text)
        for pattern, placeholder in _PATTERNS[1:]:
            text = pattern.sub(placeholder, text)
        text = _COLONS.sub(_without_ipv6, text)
        parts = _PLACEHOLDER.split(text)
        for word, placeholder in self.names:
            pattern = re.compile(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])", re.IGNORECASE)
            parts = [part if _PLACEHOLDER.fullmatch(part) else pattern.sub(placeholder, part) for part in parts]
            parts = [piece for part in parts for piece in _PLACEHOLDER.split(part)]
        return "".join(parts)

    def tree(self, value: Any) -> Any:
        """The same for every text in a JSON value, keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.tree(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.tree(entry) for entry in value]
        return value


def of_this_machine(
    pack: Path, comfyui: Path | None = None, python: Path | None = None, environment: Mapping[str, str] = os.environ
) -> Redactor:
    """A redactor that knows this account, host and these folders.

    pack: this checkout. comfyui, python: the ComfyUI and the interpreter that were looked at.
    """
    home = Path.home()
    places: list[tuple[Path, str]] = [(pack, "<pack>"), (home, "<home>"), (Path(tempfile.gettempdir()), "<temp>")]
    if comfyui is not None:
        places.append((comfyui, "<comfyui>"))
    prefixes = {sys.prefix, sys.base_prefix, *([] if python is None else [str(python.parent), str(_prefix(python))])}
    places += [(Path(prefix), "<python>") for prefix in prefixes]
    folders = {}
    for place, placeholder in places:
        for folder in (place, _resolved(place)):
            if len(folder.parts) > 1 and folder not in (Path("/usr"), Path("/usr/bin"), Path("/usr/local")):
                folders.setdefault(str(folder), placeholder)
    accounts = [environment.get(name, "") for name in _ACCOUNTS]
    accounts += [home.name, *_account_and_full_name()]
    hosts = [socket.gethostname(), platform.node(), *(environment.get(name, "") for name in _HOSTS)]
    hosts += [host.split(".")[0] for host in hosts]
    names = [*_named(accounts, "<user>"), *_named(hosts, "<host>")]
    return Redactor(
        tuple(sorted(folders.items(), key=lambda pair: -len(pair[0]))),
        tuple(sorted(dict(reversed(names)).items(), key=lambda pair: -len(pair[0]))),
    )


def _folder_pattern(folder: str) -> re.Pattern[str]:
    """The folder at the beginning of a path, with either separator, also doubled as in Python's and JSON's quotes."""
    pieces = [re.escape(piece) for piece in re.split(r"[\\/]+", folder.rstrip("\\/"))]
    return re.compile(r"(?<![\w.\-])" + r"[\\/]+".join(pieces) + r"(?![\w\-])(?!\.\w)", re.IGNORECASE)


def _without_ipv6(found: re.Match[str]) -> str:
    try:
        ipaddress.IPv6Address(found[0].rstrip(".") if len(found[0]) > 3 else "")
    except ValueError:
        return found[0]
    return "<address>"


def _prefix(python: Path) -> Path:
    """The environment of an interpreter: `bin` and `Scripts` lie in it, Windows' own python.exe at its top."""
    return python.parent.parent if python.parent.name.lower() in ("bin", "scripts") else python.parent


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path


def _account_and_full_name() -> Iterable[str]:
    """The account of this process, and its person's name and each part of it, where the system keeps them."""
    with contextlib.suppress(OSError, KeyError, ImportError):
        yield getpass.getuser()
    with contextlib.suppress(OSError, KeyError, ImportError):
        import pwd

        entry = pwd.getpwuid(os.getuid())
        full = entry.pw_gecos.split(",")[0].strip()
        yield entry.pw_name
        yield full
        yield from full.split()


def _named(words: Iterable[str], placeholder: str) -> list[tuple[str, str]]:
    """Words worth replacing: a single letter is in every text, and some names are everybody's."""
    return [(word, placeholder) for word in words if len(word) > 1 and word.casefold() not in _PUBLIC]
