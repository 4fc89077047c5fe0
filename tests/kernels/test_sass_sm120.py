"""What the compiler made of the NVFP4 attention kernels, checked without a GPU: instruction counts and registers."""

from __future__ import annotations

import functools
import subprocess

import nvfp4_kernels
import pytest
import sass
from vc_attention.kernels.cute import layouts_nvfp4 as lo
from vc_attention.kernels.cute.config_nvfp4 import Nvfp4Config, configs
from vc_attention.kernels.cute.elf import read_cubin

pytestmark = pytest.mark.xdist_group("nvfp4")

#: A consumer may use 240 registers; two more are the zero register and the one that the ABI keeps.
REGISTER_CAP = 238
#: Shared memory of a CTA on sm_120 and sm_121.
SHARED_CAP = 99 * 1024
#: Instructions beside the 64 MMAs in SageAttention3's loop over key tiles (128 x 128, 16 rows a warp like ours), with
#: its published sources compiled by nvcc 13.0 for sm_120a with their own options (benchmarks/NOTES.md).
SAGE3_OTHERS = 765


@functools.cache
def disassembly(tool: str, name: str) -> str:
    cubin = nvfp4_kernels.compiled() / f"{name}.cubin"
    return subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


each = pytest.mark.parametrize("config", configs(), ids=lambda c: c.name)


@each
def test_instructions_of_a_tile(nvdisasm, config: Nvfp4Config):
    text = disassembly(nvdisasm, config.name)
    loop = next(x for x in sass.loops(text) if x.count("OMMA"))
    # 16 n8 tiles of scores, 16 of the output and one of row sums, each two k64 steps; no other copy of the loop.
    assert loop.count("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X") == 66
    assert sum(name.startswith("OMMA") for name in sass.opcodes(text)) == 66
    # Codes of an n8 tile in one load, scales of two.
    assert loop.count("LDS.128") == 16 + 8 + 17 + 8
    assert loop.count("LDS") - loop.count("LDS.128") == int(config.key_means)
    # 64 elements; of the lane's own row 4 group scales, a rescale factor, and the logarithms of the rounded scales.
    assert loop.count("MUFU.EX2") == 64 + 4 + 1
    assert loop.count("MUFU.LG2") == 4
    assert loop.count("F2FP.SATFINITE.E2M1") == 32
    assert loop.count("F2FP.SATFINITE.E4M3") == 2
    assert loop.count("SHFL") == 11
    # Nothing converts scores and nothing multiplies outputs: the rescale is an FMA.
    assert loop.count("FMUL") <= 6
    assert loop.count("MOV") <= 16


@each
def test_not_more_instructions_than_sageattention3(nvdisasm, config: Nvfp4Config):
    found = [x for x in sass.loops(disassembly(nvdisasm, config.name)) if x.count("OMMA")]
    others = found[0].length - 66
    if config.demean:
        # The loop over mean groups holds the one over tiles: what it adds is shared by 8 tiles.
        assert len(found) == 2
        others += (found[1].length - found[0].length) / lo.MEAN_GROUP
    assert others <= SAGE3_OTHERS
    assert others <= (500 if config.key_means else 480 if config.demean else 465)


@each
def test_registers_and_memory(nvdisasm, config: Nvfp4Config):
    text = disassembly(nvdisasm, config.name)
    names = sass.opcodes(text)
    assert not [name for name in names if name.startswith(("LDL", "STL"))]
    # A call, such as ptxas makes of a bulk copy to .shared::cluster, would make it ignore setmaxnreg.
    assert not [name for name in names if name.startswith("CALL")]
    assert sum(name.startswith("USETMAXREG") for name in names) == 2
    assert sum(name.startswith("UBLKCP") for name in names) == 2 + config.demean + config.key_means
    assert sum(name.startswith("HMMA.1688") for name in names) == 16 * config.demean
    assert sum(name.startswith("HMMA.16816") for name in names) == 8 * config.key_means
    assert sass.highest_register(text) < REGISTER_CAP
    entry = nvfp4_kernels.manifest().kernels[config.name]
    facts = read_cubin((nvfp4_kernels.compiled() / entry.file).read_bytes())
    assert (entry.symbol, entry.params, entry.block) == (facts.symbol, facts.params, facts.block)
    assert [size for _, size in entry.params] == [8] * 10 + [4] * 4
    assert entry.block == (384, 1, 1)
    assert entry.registers * 384 <= 65536
    assert entry.shared <= SHARED_CAP


def test_manifest_is_of_sm_120():
    assert nvfp4_kernels.manifest().capability == (12, 0)
    assert set(nvfp4_kernels.manifest().kernels) == {config.name for config in configs()}
