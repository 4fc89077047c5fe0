"""Unsupported GPUs: the text names the card, says what runs instead, and why; never the wrong table's number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from vc_attention.kernels import EXACT, FAST, FOUR_BIT, supports
from vc_attention.kernels.launch import attend, chain

#: Compute capability: a card's name, and a word that only the right explanation has.
CARDS = {
    (7, 0): ("Tesla V100-SXM2-32GB", "FP8"),
    (7, 5): ("NVIDIA GeForce RTX 2080 Ti", "FP8"),
    (8, 0): ("NVIDIA A100-SXM4-80GB", "FP8"),
    (8, 6): ("NVIDIA GeForce RTX 3090", "FP8"),
    (8, 7): ("Orin", "FP8"),
    (8, 9): ("NVIDIA GeForce RTX 4090", "Ada"),
    (9, 0): ("NVIDIA H200", "Hopper"),
    (10, 0): ("NVIDIA B200", "data-centre Blackwell"),
    (10, 3): ("NVIDIA B300 SXM6 AC", "data-centre Blackwell"),
    (11, 0): ("NVIDIA Thor", "not one that"),
    (12, 0): ("NVIDIA GeForce RTX 5090", "RTX Blackwell"),
    (12, 1): ("NVIDIA GB10", "RTX Blackwell"),
    (13, 0): ("NVIDIA GeForce RTX 6090", "newer than"),
    (6, 1): ("NVIDIA GeForce GTX 1080", "older than"),
}


def _fake(monkeypatch, cards: list[tuple[str, tuple[int, int] | None]], hip: str | None = None) -> None:
    """torch as it answers on a machine with these cards (name, compute capability), in this order."""

    def index(device) -> int:
        return torch.device(device).index or 0

    monkeypatch.setattr(chain, "_known", {})  # what was found out about the real cards stays out of it
    monkeypatch.setattr(attend, "PREBUILT", Path("no kernels here"))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: cards[index(device)][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: cards[index(device)][1])


@pytest.mark.parametrize("plan", [FAST, FOUR_BIT], ids=["8-bit", "4-bit"])
@pytest.mark.parametrize("capability", CARDS, ids=lambda c: f"{c[0]}.{c[1]}")
def test_each_capability(monkeypatch, capability, plan):
    name, word = CARDS[capability]
    _fake(monkeypatch, [(name, capability)])
    verdict = supports("cuda:0", plan)
    if verdict:
        assert verdict.backend in ("cubin", "cute")
        return
    assert name in verdict.text
    assert "ComfyUI's own attention runs" in verdict.text
    # the only compute capability that may be mentioned is the card's own: no table row of another card
    assert re.findall(r"\b\d{1,2}\.\d\b", verdict.text) == [f"{capability[0]}.{capability[1]}"]
    assert word in verdict.text


def test_an_rtx_5090_is_not_told_to_be_an_ada_card(monkeypatch):
    _fake(monkeypatch, [("NVIDIA GeForce RTX 5090", (12, 0))])
    verdict = supports("cuda", FAST)
    if not verdict:
        assert "8.9" not in verdict.text and "Ada" not in verdict.text


def test_two_different_cards_get_their_own_text(monkeypatch):
    _fake(monkeypatch, [("NVIDIA GeForce RTX 3090", (8, 6)), ("Tesla V100-SXM2-32GB", (7, 0))])
    first, second = supports("cuda:0", FAST), supports("cuda:1", FAST)
    assert "RTX 3090" in first.text and "V100" not in first.text
    assert "V100" in second.text and "RTX 3090" not in second.text


def test_amd(monkeypatch):
    _fake(monkeypatch, [("AMD Radeon RX 7900 XTX", None)], hip="6.4")
    verdict = supports("cuda:0", FAST)
    assert not verdict
    assert "AMD Radeon RX 7900 XTX" in verdict.text and "NVIDIA" in verdict.text
    assert "ComfyUI's own attention runs" in verdict.text and "compute capability" not in verdict.text


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_no_nvidia_gpu(device):
    verdict = supports(device, FAST)
    assert not verdict
    assert "ComfyUI's own attention runs" in verdict.text and "NVIDIA" in verdict.text
    assert supports(device, EXACT, backend="spec").backend == "spec"


def test_unsupported_head_dim_and_dtype_are_named():
    assert "96" in supports("cpu", FAST, head_dim=96, backend="spec").text
    assert "float64" in supports("cpu", FAST, dtype=torch.float64, backend="spec").text
