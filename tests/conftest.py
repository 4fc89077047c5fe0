"""Shared test set-up: the checkout becomes importable as `vc_attention`, whatever its folder is called."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("vc_pack", Path(__file__).parents[1] / "tools" / "pack.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.load_pack()
