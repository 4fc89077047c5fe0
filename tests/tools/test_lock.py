"""One run of the tools at a time, and none that a killed run holds up."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from vc_attention.tools import environment
from vc_attention.tools.lock import Lock
from vc_attention.tools.messages import ToolError

pytestmark = pytest.mark.timeout(180)


def test_two_runs_wait_for_each_other(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with Lock(tmp_path / "lock", "testing"):
            order.append("second")

    with Lock(tmp_path / "lock", "testing"):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\nfrom tools.lock import Lock\n"
        "Lock(Path(sys.argv[1]), 'testing').__enter__(); print('held', flush=True); time.sleep(60)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "lock"), str(environment.ROOT)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ToolError, match="has been testing for too long"):
            Lock(tmp_path / "lock", "testing", timeout=0).__enter__()
        process.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        process.wait()
    with Lock(tmp_path / "lock", "testing", timeout=5):
        pass
