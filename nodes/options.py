"""What a creator chose on the node, validated once, and the plan that follows from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import torch

from ..kernels import FOUR_BIT, Plan, preset

PRECISIONS = ("auto", "8-bit", "4-bit", "off")
QUALITIES = ("fast", "faithful")
GROUPINGS = ("first steps", "all steps", "off")
ON_PROBLEM = ("fall back", "stop")
BACKENDS = ("auto", "spec")

MAX_GROUPS = 256
MAX_REUSE_STEPS = 64
MAX_TOKENS = 1 << 20
MAX_BUDGET_GB = 64.0
MAX_BLOCK = 4096

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("group_fraction", 0.0, 1.0),
    ("reuse_steps", 1, MAX_REUSE_STEPS),
    ("groups", 0, MAX_GROUPS),
    ("min_tokens", 0, MAX_TOKENS),
    ("start_percent", 0.0, 1.0),
    ("end_percent", 0.0, 1.0),
    ("state_budget_gb", 0.0, MAX_BUDGET_GB),
)
_BLOCK = re.compile(r"(?:([A-Za-z_]\w*)\s*:\s*)?(\d{1,5})(?:\s*-\s*(\d{1,5}))?")


@dataclass(frozen=True)
class BlockList:
    """Blocks that a creator listed: `any_type` by number alone, `typed` by (block type, number)."""

    any_type: frozenset[int] = frozenset()
    typed: frozenset[tuple[str, int]] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.any_type or self.typed)

    def __contains__(self, block: tuple[object, object]) -> bool:
        return block[1] in self.any_type or block in self.typed


def parse_blocks(text: str, name: str = "dense_blocks") -> BlockList:
    """Read a list such as "0-2, 38, single:3, double:0-1". name: of the widget, for the sentence.

    A number or a range names blocks of every type; a type before a colon ("double", "single") narrows it.
    Raises ValueError with a sentence for the creator.
    """
    any_type: set[int] = set()
    typed: set[tuple[str, int]] = set()
    for item in filter(None, (part.strip() for part in re.split(r"[,;\n]", text))):
        match = _BLOCK.fullmatch(item)
        if match is None:
            raise ValueError(
                f"{name} does not understand {item!r}: write block numbers and ranges separated by commas, such "
                "as 0-2, 38, single:3, or leave it empty."
            )
        kind, first = match[1], int(match[2])
        last = first if match[3] is None else int(match[3])
        if last < first or last > MAX_BLOCK:
            raise ValueError(
                f"{name} has the range {item!r}: it must count upwards, to {MAX_BLOCK} at most. Write it as "
                f"{min(first, last)}-{min(max(first, last), MAX_BLOCK)}."
            )
        if kind is None:
            any_type.update(range(first, last + 1))
        else:
            typed.update((kind, i) for i in range(first, last + 1))
    return BlockList(frozenset(any_type), frozenset(typed))


def parse_steps(text: str, name: str = "steps") -> frozenset[int]:
    """Read a list of steps such as "1-4, 10", counted from 1. Raises ValueError with a sentence for the creator."""
    blocks = parse_blocks(text, name)
    if blocks.typed or 0 in blocks.any_type:
        raise ValueError(f"{name} takes steps, counted from 1, and ranges of them, such as 1-4, 10.")
    return blocks.any_type


@dataclass(frozen=True)
class PatchOptions:
    """One field for each widget, in the widgets' order.

    group_fraction: share of the steps, from the first, in which tokens are grouped. reuse_steps: sampling steps for
    which one grouping serves. groups: clusters for each head, 0 for automatic. min_tokens: keys below which a call is
    left alone. start_percent, end_percent: part of the denoising (0 to 1) in which low-bit attention runs.
    state_budget_gb: memory for kept groupings, in 10^9 bytes, for each device. plan: replaces precision and quality
    (for tests and experiments).
    Raises ValueError, in a sentence for the creator, on a value out of range.
    """

    precision: str = "auto"
    quality: str = "fast"
    grouping: str = "first steps"
    group_fraction: float = 0.25
    reuse_steps: int = 4
    groups: int = 0
    min_tokens: int = 4096
    dense_blocks: str = ""
    start_percent: float = 0.0
    end_percent: float = 1.0
    state_budget_gb: float = 1.0
    on_problem: str = "fall back"
    backend: str = "auto"
    plan: Plan | None = None
    blocks: BlockList = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("precision", PRECISIONS),
            ("quality", QUALITIES),
            ("grouping", GROUPINGS),
            ("on_problem", ON_PROBLEM),
            ("backend", BACKENDS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}.")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must lie between {low} and {high}.")
        if self.start_percent > self.end_percent:
            raise ValueError(
                f"start_percent ({self.start_percent}) lies after end_percent ({self.end_percent}), so low-bit "
                "attention would never run. Swap them, or set precision to off."
            )
        object.__setattr__(self, "blocks", parse_blocks(self.dense_blocks))

    @property
    def enabled(self) -> bool:
        """Whether the model gets patched at all."""
        return self.precision != "off" or self.plan is not None

    def plans(self, device: torch.device | str | None = None) -> tuple[Plan, ...]:
        """The plans to try on `device`, in order; the kernels' registry says which of them the card can run.

        "auto" means 8 bit, the choice that is closest to 16 bit; "4-bit" falls back to 8 bit where it has no kernel,
        and a plan with key means to the same without them.
        """
        if self.plan is not None:
            return (self.plan, replace(self.plan, key_means=False)) if self.plan.key_means else (self.plan,)
        eight = preset(self.quality, device)
        return (FOUR_BIT, eight) if self.precision == "4-bit" else (eight,)

    @property
    def budget_bytes(self) -> int:
        """`state_budget_gb` in bytes."""
        return int(self.state_budget_gb * 1e9)
