"""Compiling kernels on this machine: real processes with a stand-in compiler, and one kernel with the real one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_compiler import NAMES, tiny_cubin, write_compiler, write_pack
from stub_driver import StubDriver, machine
from vc_attention.kernels import FAST, Ok, Reason, backends, supports
from vc_attention.kernels.cute.elf import read_cubin
from vc_attention.kernels.launch import call, chain, compile, verdicts
from vc_attention.kernels.launch.manifest import Manifest, read_manifest
from vc_attention.kernels.spec.attention import attention as spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the compiler is for Linux only")
ROOT = Path(__file__).resolve().parents[2]
NO_COMPILER = "cubins: nvidia-cutlass-dsl is not installed here"


class Workshop:
    """A pack with a stand-in compiler, and the folder that compiled kernels go to."""

    def __init__(self, monkeypatch, tmp_path) -> None:
        self.pack = write_pack(tmp_path / "a pack")
        self.packages = write_compiler(tmp_path / "packages")
        self.folder = tmp_path / "user" / "compiled"
        monkeypatch.syspath_prepend(str(self.packages))
        monkeypatch.delitem(sys.modules, "cutlass", raising=False)
        monkeypatch.setattr(compile.build, "HERE", self.pack / "kernels")
        monkeypatch.setattr(verdicts, "_folder", tmp_path / "user")
        compile._sources.cache_clear()

    def behave(self, how: str) -> None:
        write_compiler(self.packages, how)

    def left(self) -> list[str]:
        """What lies in the folder, locks aside."""
        return sorted(p.name for p in self.folder.iterdir() if p.suffix != ".lock")


@pytest.fixture
def workshop(monkeypatch, tmp_path):
    made = Workshop(monkeypatch, tmp_path)
    yield made
    compile._sources.cache_clear()


def test_the_stand_in_makes_what_the_build_reads():
    facts = read_cubin(tiny_cubin("name", ((0, 8), (8, 4)), (96, 2, 1)))
    assert (facts.symbol, facts.params, facts.block, facts.registers) == ("name", ((0, 8), (8, 4)), (96, 2, 1), 168)


def test_kernels_are_compiled_once_and_kept(workshop):
    seen: list[tuple[int, int, str]] = []
    assert compile.compiled("sm_90a") is None
    folder = compile.compile_kernels("sm_90a", lambda *progress: seen.append(progress))
    assert isinstance(folder, Path) and folder.parent == workshop.folder and folder.name.endswith("-sm_90a")
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    assert manifest.arch == "sm_90a" and tuple(manifest.kernels) == NAMES
    assert folder.name == f"{manifest.source[:16]}-sm_90a"
    assert {(done, total) for done, total, _ in seen} >= {(0, 3), (1, 3), (2, 3)} and seen[-1][2] in NAMES
    assert workshop.left() == [folder.name]
    workshop.behave("fails")
    assert compile.compile_kernels("sm_90a") == compile.compiled("sm_90a") == folder
    assert "CUTE_DSL_ARCH" not in os.environ and "cutlass" not in sys.modules


def test_other_sources_are_compiled_anew_and_old_ones_removed(workshop):
    first = compile.compile_kernels("sm_90a")
    cut_off = workshop.folder / f"{first.name}.part-1"
    cut_off.mkdir()
    foreign = workshop.folder / "0123456789abcdef-sm_120a"
    foreign.mkdir()
    plan = workshop.pack / "kernels" / "plan.py"
    plan.write_text(plan.read_text() + "\n# changed\n")
    compile._sources.cache_clear()
    assert compile.compiled("sm_90a") is None
    second = compile.compile_kernels("sm_90a")
    assert second != first and workshop.left() == sorted([second.name, foreign.name])


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("fails", "The kernel compiler failed: RuntimeError: ptxas fatal : it has a headache"),
        ("ends", "ended without a result"),
        ("another arch", "of sm_90a; the compiler made ['sm_120a']"),
    ],
)
def test_a_failure_is_a_reason_and_leaves_nothing(workshop, behaviour, words):
    workshop.behave(behaviour)
    reason = compile.compile_kernels("sm_90a")
    assert isinstance(reason, Reason) and reason.code == "compile_failed" and words in reason.text
    assert workshop.left() == []
    workshop.behave("works")
    assert isinstance(compile.compile_kernels("sm_90a"), Path)


def ended(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process ends within that time (a zombie has ended)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def slow_pid(workshop) -> int:
    """The process that is busy compiling, once it is."""
    file = workshop.packages / "cutlass" / "pid"
    deadline = time.monotonic() + 30
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(file.read_text())


def test_too_long_is_a_reason_and_the_compiler_is_ended(workshop):
    workshop.behave("slow")
    start = time.monotonic()
    reason = compile.compile_kernels("sm_90a", timeout=2.0)
    assert reason.code == "compile_failed" and "too long" in reason.text and time.monotonic() - start < 10
    assert ended(slow_pid(workshop)) and workshop.left() == []


class Interrupted(Exception):  # noqa: N818 - as ComfyUI's is
    """Stands in for ComfyUI's Cancel."""


def test_cancel_passes_through_and_the_compiler_is_ended(workshop):
    workshop.behave("slow")

    def cancel(done: int, total: int, name: str) -> None:
        if total:
            slow_pid(workshop)
            raise Interrupted

    with pytest.raises(Interrupted):
        compile.compile_kernels("sm_90a", cancel)
    assert ended(slow_pid(workshop)) and workshop.left() == []
    workshop.behave("works")
    assert isinstance(compile.compile_kernels("sm_90a"), Path)


def test_it_works_beside_a_running_event_loop(workshop):
    """ComfyUI runs nodes inside one."""
    import asyncio

    async def node() -> Path | Reason:
        return compile.compile_kernels("sm_90a")

    assert isinstance(asyncio.run(node()), Path)


PROCESS = """
import sys
sys.path.insert(0, 'tools'); import pack; pack.load_pack()
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from vc_attention.kernels.launch import compile, verdicts
compile.build.HERE = Path(sys.argv[1]) / 'kernels'
verdicts.set_folder(sys.argv[3])
said = set()
made = compile.compile_kernels('sm_90a', lambda done, total, name: said.add(name))
assert isinstance(made, Path), made
print('waited' if 'another process compiles them' in said else 'compiled')
"""


def test_of_two_processes_one_compiles(workshop, tmp_path):
    command = [sys.executable, "-c", PROCESS, str(workshop.pack), str(workshop.packages), str(tmp_path / "user")]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate(timeout=120)[0].strip() for process in both)
    assert [process.returncode for process in both] == [0, 0]
    # On a busy machine the second may start when the first is done; then it neither waits nor compiles.
    assert "compiled" in said and len(workshop.left()) == 1


def test_a_process_that_waits_can_be_cancelled_and_times_out(workshop):
    place = compile._place("sm_90a")
    place.parent.mkdir(parents=True)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with compile.FileLock(place.with_name(f"{place.name}.lock"), thread_local=False):
            held.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        held.wait(10)
        reason = compile.compile_kernels("sm_90a", timeout=0.3)
        assert reason.code == "compile_failed" and "Another process" in reason.text

        def cancel(done: int, total: int, name: str) -> None:
            assert name == "another process compiles them"
            raise Interrupted

        with pytest.raises(Interrupted):
            compile.compile_kernels("sm_90a", cancel)
    finally:
        release.set()
        holder.join()
    assert isinstance(compile.compile_kernels("sm_90a"), Path)


def test_what_is_missing_is_a_reason(workshop, monkeypatch, tmp_path):
    assert compile.compile_kernels("sm_75").code == "no_kernels"
    with monkeypatch.context() as inside:
        inside.setattr(verdicts, "_folder", None)
        assert compile.compile_kernels("sm_90a").code == "no_folder" and compile.compiled("sm_90a") is None
    with monkeypatch.context() as inside:
        inside.setattr(compile.sys, "platform", "win32")
        assert compile.compile_kernels("sm_90a").code == "no_compiler"
    with monkeypatch.context() as inside:
        inside.setattr(compile.importlib.util, "find_spec", lambda name: None)
        assert compile.compile_kernels("sm_90a").code == "no_compiler"
    with monkeypatch.context() as inside:
        inside.setattr(compile.sys, "executable", "")
        assert compile.compile_kernels("sm_90a").code == "no_compiler"
    (workshop.pack / "kernels" / "compile_here.py").rename(tmp_path / "left_out.py")
    assert "registry" in compile.compile_kernels("sm_90a").text
    (tmp_path / "left_out.py").rename(workshop.pack / "kernels" / "compile_here.py")
    (workshop.packages / "cutlass" / "cute" / "__init__.py").unlink()
    (workshop.packages / "cutlass" / "cute").rmdir()
    assert "not installed" in compile.compiler().text  # CUTLASS's older package of that name
    assert workshop.left() == []


def test_a_folder_in_the_way_is_a_reason(workshop):
    workshop.folder.parent.mkdir()
    workshop.folder.write_text("in the way")
    reason = compile.compile_kernels("sm_90a")
    assert reason.code == "compile_failed" and "cannot be kept" in reason.text


def test_the_whole_way_from_the_question_to_compiled_kernels(workshop, monkeypatch, tmp_path):
    stub = machine(monkeypatch, tmp_path / "prebuilt", StubDriver())
    verdicts.set_folder(tmp_path / "user")
    monkeypatch.setattr(call, "attention_on", lambda kernels, *arguments: spec(*arguments))
    seen = []
    assert supports("cuda", FAST, progress=lambda *progress: seen.append(progress)) == Ok("cute")
    assert seen and len(stub.loaded) == len(NAMES)
    assert supports("cuda", FAST, backend="cubin").code == "no_kernel"
    rows = {row.name: row for row in backends()}
    assert (
        rows["cute"].available and "compiled on this machine" in rows["cute"].reason and "passed" in rows["cute"].reason
    )
    chain.forget()
    workshop.behave("fails")
    assert supports("cuda", FAST) == Ok("cute")


def test_compiled_kernels_that_are_damaged_are_compiled_again(workshop, monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path / "prebuilt", StubDriver())
    verdicts.set_folder(tmp_path / "user")
    monkeypatch.setattr(call, "attention_on", lambda kernels, *arguments: spec(*arguments))
    assert supports("cuda", FAST) == Ok("cute")
    damaged = compile.compiled("sm_90a") / f"{NAMES[0]}.cubin"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    chain.forget()
    assert supports("cuda", FAST) == Ok("cute") and damaged.read_bytes() == whole
    damaged.write_bytes(b"")
    workshop.behave("fails")
    chain.forget()
    refusal = supports("cuda", FAST)
    assert refusal.code == "no_kernel" and "headache" in refusal.text


@pytest.mark.xdist_group("cubins")
@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="cubins: nvidia-cutlass-dsl is not installed here"
)
def test_one_kernel_with_the_real_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(verdicts, "_folder", tmp_path)
    seen = []
    folder = compile.compile_kernels("sm_90a", lambda *progress: seen.append(progress), only="k_mean")
    assert isinstance(folder, Path), folder
    manifest = read_manifest(folder)
    assert list(manifest.kernels) == ["k_mean"] and manifest.capability == (9, 0)
    assert (0, 1, "k_mean") in seen
    facts = read_cubin((folder / "k_mean.cubin").read_bytes())
    assert facts.params == manifest.kernels["k_mean"].params
