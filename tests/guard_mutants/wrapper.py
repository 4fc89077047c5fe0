"""The bridge to ComfyUI-WanVideoWrapper."""

from __future__ import annotations

from .mutant import BRIDGE, Mutant

MUTANTS = (
    Mutant(
        "wrapper bridge",
        "the exchange ends with the pass",
        "nodes/wrapper_hook.py",
        *(
            "        forward, session = self._now.forward, self.session\n        self._restore()",
            "        forward, session = self._now.forward, self.session",
        ),
        (BRIDGE,),
    ),
    Mutant(
        "wrapper bridge",
        "each bridge minds its own marker",
        "nodes/wrapper_hook.py",
        *("                if marker is not None and marker.bridge is here:", "                if marker is not None:"),
        (BRIDGE,),
    ),
    Mutant(
        "wrapper bridge",
        "the hooks go with the node",
        "nodes/wrapper_hook.py",
        *("weakref.finalize(self, _remove, handles).atexit = False", "self.handles = handles"),
        (BRIDGE,),
    ),
    Mutant(
        "wrapper bridge",
        "a run ends with its sampler",
        "nodes/wrapper_hook.py",
        *("        weakref.finalize(marker, _end, weakref.ref(self), self._run).atexit = False\n", ""),
        (BRIDGE,),
    ),
    Mutant(
        "wrapper bridge",
        "a pass that caches remember is not repeated",
        "nodes/wrapper_hook.py",
        *("repeatable = not _remembers(transformer)", "repeatable = True"),
        (BRIDGE,),
    ),
    Mutant(
        "wrapper bridge",
        "another pack's method stays",
        "nodes/wrapper_hook.py",
        *("if name in exchange.module.__dict__:", "if False:"),
        (BRIDGE,),
    ),
    Mutant(
        "wrapper bridge",
        "masks are declined",
        "nodes/wrapper_hook.py",
        *('kwargs.get("attn_mask"), True, True', "None, True, True"),
        (BRIDGE,),
    ),
    Mutant(
        "wrapper bridge",
        "cond and uncond apart",
        "nodes/wrapper_schedule.py",
        *('kind = "uncond" if given.get("is_uncond") else "cond"', 'kind = "cond"'),
        (BRIDGE,),
    ),
    Mutant(
        "wrapper bridge",
        "context windows share no groups between steps",
        "nodes/wrapper_schedule.py",
        *("self._crowded = self._step >= 0 and max(self._passes.values(), default=0) > 1", "self._crowded = False"),
        (BRIDGE,),
    ),
    Mutant(
        "wrapper bridge",
        "the second of two samplers has no first steps",
        "nodes/wrapper_schedule.py",
        *('options.grouping == "first steps" and self._top >= TOP_SIGMA', 'options.grouping == "first steps"'),
        (BRIDGE,),
    ),
    Mutant(
        "wrapper bridge",
        "the node is there only beside the wrapper",
        "nodes/extension.py",
        *("if wrapper_is_here() else nodes", "if True else nodes"),
        ("tests/comfy/test_wrapper_node.py",),
    ),
)
