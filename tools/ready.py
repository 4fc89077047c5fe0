"""What most commands begin with: an environment, and a ComfyUI in it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import comfyui, environment
from .comfyui import ComfyUI
from .environment import Environment
from .lock import Lock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which ComfyUI and which Python to use."""
    parser.add_argument(
        "--comfyui", metavar="DIR", help=f"use this ComfyUI; by default {comfyui.VERSION} is set up in .cache"
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="use this Python as it is and install nothing; by default .venv is made with everything that is needed",
    )


def ready(arguments: argparse.Namespace, requirements: Sequence[str] = ()) -> tuple[ComfyUI, Environment]:
    """The environment (with ComfyUI's and the further `requirements`) and the ComfyUI of a command, both complete."""
    found = comfyui.locate(arguments.comfyui)
    made = environment.prepare([*found.requirements, *requirements], found.venv, arguments.python)
    with Lock(comfyui.CACHE / "comfyui.lock", f"setting up {found.name}"):
        comfyui.download(found, made.python)
    return found, made
