"""The self-test's verdict: what is remembered, when it holds, and one test at a time for all processes."""

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
from chain_cases import truncated
from stub_driver import write_kernels
from vc_attention.kernels.launch import chain, selftest, verdicts
from vc_attention.kernels.launch.chain import Chosen
from vc_attention.kernels.spec.attention import attention as spec

ROOT = Path(__file__).resolve().parents[2]


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
