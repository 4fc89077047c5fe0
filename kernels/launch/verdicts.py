"""What the self-test said about a build of the kernels on a card, remembered between starts of ComfyUI.

One small JSON file for each (card, driver, build), written beside its place and moved into it, so that a reader sees
all of it or nothing. Without a folder, verdicts are remembered in this process only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

SCHEMA = 1
#: The test takes a second: who waits longer than this for another process tests by itself.
LOCK_SECONDS = 30.0

_folder: Path | None = None
_memory: dict[str, Verdict] = {}


@dataclass(frozen=True)
class Subject:
    """What a verdict is about. capability: such as "9.0". driver: its version. build: hash of the manifest.

    test: version of the self-test. A verdict counts only where all of them are the same.
    """

    card: str
    capability: str
    driver: str
    build: str
    test: int

    @property
    def key(self) -> str:
        """A short name that is safe in a file system."""
        return hashlib.sha256("\0".join(map(str, asdict(self).values())).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Verdict:
    """passed, and what was wrong if not; seconds that the test took. remembered: from an earlier start."""

    passed: bool
    text: str
    seconds: float
    remembered: bool = False


def set_folder(path: Path | str | None) -> None:
    """Where verdicts, and kernels that are compiled here, are kept; made when first needed. None: nowhere."""
    global _folder
    _folder = None if path is None else Path(path)


def folder() -> Path | None:
    """The folder that was set."""
    return _folder


def forget() -> None:
    """Drop what this process remembers (not what lies in the folder)."""
    _memory.clear()


def recall(subject: Subject) -> tuple[Verdict | None, str]:
    """The verdict on `subject`, and a sentence when a file that should hold it cannot be used."""
    known = _memory.get(subject.key)
    if known is not None:
        return known, ""
    path = _path(subject)
    if path is None or not path.is_file():
        return None, ""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA or data["subject"] != asdict(subject) or not isinstance(data["passed"], bool):
            raise ValueError("it is about something else")
        verdict = Verdict(data["passed"], str(data["text"]), float(data["seconds"]), True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"The remembered self-test in {path} cannot be used ({type(error).__name__}), so it runs again."
        return None, problem
    _memory[subject.key] = verdict
    return verdict, ""


def remember(subject: Subject, verdict: Verdict) -> str:
    """Keep `verdict`. Returns a sentence when it could not be written; it then holds for this process."""
    _memory[subject.key] = verdict
    path = _path(subject)
    if path is None:
        return ""
    data = {"schema": SCHEMA, "subject": asdict(subject), **asdict(verdict)}
    del data["remembered"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(data, indent=1) + "\n")
            os.replace(name, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        why = error.strerror or error
        return f"The self-test's result cannot be kept in {path.parent} ({why}); it runs at each start."
    return ""


def kept(place: Path) -> list[dict[str, Any]]:
    """Every verdict in `place`, a folder as given to `set_folder`, as its file has it; unreadable ones are left out."""
    found = []
    for path in sorted((place / "self-test").glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            data = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(data, dict) and data.get("schema") == SCHEMA:
                found.append(data)
    return found


@contextlib.contextmanager
def only_one(subject: Subject) -> Iterator[None]:
    """Keep other processes from testing the same thing at the same time, where the file system can.

    The operating system drops the lock when its process ends, however it ends, on Linux and Windows alike.
    """
    path = _path(subject)
    with contextlib.ExitStack() as stack:
        if path is not None:
            with contextlib.suppress(OSError, NotImplementedError, Timeout):
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS))
        yield


def _path(subject: Subject) -> Path | None:
    return None if _folder is None else _folder / "self-test" / f"{subject.key}.json"
