"""What the registry's archive carries: nothing that its scanner flags, and lists that agree with each other."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
#: What the registry's scanner takes for hidden installers and remote code; a flagged version is not shown to users.
FLAGGED = {
    "eval": r"(?<![\w.])eval\s*\(",
    "exec": r"(?<![\w.])exec\s*\(",
    "subprocess": r"\bsubprocess\b",
    "os.environ": r"\bos\s*\.\s*environ\b|\bfrom\s+os\s+import\b.*\benviron\b|\bgetenv\b",
    "os.system": r"\bos\s*\.\s*(?:system|popen)\b",
    "import_module": r"\bimport_module\b|\b__import__\s*\(",
    "sockets": r"\bimport\s+socket\b|\bfrom\s+socket\s+import\b|\bsocket\s*\.\s*\w",
    "pip": r"\bpip\s+install\b|[\"']pip[\"']",
}
CODE = {".py", ".js", ".toml", ".sh", ".bat", ".ps1"}


def tracked() -> list[str]:
    """Files of the repository, with / between folders."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    hidden = re.compile(r"(^|/)(\.(?!ci/|comfyignore$)|__pycache__|output/|build/|dist/)")
    names = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())
    return [name for name in names if not hidden.search(name)]


def ignored(name: str, patterns: list[str]) -> bool:
    """Whether `.comfyignore` leaves a file out: `folder/` anywhere above it, or a file pattern."""
    for pattern in patterns:
        if pattern.endswith("/"):
            if (name + "/").startswith(pattern) or f"/{pattern}" in f"/{name}":
                return True
        elif fnmatch.fnmatch(name, pattern):
            return True
    return False


def patterns() -> list[str]:
    lines = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def shipped() -> list[str]:
    """Files of the archive."""
    return [name for name in tracked() if not ignored(name, patterns())]


def findings(name: str, text: str) -> list[str]:
    """`file:line: pattern` for everything that the scanner would flag."""
    return [
        f"{name}:{number}: {what}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FLAGGED.items()
        if re.search(pattern, line)
    ]


def test_shipped_files_hold_nothing_that_the_scanner_flags() -> None:
    code = [name for name in shipped() if Path(name).suffix in CODE]
    assert "install.py" in code and any(name.startswith("kernels/") for name in code)
    found = [entry for name in code for entry in findings(name, (ROOT / name).read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("x = eval(text)", "eval"),
        ("exec(code)", "exec"),
        ("import subprocess", "subprocess"),
        ("home = os.environ['HOME']", "os.environ"),
        ("from os import environ", "os.environ"),
        ("os.system('x')", "os.system"),
        ("importlib.import_module(name)", "import_module"),
        ("import socket", "sockets"),
        ("socket.create_connection(x)", "sockets"),
        ("run([python, '-m', 'pip', 'x'])", "pip"),
    ],
)
def test_the_scan_sees(line: str, what: str) -> None:
    assert f"f:1: {what}" in findings("f", line)


@pytest.mark.parametrize("line", ["model.eval()", "def evaluate(x):", "executor(x)", "spec.loader.exec_module(m)"])
def test_the_scan_lets_pass(line: str) -> None:
    assert findings("f", line) == []


def test_the_archive_leaves_out_what_builds_and_checks() -> None:
    names = shipped()
    for folder in ("tests/", "benchmarks/", "tools/", ".ci/", ".cache/", ".venv/", "output/"):
        assert not [name for name in names if name.startswith(folder)]
        assert ignored(folder + "x.py", patterns())
    assert "run.py" not in names


def test_the_archive_carries_what_comfyui_and_the_manager_need() -> None:
    names = shipped()
    for name in ("__init__.py", "install.py", "requirements.txt", "pyproject.toml", "LICENSE", "README.md"):
        assert name in names
    assert not ignored("workflows/wan2.2_t2v.json", patterns())
    assert not ignored("kernels/cute/sm90.py", patterns())


def test_requirements_txt_is_what_pyproject_lists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    normal = [line.replace('"', "'") for line in lines if line and not line.startswith("#")]
    assert normal == [entry.replace('"', "'") for entry in project["dependencies"]]
    names = [re.split(r"[<>=;! ]", entry)[0] for entry in project["dependencies"]]
    assert not {"torch", "torchvision", "torchaudio"} & set(names)
    assert project["requires-python"] == ">=3.10"


PINNED = re.compile(r"[a-z0-9-]+==[0-9][^\s;]*(; (python_version|sys_platform) [<>=]+ \"[\w.]+\")?")


def test_every_tool_requirement_is_pinned_and_none_names_an_index() -> None:
    files = sorted((ROOT / "tools" / "requirements").glob("*.txt"))
    assert len(files) >= 4
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                assert PINNED.fullmatch(line), line


def test_requirement_files_that_share_an_environment_agree() -> None:
    folder = ROOT / "tools" / "requirements"
    for group in (
        ("comfyui-0.3.75", "demo", "test", "compiler"),
        ("comfyui-0.33", "comfyui-0.33-no-deps", "demo", "test", "compiler"),
    ):
        pins: dict[tuple[str, str], str] = {}
        for name in group:
            for line in (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines():
                if line and not line.startswith("#"):
                    package, _, rest = line.partition("==")
                    version, _, marker = rest.partition(";")
                    assert pins.setdefault((package, marker), version) == version, f"{name}.txt: {line}"


def test_the_version_is_in_the_changelog() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_no_command_chooses_a_package_index() -> None:
    """Packages come by name from whatever index pip is set up for."""
    index = re.compile(r"index-url|find-links|trusted-host|INDEX_URL|FIND_LINKS")
    texts = [name for name in tracked() if Path(name).suffix in CODE | {".txt", ".yml", ".yaml", ".cfg"}]
    texts = [name for name in texts if not name.startswith("tests/")] + [".ci/run"]
    assert [name for name in texts if index.search((ROOT / name).read_text(encoding="utf-8"))] == []
