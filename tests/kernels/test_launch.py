"""The launcher without a GPU: every failure is a reason, and what reaches the driver is what the manifest says."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
import torch
from stub_driver import NoDevice, Stream, StubDriver, kernel_entry, stub_cubin
from vc_attention.kernels import FAITHFUL, FAST, FOUR_BIT, PRESETS, Plan
from vc_attention.kernels.cute.catalogue import KERNELS
from vc_attention.kernels.cute.reference import prepare
from vc_attention.kernels.cute.selection import preset
from vc_attention.kernels.launch import driver as driver_module
from vc_attention.kernels.launch import loader
from vc_attention.kernels.launch.abi import ABI
from vc_attention.kernels.launch.attend import attend, kernel_name, supports
from vc_attention.kernels.launch.driver import Driver
from vc_attention.kernels.launch.images import allocate, image_shapes
from vc_attention.kernels.launch.loader import Kernel, Library, load_library
from vc_attention.kernels.launch.manifest import KernelEntry, Manifest, read_cubin, read_manifest
from vc_attention.kernels.reasons import Reason

CUBIN = stub_cubin("kernel_k")


def manifest_data(**changes):
    kernel = kernel_entry("k", CUBIN)
    data = {"schema": 1, "abi": ABI, "package": "0.1.0", "source": "0" * 64, "arch": "sm_90a", "kernels": [kernel]}
    return {**data, **changes}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest_data()))
    (tmp_path / "k.cubin").write_bytes(CUBIN)
    return tmp_path


def entry_of(folder) -> tuple[Manifest, KernelEntry]:
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    return manifest, manifest.kernels["k"]


def test_manifest_is_read(folder):
    manifest, entry = entry_of(folder)
    assert manifest.capability == (9, 0)
    assert entry.params == ((0, 8), (8, 4), (12, 4))
    assert read_cubin(manifest, entry) == CUBIN


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "kernels_damaged"),
        ("{", "kernels_damaged"),
        ("[]", "kernels_damaged"),
        (json.dumps(manifest_data(abi=ABI + 1)), "kernels_version"),
        (json.dumps(manifest_data(schema=99)), "kernels_version"),
        (json.dumps(manifest_data(kernels=[{}])), "kernels_damaged"),
        (json.dumps(manifest_data(arch="hopper")), "kernels_damaged"),
        (json.dumps(manifest_data(arch=None)), "kernels_damaged"),
    ],
)
def test_bad_manifests_are_reasons(tmp_path, text, code):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    reason = read_manifest(tmp_path)
    assert isinstance(reason, Reason)
    assert reason.code == code


def test_changed_or_missing_cubins_are_reasons(folder):
    manifest, entry = entry_of(folder)
    (folder / "k.cubin").write_bytes(CUBIN + b"!")
    assert read_cubin(manifest, entry).code == "kernels_damaged"
    (folder / "k.cubin").unlink()
    assert read_cubin(manifest, entry).code == "kernels_damaged"


def load(folder, monkeypatch, stub, **changes) -> Kernel:
    """The kernel `k` of `folder`, through every check of the loader."""
    monkeypatch.setattr(loader.torch.cuda, "device", NoDevice)
    if changes:
        data = manifest_data(kernels=[kernel_entry("k", CUBIN, **changes)])
        (folder / "manifest.json").write_text(json.dumps(data))
    kernel = Library(Driver(stub), read_manifest(folder), 0).kernel("k")
    assert isinstance(kernel, Kernel), kernel
    return kernel


def values(launched) -> tuple[int, int, float]:
    """Pointer, whole number and fp32 of one launch."""
    return tuple(
        struct.unpack(kind, data)[0] for kind, data in zip(("<Q", "<I", "<f"), launched.arguments, strict=True)
    )


@pytest.mark.parametrize("cluster", [1, 2])
def test_launch_passes_what_the_manifest_says(folder, monkeypatch, cluster):
    stub = StubDriver()
    kernel = load(folder, monkeypatch, stub, cluster=cluster, shared=5000, block=[96, 2, 1])
    x = torch.zeros(4)
    assert kernel.launch((8, 3, 1), (x, 11, 0.5), stream=42) is None
    assert kernel.launch((2, 1, 1), (None, 2**31 - 1, -1.5), stream=43) is None
    # A whole number where the parameter was seen to be fp32 stays fp32.
    assert kernel.launch((2, 1, 1), (None, 0, 3), stream=43) is None
    first, second, third = stub.launched
    assert first[:6] == ("kernel_k", (8, 3, 1), (96, 2, 1), 5000, 42, cluster)
    assert second[:6] == ("kernel_k", (2, 1, 1), (96, 2, 1), 5000, 43, cluster)
    assert values(first) == (x.data_ptr(), 11, 0.5)
    assert values(second) == (0, 2**31 - 1, -1.5)
    assert values(third) == (0, 0, 3.0)
    with pytest.raises(ValueError):
        kernel.launch((1, 1, 1), (x, 11), stream=42)


def test_a_launch_without_a_stream_takes_torchs_own(folder, monkeypatch):
    stub = StubDriver(context=0)
    monkeypatch.setattr(loader.torch.cuda, "current_stream", lambda device: Stream(91))
    assert load(folder, monkeypatch, stub).launch((1, 1, 1), (None, 1, 1.0)) is None
    assert stub.launched[0].stream == 91
    assert stub.asked.count("cuCtxSetCurrent") == 2  # when the kernel was loaded and when it was launched


def test_a_launch_with_a_stream_asks_the_driver_for_nothing_else(folder, monkeypatch):
    stub = StubDriver()
    kernel = load(folder, monkeypatch, stub)
    stub.asked.clear()
    assert kernel.launch((1, 1, 1), (None, 1, 1.0), stream=7) is None
    assert stub.asked == ["cuLaunchKernelEx"]


def test_the_library_looks_the_stream_up_with_the_context_current(folder, monkeypatch):
    monkeypatch.setattr(loader.torch.cuda, "current_stream", lambda device: Stream(91 + device))
    stub = StubDriver(context=0)
    assert Library(Driver(stub), read_manifest(folder), 1).stream() == 92
    assert stub.asked[-1] == "cuCtxSetCurrent"
    assert Library(Driver(StubDriver(fail="cuCtxGetCurrent")), read_manifest(folder), 0).stream().code == "driver_error"


def test_driver_errors_are_reasons(folder, monkeypatch):
    for step, stream in (("cuLaunchKernelEx", 0), ("cuCtxGetCurrent", None)):
        stub = StubDriver()
        kernel = load(folder, monkeypatch, stub)
        stub.fail = step
        reason = kernel.launch((1, 1, 1), (None, 1, 1.0), stream)
        assert reason.code == "driver_error"
        assert "CUDA_ERROR_FAKE" in reason.text


def test_the_driver_tells_its_version(monkeypatch):
    monkeypatch.setattr(driver_module, "driver_release", lambda: "580.65.06")
    assert Driver(StubDriver()).version() == "580.65.06 (CUDA 13.0)"
    monkeypatch.setattr(driver_module, "driver_release", lambda: "")
    assert Driver(StubDriver()).version() == "CUDA 13.0"


@pytest.mark.parametrize(
    ("fake", "code"),
    [
        (StubDriver(), None),
        (StubDriver(context=0), None),
        (StubDriver(params=((0, 8), (8, 8))), "kernels_abi"),
        (StubDriver(arch="sm_120a"), "driver_error"),
        (StubDriver(fail="cuLibraryLoadData"), "driver_error"),
        (StubDriver(fail="cuLibraryGetKernel"), "driver_error"),
        (StubDriver(fail="cuKernelGetFunction"), "driver_error"),
        (StubDriver(fail="cuFuncSetAttribute"), "driver_error"),
    ],
)
def test_loading_checks_the_kernel(folder, monkeypatch, fake, code):
    monkeypatch.setattr(loader.torch.cuda, "device", NoDevice)
    kernel = Library(Driver(fake), read_manifest(folder), 0).kernel("k")
    assert (kernel.code if isinstance(kernel, Reason) else None) == code


def test_unknown_kernels_and_devices_are_reasons(folder):
    assert Library(Driver(StubDriver()), read_manifest(folder), 0).kernel("other").code == "no_kernel"
    assert load_library(folder, torch.device("cpu")).code == "device"


def test_supports_names_what_is_wrong():
    assert supports(FAST, torch.bfloat16, 128, 40, "sm_90a") is None
    assert supports(FAITHFUL, torch.float16, 128, 40, "sm_90a") is None
    assert supports(FAST, torch.bfloat16, 64, 40, "sm_90a").code == "head_dim"
    assert supports(FAST, torch.float32, 128, 40, "sm_90a").code == "plan"
    assert supports(FOUR_BIT, torch.bfloat16, 128, 40, "sm_90a").code == "plan"
    assert supports(Plan(score_groups="per_thread"), torch.bfloat16, 128, 40, "sm_90a").code == "plan"
    assert supports(FAST, torch.bfloat16, 128, 70000, "sm_90a").code == "heads"
    assert kernel_name(FAST, torch.bfloat16, "sm_90a") == "attention_expcast_wide_means_v_bf16"


def test_the_architecture_decides_which_kernel_computes_a_plan():
    for arch in ("sm_89", "sm_120a", "sm_121a"):
        assert kernel_name(FAST, torch.bfloat16, arch) == "attention_mma8_expcast_wide_means_v_bf16"
        assert supports(FAITHFUL, torch.float16, 128, 40, arch) is None
    for arch in ("sm_120a", "sm_121a"):
        assert kernel_name(FOUR_BIT, torch.float16, arch) == "attention_nvfp4_means_v_fp16"
        assert kernel_name(replace(FOUR_BIT, adaptive_scales=False), torch.float16, arch)
        assert supports(FOUR_BIT, torch.bfloat16, 128, 40, arch) is None
    fp8 = Plan(scores="fp8")
    keyed = replace(fp8, key_means=True)
    for arch in ("sm_100a", "sm_103a"):
        assert kernel_name(fp8, torch.bfloat16, arch) == "attention_sm100_fp8_expcast_wide_means_v_bf16"
        assert kernel_name(keyed, torch.bfloat16, arch) == "attention_sm100_fp8_expcast_wide_means_v_k_bf16"
    assert kernel_name(FAITHFUL, torch.float16, "sm_100a") == "attention_sm100_int8_exp2_means_v_fp16"
    for plan, arch in (
        (FOUR_BIT, "sm_89"), (FAST, "sm_75"), (fp8, "sm_120a"), (fp8, "sm_90a"), (FAST, "sm_103a"),
        (replace(keyed, demean=False), "sm_100a"), (keyed, "sm_90a"), (FOUR_BIT, "sm_100a"),
    ):  # fmt: skip
        assert supports(plan, torch.bfloat16, 128, 40, arch).code == "plan"
        assert arch in supports(plan, torch.bfloat16, 128, 40, arch).text


@pytest.mark.parametrize("arch", KERNELS)
def test_every_attention_kernel_of_an_architecture_has_a_plan_that_asks_for_it(builds, arch):
    plans = [
        replace(plan, demean=demean, key_means=key_means)
        for plan in (FAST, FAITHFUL, FOUR_BIT, replace(FAST, scores="fp8"), replace(FAITHFUL, scores="fp8"))
        for demean, key_means in ((False, False), (True, False), (True, True))
    ]
    asked = {kernel_name(plan, dtype, arch) for plan in plans for dtype in (torch.bfloat16, torch.float16)} - {""}
    manifest = read_manifest(builds[arch])
    assert asked == {name for name in manifest.kernels if name.startswith("attention_")}


@pytest.mark.parametrize("arch", KERNELS)
def test_every_card_has_a_kernel_for_the_8_bit_presets(arch):
    """With smoothing and without; four_bit where there are NVFP4 units, and 8 bit instead elsewhere."""
    for name in ("fast", "faithful"):
        plan = preset(arch, name)
        assert replace(plan, scores="int8", key_means=False) == PRESETS[name]
        for dtype in (torch.bfloat16, torch.float16):
            assert kernel_name(plan, dtype, arch) and kernel_name(plan.without_smoothing(), dtype, arch)
    assert bool(kernel_name(preset(arch, "four_bit"), torch.bfloat16, arch)) == arch.startswith("sm_12")


def test_presets_differ_only_where_fp8_is_the_only_choice_and_then_have_key_means():
    found = {
        (arch, name): (preset(arch, name).scores, preset(arch, name).key_means)
        for arch in (None, "sm_75", *KERNELS)
        for name in PRESETS
        if preset(arch, name) != PRESETS[name]
    }
    assert found == {("sm_103a", "fast"): ("fp8", True), ("sm_103a", "faithful"): ("fp8", True)}


@pytest.mark.parametrize("plan", [FAST, FAST.without_smoothing(), Plan(key_means=True), Plan(scores="fp8")])
def test_allocated_images_are_those_of_the_reference(plan):
    q, k, v = (torch.randn(2, 3, n, 128) for n in (130, 300, 300))
    made, allocated = prepare(q, k, v, plan), allocate(2, 3, 130, 300, plan, "cpu")
    for name in image_shapes(2, 3, 130, 300, plan):
        assert getattr(made, name).shape == getattr(allocated, name).shape
        assert getattr(made, name).dtype == getattr(allocated, name).dtype
        assert getattr(made, name).is_contiguous()
    assert (allocated.mu is None) == (not plan.demean)
    assert (allocated.km is None) == (not plan.key_means)


def test_attend_refuses_a_wrong_output_and_a_wrong_device():
    images = allocate(1, 2, 5, 7, FAST, "cpu")
    with pytest.raises(ValueError, match="contiguous tensor of shape"):
        attend(images, FAST, torch.empty(1, 2, 5, 128, dtype=torch.bfloat16))
    reason = attend(images, FAST, torch.empty(1, 5, 2, 128, dtype=torch.bfloat16))
    assert reason.code in ("device", "no_kernels")
