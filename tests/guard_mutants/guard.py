"""The numeric guard: results that are wrong but finite."""

from __future__ import annotations

from .mutant import GUARD, STATISTIC, Mutant

MUTANTS = (
    Mutant(
        "wrong but finite",
        "the first pass of a phase is judged",
        "nodes/hook.py",
        *("problem = judge(session, forward, repeatable)", "problem = None"),
        GUARD,
    ),
    Mutant(
        "wrong but finite",
        "every phase is looked at",
        "nodes/guard.py",
        *("kind = (forward.device, forward.phase,", "kind = (forward.device,"),
        GUARD,
    ),
    Mutant(
        "wrong but finite",
        "every shape is looked at",
        "nodes/guard.py",
        *("forward.phase, q.dtype, q.shape, k.shape[2])", "forward.phase)"),
        ("tests/nodes/test_guard.py",),
    ),
    Mutant(
        "wrong but finite",
        "a refused pass is computed again",
        "nodes/hook.py",
        *("                if repeatable:", "                if False:"),
        GUARD,
    ),
    Mutant(
        "wrong but finite",
        "a refusal counts under a ControlNet, too",
        "nodes/hook.py",
        *("if problem is not None:", "if problem is not None and repeatable:"),
        ("tests/nodes/test_guard.py",),
    ),
    Mutant(
        "wrong but finite",
        "another head in each layer",
        "nodes/guard.py",
        *("turn = len(forward.checks) + len(session.checked)", "turn = 0"),
        ("tests/nodes/test_guard.py",),
    ),
    Mutant(
        "wrong but finite",
        "the layer's scalar is made outside the recording",
        "nodes/guard.py",
        *("with host.outside_malloc_graph():", "if True:"),
        ("tests/nodes/test_contract_038_malloc_graph.py",),
    ),
    Mutant(
        "wrong but finite",
        "what all rows share is taken off",
        "kernels/guard.py",
        *("(o - o.mean(1, keepdim=True)).square() + (e - shared).square()", "o.square() + e.square()"),
        STATISTIC,
    ),
    Mutant(
        "wrong but finite",
        "heads next to nothing have a floor",
        "kernels/guard.py",
        *("_OF_VALUES = 0.1", "_OF_VALUES = 0.0"),
        STATISTIC,
    ),
    Mutant(
        "wrong but finite",
        "the last tile of queries is sampled",
        "kernels/guard.py",
        *("length - tail + (j * tail + TAIL_ROWS - 1) // TAIL_ROWS - 1))", "spread[:TAIL_ROWS]))"),
        STATISTIC,
    ),
    Mutant(
        "wrong but finite",
        "keys come in chunks",
        "kernels/guard.py",
        *("most = max(1, int(TEMPORARY_BYTES / each) // _SPLIT)", "most = 1 << 30"),
        STATISTIC,
    ),
)
