"""From files to kernels: places, checks, the next candidate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chain_cases import point, truncated
from stub_driver import NAMES, kernel_entry, stub_cubin, write_kernels
from vc_attention.kernels import Reason
from vc_attention.kernels.launch import chain, compile, locate, probe, verdicts
from vc_attention.kernels.launch.chain import Chosen
from vc_attention.kernels.launch.locate import Candidate, candidates
from vc_attention.kernels.spec.attention import attention as spec

ROOT = Path(__file__).resolve().parents[2]


def nothing(package: str) -> None:
    return None


# -- places -----------------------------------------------------------------------------------------------------------


def test_places_are_tried_in_order(tmp_path):
    root, package = tmp_path / "prebuilt", tmp_path / "site"
    assert candidates("sm_90a", root, nothing) == []
    wheel = write_kernels(point(root))
    (package / "sm_90a").mkdir(parents=True)
    by_hand = write_kernels(root / "sm_90a")
    found = candidates("sm_90a", root, {"vc_attention_kernels_hopper": package}.get)
    assert [c.folder for c in found] == [by_hand, wheel, package / "sm_90a"]
    assert "by hand" in found[0].what and "hopper.whl" in found[1].what and "Python package" in found[2].what
    assert {c.backend for c in found} == {"cubin"}
    assert candidates("sm_100a", root, {"vc_attention_kernels_hopper": package}.get) == []


def test_a_wheel_without_this_architecture_is_passed_over(tmp_path):
    package = tmp_path / "site"
    (package / "sm_100a").mkdir(parents=True)
    find = {"vc_attention_kernels_blackwell_datacenter": package}.get
    assert candidates("sm_103a", tmp_path, find) == []
    assert len(candidates("sm_100a", tmp_path, find)) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"schema": 1}', "cannot be read"),
        ('{"schema": 1, "wheel": "w", "folder": 5}', "cannot be read"),
        ('{"schema": 2, "wheel": "w", "folder": "hopper/0123456789ab"}', "another version"),
        ('{"schema": 1, "wheel": "w", "folder": "hopper/gone"}', "holds no kernels of sm_90a"),
        ('{"schema": 1, "wheel": "w", "folder": "../outside"}', "holds no kernels of sm_90a"),
    ],
)
def test_a_pointer_that_is_no_use_is_a_reason(tmp_path, text, words):
    root = tmp_path / "prebuilt"
    write_kernels(point(root))
    write_kernels(tmp_path / "outside" / "sm_90a")
    (root / "hopper.json").write_text(text, encoding="utf-8")
    ((what, reason),) = candidates("sm_90a", root, nothing)
    assert words in reason.text and "install.py" in reason.text and "hopper.json" in reason.text and "wheel" in what


def test_an_installed_package_is_found_and_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "vc_attention_kernels_hopper"
    write_kernels(package / "sm_90a")
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = candidates("sm_90a", tmp_path / "prebuilt")
    assert found == Candidate("the Python package vc_attention_kernels_hopper", package / "sm_90a")
    assert package.name not in sys.modules
    monkeypatch.setitem(sys.modules, package.name, type(sys)(package.name))  # has no __spec__
    assert locate.package_folder(package.name) is None


# -- the chain --------------------------------------------------------------------------------------------------------


def test_the_first_that_passes_serves(card):
    first, _ = card.two()
    chosen = card.choose()
    assert isinstance(chosen, Chosen) and chosen.backend == "cubin" and chosen.skipped == ()
    assert chosen.kernels.manifest.folder == first and card.tested == [first]
    assert len(card.stub.loaded) == len(NAMES)
    assert card.choose() is chosen and card.choose("cubin").kernels is chosen.kernels


def rewrite(folder: Path, **changes) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**data, **changes}))


def another_abi(folder: Path) -> None:
    rewrite(folder, abi=999)


def another_arch(folder: Path) -> None:
    write_kernels(folder, arch="sm_120a")


def cubin_of_another_arch(folder: Path) -> None:
    data = stub_cubin(f"kernel_{NAMES[1]}", "sm_120a")
    (folder / f"{NAMES[1]}.cubin").write_bytes(data)
    entries = json.loads((folder / "manifest.json").read_text())["kernels"]
    rewrite(folder, kernels=[kernel_entry(NAMES[1], data) if e["name"] == NAMES[1] else e for e in entries])


def of_another_build(folder: Path) -> None:
    (folder / f"{NAMES[0]}.cubin").write_bytes(stub_cubin(f"kernel_{NAMES[0]}") + b" rebuilt")


def gone(folder: Path) -> None:
    (folder / f"{NAMES[0]}.cubin").unlink()


def without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def other_parameters(folder: Path) -> None:
    entries = json.loads((folder / "manifest.json").read_text())["kernels"]
    rewrite(folder, kernels=[{**e, "params": [[0, 8], [8, 8], [16, 4]]} for e in entries])


def no_attention(folder: Path) -> None:
    write_kernels(folder, names=NAMES[2:])


DAMAGE = {
    another_abi: ("kernels_version", "another version"),
    another_arch: ("capability", "compute capability 12.0"),
    cubin_of_another_arch: ("driver_error", "NO_BINARY_FOR_GPU"),
    truncated: ("kernels_damaged", "hash differs"),
    of_another_build: ("kernels_damaged", "hash differs"),
    gone: ("kernels_damaged", "cannot be read"),
    without_manifest: ("kernels_damaged", "no manifest.json"),
    other_parameters: ("kernels_abi", "parameters of"),
    no_attention: ("kernels_damaged", "no attention kernel"),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
def test_what_is_refused_has_its_reason_and_the_next_is_used(card, damage):
    first, second = card.two()
    damage(first)
    chosen = card.choose()
    assert chosen.kernels.manifest.folder == second and card.tested == [second]
    code, words = DAMAGE[damage]
    (reason,) = chosen.skipped
    assert reason.code == code and words in reason.text
    bad, good = card.attempts()[:2]
    assert bad.reason == reason and bad.kernels is None and "by hand" in bad.what
    assert good.reason is None and good.kernels is chosen.kernels and "passed" in good.tested


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
def test_alone_it_leaves_a_reason(card, damage):
    first, _ = card.two()
    (card.prebuilt / "hopper.json").unlink()
    damage(first)
    refused = card.choose()
    assert isinstance(refused, Reason) and refused.code == DAMAGE[damage][0]
    assert card.choose() is refused
    assert card.tested == []


def test_a_failed_self_test_leads_to_the_next(card):
    first, second = card.two()
    card.faults[first] = lambda *arguments: spec(*arguments) * 1.1
    chosen = card.choose()
    assert chosen.kernels.manifest.folder == second and card.tested == [first, second]
    assert chosen.skipped[0].code == "self_test" and "away from the mean of V" in chosen.skipped[0].text
    assert "failed" in card.attempts()[0].tested


def test_kernels_whose_probe_fails_are_refused_before_attention_runs(card, monkeypatch):
    first, second = card.two()
    asked = []

    def says(kernels, device):
        asked.append(kernels.manifest.folder)
        return "the scale selector of operand A differs on this card." if kernels.manifest.folder == first else None

    monkeypatch.setattr(probe, "problem", says)
    chosen = card.choose()
    assert chosen.kernels.manifest.folder == second and asked == [first, second] and card.tested == [second]
    assert chosen.skipped[0].code == "self_test" and "scale selector of operand A" in chosen.skipped[0].text


def test_the_same_build_in_two_places_has_one_verdict(card):
    first, _ = card.two()
    second = write_kernels(point(card.prebuilt))
    card.faults[first] = lambda *arguments: spec(*arguments) * 1.1
    assert card.choose().code == "self_test" and card.tested == [first]
    assert card.attempts()[1].reason.code == "self_test" and second != first


def test_an_exception_in_the_self_test_is_a_failed_one(card):
    first, _ = card.two()

    def broken(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    card.faults[first] = broken
    chosen = card.choose()
    assert "illegal memory access" in chosen.skipped[0].text and "more lines" not in chosen.skipped[0].text


def test_no_room_for_the_self_test_is_no_verdict(card):
    first, _ = card.two()
    verdicts.set_folder(card.prebuilt.parent / "user")

    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    card.faults[first] = full
    assert card.choose().code == "memory" and card.tested == [first]
    assert not list((card.prebuilt.parent / "user").rglob("*.json"))
    card.faults.clear()
    assert isinstance(card.choose(), Chosen)


def test_nothing_is_tested_inside_a_graph_or_a_trace(card, monkeypatch):
    card.two()
    with monkeypatch.context() as inside:
        inside.setattr(torch.cuda, "is_initialized", lambda: True)
        inside.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert card.choose().code == "untested"
    with monkeypatch.context() as inside:
        inside.setattr(torch.compiler, "is_compiling", lambda: True)
        assert card.choose().code == "untested"
    assert card.tested == [] and card.stub.loaded == {}
    chosen = card.choose()
    assert isinstance(chosen, Chosen)
    with monkeypatch.context() as inside:
        inside.setattr(torch.cuda, "is_initialized", lambda: True)
        inside.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert card.choose() is chosen


def test_importing_the_library_loads_and_tests_nothing():
    code = """
import sys; sys.path.insert(0, 'tools'); import pack; pack.load_pack()
from vc_attention import kernels
from vc_attention.kernels.launch import chain, driver, verdicts
assert chain._known == {} and verdicts.folder() is None and driver.driver.cache_info().currsize == 0
assert 'cutlass' not in sys.modules and not [name for name in sys.modules if 'compile_process' in name]
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_another_folder_of_kernels_is_looked_at_anew(card, monkeypatch, tmp_path):
    card.two()
    before = card.choose()
    monkeypatch.setattr(chain.attend, "PREBUILT", tmp_path / "elsewhere")
    assert card.choose().code == "no_kernels"
    other = write_kernels(tmp_path / "elsewhere" / "sm_90a")
    chain.forget()
    assert card.choose().kernels.manifest.folder == other != before.kernels.manifest.folder


def test_compiled_kernels_come_last(card, monkeypatch, tmp_path):
    made = write_kernels(tmp_path / "compiled")
    asked = []

    def compile_kernels(arch, progress=None):
        asked.append((arch, progress))
        return made

    monkeypatch.setattr(compile, "compiled", lambda arch: None)
    monkeypatch.setattr(compile, "compile_kernels", compile_kernels)
    assert card.choose(may_compile=False).code == "not_compiled" and asked == []
    chosen = card.choose(progress=print)
    assert chosen.backend == "cute" and chosen.kernels.manifest.folder == made and asked == [("sm_90a", print)]
    assert card.choose(may_compile=False) is chosen
    chain.forget()
    first, _ = card.two()
    assert card.choose().kernels.manifest.folder == first and len(asked) == 1
    assert card.choose("cute").backend == "cute" and len(asked) == 2


def test_a_failed_compilation_is_the_reason_where_nothing_else_was_there(card, monkeypatch):
    monkeypatch.setattr(compile, "compiled", lambda arch: None)
    failed = Reason("compile_failed", "The kernel compiler failed: it has a headache")
    monkeypatch.setattr(compile, "compile_kernels", lambda arch, progress=None: failed)
    assert card.choose() is failed
    assert [a.reason for a in card.attempts()] == [failed]
    chain.forget()
    first, _ = card.two()
    (card.prebuilt / "hopper.json").unlink()
    another_abi(first)
    assert card.choose().code == "kernels_version"
