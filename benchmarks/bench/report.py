"""The tables of a run, for a terminal and as Markdown alike. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Run, Shape


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table with columns as wide as their widest cell: the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]) + "|"
    return [line(head), rule, *(line(row) for row in rows)]


def header(run: Run) -> list[str]:
    """What ran where, and which rows are not there and why."""
    device, software = run.device, run.software
    card = f"{device['name']}, driver {device.get('driver') or 'unknown'}"
    lines = [
        f"{run.date}: {card}, torch {software['torch']}, Python {software['python']}",
        "One attention call from bf16 q, k, v to the bf16 output, batch 1, head dimension 128; random data around 64 "
        "shuffled clusters.",
        f"Rows take turns for {run.settings['rounds']} rounds of {run.settings['seconds']:g} s a row; ms is the median "
        "of all timings.",
    ]
    if run.ours_absent:
        lines.append(f"No row of ours: {run.ours_absent}")
    elif run.kernels:
        kernels = run.kernels
        lines.append(
            f"Ours: {kernels['kernels']} kernels for {kernels['arch']}, version {kernels['package']}, sources "
            f"{kernels['source'][:12]}."
        )
    lines += [f"{row}: {version}" for row, version in run.peers.items()]
    lines += [f"{row}: not there, {why}" for row, why in run.missing.items()]
    return lines


def shape_text(shape: Shape) -> list[str]:
    """The tables of one shape."""
    reference = shape.reference
    against = f"x {reference.name}" if reference else "x (no reference ran)"
    head = ["", "ms", "quartiles", "timings", "TFLOP/s", against, "rel. L2 error", "SM MHz"]
    rows = []
    for row in shape.rows:
        ratio = shape.ratio(row)
        rows.append(
            [
                row.name,
                f"{row.ms:.3f}",
                f"{row.low:.3f} to {row.high:.3f}",
                str(row.timings),
                f"{row.tflops:.0f}",
                f"{ratio:.2f}" if ratio else "",
                f"{row.error:.4f}",
                f"{row.mhz:.0f}" if row.mhz else "",
            ]
        )
    lines = [f"{shape.name}: {shape.tokens} tokens, {shape.heads} heads", "", *table(head, rows), ""]
    lines += [f"{name} did not run: {why}" for name, why in shape.failed.items()]
    lines.append(clock_note(shape))
    if shape.memory is not None:
        memory = shape.memory
        lines.append(
            f"A reuse call peaks at {memory.peak / 1e6:.0f} MB: {100 * memory.over:.1f} % more than q, k, v in 8 bit "
            f"({memory.operands / 1e6:.0f} MB) and the output ({memory.output / 1e6:.0f} MB)."
        )
    if shape.passes:
        lines += ["", *pass_text(shape)]
    return lines


def clock_note(shape: Shape) -> str:
    """What the driver said about clock and power."""
    clocks = [row.mhz for row in shape.rows if row.mhz]
    watts = [row.watts for row in shape.rows if row.watts]
    if not clocks or not watts:
        return "Clock and power are not known: torch asks for them through nvidia-ml-py, which did not answer here."
    return (
        f"SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz, power {min(watts):.0f} to {max(watts):.0f} W, medians "
        "of the rows (the driver averages over up to a second)."
    )


def pass_text(shape: Shape) -> list[str]:
    """The table of the preparation and grouping passes."""
    reference, copied = shape.reference, shape.copy
    lines = []
    if copied is not None:
        lines = [
            f"Copy from device to device: {copied.bytes / 2e6:.0f} MB in {copied.ms:.3f} ms, {copied.rate:.0f} GB/s.",
            "",
        ]
    of = f"% of {reference.name}" if reference else "% of (none)"
    rows = []
    for one in shape.passes:
        whole = one.name == "all"
        rows.append(
            [
                one.of if whole else f"- {one.name}" + (f" ({one.launches} times)" if one.launches > 1 else ""),
                f"{one.ms:.4f}",
                f"{one.bytes / 1e6:.1f}",
                f"{one.rate:.0f}",
                f"{100 * one.rate / copied.rate:.0f} %" if copied else "",
                f"{100 * one.ms / reference.ms:.2f}" if reference and whole else "",
            ]
        )
    lines += table(["", "ms", "MB", "GB/s", "of the copy", of], rows)
    lines += [
        "",
        "MB: what a pass must read and write, each byte once. A launch is listed where it is new. Above 100 %: it only "
        "reads, or its data fit in the cache.",
    ]
    return lines


def text(run: Run) -> str:
    """The whole run."""
    lines = header(run)
    for shape in run.shapes:
        lines += ["", *shape_text(shape)]
    return "\n".join(lines)
