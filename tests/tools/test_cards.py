"""Faked cards: what `doctor` and `install.py` say about machines that nobody here owns."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import small_wheels
from fake_cards import B200, B300, H200, MACHINES, OTHERS, RTX_4090, RTX_5090, FakeDriver, look
from installing import Pack
from snapshots import check
from vc_attention.kernels import cards, detect, families
from vc_attention.kernels.install import command
from vc_attention.tools import doctor

SNAPSHOTS = Path(__file__).parent / "snapshots"
ROOT = Path(__file__).resolve().parents[2]
NO_VENV = {"name": ".venv", "ready": False, "problem": "it does not exist"}
REPOSITORY = "https://example.org/owner/pack"


def wheel(version: str = "0.1.0") -> bytes:
    """A wheel for Hopper whose hash and size are in snapshots."""
    return small_wheels.zipped(small_wheels.files_of("hopper", version), zipfile.ZIP_STORED)


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """A pack whose release has a wheel for Hopper and for no other family yet: what is said must not change when the
    real one releases more.
    """
    pack = Pack(tmp_path / "pack", REPOSITORY)
    pack.pin({"hopper": wheel()})
    return pack


def doctor_text(pack: Pack, machine: str, monkeypatch: pytest.MonkeyPatch, torch: dict | None = None) -> str:
    """The report of `doctor` on a faked machine, with everything that differs between real ones fixed."""
    monkeypatch.setattr(doctor, "_interpreter", lambda found, python: (None, NO_VENV))
    monkeypatch.setattr(doctor, "_torch", lambda *arguments: torch)
    findings = doctor.examine(None, None, *look(detect, machine), kernels=pack.folder / "kernels")
    findings["machine"] = {"system": "Linux 6.1", "processor": "x86_64, 16 cores", "python": "3.11.7"}
    findings["machine"]["disk_free"] = 5e10
    findings["pack"] = {"version": "0.1.0", "folder": "<pack>"}
    findings["comfyui"]["ready"] = True
    findings["missing"] = doctor.missing(findings)
    return doctor.text_of(findings)


def install_line(
    pack: Pack, machine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """The line of install.py on a faked machine."""
    driver, others = look(detect, machine)
    with monkeypatch.context() as patch:
        patch.setattr(detect, "nvidia", lambda: driver)
        patch.setattr(detect, "other_cards", lambda: others)
        capsys.readouterr()
        command.main(pack.folder, arguments)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    return line.rstrip("\n").replace(str(pack.folder), "<pack>")


@pytest.mark.parametrize("machine", MACHINES)
def test_doctor_says_what_runs_and_why(machine: str, pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    text = doctor_text(pack, machine, monkeypatch)
    check(SNAPSHOTS / f"doctor-{machine}.txt", text)
    for card in MACHINES[machine]:
        assert card.name in text
        assert f"compute capability {card.capability[0]}.{card.capability[1]}" in text
    if machine in OTHERS:
        assert OTHERS[machine][0] in text
    assert "ComfyUI's own attention runs" in text


@pytest.mark.parametrize("machine", MACHINES)
def test_install_says_what_it_would_do_and_why(machine: str, pack: Pack, monkeypatch, capsys) -> None:
    line = install_line(pack, machine, monkeypatch, capsys, "--dry-run")
    check(SNAPSHOTS / f"install-{machine}.txt", line)
    sentences = line.removeprefix("VC-Attention (dry run): ").split(" | ")
    report = doctor_text(pack, machine, monkeypatch)
    for card in MACHINES[machine]:
        (sentence,) = (text for text in sentences if text.startswith(card.name))
        if card.capability == (9, 0):
            assert f"from {REPOSITORY}/releases/download/v0.1.0/vc_attention_kernels_hopper-0.1.0" in sentence
        else:
            assert "ComfyUI's own attention runs" in sentence and sentence in report  # both say the same
    if not MACHINES[machine]:
        assert sentences[0] in report
    assert not pack.prebuilt.exists()


@pytest.mark.parametrize("state", ["installed", "damaged", "pointer", "by-hand", "old-driver", "failed", "kept"])
def test_the_kernels_that_are_here(state: str, pack: Pack, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """What both say about a machine with an H200 whose kernels are in this state."""
    wheels, name = pack.folder / "wheels", "vc_attention_kernels_hopper-0.1.0-py3-none-any.whl"
    pack.repository("http://127.0.0.1:9/pack")  # nobody answers there
    monkeypatch.setattr("vc_attention.kernels.install.download.PAUSES", ())
    if state != "failed":
        wheels.mkdir()
        (wheels / name).write_bytes(wheel())
        install_line(pack, "9.0", monkeypatch, capsys)
        (wheels / name).unlink()
    if state == "damaged":
        next(pack.prebuilt.glob("hopper/*/sm_90a/kernel_2.cubin")).write_bytes(b"x")
    elif state == "pointer":
        (pack.prebuilt / "hopper.json").write_text("{")
    elif state == "by-hand":
        (folder,) = pack.prebuilt.glob("hopper/*/sm_90a")
        folder.rename(pack.prebuilt / "sm_90a")
        command.store.remove(pack.prebuilt)
        (wheels / name).write_bytes(wheel())
    elif state == "kept":
        pack.pin({"hopper": wheel("0.2.0")}, "0.2.0")
    elif state == "old-driver":
        monkeypatch.setattr(FakeDriver.__init__, "__defaults__", (12020, 0))
    line = install_line(pack, "9.0", monkeypatch, capsys, *(["--dry-run"] if state == "by-hand" else []))
    if state in ("damaged", "pointer", "failed"):
        assert "cannot be reached" in line  # as a second run leaves it
    check(SNAPSHOTS / f"kernels-{state}.txt", f"{line}\n\n{doctor_text(pack, '9.0', monkeypatch)}")


def test_an_installed_family_runs_on_its_cards_only() -> None:
    archs = {"sm_90a"}
    hopper = cards.describe(H200.name, H200.capability, available=archs, installed=archs)
    assert hopper.runs and hopper.code == "ok" and "own attention" not in hopper.text
    missing = cards.describe(H200.name, H200.capability, available=archs)
    assert not missing.runs and missing.code == "not_installed" and "install.py" in missing.text
    rtx = cards.describe(RTX_5090.name, RTX_5090.capability, available=archs, installed=archs)
    assert not rtx.runs and rtx.code == "not_released"


def test_kernels_that_no_such_card_has_run_say_so() -> None:
    """Ada and both Blackwells: what was checked, what was not, what guards a card and how to send a result, whatever is
    installed."""
    for card, arch in ((RTX_5090, "sm_120a"), (RTX_4090, "sm_89"), (B200, "sm_100a"), (B300, "sm_103a")):
        for installed in ((), (arch,)):
            verdict = cards.describe(card.name, card.capability, available=(arch,), installed=installed)
            assert verdict.runs == bool(installed)
            assert "not yet on a card like this one" in verdict.text and "self-test" in verdict.text
            assert "doctor --report" in verdict.text and "nothing personal" in verdict.text
    hopper = cards.describe(H200.name, H200.capability, installed=("sm_90a",))
    assert "not yet" not in hopper.text


@pytest.mark.parametrize("machine", ["10.0", "10.3"])
def test_b200_and_b300_get_the_wheel_of_their_family(machine: str, pack: Pack, monkeypatch, capsys) -> None:
    """Of two pinned wheels the one with this card's kernels is unpacked, and both tools say that no such card has run
    them yet.
    """
    family, (card,) = "blackwell-datacenter", MACHINES[machine]
    data = {"hopper": wheel(), family: small_wheels.wheel(family)}
    pack.pin(data)
    (pack.folder / "wheels").mkdir()
    for name, content in data.items():
        (pack.folder / "wheels" / families.wheel_name(name, "0.1.0")).write_bytes(content)
    assert f"vc_attention_kernels_blackwell_datacenter-{small_wheels.VERSION}-py3-none-any.whl" in {
        path.name for path in (pack.folder / "wheels").iterdir()
    }
    assert "not installed here" in doctor_text(pack, machine, monkeypatch)
    line = install_line(pack, machine, monkeypatch, capsys)
    assert f"{card.name} (compute capability {machine}): the 8-bit kernels for data-centre Blackwell" in line
    assert "are installed now" in line
    small_wheels.check_build(pack.prebuilt, family, data[family])
    assert {path.name for path in pack.prebuilt.glob("*.json")} == {f"{family}.json"}
    text = doctor_text(pack, machine, monkeypatch)
    assert "run on it." in text and "not yet on a card like this one" in text


def test_the_released_architectures_are_those_that_are_pinned(pack: Pack, tmp_path: Path) -> None:
    assert cards.released(pack.folder / "kernels" / "wheels.json") == {"sm_90a"}
    for number, text in enumerate(("", "{}", "[]", '{"wheels": 3}', '{"wheels": [{}]}', '{"wheels": [3]}')):
        (tmp_path / f"{number}.json").write_text(text)
        assert cards.released(tmp_path / f"{number}.json") == frozenset()
    assert cards.released(tmp_path / "missing.json") == frozenset()


def test_every_family_with_a_wheel_is_one_of_cards() -> None:
    known = {family.key: family for family in cards.FAMILIES}
    for key, archs in families.FAMILIES.items():
        assert known[key].modes
        assert {families.arch_of(capability) for capability in known[key].capabilities} == set(archs)


def test_every_capability_belongs_to_one_family() -> None:
    capabilities = [capability for family in cards.FAMILIES for capability in family.capabilities]
    assert len(capabilities) == len(set(capabilities))
    assert all(bool(family.modes) != bool(family.why_not) for family in cards.FAMILIES)


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


def test_doctor_names_what_is_missing_beside_a_card(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = {"torch": "2.13.0+cpu", "cuda_build": None, "devices": [], "backends": []}
    text = doctor_text(pack, "9.0", monkeypatch, torch)
    assert "does not see the NVIDIA card: it is a build for the CPU" in text
    old = FakeDriver((H200,), version=12020)
    findings = doctor.examine(None, None, detect.nvidia(lambda name: old), ())
    assert any("serves CUDA 12.2" in entry["what"] for entry in findings["missing"])
