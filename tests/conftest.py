"""Load this checkout as the package `vc_attention` for the tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_file = Path(__file__).resolve().parent.parent / "tools" / "pack.py"
_spec = importlib.util.spec_from_file_location("vc_attention_pack_loader", _file)
_loader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_loader)
_loader.load_pack()
