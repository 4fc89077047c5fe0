"""The launcher without a GPU: every failure is a reason, and what reaches the driver is what the manifest says."""

from __future__ import annotations

import ctypes
import hashlib
import json

import pytest
import torch
from vc_attention.kernels import FAITHFUL, FAST, FOUR_BIT, Plan
from vc_attention.kernels.cute.reference import prepare
from vc_attention.kernels.launch import loader
from vc_attention.kernels.launch.abi import ABI
from vc_attention.kernels.launch.attend import attend, kernel_name, supports
from vc_attention.kernels.launch.driver import Driver
from vc_attention.kernels.launch.images import allocate, image_shapes
from vc_attention.kernels.launch.loader import Kernel, Library, load_library
from vc_attention.kernels.launch.manifest import KernelEntry, Manifest, read_cubin, read_manifest
from vc_attention.kernels.reasons import Reason

CUBIN = b"not really a cubin"


def manifest_data(**changes):
    kernel = {
        "name": "k",
        "file": "k.cubin",
        "sha256": hashlib.sha256(CUBIN).hexdigest(),
        "symbol": "kernel_k",
        "arguments": ["x", "n", "s"],
        "params": [[0, 8], [8, 4], [12, 4]],
        "block": [384, 1, 1],
        "shared": 1024,
        "grid": "1",
        "registers": 168,
    }
    data = {"schema": 1, "abi": ABI, "package": "0.1.0", "source": "0" * 64, "arch": "sm_90a", "kernels": [kernel]}
    return {**data, **changes}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest_data()))
    (tmp_path / "k.cubin").write_bytes(CUBIN)
    return tmp_path


class FakeLibrary:
    """The driver's functions as the launcher calls them; `fail` names one that returns an error."""

    def __init__(self, fail: str = "", params=((0, 8), (8, 4), (12, 4)), context: int = 1):
        self.fail, self.params, self.context, self.launched = fail, params, context, []

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: 700 if name == self.fail else getattr(self, "_" + name, lambda *a: 0)(*arguments)

    def _cuCtxGetCurrent(self, context):  # noqa: N802 - the driver's name
        context._obj.value = self.context
        return 0

    def _cuFuncGetParamInfo(self, function, index, offset, size):  # noqa: N802
        if index.value >= len(self.params):
            return 1
        offset._obj.value, size._obj.value = self.params[index.value]
        return 0

    def _cuGetErrorName(self, result, name):  # noqa: N802
        name._obj.value = b"CUDA_ERROR_FAKE"
        return 0

    def _cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra):  # noqa: N802
        x = ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint64)).contents.value
        n = ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_uint32)).contents.value
        s = ctypes.cast(arguments[2], ctypes.POINTER(ctypes.c_float)).contents.value
        self.launched.append(((gx, gy, gz), bx, shared, stream, x, n, s))
        return 0


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
        (None, "no_kernels"),
        ("{", "kernels_damaged"),
        ("[]", "kernels_damaged"),
        (json.dumps(manifest_data(abi=ABI + 1)), "kernels_version"),
        (json.dumps(manifest_data(schema=99)), "kernels_version"),
        (json.dumps(manifest_data(kernels=[{}])), "kernels_damaged"),
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


def test_launch_passes_what_the_manifest_says(folder):
    fake = FakeLibrary()
    kernel = Kernel(Driver(fake), entry_of(folder)[1], ctypes.c_void_p(5), 0)
    x = torch.zeros(4)
    assert kernel.launch((7, 3, 1), (x, 11, 0.5), stream=42) is None
    assert kernel.launch((1, 1, 1), (None, 2**32 - 1, -1.5), stream=42) is None
    assert fake.launched[0] == ((7, 3, 1), 384, 1024, 42, x.data_ptr(), 11, 0.5)
    assert fake.launched[1][4:] == (0, 2**32 - 1, -1.5)
    with pytest.raises(ValueError):
        kernel.launch((1, 1, 1), (x, 11), stream=42)


def test_driver_errors_are_reasons(folder):
    for step in ("cuLaunchKernel", "cuCtxGetCurrent"):
        kernel = Kernel(Driver(FakeLibrary(fail=step)), entry_of(folder)[1], ctypes.c_void_p(5), 0)
        reason = kernel.launch((1, 1, 1), (None, 1, 1.0), stream=0)
        assert reason.code == "driver_error"
        assert "CUDA_ERROR_FAKE" in reason.text


@pytest.mark.parametrize(
    ("fake", "code"),
    [
        (FakeLibrary(), None),
        (FakeLibrary(context=0), None),
        (FakeLibrary(params=((0, 8), (8, 8))), "kernels_abi"),
        (FakeLibrary(fail="cuLibraryLoadData"), "driver_error"),
        (FakeLibrary(fail="cuLibraryGetKernel"), "driver_error"),
        (FakeLibrary(fail="cuKernelGetFunction"), "driver_error"),
        (FakeLibrary(fail="cuFuncSetAttribute"), "driver_error"),
    ],
)
def test_loading_checks_the_kernel(folder, monkeypatch, fake, code):
    monkeypatch.setattr(loader.torch.cuda, "device", _NoDevice)
    kernel = Library(Driver(fake), read_manifest(folder), 0).kernel("k")
    assert (kernel.code if isinstance(kernel, Reason) else None) == code


class _NoDevice:
    def __init__(self, index):
        self.index = index

    def __enter__(self):
        return self

    def __exit__(self, *arguments):
        return False


def test_unknown_kernels_and_devices_are_reasons(folder):
    assert Library(Driver(FakeLibrary()), read_manifest(folder), 0).kernel("other").code == "no_kernel"
    assert load_library(folder, torch.device("cpu")).code == "device"


def test_supports_names_what_is_wrong():
    assert supports(FAST, torch.bfloat16, 128, 40) is None
    assert supports(FAITHFUL, torch.float16, 128, 40) is None
    assert supports(FAST, torch.bfloat16, 64, 40).code == "head_dim"
    assert supports(FAST, torch.float32, 128, 40).code == "plan"
    assert supports(FOUR_BIT, torch.bfloat16, 128, 40).code == "plan"
    assert supports(Plan(score_groups="per_thread"), torch.bfloat16, 128, 40).code == "plan"
    assert supports(FAST, torch.bfloat16, 128, 70000).code == "heads"
    assert kernel_name(FAST, torch.bfloat16) == "attention_expcast_wide_means_v_bf16"


@pytest.mark.parametrize("plan", [FAST, FAST.without_grouping(), Plan(key_means=True)])
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
