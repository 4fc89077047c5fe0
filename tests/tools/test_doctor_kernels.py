"""What `doctor` says about the kernels that are there: candidates, the self-test, and reasons."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fake_cards import H200, FakeDriver
from stub_driver import NAMES, StubDriver, machine, write_kernels
from vc_attention.kernels import Reason, detect, supports
from vc_attention.kernels.launch import call, compile, verdicts
from vc_attention.kernels.plan import FAST
from vc_attention.kernels.spec.attention import attention as spec
from vc_attention.tools import doctor, doctor_probe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hopper(monkeypatch, tmp_path) -> Path:
    """A faked Hopper machine; its folder of prebuilt kernels."""
    machine(monkeypatch, tmp_path / "prebuilt", StubDriver())
    monkeypatch.setattr(compile, "compiler", lambda: Reason("no_compiler", "There is no compiler here."))
    monkeypatch.setattr(call, "attention_on", lambda kernels, *arguments: spec(*arguments))
    return tmp_path / "prebuilt"


def report(monkeypatch, found: dict, prebuilt: Path) -> str:
    """What doctor says where torch found `found` and kernels lie in `prebuilt`."""
    monkeypatch.setattr(doctor, "_interpreter", lambda given, python: (None, {"name": ".venv", "ready": True}))
    monkeypatch.setattr(doctor, "_torch", lambda *arguments: found)
    shutil.copy(ROOT / "kernels" / "wheels.json", prebuilt.parent)
    driver = detect.nvidia(lambda name: FakeDriver((H200,)))
    return doctor.text_of(doctor.examine(None, None, driver, (), kernels=prebuilt.parent))


def test_nothing_there(hopper, monkeypatch):
    text = report(monkeypatch, doctor_probe.probe(), hopper)
    assert "No kernels for NVIDIA H200 are installed." in text and "There is no compiler here." in text
    assert "The kernels for NVIDIA H200 are not installed." in text and "ComfyUI's own attention runs" in text


def test_kernels_that_have_not_been_tested_yet(hopper, monkeypatch):
    write_kernels(hopper / "sm_90a")
    text = report(monkeypatch, doctor_probe.probe(), hopper)
    assert "3 kernels. The self-test has not run yet." in text and str(hopper / "sm_90a") in text
    assert "8-bit kernels for Hopper (H100, H200) run on it" in text and "No low-bit kernel runs" not in text


def test_what_comfyui_remembers_is_told_and_nothing_is_written(hopper, monkeypatch, tmp_path):
    write_kernels(hopper / "sm_90a")
    user = tmp_path / "ComfyUI" / "user"
    verdicts.set_folder(user / "vc_attention")
    supports("cuda", FAST)
    before = sorted(user.rglob("*"))
    assert any(path.suffix == ".json" for path in before)
    verdicts.forget()
    call.chain.forget()
    text = report(monkeypatch, doctor_probe.probe(user), hopper)
    assert "The self-test passed (remembered)." in text
    assert sorted(user.rglob("*")) == before


def test_a_test_now_overrules_what_is_remembered_and_leaves_nothing(hopper, monkeypatch, tmp_path):
    write_kernels(hopper / "sm_90a")
    user = tmp_path / "ComfyUI" / "user"
    monkeypatch.setattr(call, "attention_on", lambda kernels, *arguments: spec(*arguments) * 1.2)
    text = report(monkeypatch, doctor_probe.probe(user, self_test=True), hopper)
    assert "The self-test of the kernels on this card failed: fast in bfloat16: uniform attention" in text
    assert "its kernels are installed but refused" in text and "No low-bit kernel runs on this machine." in text
    assert not user.exists()


def test_damaged_kernels_are_named(hopper, monkeypatch):
    write_kernels(hopper / "sm_90a")
    (hopper / "sm_90a" / f"{NAMES[0]}.cubin").write_bytes(b"")
    assert "its hash differs" in report(monkeypatch, doctor_probe.probe(), hopper)


def test_the_probe_prints_one_object_with_its_options(hopper, capsys, tmp_path):
    write_kernels(hopper / "sm_90a")
    assert doctor_probe.main(["--self-test", "--user", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == ["NVIDIA H200"] and found["runs"] == ["NVIDIA H200"]
    assert "The self-test passed" in found["backends"][0]["reason"]


def test_two_kinds_of_cards_have_their_own_rows(hopper, monkeypatch):
    rows = [
        {"name": name, "available": False, "reason": reason, "card": card}
        for card, name, reason in (
            ("NVIDIA H200", "cubin", "one"),
            ("NVIDIA H200", "spec", "two"),
            ("NVIDIA GeForce RTX 3090", "cubin", "three"),
        )
    ]
    found = {"torch": "2.13", "cuda_build": "13.0", "devices": ["NVIDIA H200"], "backends": rows}
    lines = report(monkeypatch, found, hopper).splitlines()
    start = lines.index("  NVIDIA H200")
    assert lines[start + 3] == "  NVIDIA GeForce RTX 3090" and lines[start + 4].endswith("three")


def test_the_command_passes_the_wish_on(monkeypatch, tmp_path):
    asked = []

    def run_quietly(command):
        asked.append(command)
        return json.dumps({"error": "stop here"})

    monkeypatch.setattr(doctor.environment, "run_quietly", run_quietly)
    for wish in (False, True):
        doctor._torch(tmp_path / "python", tmp_path / "user", wish)
    assert "--self-test" not in asked[0] and asked[1][-1] == "--self-test"
    assert asked[0][asked[0].index("--user") + 1] == str(tmp_path / "user")
