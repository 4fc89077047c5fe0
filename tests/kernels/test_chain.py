"""From files to kernels: places, checks, the next candidate, and the self-test's verdict kept between processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from stub_driver import NAMES, kernel_entry, machine, stub_cubin, write_kernels
from vc_attention.kernels import Reason
from vc_attention.kernels.launch import chain, compile, locate, probe, selftest, verdicts
from vc_attention.kernels.launch.chain import Chosen
from vc_attention.kernels.launch.locate import Candidate, candidates
from vc_attention.kernels.spec.attention import attention as spec

ROOT = Path(__file__).resolve().parents[2]
CARD = torch.device("cuda", 0)


def point(root: Path, family: str = "hopper", **changes) -> Path:
    """A wheel as the installer unpacks it, with the pointer to it. Returns the folder of sm_90a's kernels."""
    data = {"schema": 1, "family": family, "folder": f"{family}/0123456789ab", "wheel": f"{family}.whl", "version": "0"}
    folder = root / data["folder"]
    folder.mkdir(parents=True, exist_ok=True)
    (root / f"{family}.json").write_text(json.dumps({**data, "sha256": "0" * 64, **changes}), encoding="utf-8")
    return folder / "sm_90a"


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


class Card:
    """A faked machine, and the attention that its kernels compute: `faults` maps a folder to what it does instead."""

    def __init__(self, monkeypatch, tmp_path) -> None:
        self.prebuilt = tmp_path / "prebuilt"
        self.stub = machine(monkeypatch, self.prebuilt)
        self.faults, self.tested = {}, []
        self.monkeypatch = monkeypatch

    def attention_on(self, kernels, *arguments):
        folder = kernels.manifest.folder
        if not self.tested or self.tested[-1] != folder:
            self.tested.append(folder)
        return self.faults.get(folder, spec)(*arguments)

    def choose(self, backend="auto", **options):
        return chain.choose(CARD, self.attention_on, backend, **options)

    def attempts(self, **options):
        return chain.attempts(CARD, self.attention_on, **options)

    def restart(self) -> None:
        """What a new process of the same user sees."""
        chain.forget()
        verdicts.forget()
        self.tested.clear()

    def two(self) -> tuple[Path, Path]:
        """Kernels built by hand, and those of a wheel, another build, behind them."""
        return write_kernels(self.prebuilt / "sm_90a"), write_kernels(point(self.prebuilt), package="0.1.1")


@pytest.fixture
def card(monkeypatch, tmp_path):
    monkeypatch.setattr(compile, "compiler", lambda: Reason("no_compiler", "There is no compiler."))
    return Card(monkeypatch, tmp_path)


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


def truncated(folder: Path) -> None:
    path = folder / f"{NAMES[2]}.cubin"
    path.write_bytes(path.read_bytes()[:-3])


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


# -- the verdict ------------------------------------------------------------------------------------------------------


@pytest.fixture
def user(card, tmp_path):
    """The folder in which verdicts are kept."""
    verdicts.set_folder(tmp_path / "user with spaces")
    card.two()
    return tmp_path / "user with spaces" / "self-test"


def files(user: Path) -> list[Path]:
    return sorted(user.glob("*.json"))


def test_a_verdict_is_remembered(card, user):
    card.choose()
    (file,) = files(user)
    data = json.loads(file.read_text())
    assert data["passed"] is True and data["subject"]["card"] == "NVIDIA H200"
    assert data["subject"]["driver"].endswith("CUDA 13.0)") or data["subject"]["driver"] == "CUDA 13.0"
    assert not list(user.glob("*.tmp"))
    card.restart()
    assert isinstance(card.choose(), Chosen) and card.tested == []
    assert "remembered" in card.attempts()[0].tested
    # Loading and checking the files is never remembered.
    card.restart()
    truncated(card.prebuilt / "sm_90a")
    assert card.choose().skipped[0].code == "kernels_damaged"


def test_without_a_folder_a_verdict_holds_for_the_process(card, user):
    verdicts.set_folder(None)
    card.choose()
    assert not user.exists()
    chain.forget()
    card.tested.clear()
    assert isinstance(card.choose(), Chosen) and card.tested == []


def test_a_failed_verdict_is_remembered_with_its_text(card, user):
    first, _ = card.two()
    card.faults[first] = lambda *arguments: spec(*arguments) * 1.1
    text = card.choose().skipped[0].text
    card.restart()
    card.faults.clear()
    chosen = card.choose()
    assert chosen.skipped[0].text == text and card.tested == []


def test_a_new_driver_build_card_or_test_is_tested_again(card, user, monkeypatch):
    first, _ = card.two()
    card.faults[first] = lambda *arguments: spec(*arguments) * 1.1
    card.choose()
    card.faults.clear()
    for number, change in enumerate(
        (
            lambda: monkeypatch.setattr(card.stub, "on_cuDriverGetVersion", lambda version: 1, raising=False),
            lambda: monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "NVIDIA H100"),
            lambda: monkeypatch.setattr(selftest, "VERSION", selftest.VERSION + 1),
            lambda: write_kernels(first, package="0.2.0"),
        )
    ):
        change()
        card.restart()
        assert card.choose().kernels.manifest.folder == first
        assert card.tested == [first]
        assert len(files(user)) == 3 + number


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', '{"schema": 99, "passed": true}', "\0\0"])
def test_a_damaged_verdict_is_a_new_test_and_a_sentence(card, user, text):
    card.choose()
    (file,) = files(user)
    file.write_text(text)
    card.restart()
    assert isinstance(card.choose(), Chosen) and card.tested != []
    assert "cannot be used" in card.attempts()[0].tested and "runs again" in card.attempts()[0].tested
    card.restart()
    assert isinstance(card.choose(), Chosen) and card.tested == []


def test_a_verdict_about_something_else_is_not_taken(card, user):
    card.choose()
    (file,) = files(user)
    data = json.loads(file.read_text())
    data["subject"]["build"] = "f" * 64
    file.write_text(json.dumps(data))
    card.restart()
    card.choose()
    assert card.tested != []


@pytest.mark.parametrize("obstacle", ["file", "directory"])
def test_a_folder_that_cannot_be_written_is_a_sentence(card, user, obstacle, monkeypatch):
    if obstacle == "file":
        user.parent.parent.mkdir(exist_ok=True)
        user.parent.write_text("in the way")
    else:

        def refuse(source, target):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(verdicts.os, "replace", refuse)
    assert isinstance(card.choose(), Chosen)
    assert "cannot be kept" in card.attempts()[0].tested
    assert not list(user.parent.rglob("*.tmp")) if obstacle == "directory" else True


def test_doctors_test_runs_whatever_is_remembered(card, user):
    first, _ = card.two()
    card.choose()
    card.faults[first] = lambda *arguments: spec(*arguments) * 1.1
    assert card.attempts()[0].reason is None
    rows = card.attempts(self_test=True)
    assert rows[0].reason.code == "self_test" and rows[1].reason is None and "passed" in rows[1].tested


PROCESS = """
import os, sys, time
sys.path.insert(0, 'tools'); import pack; pack.load_pack()
from pathlib import Path
from vc_attention.kernels.launch import verdicts
folder = Path(sys.argv[1])
verdicts.set_folder(folder)
subject = verdicts.Subject('NVIDIA H200', '9.0', '580', 'b' * 64, 1)
(folder / f'ready-{os.getpid()}').touch()
while len(list(folder.glob('ready-*'))) < int(sys.argv[2]):
    time.sleep(0.01)
with verdicts.only_one(subject):
    verdict, note = verdicts.recall(subject)
    assert note == '', note
    if verdict is None:
        with open(folder / 'ran', 'a') as file:
            file.write('ran\\n')
        if sys.argv[3] == 'die':
            (folder / 'holding').touch()
            time.sleep(60)
        time.sleep(0.3)
        assert verdicts.remember(subject, verdicts.Verdict(True, '', 0.3)) == ''
verdict, _ = verdicts.recall(subject)
assert verdict is not None and verdict.passed
"""


def start(folder: Path, count: int, what: str = "live") -> subprocess.Popen:
    command = [sys.executable, "-c", PROCESS, str(folder), str(count), what]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_of_two_processes_one_tests(tmp_path):
    both = [start(tmp_path, 2) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert (tmp_path / "ran").read_text() == "ran\n"
    assert len(list((tmp_path / "self-test").glob("*.json"))) == 1


def test_a_process_that_died_holds_nothing(tmp_path):
    dying = start(tmp_path, 1, "die")
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "holding").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        dying.kill()
        dying.wait()
    began = time.monotonic()
    assert start(tmp_path, 2).wait(60) == 0
    assert time.monotonic() - began < verdicts.LOCK_SECONDS
    assert (tmp_path / "ran").read_text() == "ran\nran\n"


def test_a_lock_that_cannot_be_had_is_no_obstacle(card, user, monkeypatch):
    def refuse(*arguments, **options):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(verdicts, "FileLock", refuse)
    assert isinstance(card.choose(), Chosen)
    shutil.rmtree(user)
