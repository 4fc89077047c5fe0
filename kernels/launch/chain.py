"""From files to kernels that may be used: each candidate goes through the same checks; the first that passes serves.

manifest -> ABI number -> compute capability -> hash of every cubin -> the driver loads it and reads its parameters as
they were built (cuFuncGetParamInfo) -> probe of single instructions, where the kernels have one -> numeric self-test. A
failure is a reason, and the next candidate is tried: kernels built by hand, installed wheels, pip-installed wheel
packages ("cubin"), kernels compiled here ("cute").
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ..families import arch_of
from ..plan import Plan
from ..reasons import Reason
from . import attend, compile, locate, probe, selftest, verdicts
from .loader import Library, load_library
from .locate import Candidate
from .manifest import read_cubin

#: `call.attention_on`: (kernels, q, k, v, plan, labels, scale) -> output.
AttentionOn = Callable[[Library, Tensor, Tensor, Tensor, Plan, "Tensor | None", "float | None"], Tensor]

_LATER = (
    "The kernels have not been tested on this card yet, which cannot be done inside a CUDA graph or while "
    "torch.compile traces. Run one call outside of it first."
)

#: Reasons that may be gone at the next call, and reasons that only say that nothing is there.
_PASSING = ("memory", "not_compiled", "no_folder")
_ABSENT = ("no_kernels", "no_compiler", "no_folder")


@dataclass(frozen=True)
class Attempt:
    """One candidate and how far it got. what: which kernels, in words. reason: why they are not used, or None.

    tested: what the self-test said; empty where it has not run. kernels: None unless every check passed.
    """

    backend: str
    what: str
    reason: Reason | None = None
    tested: str = ""
    count: int = 0
    kernels: Library | None = None


@dataclass(frozen=True)
class Chosen:
    """The kernels that serve a device. skipped: why candidates before them do not."""

    backend: str
    kernels: Library
    skipped: tuple[Reason, ...] = ()


@dataclass
class _Found:
    """What was found out about one device and one folder of prebuilt kernels."""

    tried: dict[str, list[Attempt]] = field(default_factory=dict)
    result: dict[str, Chosen | Reason] = field(default_factory=dict)


_known: dict[tuple[torch.device, Path], _Found] = {}
_lock = threading.RLock()


def forget() -> None:
    """Look at everything anew at the next call: files may have been added (and tests need it)."""
    with _lock:
        _known.clear()


def choose(
    device: torch.device,
    attention_on: AttentionOn,
    backend: str = "auto",
    may_compile: bool = True,
    progress: compile.Progress | None = None,
) -> Chosen | Reason:
    """The kernels for `device` (with its index), found, checked and tested once in this process.

    backend: "cubin" (prebuilt), "cute" (compiled here, now if need be and `may_compile`) or "auto", in this order.
    Returns a Reason when there are none. Raises what `progress` raises.
    """
    found = _known.get((device, attend.PREBUILT))
    known = None if found is None else found.result.get(backend)
    if known is not None:
        return known
    if device.type != "cuda":
        return Reason("device", "VC-Attention's kernels need an NVIDIA card.")
    if _busy():
        return Reason("untested", _LATER)
    with _lock:
        found = _known.setdefault((device, attend.PREBUILT), _Found())
        if backend not in found.result:
            result = _choose(device, attention_on, found, backend, may_compile, progress)
            if isinstance(result, Reason) and result.code in _PASSING:
                return result
            found.result[backend] = result
        return found.result[backend]


def _choose(
    device: torch.device,
    attention_on: AttentionOn,
    found: _Found,
    backend: str,
    may_compile: bool,
    progress: compile.Progress | None,
) -> Chosen | Reason:
    if backend == "auto":
        prebuilt = choose(device, attention_on, "cubin")
        if isinstance(prebuilt, Chosen) or prebuilt.code == "memory":
            return prebuilt
        built = choose(device, attention_on, "cute", may_compile, progress)
        if isinstance(built, Chosen):
            skipped = () if prebuilt.code == "no_kernels" else (prebuilt,)
            return replace(built, skipped=(*skipped, *built.skipped))
        if built.code in _PASSING:
            if prebuilt.code == "no_kernels":
                return built
            if built.code == "memory":
                return Reason(built.code, prebuilt.text)
            # Not the code of `built`: "no_folder" says that nothing is there, and something is, and was refused.
            return Reason("not_compiled", prebuilt.text)
        # What was there and was refused says more than what was never there.
        return built if prebuilt.code == "no_kernels" and built.code not in _ABSENT else prebuilt
    arch = arch_of(torch.cuda.get_device_capability(device))
    if arch is None:
        return Reason("no_kernels", "There are no kernels for this card in this version of VC-Attention.")
    if backend == "cute":
        place = compile.compiled(arch)
        if place is None and not may_compile:
            return Reason("not_compiled", "The kernels have not been compiled on this machine yet.")
        made = place or compile.compile_kernels(arch, progress)
        if isinstance(made, Reason):
            found.tried["cute"] = [Attempt("cute", _compiler_words(), made)]
            return made
        candidates: list[Candidate | tuple[str, Reason]] = [_compiled_here(made)]
    else:
        candidates = locate.candidates(arch, attend.PREBUILT)
    tried: list[Attempt] = []
    for candidate in candidates:
        attempt = _attempt(candidate, device, attention_on, test=True)
        tried.append(attempt)
        if attempt.kernels is not None or (attempt.reason is not None and attempt.reason.code == "memory"):
            break
    found.tried[backend] = tried
    if backend == "cute" and place is not None and may_compile and _damaged(tried[-1]) and compile.discard(place):
        return _choose(device, attention_on, found, backend, may_compile, progress)
    refused = tuple(attempt.reason for attempt in tried if attempt.reason is not None)
    if tried and tried[-1].kernels is not None:
        return Chosen(backend, tried[-1].kernels, refused)
    if refused:
        return refused[-1] if refused[-1].code == "memory" else refused[0]
    return Reason("no_kernels", "No kernels for this card are installed.")


def _damaged(attempt: Attempt) -> bool:
    """Whether the files are the fault: compiling them again mends that."""
    return attempt.reason is not None and attempt.reason.code in ("kernels_damaged", "kernels_version")


def attempts(device: torch.device, attention_on: AttentionOn, self_test: bool = False) -> list[Attempt]:
    """Every candidate for `device`, in order, and how far it gets: what `choose` found, or as far as the files tell.

    self_test: load and test each one now, whatever is remembered; else nothing is loaded, tested or compiled.
    """
    arch = None if device.type != "cuda" else arch_of(torch.cuda.get_device_capability(device))
    if arch is None:
        return []
    with _lock:
        found = _known.get((device, attend.PREBUILT), _Found())
        listed: list[Attempt] = []
        for backend, candidates in (
            ("cubin", locate.candidates(arch, attend.PREBUILT)),
            ("cute", [place for place in [compile.compiled(arch)] if place is not None]),
        ):
            tried = [] if self_test else found.tried.get(backend, [])
            listed += tried
            for candidate in candidates[len(tried) :]:
                if isinstance(candidate, Path):
                    candidate = _compiled_here(candidate)
                if self_test:
                    listed.append(_attempt(candidate, device, attention_on, test=True, anew=True))
                else:
                    listed.append(_attempt(candidate, device, attention_on, test=False))
        if not any(attempt.backend == "cute" for attempt in listed):
            listed.append(_not_compiled(arch))
    return listed


def _not_compiled(arch: str) -> Attempt:
    """The compiler's row while nothing has been compiled."""
    reason: Reason | None = None
    compiler = compile.compiler()
    if arch not in compile.KERNELS:
        reason = Reason("no_kernels", f"There are no kernel sources for {arch} in this version of VC-Attention.")
    elif isinstance(compiler, Reason):
        reason = compiler
    elif verdicts.folder() is None:
        reason = Reason("no_folder", "No folder is set in which compiled kernels could be kept.")
    return Attempt("cute", _compiler_words(), reason)


def _compiler_words() -> str:
    return f"kernels compiled on this machine by {compile.compiler_version()}"


def _compiled_here(folder: Path) -> Candidate:
    return Candidate(_compiler_words(), folder, "cute")


def _busy() -> bool:
    """Whether loading and testing must wait: a CUDA graph would record them, and tracing would see them."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return capturing or torch.compiler.is_compiling()


def _attempt(
    candidate: Candidate | tuple[str, Reason],
    device: torch.device,
    attention_on: AttentionOn,
    test: bool,
    anew: bool = False,
) -> Attempt:
    """Take one candidate through the checks; with `test` through all of them, else through those of its files."""
    if isinstance(candidate, tuple):
        return Attempt("cubin", candidate[0], candidate[1])
    attempt = Attempt(candidate.backend, candidate.what)
    kernels = load_library(candidate.folder, device)
    if isinstance(kernels, Reason):
        return replace(attempt, reason=kernels)
    manifest = kernels.manifest
    attempt = replace(attempt, count=len(manifest.kernels))
    tested = selftest.cases(lambda plan, dtype: attend.kernel_name(plan, dtype, manifest.arch) in manifest.kernels)
    if not tested:
        reason = Reason("kernels_damaged", f"The manifest in {manifest.folder} lists no attention kernel.")
        return replace(attempt, reason=reason)
    subject = verdicts.Subject(
        torch.cuda.get_device_name(device),
        ".".join(map(str, torch.cuda.get_device_capability(device))),
        kernels.driver_version,
        manifest.build,
        selftest.VERSION,
    )
    if not test:
        for entry in manifest.kernels.values():
            data = read_cubin(manifest, entry)
            if isinstance(data, Reason):
                return replace(attempt, reason=data)
        verdict, note = verdicts.recall(subject)
        return _with(attempt, kernels, verdict, [note])
    refused = kernels.load_all()
    if refused is not None:
        return replace(attempt, reason=refused)
    with verdicts.only_one(subject):
        verdict, note = (None, "") if anew else verdicts.recall(subject)
        notes = [note]
        if verdict is None:
            tried = _test(kernels, attention_on, tested, device)
            if isinstance(tried, Reason):
                return replace(attempt, reason=tried)
            verdict = tried
            notes.append(verdicts.remember(subject, verdict))
    return _with(attempt, kernels, verdict, notes)


def _with(attempt: Attempt, kernels: Library, verdict: verdicts.Verdict | None, notes: list[str]) -> Attempt:
    """`attempt` with what the self-test said."""
    if verdict is None:
        return replace(attempt, tested=" ".join(filter(None, ["The self-test has not run yet.", *notes])))
    when = " (remembered)" if verdict.remembered else f" ({verdict.seconds:.2f} s)"
    if verdict.passed:
        said = " ".join(filter(None, [f"The self-test passed{when}.", *notes]))
        return replace(attempt, tested=said, kernels=kernels)
    text = f"The self-test of the kernels on this card failed: {verdict.text}"
    said = " ".join(filter(None, [f"The self-test failed{when}.", *notes]))
    return replace(attempt, reason=Reason("self_test", text), tested=said)


def _test(
    kernels: Library, attention_on: AttentionOn, tested: list[selftest.Case], device: torch.device
) -> verdicts.Verdict | Reason:
    """Run the probe, then the self-test; a Reason only for what says nothing about the kernels."""

    def attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, labels: Tensor | None, scale: float | None) -> Tensor:
        return attention_on(kernels, q, k, v, plan, labels, scale)

    start = time.perf_counter()
    try:
        with torch.no_grad():
            problem = probe.problem(kernels, device) or selftest.problem(attention, tested, device)
    except torch.OutOfMemoryError:
        return Reason("memory", "There was no room on the card for the self-test of the kernels (a few MB).")
    except Exception as error:  # an illegal address, a refused launch: whatever it is, these kernels must not run
        first = (str(error).strip().splitlines() or ["no message"])[0][:200]
        problem = f"{type(error).__name__}: {first}"
    return verdicts.Verdict(problem is None, problem or "", time.perf_counter() - start)
