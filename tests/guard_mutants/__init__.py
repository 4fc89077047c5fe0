"""Every guard of the pack as an edit that takes it away; `tests/mutants.py` runs them, a file here holds a subject."""

from __future__ import annotations

from . import attention, guard, installing, runs, wrapper
from .mutant import Mutant

MUTANTS = (*attention.MUTANTS, *runs.MUTANTS, *guard.MUTANTS, *installing.MUTANTS, *wrapper.MUTANTS)

__all__ = ["MUTANTS", "Mutant"]
