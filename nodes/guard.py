"""The numeric guard in a run: the first pass of each phase and shape is compared with exact attention before it counts.

Each layer of such a pass leaves one scalar on its device (`kernels.agreement`). They are read together, once, at the
end of the pass, with what the look for NaN left; then the pass stands, or it is repeated on ComfyUI's own attention.
There is no switch for it: it costs less than half a percent of a clip of 480p and more (measured on an H200; several
percent at 4,096 tokens, where a clip takes seconds), and where a sound kernel is refused after all,
`dense_blocks` takes the block out that the text names.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..kernels import agreement, least_agreement
from . import host
from .call import Call
from .messages import disagreed, disagreement, non_finite
from .state import Key

if TYPE_CHECKING:
    from .forward import Forward
    from .session import Route, Session


class GuardError(ArithmeticError):
    """A layer's result is not that of a correct kernel: the finding; `sentence` adds what runs instead, what to do."""

    def __init__(self, finding: str, sentence: str) -> None:
        super().__init__(finding)
        self.sentence = sentence


class Check(NamedTuple):
    """One guarded call: what it stands for, its layer, the lowest agreement allowed, and the one found (on device)."""

    kind: Hashable
    layer: str
    numbered: bool
    least: float
    found: Tensor


def guard(session: Session, forward: Forward, call: Call, key: Key, route: Route, tensors: tuple[Tensor, ...]) -> None:
    """Queue the comparison of one call, if calls of its kind have not been judged in this run.

    tensors: q, k, v [B, H, L, D] as the kernel got them, and its output. Never waits for the device.
    """
    q, k = tensors[:2]
    kind = (forward.device, forward.phase, q.dtype, q.shape, k.shape[2])
    if kind in session.checked:
        return
    turn = len(forward.checks) + len(session.checked)  # other heads in each layer, and in the same layer's next phase
    with host.outside_malloc_graph():
        found = agreement(*tensors, call.keywords.get("scale"), turn)
    layer = key.layer
    forward.checks.append(Check(kind, layer.name, layer.numbered, least_agreement(route.plan), found))


def judge(session: Session, forward: Forward, repeatable: bool) -> ArithmeticError | None:
    """What is wrong with a pass that has just ended, or None. One wait for the device if the pass was guarded.

    repeatable: the caller will compute the pass again, which the text says.
    """
    checks = forward.checks
    if not checks or session.broken is not None:
        return None
    watched = session.watch.pop(forward.device, None)
    scalars = [check.found for check in checks] + ([] if watched is None else [watched])
    found = torch.stack([scalar.to(scalars[0].device) for scalar in scalars]).tolist()
    session.checked.update(check.kind for check in checks)
    step = forward.position.step
    for check, value in zip(checks, found, strict=False):
        if math.isnan(value):
            return ArithmeticError(non_finite(step, repeatable, check.layer))
    failing = [(c, value) for c, value in zip(checks, found, strict=False) if value < c.least]
    if watched is not None and not math.isfinite(found[-1]):
        return ArithmeticError(non_finite(step, repeatable))
    if not failing:
        return None
    check, value = failing[0]
    dense = check.layer.removeprefix("block ").partition(" ")[0] if check.numbered else ""
    finding = disagreement(check.layer, step, forward.phase, value, check.least)
    return GuardError(finding, disagreed(finding, len(failing), len(checks), repeatable, dense))
