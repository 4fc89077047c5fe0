"""Run a piece of the pack's JavaScript on data: with node where it is installed, else in the browser."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

WEB = Path(__file__).resolve().parents[2] / "web"
#: Programs that Playwright can drive, by the names that systems give them.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def browser_program() -> str | None:
    """The Chromium of this machine."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@functools.cache
def node_program() -> str | None:
    """A node that takes a plain `.js` file for a module, as browsers do."""
    program = shutil.which("node")
    if program is None:
        return None
    module = json.dumps((WEB / "vc_attention" / "schedule.js").as_uri())
    probe = _node(program, f"const m = await import({module}); console.log(typeof m.expected)")
    return program if probe.returncode == 0 and probe.stdout.strip() == "function" else None


def call_with_node(program: str, module: str, code: str, data: Any) -> Any:
    """`code` is the body of a function of `m` (the module of web/vc_attention) and `data`; its result as JSON."""
    source = json.dumps((WEB / "vc_attention" / module).as_uri())
    script = (
        f"import {{ readFileSync }} from 'node:fs';\nconst m = await import({source});\n"
        f"const data = JSON.parse(readFileSync(0, 'utf8'));\n"
        f"console.log(JSON.stringify(((m, data) => {{ {code} }})(m, data)));"
    )
    done = _node(program, script, json.dumps(data))
    if done.returncode:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)


def _node(program: str, script: str, given: str = "") -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "NODE_OPTIONS"}
    return subprocess.run(
        [program, "--input-type=module", "-e", script],
        input=given,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
