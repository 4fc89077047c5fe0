"""What every test needs: the pack under its import name, ComfyUI where one is given, and honest skips.

`--comfyui DIR` (tests/support/comfyui_option.py) names the ComfyUI checkout of the tests marked `comfy`; the default
is the one that `run.py` sets up in `.cache`. Markers: `comfy` needs a ComfyUI, `gpu` needs a CUDA device; a test whose
need is not met is skipped with that reason, and the summary names and counts them. The GPU's own run, which needs no
ComfyUI and no compiler:

    python -m pytest -m gpu tests/kernels tests/known_failures --cubins FOLDER
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_COMFYUI = ROOT / ".cache" / "comfyui-0.3.75"
NO_CUDA = "no CUDA device on this machine"
NO_COMFYUI = "no ComfyUI given (--comfyui DIR)"


def _load_pack() -> None:
    """Import the checkout as `vc_attention` through `tools/pack.py`, without putting the checkout on sys.path."""
    spec = importlib.util.spec_from_file_location("_vc_attention_pack_loader", ROOT / "tools" / "pack.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load_pack()


_load_pack()
pytest.register_assert_rewrite("comfy_cases", "kernel_cases")
pytest_plugins = ["kernel_backends"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "comfy: needs a ComfyUI checkout (--comfyui DIR)")
    config.addinivalue_line("markers", "browser: needs a Chromium and Playwright")
    config.addinivalue_line("markers", "fakes: contract test of a newer ComfyUI with our own fakes")
    torch.set_num_threads(1)  # the tensors are tiny: a second thread costs more than it brings
    directory = comfyui_directory(config)
    controller = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    if directory is not None and not controller:
        from vc_attention.tools import tiny_models

        tiny_models.import_comfy(directory)


@pytest.fixture(autouse=True)
def no_folder_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without a folder for verdicts and compiled kernels; one that a node sets in it goes with it.

    Else a later test with a faked card would find kernels there, or have them compiled for real.
    """
    from vc_attention.kernels.launch import verdicts

    monkeypatch.setattr(verdicts, "_folder", None)


def comfyui_directory(config: pytest.Config) -> Path | None:
    """The ComfyUI of this run, or None. A directory that was asked for and holds none is a usage error."""
    given = config.getoption("--comfyui")
    if given is None:
        return DEFAULT_COMFYUI if (DEFAULT_COMFYUI / "comfy" / "sd.py").is_file() else None
    directory = Path(given).resolve()
    if not (directory / "comfy" / "sd.py").is_file():
        raise pytest.UsageError(f"--comfyui {given}: there is no ComfyUI (comfy/sd.py is missing).")
    return directory


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_comfyui = comfyui_directory(config) is None
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=f"gpu: {NO_CUDA}"))
        if item.get_closest_marker("comfy") and no_comfyui:
            item.add_marker(pytest.mark.skip(reason=f"comfy: {NO_COMFYUI}"))


def pytest_terminal_summary(terminalreporter) -> None:
    """Name and count what did not run: a skip that nobody sees looks like a pass."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    groups: dict[str, list[str]] = {}
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        groups.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid)
    terminalreporter.section("tests that did not run")
    for reason, names in sorted(groups.items()):
        terminalreporter.write_line(f"{len(names)} skipped, {reason}:")
        # One line for a test, however many parameters it has: hundreds of lines are not seen either.
        tests: dict[str, list[str]] = {}
        for name in names:
            tests.setdefault(name.partition("[")[0], []).append(name)
        for test, cases in sorted(tests.items()):
            terminalreporter.write_line(f"    {cases[0] if len(cases) == 1 else f'{test} ({len(cases)} times)'}")
