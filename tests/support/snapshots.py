"""Texts that a person reads, kept as files: a change of wording is seen in review.

`VC_UPDATE_SNAPSHOTS=1 python3 run.py test` writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path


def check(file: Path, text: str) -> None:
    """Compare `text` with the file, or write it."""
    if os.environ.get("VC_UPDATE_SNAPSHOTS"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    assert file.exists(), f"{file} is missing; VC_UPDATE_SNAPSHOTS=1 writes it"
    assert text + "\n" == file.read_text(encoding="utf-8")
