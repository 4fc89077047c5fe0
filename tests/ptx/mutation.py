"""Deliberate faults in the PTX of a kernel: a test of the tests. Each must end in a fault or in wrong numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .parser import PtxError


@dataclass(frozen=True)
class Mutant:
    """One change of PTX text: the `nth` match (from 0; -1 is the last) of the regular expression `pattern`.

    replacement: as of `re.sub`; \\g<0> is the match. expected: what the message of the fault must match, or "numbers"
    when nothing but the result can tell; alternatives with `|`.
    """

    name: str
    pattern: str
    replacement: str
    expected: str
    nth: int = 0

    def apply(self, text: str) -> str:
        """The changed text. Raises LookupError when there is no such match, or the change changes nothing."""
        found = list(re.finditer(self.pattern, text))
        if not found or not -len(found) <= self.nth < len(found):
            raise LookupError(f"{self.name}: match {self.nth} of {len(found)} of {self.pattern!r}")
        match = found[self.nth]
        changed = text[: match.start()] + match.expand(self.replacement) + text[match.end() :]
        if changed == text:
            raise LookupError(f"{self.name}: the replacement changes nothing")
        return changed


def outcome(mutant: Mutant, text: str, check: Callable[[str], str | None]) -> str:
    """How a mutant shows: the message of its fault, "numbers: ..." or "MISSED".

    check: runs PTX text and says what is wrong with its result, or None; faults come as PtxError.
    """
    try:
        wrong = check(mutant.apply(text))
    except PtxError as fault:
        return str(fault)
    return f"numbers: {wrong}" if wrong else "MISSED"
