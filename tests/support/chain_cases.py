"""A faked card with kernels in several places, for the tests of the chain of kernels and of its verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from stub_driver import NAMES, machine, write_kernels
from vc_attention.kernels.launch import chain, verdicts
from vc_attention.kernels.spec.attention import attention as spec

CARD = torch.device("cuda", 0)


def point(root: Path, family: str = "hopper", **changes) -> Path:
    """A wheel as the installer unpacks it, with the pointer to it. Returns the folder of sm_90a's kernels."""
    data = {"schema": 1, "family": family, "folder": f"{family}/0123456789ab", "wheel": f"{family}.whl", "version": "0"}
    folder = root / data["folder"]
    folder.mkdir(parents=True, exist_ok=True)
    (root / f"{family}.json").write_text(json.dumps({**data, "sha256": "0" * 64, **changes}), encoding="utf-8")
    return folder / "sm_90a"


def truncated(folder: Path) -> None:
    path = folder / f"{NAMES[2]}.cubin"
    path.write_bytes(path.read_bytes()[:-3])


class Card:
    """A faked machine, and the attention that its kernels compute: `faults` maps a folder to what it does instead."""

    def __init__(self, monkeypatch, tmp_path) -> None:
        self.prebuilt = tmp_path / "prebuilt"
        self.stub = machine(monkeypatch, self.prebuilt)
        self.faults, self.tested = {}, []
        self.monkeypatch = monkeypatch

    def attention_on(self, kernels, *arguments):
        folder = kernels.manifest.folder
        if not self.tested or self.tested[-1] != folder:
            self.tested.append(folder)
        return self.faults.get(folder, spec)(*arguments)

    def choose(self, backend="auto", **options):
        return chain.choose(CARD, self.attention_on, backend, **options)

    def attempts(self, **options):
        return chain.attempts(CARD, self.attention_on, **options)

    def restart(self) -> None:
        """What a new process of the same user sees."""
        chain.forget()
        verdicts.forget()
        self.tested.clear()

    def two(self) -> tuple[Path, Path]:
        """Kernels built by hand, and those of a wheel, another build, behind them."""
        return write_kernels(self.prebuilt / "sm_90a"), write_kernels(point(self.prebuilt), package="0.1.1")
