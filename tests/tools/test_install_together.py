"""install.py several times at once, killed at any write, and stopped with Ctrl+C: one whole build, old or new."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import small_wheels
from install_cases import NAME, NEW, OLD, beside, with_old
from installing import Pack
from small_wheels import check_build
from wheel_server import serving


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """A pack that pins one small wheel, in a folder with spaces and letters that ASCII lacks."""
    pack = Pack(tmp_path / "custom nodes" / "\u00dcbung \u4e2d\u6587 VC")
    pack.pin({"hopper": NEW})
    return pack


def test_two_installs_at_once(pack: Pack) -> None:
    with_old(pack)
    with serving({NAME: NEW}) as server:
        server.rate = len(NEW) * 2
        processes = [pack.start("--from", server.address) for _ in range(3)]
        lines = [pack.line(process) for process in processes]
        assert len(server.requests) == 1
    assert sum("are installed now" in line for line in lines) == 1
    assert sum("there is nothing to do" in line for line in lines) == 2
    check_build(pack.prebuilt, data=NEW)


def until(condition, seconds: float = 20) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


#: The writes of an install that go down to the disk: five files, two folders of theirs, the folder of builds after the
#: new one has its name, the pointer's draft, the folder of pointers after the pointer has changed.
WRITES = 10


@pytest.mark.parametrize("write", [1, 3, 5, 7, 8, 9, WRITES])
def test_killed_while_unpacking_and_run_again(pack: Pack, tmp_path: Path, write: int) -> None:
    with_old(pack)
    beside(pack)
    marker = tmp_path / "it hangs"
    process = pack.start(hang_at=write, marker=str(marker))
    until(marker.exists)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    check_build(pack.prebuilt, data=NEW if write == WRITES else OLD)
    assert ("there is nothing to do" if write == WRITES else "are installed now") in pack.run()
    check_build(pack.prebuilt, data=NEW)
    assert {path.name for path in pack.prebuilt.iterdir()} == {".lock", "hopper", "hopper.json"}
    assert len(list((pack.prebuilt / "hopper").iterdir())) == 1


def test_killed_while_downloading_the_next_run_goes_on(pack: Pack) -> None:
    with_old(pack)
    with serving({NAME: NEW}) as server:
        server.rate = 8000
        process = pack.start("--from", server.address)
        (part,) = [
            pack.prebuilt
            / ".download"
            / f"{NAME}.{small_wheels.pins({'hopper': NEW})['wheels'][0]['sha256'][:12]}.part"
        ]
        until(lambda: part.exists() and part.stat().st_size > 2000)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        check_build(pack.prebuilt, data=OLD)
        held = part.stat().st_size
        server.rate = 0
        assert "are installed now" in pack.run("--from", server.address)
        assert server.requests[-1][1] == f"bytes={held}-"
    check_build(pack.prebuilt, data=NEW)
    assert not part.parent.exists()


def test_ctrl_c_is_a_sentence(pack: Pack) -> None:
    with_old(pack)
    with serving({NAME: NEW}) as server:
        server.faults = ["silent"]
        process = pack.start("--from", server.address)
        until(lambda: server.requests)
        process.send_signal(signal.SIGINT)
        assert "stopped. What was installed before stays" in pack.line(process)
    check_build(pack.prebuilt, data=OLD)
