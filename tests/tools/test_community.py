"""CONTRIBUTING.md and the forms of `.github`: GitHub accepts them, and what they name exists."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FORMS = [path for path in FORMS if path.name != "config.yml"]
TEXTS = [
    ROOT / "CONTRIBUTING.md",
    ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md",
    ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml",
    *FORMS,
]
#: Types of GitHub's issue forms -> their attributes, the first being required.
ELEMENTS: dict[str, tuple[str, ...]] = {
    "markdown": ("value",),
    "textarea": ("label", "description", "placeholder", "value", "render"),
    "input": ("label", "description", "placeholder", "value"),
    "dropdown": ("label", "description", "multiple", "options", "default"),
    "checkboxes": ("label", "description", "options"),
    "upload": ("label", "description"),
}
#: Form -> what it has to ask for, in a field that must be filled in.
ASKED = {
    "bug.yml": ["run.py doctor --report"],
    "quality.yml": ["VC-Attention Capture", ".safetensors", "run.py replay FILE", "run.py doctor --report"],
    "benchmark.yml": ["run.py bench", "JSON"],
}


def problems_of(form: dict[str, Any]) -> list[str]:
    """What GitHub would refuse in a form, by its published schema."""
    found = [f"unknown key {key}" for key in form if key not in ("name", "description", "title", "labels", "body")]
    found += [f"no {key}" for key in ("name", "description", "body") if not form.get(key)]
    labels: list[str] = []
    ids: list[str] = []
    for element in form.get("body") or []:
        kind, attributes = element.get("type"), element.get("attributes") or {}
        if kind not in ELEMENTS:
            found.append(f"unknown type {kind}")
            continue
        found += [f"{kind}: unknown attribute {name}" for name in attributes if name not in ELEMENTS[kind]]
        found += [f"{kind}: unknown key {key}" for key in element if key not in _KEYS]
        if not attributes.get(ELEMENTS[kind][0]):
            found.append(f"{kind}: no {ELEMENTS[kind][0]}")
        if kind == "markdown":
            continue
        labels.append(attributes.get("label", ""))
        ids.append(element.get("id", ""))
        if not re.fullmatch(r"[A-Za-z0-9_-]+", ids[-1]):
            found.append(f"{kind}: id {ids[-1]!r}")
        if kind in ("dropdown", "checkboxes"):
            options = attributes.get("options") or []
            if not options or len(set(map(str, options))) != len(options):
                found.append(f"{kind}: options {options}")
            # YAML reads off and no as false, which GitHub refuses
            found += [f"option {option!r} is no text" for option in options if not isinstance(option, (str, dict))]
        extra = set(element.get("validations") or {}) - {"required"}
        found += [f"{kind}: unknown validation {name}" for name in extra]
    if not labels:
        found.append("nothing can be filled in")
    found += [f"twice: {name}" for names in (labels, ids) for name in set(names) if names.count(name) > 1]
    return found


_KEYS = ("type", "id", "attributes", "validations")


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_github_accepts_the_form(path: Path) -> None:
    assert problems_of(load(path)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda form: form.pop("description"), "no description"),
        (lambda form: form.update(labells=[]), "unknown key labells"),
        (lambda form: form["body"][1].update(type="text"), "unknown type text"),
        (lambda form: form["body"][1].update(id="a b"), "textarea: id 'a b'"),
        (lambda form: form["body"][1].update(id=form["body"][2]["id"]), "twice: steps"),
        (lambda form: form["body"][1]["attributes"].pop("label"), "textarea: no label"),
        (lambda form: form["body"][1]["attributes"].update(help="x"), "textarea: unknown attribute help"),
        (lambda form: form["body"][-1]["attributes"].update(options=[False, "on"]), "option False is no text"),
        (lambda form: form["body"][-1]["attributes"].update(options=["x", "x"]), "dropdown: options ['x', 'x']"),
        (lambda form: form.update(body=form["body"][:1]), "nothing can be filled in"),
    ],
)
def test_a_broken_form_is_noticed(change: Any, problem: str) -> None:
    form = load(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")
    change(form)
    assert problem in problems_of(form)


@pytest.mark.parametrize("name", ASKED)
def test_the_form_asks_for_what_is_needed(name: str) -> None:
    required = [
        element["attributes"]
        for element in load(ROOT / ".github" / "ISSUE_TEMPLATE" / name)["body"]
        if (element.get("validations") or {}).get("required")
    ]
    text = "\n".join(f"{entry['label']}\n{entry.get('description', '')}" for entry in required)
    assert [words for words in ASKED[name] if words not in text] == []


def test_there_is_a_form_for_each_kind_and_no_other() -> None:
    assert [path.name for path in FORMS] == sorted(ASKED)


def test_links_beside_the_forms() -> None:
    config = load(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")
    assert set(config) == {"blank_issues_enabled", "contact_links"} and config["blank_issues_enabled"] in (True, False)
    for link in config["contact_links"]:
        assert set(link) == {"name", "url", "about"}
        file, _, anchor = link["url"].partition("/blob/main/")[2].partition("#")
        assert anchor in anchors((ROOT / file).read_text(encoding="utf-8"))


def anchors(markdown: str) -> set[str]:
    """The anchors that GitHub gives to headings, and those that the text itself has."""
    titles = re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return made | set(re.findall(r'<a (?:id|name)="([^"]+)"', markdown))


@functools.cache
def options_of(command: str) -> frozenset[str]:
    """The options of a command of run.py, from its own help; none when there is no such command."""
    asked = [sys.executable, str(ROOT / "run.py"), command, "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return frozenset(re.findall(r"--[\w-]+", done.stdout)) if done.returncode == 0 else frozenset()


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_command_that_is_named_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for line in re.findall(r"run\.py ((?:(?!run\.py)[^`\n])+)", text):
        command, *words = line.strip().split()
        command = command.rstrip(".,:")
        options = {word.rstrip(".,;:") for word in words if word.startswith("--")}
        assert "--help" in options_of(command), f"{path.name}: run.py {command}"
        assert options <= options_of(command), f"{path.name}: run.py {command} {options - options_of(command)}"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(
        r"(?<![\w/.<])((?:kernels|nodes|tools|tests|web|locales|benchmarks|docs|\.github)/[\w./-]*\w|[A-Z]{4,}\.md)",
        text,
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing and (path.name != "CONTRIBUTING.md" or len(named) > 20)


def test_links_of_contributing_lead_somewhere() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert repository is not None
    for address in re.findall(r"https?://[^\s)]+", text):
        assert address.startswith(repository[1]), address


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_texts_are_plain(path: Path) -> None:
    text = path.read_text(encoding="ascii")
    assert "\t" not in text and text.endswith("\n") and not re.search(r"[ ]+$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) < 400
