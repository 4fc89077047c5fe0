"""A release: the workflow files, what the registry is told, and the registry's archive at work.

What the archive may hold is in test_shipped.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import registry_archive
import yaml
from vc_attention.kernels.families import FAMILIES, wheel_name
from vc_attention.tools import comfyui, wheels
from vc_attention.tools.wheel_family import version_here

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def workflow(name: str) -> dict:
    """A workflow file; its `on` is under True, which is how YAML 1.1 reads that word."""
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))


def steps(content: dict) -> list[dict]:
    """All steps of all jobs."""
    return [step for job in content["jobs"].values() for step in job.get("steps", [])]


# The workflow files


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_every_action_is_pinned_to_a_commit(file: Path) -> None:
    """A tag can be moved to other code, a commit cannot."""
    found = re.findall(r"^\s*(?:- )?uses: (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    for line in found:
        assert line.startswith("./") or re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # \S.*", line), line


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_rights_are_the_least(file: Path) -> None:
    content = workflow(file.name)
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        expected = {"contents": "write"} if (file.name, name) == ("release.yml", "github") else None
        assert job.get("permissions") == expected, name
    for step in steps(content):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_every_job_can_run(file: Path) -> None:
    jobs = workflow(file.name)["jobs"]
    for name, job in jobs.items():
        assert set(job.get("needs", [])) <= set(jobs) - {name}
        if "uses" in job:
            called = yaml.safe_load((ROOT / job["uses"]).read_text(encoding="utf-8"))
            assert "workflow_call" in called[True]
            continue
        assert job["runs-on"].startswith("ubuntu-") and job["timeout-minutes"] > 0
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_every_command_exists(file: Path) -> None:
    """Lines for the shell are valid, hold nothing that GitHub pastes in, and name commands and options that exist."""
    for step in steps(workflow(file.name)):
        script = step.get("run", "")
        assert "${{" not in script, "values come through env, so that none of them can become code"
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for line in script.splitlines():
            words = shlex.split(line)
            for name in re.findall(r"\$(\w+)", line):
                assert name in step["env"], f"{line}: {name}"
            if words[:2] == ["python3", "run.py"]:
                done = subprocess.run(
                    [sys.executable, "run.py", words[2], "--help"],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, done.stderr
                assert all(word in done.stdout for word in words if word.startswith("--")), line
            elif words[0].startswith("."):
                assert os.access(ROOT / words[0], os.X_OK), line
            else:
                assert words[0] == "gh", line


def test_ci_is_the_newcomers_command() -> None:
    content = workflow("test.yml")
    assert set(content[True]) == {"push", "pull_request", "workflow_call"}
    assert [step["run"] for step in steps(content) if "run" in step] == [".ci/run"]


def test_a_release_is_tested_compared_attached_and_then_published() -> None:
    content = workflow("release.yml")
    (pattern,) = content[True]["push"]["tags"]
    assert pattern == "v[0-9]+.[0-9]+.[0-9]+" and re.fullmatch(r"\d+\.\d+\.\d+", version_here())
    jobs = content["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/test.yml"
    assert set(jobs["github"]["needs"]) == {"test", "wheels"} and jobs["registry"]["needs"] == ["github"]
    (build,) = [step["run"] for step in jobs["wheels"]["steps"] if "run" in step]
    assert "--check" in build and '--tag "$TAG"' in build
    (attach,) = [step["run"] for step in jobs["github"]["steps"] if "run" in step]
    created, uploaded, published = attach.splitlines()
    assert "--draft" in created and "--verify-tag" in created
    assert uploaded.endswith("dist/*.whl kernels/wheels.json") and published.endswith("--draft=false")


def test_the_wheels_reach_the_release_and_the_registry() -> None:
    jobs = workflow("release.yml")["jobs"]

    def artifact(job: str, action: str) -> dict:
        (step,) = [s for s in jobs[job]["steps"] if s.get("uses", "").startswith(f"actions/{action}-artifact@")]
        return step["with"]

    uploaded = artifact("wheels", "upload")
    assert uploaded["path"] == "dist/*.whl" and uploaded["if-no-files-found"] == "error"
    assert artifact("github", "download") == {"name": uploaded["name"], "path": "dist"}
    assert artifact("registry", "download") == {"name": uploaded["name"], "path": "wheels"}
    assert PROJECT["tool"]["comfy"]["includes"] == ["wheels"]


def test_only_the_last_step_sees_the_registrys_secret() -> None:
    for file in WORKFLOWS:
        text = file.read_text(encoding="utf-8")
        assert text.count("secrets.") == (file.name == "release.yml"), file.name
    registry = workflow("release.yml")["jobs"]["registry"]
    publish = registry["steps"][-1]
    assert publish["uses"].startswith("Comfy-Org/publish-node-action@")
    assert publish["with"]["personal_access_token"] == "${{ secrets.REGISTRY_ACCESS_TOKEN }}"
    # the action's own checkout would remove the wheels, and is not pinned
    assert publish["with"]["skip_checkout"] == "true"
    owner_and_name = urlsplit(PROJECT["project"]["urls"]["Repository"]).path.strip("/")
    assert registry["if"] == f"github.repository == '{owner_and_name}'"


# What the registry is told


def test_the_registry_accepts_the_description() -> None:
    project, comfy = PROJECT["project"], PROJECT["tool"]["comfy"]
    name = project["name"]
    assert len(name) < 100 and re.fullmatch(r"[a-z](?:[-_.]?[a-z0-9])*", name) and "comfyui" not in name
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["license"] == {"file": "LICENSE"} and (ROOT / "LICENSE").is_file()
    assert 20 <= len(project["description"]) <= 200
    assert re.fullmatch(r"[a-z0-9-]+", comfy["PublisherId"]) and comfy["DisplayName"] == "VC-Attention"
    assert re.fullmatch(r">=\d+\.\d+\.\d+", comfy["requires-comfyui"])
    assert set(project["classifiers"]) == {"Operating System :: OS Independent", "Environment :: GPU :: NVIDIA CUDA"}


def test_the_addresses_are_of_one_repository() -> None:
    urls = PROJECT["project"]["urls"]
    repository = urls["Repository"]
    assert repository.startswith("https://github.com/") and repository.count("/") == 4
    assert all(address.startswith(repository) for address in urls.values())
    assert set(urls) == {"Repository", "Documentation", "Issues"}  # the names that the registry reads
    assert f"git clone {repository}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_icon_is_a_picture_of_this_repository() -> None:
    prefix = PROJECT["project"]["urls"]["Repository"] + "/raw/main/"
    icon = PROJECT["tool"]["comfy"]["Icon"]
    assert icon.startswith(prefix)
    text = (ROOT / icon.removeprefix(prefix)).read_text(encoding="utf-8")
    width, height = re.search(r'<svg [^>]*width="(\d+)" height="(\d+)"', text).groups()
    assert int(width) <= 800 and int(height) <= 400
    assert not re.search(r"<script|\son\w+=", text)


@pytest.mark.comfy
def test_comfyui_reads_the_description() -> None:
    from comfy_config.config_parser import extract_node_configuration

    told = extract_node_configuration(str(ROOT))
    assert (told.project.name, told.project.version) == ("vc-attention", version_here())
    assert told.project.supported_os == ["OS Independent"]
    assert told.project.supported_accelerators == ["GPU :: NVIDIA CUDA"]
    assert told.project.urls.repository == PROJECT["project"]["urls"]["Repository"]
    assert told.tool_comfy.publisher_id == "vc-attention" and told.tool_comfy.includes == ["wheels"]


# The registry's archive at work


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack as ComfyUI Manager unpacks it, in a folder whose name needs care, with a wheel that came with it."""
    base = tmp_path_factory.mktemp("Comfy UI \u00dc")
    wheels_folder = base / "wheels"
    wheels_folder.mkdir()
    (wheels_folder / wheel_name("hopper", version_here())).write_bytes(b"stands for the wheel")
    archive = registry_archive.write(base / "node.zip", {"wheels": wheels_folder})
    folder = base / "custom_nodes" / "vc-attention"
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    return folder


def test_the_archive_has_the_wheels_and_what_names_them(installed: Path) -> None:
    assert (installed / "wheels" / wheel_name("hopper", version_here())).is_file()
    pinned = json.loads((installed / "kernels" / "wheels.json").read_text(encoding="utf-8"))
    assert {wheel["family"] for wheel in pinned["wheels"]} <= set(FAMILIES)
    assert not list(installed.rglob("*.cubin")) and not (installed / "kernels" / "prebuilt").exists()


def test_the_registrys_own_lint_is_content(installed: Path) -> None:
    """`comfy node publish` runs these rules of ruff and warns of what they find; it means to refuse it later."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "S102,S307,E702", str(installed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_install_py_runs_there(installed: Path) -> None:
    """In a Python that sees no installed package, from another folder, as ComfyUI Manager may run it."""
    command = [sys.executable, "-S", "-s", str(installed / "install.py"), "--dry-run"]
    done = subprocess.run(command, cwd=installed.parent, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.strip()


def test_the_sources_of_the_kernels_are_complete_there(installed: Path) -> None:
    """Whoever has the compiler can build from the archive: it is the source that the pinned wheels name."""
    command = [sys.executable, "-B", str(installed / "kernels" / "build.py"), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == wheels.with_kernels(Path(sys.executable))
    code = "import sys; sys.path.insert(0, sys.argv[1]); import build; print(build.source_hash())"
    command = [sys.executable, "-B", "-c", code, str(installed / "kernels")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    pinned = json.loads((ROOT / "kernels" / "wheels.json").read_text(encoding="utf-8"))
    assert {wheel["source"] for wheel in pinned["wheels"]} == {done.stdout.strip()}


#: ComfyUI's own loader of custom nodes on the folder in argv, then one attention call of the loaded library.
_LOAD = """
import asyncio, json, sys
comfyui, folder, base = sys.argv[1:]
sys.path.insert(0, comfyui)
sys.argv = ["main.py", "--cpu", "--base-directory", base]
import comfy.options
comfy.options.enable_args_parsing()
import nodes
before = set(nodes.NODE_CLASS_MAPPINGS)
loaded = asyncio.run(nodes.load_custom_node(folder, module_parent="custom_nodes"))
name = folder.replace(".", "_x_")
kernels = sys.modules[name + ".kernels"]
import torch
q, k, v = torch.randn(3, 1, 2, 300, 128, generator=torch.Generator().manual_seed(0))
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
error = (kernels.attention(q, k, v, kernels.FAITHFUL, backend="spec") - exact).norm() / exact.norm()
ours = [module.__file__ for key, module in sys.modules.items() if key.startswith(name)]
print(json.dumps({"loaded": loaded, "nodes": sorted(set(nodes.NODE_CLASS_MAPPINGS) - before), "error": error.item(),
                  "files": ours, "web": nodes.EXTENSION_WEB_DIRS}))
"""


@pytest.mark.comfy
@pytest.mark.timeout(300)
def test_comfyui_loads_the_archive(installed: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    directory = Path(request.config.getoption("--comfyui") or comfyui.CACHE / f"comfyui-{comfyui.VERSION}").resolve()
    variables = comfyui.python_environment(Path(sys.executable), directory)
    done = subprocess.run(
        [sys.executable, "-B", "-c", _LOAD, str(directory), str(installed), str(tmp_path)],
        cwd=tmp_path, env=variables, capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loaded"] is True and "VCAttentionPatch" in found["nodes"]
    assert len(found["files"]) > 20 and all(Path(file).is_relative_to(installed) for file in found["files"])
    assert Path(found["web"][installed.name]).is_relative_to(installed)
    assert 0 < found["error"] < 0.05  # low bit, and about right
