"""What a mutant is."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One edit: in `file`, `old` (which must occur exactly once) becomes `new`. needs: "0.33" when the ComfyUI must
    have tensor containers. also: further (file, old, new), for a protection that exists twice."""

    row: str
    guard: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    needs: str = ""
    also: tuple[tuple[str, str, str], ...] = ()
