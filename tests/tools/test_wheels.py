"""run.py wheels: the table of families, packing, pinning and comparing. No kernel is compiled here.

tests/kernels/test_pinned_wheels.py packs really compiled kernels and compares them with kernels/wheels.json.
"""

from __future__ import annotations

import argparse
import ast
import base64
import csv
import hashlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.utils import parse_wheel_filename
from vc_attention.kernels import cards
from vc_attention.kernels.cute.catalogue import KERNELS
from vc_attention.kernels.families import FAMILIES, arch_of, family_of, package_name, wheel_name
from vc_attention.tools import environment, wheel_family, wheels
from vc_attention.tools.messages import ToolError
from vc_attention.tools.wheel_family import Wheel, differences, pack, read_pinned, write_pinned

ROOT = Path(__file__).resolve().parents[2]
VERSION = wheel_family.version_here()


def build_of(folder: Path, built_for: str, **changed: object) -> Path:
    """A folder as kernels/build.py leaves it, with bytes that no compiler made."""
    folder.mkdir(parents=True)
    kernels = []
    for name in ("prepare_k", "attention_bf16"):
        data = f"{built_for} {name}".encode() * 100
        (folder / f"{name}.cubin").write_bytes(data)
        kernels.append({"name": name, "file": f"{name}.cubin", "sha256": hashlib.sha256(data).hexdigest()})
    manifest = {"schema": 1, "abi": 1, "package": VERSION, "source": "5" * 64, "compiler": "a compiler 1.0"}
    manifest |= {"nvvm": "13.4", "ptxas": "12.9", "arch": built_for, "kernels": kernels, **changed}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8", newline="\n")
    return folder


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """A wheel of two architectures."""
    return pack("blackwell-rtx", {arch: build_of(tmp_path / arch, arch) for arch in ("sm_120a", "sm_121a")})


# The table


def test_the_table_is_read_without_the_package() -> None:
    """install.py loads it by its path, in a Python that has nothing installed."""
    code = "import importlib.util, sys; s = importlib.util.spec_from_file_location('f', sys.argv[1]); "
    code += "m = importlib.util.module_from_spec(s); s.loader.exec_module(m); "
    code += "print(m.arch_of((9, 0)), m.family_of('sm_103a'), m.wheel_name('hopper', '1.2.3'))"
    command = [sys.executable, "-I", "-S", "-c", code, str(ROOT / "kernels" / "families.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [
        "sm_90a",
        "blackwell-datacenter",
        "vc_attention_kernels_hopper-1.2.3-py3-none-any.whl",
    ]


@pytest.mark.parametrize(
    ("capability", "arch", "family"),
    [
        ((8, 9), "sm_89", "ada"),
        ((9, 0), "sm_90a", "hopper"),
        ((10, 0), "sm_100a", "blackwell-datacenter"),
        ((10, 3), "sm_103a", "blackwell-datacenter"),
        ((12, 0), "sm_120a", "blackwell-rtx"),
        ((12, 1), "sm_121a", "blackwell-rtx"),
    ],
)
def test_a_capability_has_one_arch_and_a_family(capability: tuple[int, int], arch: str, family: str) -> None:
    assert arch_of(capability) == arch and family_of(arch) == family


@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (10, 1), (11, 0), (13, 0)])
def test_other_capabilities_have_none(capability: tuple[int, int]) -> None:
    assert arch_of(capability) is None


def test_what_the_table_does_not_hold_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="sm_75 is not an architecture"):
        family_of("sm_75")
    for function in (package_name, lambda family: wheel_name(family, "1.0.0")):
        with pytest.raises(ValueError, match="turing is not a family"):
            function("turing")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_packed_under_its_name(tmp_path: Path, family: str) -> None:
    """All of its architectures, or those that --arch names."""
    folders = {arch: build_of(tmp_path / arch, arch) for arch in FAMILIES[family]}
    for archs in (FAMILIES[family], FAMILIES[family][:1]):
        made = pack(family, {arch: folders[arch] for arch in archs})
        assert (
            made.archs == archs
            and made.file == f"vc_attention_kernels_{family.replace('-', '_')}-{VERSION}-py3-none-any.whl"
        )
        with zipfile.ZipFile(io.BytesIO(made.data)) as archive:
            names = archive.namelist()
        tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
        assert tops == {package_name(family)}
        inside = {name.split("/")[1] for name in names if name.endswith(".cubin")}
        assert inside == set(archs)


def test_every_family_has_kernels() -> None:
    """`run.py wheels` skips an architecture that has none."""
    known = [arch for archs in FAMILIES.values() for arch in archs]
    assert set(known) == set(KERNELS)
    assert wheels.choose(None, list(KERNELS)) == known and wheels.choose(["sm_100a"], list(KERNELS)) == ["sm_100a"]
    with pytest.raises(ToolError, match=r"leaves .*sm_103a.* out"):
        wheels.choose(["sm_100a"], list(KERNELS), whole_families=True)


def test_cards_and_families_agree() -> None:
    """The two tables are for two questions; a card's family is the same in both."""
    for family in cards.FAMILIES:
        archs = {arch_of(capability) for capability in family.capabilities} - {None}
        assert archs == set(FAMILIES.get(family.key, ())), family.key
        assert not archs or family.modes, f"{family.key} has wheels, but no modes"
    assert set(FAMILIES) <= {family.key for family in cards.FAMILIES}


def test_every_kernel_of_the_catalogue_has_a_wheel_to_go_into() -> None:
    assert KERNELS and all(family_of(arch) for arch in KERNELS)


# The wheel


def test_the_name_and_the_metadata_are_the_standards(wheel: Wheel) -> None:
    name, version, _, tags = parse_wheel_filename(wheel.file)
    assert (name, str(version), {str(tag) for tag in tags}) == (
        "vc-attention-kernels-blackwell-rtx",
        VERSION,
        {"py3-none-any"},
    )
    archive = zipfile.ZipFile(io.BytesIO(wheel.data))
    info = f"vc_attention_kernels_blackwell_rtx-{VERSION}.dist-info"
    metadata = Metadata.from_email(archive.read(f"{info}/METADATA"))  # raises for an invalid field
    assert (metadata.name, str(metadata.version)) == (name, VERSION)
    assert metadata.license_expression == "Apache-2.0" and metadata.license_files == ["LICENSE"]
    assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes().replace(b"\r\n", b"\n")
    assert b"Apache License" in archive.read(f"{info}/licenses/LICENSE")[:200]
    assert b"\nTag: py3-none-any\n" in archive.read(f"{info}/WHEEL")
    assert metadata.requires_dist is None  # it must never bring or change a torch


def test_the_contents_are_the_builds_and_where_they_come_from(wheel: Wheel, tmp_path: Path) -> None:
    archive = zipfile.ZipFile(io.BytesIO(wheel.data))
    package = "vc_attention_kernels_blackwell_rtx"
    for arch in ("sm_120a", "sm_121a"):
        for file in ("manifest.json", "prepare_k.cubin", "attention_bf16.cubin"):
            assert archive.read(f"{package}/{arch}/{file}") == (tmp_path / arch / file).read_bytes()
    provenance = json.loads(archive.read(f"{package}/provenance.json"))
    assert provenance == {
        "schema": 1,
        "family": "blackwell-rtx",
        "version": VERSION,
        "source": "5" * 64,
        "compiler": "a compiler 1.0",
        "nvvm": "13.4",
        "ptxas": "12.9",
        "abi": 1,
        "archs": ["sm_120a", "sm_121a"],
    }
    (docstring,) = ast.parse(archive.read(f"{package}/__init__.py")).body
    assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)


def test_record_lists_every_file_with_its_hash(wheel: Wheel) -> None:
    archive = zipfile.ZipFile(io.BytesIO(wheel.data))
    (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
    rows = {path: (digest, size) for path, digest, size in csv.reader(archive.read(record).decode().splitlines())}
    assert set(rows) == set(archive.namelist()) and rows.pop(record) == ("", "")
    for path, (digest, size) in rows.items():
        data = archive.read(path)
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={expected}", str(len(data))), path
    names = archive.namelist()
    assert names[-1] == record and sorted(names[:-4]) == names[:-4]


def test_the_same_contents_give_the_same_bytes(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other folders, times, modes and time zones change nothing, and no compressor has a say."""
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1600000000")
    folders = {arch: build_of(tmp_path / "elsewhere" / arch, arch) for arch in ("sm_121a", "sm_120a")}
    for number, path in enumerate(sorted(tmp_path.glob("elsewhere/*/*"))):
        os.utime(path, (number * 1e6, number * 1e6))
        path.chmod(0o600)
    assert pack("blackwell-rtx", folders).data == wheel.data
    for entry in zipfile.ZipFile(io.BytesIO(wheel.data)).infolist():
        assert entry.compress_type == zipfile.ZIP_STORED and entry.date_time == (1980, 1, 1, 0, 0, 0)
        assert entry.create_system == 3 and entry.external_attr >> 16 == 0o100644


def test_pip_installs_it_and_nothing_of_it_has_to_run(wheel: Wheel, tmp_path: Path) -> None:
    file = tmp_path / wheel.file
    file.write_bytes(wheel.data)
    listing = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(file)], capture_output=True, text=True, check=True
    )
    assert "attention_bf16.cubin" in listing.stdout
    venv.create(tmp_path / "venv", with_pip=False)
    python = environment.interpreter(tmp_path / "venv")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", "--no-index", "--no-compile", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    code = (
        "import importlib.metadata as m, importlib.util as u, pathlib, sys; n = 'vc_attention_kernels_blackwell_rtx'; "
    )
    code += "print(m.version(n), pathlib.Path(u.find_spec(n).origin).parent, n in sys.modules)"
    done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=True)
    version, folder, imported = done.stdout.split()
    assert (version, imported) == (VERSION, "False")
    assert (Path(folder) / "sm_121a" / "attention_bf16.cubin").is_file()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "prepare_k.cubin").write_bytes(b"other"), "is not the file that was compiled"),
        (lambda folder: (folder / "prepare_k.cubin").unlink(), "not complete"),
        (lambda folder: (folder / "manifest.json").unlink(), "not complete"),
        (lambda folder: (folder / "manifest.json").write_text("null"), "not complete"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "lacks package"),
    ],
    ids=["damaged", "missing", "no manifest", "no object", "empty manifest"],
)
def test_an_incomplete_build_is_not_packed(tmp_path: Path, harm, words: str) -> None:
    folder = build_of(tmp_path / "sm_90a", "sm_90a")
    harm(folder)
    with pytest.raises(ToolError, match=words):
        pack("hopper", {"sm_90a": folder})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"arch": "sm_120a"}, "lacks a kernel of sm_90a"),
        ({"kernels": []}, "lacks a kernel of sm_90a"),
        ({"package": "0.0.1"}, "is of version 0.0.1"),
    ],
)
def test_another_build_is_not_packed(tmp_path: Path, changed: dict, words: str) -> None:
    with pytest.raises(ToolError, match=words):
        pack("hopper", {"sm_90a": build_of(tmp_path / "sm_90a", "sm_90a", **changed)})


@pytest.mark.parametrize("key", ["source", "compiler", "ptxas", "abi"])
def test_builds_that_do_not_belong_together_are_not_packed(tmp_path: Path, key: str) -> None:
    folders = {
        "sm_120a": build_of(tmp_path / "a", "sm_120a"),
        "sm_121a": build_of(tmp_path / "b", "sm_121a", **{key: 7}),
    }
    with pytest.raises(ToolError, match=f"are not of one build: their {key} differs"):
        pack("blackwell-rtx", folders)


# What is pinned


def test_the_pinned_wheels_are_of_these_sources() -> None:
    """The quick half of the comparison: it needs no compiler, so it runs on every machine."""
    pinned = read_pinned(ROOT / "kernels" / "wheels.json")
    assert pinned is not None
    advice = (
        "The wheels are pinned for other sources: run `python3 run.py wheels --write` and commit kernels/wheels.json."
    )
    build = importlib.util.spec_from_file_location("_build_of_this_test", ROOT / "kernels" / "build.py")
    assert build is not None and build.loader is not None
    module = importlib.util.module_from_spec(build)
    build.loader.exec_module(module)
    assert pinned["version"] == VERSION, advice
    assert {wheel["source"] for wheel in pinned["wheels"]} == {module.source_hash()}, advice
    expected = [family for family, archs in FAMILIES.items() if set(archs) & set(KERNELS)]
    assert [wheel["family"] for wheel in pinned["wheels"]] == expected, advice
    for wheel in pinned["wheels"]:
        assert wheel["file"] == wheel_name(wheel["family"], VERSION)
        assert wheel["archs"] == [arch for arch in FAMILIES[wheel["family"]] if arch in KERNELS]
        assert len(wheel["sha256"]) == 64 and wheel["size"] > 0
    requirements = (ROOT / "tools" / "requirements" / "compiler.txt").read_text(encoding="utf-8")
    for wheel in pinned["wheels"]:
        assert f"{wheel['compiler'].replace(' ', '==')};" in requirements, "wheels are pinned with the pinned compiler"


def test_what_was_written_is_what_is_compared(wheel: Wheel, tmp_path: Path) -> None:
    file = tmp_path / "wheels.json"
    assert differences(read_pinned(file), [wheel]) == ["kernels/wheels.json does not exist."]
    write_pinned(file, [wheel])
    pinned = read_pinned(file)
    assert differences(pinned, [wheel]) == []
    assert pinned is not None and set(pinned) == {"schema", "version", "wheels"}
    assert {"family", "file", "size", "sha256", "archs"} <= set(pinned["wheels"][0])
    write_pinned(tmp_path / "again.json", [wheel])
    assert (tmp_path / "again.json").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("source", "0" * 64, "blackwell-rtx: the sources of the kernels are not those of the pinned wheel"),
        ("compiler", "a compiler 0.9", r"blackwell-rtx: the compiler is not that .* \(a compiler 0.9 pinned, "),
        (
            "archs",
            ["sm_120a"],
            r"blackwell-rtx: the architectures are not .* \(sm_120a pinned, sm_120a, sm_121a built\)",
        ),
        ("size", 7, r"blackwell-rtx: the size is not the pinned one \(7 pinned, "),
        ("sha256", "0" * 64, "blackwell-rtx: the sha256 is not the pinned one"),
        ("family", "hopper", "blackwell-rtx: no wheel is pinned"),
    ],
)
def test_every_difference_is_named(wheel: Wheel, tmp_path: Path, key: str, value: object, words: str) -> None:
    write_pinned(tmp_path / "wheels.json", [wheel])
    pinned = read_pinned(tmp_path / "wheels.json")
    assert pinned is not None
    pinned["wheels"][0][key] = value
    found = differences(pinned, [wheel], complete=False)
    assert len(found) == 1
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found[0])


def test_wheels_too_many_and_another_version_are_differences(wheel: Wheel, tmp_path: Path) -> None:
    write_pinned(tmp_path / "wheels.json", [wheel])
    pinned = read_pinned(tmp_path / "wheels.json")
    assert pinned is not None
    pinned["version"] = "0.0.1"
    assert differences(pinned, [wheel]) == [f"The pinned version is 0.0.1, and pyproject.toml states {VERSION}."]
    pinned["version"] = VERSION
    assert differences(pinned, []) == ["blackwell-rtx: a wheel is pinned, and there are no kernels for it."]
    assert differences(pinned, [], complete=False) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "wheels": []}', '{"schema": 1, "wheels": [{}]}'])
def test_a_damaged_file_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "wheels.json").write_text(text, encoding="utf-8")
    with pytest.raises(ToolError, match=r"wheels.json cannot be read .* run.py wheels --write"):
        read_pinned(tmp_path / "wheels.json")


# The command


@pytest.mark.parametrize(
    ("system", "machine"), [("win32", "AMD64"), ("darwin", "arm64"), ("linux", "riscv64"), ("linux", "")]
)
def test_other_machines_get_a_sentence(system: str, machine: str) -> None:
    with pytest.raises(ToolError, match="exists for Linux on x86-64 and ARM64 only"):
        wheels.check_machine(system, machine)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_linux_machines_build(machine: str) -> None:
    wheels.check_machine("linux", machine)


def test_an_arch_without_kernels_is_named_and_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert wheels.choose(None, ["sm_90a", "sm_120a"]) == ["sm_90a", "sm_120a"]
    assert capsys.readouterr().err.splitlines() == [
        f"{arch} has no kernels yet: skipped." for arch in ("sm_89", "sm_100a", "sm_103a", "sm_121a")
    ]
    assert wheels.choose(["sm_121a", "sm_90a"], ["sm_90a"]) == ["sm_90a"]
    with pytest.raises(ToolError, match="Nothing to build: only sm_90a"):
        wheels.choose(["sm_121a"], ["sm_90a"])


def test_a_wrong_choice_is_refused() -> None:
    with pytest.raises(ToolError, match="--arch sm_80: the architectures are sm_89, ") as error:
        wheels.choose(["sm_80"], ["sm_90a"])
    assert error.value.status == 2
    with pytest.raises(ToolError, match="--arch leaves sm_121a out"):
        wheels.choose(["sm_120a", "sm_90a"], ["sm_90a", "sm_120a", "sm_121a"], whole_families=True)
    assert wheels.choose(["sm_90a"], ["sm_90a"], whole_families=True) == ["sm_90a"]


@pytest.fixture
def command(wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`run.py wheels` where compiling gives the kernels of `wheel` at once; returns (exit status, output folder)."""
    monkeypatch.setattr(wheels, "check_machine", lambda system, machine: None)
    monkeypatch.setattr(
        wheels.environment, "prepare", lambda *given, **named: environment.Environment(Path("py"), None)
    )
    monkeypatch.setattr(wheels, "with_kernels", lambda python: ["sm_120a", "sm_121a"])
    monkeypatch.setattr(wheels, "build", lambda python, archs: [wheel])
    monkeypatch.setattr(wheels, "PINNED", tmp_path / "wheels.json")

    def run(*given: str) -> int:
        parser = argparse.ArgumentParser()
        wheels.add_arguments(parser)
        return wheels.main(parser.parse_args([*given, "--out", str(tmp_path / "out")]))

    return run


def test_write_then_check(command, wheel: Wheel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 0 and "does not exist" in capsys.readouterr().out
    assert command("--check") == 1
    assert not (tmp_path / "wheels.json").exists()
    assert command("--write") == 0
    assert command("--check") == 0 and "The same as in kernels/wheels.json." in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == [wheel.file]
    assert (tmp_path / "out" / wheel.file).read_bytes() == wheel.data


def test_check_names_the_difference(command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("--write")
    text = (tmp_path / "wheels.json").read_text().replace("a compiler 1.0", "a compiler 0.9")
    (tmp_path / "wheels.json").write_text(text)
    capsys.readouterr()
    assert command("--check") == 1
    out = capsys.readouterr().out
    assert "blackwell-rtx: the compiler is not that of the pinned wheel (a compiler 0.9 pinned" in out
    assert "run.py wheels --write" in out
    assert command() == 0  # without --check it is a remark


def test_the_tag_must_be_the_versions(command) -> None:
    with pytest.raises(ToolError, match=rf"The tag is v9.9.9, and .* version {VERSION}"):
        command("--tag", "v9.9.9")
    assert command("--tag", f"v{VERSION}") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler exists for Linux only")
def test_a_python_without_the_compiler_is_a_sentence(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = environment.interpreter(tmp_path / "venv")
    command = [sys.executable, str(ROOT / "run.py"), "wheels", "--python", str(python), "--arch", "sm_90a"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"run.py wheels: {python} has no nvidia-cutlass-dsl. Install ")
