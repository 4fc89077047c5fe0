"""What a disassembled kernel executes: instruction lists, and the loops that hold its matrix products."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)(.*?);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Loop:
    """Instructions from the target of a backward branch to the branch."""

    start: int
    end: int
    opcodes: Counter

    def count(self, prefix: str) -> int:
        """Instructions whose opcode begins with `prefix`."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(prefix))

    @property
    def length(self) -> int:
        return self.end - self.start + 1


def opcodes(text: str) -> list[str]:
    """Opcodes with their modifiers, in order."""
    return [m[1] for m in map(_INSTRUCTION.match, text.splitlines()) if m]


def loops(text: str) -> list[Loop]:
    """Every loop, the shortest first."""
    labels: dict[str, int] = {}
    instructions: list[tuple[str, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            instructions.append((found[1], found[2]))
    result = []
    for end, (opcode, rest) in enumerate(instructions):
        target = _TARGET.search(rest)
        if opcode.startswith("BRA") and target and labels.get(target[1], end + 1) <= end:
            start = labels[target[1]]
            result.append(Loop(start, end, Counter(name for name, _ in instructions[start : end + 1])))
    return sorted(result, key=lambda loop: loop.length)


def highest_register(text: str) -> int:
    """Number of the highest register that is named."""
    return max(int(n) for n in re.findall(r"\bR(\d+)\b", text))
