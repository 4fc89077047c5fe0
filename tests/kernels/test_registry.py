"""Which backend serves a call, with the prebuilt kernels there, missing, or refused."""

from __future__ import annotations

import pytest
import torch
from vc_attention.kernels import FAST, FOUR_BIT, Ok, Reason, registry, supports
from vc_attention.kernels.launch import call


@pytest.fixture
def hopper(monkeypatch):
    """torch as it answers on a machine with one H200."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (9, 0))


def found(monkeypatch, result):
    monkeypatch.setattr(call.attend, "library", lambda device: result)


def test_prebuilt_kernels_serve_what_they_compute(hopper, monkeypatch):
    found(monkeypatch, object())
    assert supports("cuda", FAST) == Ok("cubin")
    refusal = supports("cuda", FOUR_BIT)
    assert isinstance(refusal, Reason) and refusal.code == "no_kernel" and "plan" in refusal.text
    assert supports("cuda", FAST, head_dim=64).code == "head_dim"
    assert supports("cuda", FAST, dtype=torch.float32).code == "no_kernel"


def test_kernels_that_are_not_there_leave_the_card_tables_sentence(hopper, monkeypatch):
    found(monkeypatch, Reason("no_kernels", "none installed"))
    refusal = supports("cuda", FAST)
    assert refusal.code == "no_kernel" and "NVIDIA H200" in refusal.text and "none installed" not in refusal.text


def test_kernels_that_are_damaged_are_named(hopper, monkeypatch):
    found(monkeypatch, Reason("kernels_damaged", "the file is cut off"))
    assert supports("cuda", FAST) == Reason("no_kernel", "the file is cut off")
    assert registry.backends()[0].reason == "the file is cut off" and not registry.backends()[0].available


def test_the_specification_is_never_chosen_by_itself():
    assert supports("cpu", FAST).code == "no_kernel"
    assert supports("cpu", FAST, backend="spec") == Ok("spec")
    assert supports("cpu", FAST, backend="nonsense").code == "backend"
