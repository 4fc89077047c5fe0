"""Cross-compile the NVFP4 attention kernels with their PTX: run in a process of its own, as the compiler reads its
target from the environment once.

    CUTE_DSL_ARCH=sm_120a python tests/support/nvfp4_build.py FOLDER
    CUTE_DSL_ARCH=sm_90a python tests/support/nvfp4_build.py FOLDER emulated
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))
    import build

    build.package_without_torch()
    from vc_attention.kernels.cute import attention_nvfp4, catalogue

    # The attention kernels alone, whatever else the catalogue has for their architectures.
    catalogue.buildables = lambda *_: attention_nvfp4.buildables(sys.argv[2:] == ["emulated"])
    build.build(Path(sys.argv[1]), keep_ptx=True)
