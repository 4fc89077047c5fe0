"""What the build needs to know of one kernel, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Buildable:
    """One kernel to compile.

    name: key in the manifest and file name of the cubin. compile: takes the compiler's option string and compiles one
    kernel for the architecture of this process. shared: dynamic shared memory in bytes. grid: how the launcher forms
    the grid, in words. arguments: names of the kernel parameters in order. cluster: blocks along x of one
    cluster; the grid must be a multiple of it.
    """

    name: str
    compile: Callable[[str], object]
    shared: int
    grid: str
    arguments: tuple[str, ...]
    cluster: int = 1
