"""A run: branches, steps, kept groups, other hooks, other models."""

from __future__ import annotations

from mutant import Mutant

CALLS = "tests/comfy/test_calls.py"
FAMILIES = "tests/comfy/test_families.py"
LAYOUT = "tests/known_failures/test_layout.py"
MEMORY = "tests/comfy/test_memory.py"
OVERRIDES = "tests/comfy/test_overrides.py"
RUNS = "tests/comfy/test_runs.py"

MUTANTS = (
    Mutant(
        "CFG branches",
        "the branch is part of the key",
        "nodes/engine.py",
        *("own = replace(key, branch=branch)", "own = replace(key, branch=None)"),
        (CALLS,),
    ),
    Mutant(
        "CFG branches",
        "the batch is split by branch",
        "nodes/engine.py",
        *("rows = v[i * share : (i + 1) * share]", "rows = v[:share]"),
        (CALLS,),
    ),
    Mutant(
        "CFG branches",
        "branches are named by uuid, not by place",
        "nodes/hook.py",
        *('tuple(map(str, options.get("uuids") or ()))', 'tuple(map(str, range(len(options.get("uuids") or ()))))'),
        (CALLS, RUNS),
    ),
    Mutant(
        "step counting",
        "a new schedule is a new run",
        "nodes/session.py",
        *("if schedule is None or (seen is not sample_sigmas and not copied):", "if schedule is None:"),
        (CALLS,),
    ),
    Mutant(
        "step counting",
        "a sampler's start resets the run",
        "nodes/session.py",
        *(
            "            self.stats = RunStats()\n            self._open, self._managed = True, managed",
            "            self._open, self._managed = True, managed",
        ),
        (RUNS,),
    ),
    Mutant(
        "step counting",
        "part of a schedule is told by sigma",
        "nodes/schedule.py",
        *(
            "return abs(self.sigmas[-1]) < 1e-6 and (sigma_max is None or self.sigmas[0] >= sigma_max * 0.999)",
            "return True",
        ),
        (RUNS, FAMILIES),
    ),
    Mutant(
        "step counting",
        "steps are located between the schedule's entries",
        "nodes/schedule.py",
        *(
            "sum(s >= sigma * (1 - _RELATIVE) for s in self.sigmas[:-1]) - 1",
            "([i for i, s in enumerate(self.sigmas[:-1]) if s == sigma] or [0])[0]",
        ),
        (FAMILIES,),
    ),
    Mutant(
        "step counting",
        "groups are rebuilt every reuse_steps",
        "nodes/engine.py",
        *("if entry is not None and entry.period == position.period:", "if entry is not None:"),
        (FAMILIES,),
    ),
    Mutant(
        "caches grow",
        "the run's end frees everything",
        "nodes/session.py",
        *("            self._forget()\n            text =", "            text ="),
        (MEMORY, RUNS),
    ),
    Mutant(
        "caches grow",
        "leaving the window frees the groups",
        "nodes/session.py",
        *("            if not position.grouping:\n                self.state.clear(device)\n", ""),
        (MEMORY,),
    ),
    Mutant(
        "caches grow",
        "unloading frees the groups",
        "nodes/session.py",
        *(
            '        """The model is unloaded (ON_DETACH)."""\n        self.state.clear()',
            '        """The model is unloaded (ON_DETACH)."""',
        ),
        (MEMORY,),
    ),
    Mutant(
        "caches grow",
        "the budget is asked",
        "nodes/state.py",
        *("if held - freed + room > self.budget_bytes:", "if False:"),
        (MEMORY,),
    ),
    Mutant(
        "caches grow",
        "free memory is asked",
        "nodes/state.py",
        *("if free is not None and free - room < RESERVE_BYTES:", "if False:"),
        (MEMORY, "tests/nodes/test_state.py"),
    ),
    Mutant(
        "caches grow",
        "the history of runs is bounded",
        "nodes/session.py",
        *("self.runs: deque[RunStats] = deque(maxlen=HISTORY)", "self.runs: deque[RunStats] = deque()"),
        (MEMORY,),
    ),
    Mutant(
        "context windows",
        "the window is part of the key",
        "nodes/hook.py",
        *("None if window is None else tuple(window.index_list),", "None,"),
        (CALLS, RUNS),
    ),
    Mutant(
        "blocks",
        "calls of one block are counted apart",
        "nodes/forward.py",
        *("self.ordinals[block] = ordinal + 1", "pass"),
        (CALLS,),
    ),
    Mutant(
        "override fights",
        "the hook is put back before every pass",
        "nodes/hook.py",
        *("if getattr(current, _SESSION, None) is not session:", "if False:"),
        (OVERRIDES,),
    ),
    Mutant(
        "override fights",
        "declined calls go to the other hook",
        "nodes/hook.py",
        *(
            "        if previous is None:\n            return func(*args, **kwargs)\n        return _behind(",
            "        if True:\n            return func(*args, **kwargs)\n        return _behind(",
        ),
        (OVERRIDES,),
    ),
    Mutant(
        "override fights",
        "an older hook of ours steps aside",
        "nodes/hook.py",
        *("    forward.nested = True\n", ""),
        (OVERRIDES, "tests/nodes/test_hook_slot.py"),
    ),
    Mutant(
        "override fights",
        "a call without the pass's record is left alone",
        "nodes/eligibility.py",
        *('    if forward is None:\n        return REASONS["no_context"]\n', ""),
        (CALLS,),
    ),
    Mutant(
        "override fights",
        "another hook is named on the node",
        "nodes/hook.py",
        *("    if behind is not None:\n", "    if False:\n"),
        (OVERRIDES,),
    ),
    Mutant(
        "unknown keywords",
        "keywords are passed on",
        "nodes/hook.py",
        *(
            "        if previous is None:\n            return func(*args, **kwargs)",
            "        if previous is None:\n            kwargs.pop('from_the_future', None)\n"
            "            return func(*args, **kwargs)",
        ),
        (CALLS,),
    ),
    Mutant(
        "torch.compile",
        "the hook is opaque to dynamo",
        "nodes/hook.py",
        *("hooked: Any = torch.compiler.disable(override)", "hooked: Any = override"),
        ("tests/comfy/test_compile.py",),
    ),
    Mutant(
        "torch.compile",
        "the fake has the real strides",
        "kernels/ops.py",
        *("return q.new_empty((b, lq, h, d)).transpose(1, 2)", "return q.new_empty((b, h, lq, d))"),
        (LAYOUT,),
    ),
    Mutant(
        "a failing kernel",
        "the rest of the run falls back",
        "nodes/hook.py",
        *("        session.fail(error)\n    reason", "        raise\n    reason"),
        (MEMORY,),
    ),
    Mutant(
        "MiniMax-H3",
        "the token layout is part of the key",
        "nodes/hook.py",
        *('payload.get("layout") if isinstance(payload, dict) else None,', "None,"),
        ("tests/comfy/test_h3.py",),
        "0.33",
    ),
    Mutant(
        "MiniMax-H3",
        "after a failure the containers are filled again",
        "nodes/hook.py",
        *("args = (*(kind(tensor) for kind, tensor in zip(kinds, tensors, strict=False)), *args[3:])", "pass"),
        ("tests/comfy/test_h3.py", "tests/nodes/test_contract_038_containers.py"),
    ),
    Mutant(
        "workflow drift",
        "widget order never changes",
        "nodes/patch.py",
        *(
            '        combo("precision", PRECISIONS),\n        combo("quality", QUALITIES),\n',
            '        combo("quality", QUALITIES),\n        combo("precision", PRECISIONS),\n',
        ),
        ("tests/comfy/test_workflows.py",),
    ),
    Mutant(
        "workflow drift",
        "defaults never change",
        "nodes/options.py",
        *("reuse_steps: int = 4", "reuse_steps: int = 3"),
        ("tests/comfy/test_workflows.py",),
    ),
    Mutant(
        "unsupported GPU text",
        "a 5090 is in the right row",
        "kernels/cards.py",
        *("((12, 0), (12, 1))", "((12, 1),)"),
        ("tests/known_failures/test_cards.py",),
    ),
    Mutant(
        "unsupported GPU text",
        "the text names the card",
        "kernels/cards.py",
        *('return f"{name} (compute capability', 'return f"This card (compute capability'),
        ("tests/known_failures/test_cards.py",),
    ),
)
