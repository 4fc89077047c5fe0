"""The comparison with a GPU, without one: its arithmetic, and its whole course with the interpreter on both sides."""

from __future__ import annotations

import pytest
import torch
from ptx import agreement, on_torch
from vc_attention.kernels.cute.config import configs


def test_steps_between_neighbours():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.tensor([-2.0, -0.0, 0.0, 1.0, 3.0], dtype=dtype)
        up = torch.nextafter(x, torch.full_like(x, 9.0))
        row = agreement.compare("x", (5,), up, x)
        assert (row.elements, row.equal, row.steps) == (5, 0, 1)
        assert agreement.compare("x", (5,), x, x).equal == 5
    codes = torch.tensor([0x00, 0x80, 0x38, 0x7E], dtype=torch.uint8)
    assert agreement.compare("x", (4,), codes, torch.tensor([0x80, 0x00, 0x39, 0x7D], dtype=torch.uint8)).steps == 1
    assert (
        agreement.compare(
            "x", (2,), torch.tensor([-1, 5], dtype=torch.int8), torch.tensor([1, 5], dtype=torch.int8)
        ).steps
        == 2
    )


@pytest.mark.xdist_group("cubins")
def test_the_interpreter_agrees_with_itself(ptx):
    """Other schedules on the other side: every output is the same, bit by bit."""

    def library():
        return on_torch.InterpretedLibrary(ptx, schedule="random", seed=5)

    rows = list(
        agreement.rows(
            ptx,
            lambda images, plan, dtype: on_torch.attend(library(), images, plan, dtype),
            lambda q, k, v, plan, labels: on_torch.prepare(library(), q, k, v, plan, labels),
            shapes=((1, 1, 3, 140),),
            kernels=configs()[::5],
        )
    )
    assert len(rows) == 3 + 7 + 9 + 6
    assert all(row.equal == row.elements and row.relative == 0 for row in rows)
