"""Remove one guard at a time from a copy of the checkout and see which tests notice. Not part of the suite.

    python tests/mutants.py --comfyui DIR [--only WORD] [--jobs 2]

Each mutant is one small edit that takes a protection away; the tests of its row of known_failures run on the copy.
A mutant that no test catches means that the guard is decoration, or that its test is. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    *("__init__.py", "install.py", "pyproject.toml"),
    *("kernels", "nodes", "tools", "tests", "benchmarks", "workflows", "locales", "web"),
)

CALLS = "tests/comfy/test_calls.py"
RUNS = "tests/comfy/test_runs.py"
MEMORY = "tests/comfy/test_memory.py"
OVERRIDES = "tests/comfy/test_overrides.py"
FAMILIES = "tests/comfy/test_families.py"
VALUES = "tests/known_failures/test_values.py"
LAYOUT = "tests/known_failures/test_layout.py"
GUARD = ("tests/nodes/test_guard.py", "tests/comfy/test_guard.py")
STATISTIC = ("tests/kernels/test_guard.py",)
INSTALL = "tests/tools/test_install.py"
NETWORK = "tests/tools/test_install_network.py"
DISK = "tests/tools/test_install_disk.py"
ARCHIVE = "tests/tools/test_install_archive.py"
WINDOWS = "tests/tools/test_install_windows.py"
BRIDGE = "tests/nodes/test_wrapper_bridge.py"


class Mutant(NamedTuple):
    """One edit: in `file`, `old` (which must occur exactly once) becomes `new`. needs: "0.33" when the ComfyUI must
    have tensor containers. also: further (file, old, new), for a protection that exists twice."""

    row: str
    guard: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    needs: str = ""
    also: tuple[tuple[str, str, str], ...] = ()


MUTANTS = (
    Mutant(
        "V extremes",
        "a zero amax gets scale 1, not 0",
        "kernels/spec/formats.py",
        *("torch.where(scale > _TINY, scale, torch.ones_like(scale))", "scale"),
        (VALUES,),
    ),
    Mutant(
        "V extremes",
        "rows without mass give 0, not 0 / 0",
        "kernels/spec/attention.py",
        *("torch.where(row_sum > 0, acc / row_sum, 0.0)", "(acc / row_sum)"),
        ("tests/kernels/test_attention.py",),
    ),
    Mutant(
        "ragged tails",
        "INT8 blocks drop their padding",
        "kernels/spec/values.py",
        *("pad(residual, (0, 0, 0, -length % block))", "pad(residual, (0, 0, 0, -length % block), value=9.0)"),
        (VALUES,),
    ),
    Mutant(
        "pad rows in a block mean",
        "the ragged block is divided by its own tokens",
        "kernels/spec/smoothing.py",
        *(
            "parts.append(_means(x[..., None, whole:, :], clip))",
            "parts.append(_means(x[..., None, whole:, :], clip) * ((length - whole) / block))",
        ),
        (VALUES,),
    ),
    Mutant(
        "pad rows in a block mean",
        "the restored mean weighs as much as its P",
        "kernels/spec/attention.py",
        *("acc = acc + r * values.means", "acc = acc + BLOCK * values.means"),
        (VALUES,),
    ),
    Mutant(
        "pad rows in the softmax",
        "K and V move together",
        "kernels/spec/attention.py",
        *("k, v = k.gather(-2, order), v.gather(-2, order)", "k = k.gather(-2, order)"),
        (VALUES, FAMILIES),
    ),
    Mutant(
        "32-bit offsets",
        "strides are never taken modulo 2^31",
        "kernels/spec/attention.py",
        *(
            "k[head].to(torch.float32),",
            "k.as_strided(k.shape, tuple(s % 2**24 for s in k.stride()), k.storage_offset())[head].to(torch.float32),",
        ),
        (LAYOUT, CALLS),
    ),
    Mutant(
        "strides",
        "views are read through their strides",
        "kernels/spec/attention.py",
        *(
            "v[head].to(torch.float32),",
            "v.as_strided(v.shape, torch.empty(v.shape, device='meta').stride(), v.storage_offset())[head].float(),",
        ),
        (LAYOUT,),
    ),
    Mutant(
        "dtypes",
        "mixed q, k, v are cast before the kernel",
        "nodes/engine.py",
        *("t if t.dtype == route.dtype else t.to(route.dtype)", "t"),
        (CALLS,),
    ),
    Mutant(
        "dtypes",
        "the output goes back to q's dtype",
        "nodes/engine.py",
        *("out = out if out.dtype == given else out.to(given)", "pass"),
        (CALLS,),
    ),
    Mutant(
        "dtypes",
        "unknown dtypes are declined",
        "nodes/eligibility.py",
        *('        return REASONS["dtype"]', "        pass"),
        (CALLS,),
        also=(("kernels/registry.py", "if dtype not in _DTYPES:", "if False:"),),
    ),
    Mutant(
        "masks dropped",
        "a masked call is declined",
        "nodes/eligibility.py",
        *("call.mask is not None or", "False or"),
        (CALLS,),
    ),
    Mutant(
        "head_dim",
        "other head dimensions are declined",
        "nodes/eligibility.py",
        *("if call.head_dim not in HEAD_DIMS:", "if False:"),
        (CALLS,),
    ),
    Mutant(
        "short calls",
        "min_tokens is honoured",
        "nodes/eligibility.py",
        *("if call.lkv < options.min_tokens:", "if False:"),
        (CALLS,),
    ),
    Mutant(
        "low_precision_attention",
        "a call that asks for full precision is declined",
        "nodes/eligibility.py",
        *('keywords.get("low_precision_attention", True) is False', "False"),
        (CALLS,),
    ),
    Mutant(
        "shared keys",
        "GQA is declined",
        "nodes/eligibility.py",
        *('if keywords.get("enable_gqa"):', "if False:"),
        (CALLS,),
        also=(("nodes/eligibility.py", "if not q.shape[1] == k.shape[1] == v.shape[1] == call.heads:", "if False:"),),
    ),
    Mutant(
        "inputs mutated",
        "V is smoothed in a copy",
        "kernels/spec/smoothing.py",
        *(
            "return x.to(torch.float32) - expand_blocks(means, block, length)",
            "return x.to(torch.float32).sub_(expand_blocks(means, block, length))",
        ),
        (LAYOUT, CALLS),
    ),
    Mutant(
        "inputs mutated",
        "K is smoothed in a copy",
        "kernels/spec/scores.py",
        *("return k - k.mean(dim=-2, keepdim=True)", "return k.sub_(k.mean(dim=-2, keepdim=True))"),
        (CALLS,),
    ),
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
        "installer",
        "a download's hash is checked",
        "kernels/install/download.py",
        *("if hashlib.sha256(data).hexdigest() == wheel.sha256:", "if True:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "a file's hash is checked",
        "kernels/install/places.py",
        *("or hashlib.sha256(data).hexdigest() != wheel.sha256", ""),
        (INSTALL,),
    ),
    Mutant(
        "installer",
        "a web page is not kept",
        "kernels/install/download.py",
        *("if start + received == 0 and not", "if False and not"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "no more bytes are taken than the file has",
        "kernels/install/download.py",
        *("if start + received > wheel.size:", "if False:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "a broken download goes on where it broke",
        "kernels/install/download.py",
        *('headers["Range"] = f"bytes={have}-"', "pass"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "the place in the file is the server's word",
        "kernels/install/download.py",
        *("if not given or int(given[1]) != have:", "if False:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "a resumed download with a wrong hash begins anew",
        "kernels/install/download.py",
        *("            if not resumed:", "            if True:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "a stuck transfer is given up",
        "kernels/install/download.py",
        *("if time.monotonic() - began > timeout + received / SLOWEST:", "if False:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "an overloaded server is asked again",
        "kernels/install/download.py",
        *("if status in _RETRIED:", "if False:"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "redirects lead to web servers only",
        "kernels/install/download.py",
        *('not in ("http", "https"):', 'not in ("http", "https", "ftp"):'),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "passwords are not shown",
        "kernels/install/address.py",
        *('return f"{address.scheme}://{host_of(url)}{address.path}"', "return url"),
        (NETWORK,),
    ),
    Mutant(
        "installer",
        "half a download leaves a full disk",
        "kernels/install/download.py",
        *("            _discard(part)  # what cannot grow only takes the room that is missing\n", ""),
        (DISK,),
    ),
    Mutant(
        "installer",
        "a build is made beside its place",
        "kernels/install/store.py",
        *('draft = family / f".{wheel.build}.{token()}.tmp"', "draft = target"),
        (INSTALL, DISK),
    ),
    Mutant(
        "installer",
        "a broken-off build is not taken for a whole one",
        "kernels/install/store.py",
        *("if not target.is_dir() or problem_of(target, wheel.archs):", "if not target.is_dir():"),
        (INSTALL,),
    ),
    Mutant(
        "installer",
        "the manifest is checked before the switch",
        "kernels/install/store.py",
        *(
            "            if problem:\n                raise Trouble(",
            "            if False:\n                raise Trouble(",
        ),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "the pointer changes at one stroke",
        "kernels/install/files.py",
        *(
            "        write_new(draft, data)\n        replace(draft, path)",
            "        path.unlink(missing_ok=True)\n        write_new(path, data)",
        ),
        (INSTALL, DISK),
    ),
    Mutant(
        "installer",
        "drafts do not stay",
        "kernels/install/store.py",
        *("    finally:\n        remove_tree(draft)", "    finally:\n        pass"),
        (DISK, ARCHIVE),
    ),
    Mutant(
        "installer",
        "one install at a time",
        "kernels/install/lock.py",
        *(
            "            if not self._take():\n                self._waiting()",
            "            if False:\n                self._waiting()",
        ),
        (INSTALL, WINDOWS),
    ),
    Mutant(
        "installer",
        "the one that waited looks again",
        "kernels/install/command.py",
        *("                return Outcome(THERE, there)  # the other one brought it", "                pass"),
        (INSTALL,),
    ),
    Mutant(
        "installer",
        "names stay in their folder",
        "kernels/install/archive.py",
        *("if len(parts) > _DEEPEST or not all(map(_is_plain, parts)):", "if False:"),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "the archive's own name counts",
        "kernels/install/archive.py",
        *("name = member.orig_filename", "name = member.filename"),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "no name is taken twice",
        "kernels/install/archive.py",
        *("if name.lower() in seen:", "if False:"),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "no links",
        "kernels/install/archive.py",
        *("if kind not in (0,", "if False and kind not in (0,"),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "sizes are bounded",
        "kernels/install/archive.py",
        *("if sum(member.file_size for member in members) > LARGEST:", "if False:"),
        (ARCHIVE,),
    ),
    Mutant(
        "installer",
        "a scanner that holds the pointer is waited for",
        "kernels/install/files.py",
        *('for wait in _WAITS if sys.platform == "win32" else ():', "for wait in ():"),
        (WINDOWS,),
    ),
    Mutant(
        "installer",
        "nothing of a package runs",
        "kernels/install/store.py",
        *(
            "        spec = importlib.util.find_spec(package_name(family))",
            "        __import__(package_name(family))\n        spec = importlib.util.find_spec(package_name(family))",
        ),
        (INSTALL,),
    ),
    Mutant(
        "installer",
        "it always ends with status 0",
        "install.py",
        *("    except Exception as error:", "    except MemoryError as error:"),
        (INSTALL,),
    ),
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


def run_mutant(mutant: Mutant, comfyui: Path | None) -> tuple[Mutant, str, list[str]]:
    """(mutant, verdict, failing tests): "caught", "survived", or why it could not be tried."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "checkout"
        copy.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            elif source.exists():
                shutil.copy2(source, copy / name)
        for file, old, new in ((mutant.file, mutant.old, mutant.new), *mutant.also):
            target = copy / file
            text = target.read_text(encoding="utf-8")
            if text.count(old) != 1:
                return mutant, f"not applicable: the text occurs {text.count(old)} times", []
            target.write_text(text.replace(old, new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "--maxfail=4", "-rfE"]
        command += [*mutant.tests, *(() if comfyui is None else ("--comfyui", str(comfyui)))]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=900, check=False)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        passed = re.search(r"(\d+) passed", done.stdout)
        if any("::" not in name for name in failed):
            return mutant, "not applicable: the copy does not import", failed
        if failed:
            return mutant, "caught", failed
        return mutant, "survived" if passed else f"no test ran: {done.stdout[-200:]!r}", []


def main() -> int:
    """Run the mutants and print the table; the exit status is the number of mutants that were not caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path)
    parser.add_argument("--only", default="", help="run the mutants whose row or guard contains this")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    comfyui = args.comfyui.resolve() if args.comfyui else None
    newer = comfyui is not None and "AttentionTensorContainer" in (
        comfyui / "comfy" / "ldm" / "modules" / "attention.py"
    ).read_text(encoding="utf-8")
    chosen = [m for m in MUTANTS if args.only in f"{m.row} {m.guard}" and (newer or not m.needs)]
    print("| row | guard removed | verdict | caught by |\n|---|---|---|---|")
    missed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutant, verdict, failed in pool.map(lambda m: run_mutant(m, comfyui), chosen):
            missed += verdict != "caught"
            names = sorted({name.split("::")[-1].split("[")[0] for name in failed})
            print(f"| {mutant.row} | {mutant.guard} | {verdict} | {', '.join(names)} |", flush=True)
    skipped = len(MUTANTS) - len(chosen)
    print(f"\n{len(chosen)} mutants, {missed} not caught, {skipped} not run here")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
