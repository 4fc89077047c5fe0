"""The Python environment of the commands: `.venv` with pinned packages, made once, checked each time, never half made.

A stamp file in the environment says who made it and which requirement files are complete in it. It exists from the
first moment (empty), so an environment that was cut off is known as ours and made again; one that is not ours is
never touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .lock import Lock
from .messages import ToolError, size_text
from .progress import Step, say

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
REQUIREMENTS = ROOT / "tools" / "requirements"
STAMP = "vc-attention.json"
#: Free space wanted before an environment is made: torch and ComfyUI's packages take 1.7 GB on a machine where torch
#: is the CPU build, and pip unpacks beside them.
NEW_ENVIRONMENT_BYTES = 3.0e9
MORE_PACKAGES_BYTES = 0.5e9
#: Less than an empty environment takes: a failure with no more space than this is the disk's.
FULL_BYTES = 20e6
ATTEMPTS = 3
PAUSE = 3.0  # seconds before the second attempt; the third waits twice as long
#: Settings that would make pip install somewhere else than into the environment.
_MISLEADING = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
_NETWORK = re.compile(
    r"connection broken|NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|name resolution|Max retries"
    r"|ConnectionReset|IncompleteRead|ProxyError|SSLError|50[0234] Server Error|Connection aborted|getaddrinfo"
    r"|RemoteDisconnected|Connection refused|network is unreachable",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"No space left on device|Errno 28|not enough space on the disk|quota exceeded", re.IGNORECASE)


@dataclass(frozen=True)
class Environment:
    """`python`: the interpreter to run things with. `folder`: the environment, None for an interpreter as given."""

    python: Path
    folder: Path | None


def prepare(requirements: Sequence[str], name: str = ".venv", python: str | None = None) -> Environment:
    """The environment `name` in the checkout with everything that `requirements` (file names) pin.

    With `python`, that interpreter is used as it is and nothing is installed. ToolError says what failed.
    """
    if python is not None:
        return Environment(given(python), None)
    return make(ROOT / name, [REQUIREMENTS / file for file in requirements])


def make(folder: Path, requirements: Sequence[Path]) -> Environment:
    """As `prepare`, for any folder and requirement files. Two processes at once wait for each other."""
    with Lock(CACHE / f"{folder.name.lstrip('.')}.lock", f"preparing {folder.name}"):
        problem = state(folder, requirements)
        if problem is not None:
            _repair(folder, requirements, problem)
    return Environment(interpreter(folder), folder)


@dataclass(frozen=True)
class Problem:
    """What is wrong with an environment. `again`: it has to be made from nothing; else packages are installed."""

    text: str
    again: bool
    new: bool = False


def state(folder: Path, requirements: Sequence[Path]) -> Problem | None:
    """None when the environment is complete, else what is wrong. ToolError when the folder is somebody else's."""
    if not os.path.lexists(folder):
        return Problem("it does not exist", again=True, new=True)
    stamp = read_stamp(folder)
    version = _version_of(interpreter(folder))
    if stamp is None:
        if version is not None:
            raise ToolError(
                f"{folder} is an environment that this command did not make, so it was left alone. Rename or remove it "
                "and run the command again, or use it as it is with --python PATH."
            )
        if folder.is_dir() and not (folder / "pyvenv.cfg").exists() and any(folder.iterdir()):
            raise ToolError(f"{folder} is in the way: it is not an environment. Rename or remove it, then run again.")
        return Problem("it holds no working Python", again=True)
    if version is None:
        return Problem("its Python does not start", again=True)
    if stamp.get("python") and stamp["python"] != version:
        return Problem(f"it was made with Python {stamp['python']} and now runs {version}", again=True)
    if not stamp.get("installed"):
        return Problem("it was never finished", again=True)
    answer = run_quietly(
        [str(interpreter(folder)), "-I", str(ROOT / "tools" / "installed_check.py"), *map(str, requirements)]
    )
    try:
        wrong = json.loads(answer) if answer is not None else None
    except ValueError:
        wrong = None
    if wrong is None:
        return Problem("its packages cannot be read", again=True)
    stale = [file.name for file in requirements if stamp["installed"].get(file.name) != _digest(file)]
    if stale:
        return Problem(f"{', '.join(stale)} is new or has changed", again=False, new=True)
    lost = [text for text in wrong if " has " in text or text.endswith("damaged")]
    if lost:
        return Problem(lost[0], again=True)
    return Problem(wrong[0], again=False) if wrong else None


def interpreter(folder: Path) -> Path:
    """Where an environment keeps its Python."""
    return folder / "Scripts" / "python.exe" if sys.platform == "win32" else folder / "bin" / "python"


def read_stamp(folder: Path) -> dict | None:
    """The stamp of an environment of ours, else None."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # an unreadable stamp still shows that the folder is ours
        return {} if (folder / STAMP).exists() else None
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(folder: Path, stamp: dict) -> None:
    part = folder / (STAMP + ".part")
    part.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    part.replace(folder / STAMP)


def _repair(folder: Path, requirements: Sequence[Path], problem: Problem) -> None:
    if not problem.new:
        action = "making it again" if problem.again else "installing what it needs"
        say(f"The environment {folder} is not usable as it is ({problem.text}): {action}.")
    if problem.again:
        needs_space(folder.parent, NEW_ENVIRONMENT_BYTES, f"to make {folder}")
        _create(folder)
    else:
        needs_space(folder, MORE_PACKAGES_BYTES, f"to install packages into {folder}")
    python = interpreter(folder)
    version = _version_of(python)
    stamp = {"made_by": "run.py", "python": version, "installed": (read_stamp(folder) or {}).get("installed", {})}
    for file in requirements:
        if not problem.again and problem.new and stamp["installed"].get(file.name) == _digest(file):
            continue
        stamp["installed"].pop(file.name, None)
        _write_stamp(folder, stamp)
        with Step(f"Installing {file.stem}") as step:
            alone = ["--no-deps"] if file.stem.endswith("-no-deps") else []
            pip(python, ["install", "--prefer-binary", *alone, "-r", str(file)], step)
        stamp["installed"][file.name] = _digest(file)
        _write_stamp(folder, stamp)


def _create(folder: Path) -> None:
    """An empty environment with pip, marked as ours from the start."""
    from .comfyui import remove

    try:
        remove(folder)
        folder.mkdir(parents=True)
        _write_stamp(folder, {"made_by": "run.py"})
    except OSError as error:
        raise ToolError(
            f"{folder} cannot be made: {error.strerror or error}. Check that the folder can be written to and that no "
            "program still runs from it, then run the command again."
        ) from error
    base = getattr(sys, "_base_executable", None) or sys.executable
    with Step(f"Making {folder.name} with Python {platform.python_version()}"):
        done = subprocess.run(
            [base, "-m", "venv", str(folder)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=_variables(), check=False,
        )  # fmt: skip
    if done.returncode == 0:
        return
    output = done.stdout + done.stderr
    # venv keeps pip's own words to itself, so the disk is asked as well
    full = shutil.disk_usage(folder).free < FULL_BYTES or _NO_SPACE.search(output)
    remove(folder)
    if full:
        raise ToolError(_no_space_sentence(folder.parent))
    if "ensurepip is not available" in output or "No module named venv" in output:
        raise ToolError(
            f"This Python ({base}) came without its venv module. Install it (on Debian and Ubuntu: "
            f"sudo apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv), then run the command again."
        )
    raise ToolError(f"Python could not make {folder}: {_last_line(output) or 'no reason given'}.")


def pip(python: Path, arguments: Sequence[str], step: Step, attempts: int = ATTEMPTS) -> None:
    """Run pip with its output summed up in `step`. A failed download is tried again; ToolError is one sentence.

    pip's own settings (its index, proxies, certificates, constraints) apply.
    """
    log = CACHE / "logs" / "pip.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python), "-m", "pip", arguments[0], "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", "--retries", "2", "--timeout", "30", *arguments[1:]]
    for attempt in range(1, attempts + 1):
        status, lines = _run_pip(command, log, step)
        if status == 0:
            return
        text = "\n".join(lines)
        if _NO_SPACE.search(text):
            raise ToolError(_no_space_sentence(Path(arguments[-1]).parent if arguments[0] == "download" else python))
        if not _NETWORK.search(text) or attempt == attempts:
            break
        step.show(f"the download failed; attempt {attempt + 1} of {attempts}")
        time.sleep(PAUSE * attempt)
    wanted = _failed_package(lines)
    if _NETWORK.search(text):
        raise ToolError(
            f"The download of {wanted} failed {attempts} times: pip does not reach its package index. Check the "
            "network (or pip's proxy settings) and run the command again; what was downloaded so far is kept. "
            f"Details: {log}"
        )
    raise ToolError(f"pip could not install {wanted}: {_last_error(lines)} Details: {log}")


def _run_pip(command: Sequence[str], log: Path, step: Step) -> tuple[int, list[str]]:
    """The exit status and the last lines of a pip run; everything goes to `log`."""
    tail: deque[str] = deque(maxlen=400)
    with log.open("a", encoding="utf-8") as file:
        file.write("$ " + " ".join(command) + "\n")
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, encoding="utf-8", errors="replace", env=_variables(),
        )  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                tail.append(line.rstrip())
                summary = summarise(line)
                if summary:
                    step.show(summary)
            return process.wait(), list(tail)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def summarise(line: str) -> str | None:
    """What a line of pip's output means for someone who waits, or None."""
    words = line.split()
    if len(words) >= 2 and words[0] == "Collecting":
        return f"looking up {re.split('[=<>;!~]', words[1])[0]}"
    if words and words[0] in ("Downloading", "Using") and len(words) >= 2:
        name = words[2 if words[:2] == ["Using", "cached"] and len(words) > 2 else 1].rpartition("/")[2]
        if name.endswith(".whl"):
            name = " ".join(name.split("-")[:2])
        size = line[line.rfind("(") :].strip() if line.rstrip().endswith(")") else ""
        return f"{'downloading' if words[0] == 'Downloading' else 'taking from the cache'} {name} {size}".strip()
    if words[:3] == ["Installing", "collected", "packages:"]:
        return f"unpacking {len(words) - 3} packages"
    if words[:1] == ["Building"]:
        return "building " + " ".join(words[1:])[:50]
    return None


def needs_space(folder: Path, count: float, purpose: str) -> None:
    """ToolError when the disk of `folder` has less than `count` bytes left."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < count:
        raise ToolError(
            f"Not enough disk space {purpose}: {size_text(count)} are needed and {size_text(free)} are free on the "
            f"disk of {place}. Free some space, then run the command again."
        )


def _no_space_sentence(place: Path) -> str:
    return (
        f"The disk is full (of {place}, or of the folder for temporary files): free some space, then run the command "
        "again. What was half made will be made again."
    )


def _variables() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    return {**kept, "PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"}


def run_quietly(command: Sequence[str]) -> str | None:
    """What a command prints, or None when it does not start or fails."""
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            env=_variables(), timeout=300, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version_of(python: Path) -> str | None:
    answer = run_quietly([str(python), "-I", "-c", "import platform, pip; print(platform.python_version())"])
    return answer.strip() if answer else None


def given(python: str) -> Path:
    """The interpreter that `--python` names. ToolError when it does not start or is too old."""
    path = Path(shutil.which(python) or python).expanduser()
    # not resolved: a virtual environment's python is a link, and following it leaves the environment
    path = Path(os.path.abspath(path))
    version = run_quietly([str(path), "-c", "import sys; print(*sys.version_info[:2])"])
    if version is None:
        raise ToolError(f"--python {python}: that is not a Python that starts.", 2)
    if tuple(map(int, version.split())) < (3, 10):
        raise ToolError(f"--python {python}: that is Python {'.'.join(version.split())}; 3.10 is the oldest.", 2)
    return path


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else ""


def _last_error(lines: Sequence[str]) -> str:
    errors = [line[6:].strip() for line in lines if line.startswith("ERROR:")]
    text = errors[-1] if errors else _last_line("\n".join(lines)) or "it gave no reason"
    return text.rstrip(".") + "."


def _failed_package(lines: Sequence[str]) -> str:
    """The package that pip was at when it failed."""
    for line in reversed(lines):
        found = re.search(r"(?:satisfies the requirement|No matching distribution found for) (\S+)", line)
        if found:
            return found.group(1)
    for line in reversed(lines):
        found = re.match(r"\s*(?:Collecting|Downloading) (\S+)", line)
        if found:
            return found.group(1).rpartition("/")[2]
    return "the packages"
