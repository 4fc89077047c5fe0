"""What other nodes of the pack add to a patched model: watchers, which look at its accelerated calls.

They travel in the model's `transformer_options`, so that a clone made before the node is not watched, and one made
after it is. A watcher may ask for a layer to stay in 16 bit; it changes no result, and no problem of it ends a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from . import host
from .state import Layer

if TYPE_CHECKING:
    from .call import Call
    from .forward import Forward
    from .session import Route
    from .stats import CallRecord


class Watcher:
    """The base of a watcher: does nothing, and stops for the rest of a run once it met a problem.

    One object serves all clones of a model, on several devices from several threads. Between `before` and `end_pass`
    it keeps what it found in `forward.kept`, which belongs to one thread.
    """

    #: Why this watcher stopped in this run, or None.
    problem: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Watcher:
        return self  # cores up to 0.3.75 deep-copy model_options in clone()

    def begin_run(self, *_: object) -> None:
        """A sampler starts (once more for every extra GPU)."""
        self.problem = None

    def end_run(self, *_: object) -> None:
        """A sampler ends, finished or interrupted."""

    def keeps(self, forward: Forward, layer: Layer, call: Call) -> bool:
        """Whether the eligible call `call` of `layer` stays in 16 bit."""
        return False

    def before(self, forward: Forward, layer: Layer, call: Call, route: Route) -> None:
        """A call is about to be accelerated; its tensors are the caller's."""

    def after(self, forward: Forward, record: CallRecord, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """A call was accelerated. q, k, v [B, H, L, D] as the kernel got them, and its output."""

    def end_pass(self, forward: Forward) -> None:
        """The forward pass has ended without an error: the place for the one wait for the device."""

    def fail(self, error: Exception) -> None:
        """One of the methods above met `error`; it is not called again in this run."""
        self.problem = str(error)
        host.log.debug("VC-Attention: a node that looks at the run met a problem", exc_info=error)


W = TypeVar("W", bound=Watcher)


def watch(model: Any, watcher: Watcher) -> Any:
    """A clone of the ModelPatcher `model` with `watcher` on it."""
    watched = model.clone()
    options = watched.model_options.setdefault("transformer_options", {})
    options[host.WATCHERS] = (*options.get(host.WATCHERS, ()), watcher)
    watched.add_callback_with_key(host.ON_PRE_RUN, host.WATCHERS, watcher.begin_run)
    watched.add_callback_with_key(host.ON_CLEANUP, host.WATCHERS, watcher.end_run)
    return watched


def watchers_of(model: Any, kind: type[W]) -> list[W]:
    """The watchers of one kind on a model, the last one last."""
    watchers = model.model_options.get("transformer_options", {}).get(host.WATCHERS, ())
    return [watcher for watcher in watchers if isinstance(watcher, kind)]


def keeps_16_bit(forward: Forward, call: Call) -> bool:
    """Whether any watcher keeps the layer of `call`, which is eligible and not counted yet, in 16 bit."""
    if not forward.watchers:
        return False
    layer = forward.layer(call)
    return any(watcher.keeps(forward, layer, call) for watcher in forward.watchers)


def before(forward: Forward, layer: Layer, call: Call, route: Route) -> None:
    """Tell every watcher that a call is about to be accelerated."""
    _each(forward, lambda watcher: watcher.before(forward, layer, call, route))


def after(forward: Forward, record: CallRecord, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Tell every watcher that a call was accelerated."""
    _each(forward, lambda watcher: watcher.after(forward, record, q, k, v, out))


def end_pass(forward: Forward) -> None:
    """Tell every watcher that the pass has ended."""
    _each(forward, lambda watcher: watcher.end_pass(forward))


def _each(forward: Forward, action: Callable[[Watcher], None]) -> None:
    for watcher in forward.watchers:
        if watcher.problem is not None:
            continue
        try:
            action(watcher)
        except Exception as error:
            if host.is_interrupt(error):
                raise
            forward.kept.pop(watcher, None)
            watcher.fail(error)
