"""The program that `launch.compile` starts: builds the kernels of one architecture and says how far it is.

    python kernels/compile_here.py FOLDER ARCH PACKAGES [ONLY]

PACKAGES: the folder whose `cutlass` is to be used, should there be several. Before each kernel one line is written:
`compiling DONE COUNT NAME`. The build itself is `build.py`'s, which knows nothing of this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import build


def main(folder: Path, arch: str, packages: str, only: str = "") -> None:
    """Build into `folder`. A failure ends in a traceback, whose last line says why."""
    others = [i for i, entry in enumerate(sys.path) if (Path(entry) / "cutlass").is_dir()]
    sys.path.insert(min(others, default=len(sys.path)), packages)
    build.package_without_torch()
    from vc_attention.kernels.cute.buildable import Buildable
    from vc_attention.kernels.cute.catalogue import KERNELS, buildables

    kernels = [kernel for kernel in buildables(arch) if only in kernel.name]

    def announced(done: int, kernel: Buildable) -> Callable[[str], object]:
        def compile_it(options: str) -> object:
            sys.stdout.write(f"compiling {done} {len(kernels)} {kernel.name}\n")
            sys.stdout.flush()
            return kernel.compile(options)

        return compile_it

    KERNELS[arch] = lambda: [replace(kernel, compile=announced(i, kernel)) for i, kernel in enumerate(kernels)]
    build.build(folder, only, arch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
