"""What the registry's archive carries: nothing that its scanner flags, and lists that agree with each other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from registry_archive import left_out, shipped, tracked

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
#: What the registry's scanner is reported to take for hidden installers, remote code and remote control. It matches
#: text, in comments and in data files too, and a single finding hides the version from users until somebody of the
#: registry has looked at it. Its rules are not published; these are the ones that packs were flagged for.
FLAGGED = {
    "dynamic execution": r"(?<!\w)(?:eval|exec)\s*\(",
    "command": r"subprocess|\bos\s*\.\s*(?:system|popen|startfile|exec\w+|spawn\w+)\b|\bPopen\b|\bOpenProcess\b",
    "environment": r"\bos\s*\.\s*environ|\bfrom\s+os\s+import\b.*\benviron|\b(?:get|put|unset)env\b",
    "dynamic import": r"\bimport_module\b|\b__import__\b|\bmarshal\b",
    "network": (
        r"\burllib\s*\.\s*request\b|\burlopen\b|\burlretrieve\b|\bhttp\s*\.\s*client\b"
        r"|\brequests\s*\.\s*(?:get|post|put|request|Session)\b|\baiohttp\s*\.\s*ClientSession\b"
        r"|\bimport\s+socket\b|\bfrom\s+socket\s+import\b|\bsocket\s*\.\s*\w"
        r"|\.\s*(?:connect|bind|listen|send|sendall|recv)\s*\("
    ),
    "unpickling": r"\bpickle\s*\.\s*loads?\b",
    "address": r"\braw\.githubusercontent\.com\b",
}
#: Of interest in code alone: README.md may tell how to install something.
FLAGGED_CODE = {"installer": r"\bpip\s+install\b|[\"']pip[\"']"}
CODE = {".py", ".js", ".toml", ".sh", ".bat", ".ps1"}
TEXT = CODE | {".json", ".md", ".txt", ".svg", ".html", ".css", ".yml", ".yaml", ""}
#: Findings that are the feature itself: (file, what) -> why it ships all the same. The registry has to review such a
#: version by hand, so a file that the pack can do without belongs into .comfyignore instead.
REVIEWED: dict[tuple[str, str], str] = {}


def findings(name: str, text: str) -> list[tuple[str, str, str]]:
    """(file, what, where) for everything that the scanner would flag."""
    rules = FLAGGED | (FLAGGED_CODE if Path(name).suffix in CODE else {})
    return [
        (name, what, f"{name}:{number}")
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in rules.items()
        if re.search(pattern, line)
    ]


def test_shipped_files_hold_nothing_that_the_scanner_flags() -> None:
    texts = [name for name in shipped(new=True) if Path(name).suffix in TEXT]
    assert {"install.py", "pyproject.toml", "README.md"} <= set(texts)
    assert any(name.startswith("kernels/") for name in texts)
    found = [entry for name in texts for entry in findings(name, (ROOT / name).read_text(encoding="utf-8"))]
    surprising = [f"{where}: {what}" for name, what, where in found if (name, what) not in REVIEWED]
    assert surprising == [], "Leave these files out with .comfyignore, or enter them in REVIEWED with the reason."
    assert set(REVIEWED) <= {(name, what) for name, what, _ in found}, "REVIEWED names what is no longer there"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("x = eval(text)", "dynamic execution"),
        ("exec(code)", "dynamic execution"),
        ("model.eval()", "dynamic execution"),
        ("import subprocess", "command"),
        ("asyncio.create_subprocess_exec(x)", "command"),
        ("os.system('x')", "command"),
        ("home = os.environ['HOME']", "environment"),
        ("from os import environ", "environment"),
        ("os.getenv('HOME')", "environment"),
        ("importlib.import_module(name)", "dynamic import"),
        ("__import__('sys')", "dynamic import"),
        ("import socket", "network"),
        ("s = socket.socket()", "network"),
        ("slot.connect(node)", "network"),
        ("# Function.prototype.bind (#1)", "network"),
        ("import urllib.request", "network"),
        ("urlopen(address)", "network"),
        ("pickle.loads(data)", "unpickling"),
        ("https://raw.githubusercontent.com/a/b", "address"),
        ("pip install x", "installer"),
        ("run([python, '-m', 'pip', 'x'])", "installer"),
    ],
)
def test_the_scan_sees(line: str, what: str) -> None:
    assert ("f.py", what, "f.py:1") in findings("f.py", line)


@pytest.mark.parametrize(
    "line", ["def evaluate(x):", "executor(x)", "spec.loader.exec_module(m)", "re.compile(x)", "urllib.parse.quote(x)"]
)
def test_the_scan_lets_pass(line: str) -> None:
    assert findings("f.py", line) == []


def test_a_text_for_people_may_tell_how_to_install() -> None:
    assert findings("README.md", "pip install x") == []


def test_the_archive_leaves_out_what_builds_and_checks() -> None:
    names = shipped()
    for folder in ("tests/", "benchmarks/", "tools/", ".ci/", ".cache/", ".venv/", "output/"):
        assert not [name for name in names if name.startswith(folder)]
        assert left_out().match_file(folder + "x.py")
    assert "run.py" not in names


def test_the_archive_carries_what_comfyui_and_the_manager_need() -> None:
    names = shipped()
    for name in ("__init__.py", "install.py", "requirements.txt", "pyproject.toml", "LICENSE", "README.md"):
        assert name in names
    assert not left_out().match_file("workflows/wan2.2_t2v.json")
    assert not left_out().match_file("kernels/cute/sm90.py")


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
    texts = [name for name in tracked(new=True) if Path(name).suffix in CODE | {".txt", ".yml", ".yaml", ".cfg"}]
    texts = [name for name in texts if not name.startswith("tests/")] + [".ci/run"]
    assert [name for name in texts if index.search((ROOT / name).read_text(encoding="utf-8"))] == []
