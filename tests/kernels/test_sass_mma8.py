"""What the compiler made of the 8-bit mma.sync kernels, checked without a GPU: instructions, registers, memory."""

from __future__ import annotations

import re
import subprocess
from functools import lru_cache

import pytest
from mma8_kernels import ARCHS, compiled
from vc_attention.kernels.cute.config_mma8 import LOADER_OF, Mma8Config, configs
from vc_attention.kernels.cute.elf import read_cubin
from vc_attention.kernels.launch.manifest import Manifest, read_manifest

#: One process compiles the kernels that these tests look at.
pytestmark = pytest.mark.xdist_group("mma8")

#: fp16 output differs in the instruction that packs it.
BF16 = [config for config in configs() if config.output == "bf16"]
#: Registers of a thread: all that there are, or what setmaxnreg gives a consumer; two of them have other uses.
REGISTER_CAP = {"async": 254, "bulk": 238}


@lru_cache
def _sass(arch: str, nvdisasm: str, config: Mma8Config) -> str:
    command = [nvdisasm, "-c", str(compiled(arch) / f"{config.name}.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("config", BF16, ids=lambda c: c.name)
def test_instructions(nvdisasm, arch: str, config: Mma8Config):
    text = _sass(arch, nvdisasm, config)
    loader = LOADER_OF[arch]

    def count(pattern: str) -> int:
        return len(re.findall(pattern, text))

    # The loop body is there once: 16 n8 tiles of scores and 17 of values (16 with exact sums), four steps each.
    value_tiles = 16 if config.exact_sums else 17
    assert count(r"\bIMMA\.16832\.S8\.S8\b") == 64
    half = config.accumulate == "f16"
    assert count(r"\bQMMA\.16832\.F16\.E4M3\.E4M3\b") == 64 * half
    assert count(r"\bQMMA\.16832\.F32\.E4M3\.E4M3\b") == 4 * value_tiles - 64 * half
    assert count(r"\bHMMA\.16816\.F32\.BF16\b") == 16 * config.demean + 8 * config.key_means
    # One 128-bit load for two steps of one n8 tile; nothing rearranges them.
    assert count(r"\bLDS\.128\b") == 32 + 2 * value_tiles + 4 * config.key_means
    assert count(r"(?<!@!PT )\bLDS\b(?!\.128)") == 16 * config.demean
    assert count(r"\b(LDSM|PRMT|MOVM)\b") <= 2
    # 128 FMAs an element pair: 64 scores, 64 of O; the rest is per row. Accumulators start without being filled.
    assert 128 <= count(r"\bFFMA\b") <= 140
    assert count(r"\b(V?IMNMX\S*)\b") <= 72
    if config.probability == "expcast_wide":
        assert count(r"\bF2IP\.U8\.F32\.NTZ") == 32
        assert count(r"MUFU\.EX2") <= 4
    else:
        assert count(r"\bF2FP\.SATFINITE\.E4M3") == 32
        assert count(r"MUFU\.EX2") == 66
    # fp16 sums are widened, one instruction each.
    assert count(r"\bHADD2\.F32\b") == 64 * half
    # None for each element; the few are the division of the head index in the epilogue.
    assert count(r"\b(F2I|I2F|I2FP)\b") < 8
    assert count(r"\b(LDL|STL)\b") == 0
    assert max(int(n) for n in re.findall(r"\bR(\d+)\b", text)) < REGISTER_CAP[loader]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("config", BF16, ids=lambda c: c.name)
def test_loader(nvdisasm, arch: str, config: Mma8Config):
    """Bulk copies and setmaxnreg on sm_120a, and no call (for which setmaxnreg would be ignored); cp.async on sm_89."""
    text = _sass(arch, nvdisasm, config)
    bulk = LOADER_OF[arch] == "bulk"
    copies = 2 + config.demean + config.key_means
    assert len(re.findall(r"\bUBLKCP\b", text)) == (copies if bulk else 0)
    assert len(re.findall(r"\bUSETMAXREG\b", text)) == (2 if bulk else 0)
    assert bulk == ("LDGSTS" not in text)
    if bulk:
        assert not re.findall(r"\bCALL\b", text)
    else:
        assert len(re.findall(r"\bBAR\.SYNC\b", text)) == 1 + config.key_means


@pytest.mark.parametrize("arch", ARCHS)
def test_manifest_states_what_the_cubins_say(arch):
    folder = compiled(arch)
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    assert manifest.arch == arch
    assert set(manifest.kernels) == {config.name for config in configs()}
    for entry in manifest.kernels.values():
        facts = read_cubin((folder / entry.file).read_bytes())
        assert (entry.symbol, entry.params, entry.block) == (facts.symbol, facts.params, facts.block)
        assert [size for _, size in entry.params] == [8] * 10 + [4] * 4
        assert entry.block == ((384, 1, 1) if LOADER_OF[arch] == "bulk" else (256, 1, 1))
        # What sm_89 and sm_120 have: 65536 registers of an SM, 99 KB of shared memory a CTA.
        assert entry.registers * entry.block[0] <= 65536
        assert entry.shared <= 99 * 1024


@pytest.mark.parametrize(("arch", "same_as"), [("sm_90a", "sm_89"), ("sm_121a", "sm_120a")])
def test_another_architecture_runs_the_same_program(arch, same_as):
    """What is shown by running the trial on sm_90a holds for sm_89's PTX, and sm_120a's tests hold for sm_121a."""
    only = "exp2_means_v_k_bf16"
    paths = sorted(compiled(arch, only).glob("*.ptx"))
    assert len(paths) == 2
    for path in paths:
        other = compiled(same_as) / path.name
        text = other.read_text(encoding="utf-8")
        assert text.count(f".target {same_as}") == 1
        assert path.read_text(encoding="utf-8") == text.replace(f".target {same_as}", f".target {arch}")
