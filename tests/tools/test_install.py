"""install.py as ComfyUI Manager runs it: any folder, any number of times, never a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Everything install.py may use of the pack.
FILES = ("install.py", "kernels/cards.py", "kernels/detect.py")


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A pack in a folder with spaces and letters that ASCII lacks, holding only what install.py may use."""
    folder = tmp_path / "custom nodes" / "\u00dcbung \u4e2d\u6587 VC"
    for file in FILES:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, target)
    return folder


def run(pack: Path, *arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """install.py in an interpreter that sees no installed package."""
    return subprocess.run(
        [sys.executable, "-S", "-s", str(pack / "install.py"), *arguments],
        cwd=cwd or pack,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=60,
        check=False,
    )


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_from_any_folder_twice_it_says_one_line_and_changes_nothing(pack: Path, tmp_path: Path) -> None:
    before = tree(pack)
    first, second = run(pack, cwd=tmp_path), run(pack, cwd=pack)
    for done in (first, second):
        assert done.returncode == 0 and done.stderr == ""
        assert done.stdout.startswith("VC-Attention: ") and done.stdout.count("\n") == 1
    assert first.stdout == second.stdout
    assert tree(pack) == before


def test_a_read_only_folder_is_no_problem(pack: Path) -> None:
    folders = [pack, *(path for path in pack.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = run(pack)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 0 and done.stdout.startswith("VC-Attention: ")


@pytest.mark.parametrize(
    "harm",
    [
        lambda pack: (pack / "kernels" / "cards.py").write_text("this is not Python"),
        lambda pack: (pack / "kernels" / "cards.py").write_text(""),
        lambda pack: shutil.rmtree(pack / "kernels"),
    ],
    ids=["damaged", "empty", "missing"],
)
def test_a_damaged_pack_ends_with_status_0_and_a_sentence(pack: Path, harm) -> None:
    harm(pack)
    done = run(pack)
    assert done.returncode == 0
    assert done.stdout.startswith("VC-Attention: this machine could not be examined") and done.stdout.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["--list"], ["--dry-run"], ["--no-such-option"], ["--list=3"]])
def test_every_option_ends_with_status_0(pack: Path, arguments: list[str]) -> None:
    done = run(pack, *arguments)
    assert done.returncode == 0 and (done.stdout or done.stderr)


def test_a_console_without_the_letters_is_no_problem(pack: Path) -> None:
    (pack / "kernels" / "cards.py").write_text("raise RuntimeError('\\u4e2d')", encoding="utf-8")
    done = run(pack, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0 and "(RuntimeError: ?)" in done.stdout
