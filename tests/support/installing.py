"""A pack as the registry ships it, small wheels for it, and its install.py in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import small_wheels

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).resolve().parent
#: Everything that install.py may use of the pack.
FILES = ("install.py", "pyproject.toml", "kernels/cards.py", "kernels/detect.py", "kernels/families.py")
#: A repository that does not answer: nothing in these tests leaves the machine.
NOWHERE = "http://127.0.0.1:9/pack"


class Pack:
    """A folder with what install.py may use of the pack, and nothing else; made unless it is there."""

    def __init__(self, folder: Path, repository: str = NOWHERE) -> None:
        self.folder = folder
        if not folder.exists():
            for file in FILES:
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / file, target)
            caches = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / "kernels" / "install", folder / "kernels" / "install", ignore=caches)
        self.repository(repository)

    @property
    def prebuilt(self) -> Path:
        """Where kernels are installed."""
        return self.folder / "kernels" / "prebuilt"

    def repository(self, address: str) -> None:
        """Let pyproject.toml name this repository."""
        path = self.folder / "pyproject.toml"
        lines = path.read_text(encoding="utf-8").splitlines()
        lines = [f'Repository = "{address}"' if line.startswith("Repository") else line for line in lines]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def pin(self, wheels: dict[str, bytes], version: str = small_wheels.VERSION) -> None:
        """Let this version of the pack pin the wheels, by family."""
        text = json.dumps(small_wheels.pins(wheels, version))
        (self.folder / "kernels" / "wheels.json").write_text(text, encoding="utf-8")

    def command(self, *arguments: str, python: Sequence[str] = (sys.executable, "-S", "-s"), **spec: Any) -> list[str]:
        """The command line of install.py on a faked machine; `spec` as faked_install.py has it."""
        spec = {"machine": "9.0", **spec}
        return [
            *python,
            str(SUPPORT / "faked_install.py"),
            json.dumps(spec),
            str(self.folder / "install.py"),
            *arguments,
        ]

    def run(self, *arguments: str, cwd: Path | None = None, **spec: Any) -> str:
        """The line that install.py ends with; asserts that it is one line, nothing on stderr, and status 0."""
        return self.line(self.start(*arguments, cwd=cwd, **spec))

    def start(
        self, *arguments: str, cwd: Path | None = None, variables: dict[str, str] | None = None, **spec: Any
    ) -> subprocess.Popen[str]:
        """install.py, running."""
        return start(self.command(*arguments, **spec), cwd or self.folder, variables)

    @staticmethod
    def line(process: subprocess.Popen[str]) -> str:
        """The one line of a process that ends well."""
        out, err = process.communicate(timeout=60)
        assert err == "" and process.returncode == 0, (process.returncode, out, err)
        assert out.endswith("\n") and out.startswith("VC-Attention")
        *before, last = out.splitlines()
        assert all(line.startswith(("VC-Attention: waiting", "VC-Attention: downloading")) for line in before), out
        assert "could not finish" not in last and "Error" not in last, last
        return last

    def tree(self) -> dict[str, bytes]:
        """Every file of the pack; not the lock, which stays."""
        files = (path for path in self.folder.rglob("*") if path.is_file() and path.name != ".lock")
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in files}

    def installed(self) -> set[str]:
        """Names of the files that installs left, below `prebuilt`."""
        top = "kernels/prebuilt/"
        return {name.removeprefix(top) for name in self.tree() if name.startswith(top)}


def start(command: Sequence[str], cwd: Path, variables: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A process that sees no proxy but one of `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.Popen(
        list(command),
        cwd=cwd,
        env={**kept, "PYTHONDONTWRITEBYTECODE": "1", **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
