"""What happens around one sampler: branches batched or not, samplers in a row, cached models, interrupts, windows."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import comfy_cases
import pytest
import torch
from comfy_cases import STEPS, TOLERANCE, Outcome, counted, distance, options, permutations, predict, run_case, watch
from vc_attention.tools import tiny_models

pytestmark = pytest.mark.comfy

each_family = pytest.mark.parametrize("name", tiny_models.NAMES)


class Management:
    """ComfyUI's model_management as its sampler sees it, with another answer to "how much memory is free?"."""

    def __init__(self, real: Any, free) -> None:
        self._real = real
        self._free = free

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_free_memory(self, *_: Any, **__: Any) -> int:
        return self._free()


def _sampler_memory(monkeypatch, free) -> None:
    """Let `free()` answer when the sampler decides how many branches go into one batch."""
    import comfy.model_patcher
    import comfy.samplers

    if hasattr(comfy.model_patcher.ModelPatcher, "get_free_memory"):  # 0.33.0 and later ask the patcher
        monkeypatch.setattr(comfy.model_patcher.ModelPatcher, "get_free_memory", lambda *_: free())
        return
    monkeypatch.setattr(comfy.samplers, "model_management", Management(comfy.samplers.model_management, free))


@each_family
def test_branches_apart_for_lack_of_memory(tiny, name, monkeypatch):
    """Equal prompt lengths, but no memory for a batch of two: the counts are those of the batched run."""
    together = run_case(tiny(name), name)
    _sampler_memory(monkeypatch, lambda: 0)
    apart = run_case(tiny(name), name)
    apart.check()
    assert {len(one.uuids) for one in apart.passes} == {1}
    assert distance(apart.reference, together.reference) < 1e-4
    if name != "minimax_h3":  # batch 1 always
        assert {len(one.uuids) for one in together.passes} == {2}
    assert counted(apart.session.stats) == counted(together.session.stats)


def test_batching_that_changes_between_steps(tiny, monkeypatch):
    """The groups of a branch are found again whether it comes alone or in a batch."""
    name = "wan22_t2v"
    asked = Counter()

    def free() -> int:
        asked["n"] += 1
        return 0 if asked["n"] % 3 == 0 else 1 << 40

    _sampler_memory(monkeypatch, free)

    def sampling(*arguments, **keywords):
        asked.clear()
        return tiny_models.sample(*arguments, **keywords)

    outcome = run_case(tiny(name), name, sampling=sampling)
    outcome.check()
    assert {len(one.uuids) for one in outcome.passes} == {1, 2}
    # 4 of 8 steps in the window, rebuilt every 2, 2 layers, 2 branches: 8 built, 8 reused, whatever the batching
    assert counted(outcome.session.stats) == Counter(grouped=8, reused=8, plain=16, declined=32)


def test_cfg_switched_off_in_the_middle(tiny):
    """From step 3 only the positive branch runs: its groups serve on."""
    import comfy.patcher_extension

    name = "wan22_t2v"

    def prepare(model):
        switched = model.clone()

        def predict_noise(executor, x, timestep, model_options, *rest, **keywords):
            sigmas = model_options["transformer_options"]["sample_sigmas"]
            executor.class_obj.cfg = 4.0 if float(timestep[0]) > float(sigmas[3]) else 1.0
            return executor(x, timestep, model_options, *rest, **keywords)

        kind = comfy.patcher_extension.WrappersMP.PREDICT_NOISE
        switched.add_wrapper_with_key(kind, "test_switch", predict_noise)
        return switched

    outcome = run_case(tiny(name), name, prepare=prepare)
    outcome.check()
    # steps 0 to 2 with two branches, then one: built 0 and 2, reused 1 (2 branches) and 3 (1 branch), in 2 layers
    assert [len(one.uuids) for one in outcome.passes] == [2, 2, 2, 1, 1, 1, 1, 1]
    assert counted(outcome.session.stats) == Counter(grouped=8, reused=6, plain=8, declined=22)


@each_family
@pytest.mark.parametrize("same_model", [True, False], ids=["one model", "high and low"])
def test_two_samplers_in_a_row(tiny, name, same_model):
    """KSamplerAdvanced twice, as Wan2.2's high / low pair: each sees only its slice of the schedule."""
    from vc_attention.nodes.hook import attach, session_of

    base, split = tiny(name), 3
    opts = options(name, group_fraction=0.5)
    first = {"steps": STEPS, "last_step": split}

    def second(latent: Any, model: Any) -> Any:
        return tiny_models.sample(
            model,
            name,
            STEPS,
            latent=latent,
            noise=tiny_zero(latent),
            disable_noise=True,
            start_step=split,
            force_full_denoise=True,
        )

    watched, passes = watch(base)
    middle = tiny_models.sample(watched, name, **first)
    expected_first = predict(base, passes, opts)
    del passes[:]
    reference = second(middle, watched)
    expected_second = predict(base, passes, opts)

    high = attach(base, opts)
    low = high if same_model else attach(base, opts)
    with permutations() as orders:
        latent = tiny_models.sample(high, name, **first)
        counted_first = counted(session_of(high).stats)
        assert len(session_of(high).state) == 0
        out = second(latent, low)
    assert distance(latent, middle) <= TOLERANCE
    assert distance(out, reference) <= TOLERANCE
    assert counted_first == expected_first
    assert counted(session_of(low).stats) == expected_second
    assert expected_first["grouped"] > 0 and expected_first["reused"] > 0
    assert orders


def tiny_zero(latent: Any) -> Any:
    """Zeros of the latent's shape, nested like it."""
    if getattr(latent, "is_nested", False):
        import comfy.nested_tensor

        return comfy.nested_tensor.NestedTensor(tuple(torch.zeros_like(part) for part in latent.unbind()))
    return torch.zeros_like(latent)


@each_family
def test_one_cached_model_twice(tiny, name):
    """The second prompt gets the same patched object: the same clip, the same counts, nothing left in between."""
    from vc_attention.nodes.hook import session_of

    outcome = run_case(tiny(name), name)
    outcome.check()
    session = outcome.session
    patched = comfy_cases.attach_again(tiny(name), name)
    for _ in range(2):
        with permutations() as orders:
            again = tiny_models.sample(patched, name, STEPS)
        assert torch.equal(tiny_models.flat(again), tiny_models.flat(outcome.result))
        assert counted(session_of(patched).stats) == counted(session.stats) == outcome.expected
        assert len(session_of(patched).state) == 0
        assert orders


@each_family
def test_interrupt_then_rerun(tiny, name):
    """Cancel in the third pass: everything is freed, and the next run starts from the beginning."""
    import comfy.model_management
    import comfy.patcher_extension
    from vc_attention.nodes.hook import session_of

    interrupted = comfy_cases.attach_again(tiny(name), name)
    session = session_of(interrupted)
    passes = Counter()
    held = []

    def stop(executor, *arguments, **keywords):
        passes["n"] += 1
        if passes["n"] == 3:
            held.append(len(session.state))
            raise comfy.model_management.InterruptProcessingException
        return executor(*arguments, **keywords)

    interrupted.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, "test_stop", stop)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        tiny_models.sample(interrupted, name, STEPS)
    assert held[0] > 0
    assert len(session.state) == 0 and session.state.nbytes() == 0
    rerun = tiny_models.sample(interrupted, name, STEPS)

    outcome = run_case(tiny(name), name)
    assert distance(rerun, outcome.reference) <= TOLERANCE
    assert counted(session.stats) == outcome.expected


def _windows(length: int, overlap: int):
    import comfy.context_windows as windows

    def prepare(model):
        windowed = model.clone()
        windowed.model_options["context_handler"] = windows.IndexListContextHandler(
            context_schedule=windows.get_matching_context_schedule("standard_static"),
            fuse_method=windows.get_matching_fuse_method("pyramid"),
            context_length=length,
            context_overlap=overlap,
            context_stride=1,
            closed_loop=False,
            dim=2,
        )
        return windowed

    return prepare


@each_family
def test_context_windows(tiny, name):
    """Overlapping windows share conditionings and shapes; each keeps groups of its own."""
    base = tiny(name)
    latent = tiny_models.empty_latent(name, frames=9)
    try:
        tiny_models.sample(_windows(5, 2)(base), name, 1, latent=latent)
    except Exception as error:
        pytest.skip(f"comfy: ComfyUI cannot cut {name} into context windows: {type(error).__name__} {error}")
    outcome: Outcome = run_case(base, name, prepare=_windows(5, 2), latent=latent, steps=6)
    outcome.check()
    windows = {one.window for one in outcome.passes}
    assert len(windows) >= 3
    # each window and branch builds once for each layer and period of the 3 grouped steps (rebuilt every 2)
    least = comfy_cases.min_tokens(name)
    calls = sum(lq == lkv >= least for _, _, lq, lkv, low, _ in outcome.passes[0].calls if low)
    assert outcome.expected["grouped"] == len(windows) * 2 * math.ceil(3 / 2) * calls
