"""What is asked of ComfyUI while kernels are found and compiled, and what a creator then reads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from node_fakes import FakePatcher, options
from vc_attention.kernels import FAST, Ok
from vc_attention.nodes import host, messages, session
from vc_attention.nodes.hook import attach, session_of


class Interrupted(Exception):  # noqa: N818 - as ComfyUI's is
    """ComfyUI's Cancel."""


@pytest.fixture
def comfyui(monkeypatch):
    """A ComfyUI that notes what it is told; `cancelled` is its Cancel button."""
    seen = SimpleNamespace(texts=[], bars=[], cancelled=False)

    def check() -> None:
        if seen.cancelled:
            raise Interrupted

    class ProgressBar:
        def __init__(self, total: int) -> None:
            seen.bars.append(total)

        def update_absolute(self, value: int, total: int) -> None:
            seen.bars.append((value, total))

    server = SimpleNamespace(send_progress_text=lambda text, node: seen.texts.append((node, text)))
    for name, fake in {
        "comfy.model_management": SimpleNamespace(
            throw_exception_if_processing_interrupted=check, InterruptProcessingException=Interrupted
        ),
        "comfy.utils": SimpleNamespace(ProgressBar=ProgressBar),
        "server": SimpleNamespace(PromptServer=SimpleNamespace(instance=server)),
    }.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return seen


def test_progress_shows_each_kernel_once_and_moves_the_bar(comfyui):
    report = host.progress("7")
    for step in ((0, 0, "the compiler starts"), (0, 3, "a"), (0, 3, "a"), (1, 3, "b"), (1, 3, "b")):
        report(*step)
    assert [node for node, _ in comfyui.texts] == ["7"] * 3
    for (_, text), words in zip(comfyui.texts, ("minute", "1 of 3 (a)", "2 of 3 (b)"), strict=True):
        assert words in text
    assert comfyui.bars == [3, (0, 3), (1, 3)]


def test_cancel_passes_through(comfyui):
    report = host.progress("7")
    report(0, 3, "a")
    comfyui.cancelled = True
    with pytest.raises(Interrupted):
        report(0, 3, "a")


def test_progress_without_comfyui_is_silent(monkeypatch):
    for name in ("comfy.model_management", "comfy.utils", "server"):
        monkeypatch.setitem(sys.modules, name, None)
    host.progress(None)(1, 3, "b")


def test_the_packs_folder_is_in_comfyuis_user_folder(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "folder_paths", None)
    assert host.user_folder() is None
    monkeypatch.setitem(sys.modules, "folder_paths", SimpleNamespace())
    assert host.user_folder() is None
    paths = SimpleNamespace(get_user_directory=lambda: str(tmp_path / "user"))
    monkeypatch.setitem(sys.modules, "folder_paths", paths)
    assert host.user_folder() == tmp_path / "user" / "vc_attention" and not Path(tmp_path / "user").exists()


def test_better_kernels_that_were_refused_are_in_the_runs_text(monkeypatch):
    asked = []

    def supports(device, plan, head_dim, number, backend, progress):
        asked.append(progress)
        return Ok("cute", "The file is cut off. Reinstall the pack's kernels.")

    monkeypatch.setattr(session, "supports", supports)
    model = attach(FakePatcher(), options(plan=None, backend="auto"), node_id="3")
    route = session_of(model)._find_route(torch.device("cpu"), 128, torch.bfloat16)
    assert route.backend == "cute" and route.plan == FAST and callable(asked[0])
    assert "The file is cut off." in session_of(model).stats.summary()


def test_ready_names_the_backend_and_what_was_refused():
    assert messages.ready("cubin", "") == "VC-Attention is ready (cubin)."
    assert messages.ready("cute", "It is cut off.") == "VC-Attention is ready (cute). It is cut off."
