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
from .driver import Driver, Launch, driver
from .manifest import KernelEntry, Manifest, read_cubin, read_manifest

_BY_SIZE = {8: "Q", 4: "I4x"}
Argument = Tensor | int | float | None


class Kernel:
    """One loaded kernel on one device."""

    def __init__(self, cuda: Driver, entry: KernelEntry, function: ctypes.c_void_p, device: int) -> None:
        self.entry = entry
        self._cuda, self._device = cuda, device
        # One 8-byte slot for each parameter. The driver copies them during the call, so one buffer does, under a lock.
        count = len(entry.params)
        self._slots = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self._slots)
        pointers = (ctypes.c_void_p * count)(*[first + 8 * i for i in range(count)])
        self._start = Launch(cuda, function, entry.block, entry.shared, pointers, entry.cluster)
        self._real = [False] * count  # parameters that were seen as floats: the manifest knows sizes, not types
        self._pack = _packer(entry, self._real)
        self._lock = threading.Lock()

    def launch(
        self, grid: tuple[int, int, int], arguments: Sequence[Argument], stream: int | None = None
    ) -> Reason | None:
        """Queue a launch on `stream`, or on torch's current stream of the device.

        arguments: one for each kernel parameter in manifest order: a tensor (its data pointer; None is a null
        pointer), an int (4 or 8 bytes, as the parameter has) or a float (fp32). With a `stream` the caller has seen to
        it that the device is current in this thread (`Library.stream`).
        """
        if stream is None:
            reason = self._cuda.ensure_context(self._device)
            if reason is not None:
                return reason
            stream = torch.cuda.current_stream(self._device).cuda_stream
        values = [a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments]
        with self._lock:
            try:
                self._pack.pack_into(self._slots, 0, *values)
            except struct.error:  # a float where no call had one before
                self._real = [r or isinstance(v, float) for r, v in zip(self._real, values, strict=True)]
                self._pack = _packer(self.entry, self._real)
                self._pack.pack_into(self._slots, 0, *values)
            return self._start.queue(grid, stream)


def _packer(entry: KernelEntry, real: Sequence[bool]) -> struct.Struct:
    """Packs one value into each 8-byte slot: as fp32 where `real` says so, else as an integer of its size."""
    kinds = ["f4x" if r else _BY_SIZE[size] for r, (_, size) in zip(real, entry.params, strict=True)]
    return struct.Struct("<" + "".join(kinds))


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

    def load_all(self) -> Reason | None:
        """Load every kernel; the first reason why one cannot be used, or None."""
        for name in self.manifest.kernels:
            found = self.kernel(name)
            if isinstance(found, Reason):
                return found
        return None

    def stream(self) -> int | Reason:
        """torch's current stream of the device (a CUstream as an integer), with the device's context current."""
        reason = self._cuda.ensure_context(self._device)
        return reason if reason is not None else torch.cuda.current_stream(self._device).cuda_stream

    @property
    def driver_version(self) -> str:
        """The version of the driver that serves the kernels."""
        return self._cuda.version()

    def _load(self, name: str) -> Kernel | Reason:
        entry = self.manifest.kernels.get(name)
        if entry is None:
            return Reason("no_kernel", f"The kernels in {self.manifest.folder} have no {name}.")
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
                f"The driver reads the parameters of {name} differently from how they were built. Reinstall the "
                "pack's kernels.",
            )
        return Kernel(self._cuda, entry, function, self._device)


def load_library(folder: Path, device: torch.device) -> Library | Reason:
    """The kernels in `folder` for `device`, or why they cannot be used."""
    if device.type != "cuda":
        return Reason("device", "VC-Attention's kernels need an NVIDIA card.")
    manifest = read_manifest(folder)
    if isinstance(manifest, Reason):
        return manifest
    capability = torch.cuda.get_device_capability(device)
    if capability != manifest.capability:
        name = torch.cuda.get_device_name(device)
        return Reason(
            "capability",
            f"The kernels in {folder} are for compute capability {manifest.capability[0]}.{manifest.capability[1]}, "
            f"{name} has {capability[0]}.{capability[1]}.",
        )
    cuda = driver()
    if isinstance(cuda, Reason):
        return cuda
    index = torch.cuda.current_device() if device.index is None else device.index
    return Library(cuda, manifest, index)
