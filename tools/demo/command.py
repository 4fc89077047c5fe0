"""A clip through real ComfyUI with a tiny Wan2.2 model, plain and with VC-Attention, and a report that compares them.

Needs no GPU and no ComfyUI: everything is set up in this folder. The result lies in output/demo.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .. import comfyui, environment
from ..comfyui import CACHE, ROOT, ComfyUI
from ..lock import Lock
from ..messages import ToolError
from ..progress import Step
from ..ready import add_arguments as add_ready_arguments
from ..ready import ready
from ..server import Server
from ..workflow import to_prompt
from . import FILES
from .substitute import FOUR_BIT, NO_ATTENTION, PATCH, PATCHED, PLAIN, Change, Settings, shrink

HELP = "make a small clip with and without VC-Attention, and a report"
WORKFLOW = ROOT / "workflows" / "wan2.2_t2v.json"
NODES = ROOT / "tools" / "demo" / "vc_demo_nodes"
OUTPUT = ROOT / "output" / "demo"
BASE = CACHE / "demo"
#: What the demo needs beside the packages: models, logs, clips.
BYTES = 0.2e9
TITLES = {
    PLAIN: "Clip with ComfyUI's own attention",
    PATCHED: "Clip with VC-Attention",
    FOUR_BIT: "Control: 4-bit attention",
    NO_ATTENTION: "Control: no self-attention",
}
#: The demo's tensors are small: with more threads than one, the threads mostly wait for each other.
THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: The files of a finished demo that a person looks at.
RESULTS = ("report.html", "plain.webp", "vc_attention.webp", "difference.png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_ready_arguments(parser)
    parser.add_argument("--port", type=int, help="port of the demo's ComfyUI (default: any free one)")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="seed of both clips (default %(default)s)")
    parser.add_argument("--output", metavar="DIR", help="where the result goes (default output/demo)")


def main(arguments: argparse.Namespace) -> int:
    """Run the demo and print where its files are."""
    started = time.monotonic()
    found, made = ready(arguments, ("demo.txt",))
    output = Path(arguments.output).expanduser().resolve() if arguments.output else OUTPUT
    with Lock(CACHE / "demo.lock", "making a demo"):
        demo = Demo(found, made.python, BASE, output, arguments.port, Settings(seed=arguments.seed))
        demo.run()
    print("\nThe demo is ready. Open the report in a browser:\n")
    for name in RESULTS:
        print(f"  {output / name}")
    print(f"\n({time.monotonic() - started:.0f} s)", flush=True)
    return 0


@dataclass
class Demo:
    """One demo. base: where its server, models and intermediate files live. output: where the result goes."""

    found: ComfyUI
    python: Path
    base: Path
    output: Path
    port: int | None
    settings: Settings
    runs: tuple[str, ...] = (PLAIN, PATCHED, FOUR_BIT, NO_ATTENTION)

    def run(self) -> None:
        """Make the clips and the report. The last good output stays until the new one is complete."""
        with _disk(self.base):
            environment.needs_space(self.base, BYTES, "for the demo")
            workflow = json.loads(WORKFLOW.read_text(encoding="utf-8"))
            variables = comfyui.python_environment(self.python, self.found.directory)
            variables = {**dict.fromkeys(THREAD_LIMITS, "1"), **variables}
            self._write_models(variables)
            device = comfyui.device(self.python)
            self.settings = replace(self.settings, backend=self._backend(device, variables))
            folder = self.base / "run"
            comfyui.remove(folder)
            folder.mkdir(parents=True)
            comfyui.remove(self.base / "output")
            server = Server(
                self.found.directory,
                self.python,
                self.port,
                self.base,
                custom_nodes=(ROOT, NODES),
                variables=variables,
                device=device,
            )
            with server, _connection(server):
                self._clips(server, workflow, folder, device)
            self._report(folder, variables)

    def _write_models(self, variables: dict[str, str]) -> None:
        """The tiny models, once for each version of the code that makes them."""
        sources = [ROOT / "tools" / "demo" / name for name in ("models.py", "write_models.py", "__init__.py")]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        stamp = self.base / "models" / "vc-attention-demo.txt"
        files = [self.base / "models" / folder / FILES[name] for name, folder in _FOLDERS.items()]
        if all(path.is_file() for path in files) and stamp.is_file() and stamp.read_text() == digest:
            return
        stamp.unlink(missing_ok=True)
        command = [str(self.python), "-m", "tools.demo.write_models", str(self.found.directory)]
        _child([*command, str(self.base / "models")], variables, "Writing a tiny Wan2.2 model")
        stamp.write_text(digest)

    def _backend(self, device: str, variables: dict[str, str]) -> str:
        """ "auto" where a kernel for this device is there, else the specification."""
        if device != "cuda":
            return "spec"
        answer = subprocess.run(
            [str(self.python), "-m", "tools.demo.which_backend"],
            cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        return answer.stdout.strip() or "spec" if answer.returncode == 0 else "spec"

    def _clips(self, server: Server, workflow: dict[str, Any], folder: Path, device: str) -> None:
        nodes = server.object_info()
        missing = [name for name in (PATCH, "VCDemoRecord") if name not in nodes]
        if missing:
            raise ToolError(
                f"ComfyUI started, but {' and '.join(missing)} did not load. The end of its log:\n{server.log_tail(40)}"
            )
        prompt = to_prompt(workflow, nodes)
        seconds: dict[str, float] = {}
        changes: list[Change] = []
        for run in self.runs:
            small, made = shrink(prompt, FILES, self.settings, run)
            changes = made if run == PATCHED else changes
            began = time.monotonic()
            outputs = server.queue(small, TITLES[run], on_poll=_progress(server))
            seconds[run] = time.monotonic() - began
            (folder / f"{run}.webp").write_bytes(server.view(_clip(outputs)))
        for path in sorted((self.base / "output").glob("records_*.json")):
            shutil.copy2(path, folder / path.name)
        facts = {
            "comfyui": self.found.name,
            "device": device,
            "workflow": WORKFLOW.name,
            "settings": {**asdict(self.settings), "tokens": self.settings.tokens},
            "changes": [asdict(change) for change in changes],
            "seconds": seconds,
            "runs": list(self.runs),
        }
        (folder / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")

    def _report(self, folder: Path, variables: dict[str, str]) -> None:
        part = self.output.with_name(self.output.name + ".part")
        comfyui.remove(part)
        part.mkdir(parents=True)
        try:
            command = [str(self.python), "-m", "tools.demo.report", str(folder), str(part)]
            _child(command, variables, "Drawing the report")
            put_in_place(part, self.output)
        finally:
            comfyui.remove(part)


_FOLDERS = {"high": "diffusion_models", "low": "diffusion_models", "vae": "vae"}


def put_in_place(part: Path, target: Path) -> None:
    """Make the complete folder `part` appear as `target`; at every moment one complete result is there."""
    old = target.with_name(target.name + ".old")
    comfyui.remove(old)
    if target.exists():
        target.rename(old)
    try:
        part.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    comfyui.remove(old)


def _clip(outputs: dict[str, Any]) -> dict[str, str]:
    """The entry of the saved clip among a prompt's outputs."""
    for output in outputs.values():
        for image in output.get("images", ()):
            if image.get("filename", "").endswith(".webp"):
                return image
    raise ToolError("The workflow ran, but saved no clip.")


def _progress(server: Server) -> Any:
    """What the sampler's own progress bar in the log says, as the step's detail."""

    def show(step: Step) -> None:
        last = server.log_tail(1).rpartition("\r")[2].strip()
        step.show(last.partition("[")[0].strip() if "it/s" in last or "s/it" in last else "")

    return show


def _child(command: list[str], variables: dict[str, str], title: str) -> None:
    """Run a module of this folder to its end; its last words when it fails."""
    with Step(title):
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            said, _ = process.communicate()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            tail = "\n".join(said.strip().splitlines()[-12:])
            raise ToolError(f"{title} failed (exit status {process.returncode}):\n{tail}")


@contextlib.contextmanager
def _connection(server: Server) -> Iterator[None]:
    """A server that dies between two looks, as a sentence with the end of its log."""
    try:
        yield
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        what = "does not answer" if server.running else "stopped"
        raise ToolError(f"ComfyUI {what} ({error}). The end of its log:\n{server.log_tail()}") from error


@contextlib.contextmanager
def _disk(base: Path) -> Iterator[None]:
    """A full or read-only disk as a sentence."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno is None:
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise ToolError(
            f"The demo could not write its files{where}: {os.strerror(error.errno)}. Free some space or check the "
            "folder's permissions, then run the command again."
        ) from error
