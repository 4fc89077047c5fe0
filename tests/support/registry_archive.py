"""The archive that the ComfyUI registry gets of this pack, as its command line tool (`comfy node pack`) makes it.

That tool zips the files that git tracks, less what `.comfyignore` names in git's own pattern language, and the folders
that pyproject.toml `includes`, tracked or not.
"""

from __future__ import annotations

import re
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pathspec
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

ROOT = Path(__file__).resolve().parents[2]


def tracked(new: bool = False) -> list[str]:
    """Files of the repository, with / between folders; `new`: also those that are not committed yet."""
    options = ["-co", "--exclude-standard"] if new else []
    done = subprocess.run(["git", "ls-files", *options], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout:
        return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    # a checkout without git (a downloaded archive of the sources) holds nothing else but what was made in it
    hidden = re.compile(r"(^|/)(\.(?!ci/|github/|comfyignore$)|__pycache__|output/|build/|dist/|kernels/prebuilt/)")
    names = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())
    return sorted(name for name in names if not hidden.search(name))


def left_out() -> pathspec.PathSpec:
    """What `.comfyignore` leaves out: `.match_file(name)`."""
    lines = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return pathspec.PathSpec.from_lines(GitIgnoreSpecPattern, patterns)


def shipped(new: bool = False) -> list[str]:
    """Files of the archive."""
    ignored = left_out()
    return [name for name in tracked(new) if not ignored.match_file(name)]


def write(path: Path, included: Mapping[str, Path] | None = None) -> Path:
    """The archive itself, at `path`. included: the folders of `includes`, by name, where they are during a release."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in shipped():
            archive.write(ROOT / name, name)
        for name, folder in (included or {}).items():
            for file in sorted(entry for entry in folder.rglob("*") if entry.is_file()):
                archive.write(file, f"{name}/{file.relative_to(folder).as_posix()}")
    return path
