"""Cross-compile every kernel of one architecture, without a GPU, into cubins and a manifest.

    CUTE_DSL_ARCH=sm_90a python kernels/build.py FOLDER

The compiler (`nvidia-cutlass-dsl`) reads CUTE_DSL_ARCH when it is first imported, hence one process for each
architecture. torch is not needed. Two builds of the same sources with the same compiler are byte-identical.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = "vc_attention"
SCHEMA = 1


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
        raise ValueError("pyproject.toml states no version.")
    return found[1]


def build(folder: Path, only: str = "", report: Callable[[int, int, str], object] | None = None) -> dict[str, Any]:
    """Compile the kernels whose name contains `only` into `folder`, write manifest.json there and return it.

    report: called before each kernel with how many are done, how many there are, and its name.
    """
    package_without_torch()
    from cutlass import __version__ as compiler_version
    from vc_attention.kernels.cute.catalogue import buildables
    from vc_attention.kernels.cute.elf import read_cubin
    from vc_attention.kernels.launch.abi import ABI

    folder.mkdir(parents=True, exist_ok=True)
    kernels, targets = [], set()
    chosen = [kernel for kernel in buildables() if only in kernel.name]
    for done, kernel in enumerate(chosen):
        if report is not None:
            report(done, len(chosen), kernel.name)
        with tempfile.TemporaryDirectory() as dump:
            kernel.compile(f"--keep-cubin --keep-ptx --dump-dir {dump}")
            (cubin,) = Path(dump).glob("*.cubin")
            (ptx,) = Path(dump).glob("*.ptx")
            data = cubin.read_bytes()
            targets.update(re.findall(r"^\.target (\w+)", ptx.read_text(encoding="utf-8"), re.M))
        facts = read_cubin(data)
        if len(facts.params) != len(kernel.arguments):
            raise ValueError(
                f"{kernel.name} has {len(facts.params)} parameters, but its source names {len(kernel.arguments)}."
            )
        (folder / f"{kernel.name}.cubin").write_bytes(data)
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
    if len(targets) != 1:
        raise ValueError(f"The kernels must be of one architecture; the compiler made {sorted(targets) or 'none'}.")
    (arch,) = targets
    manifest = {
        "schema": SCHEMA,
        "abi": ABI,
        "package": package_version(),
        "source": source_hash(),
        "compiler": f"nvidia-cutlass-dsl {compiler_version}",
        "arch": arch,
        "kernels": kernels,
    }
    text = json.dumps(manifest, indent=1) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8", newline="\n")
    return manifest


def show(done: int, count: int, name: str) -> None:
    """One line of progress: `kernels.launch.compile` reads it."""
    sys.stdout.write(f"compiling {done} {count} {name}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Cross-compile the kernels of the architecture in CUTE_DSL_ARCH.")
    parser.add_argument("folder", type=Path, help="where cubins and manifest.json go")
    parser.add_argument("--only", default="", help="compile only kernels whose name contains this text")
    parser.add_argument("--progress", action="store_true", help="write a line before each kernel")
    parser.add_argument("--packages", default="", help="the folder whose `cutlass` is to be used, of several")
    arguments = parser.parse_args()
    if arguments.packages:
        others = [i for i, entry in enumerate(sys.path) if (Path(entry) / "cutlass").is_dir()]
        sys.path.insert(min(others, default=len(sys.path)), arguments.packages)
    manifest = build(arguments.folder, arguments.only, show if arguments.progress else None)
    sys.stdout.write(f"{len(manifest['kernels'])} kernels for {manifest['arch']} in {arguments.folder}\n")


if __name__ == "__main__":
    main()
