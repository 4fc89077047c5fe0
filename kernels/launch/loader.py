"""Cubins of a folder as callable kernels, checked before the first launch."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..reasons import Reason
from .driver import Driver, driver
from .manifest import KernelEntry, Manifest, read_cubin, read_manifest

_BY_SIZE = {8: "Q", 4: "I4x"}
Argument = Tensor | int | float | None


class Kernel:
    """One loaded kernel on one device."""

    def __init__(self, cuda: Driver, entry: KernelEntry, function: ctypes.c_void_p, device: int) -> None:
        self.entry = entry
        self._cuda, self._function, self._device = cuda, function, device
        # One 8-byte slot for each parameter. The driver copies them during the call, so one buffer does, under a lock.
        count = len(entry.params)
        self._slots = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self._slots)
        self._pointers = (ctypes.c_void_p * count)(*[first + 8 * i for i in range(count)])
        self._packers: dict[tuple[bool, ...], struct.Struct] = {}
        self._lock = threading.Lock()

    def launch(
        self, grid: tuple[int, int, int], arguments: Sequence[Argument], stream: int | None = None
    ) -> Reason | None:
        """Queue a launch on `stream` (default: torch's current stream of the device).

        arguments: one for each kernel parameter in manifest order: a tensor (its data pointer; None is a null
        pointer), an int (4 or 8 bytes, as the parameter has) or a float (fp32).
        """
        reason = self._cuda.ensure_context(self._device)
        if reason is not None:
            return reason
        values = [a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments]
        floats = tuple([isinstance(a, float) for a in arguments])
        packer = self._packers.get(floats) or self._packer(floats)
        if stream is None:
            stream = torch.cuda.current_stream(self._device).cuda_stream
        with self._lock:
            packer.pack_into(self._slots, 0, *values)
            return self._cuda.launch(
                self._function,
                grid,
                self.entry.block,
                self.entry.shared,
                stream,
                self._pointers,
                self.entry.cluster,
            )

    def _packer(self, floats: tuple[bool, ...]) -> struct.Struct:
        """Packs one argument into each slot; `floats` says which of the 4-byte ones are fp32."""
        sizes = [size for _, size in self.entry.params]
        kinds = ["f4x" if real else _BY_SIZE[size] for real, size in zip(floats, sizes, strict=True)]
        self._packers[floats] = packer = struct.Struct("<" + "".join(kinds))
        return packer


class Library:
    """The kernels of one manifest on one device; each is loaded and checked when first asked for."""

    def __init__(self, cuda: Driver, manifest: Manifest, device: int) -> None:
        self.manifest = manifest
        self._cuda, self._device = cuda, device
        self._kernels: dict[str, Kernel | Reason] = {}
        self._lock = threading.Lock()

    def kernel(self, name: str) -> Kernel | Reason:
        """The kernel called `name`, or why it cannot be used."""
        found = self._kernels.get(name)
        if found is None:
            with self._lock:
                found = self._kernels.get(name) or self._load(name)
                self._kernels[name] = found
        return found

    def _load(self, name: str) -> Kernel | Reason:
        entry = self.manifest.kernels.get(name)
        if entry is None:
            return Reason("no_kernel", f"The installed kernels have no {name}; ComfyUI's own attention runs.")
        image = read_cubin(self.manifest, entry)
        if isinstance(image, Reason):
            return image
        with torch.cuda.device(self._device):
            reason = self._cuda.ensure_context(self._device)
            if reason is not None:
                return reason
            handle = self._cuda.load(image, entry.symbol)
            if isinstance(handle, Reason):
                return handle
            function = self._cuda.function(handle, entry.shared)
        if isinstance(function, Reason):
            return function
        params = self._cuda.parameters(function, len(entry.params))
        if params is not None and params != entry.params:
            return Reason(
                "kernels_abi",
                f"The driver reads the parameters of {name} differently from how they were built; ComfyUI's own "
                "attention runs. Reinstall the pack's kernels.",
            )
        return Kernel(self._cuda, entry, function, self._device)


def load_library(folder: Path, device: torch.device) -> Library | Reason:
    """The kernels in `folder` for `device`, or why they cannot be used."""
    if device.type != "cuda":
        return Reason("device", "The prebuilt kernels need an NVIDIA card; ComfyUI's own attention runs.")
    manifest = read_manifest(folder)
    if isinstance(manifest, Reason):
        return manifest
    capability = torch.cuda.get_device_capability(device)
    if capability != manifest.capability:
        name = torch.cuda.get_device_name(device)
        return Reason(
            "capability",
            f"The installed kernels are for compute capability {manifest.capability[0]}.{manifest.capability[1]}, "
            f"{name} has {capability[0]}.{capability[1]}; ComfyUI's own attention runs.",
        )
    cuda = driver()
    if isinstance(cuda, Reason):
        return cuda
    index = torch.cuda.current_device() if device.index is None else device.index
    return Library(cuda, manifest, index)
