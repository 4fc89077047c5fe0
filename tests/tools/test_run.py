"""run.py: one door, one sentence for each problem, and the commands behind it."""

from __future__ import annotations

import argparse
import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from vc_attention.tools import lint, serve, test
from vc_attention.tools.comfyui import ComfyUI
from vc_attention.tools.environment import Environment
from vc_attention.tools.messages import ToolError, size_text, time_text

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, code: str = "pass") -> subprocess.CompletedProcess[str]:
    """run.py in a fresh interpreter; `code` runs before it."""
    start = f"import sys, runpy; {code}; sys.argv[:] = ['run.py', *sys.argv[1:]]; "
    start += f"sys.path.insert(0, {str(ROOT)!r}); runpy.run_path({str(ROOT / 'run.py')!r}, run_name='__main__')"
    command = [sys.executable, "-c", start, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_help_names_every_command_and_each_has_its_own() -> None:
    text = run("--help").stdout
    for command in ("demo", "test", "serve", "replay", "bench", "doctor", "lint", "wheels"):
        assert f"    {command} " in text
    done = run("replay", "--help")
    assert done.returncode == 0 and "--grouping off|N" in done.stdout


def test_an_old_python_gets_a_sentence() -> None:
    done = run("doctor", code="sys.version_info = (3, 9, 18, 'final', 0)")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        "run.py needs Python 3.10 or newer, and this is Python 3.9. Install a newer Python and start run.py with it.\n"
    )


def test_old_pythons_can_read_run_py() -> None:
    """Whatever old Python reads this file must get as far as the sentence."""
    tree = ast.parse((ROOT / "run.py").read_text(encoding="ascii"))
    newer = (ast.JoinedStr, ast.NamedExpr, ast.AnnAssign, ast.AsyncFunctionDef, ast.Match)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, newer)]
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and (n.returns or n.args.kwonlyargs)]
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "__future__"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay", "missing.safetensors"], "run.py replay: missing.safetensors does not exist."),
        (["doctor", "--comfyui", "/no/such/folder"], "run.py doctor: --comfyui /no/such/folder: there is no ComfyUI"),
        (["serve", "--python", "/no/such/python"], "run.py serve: --python /no/such/python: that is not a Python"),
    ],
)
def test_a_wrong_request_is_one_line_and_status_2(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(words) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["brew"], ["doctor", "--coffee"]])
def test_an_unknown_request_is_status_2_with_the_usage(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and "usage: run.py" in done.stderr


def test_doctor_runs_here_and_changes_nothing() -> None:
    done = run("doctor", "--json", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    assert '"backends"' in done.stdout and done.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for another process")
def test_ctrl_c_is_one_word_and_status_130(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\necho ready > " + str(tmp_path / "ready") + "\nexec sleep 30\n")
    slow.chmod(0o755)
    command = [sys.executable, str(ROOT / "run.py"), "replay", "README.md", "--python", str(slow)]
    keywords = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}

    def listen() -> None:
        # a shell starts its background jobs with SIGINT ignored, and children inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, preexec_fn=listen, **keywords) as process:
        deadline = time.monotonic() + 20
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert process.returncode == 130 and error.strip().endswith("Stopped.") and "Traceback" not in error


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Commands that would have been run by `test` and `lint`; each ends as `results` says, in order."""
    made: list[SimpleNamespace] = []

    def record(command: list[str], **options: object) -> SimpleNamespace:
        made.append(SimpleNamespace(command=command, **options))
        return SimpleNamespace(returncode=1 if "fail" in command else 0)

    found = ComfyUI(Path("/comfy"), "0.3.75", ".venv", (), True)
    monkeypatch.setattr(test, "ready", lambda arguments, requirements: (found, Environment(Path("py"), None)))
    monkeypatch.setattr(test.comfyui, "python_environment", lambda python, directory: {"PATH": "x"})
    monkeypatch.setattr(test.subprocess, "run", record)
    return made


def options(*rest: str, **changed: object) -> argparse.Namespace:
    return argparse.Namespace(**{"workers": 2, "no_lint": False, "rest": list(rest), **changed})


def test_the_suite_is_ruff_mypy_and_pytest_with_thread_limits(calls: list[SimpleNamespace]) -> None:
    assert test.main(options("-k", "replay")) == 0
    ruff, mypy, pytest_run = calls
    assert ruff.command == ["py", "-m", "ruff", "check", "."]
    assert mypy.command == ["py", "-m", "mypy", "kernels", "nodes"]
    expected = ["py", "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-n", "2"]
    expected += ["--dist=loadgroup"]
    assert pytest_run.command == [*expected, f"--comfyui={Path('/comfy')}", "-k", "replay", "tests"]
    assert {pytest_run.env[name] for name in test.THREAD_LIMITS} == {str(max(1, (os.cpu_count() or 1) // 2))}


def test_paths_given_replace_the_whole_folder(calls: list[SimpleNamespace]) -> None:
    test.main(options("tests/tools/test_run.py::test_x", no_lint=True))
    assert len(calls) == 1 and calls[0].command[-1] == "tests/tools/test_run.py::test_x"


def test_findings_fail_the_suite_but_the_tests_still_run(
    calls: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lint, "TYPED", ("kernels", "fail"))
    monkeypatch.setattr(lint.Path, "is_dir", lambda self: True)
    assert test.main(options()) == 1
    assert calls[-1].command[2] == "pytest"


def test_ci_calls_exactly_the_newcomers_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="ascii").splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in lines
    assert lines[-1] == 'exec "$python" run.py test "$@" </dev/null'


def test_models_of_the_user_are_named_to_comfyui(tmp_path: Path) -> None:
    import yaml

    models = tmp_path / "it's mine"
    for name in ("vae", "diffusion_models"):
        (models / name).mkdir(parents=True)
    content = yaml.safe_load(serve._model_paths(str(models), tmp_path / "base").read_text(encoding="utf-8"))
    (section,) = content.values()
    assert section == {"base_path": models.as_posix(), "vae": "vae", "diffusion_models": "diffusion_models"}
    with pytest.raises(ToolError, match="there is no such folder"):
        serve._model_paths(str(tmp_path / "gone"), tmp_path)


def test_sizes_and_times_in_words() -> None:
    assert [size_text(n) for n in (0, 1536, 3e9)] == ["0 bytes", "1.5 KB", "2.8 GB"]
    assert [time_text(n) for n in (0.04, 9.94, 59.6, 75)] == ["0.0 s", "9.9 s", "1 min 00 s", "1 min 15 s"]
