"""The whole demo, very small, through a real ComfyUI server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from vc_attention.tools import comfyui
from vc_attention.tools.demo import command
from vc_attention.tools.demo.substitute import NO_ATTENTION, PATCHED, PLAIN, Settings
from vc_attention.tools.server import Server

ROOT = Path(__file__).resolve().parents[2]
SMALL = Settings(width=96, height=64, length=9, steps=4, min_tokens=48)


@pytest.mark.comfy
def test_the_demo_through_a_real_server(request, tmp_path, monkeypatch):
    given = request.config.getoption("--comfyui")
    found = comfyui.locate(str(given or ROOT / ".cache" / f"comfyui-{comfyui.VERSION}"))
    output = tmp_path / "output"
    output.mkdir()
    (output / "old").write_text("from an earlier demo")
    stopped = []
    stop = Server.stop

    def watched(self, *arguments):
        process = self._process
        stop(self, *arguments)
        if process is not None:
            stopped.append(process.returncode is not None)

    monkeypatch.setattr(Server, "stop", watched)
    runs = (PLAIN, PATCHED, NO_ATTENTION)
    command.Demo(found, Path(sys.executable), tmp_path / "base", output, None, SMALL, runs).run()

    assert stopped == [True]
    assert {path.name for path in output.iterdir()} == {*command.RESULTS, "numbers.json"}
    numbers = json.loads((output / "numbers.json").read_text())
    calls = numbers["attention"]
    # 4 layers in each of 4 steps, both prompts in one batch; the first quarter of the steps is grouped
    assert len(calls) == 16
    assert numbers["calls"] == {
        "accelerated": 32, "grouped": 8, "reused": 0, "plain": 24, "unkept": 0, "declined": 32,
    }  # fmt: skip
    assert all(call["lkv"] == SMALL.tokens and 0 < call["error"] < 0.05 for call in calls)
    close, control = (numbers["clips"][run]["psnr"] for run in (PATCHED, NO_ATTENTION))
    assert close is None or close > 40
    assert control < 25  # attention makes the picture
    assert (output / "plain.webp").read_bytes() != (output / "vc_attention.webp").read_bytes() or close is None
