"""Writes the templates and their thumbnails, or says which of them are not what their description gives.

python tools/pack.py templates.command [--check]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .catalogue import TEMPLATES
from .thumbnails import thumbnail

FOLDER = Path(__file__).resolve().parents[2] / "workflows"


def main(arguments: Sequence[str] = ()) -> int:
    """Exit status 0; 1 when --check finds a workflow that differs or is not described."""
    parser = argparse.ArgumentParser(prog="templates", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, name what differs")
    check = parser.parse_args(arguments).check
    differing = [f"{name}: not described" for name in sorted(_found() - {template.name for template in TEMPLATES})]
    for template in TEMPLATES:
        graph = template.build(template.name)
        file, text = FOLDER / f"{template.name}.json", graph.text()
        if check:
            if not file.is_file() or file.read_text(encoding="utf-8") != text:
                differing.append(f"{template.name}: differs")
            continue
        file.write_text(text, encoding="utf-8", newline="\n")
        thumbnail(template, graph.workflow()).save(file.with_suffix(".jpg"), quality=90, optimize=True)
        print(f"{file.name}: {len(graph.nodes)} nodes, {len(text):,} bytes")
    for line in differing:
        print(line)
    return 1 if differing else 0


def _found() -> set[str]:
    return {file.stem for file in FOLDER.glob("*.json")}
