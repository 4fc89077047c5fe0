"""Cross-compile every kernel of one architecture, without a GPU, into cubins and a manifest.

    CUTE_DSL_ARCH=sm_90a python kernels/build.py FOLDER
    python kernels/build.py --list                          the architectures that have kernels

The compiler (`nvidia-cutlass-dsl`) reads CUTE_DSL_ARCH when it is first imported, hence one process for each
architecture. torch is not needed. Two builds of the same sources with the same compiler are byte-identical.
`python3 run.py wheels` runs this for every architecture and packs the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = "vc_attention"
SCHEMA = 1


class BuildError(ValueError):
    """Why nothing was built, in a sentence."""


def package_without_torch() -> None:
    """Make `vc_attention.kernels.cute` importable without running `kernels/__init__.py`, which imports torch."""
    for name, path in ((PACKAGE, HERE.parent), (f"{PACKAGE}.kernels", HERE)):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules.setdefault(name, module)


def source_hash() -> str:
    """SHA-256 over the sources that decide what the kernels compute, independent of line endings."""
    digest = hashlib.sha256()
    for path in (HERE / "build.py", HERE / "plan.py", *sorted((HERE / "cute").glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()


def package_version() -> str:
    """The version in pyproject.toml."""
    found = re.search(r'^version = "([^"]+)"', (HERE.parent / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    if found is None:
        raise BuildError("pyproject.toml states no version.")
    return found[1]


def build(folder: Path, only: str = "", arch: str = "", keep_ptx: bool = False, trial: str = "") -> dict[str, Any]:
    """Compile the kernels whose name contains `only` into `folder`, write manifest.json there and return it.

    arch: such as sm_90a; what CUTE_DSL_ARCH says if empty. keep_ptx: also write the PTX of each kernel. trial: a set of
    kernels that is not shipped (`catalogue.TRIALS`), instead of the architecture's own. Raises BuildError when there
    are no kernels for `arch`.
    """
    package_without_torch()
    from cutlass import CUDA_VERSION
    from cutlass import __version__ as compiler_version
    from cutlass.base_dsl import get_str_env_var
    from vc_attention.kernels.cute.catalogue import buildables
    from vc_attention.kernels.cute.elf import read_cubin
    from vc_attention.kernels.launch.abi import ABI

    arch = arch or get_str_env_var("CUTE_DSL_ARCH") or ""
    if not arch:
        raise BuildError("Say which architecture to compile for: CUTE_DSL_ARCH=sm_90a, or --arch sm_90a.")
    try:
        wanted = buildables(arch, trial)
    except LookupError as error:
        raise BuildError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    kernels, targets, front_ends = [], set(), set()
    for kernel in wanted:
        if only not in kernel.name:
            continue
        with tempfile.TemporaryDirectory() as dump:
            kernel.compile(f"--keep-cubin --keep-ptx --dump-dir {dump} --gpu-arch {arch}")
            (cubin,) = Path(dump).glob("*.cubin")
            (ptx,) = Path(dump).glob("*.ptx")
            data, text = cubin.read_bytes(), ptx.read_text(encoding="utf-8")
            targets.update(re.findall(r"^\.target (\w+)", text, re.M))
            front_ends.update(re.findall(r"^// Cuda compilation tools, release .*V([\d.]+)", text, re.M))
        facts = read_cubin(data)
        if len(facts.params) != len(kernel.arguments):
            raise BuildError(
                f"{kernel.name} has {len(facts.params)} parameters, but its source names {len(kernel.arguments)}."
            )
        (folder / f"{kernel.name}.cubin").write_bytes(data)
        if keep_ptx:
            (folder / f"{kernel.name}.ptx").write_text(text, encoding="utf-8", newline="\n")
        kernels.append(
            {
                "name": kernel.name,
                "file": f"{kernel.name}.cubin",
                "sha256": hashlib.sha256(data).hexdigest(),
                "symbol": facts.symbol,
                "arguments": list(kernel.arguments),
                "params": [list(p) for p in facts.params],
                "block": list(facts.block),
                "shared": kernel.shared,
                "grid": kernel.grid,
                "registers": facts.registers,
                "cluster": kernel.cluster,
            }
        )
    if targets != {arch}:
        raise BuildError(f"The kernels must be of {arch}; the compiler made {sorted(targets) or 'none'}.")
    manifest = {
        "schema": SCHEMA,
        "abi": ABI,
        "package": package_version(),
        "source": source_hash(),
        "compiler": f"nvidia-cutlass-dsl {compiler_version}",
        # What the compiler carries inside: what wrote the PTX, and the CUDA release that its ptxas is of.
        "nvvm": ", ".join(sorted(front_ends)),
        "ptxas": f"{CUDA_VERSION.major}.{CUDA_VERSION.minor}",
        "arch": arch,
        "kernels": kernels,
    }
    written = json.dumps(manifest, indent=1) + "\n"
    (folder / "manifest.json").write_text(written, encoding="utf-8", newline="\n")
    return manifest


def archs() -> list[str]:
    """The architectures that have kernels; needs no compiler."""
    package_without_torch()
    from vc_attention.kernels.cute.catalogue import KERNELS

    return list(KERNELS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cross-compile the kernels of one architecture.")
    parser.add_argument("folder", type=Path, nargs="?", help="where cubins and manifest.json go")
    parser.add_argument("--arch", default="", help="such as sm_90a; CUTE_DSL_ARCH if not given")
    parser.add_argument("--only", default="", help="compile only kernels whose name contains this text")
    parser.add_argument(
        "--ptx", action="store_true", help="also write the PTX of each kernel, as the tests interpret it"
    )
    parser.add_argument("--trial", default="", help="compile a set of kernels that is not shipped, such as mma8")
    parser.add_argument("--list", action="store_true", help="print the architectures that have kernels")
    arguments = parser.parse_args()
    if arguments.list:
        sys.stdout.write("".join(f"{arch}\n" for arch in archs()))
        return
    if arguments.folder is None:
        parser.error("name the folder that the kernels go to")
    try:
        manifest = build(arguments.folder, arguments.only, arguments.arch, arguments.ptx, arguments.trial)
    except BuildError as error:
        parser.exit(1, f"{error}\n")
    sys.stdout.write(f"{len(manifest['kernels'])} kernels for {manifest['arch']} in {arguments.folder}\n")


if __name__ == "__main__":
    main()
