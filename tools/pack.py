"""Load this checkout as the package `vc_attention`, the way ComfyUI loads a custom node folder of any name.

python tools/pack.py MODULE ARGUMENTS...        runs main(ARGUMENTS) of `vc_attention.tools.MODULE`
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "vc_attention"


def load_pack() -> ModuleType:
    """Import the checkout once under the name `vc_attention` and return it.

    A folder name such as `ComfyUI-VC-Attention` is not importable, and ComfyUI has a top-level module `nodes` of its
    own, so tests and benchmarks always go through this name and never put the checkout on `sys.path`.
    """
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{ROOT} is not a VC-Attention checkout: its __init__.py is missing.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = module
        spec.loader.exec_module(module)
    return sys.modules[PACKAGE]


if __name__ == "__main__":
    # Python put this folder there, and names in it (server, test) hide modules of ComfyUI and of Python
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT / "tools"]
    load_pack()
    sys.exit(importlib.import_module(f"{PACKAGE}.tools.{sys.argv[1]}").main(sys.argv[2:]))
