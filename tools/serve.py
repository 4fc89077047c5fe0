"""ComfyUI with this pack at an address of this machine, for a browser. Ctrl-C stops it."""

from __future__ import annotations

import argparse
from pathlib import Path

from .comfyui import CACHE
from .messages import ToolError
from .progress import say
from .ready import add_arguments as add_ready_arguments
from .ready import ready
from .server import Server

HELP = "run ComfyUI with the pack, for a browser on this machine"
PORT = 8188


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_ready_arguments(parser)
    parser.add_argument("--port", type=int, default=PORT, help=f"port of this machine (default {PORT})")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    parser.add_argument(
        "--models", metavar="DIR", help="a folder with ComfyUI's model folders, to find your models (read only)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Start, tell the address, wait for Ctrl-C."""
    found, made = ready(arguments)
    base = CACHE / "serve"
    extra = ["--extra-model-paths-config", str(_model_paths(arguments.models, base))] if arguments.models else []
    server = Server(
        found.directory,
        made.python,
        arguments.port,
        base,
        arguments=extra,
        device="cpu" if arguments.cpu else None,
    )
    with server:
        node = "VCAttentionPatch" in server.object_info()
        if not node:
            say(f"ComfyUI runs, but the pack did not load; the log says why: {server.log_file}")
        print(f"{found.name} with VC-Attention: {server.url}   (Ctrl-C stops it; log: {server.log_file})", flush=True)
        status = server.wait()
    raise ToolError(f"ComfyUI ended by itself (exit status {status}). The end of its log:\n{server.log_tail()}")


def _model_paths(models: str, base: Path) -> Path:
    """A file that adds a folder of models to ComfyUI's own."""
    folder = Path(models).expanduser().resolve()
    if not folder.is_dir():
        raise ToolError(f"--models {models}: there is no such folder.", 2)
    base.mkdir(parents=True, exist_ok=True)
    names = sorted(child.name for child in folder.iterdir() if child.is_dir())
    lines = ["vc_attention_serve:", f"  base_path: {_quoted(folder.as_posix())}"]
    file = base / "model_paths.yaml"
    file.write_text("\n".join([*lines, *(f"  {_quoted(n)}: {_quoted(n)}" for n in names)]) + "\n", encoding="utf-8")
    return file


def _quoted(text: str) -> str:
    """Text as a YAML string in single quotes."""
    return "'" + text.replace("'", "''") + "'"
