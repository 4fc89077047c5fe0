"""The attention kernel on an sm_90 GPU against the specification of the same plan."""

from __future__ import annotations

import pytest
import torch
from vc_attention.kernels import FAITHFUL, FAST, Plan
from vc_attention.kernels.cute.reference import prepare
from vc_attention.kernels.launch.attend import attend
from vc_attention.kernels.spec.attention import attention as spec_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu_kernels")]

PLANS = [
    FAST,
    FAST.without_smoothing(),
    Plan(key_means=True),
    FAITHFUL,
    FAITHFUL.without_smoothing(),
    Plan(probability="exp2", key_means=True),
]
SHAPES = [(1, 2, 1, 1), (2, 3, 129, 257), (1, 1, 128, 256), (1, 2, 300, 1023), (1, 1, 700, 4097)]


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.encode())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_is_the_specifications(plan, shape, dtype):
    b, h, lq, lkv = shape
    g = torch.Generator("cuda").manual_seed(lq + lkv)
    q, k, v = (torch.randn(b, h, n, 128, device="cuda", generator=g).to(dtype) for n in (lq, lkv, lkv))
    labels = torch.randint(0, 16, (b, h, lkv), device="cuda", generator=g, dtype=torch.uint8)
    v = v + 2 * torch.randn(16, 128, device="cuda", generator=g, dtype=torch.float32)[labels.long()].to(dtype)
    used = labels if plan.demean else None
    guard = torch.full((b * lq * h * 128 + 4096,), float("nan"), dtype=dtype, device="cuda")
    out = guard[: b * lq * h * 128].view(b, lq, h, 128)
    assert attend(prepare(q, k, v, plan, used), plan, out) is None
    exact = torch.softmax(q.double() @ k.double().transpose(2, 3) * 128**-0.5, -1) @ v.double()
    error = relative(out.transpose(1, 2), exact)
    # Below 0.004 the output type's own rounding is what is seen.
    assert error < max(1.1 * relative(spec_attention(q, k, v, plan, used), exact), 4e-3)
    assert torch.isnan(guard[b * lq * h * 128 :]).all()


def test_a_graph_replays_the_call():
    q, k, v = (torch.randn(1, 2, 300, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    images = prepare(q, k, v, FAST)
    eager, replayed = (torch.empty(1, 300, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert attend(images, FAST, eager) is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert attend(images, FAST, replayed) is None
    replayed.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(eager, replayed)
