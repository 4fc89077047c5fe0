"""Faked cards: what `doctor` and `install.py` say about machines that nobody here owns."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from fake_cards import H200, MACHINES, OTHERS, RTX_5090, FakeDriver, look
from snapshots import check
from vc_attention.kernels import cards, detect
from vc_attention.tools import doctor

SNAPSHOTS = Path(__file__).parent / "snapshots"
ROOT = Path(__file__).resolve().parents[2]
NO_VENV = {"name": ".venv", "ready": False, "problem": "it does not exist"}


def doctor_text(machine: str, monkeypatch: pytest.MonkeyPatch, torch: dict | None = None) -> str:
    """The report of `doctor` on a faked machine, with everything that differs between real ones fixed."""
    monkeypatch.setattr(doctor, "_interpreter", lambda found, python: (None, NO_VENV))
    monkeypatch.setattr(doctor, "_torch", lambda *arguments: torch)
    findings = doctor.examine(None, None, *look(detect, machine))
    findings["machine"] = {"system": "Linux 6.1", "processor": "x86_64, 16 cores", "python": "3.11.7"}
    findings["machine"]["disk_free"] = 5e10
    findings["pack"] = {"version": "0.1.0", "folder": "<pack>"}
    findings["comfyui"]["ready"] = True
    findings["missing"] = doctor.missing(findings)
    return doctor.text_of(findings)


@pytest.mark.parametrize("machine", MACHINES)
def test_doctor_says_what_runs_and_why(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = doctor_text(machine, monkeypatch)
    check(SNAPSHOTS / f"doctor-{machine}.txt", text)
    for card in MACHINES[machine]:
        assert card.name in text
        assert f"compute capability {card.capability[0]}.{card.capability[1]}" in text
    if machine in OTHERS:
        assert OTHERS[machine][0] in text
    assert "ComfyUI's own attention runs" in text


@pytest.fixture
def installer():
    """install.py as a module."""
    spec = importlib.util.spec_from_file_location("vc_attention_install_under_test", ROOT / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop(spec.name, None)


@pytest.mark.parametrize("machine", MACHINES)
def test_install_says_the_same(machine: str, installer, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    load = installer.load

    def faked(name: str):
        module = load(name)
        if name == "detect":
            monkeypatch.setattr(module, "cards_here", lambda: detect.cards_here(*look(detect, machine)))
        return module

    monkeypatch.setattr(installer, "load", faked)
    assert installer.main(["--dry-run"]) == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    check(SNAPSHOTS / f"install-{machine}.txt", line.rstrip("\n"))
    report = doctor_text(machine, monkeypatch)
    for sentence in line.partition("): ")[2].strip().split(" | "):
        assert sentence in report


def test_a_released_family_runs_on_its_cards_only() -> None:
    hopper = cards.describe(H200.name, H200.capability, released={"hopper"})
    assert hopper.runs and hopper.code == "ok" and "own attention" not in hopper.text
    rtx = cards.describe(RTX_5090.name, RTX_5090.capability, released={"hopper"})
    assert not rtx.runs and rtx.code == "not_released"


def test_every_capability_belongs_to_one_family() -> None:
    capabilities = [capability for family in cards.FAMILIES for capability in family.capabilities]
    assert len(capabilities) == len(set(capabilities))
    assert all(bool(family.modes) != bool(family.why_not) for family in cards.FAMILIES)
    known = {family.key for family in cards.FAMILIES}
    assert known >= cards.RELEASED


def test_a_card_older_than_the_table() -> None:
    verdict = cards.describe("NVIDIA GeForce GTX 1080", (6, 1))
    assert verdict.code == "card_unknown" and "older" in verdict.text and "GTX 1080" in verdict.text


def test_the_driver_is_asked_for_names_memory_and_version() -> None:
    driver = detect.nvidia(lambda name: FakeDriver((H200, RTX_5090), version=12090))
    assert driver.cuda == (12, 9) and driver.problem == ""
    assert [(card.name, card.capability, card.memory) for card in driver.cards] == [tuple(H200), tuple(RTX_5090)]


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (FakeDriver((), status=100), "shows no card"),
        (FakeDriver((), status=0), "shows no card"),
        (FakeDriver((H200,), status=999), "error 999"),
        (object(), "does not answer as expected"),
    ],
)
def test_a_driver_without_a_usable_card_is_a_sentence(fake: object, words: str) -> None:
    driver = detect.nvidia(lambda name: fake)
    assert driver.cards == () and words in driver.problem


def test_windows_asks_for_the_windows_library() -> None:
    asked = []

    def load(name: str):
        asked.append(name)
        return FakeDriver((RTX_5090,))

    assert detect.nvidia(load, "win32").cards[0].name == RTX_5090.name
    assert asked == ["nvcuda.dll"]


def test_amd_and_intel_cards_are_found_by_their_pci_vendor(tmp_path: Path) -> None:
    devices = (("card0", "0x8086", None), ("card1", "0x1002", "Radeon RX 9070"), ("card2", "0x10de", None))
    for name, vendor, product in devices:
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "device" / "vendor").write_text(vendor + "\n")
        if product:
            (tmp_path / name / "device" / "product_name").write_text(product + "\n")
    (tmp_path / "card1-DP-1" / "device").mkdir(parents=True)
    (tmp_path / "card1-DP-1" / "device" / "vendor").write_text("0x1002\n")
    found = detect.other_cards("linux", devices=tmp_path)
    assert [(card.name, card.vendor) for card in found] == [("an Intel GPU", "intel"), ("Radeon RX 9070", "amd")]
    assert [card.vendor for card in detect.other_cards("darwin", "arm64")] == ["apple"]
    assert detect.other_cards("darwin", "x86_64") == ()


def test_doctor_names_what_is_missing_beside_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = {"torch": "2.13.0+cpu", "cuda_build": None, "devices": [], "backends": []}
    text = doctor_text("9.0", monkeypatch, torch)
    assert "does not see the NVIDIA card: it is a build for the CPU" in text
    old = FakeDriver((H200,), version=12020)
    monkeypatch.setattr(doctor, "kernel_module", lambda name: {"detect": detect, "cards": cards}[name])
    findings = doctor.examine(None, None, detect.nvidia(lambda name: old), ())
    assert any("serves CUDA 12.2" in entry["what"] for entry in findings["missing"])


def test_a_report_carries_no_personal_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "jane"
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr(doctor.getpass, "getuser", lambda: "jane")
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "janes-pc")
    text = f"{ROOT} {home}/x janes-pc by jane, not janet; " + doctor.json.dumps("C:\\Users\\jane\\x")
    clean = doctor.anonymous(text)
    assert clean.startswith("<pack> <home>/x <host> by <user>, not janet; ")
    assert "jane\\" not in clean
