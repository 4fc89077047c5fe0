"""Planted faults in the preparation kernels of RTX cards: the interpreter names each, or an image's bytes are wrong.

Each runs by the project's launchers on calls of which one has hard numbers and one more than a group of blocks, until
it is caught. Edits that change nothing are run as well: nothing may come of them.
"""

from __future__ import annotations

import re

import pytest
from ptx import mutants_prep_mma8, mutants_prep_nvfp4, opcodes_sm120, preparation_parts  # noqa: F401
from ptx.mutation import Mutant, outcome
from ptx.preparation_parts import CALLS, of_kernel

pytestmark = pytest.mark.xdist_group("cubins")

ARCH = "sm_120a"
MUTANTS = {**mutants_prep_nvfp4.MUTANTS, **mutants_prep_mma8.MUTANTS}
EQUIVALENT = mutants_prep_mma8.EQUIVALENT


def text_of(folder, name: str) -> str:
    """PTX of a kernel without the comments around inline assembly."""
    text = (folder / f"{name}.ptx").read_text(encoding="utf-8")
    return re.sub(r"\t// (?:begin|end) inline asm\n", "", text)


def check(folder, name: str):
    """A function that runs PTX text in place of the kernel `name`, until a call's images are wrong."""
    operand, kind, means = of_kernel(name)

    def run(text: str) -> str | None:
        for call in CALLS:
            replaced = {name: text}
            try:
                ours = preparation_parts.run(folder, call, operand, kind, means, replaced)
            except preparation_parts.Unwritten as wrong:
                return f"{wrong} (call {call.name})"
            wrong = preparation_parts.difference(ours, call.reference(kind, means), operand, call.ties)
            if wrong is not None:
                return f"{wrong} (call {call.name})"
        return None

    return run


@pytest.mark.parametrize("name", ["q4_bf16_means", "k4_bf16_means", "v4_bf16_means", "q_bf16_means",
                                  "k_bf16_gather_means", "v_bf16_gather_means"])  # fmt: skip
def test_the_kernels_themselves_are_right(builds, name):
    """And with them those that run before: sums, means, statistics, the order."""
    assert check(builds[ARCH], name)(text_of(builds[ARCH], name)) is None


@pytest.mark.parametrize(("name", "mutant"), [(n, m) for n, some in MUTANTS.items() for m in some],
                         ids=lambda x: x.name if isinstance(x, Mutant) else x)  # fmt: skip
def test_mutants_are_caught(builds, name, mutant):
    found = outcome(mutant, text_of(builds[ARCH], name), check(builds[ARCH], name))
    assert re.search(mutant.expected, found), found


@pytest.mark.parametrize(("name", "mutant"), [(n, m) for n, some in EQUIVALENT.items() for m in some],
                         ids=lambda x: x.name if isinstance(x, Mutant) else x)  # fmt: skip
def test_edits_that_change_nothing(builds, name, mutant):
    assert outcome(mutant, text_of(builds[ARCH], name), check(builds[ARCH], name)) == "MISSED"
