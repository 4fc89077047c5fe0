"""`run.py doctor --report`: everything that a bug report needs, and nothing about a person, a machine or a folder."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cards import look
from vc_attention.kernels import detect
from vc_attention.kernels.install import store
from vc_attention.kernels.launch import verdicts
from vc_attention.nodes.messages import captured, profile_saved
from vc_attention.tools import comfyui, doctor, doctor_probe, redact, report
from vc_attention.tools.messages import ToolError

ROOT = Path(__file__).resolve().parents[2]
#: A machine whose owner is in every name.
FOLDERS = (
    ("/home/jdoe/AI Stuff/ComfyUI/custom_nodes/vc", "<pack>"),
    ("/home/jdoe/AI Stuff/ComfyUI", "<comfyui>"),
    ("/home/jdoe", "<home>"),
    ("C:\\Users\\Jane Doe", "<home>"),
)
NAMES = (("jane doe", "<user>"), ("janes-tower", "<host>"), ("jdoe", "<user>"), ("jane", "<user>"), ("doe", "<user>"))
KNOWN = redact.Redactor(FOLDERS, NAMES)
SECRETS = ("jane", "jdoe", "doe", "tower", "acme", "wedding", "AI Stuff", "10.11.12.13", "hf_0123", "4f5a6b7c", "nas-7")
#: What stands in real texts -> what may be left of it.
CASES = {
    "see /home/jdoe/AI Stuff/ComfyUI/custom_nodes/vc/kernels/prebuilt/sm_90a: 3 kernels": (
        "see <pack>/kernels/prebuilt/sm_90a: 3 kernels"
    ),
    "/home/jdoe/AI Stuff/ComfyUI/user/vc_attention": "<comfyui>/user/vc_attention",
    "/home/jdoe/acme/wedding clip.mp4 (No space left)": "<home> (No space left)",
    "C:\\Users\\Jane Doe\\acme\\x.json is damaged": "<home> is damaged",
    "[Errno 2] No such file: 'C:\\\\Users\\\\Jane Doe\\\\App Data\\\\acme x.json'": "[Errno 2] No such file: '<home>'",
    "D:\\AI Stuff\\ComfyUI\\main.py, line 3": "<path>, line 3",
    "open(\\\\nas-7\\jane\\a.bin)": "open(<path>)",
    "~jdoe/acme, and ~/acme/wedding.png": "<path>, and <path>",
    "/mnt/nas-7/My Wedding/a b.mp4 failed: too long": "<path> failed: too long",
    'the "/srv/jane doe/acme" file': "the <path> file",
    "http://jane:pw@proxy.acme.example:3128/simple timed out": "<address> timed out",
    "mail jane@acme.example": "mail <e-mail>",
    "10.11.12.13:8188 and fe80::4f5a:6b7c and 4f:5a:6b:7c:00:01": "<address>:8188 and <address> and <address>",
    "GPU-4f5a6b7c-1111-2222-3333-444455556666": "<id>",
    "/home/jdoe/AI Stuff/ComfyUI/models/acme/x, not wedding_v2.safetensors": "<comfyui>/models, not <file>",
    "token hf_0123456789abcdefgh": "token <secret>",
    "JDOE on JANES-TOWER by Jane Doe (jane_doe)": "<user> on <host> by <user> (<user>_<user>)",
}
#: What has to stay as it is.
KEPT = (
    "NVIDIA H200 (compute capability 9.0): the 8-bit kernels for Hopper (H100, H200) run on it.",
    "driver 580.159.03, torch 2.11.0+cu130, ComfyUI 0.3.75, 8 / 16 bit, text/image, bf16/fp16",
    "sm_90a/kernel_2.cubin is not the file that was built; kernels/prebuilt/hopper/2e5e3363bc4a",
    "`python3 run.py test` makes it, at 8:30:15, 1.016 * 2 = 2.03",
    "janet and doer are other words",
)


def leaves(tree: Any) -> Iterator[str]:
    """Every text in a JSON value."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from leaves(value)
    elif isinstance(tree, str):
        yield tree


def planted(tree: Any, text: str) -> Any:
    """`tree` with `text` behind every text in it."""
    if isinstance(tree, dict):
        return {key: planted(value, text) for key, value in tree.items()}
    if isinstance(tree, list):
        return [planted(value, text) for value in tree]
    return f"{tree} {text}" if isinstance(tree, str) else tree


def found_in(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret.casefold() in text.casefold()]


@pytest.mark.parametrize("text", CASES)
def test_what_is_personal_goes_and_the_rest_stays(text: str) -> None:
    clean = KNOWN.text(text)
    assert clean == CASES[text] and not found_in(clean)
    assert KNOWN.text(clean) == clean


@pytest.mark.parametrize("text", KEPT)
def test_what_is_not_personal_stays(text: str) -> None:
    assert KNOWN.text(text) == text


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What `doctor` finds on a faked machine with a card, kernels that are damaged, and a torch."""
    torch = {
        "torch": "2.11.0+cu130",
        "cuda_build": "13.0",
        "devices": ["NVIDIA H200"],
        "backends": [{"name": "cubin", "available": False, "reason": "refused", "card": ""}],
        "runs": [],
        "driver": "580.159.03",
        "self_tests": [{"schema": 1, "passed": False, "text": "fast: uniform attention", "seconds": 1.0}],
        "packages": {"sageattention": "2.2.0"},
    }
    monkeypatch.setattr(doctor, "_torch", lambda *arguments: torch)
    monkeypatch.setattr(doctor, "_interpreter", lambda *a: (None, {"name": ".venv", "ready": False, "problem": "gone"}))
    pointer = tmp_path / "kernels" / "prebuilt" / "hopper.json"
    pointer.parent.mkdir(parents=True)
    pointer.write_text("{")
    return doctor.examine(None, None, *look(detect, "9.0"), kernels=tmp_path / "kernels")


def test_it_has_what_a_bug_report_needs(findings: dict[str, Any], tmp_path: Path) -> None:
    made = report.build(findings, doctor.text_of(findings), tmp_path, KNOWN, store)
    (card,) = made["findings"]["cards"]
    assert card["name"] == "NVIDIA H200" and card["capability"] == "9.0" and card["code"] and card["text"]
    assert made["findings"]["driver"]["cuda"] == "13.0" and made["findings"]["torch"]["driver"] == "580.159.03"
    assert made["findings"]["torch"]["torch"] == "2.11.0+cu130"
    assert made["findings"]["comfyui"]["version"] == "0.3.75"
    assert made["findings"]["kernels"][0]["good"] is False and made["findings"]["kernels"][0]["state"]
    assert made["self_tests"][0]["text"] == "fast: uniform attention"
    assert made["packages"] == {"sageattention": "2.2.0"}
    assert "What is missing, and how to get it" in made["text"]
    assert findings["torch"]["packages"], "the findings themselves are not changed"


@pytest.mark.parametrize("text", CASES)
def test_nothing_personal_is_left_in_any_field(findings: dict[str, Any], tmp_path: Path, text: str) -> None:
    pack = tmp_path / "ComfyUI" / "custom_nodes" / "of_jane"
    pack.mkdir(parents=True)
    (pack / "pyproject.toml").write_text(f'name = "vc-attention"\nversion = "0.1.0 {text.replace(chr(34), "")}"\n')
    (tmp_path / "ComfyUI" / "user").mkdir()
    log = tmp_path / "ComfyUI" / "user" / "comfyui.log"
    log.write_text(f"a prompt about acme\nVC-Attention: {text}\n", encoding="utf-8")
    spoilt = planted(findings, text)
    assert sum(text in leaf for leaf in leaves(spoilt)) > 25
    made = report.build(spoilt, "\n".join(leaves(spoilt)), tmp_path / "ComfyUI", KNOWN, store)
    assert len(made["installed_packs"]) == 1 and len(made["log"]) == 1 and len(made["text"]) > 25
    for written in (json.dumps(made, ensure_ascii=False), "\n".join(leaves(made))):
        assert not found_in(written)


def test_this_machine_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "jdoe"
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr(redact.getpass, "getuser", lambda: "jdoe2")
    monkeypatch.setattr(redact.socket, "gethostname", lambda: "janes-tower.acme.example")
    monkeypatch.setattr(redact.platform, "node", lambda: "JANES-NODE")
    monkeypatch.setattr(redact.tempfile, "gettempdir", lambda: "/scratch/of jane")
    environment = {"USER": "jane3", "USERDOMAIN": "ACME", "HOSTNAME": "tower9"}
    found = redact.of_this_machine(home / "pack", home / "ComfyUI", home / "venv" / "bin" / "python", environment)
    text = f"{home}/pack/x {home}/ComfyUI/y {home}/venv/lib/z, {home}/acme; /scratch/of jane/t: jdoe jdoe2 jane3"
    text += " janes-tower janes-tower.acme.example janes-node acme tower9"
    clean = found.text(text)
    assert clean == (
        "<pack>/x <comfyui>/y <python>/lib/z, <home>; <temp>: <user> <user> <user> <host> <host> <host> <host> <host>"
    )


def test_an_account_without_a_name_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nobody(*_: object) -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(redact.getpass, "getuser", nobody)
    if sys.platform != "win32":
        import pwd

        monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert redact.of_this_machine(tmp_path).text(f"{tmp_path}/x") == "<pack>/x"


def test_a_short_or_common_name_does_not_eat_the_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(redact.getpass, "getuser", lambda: "a")
    monkeypatch.setattr(redact.socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(redact.platform, "node", lambda: "localhost")
    found = redact.of_this_machine(tmp_path, environment={})
    assert ("a", "<user>") not in found.names and ("localhost", "<host>") not in found.names
    assert found.text("a kernel on localhost") == "a kernel on localhost"


def test_a_folder_beside_the_known_one_is_not_taken_for_it() -> None:
    assert KNOWN.text("/home/jdoe2/x and /home/jdoe.old/y and /home/jdoe-3") == "<path> and <path> and <path>"


def test_the_log_gives_our_lines_of_the_newest_file(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    old, new = tmp_path / "comfyui.log", tmp_path / "user" / "comfyui_8188.log"
    old.write_text("VC-Attention: old\n")
    os.utime(old, (1, 1))
    lines = [f"VC-Attention: line {number}" for number in range(report.LOG_LINES + 5)]
    new.write_text("\n".join(["got prompt", *lines, "Prompt executed in 3 seconds"]))
    assert report.log_lines(tmp_path) == lines[5:]
    assert report.log_lines(tmp_path / "nowhere") == []


def test_the_log_gives_no_name_that_a_person_chose(tmp_path: Path) -> None:
    saved = captured("acme/wedding clip_00001_.safetensors", "block 3", 2, 8, 40, 1, 1)
    lines = [f"VC-Attention Capture: {saved}", f"VC-Attention Quality: {profile_saved('acme wedding', 3, 40)}"]
    (tmp_path / "comfyui.log").write_text("\n".join([*lines, "VC-Attention: 80 of 120 calls"]))
    first, second = report.log_lines(tmp_path)
    assert not found_in(first) and first.startswith(
        "VC-Attention Capture: Saved block 3, step 2 (8 of 40 heads) to <file>"
    )
    assert second == "VC-Attention: 80 of 120 calls"


def test_a_long_line_takes_no_time() -> None:
    for text in ("/a b" * 20_000, "/" + "a " * 40_000, "C:\\" + "x y\\" * 20_000 + ";", "a." * 40_000, "1:" * 40_000):
        start = time.perf_counter()
        KNOWN.text(text)
        assert time.perf_counter() - start < 5


def test_only_copies_of_this_pack_are_listed(tmp_path: Path) -> None:
    for folder, name in (("a", "vc-attention"), ("b", "another-pack")):
        (tmp_path / "custom_nodes" / folder).mkdir(parents=True)
        (tmp_path / "custom_nodes" / folder / "pyproject.toml").write_text(f'name = "{name}"\nversion = "1.2.3"\n')
    (found,) = report.installed_packs(tmp_path, store)
    assert found == {"version": "1.2.3", "this": False, "git": False, "kernels": []}


def test_self_tests_are_read_as_they_are_kept(tmp_path: Path) -> None:
    verdicts.set_folder(tmp_path)
    try:
        subject = verdicts.Subject("NVIDIA H200", "9.0", "580.159.03", "abc", 1)
        verdicts.remember(subject, verdicts.Verdict(False, "fast in bfloat16: uniform attention", 0.9))
    finally:
        verdicts.set_folder(None)
        verdicts.forget()
    (tmp_path / "self-test" / "damaged.json").write_text("{")
    (kept,) = verdicts.kept(tmp_path)
    assert kept["subject"]["card"] == "NVIDIA H200" and kept["passed"] is False
    assert verdicts.kept(tmp_path / "nowhere") == []


def test_the_probe_names_what_is_installed() -> None:
    found = doctor_probe.versions(("numpy", "no-such-package-of-ours"))
    assert list(found) == ["numpy"] and found["numpy"][0].isdigit()


def test_the_file_is_whole_or_not_there(tmp_path: Path) -> None:
    made = report.write({"text": ["\u00fc"]}, str(tmp_path / "r.json"))
    assert json.loads(made.read_text(encoding="utf-8")) == {"text": ["\u00fc"]}
    with pytest.raises(ToolError, match="cannot be written there"):
        report.write({}, str(tmp_path / "missing" / "r.json"))
    with pytest.raises(ToolError, match="cannot be written there"):
        report.write({}, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json"]


def test_the_option_takes_a_file_or_none() -> None:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert parser.parse_args([]).report is None
    assert parser.parse_args(["--report"]).report == ""
    assert parser.parse_args(["--report", "x.json"]).report == "x.json"


def test_comfyui_around_the_pack_is_found(tmp_path: Path) -> None:
    pack = tmp_path / "ComfyUI" / "custom_nodes" / "vc"
    pack.mkdir(parents=True)
    assert comfyui.around(pack) is None
    for name in ("main.py", "comfyui_version.py"):
        (tmp_path / "ComfyUI" / name).write_text("")
    assert comfyui.around(pack) == tmp_path / "ComfyUI"
    assert comfyui.around(tmp_path / "ComfyUI" / "other" / "vc") is None


def test_the_whole_command_in_a_pack_that_lies_in_a_comfyui(tmp_path: Path) -> None:
    """The real command in a fresh interpreter, in a home whose owner is in every name."""
    home = tmp_path / "jdoe"
    comfy = home / "AI Stuff" / "ComfyUI"
    pack = comfy / "custom_nodes" / "ComfyUI-VC-Attention"
    pack.mkdir(parents=True)
    for folder in ("tools", "kernels", "nodes"):
        ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
        shutil.copytree(ROOT / folder, pack / folder, ignore=ignored)
    for file in ("run.py", "pyproject.toml", "__init__.py"):
        shutil.copy(ROOT / file, pack / file)
    (comfy / "main.py").write_text("")
    (comfy / "comfyui_version.py").write_text('__version__ = "0.33.0"\n')
    (comfy / "comfyui.log").write_text(f"[jane] VC-Attention: saved {home}/acme/wedding.json on tower9\n")
    variables = {**os.environ, "HOME": str(home), "USERPROFILE": str(home), "USER": "jane", "HOSTNAME": "tower9"}
    done = subprocess.run(
        [sys.executable, "run.py", "doctor", "--report"],
        cwd=pack, env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    file = pack / "output" / "vc-attention-report.json"
    assert done.stdout.startswith(f"Report: {file}\n") and "/issues/new/choose" in done.stdout
    text = file.read_text(encoding="utf-8")
    assert not found_in(text) and str(tmp_path) not in text
    made = json.loads(text)
    assert made["findings"]["comfyui"] == {"version": "0.33.0", "ready": True}
    assert made["findings"]["torch"]["torch"] and made["findings"]["pack"]["folder"] == "<pack>"
    assert made["installed_packs"][0]["this"] is True and len(made["log"]) == 1
