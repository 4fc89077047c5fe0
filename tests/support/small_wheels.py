"""Wheels of the shape of the released ones, with made-up cubins: the installer moves and checks bytes, it runs none."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from pathlib import Path

from vc_attention.kernels.families import FAMILIES, package_name, wheel_name

VERSION = "0.1.0"


def files_of(family: str, version: str = VERSION, size: int = 6000, kernels: int = 3) -> dict[str, bytes]:
    """Member name -> bytes of a wheel whose cubins have `size` incompressible bytes each."""
    top = package_name(family)
    noise = random.Random(f"{family} {version}")
    files = {f"{top}/__init__.py": b'"""Kernels."""\n'}
    for arch in FAMILIES[family]:
        entries = []
        for number in range(kernels):
            cubin = b"\x7fELF" + noise.randbytes(size)
            files[f"{top}/{arch}/kernel_{number}.cubin"] = cubin
            digest = hashlib.sha256(cubin).hexdigest()
            entries.append({"name": f"kernel_{number}", "file": f"kernel_{number}.cubin", "sha256": digest})
        manifest = {"schema": 1, "abi": 1, "package": version, "source": "0" * 64, "arch": arch, "kernels": entries}
        files[f"{top}/{arch}/manifest.json"] = json.dumps(manifest).encode()
    provenance = {"schema": 1, "family": family, "version": version, "archs": list(FAMILIES[family])}
    files[f"{top}/provenance.json"] = json.dumps(provenance).encode()
    info = f"{top}-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {top}\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = b""
    return files


def zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip archive of the files. Without compression its bytes are the same with every zlib."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, compression)
    return buffer.getvalue()


def wheel(family: str = "hopper", version: str = VERSION, size: int = 6000) -> bytes:
    """The bytes of a wheel."""
    return zipped(files_of(family, version, size))


def pins(wheels: dict[str, bytes], version: str = VERSION) -> dict:
    """The content of `kernels/wheels.json` that pins these wheels, by family."""
    return {
        "schema": 1,
        "version": version,
        "wheels": [
            {
                "family": family,
                "file": wheel_name(family, version),
                "size": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "archs": list(FAMILIES[family]),
            }
            for family, data in wheels.items()
        ],
    }


def check_build(prebuilt: Path, family: str = "hopper", data: bytes | None = None) -> dict:
    """Assert that the pointer of `family` names a complete build, every file as its manifest says; the pointer.

    Written from the agreement alone, without the installer's own checks. data: the wheel that it must be from.
    """
    pointer = json.loads((prebuilt / f"{family}.json").read_text(encoding="utf-8"))
    assert set(pointer) == {"schema", "family", "folder", "wheel", "sha256", "version"}
    assert pointer["schema"] == 1 and pointer["family"] == family
    assert pointer["folder"] == f"{family}/{pointer['sha256'][:12]}"
    assert pointer["wheel"] == wheel_name(family, pointer["version"])
    folder = prebuilt / pointer["folder"]
    for arch in FAMILIES[family]:
        manifest = json.loads((folder / arch / "manifest.json").read_text(encoding="utf-8"))
        assert manifest["arch"] == arch and manifest["kernels"]
        for kernel in manifest["kernels"]:
            assert hashlib.sha256((folder / arch / kernel["file"]).read_bytes()).hexdigest() == kernel["sha256"]
        listed = {kernel["file"] for kernel in manifest["kernels"]} | {"manifest.json"}
        assert {path.name for path in (folder / arch).iterdir()} == listed
    assert json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["family"] == family
    if data is not None:
        assert pointer["sha256"] == hashlib.sha256(data).hexdigest()
    return pointer
