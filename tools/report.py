"""The file that goes with a bug report: everything that `doctor` found, in one JSON object with nothing personal."""

from __future__ import annotations

import datetime
import json
import os
import re
from pathlib import Path
from typing import Any

from .messages import ToolError
from .redact import Redactor

ROOT = Path(__file__).resolve().parent.parent
#: Where the report goes when no file is named; the folder is not in git.
OUTPUT = ROOT / "output" / "vc-attention-report.json"
SCHEMA = 1
#: What is looked at of a log: its end, and there the lines that this pack wrote.
LOG_BYTES = 4_000_000
LOG_LINES = 60
_OURS = re.compile(r"VC-?Attention|vc_attention", re.IGNORECASE)
#: File names of a person's choosing: what VC-Attention Capture saved. Names of profiles go with their whole line.
_CHOSEN = re.compile(r"( to ).+( in the output folder)")
_PACK_NAME = re.compile(r'^name = "vc-attention"', re.MULTILINE)


def build(findings: dict[str, Any], text: str, comfyui: Path, redactor: Redactor, stores: Any) -> dict[str, Any]:
    """The report. findings and text: those of `doctor`. comfyui: the folder that was looked at.

    stores: the module `kernels/install/store.py`, which reads installed kernels.
    """
    torch = dict(findings["torch"] or {})
    self_tests, packages = torch.pop("self_tests", []), torch.pop("packages", {})
    report = {
        "kind": "VC-Attention report",
        "schema": SCHEMA,
        "made": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "findings": {**findings, "torch": torch or None},
        "self_tests": self_tests,
        "packages": packages,
        "installed_packs": installed_packs(comfyui, stores),
        "log": log_lines(comfyui),
        "text": text.splitlines(),
    }
    return redactor.tree(report)


def write(report: dict[str, Any], file: str) -> Path:
    """Write the report, whole or not at all. file: as given on the command line; empty for the usual place."""
    path = Path(file).expanduser().absolute() if file else OUTPUT
    part = path.with_name(path.name + ".part")
    try:
        if not file:
            path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ToolError(f"--report {path}: it cannot be written there ({error.strerror or error}).") from error
    return path


def said(path: Path, issues: str) -> str:
    """What the person is told: where the file is, what is in it, what is not, and where it goes."""
    return (
        f"Report: {path}\n"
        "It holds the machine, the cards and their driver, versions, the kernels and what their self-tests said, what "
        "runs and why, and VC-Attention's own lines of the log. Accounts, host names, folders and addresses are "
        "replaced by placeholders such as <home>; it is plain text, so have a look before you send it.\n"
        f"Attach it to an issue: {issues}"
    )


def issues_address(pyproject: Path = ROOT / "pyproject.toml") -> str:
    """Where issues are opened: the page with the forms."""
    found = re.search(r'^Issues = "([^"]+)"', pyproject.read_text(encoding="utf-8"), re.MULTILINE)
    return f"{found.group(1)}/new/choose" if found else "the issue page of the repository"


def installed_packs(comfyui: Path, stores: Any) -> list[dict[str, Any]]:
    """The copies of this pack in `custom_nodes` of a ComfyUI, which need not be this checkout, and their kernels."""
    found = []
    for project in sorted(comfyui.glob("custom_nodes/*/pyproject.toml")):
        try:
            text = project.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if not _PACK_NAME.search(text):
            continue
        version = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
        builds = stores.everything(project.parent / "kernels" / "prebuilt")
        found.append(
            {
                "version": version.group(1) if version else "unknown",
                "this": project.parent.resolve() == ROOT,
                "git": (project.parent / ".git").exists(),
                "kernels": [
                    {"family": b.family, "archs": list(b.archs), "origin": b.origin, "good": b.good, "state": b.state}
                    for b in builds
                ],
            }
        )
    return found


def log_lines(comfyui: Path) -> list[str]:
    """The last lines that VC-Attention wrote to the newest log of this ComfyUI (ComfyUI Manager keeps it), without the
    names of files and profiles.
    """
    logs = [*comfyui.glob("user/comfyui*.log"), *comfyui.glob("comfyui*.log")]
    try:
        newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            return []
        with newest.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [_CHOSEN.sub(r"\1<file>\2", line.strip()) for line in text.splitlines() if _OURS.search(line)]
    return [line for line in lines if "profile" not in line.lower()][-LOG_LINES:]
