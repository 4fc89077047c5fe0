"""The wheels that kernels/wheels.json pins are what the sources give, byte for byte."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from vc_attention.kernels.families import FAMILIES
from vc_attention.tools.wheel_family import differences, pack, read_pinned

#: One process compiles the kernels that these tests look at.
pytestmark = pytest.mark.xdist_group("cubins")

PINNED = Path(__file__).resolve().parents[2] / "kernels" / "wheels.json"
REPIN = "Run `python3 run.py wheels --write` and commit kernels/wheels.json with the sources."


def test_a_rebuild_gives_the_pinned_wheels(builds):
    pinned = read_pinned(PINNED)
    used = {json.loads((folder / "manifest.json").read_text())["compiler"] for folder in builds.values()}
    if pinned is not None and (other := {wheel["compiler"] for wheel in pinned["wheels"]} - used):
        # tools/requirements/compiler.txt pins it, so this happens only in an environment of one's own
        pytest.skip(f"cubins: the wheels are pinned with {', '.join(other)}, here is {', '.join(used)}")
    wheels = [
        pack(family, {arch: builds[arch] for arch in archs if arch in builds})
        for family, archs in FAMILIES.items()
        if any(arch in builds for arch in archs)
    ]
    found = differences(pinned, wheels)
    assert not found, " ".join([*found, REPIN])
    assert pinned is not None
    for entry, wheel in zip(pinned["wheels"], wheels, strict=True):
        assert (entry["file"], entry["size"], entry["sha256"]) == (wheel.file, len(wheel.data), wheel.sha256)


def test_a_changed_cubin_is_a_difference(builds, tmp_path):
    """The comparison sees one bit of one kernel."""
    arch = "sm_90a"
    folder = tmp_path / arch
    shutil.copytree(builds[arch], folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    file = folder / manifest["kernels"][0]["file"]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    manifest["kernels"][0]["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    found = differences(read_pinned(PINNED), [pack("hopper", {arch: folder})], complete=False)
    assert len(found) == 1 and found[0].startswith("hopper: the sha256 is not the pinned one")
