"""The CUDA driver through ctypes: the dozen calls that load a cubin and launch it. Linux and Windows."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from pathlib import Path

from ..reasons import Reason

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_MAX_DYNAMIC_SHARED = 8
_CLUSTER_DIMENSION = 4
_NEEDED = (
    "cuLibraryLoadData",
    "cuLibraryUnload",
    "cuLibraryGetKernel",
    "cuKernelGetFunction",
    "cuFuncSetAttribute",
    "cuLaunchKernelEx",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorName",
)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a value of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: grid, block and shared memory, stream, attributes and their number."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class Launch:
    """One kernel as the driver starts it: everything that stays the same from launch to launch, made once.

    arguments: an array of pointers, one to the value of each parameter. The driver reads the values during `queue`.
    """

    def __init__(
        self,
        cuda: Driver,
        function: ctypes.c_void_p,
        block: tuple[int, int, int],
        shared: int,
        arguments: ctypes.Array[ctypes.c_void_p],
        cluster: int = 1,
    ) -> None:
        self._cuda, self._arguments = cuda, arguments
        # Numbers and ready-made pointers: converting a ctypes object costs half of a microsecond each time.
        self._handle, self._values = function.value, ctypes.cast(arguments, ctypes.c_void_p).value
        self._attribute = _Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(cluster, 1, 1))
        sizes = (ctypes.c_uint * 7)(1, 1, 1, *block, shared)
        self._config = _LaunchConfig(sizes, None, ctypes.addressof(self._attribute), int(cluster > 1))
        self._sizes, self._address = self._config.sizes, ctypes.addressof(self._config)

    def queue(self, grid: tuple[int, int, int], stream: int) -> Reason | None:
        """Start the kernel on `stream` (a CUstream as an integer), in clusters along x. One thread at a time."""
        # cuLaunchKernel has no clusters, and converting its 11 arguments takes longer than filling in four fields.
        self._sizes[0], self._sizes[1], self._sizes[2] = grid
        self._config.stream = stream
        result = self._cuda.launch(self._address, self._handle, self._values, None)
        return self._cuda.failed(result, "start a kernel") if result else None


class Driver:
    """The driver's entry points. Methods return a Reason instead of raising; `text` of it names the failed step."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # Functions with handle arguments need no argtypes as long as every handle is passed as c_void_p. The launch has
        # them, as it is called often: plain integers then pass as they are.
        self.launch = library.cuLaunchKernelEx
        self.launch.argtypes = [ctypes.c_void_p] * 4

    def version(self) -> str:
        """The driver's version, such as "580.65.06", and the CUDA that it serves, as far as it says."""
        number = ctypes.c_int()
        known = getattr(self._library, "cuDriverGetVersion", None)
        if known is not None:
            known(ctypes.byref(number))
        cuda = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
        return f"{release} ({cuda})" if (release := driver_release()) else cuda

    def failed(self, result: int, step: str) -> Reason:
        name = ctypes.c_char_p()
        known = self._library.cuGetErrorName(ctypes.c_int(result), ctypes.byref(name)) == 0 and name.value
        what = name.value.decode() if known and name.value else f"error {result}"
        return Reason("driver_error", f"The graphics driver refused to {step} ({what}).")

    def ensure_context(self, device: int) -> Reason | None:
        """Make the device's primary context current where this thread has none yet."""
        context = ctypes.c_void_p()
        result = self._library.cuCtxGetCurrent(ctypes.byref(context))
        if result == 0 and context.value:
            return None
        handle = ctypes.c_int()
        result = result or self._library.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device))
        result = result or self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        result = result or self._library.cuCtxSetCurrent(context)
        return self.failed(result, "open the device") if result else None

    def load(self, image: bytes, symbol: str) -> ctypes.c_void_p | Reason:
        """Load a cubin into the current context's process; returns the CUkernel."""
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        none, zero = ctypes.c_void_p(), ctypes.c_uint(0)
        result = self._library.cuLibraryLoadData(ctypes.byref(library), image, none, none, zero, none, none, zero)
        if result:
            return self.failed(result, "load a kernel")
        result = self._library.cuLibraryGetKernel(ctypes.byref(kernel), library, symbol.encode())
        if result:
            self._library.cuLibraryUnload(library)
            return self.failed(result, "find a kernel")
        return kernel

    def function(self, kernel: ctypes.c_void_p, shared: int) -> ctypes.c_void_p | Reason:
        """The CUfunction of `kernel` in the current context, allowed `shared` bytes of dynamic shared memory."""
        function = ctypes.c_void_p()
        result = self._library.cuKernelGetFunction(ctypes.byref(function), kernel)
        if result:
            return self.failed(result, "prepare a kernel")
        result = self._library.cuFuncSetAttribute(function, ctypes.c_int(_MAX_DYNAMIC_SHARED), ctypes.c_int(shared))
        return self.failed(result, "reserve shared memory") if result else function

    def parameters(self, function: ctypes.c_void_p, count: int) -> tuple[tuple[int, int], ...] | None:
        """(offset, size) of the first `count` parameters as the driver sees them, fewer if it has fewer; None where the
        driver cannot say (before CUDA 12.4).
        """
        if not hasattr(self._library, "cuFuncGetParamInfo"):
            return None
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        found: list[tuple[int, int]] = []
        # Not until the first error: checking tools report every call that returns one.
        for index in range(count):
            result = self._library.cuFuncGetParamInfo(
                function, ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size)
            )
            if result:
                break
            found.append((offset.value, size.value))
        return tuple(found)


@lru_cache(maxsize=1)
def driver_release() -> str:
    """The number of the installed NVIDIA driver; empty where nothing says it. CUDA's own number is too coarse: driver
    updates that fix or break code generation often keep it.
    """
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        pass  # Windows, or a container that does not show it: the management library knows
    try:
        library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if library.nvmlInit_v2() == 0 and library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96)) == 0:
            return text.value.decode("ascii", "replace")
    except (OSError, AttributeError):
        pass
    return ""


@lru_cache(maxsize=1)
def driver() -> Driver | Reason:
    """The driver of this machine, or why there is none that can be used."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return Reason("no_driver", "There is no NVIDIA driver on this machine.")
    missing = [name for name in _NEEDED if not hasattr(library, name)]
    if missing:
        return Reason(
            "driver_old",
            f"The NVIDIA driver is too old (it lacks {missing[0]}). Update it to a version for CUDA 12 or newer.",
        )
    return Driver(library)
