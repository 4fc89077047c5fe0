"""What this machine is, which path VC-Attention takes on it and why, and what is missing and how to get it.

It looks and changes nothing: no environment is made, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import comfyui, environment, redact, report
from .messages import ToolError, size_text

ROOT = Path(__file__).resolve().parent.parent
HELP = "what this machine is, what runs on it and why, and what is missing"
#: The folder `kernels` under a name of its own: importing it as a package would need torch.
KERNELS = "_vc_attention_kernels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument(
        "--report",
        metavar="FILE",
        nargs="?",
        const="",
        help="write all of it to FILE (default output/vc-attention-report.json) for an issue, with nothing personal",
    )
    parser.add_argument(
        "--comfyui",
        metavar="DIR",
        help="the ComfyUI to look at (default: the one that this pack is installed in, else the one in .cache)",
    )
    parser.add_argument("--self-test", action="store_true", help="load and test the kernels of each card now")
    parser.add_argument("--python", metavar="PATH", help="the Python that runs your ComfyUI, to look at its torch")


def main(arguments: argparse.Namespace) -> int:
    """Exit status 0, whatever is found."""
    given, python = arguments.comfyui, arguments.python
    around = comfyui.around() if given is None else None
    if around is not None:
        given = str(around)
        # the Python that runs this is ComfyUI's own if it has torch; the environment of the tests is not of interest
        if python is None and importlib.util.find_spec("torch") is not None:
            python = sys.executable
    findings = examine(given, python, self_test=arguments.self_test)
    if arguments.report is None:
        print(json.dumps(findings, indent=1) if arguments.json else text_of(findings))
        return 0
    folder = comfyui.locate(given).directory
    interpreter = None if python is None else environment.given(python)
    redactor = redact.of_this_machine(ROOT, folder, interpreter)
    made = report.build(findings, text_of(findings), folder, redactor, kernel_module("install.store"))
    print(report.said(report.write(made, arguments.report), report.issues_address()))
    return 0


def kernel_module(name: str) -> ModuleType:
    """A torch-free module of `kernels`, without running `kernels/__init__.py`, which needs torch."""
    if KERNELS not in sys.modules:
        package = ModuleType(KERNELS)
        package.__path__ = [str(ROOT / "kernels")]
        sys.modules[KERNELS] = package
    return importlib.import_module(f"{KERNELS}.{name}")


def examine(
    given_comfyui: str | None = None,
    python: str | None = None,
    driver: Any = None,
    others: Any = None,
    self_test: bool = False,
    kernels: Path = ROOT / "kernels",
) -> dict[str, Any]:
    """Everything that `doctor` tells. driver, others: what `kernels/detect.py` finds; kernels: the folder that holds
    `wheels.json` and `prebuilt` (seams for tests).

    self_test: load and test the kernels now; else what earlier tests said.
    """
    detect, cards = kernel_module("detect"), kernel_module("cards")
    driver = detect.nvidia() if driver is None else driver
    found = comfyui.locate(given_comfyui)
    interpreter, environment_state = _interpreter(found, python)
    torch = _torch(interpreter, found.directory / "user", self_test)
    here = detect.cards_here(driver, others)
    builds = kernel_module("install.store").everything(kernels / "prebuilt")
    installed = {arch for build in builds if build.good for arch in build.archs}
    available = cards.released(kernels / "wheels.json")
    verdicts = [_verdict(cards, card, torch, available, installed) for card in here]
    findings: dict[str, Any] = {
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "processor": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "disk_free": shutil.disk_usage(ROOT).free,
        },
        "pack": {"version": pack_version(), "folder": str(ROOT)},
        "driver": {"cuda": _dotted(driver.cuda), "problem": driver.problem},
        "cards": [
            {
                "name": card.name,
                "vendor": card.vendor,
                "capability": _dotted(card.capability),
                "memory": card.memory,
                "runs": verdict.runs,
                "code": verdict.code,
                "family": verdict.family,
                "text": verdict.text,
            }
            for card, verdict in zip(here, verdicts, strict=True)
        ],
        "kernels": [_build(build, kernels.parent) for build in builds],
        "environment": environment_state,
        "torch": torch,
        "comfyui": {"version": found.version, "ready": not found.ours or comfyui.is_complete(found.directory)},
    }
    findings["missing"] = missing(findings)
    return findings


def _verdict(cards: ModuleType, card: Any, torch: dict[str, Any] | None, available: Any, installed: set[str]) -> Any:
    """What runs on a card. installed: the architectures whose files are good; where torch has looked at the card, its
    word counts: it knows of kernels compiled here, and of installed ones that failed their self-test.
    """
    verdict = cards.describe(card.name, card.capability, card.vendor, available, installed)
    if torch is None or card.name not in torch.get("devices", ()) or "runs" not in torch:
        return verdict
    if card.name in torch["runs"] and not verdict.runs and cards.family_of(card.capability):
        arch = f"sm_{card.capability[0]}{card.capability[1]}a"
        return cards.describe(card.name, card.capability, card.vendor, available, {arch})
    if card.name not in torch["runs"] and verdict.runs:
        title = cards.title(card.name, card.capability)
        text = f"{title}: its kernels are installed but refused (the backends say why), so {cards.OWN_ATTENTION}."
        return cards.Verdict("refused", text, family=verdict.family)
    return verdict


def _build(build: Any, pack: Path) -> dict[str, Any]:
    """One build of kernels that is here, as the report has it."""
    inside = build.folder.is_relative_to(pack)  # a Python package lies elsewhere
    return {
        "family": build.family,
        "archs": list(build.archs),
        "folder": build.folder.relative_to(pack).as_posix() if inside else str(build.folder),
        "origin": build.origin,
        "good": build.good,
        "state": build.state,
    }


def _interpreter(found: comfyui.ComfyUI, python: str | None) -> tuple[Path | None, dict[str, Any]]:
    """The Python whose torch counts, and what is to be said about it."""
    if python is not None:
        return environment.given(python), {"name": "the given Python", "ready": True, "problem": ""}
    folder = ROOT / found.venv
    try:
        problem = environment.state(folder, [environment.REQUIREMENTS / file for file in found.requirements])
    except ToolError as error:
        return None, {"name": found.venv, "ready": False, "problem": str(error)}
    if problem is None:
        return environment.interpreter(folder), {"name": found.venv, "ready": True, "problem": ""}
    own = Path(sys.executable) if importlib.util.find_spec("torch") else None
    return own, {"name": found.venv, "ready": False, "problem": problem.text}


def _torch(python: Path | None, user: Path, self_test: bool) -> dict[str, Any] | None:
    """What `doctor_probe.py` finds in `python`; None when there is no Python with torch.

    user: ComfyUI's user folder, where earlier self-tests are kept.
    """
    if python is None:
        return None
    command = [str(python), str(ROOT / "tools" / "pack.py"), "doctor_probe", "--user", str(user)]
    answer = environment.run_quietly([*command, *(["--self-test"] if self_test else [])])
    try:
        return json.loads(answer.splitlines()[-1]) if answer else {"error": "it does not start"}
    except ValueError:
        return {"error": "its answer cannot be read"}


def missing(findings: dict) -> list[dict[str, str]]:
    """What is not there, each with how to get it."""
    torch, cards, driver = findings["torch"], findings["cards"], findings["driver"]
    nvidia = [card for card in cards if card["vendor"] == "nvidia"]
    absent: list[tuple[str, str]] = []
    if not nvidia:
        absent.append((
            driver["problem"] or "There is no NVIDIA card.",
            "If this machine has an NVIDIA card, install its driver from NVIDIA's site and restart.",
        ))  # fmt: skip
    cuda = driver["cuda"]
    oldest = kernel_module("detect").OLDEST_CUDA
    if nvidia and cuda and tuple(map(int, cuda.split("."))) < oldest:
        absent.append((
            f"The NVIDIA driver serves CUDA {cuda}; prebuilt kernels need {_dotted(oldest)} or newer.",
            "Update the NVIDIA driver.",
        ))  # fmt: skip
    if not findings["environment"]["ready"]:
        absent.append((
            f"The environment {findings['environment']['name']} is not ready: {findings['environment']['problem']}.",
            "`python3 run.py test` makes it (so do the other commands that need it).",
        ))  # fmt: skip
    if torch is not None and "error" in torch:
        absent.append((f"torch cannot be used: {torch['error']}", "Install the torch that ComfyUI asks for."))
    elif torch is not None and nvidia and not torch["devices"]:
        absent.append((
            f"torch {torch['torch']} does not see the NVIDIA card"
            + ("." if torch["cuda_build"] else ": it is a build for the CPU."),
            "Install a CUDA build of torch into the Python that runs ComfyUI.",
        ))  # fmt: skip
    if not findings["comfyui"]["ready"]:
        absent.append((
            f"ComfyUI {findings['comfyui']['version']} is not set up here.",
            "`python3 run.py serve` sets it up, or name yours with --comfyui DIR.",
        ))  # fmt: skip
    damaged = {build["family"] for build in findings["kernels"] if not build["good"]}
    for build in findings["kernels"]:
        if not build["good"]:
            absent.append((
                f"The kernels in {build['folder']} cannot be used.",
                "`python install.py` with ComfyUI's Python brings them anew."
                if build["origin"] == "pointer"
                else "Build or install them anew, or remove them.",
            ))  # fmt: skip
    lacking = [card for card in cards if card["code"] == "not_installed"]
    for name in dict.fromkeys(card["name"] for card in lacking if card["family"] not in damaged):
        absent.append((
            f"The kernels for {name} are not installed.",
            "`python install.py` with ComfyUI's Python installs them.",
        ))  # fmt: skip
    if not lacking and not any(card["runs"] for card in cards):
        absent.append((
            "No low-bit kernel runs on this machine.",
            "Nothing to do: ComfyUI's own attention runs. `run.py replay` shows the numbers with the slow emulation.",
        ))  # fmt: skip
    return [{"what": what, "how": how} for what, how in absent]


def pack_version() -> str:
    """The version in pyproject.toml."""
    found = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1) if found else "unknown"


def text_of(findings: dict) -> str:
    """The findings for a person."""
    machine, torch, env = findings["machine"], findings["torch"], findings["environment"]
    lines = [
        f"VC-Attention {findings['pack']['version']} in {findings['pack']['folder']}",
        f"System       {machine['system']}, {machine['processor']}, {size_text(machine['disk_free'])} of disk free",
        f"Python       {machine['python']}; {env['name']} is {'ready' if env['ready'] else 'not ready'}",
    ]
    if torch is None:
        lines.append("torch        not found")
    elif "error" in torch:
        lines.append(f"torch        not usable: {torch['error']}")
    else:
        build = f"built for {torch['cuda_build']}" if torch["cuda_build"] else "CPU build"
        lines.append(f"torch        {torch['torch']}, {build}; sees {', '.join(torch['devices']) or 'no GPU'}")
    comfy = findings["comfyui"]
    lines.append(f"ComfyUI      {comfy['version']}, {'ready' if comfy['ready'] else 'not set up'}")
    cuda = findings["driver"]["cuda"]
    lines.append(f"Driver       {f'NVIDIA, serves CUDA {cuda}' if cuda else 'no NVIDIA driver'}")
    for number, card in enumerate(findings["cards"]):
        memory = f" with {size_text(card['memory'])}" if card["memory"] else ""
        lines.append(f"Card {number}       {card['name']}{memory}")
    lines += ["", "What runs, and why"]
    lines += [f"  {text}" for text in dict.fromkeys(card["text"] for card in findings["cards"])]
    lines += ["", "Installed kernels, in the order in which they are tried"]
    lines += [f"  {_kernels_line(build)}" for build in findings["kernels"]] or ["  none"]
    if torch is not None and "backends" in torch:
        lines += ["", "Backends, in the order in which they are tried"]
        card = ""
        for status in torch["backends"]:
            if status.get("card", "") != card:
                card = status["card"]
                lines.append(f"  {card}")
            lines.append(f"  {status['name']:<6} {'yes' if status['available'] else 'no ':<3}  {status['reason']}")
    if findings["missing"]:
        lines += ["", "What is missing, and how to get it"]
        for entry in findings["missing"]:
            lines += [f"  {entry['what']}", f"    {entry['how']}"]
    return "\n".join(lines)


def _kernels_line(build: dict[str, Any]) -> str:
    archs = ", ".join(build["archs"]) or "no architecture"
    return f"{build['family']} for {archs}: {build['state']}; {build['folder']}"


def _dotted(numbers: Sequence[int] | None) -> str | None:
    return ".".join(map(str, numbers)) if numbers else None
