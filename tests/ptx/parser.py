"""PTX text of one kernel into instructions, with scopes of registers and labels; every construct it meets is known."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .formats import TYPES


class PtxError(Exception):
    """The PTX uses something that is not modelled, or did something at run time that silicon would not report."""


@dataclass
class Scope:
    """Registers and labels of one pair of braces."""

    outer: Scope | None = None
    #: name -> (slot in the warp's register list, type)
    registers: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: prefix -> (type, count) of `%r<100>`
    families: dict[str, tuple[str, int]] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)


@dataclass
class Instruction:
    """One statement: `opcode` with its modifiers, operand texts, guard (register, negated), source line."""

    opcode: str
    operands: list[str]
    guard: tuple[str, bool] | None
    line: int
    scope: Scope

    @property
    def text(self) -> str:
        """The statement in short."""
        guard = f"@{'!' if self.guard[1] else ''}{self.guard[0]} " if self.guard else ""
        body = f"{guard}{self.opcode} {', '.join(self.operands)}"
        return body if len(body) <= 120 else body[:117] + "..."


@dataclass
class Kernel:
    """A parsed entry: parameters in order as (name, type), threads of a block, shared symbols, the program."""

    name: str
    target: str
    parameters: list[tuple[str, str]]
    block: tuple[int, int, int] | None
    blocks_per_sm: int
    #: name -> (alignment, bytes, whether its size is given at launch)
    shared: dict[str, tuple[int, int, bool]]
    program: list[Instruction] = field(default_factory=list)
    slots: int = 0

    def slot(self, scope: Scope, name: str) -> tuple[int, str] | None:
        """Slot and type of a register seen from `scope`; None if there is no such register."""
        digits = re.fullmatch(r"(.*?)(\d+)", name)
        level: Scope | None = scope
        while level is not None:
            if name in level.registers:
                return level.registers[name]
            if digits and digits[1] in level.families and int(digits[2]) < level.families[digits[1]][1]:
                return self._declare(level, name, level.families[digits[1]][0])
            level = level.outer
        return None

    def _declare(self, scope: Scope, name: str, kind: str) -> tuple[int, str]:
        scope.registers[name] = (self.slots, kind)
        self.slots += 1
        return scope.registers[name]


_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_SHARED = re.compile(r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.b8\s+([\w$]+)\[(\d*)\]\s*;")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_STATEMENT = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([\w.:]+)\s*(.*)", re.S)
#: What may stand between a kernel's parameters and its body, and the directives within it that change no result.
_HEADER = re.compile(r"\s*(?:\.(reqntid|maxntid|minnctapersm|maxnreg|reqnctapercluster|explicitcluster)[\s\d,]*)*\s*")
_PARAMETER = re.compile(r"\.param\s+\.([busf]\d+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?([\w$]+)")
_OPEN = re.compile(r"[{\[(]")
_HARMLESS = re.compile(r"\.(pragma|loc|file|section)\b")


def parse(text: str, name: str | None = None) -> Kernel:
    """The kernel called `name` in PTX `text`, or its only one."""
    clean = re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S))
    entries = [m for m in _ENTRY.finditer(clean) if name in (None, m[1])]
    if len(entries) != 1:
        raise PtxError(f"the PTX holds {len(entries)} kernels called {name!r}")
    (entry,) = entries
    if not _HEADER.fullmatch(entry[3]):
        raise PtxError(f"the kernel's header is not modelled: {' '.join(entry[3].split())}")
    target = re.search(r"^\.target\s+(\w+)", clean, re.M)
    kernel = Kernel(
        entry[1],
        target[1] if target else "",
        [_parameter(p) for p in entry[2].split(",") if p.strip()],
        _block(entry[3]),
        int(m[1]) if (m := re.search(r"\.minnctapersm\s+(\d+)", entry[3])) else 1,
        {m[3]: (int(m[2] or 1), int(m[4] or 0), bool(m[1])) for m in _SHARED.finditer(clean)},
    )
    _body(kernel, clean, entry.end())
    return kernel


def _parameter(text: str) -> tuple[str, str]:
    found = _PARAMETER.fullmatch(text.strip())
    if found is None:
        raise PtxError(f"the kernel parameter is not modelled: {' '.join(text.split())}")
    return found[2], found[1]


def _block(header: str) -> tuple[int, int, int] | None:
    found = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", header)
    if found is None:
        return None
    x, y, z = (int(n or 1) for n in found.groups())
    return x, y, z


def _body(kernel: Kernel, text: str, at: int) -> None:
    scope = Scope()
    line, seen = text.count("\n", 0, at) + 1, at
    space = re.compile(r"\s*")
    while True:
        at = space.match(text, at).end()  # type: ignore[union-attr]
        if at >= len(text):
            raise PtxError("the kernel's last brace is missing")
        line += text.count("\n", seen, at)
        seen = at
        if text[at] == "{":
            scope = Scope(scope)
            at += 1
        elif text[at] == "}":
            at += 1
            if scope.outer is None:
                return
            scope = scope.outer
        elif label := _LABEL.match(text, at):
            scope.labels[label[1]] = len(kernel.program)
            at = label.end()
        else:
            end = text.index(";", at)
            _statement(kernel, scope, text[at:end].strip(), line)
            at = end + 1


def _statement(kernel: Kernel, scope: Scope, text: str, line: int) -> None:
    if text.startswith(".reg"):
        _, kind, names = text.split(None, 2)
        if kind[1:] not in TYPES:
            raise PtxError(f"PTX line {line}: registers of type {kind} are not modelled")
        for name in (n.strip() for n in names.split(",")):
            family = re.fullmatch(r"(.+)<(\d+)>", name)
            if family:
                scope.families[family[1]] = (kind[1:], int(family[2]))
            else:
                kernel._declare(scope, name, kind[1:])
    elif text.startswith("."):
        if not _HARMLESS.match(text) and not _SHARED.fullmatch(text + ";"):
            raise PtxError(f"PTX line {line}: the directive {text.split()[0]} is not modelled  [{text[:100]}]")
    else:
        parts = _STATEMENT.fullmatch(text)
        if parts is None:
            raise PtxError(f"PTX line {line}: not a statement  [{text[:100]}]")
        guard = (parts[2], bool(parts[1])) if parts[2] else None
        kernel.program.append(Instruction(parts[3], split_operands(parts[4]), guard, line, scope))


def split_operands(text: str) -> list[str]:
    """The operands of a statement; braces, brackets and parentheses stay whole."""
    if not _OPEN.search(text):
        return [" ".join(part.split()) for part in text.split(",")] if text.strip() else []
    found, depth, current = [], 0, ""
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            found.append(" ".join(current.split()))
            current = ""
        else:
            current += character
    return [*found, " ".join(current.split())] if current.strip() else found


def find_label(instruction: Instruction, name: str) -> int:
    """Index into the program of the label that `instruction` branches to."""
    scope: Scope | None = instruction.scope
    while scope is not None:
        if name in scope.labels:
            return scope.labels[name]
        scope = scope.outer
    raise PtxError(f"there is no label {name}")
