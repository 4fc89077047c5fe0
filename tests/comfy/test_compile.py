"""torch.compile around a patched model, with backend "eager": dynamo's tracing without a compiler's noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfy_cases import STEPS, TOLERANCE, attach_again, counted, distance, options, permutations, predict, watch
from vc_attention.tools import tiny_models

pytestmark = pytest.mark.comfy


def compiled(model: Any, name: str, scope: str) -> Any:
    """What ComfyUI's TorchCompileModel node makes (whole model), or KJNodes' per-block variant."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    blocks = "double_blocks" if name.startswith("hunyuan") else "blocks"
    keys = ["diffusion_model"] if scope == "whole model" else [f"diffusion_model.{blocks}.{i}" for i in range(2)]
    changed = model.clone()
    set_torch_compile_wrapper(model=changed, backend="eager", keys=keys)
    return changed


def count_graphs(model: Any) -> tuple[Any, list[int]]:
    """A clone that notes how many graphs dynamo has made after each forward pass."""
    import comfy.patcher_extension
    import torch._dynamo

    after: list[int] = []
    counting = model.clone()

    def apply_model(executor, *arguments, **keywords):
        out = executor(*arguments, **keywords)
        after.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return out

    counting.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, "test_graphs", apply_model)
    return counting, after


@pytest.fixture(autouse=True)
def fresh_dynamo():
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", tiny_models.NAMES)
@pytest.mark.parametrize("scope", ["whole model", "each block"])
def test_compiled_equals_eager_and_steps_do_not_recompile(tiny, name, scope):
    from vc_attention.nodes.hook import session_of

    base = tiny(name)
    watched, passes = watch(base)
    reference = tiny_models.sample(watched, name, STEPS)
    expected = predict(base, passes, options(name))

    patched, graphs = count_graphs(compiled(attach_again(base, name), name, scope))
    with permutations() as orders:
        out = tiny_models.sample(patched, name, STEPS)
    assert distance(out, reference) <= TOLERANCE
    assert counted(session_of(patched).stats) == expected
    assert any(not torch.equal(o, torch.arange(o.shape[-1]).expand_as(o)) for o in orders)
    # everything is traced once the first pass (groups built) is through: later steps, other phases, a second run
    # (Animate-2 enters its blocks through methods of their own, which compiling a block leaves eager)
    assert graphs[0] > 0 or (name, scope) == ("wan_animate2", "each block")
    assert graphs[2:] == [graphs[2]] * len(graphs[2:])
    tiny_models.sample(patched, name, STEPS)
    assert graphs[-1] == graphs[2]


@pytest.mark.parametrize("name", ["wan22_t2v", "hunyuan_video"])
def test_measuring_does_not_recompile(tiny, name):
    """VC-Attention Quality on a compiled model: every layer of every step is measured, and no step is traced again."""
    from vc_attention.nodes.quality import Quality, QualityOptions
    from vc_attention.nodes.watch import watch as observed

    quality = Quality(QualityOptions())
    model = observed(attach_again(tiny(name), name), quality)
    patched, graphs = count_graphs(compiled(model, name, "whole model"))
    tiny_models.sample(patched, name, STEPS)
    (run,) = quality.results()
    assert {total.count for total in run.layers.values()} == {STEPS}
    assert graphs[0] > 0 and graphs[2:] == [graphs[2]] * len(graphs[2:])
