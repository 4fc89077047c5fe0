"""NVIDIA's driver library as the launcher calls it, without a card: it checks images and records every launch."""

from __future__ import annotations

import ctypes
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vc_attention.kernels.cute.elf import read_cubin
from vc_attention.kernels.launch import attend, chain, loader, selftest, verdicts
from vc_attention.kernels.launch.abi import ABI
from vc_attention.kernels.launch.driver import Driver

PARAMS = ((0, 8), (8, 4), (12, 4))
INVALID_IMAGE, NO_BINARY_FOR_GPU, NOT_FOUND = 200, 209, 500


class Launched(NamedTuple):
    """One launch. arguments: the bytes that each parameter pointer leads to. image: SHA-256 of the kernel's cubin."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    cluster: int
    arguments: tuple[bytes, ...]
    image: str


class StubDriver:
    """The driver of one card of `arch`. `fail`: a function that returns an error. params: what it says of a stub cubin.

    A stub cubin is `STUB <arch> <symbol>`; real ones are read with `kernels.cute.elf`.
    """

    def __init__(
        self, fail: str = "", params: tuple[tuple[int, int], ...] = PARAMS, context: int = 1, arch: str = "sm_90a"
    ) -> None:
        self.fail, self.params, self.context, self.arch = fail, params, context, arch
        self.asked: list[str] = []
        self.launched: list[Launched] = []
        #: symbol, params, and shared memory allowed, of each handle.
        self.loaded: dict[int, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.asked.append(name)
            return 700 if name == self.fail else getattr(self, f"on_{name}", lambda *a: 0)(*arguments)

        return call

    def on_cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802 - the driver's names
        version._obj.value = 13000
        return 0

    def on_cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.context
        return 0

    def on_cuLibraryLoadData(self, library: Any, image: bytes, *rest: Any) -> int:  # noqa: N802
        words = image.split()
        if words[:1] == [b"STUB"]:
            if words[1].decode() != self.arch:
                return NO_BINARY_FOR_GPU
            facts = {"symbol": words[2].decode(), "params": self.params}
        else:
            try:
                read = read_cubin(image)
            except ValueError:
                return INVALID_IMAGE
            facts = {"symbol": read.symbol, "params": read.params}
        facts["image"] = hashlib.sha256(image).hexdigest()
        library._obj.value = 100 + len(self.loaded)
        self.loaded[library._obj.value] = facts
        return 0

    def on_cuLibraryGetKernel(self, kernel: Any, library: Any, symbol: bytes) -> int:  # noqa: N802
        if self.loaded[library.value]["symbol"] != symbol.decode():
            return NOT_FOUND
        kernel._obj.value = library.value
        return 0

    def on_cuKernelGetFunction(self, function: Any, kernel: Any) -> int:  # noqa: N802
        function._obj.value = kernel.value
        return 0

    def on_cuFuncSetAttribute(self, function: Any, attribute: Any, value: Any) -> int:  # noqa: N802
        self.loaded[function.value]["shared"] = value.value
        return 0

    def on_cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:  # noqa: N802
        params = self.loaded[function.value]["params"]
        if index.value >= len(params):
            return 1
        offset._obj.value, size._obj.value = params[index.value]
        return 0

    def on_cuGetErrorName(self, result: Any, name: Any) -> int:  # noqa: N802
        name._obj.value = {209: b"CUDA_ERROR_NO_BINARY_FOR_GPU", 200: b"CUDA_ERROR_INVALID_IMAGE"}.get(
            result.value, b"CUDA_ERROR_FAKE"
        )
        return 0

    def on_cuLaunchKernelEx(self, config: int, function: int, args: int, _: Any) -> int:  # noqa: N802
        sizes = (ctypes.c_uint * 7).from_address(config)
        stream, attributes = (ctypes.c_void_p * 2).from_address(config + 32)
        count, clusters = ctypes.c_uint.from_address(config + 48).value, 1
        if count:
            assert count == 1
            # CUlaunchAttribute: id 4 is the cluster dimension, its value 8 bytes further
            assert ctypes.c_int.from_address(attributes).value == 4
            cluster = (ctypes.c_uint * 3).from_address(attributes + 8)
            assert tuple(cluster[1:]) == (1, 1)
            clusters = cluster[0]
            assert clusters > 1
        return self._record(function, sizes[:3], sizes[3:6], sizes[6], stream or 0, clusters, args)

    def _record(self, function, grid, block, shared, stream, cluster, args) -> int:
        facts = self.loaded[function]
        assert shared <= facts["shared"]
        pointers = (ctypes.c_void_p * len(facts["params"])).from_address(args)
        values = tuple(ctypes.string_at(p, size) for p, (_, size) in zip(pointers, facts["params"], strict=True))
        sizes = (tuple(grid), tuple(block), shared)
        self.launched.append(Launched(facts["symbol"], *sizes, stream, cluster, values, facts["image"]))
        return 0


def stub_cubin(symbol: str, arch: str = "sm_90a") -> bytes:
    """The image of one kernel, as `StubDriver` reads it."""
    return f"STUB {arch} {symbol}".encode()


def kernel_entry(name: str, data: bytes, **changes: Any) -> dict[str, Any]:
    """One kernel of a manifest."""
    entry = {
        "name": name,
        "file": f"{name}.cubin",
        "sha256": hashlib.sha256(data).hexdigest(),
        "symbol": f"kernel_{name}",
        "arguments": ["x", "n", "s"],
        "params": [list(p) for p in PARAMS],
        "block": [384, 1, 1],
        "shared": 1024,
        "grid": "1",
        "registers": 168,
    }
    return {**entry, **changes}


#: Kernels of a stub folder: two attention kernels and one of preparation.
NAMES = ("attention_expcast_wide_means_v_bf16", "attention_exp2_means_none_fp16", "k_mean")


def write_kernels(folder: Path, arch: str = "sm_90a", names: tuple[str, ...] = NAMES, **changes: Any) -> Path:
    """A folder of stub cubins with its manifest; `changes` replace fields of the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    kernels = []
    for name in names:
        data = stub_cubin(f"kernel_{name}", arch)
        (folder / f"{name}.cubin").write_bytes(data)
        kernels.append(kernel_entry(name, data))
    data = {"schema": 1, "abi": ABI, "package": "0.1.0", "source": "0" * 64, "arch": arch, "kernels": kernels}
    (folder / "manifest.json").write_text(json.dumps({**data, **changes}), encoding="utf-8")
    return folder


class NoDevice:
    """Stands in for `torch.cuda.device`."""

    def __init__(self, index: Any) -> None:
        self.index = index

    def __enter__(self) -> NoDevice:
        return self

    def __exit__(self, *arguments: Any) -> bool:
        return False


class Stream(NamedTuple):
    """Stands in for torch's current stream."""

    cuda_stream: int


def machine(
    monkeypatch: pytest.MonkeyPatch,
    prebuilt: Path,
    stub: StubDriver | None = None,
    name: str = "NVIDIA H200",
    capability: tuple[int, int] = (9, 0),
) -> StubDriver:
    """torch and the driver as on a machine with one card, of Hopper by default; kernels are looked for in `prebuilt`.

    The self-test's own tensors stay on the CPU, as the card is not there.
    """
    stub = stub or StubDriver()
    real = selftest.problem
    monkeypatch.setattr(selftest, "problem", lambda attention, cases, device: real(attention, cases, "cpu"))
    monkeypatch.setattr(torch.version, "hip", None)
    for function, answer in (
        ("is_available", lambda: True),
        ("device_count", lambda: 1),
        ("current_device", lambda: 0),
        ("get_device_name", lambda device=0: name),
        ("get_device_capability", lambda device=0: capability),
        ("current_stream", lambda device=0: Stream(77)),
        ("device", NoDevice),
    ):
        monkeypatch.setattr(torch.cuda, function, answer)
    monkeypatch.setattr(loader, "driver", lambda: Driver(stub))
    monkeypatch.setattr(attend, "PREBUILT", prebuilt)
    monkeypatch.setattr(chain, "_known", {})
    monkeypatch.setattr(verdicts, "_memory", {})
    monkeypatch.setattr(verdicts, "_folder", None)
    return stub
