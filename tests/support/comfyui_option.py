"""pytest plugin with the options that name a folder: `--comfyui DIR` and `--cubins DIR`.

It is its own plugin, loaded with `-p`, because pytest looks for conftest files before it knows the options that a
conftest adds: the DIR of an unknown option would be taken for a test folder, and ComfyUI's own conftest loaded.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--comfyui", metavar="DIR", default=None, help="ComfyUI checkout for the tests marked `comfy`")
    parser.addoption(
        "--cubins", metavar="DIR", default=None, help="sm_90a kernels of kernels/build.py, for the tests of them"
    )
