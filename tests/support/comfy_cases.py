"""Running one case in real ComfyUI: unpatched, patched, and broken on purpose; and what the schedule rule predicts.

The prediction is written here a second time, from the rule and not from the pack's code: the window is the first
ceil(fraction * n) steps of a full schedule, or the steps strictly above percent_to_sigma(fraction) where the sampler
sees only a part; groups are built at its first step and every `reuse` steps, once for each layer and branch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vc_attention.kernels import EXACT
from vc_attention.tools import tiny_models

OVERRIDE = "optimized_attention_override"
TOLERANCE = 1e-5
STEPS = 8


def min_tokens(name: str) -> int:
    """A threshold between the text (20 to 33 tokens; i2v's image cross attention: 257) and the video."""
    return 280 if name == "wan_i2v" else 64


def options(name: str, **chosen: Any):
    """Permutation only: exact arithmetic, groups in the first half of the steps, rebuilt every 2."""
    from vc_attention.nodes.options import PatchOptions

    defaults = {"plan": EXACT, "backend": "spec", "min_tokens": min_tokens(name), "group_fraction": 0.5}
    return PatchOptions(**{**defaults, "reuse_steps": 2, **chosen})


@dataclass
class Seen:
    """One forward pass of the unpatched model. calls: (block_type, block_index, Lq, Lkv, takes low precision, mask)."""

    sigma: float
    sample_sigmas: torch.Tensor
    uuids: tuple[str, ...]
    window: tuple[int, ...] | None
    calls: list[tuple[Any, Any, int, int, bool, bool]] = field(default_factory=list)


def watch(model: Any, change: Callable[..., Any] | None = None) -> tuple[Any, list[Seen]]:
    """A clone of `model` that records its forward passes. change(call, func, q, k, v, heads, keywords) may replace an
    attention call's result."""
    import comfy.patcher_extension

    passes: list[Seen] = []
    watched = model.clone()
    transformer_options = watched.model_options["transformer_options"]
    previous = transformer_options.get(OVERRIDE)

    def override(func, q, k, v, heads, *rest, **keywords):
        options = keywords.get("transformer_options") or {}
        axis = 2 if keywords.get("skip_reshape", False) else 1
        mask = keywords.get("mask", rest[0] if rest else None)
        low = keywords.get("low_precision_attention", True) is not False
        block = (options.get("block_type"), options.get("block_index"))
        call = (*block, q.shape[axis], k.shape[axis], low, mask is not None)
        passes[-1].calls.append(call)
        if change is not None:
            return change(call, func, q, k, v, heads, *rest, **keywords)
        inner = func if previous is None else (lambda *a, **b: previous(func, *a, **b))
        return inner(q, k, v, heads, *rest, **keywords)

    def apply_model(executor, *args, **keywords):
        options = keywords["transformer_options"] if "transformer_options" in keywords else args[5]
        window = options.get("context_window")
        passes.append(
            Seen(
                float(options["sigmas"][0]),
                options["sample_sigmas"],
                tuple(map(str, options["uuids"])),
                None if window is None else tuple(window.index_list),
            )
        )
        options[OVERRIDE] = override
        return executor(*args, **keywords)

    watched.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, "test_watch", apply_model)
    return watched, passes


def predict(model: Any, passes: list[Seen], opts: Any) -> Counter:
    """What the rule says of these passes: how many (call, branch) pairs are grouped, reused, plain; declined calls."""
    sampling = model.get_model_object("model_sampling")
    counts: Counter = Counter(grouped=0, reused=0, plain=0, declined=0)
    built: dict[Any, int] = {}
    current: torch.Tensor | None = None
    for one in passes:
        if one.sample_sigmas is not current:
            current = one.sample_sigmas
            built.clear()
        sigmas = [float(s) for s in current]
        n = len(sigmas) - 1
        step = max(i for i in range(n) if i == 0 or sigmas[i] >= one.sigma * (1 - 1e-5))
        full = sigmas[-1] == 0 and sigmas[0] >= float(sampling.sigma_max) * 0.999
        if full:
            inside = step < math.ceil(opts.group_fraction * n)
        else:
            inside = one.sigma > float(sampling.percent_to_sigma(opts.group_fraction)) * (1 + 1e-5)
        ordinals: Counter = Counter()
        for call in one.calls:
            lq, lkv, low, masked = call[2:]
            if masked or not low or lkv < opts.min_tokens:
                counts["declined"] += len(one.uuids)
                continue
            place = call[:4]
            ordinals[place] += 1
            for uuid in one.uuids:
                if not inside or 2 * lq < lkv:
                    counts["plain"] += 1
                    continue
                key = (place, ordinals[place], uuid, one.window)
                period = step // opts.reuse_steps
                counts["reused" if built.get(key) == period else "grouped"] += 1
                built[key] = period
    return counts


def counted(stats: Any) -> Counter:
    """The same numbers from a run's statistics."""
    return Counter(grouped=stats.grouped, reused=stats.reused, plain=stats.plain, declined=sum(stats.declined.values()))


@contextmanager
def permutations() -> Iterator[list[torch.Tensor]]:
    """Collect every permutation that the specification applies to K and V."""
    from unittest import mock

    from vc_attention.kernels.spec import attention

    seen: list[torch.Tensor] = []
    real = attention.permutation

    def spy(labels: torch.Tensor) -> torch.Tensor:
        order = real(labels)
        seen.append(order)
        return order

    with mock.patch.object(attention, "permutation", spy):
        yield seen


def shuffle_keys_only(threshold: int) -> Callable[..., Any]:
    """For `watch`: the fault that the comparison must be able to see, K permuted and V not."""
    generator = torch.Generator().manual_seed(5)

    def change(call, func, q, k, v, heads, *rest, **keywords):
        _, _, _, lkv, low, masked = call
        if lkv >= threshold and low and not masked:
            order = torch.randperm(lkv, generator=generator)
            k = k.index_select(2 if keywords.get("skip_reshape", False) else 1, order)
        return func(q, k, v, heads, *rest, **keywords)

    return change


def distance(a: Any, b: Any) -> float:
    """Largest difference relative to the largest value of b; infinite when a is not finite."""
    a, b = tiny_models.flat(a), tiny_models.flat(b)
    return float((a - b).abs().max() / b.abs().max()) if bool(torch.isfinite(a).all()) else math.inf


def same(model: Any) -> Any:
    """The preparation that does nothing."""
    return model


@dataclass
class Outcome:
    """Latents of the three runs and what the patched one counted."""

    reference: Any
    result: Any
    broken: Any
    session: Any
    passes: list[Seen]
    expected: Counter
    orders: list[torch.Tensor]

    def check(self, grouping: bool = True) -> None:
        """Everything that a case must show."""
        assert distance(self.result, self.reference) <= TOLERANCE
        assert distance(self.broken, self.reference) > 1000 * TOLERANCE
        assert counted(self.session.stats) == self.expected
        assert len(self.session.state) == 0
        if grouping:
            assert self.expected["grouped"] > 0
            assert any(not torch.equal(o, torch.arange(o.shape[-1]).expand_as(o)) for o in self.orders)


def run_case(
    base: Any,
    name: str,
    opts: Any = None,
    prepare: Callable[[Any], Any] = same,
    sampling: Callable[..., Any] = tiny_models.sample,
    **keywords: Any,
) -> Outcome:
    """Sample the family `name` three times with the same inputs. prepare: what other nodes do to the model, applied
    after ours. sampling: called as `tiny_models.sample`."""
    from vc_attention.nodes.hook import attach, session_of

    opts = options(name) if opts is None else opts
    keywords = {"steps": STEPS, **keywords}
    watched, passes = watch(prepare(base))
    reference = sampling(watched, name, **keywords)
    expected = predict(base, passes, opts)
    wrecked, _ = watch(prepare(base), shuffle_keys_only(opts.min_tokens))
    broken = sampling(wrecked, name, **keywords)
    patched = prepare(attach(base, opts))
    with permutations() as orders:
        result = sampling(patched, name, **keywords)
    return Outcome(reference, result, broken, session_of(patched), passes, expected, orders)


def attach_again(base: Any, name: str, **chosen: Any) -> Any:
    """`base` patched once more with the options of the cases, for tests that drive the model themselves."""
    from vc_attention.nodes.hook import attach

    return attach(base, options(name, **chosen))
