"""The progress of a download, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys

import pytest
from vc_attention.kernels.install.console import Progress


class Stream(io.StringIO):
    """A standard output that is a terminal, or is not."""

    encoding = "utf-8"
    terminal = True

    def isatty(self) -> bool:
        return self.terminal


def test_progress_on_a_terminal_is_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream := Stream())
    clock = iter((0.0, 0.05, 0.2, 0.25, 0.4))
    progress = Progress("x.whl", 2_000_000, lambda: next(clock))
    for done in (10, 500_000, 600_000, 1_000_000):
        progress.update(done)
    progress.finish()
    *lines, last = stream.getvalue().split("\r")[1:]
    assert [line.rstrip() for line in lines] == [
        "VC-Attention: downloading x.whl: 25 % of 2.0 MB",
        "VC-Attention: downloading x.whl: 50 % of 2.0 MB",
        "",
    ]
    assert last == "" and "\n" not in stream.getvalue()


def test_progress_elsewhere_is_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream := Stream())
    stream.terminal = False
    clock = iter((0.0, 4.0, 5.5, 9.0, 11.0))
    progress = Progress("x.whl", 2000, lambda: next(clock))
    for done in (200, 400, 600, 2000):
        progress.update(done)
    progress.finish()
    assert stream.getvalue() == (
        "VC-Attention: downloading x.whl: 20 % of 2 KB\nVC-Attention: downloading x.whl: 100 % of 2 KB\n"
    )
