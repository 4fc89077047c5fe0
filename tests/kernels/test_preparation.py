"""Preparation and grouping kernels without a GPU: what the compiler made of them, and what the launcher asks for."""

from __future__ import annotations

import itertools
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vc_attention.kernels import Plan
from vc_attention.kernels.cute import selection
from vc_attention.kernels.launch import prepare as prep
from vc_attention.kernels.launch.manifest import Manifest, read_manifest
from vc_attention.kernels.reasons import Reason

#: One process compiles the kernels that these tests look at.
pytestmark = pytest.mark.xdist_group("cubins")

PASSES = re.compile(
    r"^(q|k|v|[qk]_fp8|k_sum|k_mean|v_stats|[qkv]4|[qk]4_amax|v4_stats|sort_\w+|group_\w+)(_bf16|_fp16)?(_gather|_means|_ranked)*$"
)
ARCHS = ("sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
#: Those with pairs of blocks in a tile of keys.
PAIRS = ("sm_90a", "sm_100a", "sm_103a")
PLANS = [Plan(), Plan(key_means=True), Plan().without_smoothing(), Plan(demean=False, key_means=True)]


def entries(folder):
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    return {name: entry for name, entry in manifest.kernels.items() if PASSES.match(name)}


class FakeKernel:
    def __init__(self, entry, launched):
        self.entry, self.launched = entry, launched

    def launch(self, grid, arguments, stream=None):
        assert len(arguments) == len(self.entry.params)
        for value, (_, size), name in zip(arguments, self.entry.params, self.entry.arguments, strict=True):
            assert value is None or isinstance(value, torch.Tensor) == (size == 8 and not name.startswith("stride"))
        assert all(n > 0 for n in grid)
        self.launched.append((self.entry.name, grid))


class FakeKernels:
    """A library over a manifest that checks launches against it and runs nothing."""

    def __init__(self, kernels, arch="sm_90a"):
        self.kernels, self.launched = kernels, []
        self.manifest = SimpleNamespace(arch=arch)

    def kernel(self, name):
        return FakeKernel(self.kernels[name], self.launched)


@pytest.fixture(params=ARCHS)
def kernels(request, builds, monkeypatch):
    monkeypatch.setattr(prep.Queue, "current", classmethod(lambda cls, library: cls(library, 0)))
    return FakeKernels(entries(builds[request.param]), request.param)


def test_every_launch_is_of_a_built_kernel_and_fits_its_parameters(kernels):
    arch = kernels.manifest.arch
    eight = [replace(plan, scores=scores) for plan in PLANS for scores in selection.scores_of(arch)]
    four = [replace(plan, scores="nvfp4", values="nvfp4", probability="exp2") for plan in PLANS]
    plans = [plan for plan in eight + four * (arch == "sm_120a") if selection.images_of(arch, plan)]
    assert len(plans) == {"sm_100a": 8, "sm_120a": 8}.get(arch, 4)
    for plan, dtype, grouped in itertools.product(plans, (torch.bfloat16, torch.float16), (False, True)):
        q, k, v = (torch.zeros(1, 2, n, 128, dtype=dtype) for n in (200, 1100, 1100))
        labels = torch.zeros(1, 2, 1100, dtype=torch.uint8) if grouped else None
        assert not isinstance(prep.prepare(kernels, q, k, v, plan, labels), Reason)
        assert not isinstance(prep.group(kernels, v), Reason)
        assert not isinstance(prep.group(kernels, v, 0, torch.zeros(1, 2, 24, 128)), Reason)
    assert {name for name, _ in kernels.launched} == set(kernels.kernels), "a kernel is built that nothing launches"
    form = "_fp8" * (arch == "sm_103a")
    assert (f"q{form}_bf16", (2, 2, 1)) in kernels.launched
    assert (f"k{form}_bf16", (2, 10 if arch in PAIRS else 9, 1)) in kernels.launched


@pytest.mark.parametrize("arch", ARCHS)
def test_no_local_memory_and_no_slow_path(builds, arch, nvdisasm):
    for name in entries(builds[arch]):
        # Elsewhere only what writes images of its own, in one of the two types.
        if arch not in PAIRS and not re.match(r"([qkv]4?|[qk]4_amax|v4_stats)_bf16", name):
            continue
        command = [nvdisasm, "-c", str(builds[arch] / f"{name}.cubin")]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        count = lambda pattern, text=text: len(re.findall(pattern, text))  # noqa: E731
        assert count(r"\b(LDL|STL)\b") == 0, f"{name} spills registers"
        if re.match(r"[qk](_fp8)?_(bf16|fp16)", name):
            assert count(r"\bHMMA\.16816") == 16, f"{name}: the rotation is not on the tensor core"
            packed = r"\bF2FP\.SATFINITE\.E4M3" if "fp8" in name else r"\bF2IP\.S8"
            assert count(packed) == 32, f"{name}: codes are not packed in pairs"
            assert count(r"\bLDG\.E(\.\w+)*\.128") >= 8
        if re.match(r"v_(bf16|fp16)", name):
            assert count(r"\bF2FP\.SATFINITE\.E4M3") == 32
            assert count(r"\bLDG\.E(\.\w+)*\.128") >= 8
        if re.match(r"[qkv]4_(bf16|fp16)", name):
            # 64 elements, each once with 6 and once with 4 as the top of its group.
            assert count(r"\bF2FP\.SATFINITE\.E2M1") == 64
            assert count(r"\bHMMA\.16816") == (0 if name.startswith("v") else 16)
        if name.startswith("group_assign"):
            assert count(r"\bHMMA\.16816") == 32


@pytest.mark.parametrize("arch", ARCHS)
def test_registers_leave_room_for_two_ctas(builds, arch):
    for name, entry in entries(builds[arch]).items():
        threads = entry.block[0]
        assert entry.registers > 0
        assert entry.registers * threads * (2 if threads == 256 else 1) <= 65536, name
        # 99 KB is what a CTA may have on cards of compute capability 8.9 and 12.0.
        assert entry.shared <= 99 * 1024, name


def test_b300_runs_the_ptx_of_b200(builds):
    """Kernel by kernel the same text but for the target, so that executing one shows what both do.

    All but exp2's attention, some of whose exponentials are polynomials on B200: both are executed
    (`tests/ptx/test_kernels_sm100.py`).
    """

    def text(arch, name):
        lines = (builds[arch] / f"{name}.ptx").read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if line.startswith(".target ")] == [f".target {arch}"]
        return [line for line in lines if not line.startswith(".target ")]

    names = {arch: {path.stem for path in builds[arch].glob("*.ptx")} for arch in ("sm_100a", "sm_103a")}
    int8 = {name for name in names["sm_100a"] if re.match(r"(q|k)_(bf16|fp16)|attention_sm100_int8", name)}
    assert names["sm_103a"] == names["sm_100a"] - int8
    for name in names["sm_103a"]:
        same = text("sm_100a", name) == text("sm_103a", name)
        assert same != name.startswith("attention_sm100_fp8_exp2"), name


def test_rows_that_the_kernels_cannot_read_are_copied():
    x = torch.zeros(1, 2, 10, 136, dtype=torch.bfloat16)
    assert prep.rows_of(x[..., 8:]) is not None
    assert prep.rows_of(x[..., 8:]).data_ptr() == x[..., 8:].data_ptr()
    assert prep.rows_of(x[..., 4:132]).is_contiguous()
    assert prep.rows_of(torch.zeros(1, 2, 128, 10, dtype=torch.bfloat16).transpose(2, 3)).stride(3) == 1


def test_what_is_not_supported_has_a_reason():
    q = torch.zeros(1, 1, 4, 128, dtype=torch.bfloat16)
    for plan, x, code in (
        (Plan(clip_means=True), q, "plan"),
        (Plan(scores="fp8"), q, "plan"),
        (Plan(), q.float(), "dtype"),
        (Plan(), q[..., :64], "head_dim"),
    ):
        found = prep.supported(x, x, x, plan, "sm_90a")
        assert found is not None and found.code == code
    for plan, archs in (
        (Plan(scores="fp8"), ("sm_100a", "sm_103a")),
        (Plan(), ("sm_89", "sm_90a", "sm_100a", "sm_120a")),
        (Plan(key_means=True), ("sm_89", "sm_90a", "sm_100a", "sm_120a")),
        (Plan(scores="fp8", key_means=True), ("sm_100a", "sm_103a")),
        (Plan(scores="fp8", score_groups="per_thread"), ()),
    ):
        assert tuple(arch for arch in ARCHS if prep.supported(q, q, q, plan, arch) is None) == archs
    with pytest.raises(ValueError, match="1 to 256"):
        prep.group(None, q, 300)


@pytest.mark.parametrize("skipped", range(1, 8))
def test_rows_at_an_odd_address_are_copied(skipped):
    """A contiguous view at any offset: `contiguous()` would hand it back as it is, and 16-byte loads would fault."""
    flat = torch.randn(skipped + 2 * 3 * 5 * 128).to(torch.bfloat16)
    view = flat[skipped:].view(2, 3, 5, 128)
    rows = prep.rows_of(view)
    assert view.is_contiguous() and torch.equal(rows, view)
    assert rows.data_ptr() % 16 == 0 and (rows is view) == (view.data_ptr() % 16 == 0)
