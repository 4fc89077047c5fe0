"""What a run of the benchmark found, as values, and as JSON. Needs no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA = 1
HEAD_DIM = 128
FLASH_4, CUDNN, FLASH_2 = "FlashAttention-4 BF16", "cuDNN BF16", "FlashAttention-2 BF16"
#: What speeds are divided by: the first of these that ran.
REFERENCES = (FLASH_4, CUDNN, FLASH_2)


@dataclass(frozen=True)
class Row:
    """One way to compute the call. ms: median; low, high: quartiles; rounds: the median of each round.

    ours: a row of VC-Attention. whole_call: from bf16 q, k, v to the bf16 output, else from prepared operands.
    error: relative L2 against fp32 on sampled rows. mhz, watts: medians of what the driver said, None if nothing.
    """

    name: str
    ours: bool
    whole_call: bool
    ms: float
    low: float
    high: float
    timings: int
    rounds: list[float]
    tflops: float
    error: float
    mhz: float | None = None
    watts: float | None = None


@dataclass(frozen=True)
class Pass:
    """One launch of a preparation or a grouping, or all of it (`name` "all"). bytes: what it must read and write.

    of: the call that it belongs to. launches: how often the call makes it. ms: of one launch.
    """

    of: str
    name: str
    launches: int
    ms: float
    bytes: int

    @property
    def rate(self) -> float:
        """Achieved bandwidth in GB/s (10^9)."""
        return self.bytes / self.ms / 1e6


@dataclass(frozen=True)
class Memory:
    """Of one reuse call, in bytes. peak: on top of q, k, v in 16 bit. operands: q, k, v in 8 bit. output: in 16 bit."""

    peak: int
    operands: int
    output: int

    @property
    def over(self) -> float:
        """Share that the call takes beyond its 8-bit operands and its output."""
        return self.peak / (self.operands + self.output) - 1


@dataclass(frozen=True)
class Shape:
    """Everything about one shape. failed: row -> why it did not run. copy: a device-to-device copy, as a Pass."""

    name: str
    tokens: int
    heads: int
    rows: list[Row]
    failed: dict[str, str] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    copy: Pass | None = None
    memory: Memory | None = None

    @property
    def reference(self) -> Row | None:
        """The row that speeds are divided by."""
        return next((row for name in REFERENCES for row in self.rows if row.name == name), None)

    def ratio(self, row: Row) -> float | None:
        """How many times faster than the reference `row` is."""
        return self.reference.ms / row.ms if self.reference else None


@dataclass
class Run:
    """One run. peers: row -> version. missing: row -> why it is not there. ours_absent: why no row of ours is there."""

    date: str
    command: list[str]
    device: dict[str, Any]
    software: dict[str, str]
    settings: dict[str, Any]
    peers: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    ours_absent: str = ""
    kernels: dict[str, Any] = field(default_factory=dict)
    shapes: list[Shape] = field(default_factory=list)
    schema: int = SCHEMA


def to_json(run: Run) -> str:
    """The run as JSON, with the ratios and bandwidths that follow from it."""
    data = asdict(run)
    for shape, entry in zip(run.shapes, data["shapes"], strict=True):
        entry["reference"] = shape.reference.name if shape.reference else None
        for row, values in zip(shape.rows, entry["rows"], strict=True):
            values["ratio"] = shape.ratio(row)
        for one, values in zip(shape.passes, entry["passes"], strict=True):
            values["gb_per_s"] = one.rate
            values["share_of_copy"] = one.rate / shape.copy.rate if shape.copy else None
        if shape.copy is not None:
            entry["copy"]["gb_per_s"] = shape.copy.rate
        if shape.memory is not None:
            entry["memory"]["over_8bit_and_output"] = shape.memory.over
    return json.dumps(data, indent=1) + "\n"


def from_json(text: str) -> Run:
    """The inverse of `to_json`. Raises ValueError when it is not the JSON of a run that this version reads."""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"its schema is {data['schema']}, this version reads {SCHEMA}")
        run = _make(Run, {**data, "shapes": []})
        for entry in data["shapes"]:
            parts = {
                "rows": [_make(Row, row) for row in entry["rows"]],
                "passes": [_make(Pass, one) for one in entry["passes"]],
                "copy": _make(Pass, entry["copy"]) if entry["copy"] else None,
                "memory": _make(Memory, entry["memory"]) if entry["memory"] else None,
            }
            run.shapes.append(_make(Shape, {**entry, **parts}))
        return run
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a result of the benchmark ({type(error).__name__}: {error})") from error


def _make(kind: type, values: dict[str, Any]) -> Any:
    names = {f.name for f in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})


def write(path: Path, text: str) -> None:
    """Write `text` to `path` at once: a run that is cut off leaves the last whole file."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
