"""The interpreter's modules as the package `ptx`, without putting `tests` on sys.path (it has a folder `comfy`)."""

from __future__ import annotations

import sys
import types
from pathlib import Path

_package = types.ModuleType("ptx")
_package.__path__ = [str(Path(__file__).resolve().parent)]
sys.modules.setdefault("ptx", _package)
