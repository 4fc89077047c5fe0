"""Which kernel wheel holds the kernels of which architecture: the one table, and the names that follow from it.

Standard library only and no relative imports: `install.py` loads this file by its path, before torch can be imported.
Adding an architecture to a family is one more name in FAMILIES.
"""

from __future__ import annotations

#: Family of cards that share a kernel wheel -> the architectures inside that wheel, as the compiler names them.
FAMILIES: dict[str, tuple[str, ...]] = {
    "ada": ("sm_89",),
    "hopper": ("sm_90a",),
    "blackwell-datacenter": ("sm_100a", "sm_103a"),
    "blackwell-rtx": ("sm_120a", "sm_121a"),
}


def arch_of(capability: tuple[int, int]) -> str | None:
    """The architecture whose kernels run on cards of a CUDA compute capability; None when no wheel holds any.

    The loader takes kernels on exactly their own capability (those with the suffix `a` could run on no other), so there
    is at most one.
    """
    plain = f"sm_{capability[0]}{capability[1]}"
    known = [arch for archs in FAMILIES.values() for arch in archs]
    return next((arch for arch in (f"{plain}a", plain) if arch in known), None)


def family_of(arch: str) -> str:
    """The family whose wheel holds an architecture. Raises ValueError for an architecture that is in none."""
    for family, archs in FAMILIES.items():
        if arch in archs:
            return family
    known = ", ".join(arch for archs in FAMILIES.values() for arch in archs)
    raise ValueError(f"{arch} is not an architecture that VC-Attention builds kernels for; these are: {known}.")


def package_name(family: str) -> str:
    """The Python package inside a family's wheel. Raises ValueError for an unknown family."""
    if family not in FAMILIES:
        raise ValueError(f"{family} is not a family of cards with a kernel wheel; these are: {', '.join(FAMILIES)}.")
    return "vc_attention_kernels_" + family.replace("-", "_")


def wheel_name(family: str, version: str) -> str:
    """The file name of a family's wheel. `version`: the pack's, as pyproject.toml states it."""
    return f"{package_name(family)}-{version}-py3-none-any.whl"
