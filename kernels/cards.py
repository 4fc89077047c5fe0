"""Which card runs what: the one table from a card to the path that serves it, and the sentences about it.

Standard library only and no relative imports: `install.py` loads this file by its path, before torch can be imported.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

#: The kernel wheels that this version of the pack pins; there is none before the first release.
WHEELS = Path(__file__).with_name("wheels.json")

OWN_ATTENTION = "ComfyUI's own attention runs"
CHECKING = "To check results without speed, choose backend = spec on the node."
INSTALL = "Run the pack's install.py with ComfyUI's Python and restart ComfyUI."
UPDATE = "Updating the pack (ComfyUI Manager, or git pull) brings them when they are released."


@dataclass(frozen=True)
class Family:
    """Cards that share their kernels.

    key: name of the family in file names. title: what their owners call them. capabilities: CUDA compute
    capabilities. modes: the plans of the kernels, in words; empty when none are planned. why_not: then, why. unseen: no
    kernel of the family has run on such a card yet.
    """

    key: str
    title: str
    capabilities: tuple[tuple[int, int], ...]
    modes: str = ""
    why_not: str = ""
    unseen: bool = False


#: Said of kernels of a family that is `unseen`.
UNSEEN = (
    "They have been verified by executing their PTX on the CPU, and in part on other cards, not yet on a card like "
    "this one; a numeric self-test decides on it whether they may run. How that went is in the file that "
    "`python3 run.py doctor --report` writes; please send it, there is nothing personal in it."
)
_NO_FP8 = "has no FP8 matrix units, which VC-Attention's kernels need"

FAMILIES: tuple[Family, ...] = (
    Family("volta", "Volta (V100, Titan V)", ((7, 0), (7, 2)), why_not=_NO_FP8),
    Family("turing", "Turing (RTX 20, GTX 16, T4)", ((7, 5),), why_not=_NO_FP8),
    Family("ampere", "Ampere (RTX 30, A100, A40)", ((8, 0), (8, 6), (8, 7), (8, 8)), why_not=_NO_FP8),
    Family("ada", "Ada (RTX 40, L40, RTX 6000 Ada)", ((8, 9),), modes="8-bit", unseen=True),
    Family("hopper", "Hopper (H100, H200)", ((9, 0),), modes="8-bit"),
    Family(
        "blackwell-datacenter",
        "data-centre Blackwell (B200, B300)",
        ((10, 0), (10, 3)),
        modes="8-bit",
        unseen=True,
    ),
    Family("thor", "Jetson Thor", ((10, 1), (11, 0)), why_not="is not one that VC-Attention's kernels are built for"),
    Family(
        "blackwell-rtx",
        "RTX Blackwell (RTX 50, RTX PRO, GB10)",
        ((12, 0), (12, 1)),
        modes="8-bit and 4-bit",
        unseen=True,
    ),
)


@dataclass(frozen=True)
class Verdict:
    """What runs on a card. `runs`: whether a kernel of ours does. `code` and `text` are those of `reasons.Reason`."""

    code: str
    text: str
    runs: bool = False
    family: str = ""


def family_of(capability: tuple[int, int] | None) -> Family | None:
    """The family of a CUDA compute capability, None when it is not in the table."""
    return next((family for family in FAMILIES if capability in family.capabilities), None)


@lru_cache(maxsize=4)
def released(wheels: Path = WHEELS) -> frozenset[str]:
    """The architectures (`sm_90a`, ...) whose kernels the file `wheels` pins; none when it is missing or damaged."""
    try:
        entries = json.loads(wheels.read_text(encoding="utf-8"))["wheels"]
        return frozenset(str(arch) for entry in entries for arch in entry["archs"])
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


def title(name: str, capability: tuple[int, int] | None) -> str:
    """A card by its name, and its compute capability where it has one."""
    return f"{name} (compute capability {capability[0]}.{capability[1]})" if capability else name


def describe(
    name: str,
    capability: tuple[int, int] | None = None,
    vendor: str = "nvidia",
    available: Collection[str] | None = None,
    installed: Collection[str] = (),
) -> Verdict:
    """Which path runs on a card today, and why.

    name: as its driver calls it. capability: CUDA compute capability, None where there is none. vendor: "nvidia",
    "amd", "intel", "apple" or "cpu" (no usable GPU). available: architectures (`sm_90a`, ...) whose kernels are
    released, those of `released()` if None. installed: architectures whose kernels are here.
    """
    if vendor == "cpu":
        return Verdict(
            "no_gpu", f"{name}: VC-Attention's kernels are for NVIDIA GPUs, so {OWN_ATTENTION} on the CPU. {CHECKING}"
        )
    if vendor != "nvidia" or capability is None:
        return Verdict(
            "vendor", f"{name}: VC-Attention's kernels are for NVIDIA GPUs, so {OWN_ATTENTION} on this card. {CHECKING}"
        )
    card = title(name, capability)
    family = family_of(capability)
    if family is None:
        newer = capability > FAMILIES[-1].capabilities[-1]
        older = capability < FAMILIES[0].capabilities[0]
        age = "newer than" if newer else "older than the ones that" if older else "not one that"
        age += " this version of VC-Attention knows"
        advice = "Update the pack (ComfyUI Manager, or git pull). " if newer else ""
        return Verdict("card_unknown", f"{card}: this card is {age}, so {OWN_ATTENTION}. {advice}{CHECKING}")
    if not family.modes:
        return Verdict(
            "card_unsupported",
            f"{card}: this card {family.why_not}, so {OWN_ATTENTION}. {CHECKING}",
            family=family.key,
        )
    plain = f"sm_{capability[0]}{capability[1]}"
    archs = {plain, f"{plain}a"}  # as the compiler names them: with an `a` from Hopper on
    kernels = f"the {family.modes} kernels for {family.title}"
    unseen = f" {UNSEEN}" if family.unseen else ""
    if archs & set(installed):
        text = f"{card}: {kernels} run on it.{unseen}"
        return Verdict("ok", text, runs=True, family=family.key)
    if archs & set(released() if available is None else available):
        return Verdict(
            "not_installed",
            f"{card}: {kernels} are not installed here, so {OWN_ATTENTION}. {INSTALL}{unseen} {CHECKING}",
            family=family.key,
        )
    return Verdict(
        "not_released",
        f"{card}: {kernels} are not released yet, so {OWN_ATTENTION} today. {UPDATE} {CHECKING}",
        family=family.key,
    )
