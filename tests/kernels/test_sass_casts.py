"""What the assembler made of the casts and of the probe for sm_120a. Executed PTX does not show what it does wrong."""

from __future__ import annotations

import re
import subprocess

import pytest
import sass

pytestmark = pytest.mark.xdist_group("cubins")


def disassembly(tool, cubin) -> str:
    return subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arch", ["sm_120a", "sm_121a"])
def test_nothing_is_unpacked_from_the_zero_register(nvdisasm, builds, arch):
    """ptxas of CUDA 12.9 does so where a word of E2M1 codes is unpacked right after it was packed (`ptx_sm120`)."""
    unpacking = []
    for cubin in sorted(builds[arch].glob("*.cubin")):
        text = disassembly(nvdisasm, cubin)
        assert not re.findall(r"UNPACK_B R\d+, RZ.*", text), cubin.name
        if "E2M1.UNPACK_B" in text:
            unpacking.append(cubin.stem)
    # Preparation of Q, K and V, with and without means, in both types; and the probe.
    assert len(unpacking) == 13 and "probe_nvfp4" in unpacking, unpacking


def test_the_probe_is_the_mma_that_attention_issues(nvdisasm, builds):
    names = sass.opcodes(disassembly(nvdisasm, builds["sm_120a"] / "probe_nvfp4.cubin"))
    assert [name for name in names if "MMA" in name] == ["OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"]
