"""The project's launchers on the interpreter: a stand-in for `kernels.launch.loader.Library` that runs PTX on the CPU.

`prepare`, `group` and `attend` of `kernels.launch` run unchanged, on torch CPU tensors; only their kernels are
interpreted. Tensors that were made with torch.empty while the library is in use count as unwritten until a kernel
writes them, those of torch.zeros as written, and every other one as read-only, of which only the elements that the
tensor shows may be read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from vc_attention.kernels.launch import attend as attend_module
from vc_attention.kernels.launch import prepare as prepare_module
from vc_attention.kernels.launch.manifest import KernelEntry, Manifest, read_manifest
from vc_attention.kernels.plan import Plan
from vc_attention.kernels.reasons import Reason

from .memory import Buffer, GlobalMemory
from .run import Loaded, Report

#: (kernel, argument) whose unwritten bytes the kernel reads and throws away: columns of centroids that do not exist.
#: A test runs it with two poisons, which must not change the result.
_JUNK_READ = {("group_chain", "scores")}


class Storages:
    """Global memory made of torch storages; each remembers which of its bytes have been written."""

    def __init__(self, poison: int) -> None:
        self.memory, self.poison = GlobalMemory(), poison
        self._known: dict[int, tuple[Buffer, Tensor]] = {}

    def allocated(self, tensor: Tensor, written: bool) -> Tensor:
        """A new tensor that kernels may write."""
        if tensor.numel():
            self._add(tensor, written, writable=True)
        return tensor

    def _add(self, tensor: Tensor, written: bool, writable: bool) -> Buffer:
        storage = tensor.untyped_storage()
        array = np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()))
        if not written and writable:
            array[:] = self.poison
        name = f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}"
        buffer = Buffer(array, name, written, writable)
        self.memory.map(buffer)
        self._known[storage.data_ptr()] = (buffer, tensor)  # the tensor keeps the storage alive
        return buffer

    def address(self, tensor: Tensor, name: str, junk_allowed: bool = False) -> int:
        """Where kernels see the first element of `tensor`, the argument `name`."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._known:
            buffer = self._known[storage.data_ptr()][0]
        else:
            buffer = self._add(tensor, written=False, writable=False)
        if not buffer.writable:
            buffer.written[_bytes_of(tensor)] = True
        buffer.junk_allowed = junk_allowed
        buffer.name = f"{name} ({buffer.name.split('(', 1)[-1].rstrip(')')})"
        return buffer.base + tensor.data_ptr() - storage.data_ptr()

    def unwritten(self, tensor: Tensor) -> int:
        """Bytes of `tensor` that no kernel has written."""
        buffer = self._known[tensor.untyped_storage().data_ptr()][0]
        return int((~buffer.written[_bytes_of(tensor)]).sum())


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """Byte offsets in its storage of every element of a tensor."""
    offsets = np.full(1, tensor.data_ptr() - tensor.untyped_storage().data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride * tensor.element_size()).reshape(-1)
    return (offsets[:, None] + np.arange(tensor.element_size())).reshape(-1)


class InterpretedKernel:
    """`kernels.launch.loader.Kernel` with the same `entry` and `launch`."""

    def __init__(self, entry: KernelEntry, loaded: Loaded, library: InterpretedLibrary) -> None:
        self.entry, self.loaded, self._library = entry, loaded, library

    def launch(self, grid, arguments, stream=None) -> None:
        library = self._library
        params = []
        for value, name in zip(arguments, self.entry.arguments, strict=True):
            if isinstance(value, Tensor):
                value = library.storages.address(value, name, (self.entry.name, name) in _JUNK_READ)
            params.append(value)
        report = self.loaded.launch(
            grid,
            self.entry.block,
            params,
            self.entry.shared,
            self.entry.cluster,
            memory=library.storages.memory,
            **library.options,
        )
        library.reports.append((self.entry.name, report))
        if self.entry.name not in library.replaced:
            library.launched.add((library.manifest.arch, self.entry.name))


class InterpretedLibrary:
    """The kernels of a folder that holds manifest.json and PTX. poison: byte that unwritten memory is filled with.
    options: of `Loaded.launch`.
    """

    #: Architectures and names of all kernels that have run in this process as they were compiled.
    launched: set[tuple[str, str]] = set()  # noqa: RUF012 - shared on purpose
    _parsed: dict[Path, Loaded] = {}  # noqa: RUF012 - shared by all libraries: a parse depends on the file alone

    def __init__(self, folder: Path, poison: int = 0xA5, **options) -> None:
        manifest = read_manifest(folder)
        assert isinstance(manifest, Manifest), manifest
        self.manifest, self.options = manifest, options
        self.storages = Storages(poison)
        self.reports: list[tuple[str, Report]] = []
        #: PTX text to run in place of a kernel's own.
        self.replaced: dict[str, str] = {}

    def kernel(self, name: str) -> InterpretedKernel:
        entry = self.manifest.kernels[name]
        if name in self.replaced:
            return InterpretedKernel(entry, Loaded(self.replaced[name]), self)
        path = self.manifest.folder / f"{name}.ptx"
        if path not in self._parsed:
            self._parsed[path] = Loaded(path.read_text(encoding="utf-8"))
        return InterpretedKernel(entry, self._parsed[path], self)

    @contextmanager
    def in_use(self) -> Iterator[InterpretedLibrary]:
        """Launchers use this library, and tensors they allocate are tracked."""

        def tracked(function, written):
            return lambda *sizes, **options: self.storages.allocated(function(*sizes, **options), written)

        queue = classmethod(lambda cls, library: cls(library, 0))
        with (
            mock.patch.object(torch, "empty", tracked(torch.empty, written=False)),
            mock.patch.object(torch, "empty_like", tracked(torch.empty_like, written=False)),
            mock.patch.object(torch, "zeros", tracked(torch.zeros, written=True)),
            mock.patch.object(prepare_module.Queue, "current", queue),
        ):
            yield self


def attend(
    library: InterpretedLibrary,
    images,
    plan: Plan,
    dtype: torch.dtype,
    scale: float | None = None,
    complete: bool = True,
) -> Tensor:
    """`kernels.launch.attend.attend` on the interpreter: [B, Lq, H, 128].

    complete: whether every element must have been written.
    """
    with library.in_use():
        out = torch.empty((images.batch, images.lq, images.heads, 128), dtype=dtype)
        reason = attend_module.attend(images, plan, out, scale, kernels=library, stream=0)
        assert reason is None, reason
    assert not complete or library.storages.unwritten(out) == 0
    return out


def prepare(library: InterpretedLibrary, q, k, v, plan: Plan, labels=None):
    """`kernels.launch.prepare.prepare` on the interpreter; every byte of the images must have been written."""
    with library.in_use():
        images = prepare_module.prepare(library, q, k, v, plan, labels)
    assert not isinstance(images, Reason), images
    for name, tensor in vars(images).items():
        if isinstance(tensor, Tensor):
            assert library.storages.unwritten(tensor) == 0, f"{name} is not written in full"
    return images
