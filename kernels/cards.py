"""Which card runs what: the one table from a card to the path that serves it, and the sentences about it.

Standard library only and no relative imports: `install.py` loads this file by its path, before torch can be imported.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

#: Families whose kernels are part of this version of the pack. Empty until the first kernel wheels are released.
RELEASED: frozenset[str] = frozenset()

OWN_ATTENTION = "ComfyUI's own attention runs"
CHECKING = "To check results without speed, choose backend = spec on the node."
UPDATE = "Updating the pack (ComfyUI Manager, or git pull) brings them when they are released."


@dataclass(frozen=True)
class Family:
    """Cards that share their kernels.

    key: name of the family in file names. title: what their owners call them. capabilities: CUDA compute
    capabilities. modes: the plans of the kernels, in words; empty when none are planned. why_not: then, why.
    """

    key: str
    title: str
    capabilities: tuple[tuple[int, int], ...]
    modes: str = ""
    why_not: str = ""


_NO_FP8 = "has no FP8 matrix units, which VC-Attention's kernels need"

FAMILIES: tuple[Family, ...] = (
    Family("volta", "Volta (V100, Titan V)", ((7, 0), (7, 2)), why_not=_NO_FP8),
    Family("turing", "Turing (RTX 20, GTX 16, T4)", ((7, 5),), why_not=_NO_FP8),
    Family("ampere", "Ampere (RTX 30, A100, A40)", ((8, 0), (8, 6), (8, 7), (8, 8)), why_not=_NO_FP8),
    Family("ada", "Ada (RTX 40, L40, RTX 6000 Ada)", ((8, 9),), modes="8-bit"),
    Family("hopper", "Hopper (H100, H200)", ((9, 0),), modes="8-bit"),
    Family("blackwell-datacenter", "data-centre Blackwell (B200, B300)", ((10, 0), (10, 3)), modes="8-bit"),
    Family("thor", "Jetson Thor", ((10, 1), (11, 0)), why_not="is not one that VC-Attention's kernels are built for"),
    Family("blackwell-rtx", "RTX Blackwell (RTX 50, RTX PRO, GB10)", ((12, 0), (12, 1)), modes="8-bit and 4-bit"),
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


def describe(
    name: str,
    capability: tuple[int, int] | None = None,
    vendor: str = "nvidia",
    released: Collection[str] = RELEASED,
) -> Verdict:
    """Which path runs on a card today, and why.

    name: as its driver calls it. capability: CUDA compute capability, None where there is none. vendor: "nvidia",
    "amd", "intel", "apple" or "cpu" (no usable GPU). released: families whose kernels are there.
    """
    if vendor == "cpu":
        return Verdict(
            "no_gpu", f"{name}: VC-Attention's kernels are for NVIDIA GPUs, so {OWN_ATTENTION} on the CPU. {CHECKING}"
        )
    if vendor != "nvidia" or capability is None:
        return Verdict(
            "vendor", f"{name}: VC-Attention's kernels are for NVIDIA GPUs, so {OWN_ATTENTION} on this card. {CHECKING}"
        )
    card = f"{name} (compute capability {capability[0]}.{capability[1]})"
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
    if family.key not in released:
        return Verdict(
            "not_released",
            f"{card}: the {family.modes} kernels for {family.title} are not released yet, so {OWN_ATTENTION} today. "
            f"{UPDATE} {CHECKING}",
            family=family.key,
        )
    return Verdict(
        "ok", f"{card}: the {family.modes} kernels for {family.title} run on it.", runs=True, family=family.key
    )
