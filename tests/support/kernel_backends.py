"""pytest plugin: where the numeric tests of the kernels run, and the compiled kernels.

The fixture `backend` runs a test twice: on the specification on the CPU, and, marked `gpu`, on the prebuilt kernels on
an sm_90 card. The test is the same; what differs is stated once, in `Backend`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from vc_attention import kernels
from vc_attention.kernels import Plan, Reason
from vc_attention.kernels.build import source_hash
from vc_attention.kernels.cute.catalogue import KERNELS
from vc_attention.kernels.launch import attend, call, prepare
from vc_attention.kernels.launch.manifest import Manifest, read_manifest

ROOT = Path(__file__).resolve().parents[2]
ARCH = "sm_90a"
NO_COMPILER = "cubins: nvidia-cutlass-dsl is not installed here, and no --cubins DIR was given"
WRONG_CARD = "gpu: the card is not of compute capability 9.0"


@dataclass(frozen=True)
class Backend:
    """One way to run `kernels.attention` and `kernels.group`, and the tensors that it takes.

    name: of the backend. device: of its tensors. dtype: of those that a test does not cast itself. dim: its only head
    dimension, or None for any.
    """

    name: str
    device: str
    dtype: torch.dtype
    dim: int | None = None

    @property
    def rounding(self) -> float:
        """Relative error of storing one number in `dtype`; inputs and outputs are rounded so, whatever runs between."""
        return torch.finfo(self.dtype).eps / 2

    def qkv(
        self, lq: int = 16, lkv: int = 200, heads: int = 1, dim: int = 64, batch: int = 1, seed: int = 0
    ) -> list[Tensor]:
        """Gaussian q [B, H, Lq, D], k and v [B, H, Lkv, D]. dim: D, where the backend takes more than one."""
        g = torch.Generator().manual_seed(seed)
        shapes = [(batch, heads, length, self.dim or dim) for length in (lq, lkv, lkv)]
        return [torch.randn(shape, generator=g).to(self.device, self.dtype) for shape in shapes]

    def shuffled_labels(self, lkv: int, heads: int = 1, batch: int = 1, groups: int = 7, seed: int = 3) -> Tensor:
        """Random labels, which send the last tokens (the ragged tail) into every block."""
        g = torch.Generator().manual_seed(seed)
        return torch.randint(groups, (batch, heads, lkv), generator=g).to(self.device, torch.uint8)

    def values(self, v: Tensor) -> Tensor:
        """`v` [B, H, L, D] as this backend groups it: 16 bit, and zeros in the channels that it has and `v` has not.

        Zeros change no distance, no mean and no label.
        """
        missing = (self.dim or v.shape[-1]) - v.shape[-1]
        v = v if v.dtype.itemsize == 2 else v.to(self.dtype)
        return torch.nn.functional.pad(v, (0, missing)).to(self.device)

    def require(self, plan: Plan, q: Tensor) -> None:
        """Skip the test, in the kernels' own words, where they do not have `plan` for tensors like `q`."""
        if self.name == "cubin":
            refusal = call.refusal(q.device, plan, q.shape[-1], q.dtype)
            # Kernels that are damaged or that the driver refuses are a failure, not something that is not there.
            assert refusal is None or refusal.code in ("plan", "head_dim"), refusal.text
            if refusal is not None:
                pytest.skip(f"gpu: {refusal.text}")

    def run(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, labels: Tensor | None = None, **options) -> Tensor:
        """`kernels.attention` here."""
        self.require(plan, q)
        return kernels.attention(q, k, v, plan, labels, backend=self.name, **options)

    def group(self, v: Tensor, groups: int = 0, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(labels, centroids) of `kernels.group` here. previous: centroids that the search starts from."""
        if self.name == "cubin" and v.dtype not in prepare.KINDS:
            pytest.skip(f"gpu: The grouping kernels take bf16 and fp16, not {str(v.dtype)[6:]}.")
        start = None if previous is None else kernels.Labels(torch.empty(0, dtype=torch.uint8), previous)
        found = kernels.group(v, groups, start)
        return found.labels, found.centroids


SPEC = Backend("spec", "cpu", torch.float32)
CUBIN = Backend("cubin", "cuda", torch.bfloat16, dim=128)


@pytest.fixture(params=[SPEC, pytest.param(CUBIN, marks=pytest.mark.gpu)], ids=["spec", "gpu-cubin"])
def backend(request) -> Backend:
    """The specification on the CPU, then the prebuilt kernels on the GPU."""
    if request.param.name == "cubin":
        request.getfixturevalue("only_kernels")
    return request.param


@pytest.fixture
def only_kernels(gpu_kernels, monkeypatch):
    """`gpu_kernels`, and `kernels.group` fails where it would fall back to the specification."""

    def stand_in(*arguments: object) -> None:
        raise AssertionError("The grouping kernels did not run: the specification was asked to stand in.")

    monkeypatch.setattr("vc_attention.kernels.grouping.spec_group", stand_in)
    return gpu_kernels


def compile_kernels(checkout: Path, folder: Path, only: str = "", arch: str = ARCH, trial: str = "") -> None:
    """Run the build of `checkout` in a process of its own, as the compiler takes its target from the environment."""
    command = [sys.executable, str(checkout / "kernels" / "build.py"), str(folder), "--only", only, "--ptx"]
    command += ["--trial", trial]
    done = subprocess.run(command, env={**os.environ, "CUTE_DSL_ARCH": arch}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def has_compiler() -> bool:
    """Whether kernels can be compiled here."""
    return importlib.util.find_spec("cutlass") is not None


def _given(config: pytest.Config) -> Path | None:
    """The folder with the manifest that `--cubins` names, itself or by its `sm_90a`."""
    option = config.getoption("--cubins")
    if option is None:
        return None
    for folder in (Path(option).resolve() / ARCH, Path(option).resolve()):
        if (folder / "manifest.json").is_file():
            return folder
    raise pytest.UsageError(f"--cubins {option}: there is no manifest.json, neither there nor in its {ARCH}.")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Whether the kernels of `--cubins` are those of this checkout: results of others say little about it."""
    folder = _given(config)
    if folder is None:
        return None
    manifest = read_manifest(folder)
    if not isinstance(manifest, Manifest):
        return f"cubins: {manifest.text}"
    same = manifest.source == source_hash()
    return f"cubins: {folder}, built from {'the sources of this checkout' if same else 'OTHER sources than these'}"


@pytest.fixture(scope="session")
def cubins(request, tmp_path_factory) -> Path:
    """Folder `sm_90a` with cubins and manifest: a copy of what `--cubins` names, or compiled here once."""
    folder = tmp_path_factory.mktemp("cubins") / ARCH
    given = _given(request.config)
    if given is not None:
        return shutil.copytree(given, folder)
    if not has_compiler():
        pytest.skip(NO_COMPILER)
    compile_kernels(ROOT, folder)
    return folder


@pytest.fixture(scope="session")
def builds(request, cubins, tmp_path_factory) -> dict[str, Path]:
    """Folder of the compiled kernels and PTX of every architecture that has any: those that `--cubins` holds by the
    architecture's name, others compiled here."""
    option, folders = request.config.getoption("--cubins"), {ARCH: cubins}
    for arch in KERNELS:
        if arch not in folders:
            folders[arch] = tmp_path_factory.mktemp(arch) / arch
            if option is not None and (Path(option) / arch / "manifest.json").is_file():
                shutil.copytree(Path(option) / arch, folders[arch])
            elif has_compiler():
                compile_kernels(ROOT, folders[arch], arch=arch)
            else:
                pytest.skip(NO_COMPILER)
    return folders


@pytest.fixture(scope="session")
def gpu_kernels(cubins):
    """The `cubins` as the kernels that the library finds on this machine's sm_90 card."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(WRONG_CARD)
    installed = attend.PREBUILT
    attend.PREBUILT = cubins.parent
    attend.library.cache_clear()
    found = call.kernels_for(torch.device("cuda"))
    assert not isinstance(found, Reason), found.text
    yield cubins
    attend.PREBUILT = installed
    attend.library.cache_clear()
