"""What the compiler made of the attention kernels of B200 and B300, checked without a GPU: instructions, registers."""

from __future__ import annotations

import functools
import subprocess

import pytest
import sass
from sm100_kernels import ARCHS, compiled
from vc_attention.kernels.cute.config_sm100 import Sm100Config, configs
from vc_attention.kernels.cute.elf import read_cubin
from vc_attention.kernels.launch.manifest import Manifest, read_manifest

pytestmark = pytest.mark.xdist_group("sm100")

#: Registers of a softmax thread.
REGISTER_CAP = 176
#: Shared memory of a CTA on sm_100 and sm_103.
SHARED_CAP = 227 * 1024
#: Instructions that FlashAttention-4's FP8 kernel (4.0.0b36, by the same compiler) has for the softmax of one 128 x 128
#: tile (benchmarks/NOTES.md).
FA4_SOFTMAX = 533

each = pytest.mark.parametrize(
    ("arch", "config"), [(arch, c) for arch in ARCHS for c in configs(arch)], ids=lambda x: getattr(x, "name", x)
)


@functools.cache
def disassembly(tool: str, arch: str, name: str) -> str:
    command = [tool, "-c", str(compiled(arch) / f"{name}.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@each
def test_matrix_products(nvdisasm, arch, config: Sm100Config):
    """Four K steps each of Q K^T, P V^T and row sums, for both halves; Q K^T once more ahead of the loop."""
    opcodes = sass.opcodes(disassembly(nvdisasm, arch, config.name))
    text = disassembly(nvdisasm, arch, config.name)
    loop = next(x for x in sass.loops(text) if x.count("UTCQMMA") + x.count("UTCIMMA") >= 16)
    sums = 0 if config.exact_sums else 8
    bias = 16 * config.key_means  # q . (key mean) of 8 blocks: 8 steps of bf16 for each half
    scores = "UTCQMMA" if config.scores == "fp8" else "UTCIMMA"
    assert loop.count("UTCQMMA") + loop.count("UTCIMMA") == 8 + 8 + sums
    assert loop.count(scores) == 8 + (8 + sums if config.scores == "fp8" else 0)
    assert sum(name.startswith(("UTCQMMA", "UTCIMMA")) for name in opcodes) == 24 + sums
    # The means: bf16, in the loop for the group before, and after it for the last group. Those of K: ahead of a group.
    assert loop.count("UTCHMMA") == 2 * config.demean + bias
    assert sum(name.startswith("UTCHMMA") for name in opcodes) == 4 * config.demean + 2 * bias


def softmax_loop(nvdisasm, arch, config: Sm100Config) -> sass.Loop:
    """The loop over key tiles of a softmax warp: a row in each of its threads."""
    return next(x for x in sass.loops(disassembly(nvdisasm, arch, config.name)) if x.count("FFMA2") >= 64)


@each
def test_softmax(nvdisasm, arch, config: Sm100Config):
    """Nothing is done to a score but the row maximum, one half of an FFMA2, and its rounding (INT8: and one IMAD)."""
    loop = softmax_loop(nvdisasm, arch, config)
    # On B200 13 of 64 pairs of exponentials are polynomials: 5 FFMA2 and 2 FADD2 each.
    polynomials = 13 * (arch == "sm_100a" and config.probability == "exp2")
    assert loop.count("FFMA2") == 64 + 5 * polynomials
    integers = config.scores == "int8"
    assert loop.count("VIMNMX3" if integers else "FMNMX3") == 63
    # Integers become floats by the FMAs' pipe; the row maximum alone is converted.
    assert loop.count("I2FP.F32.S32") == int(integers)
    assert 0 <= loop.count("IMAD") - 128 * integers <= 16
    if config.probability == "expcast_wide":
        assert loop.count("F2IP.U8.F32.NTZ") == 64
        assert loop.count("F2FP") == 0
        # The rescale factor alone.
        assert loop.count("MUFU") == 1
        assert loop.length <= 256 + 131 * integers + 26 * config.key_means < FA4_SOFTMAX
    else:
        assert loop.count("F2FP.SATFINITE.E4M3") == 64
        assert loop.count("MUFU.EX2") == loop.count("MUFU") == 129 - 2 * polynomials
        assert loop.count("FADD2") == (63 if config.exact_sums else 0) + 2 * polynomials
    assert loop.count("LDTM.x32") == loop.count("LDTM") == 4
    assert loop.count("STTM.x8") == loop.count("STTM") == 4
    assert loop.count("SHFL") == 0
    assert loop.count("MOV") <= 4


@each
def test_rest(nvdisasm, arch, config: Sm100Config):
    text = disassembly(nvdisasm, arch, config.name)
    opcodes = sass.opcodes(text)
    assert not [name for name in opcodes if name.startswith(("LDL", "STL"))]
    assert sass.highest_register(text) < REGISTER_CAP
    # Both halves of O in eight parts, twice two numbers at once.
    (loop,) = [x for x in sass.loops(text) if x.count("FMUL2") and x.length < 600]
    assert loop.count("FMUL2") == 128
    # ExpCast's kernel needs the special functions for a row's rescale and its 1 / l only.
    if config.probability == "expcast_wide":
        assert sum(name.startswith("MUFU.EX2") for name in opcodes) == 1
        assert sum(name.startswith("MUFU") for name in opcodes) <= 6


@pytest.mark.parametrize("arch", ARCHS)
def test_manifest_states_what_the_cubins_say(arch):
    manifest = read_manifest(compiled(arch))
    assert isinstance(manifest, Manifest)
    assert set(manifest.kernels) == {config.name for config in configs(arch)}
    assert manifest.capability == {"sm_100a": (10, 0), "sm_103a": (10, 3)}[arch]
    for config in configs(arch):
        entry = manifest.kernels[config.name]
        facts = read_cubin((manifest.folder / entry.file).read_bytes())
        assert (entry.symbol, entry.params, entry.block) == (facts.symbol, facts.params, facts.block)
        assert [size for _, size in entry.params] == [8] * 10 + [4] * 4
        assert entry.block == (512, 1, 1)
        # The launch takes all registers of an SM; the warpgroups redistribute them.
        assert entry.registers * 512 == 65536
        assert entry.shared <= SHARED_CAP
