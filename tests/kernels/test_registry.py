"""Which backend serves a call, with kernels there, missing, or refused."""

from __future__ import annotations

import pytest
import torch
from stub_driver import NAMES, machine, write_kernels
from vc_attention.kernels import FAITHFUL, FAST, FOUR_BIT, Ok, Reason, registry, supports
from vc_attention.kernels.launch import call, chain, compile
from vc_attention.kernels.spec.attention import attention as spec


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A machine with one Hopper card, and its folder of prebuilt kernels; no compiler."""
    machine(monkeypatch, tmp_path / "prebuilt")
    monkeypatch.setattr(compile, "compiler", lambda: Reason("no_compiler", "There is no compiler."))
    monkeypatch.setattr(call, "attention_on", lambda kernels, *arguments: spec(*arguments))
    return tmp_path / "prebuilt"


def test_prebuilt_kernels_serve_what_they_compute(hopper):
    write_kernels(hopper / "sm_90a")
    assert supports("cuda", FAST) == Ok("cubin")
    assert supports("cuda:0", FAST, backend="cubin") == Ok("cubin")
    refusal = supports("cuda", FOUR_BIT)
    assert isinstance(refusal, Reason) and refusal.code == "no_kernel" and "plan" in refusal.text
    assert refusal.text.endswith("ComfyUI's own attention runs.")
    assert supports("cuda", FAST, head_dim=64).code == "head_dim"
    assert supports("cuda", FAST, dtype=torch.float32).code == "no_kernel"


def test_a_folder_that_was_built_in_part_serves_its_part(hopper):
    write_kernels(hopper / "sm_90a", names=NAMES[:1])
    assert supports("cuda", FAST) == Ok("cubin")
    refusal = supports("cuda", FAITHFUL)
    assert refusal.code == "no_kernel" and "built in part" in refusal.text


def test_kernels_that_are_not_there_leave_the_card_tables_sentence(hopper):
    refusal = supports("cuda", FAST)
    assert refusal.code == "no_kernel" and "NVIDIA H200" in refusal.text and "install.py" in refusal.text
    named = supports("cuda", FAST, backend="cubin")
    assert "No kernels for this card are installed." in named.text and "NVIDIA H200" in named.text
    assert "There is no compiler." in supports("cuda", FAST, backend="cute").text


def test_kernels_that_are_damaged_are_named(hopper):
    write_kernels(hopper / "sm_90a")
    (hopper / "sm_90a" / f"{NAMES[2]}.cubin").write_bytes(b"STUB")
    refusal = supports("cuda", FAST)
    assert refusal.code == "no_kernel" and f"{NAMES[2]}.cubin" in refusal.text
    row = registry.backends()[0]
    assert row.name == "cubin" and not row.available and f"{NAMES[2]}.cubin" in row.reason


def test_the_better_choice_that_was_refused_is_a_note(hopper, monkeypatch, tmp_path):
    write_kernels(hopper / "sm_90a", abi=999)
    monkeypatch.setattr(compile, "compiled", lambda arch: write_kernels(tmp_path / "compiled"))
    verdict = supports("cuda", FAST)
    assert verdict.backend == "cute" and "another version of VC-Attention" in verdict.note
    assert supports("cuda", FAST, backend="cubin").code == "no_kernel"
    assert supports("cuda", FAST, backend="cute") == Ok("cute")


def test_rows_of_backends_before_and_after_the_first_use(hopper):
    assert [(row.name, row.available) for row in registry.backends()] == [
        ("cubin", False),
        ("cute", False),
        ("spec", True),
    ]
    write_kernels(hopper / "sm_90a")
    row = registry.backends()[0]
    assert row.available and "3 kernels" in row.reason and "has not run yet" in row.reason
    supports("cuda", FAST)
    row = registry.backends()[0]
    assert row.available and "self-test passed" in row.reason and str(hopper) in row.reason


def test_backends_can_test_now(hopper, monkeypatch):
    write_kernels(hopper / "sm_90a")
    assert "passed" in registry.backends(self_test=True)[0].reason
    monkeypatch.setattr(call, "attention_on", lambda kernels, *arguments: spec(*arguments) * 1.5)
    row = registry.backends("cuda:0", self_test=True)[0]
    assert not row.available and "away from the mean of V" in row.reason


def test_listing_never_loads_tests_or_compiles(hopper, monkeypatch):
    write_kernels(hopper / "sm_90a")
    monkeypatch.setattr(chain.Library, "load_all", lambda self: pytest.fail("loaded"))
    monkeypatch.setattr(compile, "compile_kernels", lambda *a, **k: pytest.fail("compiled"))
    registry.backends()


def test_the_specification_is_never_chosen_by_itself():
    assert supports("cpu", FAST).code == "no_kernel"
    assert supports("cpu", FAST, backend="spec") == Ok("spec")
    assert supports("cpu", FAST, backend="nonsense").code == "backend"
    for name in ("cubin", "cute"):
        assert "ComfyUI's own attention runs" in supports("cpu", FAST, backend=name).text


def test_a_machine_without_a_card_has_rows_too():
    if torch.cuda.is_available():
        pytest.skip("gpu: this machine has one")
    rows = registry.backends()
    assert [row.name for row in rows] == ["cubin", "cute", "spec"]
    assert "torch sees none" in rows[0].reason
