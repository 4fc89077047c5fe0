"""The tools' progress: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

import pytest
from vc_attention.tools.progress import Step


class Terminal:
    """A stream that collects what is written, as a terminal or not."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.text = ""

    def isatty(self) -> bool:
        return self.live

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_progress_on_a_terminal_is_one_live_line() -> None:
    terminal = Terminal(live=True)
    with Step("Working", terminal) as step:
        step.show("part 1")
        time.sleep(0.5)
    assert "\rWorking: part 1 (" in terminal.text and terminal.text.count("\n") == 1
    assert terminal.text.rstrip().rpartition("\r")[2].startswith("Working: done (")


def test_progress_lacks_a_letter_rather_than_the_line() -> None:
    stream = Terminal(live=False)
    stream.encoding = "cp1252"
    with Step("Working", stream) as step:
        step.finish("ready at \u2588 100 %")
    assert "Working: ready at ? 100 % (" in stream.text


def test_progress_elsewhere_is_plain_lines_at_intervals() -> None:
    stream = Terminal(live=False)
    with pytest.raises(ValueError, match="x"), Step("Working", stream, interval=0.1) as step:
        step.show("part 1")
        time.sleep(0.35)
        raise ValueError("x")
    lines = stream.text.splitlines()
    assert lines[0] == "Working ..." and lines[1].startswith("Working: part 1 (")
    assert lines[-1].startswith("Working: failed (") and "\r" not in stream.text and 3 <= len(lines) <= 6
