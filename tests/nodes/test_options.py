"""The widgets' values: what is accepted, what it means, and the sentence when it is wrong."""

from __future__ import annotations

import dataclasses

import pytest
from vc_attention.kernels import EXACT, FAITHFUL, FAST, FOUR_BIT
from vc_attention.nodes.options import PatchOptions, parse_blocks


@pytest.mark.parametrize(
    ("text", "any_type", "typed"),
    [
        ("", set(), set()),
        (" , ; ", set(), set()),
        ("3", {3}, set()),
        ("0-2, 38, single:3", {0, 1, 2, 38}, {("single", 3)}),
        ("double:0-1;single : 4 - 5", set(), {("double", 0), ("double", 1), ("single", 4), ("single", 5)}),
        ("7-7\n9", {7, 9}, set()),
    ],
)
def test_dense_blocks(text, any_type, typed):
    blocks = parse_blocks(text)
    assert (blocks.any_type, blocks.typed) == (frozenset(any_type), frozenset(typed))
    assert bool(blocks) == bool(any_type or typed)


def test_dense_blocks_membership():
    blocks = parse_blocks("2, single:3")
    assert ("double", 2) in blocks and ("single", 2) in blocks and (None, 2) in blocks
    assert ("single", 3) in blocks and ("double", 3) not in blocks
    assert (None, None) not in blocks


@pytest.mark.parametrize("text", ["a", "1..3", "5-2", "-1", "single:", "1 2", "0-99999", "1,two"])
def test_dense_blocks_error_names_the_item(text):
    with pytest.raises(ValueError, match="dense_blocks") as caught:
        parse_blocks(text)
    assert text.split(",")[-1].strip() in str(caught.value)
    with pytest.raises(ValueError, match="dense_blocks"):
        PatchOptions(dense_blocks=text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precision", "2-bit"),
        ("quality", "best"),
        ("grouping", "sometimes"),
        ("on_problem", "ignore"),
        ("backend", "cuda"),
        ("group_fraction", 1.01),
        ("group_fraction", -0.1),
        ("group_fraction", float("nan")),
        ("reuse_steps", 0),
        ("reuse_steps", 65),
        ("groups", -1),
        ("groups", 257),
        ("min_tokens", -1),
        ("start_percent", -0.5),
        ("end_percent", 1.5),
        ("state_budget_gb", -1.0),
    ],
)
def test_out_of_range_is_a_sentence_with_the_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is .*\.$"):
        PatchOptions(**{name: value})


def test_start_after_end_is_refused():
    with pytest.raises(ValueError, match="would never run"):
        PatchOptions(start_percent=0.6, end_percent=0.5)


def test_plans():
    assert PatchOptions().plans() == (FAST,)
    assert PatchOptions(precision="8-bit", quality="faithful").plans() == (FAITHFUL,)
    assert PatchOptions(precision="4-bit").plans() == (FOUR_BIT, FAST)
    assert PatchOptions(precision="4-bit", quality="faithful").plans() == (FOUR_BIT, FAITHFUL)
    assert PatchOptions(plan=EXACT, precision="4-bit").plans() == (EXACT,)


def test_off():
    assert not PatchOptions(precision="off").enabled
    assert PatchOptions().enabled and PatchOptions(precision="off", plan=EXACT).enabled


def test_frozen_and_in_the_widgets_order():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PatchOptions().groups = 3  # type: ignore[misc]
    assert [f.name for f in dataclasses.fields(PatchOptions) if f.init] == [
        "precision", "quality", "grouping", "group_fraction", "reuse_steps", "groups", "min_tokens", "dense_blocks",
        "start_percent", "end_percent", "state_budget_gb", "on_problem", "backend", "plan",
    ]  # fmt: skip
