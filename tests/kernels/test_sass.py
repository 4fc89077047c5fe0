"""What the compiler made of the attention kernels, checked without a GPU: instruction counts, registers, bytes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from vc_attention.kernels.cute import config as configuration
from vc_attention.kernels.cute.config import AttentionConfig, config_of, configs
from vc_attention.kernels.cute.elf import read_cubin
from vc_attention.kernels.launch.manifest import Manifest, read_manifest
from vc_attention.kernels.plan import FAITHFUL, FAST, FOUR_BIT
from vc_attention.kernels.spec.expcast import BETA, TOP_LOG2

#: One process compiles the kernels that these tests look at.
pytestmark = pytest.mark.xdist_group("cubins")

ROOT = Path(__file__).resolve().parents[2]
#: A consumer may use 240 registers; two more are the zero register and the one that the ABI keeps.
REGISTER_CAP = 238


@pytest.mark.parametrize("config", configs(), ids=lambda c: c.name)
def test_instructions(cubins, nvdisasm, config: AttentionConfig):
    cubin = cubins / f"{config.name}.cubin"
    text = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout

    def count(pattern: str) -> int:
        return len(re.findall(pattern, text))

    # With means, the first tile of a group is a second copy of the loop body.
    bodies = 2 if config.demean else 1
    assert count(r"\bIGMMA\.64x256x32") == 4 * bodies
    assert (
        count(r"\bQGMMA\.64x128x32" if config.exact_sums and not config.key_means else r"\bQGMMA\.64x136x32")
        == 8 * bodies
    )
    assert count(r"\bHGMMA\.64x128x16") == (2 if config.demean else 0)
    assert count(r"\bHGMMA\.64x8x16") == (8 if config.key_means else 0)
    assert count(r"\bVIMNMX3\b") == 60 * bodies
    # One wait a product: more of them mean that ptxas has serialised the MMAs.
    assert count(r"WARPGROUP\.DEPBAR") <= 2 * bodies + 1
    if config.probability == "expcast_wide":
        assert count(r"\bF2IP\.U8\.F32\.NTZ") == 64 * bodies
        # None for each element; the few are the division of the head index in the epilogue.
        assert count(r"\bF2I\b|\bI2I\b|\bI2F\b") < 8
        assert count(r"MUFU\.EX2") < 10
    else:
        assert count(r"\bF2FP\.SATFINITE\.E4M3") == 64 * bodies
        assert 128 * bodies <= count(r"MUFU\.EX2") < 128 * bodies + 10
    assert count(r"\b(LDL|STL)\b") == 0
    assert max(int(n) for n in re.findall(r"\bR(\d+)\b", text)) < REGISTER_CAP


def test_two_builds_are_identical(cubins, compile_kernels, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(ROOT / "kernels", copy / "kernels", ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    compile_kernels(copy, tmp_path / "again")
    first, again = (
        {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".ptx"}
        for folder in (cubins, tmp_path / "again")
    )
    assert first == again


def test_manifest_states_what_the_cubins_say(cubins):
    manifest = read_manifest(cubins)
    assert isinstance(manifest, Manifest)
    assert manifest.capability == (9, 0)
    for config in configs():
        entry = manifest.kernels[config.name]
        facts = read_cubin((cubins / entry.file).read_bytes())
        assert (entry.symbol, entry.params, entry.block) == (facts.symbol, facts.params, facts.block)
        assert [size for _, size in entry.params] == [8] * 10 + [4] * 4
        assert entry.block == (384, 1, 1)
        # 384 threads at the launch count must fit the 65536 registers of an SM, and 227 KB of shared memory.
        assert entry.registers * 384 <= 65536
        assert entry.shared <= 227 * 1024
    assert json.loads((cubins / "manifest.json").read_text())["arch"] == "sm_90a"


def test_kernel_constants_are_the_specifications():
    assert configuration.BETA == BETA
    assert TOP_LOG2["expcast_wide"] == configuration.TOP_LOG2


def test_plans_have_kernels():
    assert config_of(FAST, "bf16") == AttentionConfig("expcast_wide", True, False, "bf16")
    assert config_of(FAITHFUL.without_smoothing(), "fp16") == AttentionConfig("exp2", False, False, "fp16")
    assert config_of(FOUR_BIT, "bf16") is None
    assert config_of(FAST, "") is None
