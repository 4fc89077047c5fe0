"""A stand-in for nvidia-cutlass-dsl: a package `cutlass`, and a copy of the pack whose kernels it "compiles".

The build (`kernels/build.py`), its process, its manifest and everything around it are the real ones.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("attention_expcast_wide_means_v_bf16", "attention_expcast_wide_means_v_fp16", "k_mean")

CATALOGUE = """
import os
import sys
import time
from pathlib import Path

import cutlass

from .buildable import Buildable

CUBIN = bytes.fromhex("{cubin}")


def buildables(arch, trial=""):
    return KERNELS[arch]()


def _kernels():
    def compile(options):
        arch = options.split()[-1]
        made = "sm_120a" if cutlass.BEHAVIOUR == "another arch" else arch
        if cutlass.BEHAVIOUR == "slow":
            Path(cutlass.__file__).with_name("pid").write_text(str(os.getpid()))
            time.sleep(60)
        if cutlass.BEHAVIOUR == "fails":
            raise RuntimeError("ptxas fatal : it has a headache")
        if cutlass.BEHAVIOUR == "ends":
            sys.exit(0)
        time.sleep(0.2)
        folder = Path(options[options.index("--dump-dir ") + len("--dump-dir ") : options.index(" --gpu-arch")])
        (folder / "k.cubin").write_bytes(CUBIN)
        (folder / "k.ptx").write_text(f".version 8.0\\n.target {{made}}\\n")

    return [Buildable(name, compile, 1024, "1", ("x", "n", "s")) for name in {names}]


KERNELS = {{"sm_90a": _kernels}}
"""


def tiny_cubin(symbol: str, params: tuple[tuple[int, int], ...], block: tuple[int, int, int]) -> bytes:
    """An ELF64 with the sections of a cubin's only kernel that `kernels.cute.elf` reads, and no code."""
    info = b"".join(struct.pack("<BBHIHHI", 4, 0x17, 12, 0, i, offset, size << 18) for i, (offset, size) in
                    enumerate(params))  # fmt: skip
    info += struct.pack("<BBHIII", 4, 0x10, 12, *block)
    overall = struct.pack("<BBHII", 4, 0x2F, 8, 0, 168)
    sections = [("", b""), (f".text.{symbol}", b"\0" * 16), (f".nv.info.{symbol}", info), (".nv.info", overall)]
    names = b"\0"
    offsets = [0]
    for name, _ in sections[1:]:
        offsets.append(len(names))
        names += name.encode() + b"\0"
    offsets.append(len(names))
    names += b".shstrtab\0"
    sections.append((".shstrtab", names))
    body, table, position = b"", b"", 64
    for offset, (_, data) in zip(offsets, sections, strict=True):
        table += struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, position, len(data), 0, 0, 1, 0)
        body += data
        position += len(data)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack(
        "<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, position, 0, 64, 0, 0, 64, len(sections), len(sections) - 1
    )
    return header + body + table


def write_compiler(folder: Path, behaviour: str = "works") -> Path:
    """The package `cutlass` in `folder`, which goes on sys.path."""
    (folder / "cutlass" / "cute").mkdir(parents=True, exist_ok=True)
    text = f"""
from types import SimpleNamespace

__version__ = "9.9"
CUDA_VERSION = SimpleNamespace(major=12, minor=9)
BEHAVIOUR = {behaviour!r}
"""
    (folder / "cutlass" / "__init__.py").write_text(text, encoding="utf-8")
    (folder / "cutlass" / "cute" / "__init__.py").write_text("", encoding="utf-8")
    text = "def get_str_env_var(name):\n    raise AssertionError('the architecture was given')\n"
    (folder / "cutlass" / "base_dsl.py").write_text(text, encoding="utf-8")
    return folder


def write_pack(folder: Path) -> Path:
    """A copy of the pack in `folder` whose catalogue lists three kernels that the stand-in compiles."""
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
    shutil.copytree(ROOT / "kernels", folder / "kernels", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    cubin = tiny_cubin("kernel_k", ((0, 8), (8, 4), (12, 4)), (384, 1, 1)).hex()
    text = CATALOGUE.format(cubin=cubin, names=NAMES)
    (folder / "kernels" / "cute" / "catalogue.py").write_text(text, encoding="utf-8")
    return folder
