"""What ptxas does by default (-fmad) to fp32: a mul.f32 whose only use is an add.f32 or sub.f32 becomes an FMA.

The PTX says two roundings, silicon does one; with this the interpreter's results are those of the compiled kernel
wherever ptxas chooses the same pairs. Instructions with .rn are never contracted.
"""

from __future__ import annotations

import re
from collections import Counter

from .parser import Kernel

_REGISTER = re.compile(r"%[a-z]+\d+")


def contract(kernel: Kernel) -> int:
    """Rewrite adds and subtractions in place; returns how many. The muls stay, as nothing else reads them."""
    uses: Counter[str] = Counter()
    definitions: Counter[str] = Counter()
    for instruction in kernel.program:
        stores = instruction.opcode.startswith(("st.", "red.", "mbarrier.init", "cp.", "bar", "bra"))
        if instruction.guard:
            uses[instruction.guard[0]] += 1
        for position, text in enumerate(instruction.operands):
            # Accumulators of a wgmma are read as well as written.
            for name in _REGISTER.findall(text):
                if position == 0 and not stores:
                    definitions[name] += 1
                if position or stores or instruction.opcode.startswith("wgmma"):
                    uses[name] += 1
    labels = label_positions(kernel)
    open_products: dict[str, list[str]] = {}
    found = 0
    for position, instruction in enumerate(kernel.program):
        if position in labels:
            open_products.clear()
        if instruction.opcode in ("add.f32", "sub.f32") and instruction.guard is None:
            found += _fuse(instruction, open_products, uses)
        written = set(_REGISTER.findall(instruction.operands[0])) if instruction.operands else set()
        for name in [n for n, factors in open_products.items() if n in written or written & set(factors)]:
            del open_products[name]
        target = instruction.operands[0] if instruction.operands else ""
        if instruction.opcode == "mul.f32" and instruction.guard is None and definitions[target] == 1:
            open_products[target] = instruction.operands[1:]
        if instruction.opcode.startswith(("bra", "ret", "exit")):
            open_products.clear()
    return found


def _fuse(instruction, products: dict[str, list[str]], uses: Counter[str]) -> bool:
    target, *terms = instruction.operands
    for place in (0, 1):
        if terms[place] in products and uses[terms[place]] == 1:
            form = "pp" if instruction.opcode == "add.f32" else "pn" if place == 0 else "np"
            instruction.opcode = f"fma.contracted.f32.{form}"
            instruction.operands = [target, *products[terms[place]], terms[1 - place]]
            return True
    return False


def label_positions(kernel: Kernel) -> set[int]:
    """Program positions that a branch can reach."""
    seen, found = set(), set()
    for instruction in kernel.program:
        scope = instruction.scope
        while scope is not None and id(scope) not in seen:
            seen.add(id(scope))
            found.update(scope.labels.values())
            scope = scope.outer
    return found
