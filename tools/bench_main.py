"""The part of `run.py bench` that needs torch: `benchmarks/bench/command.py` under the command's name.

python tools/pack.py bench_main OPTIONS...
"""

from __future__ import annotations

from collections.abc import Sequence

from ..benchmarks.bench import command


def main(arguments: Sequence[str] = ()) -> int:
    """Exit status 0; 2 with one sentence when nothing can be measured here."""
    return command.main(list(arguments), "run.py bench")
