"""Run one captured attention call (q, k, v in a .safetensors file) again, and compare it with exact attention.

Prints the relative L2 error, the cosine and the PSNR against softmax attention in fp32, the share of V's energy that
the block means take out before quantising, and the time. Bad input is one clear line and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from . import comfyui, environment
from .messages import ToolError

ROOT = Path(__file__).resolve().parent.parent
HELP = "run a captured attention call again and compare it with exact attention"
ROWS = ("all", "sampled")
PLANS = ("fast", "faithful", "four_bit", "exact")
MOST_GROUPS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command. Values are checked in `main`, where a wrong one is one line."""
    parser.add_argument("case", metavar="CASE.safetensors", help="holds q, k and v [batch, heads, tokens, dim]; scale")
    parser.add_argument("--plan", default="fast", help=f"{', '.join(PLANS)} (default fast)")
    parser.add_argument(
        "--backend",
        default="auto",
        help="auto (default): a kernel for this machine if there is one, else spec; or the name of a backend",
    )
    parser.add_argument(
        "--grouping",
        default="auto",
        metavar="off|N",
        help="off: the plan of a step without grouping; N: that many groups; by default the automatic number",
    )
    parser.add_argument(
        "--rows",
        default="all",
        help="all (default): measure every query row; sampled: the few that the node VC-Attention Quality measures",
    )
    parser.add_argument("--out", metavar="OUT.safetensors", help="write the result there, as the tensor `out`")
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object")
    parser.add_argument("--python", metavar="PATH", help="use this Python, with torch, and install nothing")


def main(arguments: argparse.Namespace) -> int:
    """Exit status 0, or 2 when the case or an option is not usable."""
    request = check(arguments)
    found = comfyui.locate(None)
    python = environment.prepare(found.requirements, found.venv, arguments.python).python
    command = [str(python), str(ROOT / "tools" / "pack.py"), "replay_main", json.dumps(request)]
    return subprocess.run(command, env=comfyui.plain_environment(), check=False).returncode


def check(arguments: argparse.Namespace) -> dict:
    """The request for `replay_main.py`, from options that make sense together. ToolError with status 2 otherwise."""
    case = Path(arguments.case).expanduser()
    if not case.is_file():
        what = "is a folder, not a file" if case.is_dir() else "does not exist"
        raise ToolError(f"{arguments.case} {what}.", 2)
    if arguments.plan not in PLANS:
        raise ToolError(f"--plan {arguments.plan}: choose {', '.join(PLANS[:-1])} or {PLANS[-1]}.", 2)
    if arguments.rows not in ROWS:
        raise ToolError(f"--rows {arguments.rows}: choose all or sampled.", 2)
    groups = {"off": None, "auto": 0}.get(arguments.grouping, arguments.grouping)
    if isinstance(groups, str):
        if not (groups.isascii() and groups.isdigit() and 1 <= int(groups) <= MOST_GROUPS):
            raise ToolError(f"--grouping {groups}: give off, or a number of groups from 1 to {MOST_GROUPS}.", 2)
        groups = int(groups)
    out = None if arguments.out is None else Path(arguments.out).expanduser().absolute()
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ToolError(f"--out {arguments.out}: no result can be written there (no such folder, or not a file).", 2)
    if out is not None and out.exists() and out.samefile(case):
        raise ToolError("--out names the case itself; give the result another name.", 2)
    return {
        "case": str(case.absolute()),
        "plan": arguments.plan,
        "backend": arguments.backend,
        "groups": groups,
        "rows": arguments.rows,
        "out": None if out is None else str(out),
        "json": arguments.json,
    }
