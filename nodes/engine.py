"""One accelerated attention call: groups (found, or kept from an earlier step), kernel, counts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels import attention, group
from . import host, watch
from .call import Call
from .forward import Forward
from .guard import guard
from .schedule import GROUP, PLAIN, REUSE
from .session import Route, Session
from .state import Key
from .stats import CallRecord

#: Rows of each output that are looked at for NaN and infinity.
WATCHED_ROWS = 64


def accelerate(session: Session, forward: Forward, call: Call, route: Route) -> Tensor:
    """Compute `call` in low bits and return it in the layout and dtype that the caller expects.

    Never writes to q, k or v and never waits for the device. Raises what the kernels raise; the hook turns that into a
    fallback.
    """
    q, k, v = call.heads_first()
    given = q.dtype
    q, k, v = (t if t.dtype == route.dtype else t.to(route.dtype) for t in (q, k, v))
    key = forward.key(call)
    watch.before(forward, key.layer, call, route)
    branches = forward.branches_of(call)
    labels: Tensor | None = None
    built = reused = 0
    # Grouping pays when the keys are the queries' own tokens; a short query against a long memory does not repay it.
    if forward.position.grouping and branches is not None and 2 * call.lq >= call.lkv:
        labels, built, reused = _labels(session, forward, key, branches, v)
    # Without labels the blocks are those of the sequence: their means cost the kernel nothing and still take an eighth
    # off the error (the paper's plain step has none).
    plan = route.plan
    out = attention(q, k, v, plan, labels, call.keywords.get("scale"), session.options.backend)
    out = out if out.dtype == given else out.to(given)
    _watch(session, out)
    guard(session, forward, call, key, route, (q, k, v, out))
    count = 1 if branches is None else len(branches)
    with session.lock:
        stats = session.stats
        stats.count(forward.position.step, built, reused, count - built - reused)
        stats.engine = stats.engine or f"{_name(route)} on {route.backend}"
    if session.observers or forward.watchers:
        _observe(session, forward, call, key, plan, route, (q, k, v, out), built, reused)
    return call.output(out)


def _labels(
    session: Session, forward: Forward, key: Key, branches: tuple[str, ...], v: Tensor
) -> tuple[Tensor, int, int]:
    """Group labels uint8 [B, H, Lkv] for every branch in the batch: (labels, branches grouped now, branches reused)."""
    position = forward.position
    share = v.shape[0] // len(branches)
    parts: list[Tensor] = []
    built = 0
    for i, branch in enumerate(branches):
        own = replace(key, branch=branch)
        rows = v[i * share : (i + 1) * share]
        entry = session.state.get(own, tuple(rows.shape[:3]))
        if entry is not None and entry.period == position.period:
            parts.append(entry.labels)
            continue
        built += 1
        with host.outside_malloc_graph():
            grouping = group(rows, session.options.groups, None if entry is None else entry.warm_start())
            if not session.state.keep(own, position.period, grouping, not position.last):
                with session.lock:
                    session.stats.unkept += 1
        parts.append(grouping.labels)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)), built, len(branches) - built


def _watch(session: Session, out: Tensor) -> None:
    """Keep, on the device, the largest magnitude of some rows of `out` [B, H, L, D]; NaN and infinity survive it."""
    length = out.shape[2]
    stride = max(1, length // WATCHED_ROWS)
    rows = out[:, :, (length - 1) % stride :: stride]  # ends with the last row: ragged tails fail first
    with host.outside_malloc_graph():
        largest = rows.abs().amax().float()
        before = session.watch.get(out.device)
        session.watch[out.device] = largest if before is None else torch.maximum(before, largest)


def _name(route: Route) -> str:
    plan = route.plan
    if plan.scores == "exact":
        return "exact arithmetic"
    bits = "4-bit" if plan.values == "nvfp4" else "8-bit"
    return f"{bits} {'fast' if plan.probability != 'exp2' else 'faithful'}" if bits == "8-bit" else bits


def _observe(session, forward, call, key, plan, route, tensors, built, reused) -> None:
    options, position = call.options, forward.position
    record = CallRecord(
        step=position.step,
        steps=position.steps,
        phase=GROUP if built else REUSE if reused else PLAIN,
        block_type=options.get("block_type"),
        block_index=options.get("block_index"),
        ordinal=key.ordinal,
        lq=call.lq,
        lkv=call.lkv,
        heads=call.heads,
        plan=plan,
        backend=route.backend,
        branches=forward.branches,
        scale=call.keywords.get("scale"),
        sigma=forward.sigma,
    )
    for observer in tuple(session.observers):
        observer(record, *tensors)
    watch.after(forward, record, *tensors)
