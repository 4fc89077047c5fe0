"""The hook for models of ComfyUI-WanVideoWrapper (LongCat-Video, and Wan through the wrapper).

Its samplers call the transformer directly: ComfyUI's wrappers, callbacks and attention hook are never reached, and all
clones of a model share one transformer. What does reach every pass of a patched clone, and of no other, is
`transformer_options`, which the sampler deep-copies at the start of each run. So a marker travels there; two hooks on
the transformer look for it before and after each pass; and for the length of a pass, and no longer, the methods of
each block's self-attention are exchanged for ones whose `attention` is ours. Without the marker nothing is exchanged.

Read in kijai/ComfyUI-WanVideoWrapper: nodes_sampler.py (WanVideoSampler.process), wanvideo/modules/model.py
(WanModel.forward, WanAttentionBlock, WanSelfAttention), wanvideo/modules/attention.py (attention).
"""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import host, watch
from .call import Call
from .families import wrapper_family
from .forward import Forward
from .guard import judge
from .hook import compute, read_scalars, verdict
from .messages import FULLGRAPH, NOT_THE_WRAPPERS, OTHER_PATCH, REASONS, non_finite
from .options import PatchOptions
from .session import Session
from .wrapper_schedule import WrapperSchedule

KEY = "vc_attention_wrapper"

#: The global name that the methods of the wrapper's self-attention call.
ATTENTION = "attention"

#: Keywords of the wrapper's attention that change its result -> the value that changes nothing.
_NEUTRAL: dict[str, Any] = {"dropout_p": 0.0, "q_scale": None, "window_size": (-1, -1)}


class Marker:
    """What travels in `transformer_options`. A copy is another marker, so each sampler run has its own."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge

    def __deepcopy__(self, memo: dict[int, Any]) -> Marker:
        return Marker(self.bridge)


class _Now:
    """The record of the pass that is running, or None."""

    forward: Forward | None = None


@dataclass
class _Exchange:
    """One self-attention module, and its methods with our attention in them. original: the wrapper's attention."""

    module: Any
    methods: dict[str, Callable[..., Any]]
    original: Callable[..., Any]


class Bridge:
    """VC-Attention on one patched WANVIDEOMODEL and its clones. The hooks go when the last of these goes."""

    def __init__(self, transformer: Any, options: PatchOptions, node_id: str | None = None) -> None:
        self.session = Session(options, node_id)
        self._schedule = WrapperSchedule(options)
        self._run: weakref.ref[Marker] | None = None
        self._now = _Now()
        self._step = 0
        self._watchers: tuple[watch.Watcher, ...] = ()
        self._exchanges: list[_Exchange] = []
        self._installed: list[tuple[Any, str]] = []
        bridge = weakref.ref(self)

        def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            here, marker = bridge(), _marker(kwargs)
            if here is not None:
                here._restore()  # torch runs no hook after a pass that Ctrl+C tore down
                if marker is not None and marker.bridge is here:
                    here._before(module, marker, kwargs)

        def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            here, marker = bridge(), _marker(kwargs)
            if here is not None and marker is not None and marker.bridge is here:
                return here._after(module, args, kwargs, output)
            return None

        handles = (
            transformer.register_forward_pre_hook(torch.compiler.disable(before), with_kwargs=True),
            transformer.register_forward_hook(torch.compiler.disable(after), with_kwargs=True, always_call=True),
        )
        weakref.finalize(self, _remove, handles).atexit = False

    # -- once per forward pass ----------------------------------------------------------------------------------

    def _before(self, transformer: Any, marker: Marker, kwargs: dict[str, Any]) -> None:
        session = self.session
        try:
            if self._run is None or self._run() is not marker:
                self._begin(transformer, marker, _watchers(kwargs))
            step_before = self._step
            self._now.forward, largest = self._plan(transformer, kwargs)
            self._step = self._now.forward.position.step
            for exchange in self._exchanges:
                self._install(exchange)
        except Exception as error:
            self._restore()
            if host.is_interrupt(error):
                raise
            session.fail(error)
            return
        if largest is not None and not math.isfinite(largest):
            session.fail(ArithmeticError(non_finite(step_before, False)))

    def _begin(self, transformer: Any, marker: Marker, watchers: tuple[watch.Watcher, ...]) -> None:
        session = self.session
        self._run = weakref.ref(marker)
        self._end_run()  # of a run whose marker is still held somewhere
        session.begin_run()
        self._watchers = watchers
        for watcher in watchers:
            watcher.begin_run()
        self._schedule = WrapperSchedule(session.options)
        weakref.finalize(marker, _end, weakref.ref(self), self._run).atexit = False
        known = self._exchanges
        if not known or any(_current(exchange) is not exchange.original for exchange in known):
            self._exchanges = exchanges(transformer, session, self._now)

    def _end_run(self) -> None:
        """The run is over, finished or interrupted."""
        self.session.end_run()
        watchers, self._watchers = self._watchers, ()
        for watcher in watchers:
            watcher.end_run()

    def _plan(self, transformer: Any, kwargs: dict[str, Any]) -> tuple[Forward, float | None]:
        """The record of this pass, and the largest output of the last one where it was looked at.

        Holds the pass's one wait for the device: its noise level, and what the last pass left.
        """
        session, timestep = self.session, kwargs.get("t")
        device = _device(kwargs)
        # LongCat's conditioning frames have timestep 0, so the largest one is the noise's.
        t = timestep.max() if isinstance(timestep, Tensor) and timestep.numel() else None
        found, largest = read_scalars(t, session.watch.pop(device, None))
        sigma = None if found is None else found / 1000.0
        if self._schedule.begins(int(kwargs.get("current_step", 0))):
            session.state.clear()
        position, branch = self._schedule.place(kwargs, sigma)
        session.enter(position, device)
        with session.lock:
            session.stats.forwards += 1
            session.stats.family = session.stats.family or wrapper_family(transformer)
        return Forward(session, position, device, (branch,), sigma=sigma, watchers=_watchers(kwargs)), largest

    def _after(self, transformer: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Undo the exchange; judge the pass, and give its repetition where it does not stand. None: `output` stays."""
        forward, session = self._now.forward, self.session
        self._restore()
        if forward is None or output is None:  # None: the pass met an error, which is on its way to the sampler
            return None
        watch.end_pass(forward)
        repeatable = not _remembers(transformer)
        problem = judge(session, forward, repeatable)
        repeated = None
        if problem is not None:
            session.fail(problem)
            if repeatable:
                repeated = transformer.forward(*args, **kwargs)
        if kwargs.get("last_step"):
            host.show_text(session.stats.summary(), session.node_id)
        return repeated

    def _install(self, exchange: _Exchange) -> None:
        for name, method in exchange.methods.items():
            if name in exchange.module.__dict__:  # another pack put its own there
                self.session.note(OTHER_PATCH)
                continue
            setattr(exchange.module, name, method)
            self._installed.append((exchange.module, name))

    def _restore(self) -> None:
        self._now.forward = None
        while self._installed:
            module, name = self._installed.pop()
            module.__dict__.pop(name, None)


def _marker(kwargs: dict[str, Any]) -> Marker | None:
    options = kwargs.get("transformer_options")
    marker = options.get(KEY) if isinstance(options, dict) else None
    return marker if isinstance(marker, Marker) else None


def _watchers(kwargs: dict[str, Any]) -> tuple[watch.Watcher, ...]:
    return tuple(kwargs["transformer_options"].get(host.WATCHERS, ()))


def _remove(handles: tuple[Any, ...]) -> None:
    for handle in handles:
        handle.remove()


def _end(bridge: weakref.ref[Bridge], run: weakref.ref[Marker]) -> None:
    """A run's marker is gone, so its sampler has returned. Nothing of the run holds a lock any more."""
    here = bridge()
    if here is not None and here._run is run:
        here._run = None
        here._end_run()


def _device(kwargs: dict[str, Any]) -> torch.device:
    x = kwargs.get("x")
    first = x[0] if isinstance(x, (list, tuple)) and x else x
    given = kwargs.get("device")
    if given is not None:
        return torch.empty(0, device=given).device  # with its index: "cuda" alone is no key
    return first.device if isinstance(first, Tensor) else torch.device("cpu")


def _remembers(transformer: Any) -> bool:
    """Whether a pass leaves traces that a second one would read: TeaCache and its kin, Stand-In's kept keys."""
    names = ("enable_teacache", "enable_magcache", "enable_easycache")
    blocks = getattr(transformer, "blocks", ())
    return any(getattr(transformer, name, False) for name in names) or any(
        getattr(_inner(block), "kv_cache", None) is not None for block in blocks
    )


# -- once per attention call ----------------------------------------------------------------------------------------


def exchanges(transformer: Any, session: Session, now: _Now) -> list[_Exchange]:
    """The self-attention of every block, and of every VACE block, with our attention in its methods.

    Empty for a transformer that is not built like the wrapper's.
    """
    found = []
    for kind, blocks in ((None, "blocks"), ("vace", "vace_blocks")):
        for index, block in enumerate(getattr(transformer, blocks, None) or ()):
            module = getattr(_inner(block), "self_attn", None)
            exchange = None if module is None else _exchange(module, (kind, index), session, now)
            if exchange is not None:
                found.append(exchange)
    return found


def _inner(block: Any) -> Any:
    return getattr(block, "_orig_mod", block)  # torch.compile's wrapper


def _callers(module: Any) -> dict[str, Any]:
    """The functions of the module's class that call the wrapper's attention."""
    found = {}
    for name in dir(type(module)):
        function = getattr(type(module), name, None)
        if (
            isinstance(function, types.FunctionType)
            and _uses(function.__code__, ATTENTION)
            and callable(function.__globals__.get(ATTENTION))
        ):
            found[name] = function
    return found


def _uses(code: types.CodeType, name: str) -> bool:
    """Whether a function's code, or that of a function or comprehension in it, names `name`."""
    return name in code.co_names or any(_uses(c, name) for c in code.co_consts if isinstance(c, types.CodeType))


def _current(exchange: _Exchange) -> Any:
    functions = _callers(exchange.module)
    return next((functions[name].__globals__[ATTENTION] for name in exchange.methods if name in functions), None)


def _exchange(module: Any, block: tuple[str | None, int], session: Session, now: _Now) -> _Exchange | None:
    functions = _callers(module)
    if "forward" not in functions:
        return None
    original = functions["forward"].__globals__[ATTENTION]
    ours = _attention(original, {"block_type": block[0], "block_index": block[1]}, session, now)
    methods: dict[str, Callable[..., Any]] = {}
    for name, function in functions.items():
        if function.__globals__[ATTENTION] is not original:
            continue
        # The wrapper's own code, in a namespace where one name means something else: its module stays as it is.
        space = {**function.__globals__, ATTENTION: ours}
        copy = types.FunctionType(function.__code__, space, name, function.__defaults__, function.__closure__)
        copy.__kwdefaults__ = function.__kwdefaults__
        methods[name] = types.MethodType(torch.compiler.disable(copy), module)
    return _Exchange(module, methods, original)


def _attention(original: Callable[..., Any], block: dict[str, Any], session: Session, now: _Now) -> Callable[..., Any]:
    """The wrapper's `attention` of one block: q, k, v [B, L, H, D] in, [B, Lq, H, D] out.

    k_lens is left aside, as the wrapper's sdpa mode does: self-attention has no padding. What is declined goes to
    `original` with every argument as it came.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward = now.forward
        if forward is None:
            return original(q, k, v, *args, **kwargs)
        call = _call(q, k, v, args, kwargs, block)
        if call is None:
            session.decline(REASONS["shape"], len(forward.branches))
        else:
            route = verdict(session, forward, call, None)
            out = None if route is None else compute(session, forward, call, route)
            if out is not None:
                return out.transpose(1, 2)
        return original(q, k, v, *args, **kwargs)

    return attention


def _call(
    q: Tensor, k: Tensor, v: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], block: dict[str, Any]
) -> Call | None:
    """The call as eligibility and engine read it, or None when it asks for something they do not know."""
    neutral = all(kwargs.get(name, value) in (value, None) for name, value in _NEUTRAL.items())
    if args or not neutral or not q.dim() == k.dim() == v.dim() == 4:
        return None
    keywords = {
        "transformer_options": block,
        "is_causal": bool(kwargs.get("causal", False)),
        "scale": kwargs.get("softmax_scale"),
    }
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return Call(q, k, v, q.shape[1], kwargs.get("attn_mask"), True, True, keywords)


# -- the node's side ------------------------------------------------------------------------------------------------


def attach_bridge(model: Any, options: PatchOptions, node_id: str | None = None) -> Any:
    """A clone of the WANVIDEOMODEL `model` with VC-Attention in its self-attention.

    A model that is patched already gets the new options instead of the old; with precision "off" the clone has none.
    The attention_mode chosen on the wrapper's loader serves the calls that VC-Attention declines.
    """
    patched = model.clone()
    transformer_options = patched.model_options.setdefault("transformer_options", {})
    transformer_options.pop(KEY, None)
    if options.enabled:
        transformer_options[KEY] = Marker(Bridge(patched.model.diffusion_model, options, node_id))
    return patched


def bridge_session(model: Any) -> Session | None:
    """The session of a patched WANVIDEOMODEL or any clone of it, or None."""
    marker = _marker(model.model_options)
    return None if marker is None else marker.bridge.session


def watch_bridge(model: Any, watcher: watch.Watcher) -> Any:
    """A clone of the patched WANVIDEOMODEL `model` with `watcher` on it; the bridge tells it of runs and calls."""
    watched = model.clone()
    options = watched.model_options.setdefault("transformer_options", {})
    options[host.WATCHERS] = (*options.get(host.WATCHERS, ()), watcher)
    return watched


def obstacle(model: Any) -> str | None:
    """Why this WANVIDEOMODEL cannot be patched, or None."""
    inner = getattr(model, "model", None)
    transformer = getattr(inner, "diffusion_model", None)
    if not isinstance(transformer, torch.nn.Module) or not exchanges(transformer, Session(PatchOptions()), _Now()):
        return NOT_THE_WRAPPERS
    compiling = getattr(inner, "pipeline", {}).get("compile_args")
    if isinstance(compiling, dict) and compiling.get("fullgraph"):
        return FULLGRAPH
    return None
