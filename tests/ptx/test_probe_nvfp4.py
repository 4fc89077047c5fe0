"""The probe of single NVFP4 instructions, executed: it passes on what PTX says, and names what differs on a card that
does something else. Such cards are made by editing the probe's PTX, or by changing the interpreter."""

from __future__ import annotations

import re
from collections.abc import Callable

import kernel_backends
import numpy as np
import pytest
import torch
from ptx import convert, mma, opcodes_sm120  # noqa: F401 - it fills the table
from ptx import formats as fm
from ptx.on_torch import InterpretedLibrary
from vc_attention.kernels import FAST
from vc_attention.kernels.launch import chain, probe, selftest
from vc_attention.kernels.spec.attention import attention as spec_attention

pytestmark = pytest.mark.xdist_group("cubins")

CPU = torch.device("cpu")
_MMA = re.compile(
    r"(?P<opcode>mma\.sync\.aligned\.m16n8k64\S+)\s+\{(?P<d>[^}]*)\}, \{(?P<a>[^}]*)\}, \{(?P<b>[^}]*)\}, "
    r"\{(?P<c>[^}]*)\},\s+(?P<a_scale>%r\d+), \{(?P<a_from>0,0)\}, (?P<b_scale>%r\d+), \{(?P<b_from>0,0)\};"
)


@pytest.fixture
def library(builds, monkeypatch) -> InterpretedLibrary:
    # Built anew for each test: some change what an instruction does.
    monkeypatch.setattr(InterpretedLibrary, "_parsed", {})
    return InterpretedLibrary(builds["sm_120a"])


def said(library: InterpretedLibrary) -> str | None:
    """What the probe says of the interpreter as a card."""
    with library.in_use():
        return probe.problem(library, CPU)


def test_passes_on_what_ptx_says(library):
    assert said(library) is None
    ((name, report),) = library.reports
    assert name == probe.KERNEL and not report.unwritten


def test_the_other_architecture_has_the_same_probe(builds):
    assert said(InterpretedLibrary(builds["sm_121a"])) is None


def test_passes_where_the_instructions_are_emulated(tmp_path):
    """Another statement of the same instructions, for sm_90: fp16 MMAs, scales by shuffles, casts by integers."""
    if not kernel_backends.has_compiler():
        pytest.skip(kernel_backends.NO_COMPILER)
    kernel_backends.compile_kernels(kernel_backends.ROOT, tmp_path, only=probe.KERNEL, trial="rtx")
    assert said(InterpretedLibrary(tmp_path)) is None


def test_kernels_without_a_probe_have_nothing_to_say(builds):
    library = InterpretedLibrary(builds["sm_89"])
    assert said(library) is None and not library.reports


def test_every_scale_byte_is_shown_and_none_twice_in_a_product():
    for name in "ab":
        what = f"the scales of operand {name.upper()} differ"
        shown = [getattr(p, f"{name}_scales").flatten().tolist() for p in probe.products() if p.what == what]
        assert all(len(set(scales)) == len(scales) for scales in shown)
        assert set().union(*shown) == set(range(127))


def test_every_element_is_shown_by_codes_that_number_it():
    """For each operand: a one of the other meets every k, under three codes that no other element has."""
    asked = [p for p in probe.products() if p.what == "the order of the codes along k differs"]
    for name, other, rows in (("a", "b", 16), ("b", "a", 8)):
        mine = [p for p in asked if getattr(p, name).count_nonzero() > 64]
        digits = {tuple(getattr(p, name).flatten().tolist()) for p in mine}
        assert len(digits) == 3 and len(set(zip(*digits, strict=True))) == rows * 64
        met = [k for p in mine for _, k in getattr(p, other).nonzero().tolist()]
        assert sorted(met) == sorted([*range(64)] * 3)


def test_casts_meet_every_tie_of_e2m1_and_what_lies_beside_it():
    small, fine = probe.cast_numbers()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    for sign in (1, -1):
        for beside in (ties, torch.nextafter(ties, ties * 0), torch.nextafter(ties, ties * 2)):
            assert torch.isin(sign * beside, small).all()
    placed = probe._placed(len(probe.products()))
    assert torch.isin(small, placed).all() and torch.isin(fine, placed[..., :4]).all()


# -- cards that differ ------------------------------------------------------------------------------------------------


def product(before: str = "", **operands: str) -> Callable[[str], str]:
    """The probe's MMA with other operands, in whose text {a0}, {c3}, {a_scale} ... are its own registers.

    before: instructions in front of it, which may use a register t.
    """

    def change(text: str) -> str:
        (found,) = _MMA.finditer(text)
        own = {f"{name}{n}": register for name in "abc" for n, register in enumerate(found[name].split(","))}
        own |= {name: found[name] for name in ("a_scale", "b_scale")}
        parts = found.groupdict() | {name: operand.format_map(own) for name, operand in operands.items()}
        registers = ", ".join("{" + parts[name] + "}" for name in "dabc")
        scales = ", ".join(f"{parts[f'{name}_scale']}, {{{parts[f'{name}_from']}}}" for name in "ab")
        new = f"{{.reg .b32 t; {before.format_map(own)}\n{parts['opcode']} {registers}, {scales};}}\n"
        return text[: found.start()] + new + text[found.end() :]

    return change


def swapped_cast(text: str) -> str:
    return re.sub(r"e2m1x2\.f32 a, (%r\d+), (%r\d+);", r"e2m1x2.f32 a, \2, \1;", text)


#: Edit of the PTX -> how the sentence begins.
EDITS: dict[str, tuple[Callable[[str], str], str]] = {
    "no accumulator input": (product("mov.b32 t, 0;", c="t,t,t,t"), "the accumulator input of an MMA differs"),
    "rows of the accumulator": (product(c="{c2},{c3},{c0},{c1}"), "the accumulator input of an MMA differs"),
    "rows of A": (product(a="{a1},{a0},{a3},{a2}"), "the rows of operand A's codes differ"),
    "columns of B": (
        product("shfl.sync.bfly.b32 t, {b0}, 4, 31, -1;", b="t,{b1}"),
        "the columns of operand B's codes differ",
    ),
    "k halves of A": (product(a="{a2},{a3},{a0},{a1}"), "the order of the codes along k differs"),
    "codes of a word of A": (
        product("prmt.b32 t, {a3}, 0, 0x3201;", a="{a0},{a1},{a2},t"),
        "the order of the codes along k differs",
    ),
    "k halves of B": (product(b="{b1},{b0}"), "the order of the codes along k differs"),
    "k groups of A": (
        product("prmt.b32 t, {a_scale}, 0, 0x2301;", a_scale="t"),
        "the order of operand A's scales along k differs",
    ),
    "A's scales for 32 elements": (
        product("prmt.b32 t, {a_scale}, 0, 0x2200;", a_scale="t"),
        "the order of operand A's scales along k differs",
    ),
    "k groups of B": (
        product("prmt.b32 t, {b_scale}, 0, 0x0123;", b_scale="t"),
        "the order of operand B's scales along k differs",
    ),
    "lanes of A's scales": (
        product("shfl.sync.bfly.b32 t, {a_scale}, 1, 31, -1;", a_scale="t"),
        "the lanes that operand A's scales come from differ",
    ),
    "lanes of B's scales": (
        product("shfl.sync.bfly.b32 t, {b_scale}, 4, 31, -1;", b_scale="t"),
        "the lanes that operand B's scales come from differ",
    ),
    "lanes of B's scales as A's": (
        product("shfl.sync.bfly.b32 t, {b_scale}, 16, 31, -1;", b_scale="t"),
        "the lanes that operand B's scales come from differ",
    ),
    "large scales of A": (product("and.b32 t, {a_scale}, 0x3f3f3f3f;", a_scale="t"), "the scales of operand A differ"),
    "large scales of B": (product("and.b32 t, {b_scale}, 0x3f3f3f3f;", b_scale="t"), "the scales of operand B differ"),
    "selector of A": (product(a_from="0,1"), "the scale selector of operand A differs"),
    "selector of B": (product(b_from="0,2"), "the scale selector of operand B differs"),
    "order of a cast": (swapped_cast, "rounding to E2M1 differs"),
}


@pytest.mark.parametrize("name", EDITS)
def test_another_instruction_is_named(library, name):
    edit, sentence = EDITS[name]
    text = (library.manifest.folder / f"{probe.KERNEL}.ptx").read_text(encoding="utf-8")
    library.replaced[probe.KERNEL] = edit(text)
    assert library.replaced[probe.KERNEL] != text
    assert said(library).startswith(f"{sentence} on this card (")


def half_away(x):
    """To E2M1, ties away from zero."""
    code = sum((np.abs(x) >= tie).astype(np.uint8) for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5))
    return code | np.signbit(x).astype(np.uint8) << 3


def ties_down(x):
    """To E4M3, ties towards zero."""
    return fm.to_e4m3(np.where(np.isfinite(x), x * np.float32(1 - 2.0**-22), x))


def without_subnormals(table, first, last):
    return np.where((np.arange(len(table)) >= first) & (np.arange(len(table)) < last), 0.0, table)


def test_another_cast_is_named(library, monkeypatch):
    monkeypatch.setitem(convert._PACKED, "satfinite.e2m1x2", (half_away, 4))
    assert said(library) == "rounding to E2M1 differs on this card (0.25 becomes 0.5 instead of 0)."


def test_another_cast_of_scales_is_named(library, monkeypatch):
    monkeypatch.setitem(convert._PACKED, "satfinite.e4m3x2", (ties_down, 8))
    assert said(library).startswith("rounding to E4M3 differs on this card (")


def test_other_values_of_codes_are_named(library, monkeypatch):
    monkeypatch.setattr(fm, "E2M1", without_subnormals(fm.E2M1, 1, 2))
    assert said(library) == "reading E2M1 differs on this card (1 becomes 0 instead of 0.5)."


def test_other_values_of_scales_are_named(library, monkeypatch):
    monkeypatch.setattr(fm, "E4M3", without_subnormals(fm.E4M3, 1, 8))
    assert said(library).startswith("reading E4M3 differs on this card (")
    monkeypatch.setattr(fm, "UE4M3", without_subnormals(fm.UE4M3, 1, 8))
    assert said(library).startswith("the scales of operand A differ on this card (")


def test_another_sum_is_named(library, monkeypatch):
    def either(product, addend, kind, saturate=False):
        return np.where(addend != 0, addend, product).astype(np.float32)

    monkeypatch.setattr(mma, "accumulate", either)
    assert said(library).startswith("the sum of an MMA differs on this card (")


# -- the self-test begins with it -------------------------------------------------------------------------------------


def verdict_on(library: InterpretedLibrary) -> tuple[object, int]:
    """The verdict on `library`, and how often attention was called: the specification in the kernels' place."""
    calls = []

    def attention_on(kernels, *call):
        calls.append(kernels)
        return spec_attention(*call)

    cases = selftest.cases(lambda plan, dtype: plan == FAST.without_smoothing() and dtype == torch.float16)
    with library.in_use():
        return chain._test(library, attention_on, cases, CPU), len(calls)


def test_attention_is_not_tried_where_the_probe_fails(library):
    text = (library.manifest.folder / f"{probe.KERNEL}.ptx").read_text(encoding="utf-8")
    library.replaced[probe.KERNEL] = product(a_from="0,1")(text)
    verdict, calls = verdict_on(library)
    assert not verdict.passed and calls == 0
    assert verdict.text.startswith("the scale selector of operand A differs on this card (")


def test_attention_is_tested_where_it_passes(library):
    verdict, calls = verdict_on(library)
    assert verdict.passed and calls > 0 and library.reports[0][0] == probe.KERNEL
