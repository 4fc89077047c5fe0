"""The hook in ComfyUI: an attention override that re-asserts itself once per forward pass, and never nests.

`transformer_options["optimized_attention_override"]` is one slot, and the last writer wins. So the override goes into
the slot when the node runs, and an APPLY_MODEL wrapper puts it back before every forward pass with whatever sat there
chained behind it. The wrapper lives in model_options, which every clone keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import Reason
from . import host, watch
from .call import Call, read_call
from .eligibility import ineligible
from .engine import accelerate
from .families import family_of
from .forward import Forward
from .guard import judge
from .messages import NO_BLOCK_NUMBERS, REASONS, chained, non_finite
from .options import PatchOptions
from .session import Route, Session

KEY = "vc_attention"
_SESSION = "_vc_attention_session"
_PREVIOUS = "_vc_attention_previous"

Override = Callable[..., Any]


def attach(model: Any, options: PatchOptions, node_id: str | None = None) -> Any:
    """A clone of the ModelPatcher `model` with VC-Attention in front of its attention.

    A model that is patched already gets the new options instead of the old. With precision "off" the clone has no
    VC-Attention at all. node_id: the node that shows the run's text.
    """
    patched = model.clone()
    _detach(patched)
    if not options.enabled:
        return patched
    session = Session(options, node_id)
    transformer_options = patched.model_options.setdefault("transformer_options", {})
    transformer_options[host.OVERRIDE] = _override(session, transformer_options.get(host.OVERRIDE))
    wrappers = transformer_options.setdefault("wrappers", {}).setdefault(host.APPLY_MODEL, {})
    wrappers[KEY] = [_apply_model_wrapper(session)]
    for event, action in (
        (host.ON_PRE_RUN, session.begin_run),
        (host.ON_CLEANUP, session.end_run),
        (host.ON_DETACH, session.release),
    ):
        patched.add_callback_with_key(event, KEY, action)
    return patched


def session_of(model: Any) -> Session | None:
    """The session of a patched model or any clone of it, or None."""
    transformer_options = model.model_options.get("transformer_options", {})
    for wrapper in transformer_options.get("wrappers", {}).get(host.APPLY_MODEL, {}).get(KEY, ()):
        return getattr(wrapper, _SESSION, None)
    return None


def _detach(patched: Any) -> None:
    """Take an earlier VC-Attention out of a clone, keeping what sat behind it."""
    transformer_options = patched.model_options.get("transformer_options", {})
    transformer_options.get("wrappers", {}).get(host.APPLY_MODEL, {}).pop(KEY, None)
    for event in (host.ON_PRE_RUN, host.ON_CLEANUP, host.ON_DETACH):
        patched.callbacks.get(event, {}).pop(KEY, None)
    current = transformer_options.get(host.OVERRIDE)
    if current is not None and hasattr(current, _SESSION):
        previous = getattr(current, _PREVIOUS)
        if previous is None:
            del transformer_options[host.OVERRIDE]
        else:
            transformer_options[host.OVERRIDE] = previous


# -- once per forward pass ------------------------------------------------------------------------------------------


def _apply_model_wrapper(session: Session) -> Callable[..., Any]:
    def apply_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("transformer_options", args[5] if len(args) > 5 else None)
        if not isinstance(options, dict):
            return executor(*args, **kwargs)
        device = _device(args)
        forward = _plan(session, executor, device, options, kwargs)
        before = {name: options[name] for name in (host.RECORD, host.OVERRIDE) if name in options}
        current = before.get(host.OVERRIDE)
        if getattr(current, _SESSION, None) is not session:
            options[host.OVERRIDE] = _chain(session, current)
        options[host.RECORD] = forward
        try:
            out = executor(*args, **kwargs)
            watch.end_pass(forward)
            # A ControlNet's residuals are used up by the first pass; without one, the step can be saved.
            repeatable = kwargs.get("control", args[4] if len(args) > 4 else None) is None
            problem = judge(session, forward, repeatable)
            if problem is not None:
                session.fail(problem)
                if repeatable:
                    session.stats.done.pop(forward.position.step, None)
                    out = executor(*args, **kwargs)
        finally:
            for name in (host.RECORD, host.OVERRIDE):
                options.pop(name, None)
            options.update(before)
        return out

    setattr(apply_model, _SESSION, session)
    return apply_model


def _plan(
    session: Session, executor: Any, device: torch.device, options: dict[str, Any], kwargs: dict[str, Any]
) -> Forward:
    """The record of this forward pass. Holds its one wait for the device: sigma, and what the last pass left."""
    model = getattr(executor, "class_obj", None)
    sigmas = options.get("sigmas")
    watched = session.watch.pop(device, None)
    sigma, largest = read_scalars(None if sigmas is None else sigmas.flatten()[0], watched)
    position = session.locate(
        options.get("sample_sigmas"),
        sigma,
        device,
        getattr(model, "model_sampling", None),
        copied="multigpu_thread_device" in options,
    )
    with session.lock:
        session.stats.forwards += 1
        session.stats.family = session.stats.family or family_of(getattr(model, "diffusion_model", None))
    if largest is not None and not math.isfinite(largest):
        session.fail(ArithmeticError(non_finite(max(position.step - 1, 0), False)))
    window = options.get("context_window")
    payload = kwargs.get("minimax_payload")
    return Forward(
        session,
        position,
        device,
        tuple(map(str, options.get("uuids") or ())),
        None if window is None else tuple(window.index_list),
        payload.get("layout") if isinstance(payload, dict) else None,
        sigma,
        options.get(host.WATCHERS, ()),
    )


def read_scalars(sigma: Tensor | None, watched: Tensor | None) -> tuple[float | None, float | None]:
    """Two device scalars in one copy to the host."""
    if sigma is not None and watched is not None and sigma.device == watched.device:
        first, second = torch.stack((sigma.float(), watched)).tolist()
        return first, second
    return None if sigma is None else float(sigma), None if watched is None else float(watched)


def _device(args: tuple[Any, ...]) -> torch.device:
    x = args[0] if args else None
    return x.device if isinstance(x, Tensor) else torch.device("cpu")


# -- once per attention call ----------------------------------------------------------------------------------------


def _chain(session: Session, current: Override | None) -> Override:
    """Our override in front of `current`, the same object each time, so that compiled code sees no change."""
    with session.lock:
        for override in session.chains:
            if getattr(override, _PREVIOUS) is current:
                return override
        override = _override(session, current)
        session.chains.append(override)
        return override


def _override(session: Session, previous: Override | None) -> Override:
    """The function for the slot. A closure: a callable object would be deep-copied, tensors and all, by clone()."""

    behind = None if previous is None else chained(_name(previous))

    def override(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        forward = _record(kwargs)
        if forward is None or (forward.session is session and not forward.nested):
            call = read_call(args, kwargs)
            route = verdict(session, forward, call, behind)
            if call is not None and forward is not None and route is not None:
                out = compute(session, forward, call, route)
                if out is not None:
                    return out
        if previous is None:
            return func(*args, **kwargs)
        return _behind(forward, previous, func, *args, **kwargs)

    def container_function(*args: Any, **kwargs: Any) -> Any:
        # ComfyUI 0.33 and later hand over tensors that belong to whoever takes them, and no func.
        forward = _record(kwargs)
        if forward is None or (forward.session is session and not forward.nested):
            call = read_call(args, kwargs)
            route = verdict(session, forward, call, behind)
            if call is not None and forward is not None and route is not None:
                kinds = [type(container) for container in args[:3]]
                for container in args[:3]:
                    container.take()
                out = compute(session, forward, call, route)
                if out is not None:
                    return out
                tensors = (call.q, call.k, call.v)
                args = (*(kind(tensor) for kind, tensor in zip(kinds, tensors, strict=False)), *args[3:])
        kwargs.setdefault("_inside_attn_wrapper", True)  # or ComfyUI would come back to us
        if previous is None:
            return host.default_attention()(*args, **kwargs)
        if hasattr(previous, "container_function"):
            return _behind(forward, previous.container_function, *args, **kwargs)
        tensors = tuple(container.take() for container in args[:3])
        return _behind(forward, previous, host.default_attention(), *tensors, *args[3:], **kwargs)

    hooked: Any = torch.compiler.disable(override)
    hooked.container_function = torch.compiler.disable(container_function)
    setattr(hooked, _SESSION, session)
    setattr(hooked, _PREVIOUS, previous)
    return hooked


def _record(kwargs: dict[str, Any]) -> Forward | None:
    options = kwargs.get("transformer_options")
    return options.get(host.RECORD) if options else None


def _behind(forward: Forward | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the hook behind ours; should it end in an older override of ours, that one steps aside."""
    if forward is None or forward.nested:
        return function(*args, **kwargs)
    forward.nested = True
    try:
        return function(*args, **kwargs)
    finally:
        forward.nested = False


def verdict(session: Session, forward: Forward | None, call: Call | None, behind: str | None) -> Route | None:
    """The way for this call, or None when it is not for us (and then it is counted)."""
    reason = session.broken
    if reason is None:
        reason = ineligible(call, forward, session.options, session.unsupported)
    if reason is not None:
        session.decline(reason, 1 if forward is None else len(forward.branches))
        return None
    if call is None:
        return None
    if forward is not None and watch.keeps_16_bit(forward, call):
        forward.key(call)  # it counts among its equals: the next one must not take its number
        session.decline(REASONS["budget"], len(forward.branches))
        return None
    if behind is not None:
        session.note(behind)
    if session.options.blocks and call.options.get("block_index") is None:
        session.note(NO_BLOCK_NUMBERS)
    route = session.route(call)
    return route if isinstance(route, Route) else None


def compute(session: Session, forward: Forward, call: Call, route: Route) -> Tensor | None:
    """The result, or None after a problem that the run survives on ComfyUI's own attention."""
    try:
        return accelerate(session, forward, call, route)
    except Exception as error:
        if host.is_interrupt(error):
            raise
        session.fail(error)
    reason: Reason | None = session.broken
    if reason is not None:
        session.decline(reason, len(forward.branches))
    return None


def _name(function: Any) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    return f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}".replace(".<locals>", "")
