"""Strides, offsets beyond 32 bits, dtypes and mutation, at the library's own door."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import PLANS, each_plan, exact, relative
from vc_attention import kernels
from vc_attention.kernels import FAST


def _offset(x: torch.Tensor, by: int) -> torch.Tensor:
    buffer = x.new_full((x.numel() + by + 8,), float("nan"))
    buffer[by : by + x.numel()] = x.flatten()
    return buffer[by : by + x.numel()].view(x.shape)


LAYOUTS = {
    "hnd": lambda x: x,
    "nhd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "split of a fused qkv": lambda x: torch.stack((x, x * 7, x * 5), -2).select(-2, 0),
    "rows of a fused qkv": lambda x: torch.cat((x * 3, x, x * 5), 2)[:, :, x.shape[2] : 2 * x.shape[2]],
    "expanded batch": lambda x: x[:1].expand(2, -1, -1, -1),
    "expanded heads": lambda x: x[:, :1].expand(-1, 2, -1, -1),
    "reversed strides": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    **{f"storage offset {n}": (lambda x, n=n: _offset(x, n)) for n in range(9)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@each_plan
def test_any_view_equals_its_contiguous_copy(backend, name, layout):
    tensors = [x.to(torch.bfloat16) for x in backend.qkv(lq=33, lkv=140, heads=2, batch=2)]
    views = [LAYOUTS[layout](x) for x in tensors]
    labels = backend.shuffled_labels(140, heads=2, batch=2)
    expected = backend.run(*(x.contiguous() for x in views), PLANS[name], labels)
    assert torch.equal(backend.run(*views, PLANS[name], labels), expected)


def _vast(device: str, elements: int, folder: Path) -> torch.Tensor:
    """Uninitialised fp16 memory of `elements`; on a CPU a sparse file, of which only the touched pages exist."""
    if device != "cpu":
        return torch.empty(elements, dtype=torch.float16, device=device)
    file = folder / "sparse.bin"
    with file.open("wb") as handle:
        handle.truncate(elements * 2)
    return torch.from_numpy(np.memmap(file, dtype=np.float16, mode="r+", shape=(elements,)))


@pytest.mark.parametrize("name", ["fast", "exact"])
def test_offsets_beyond_32_bits(backend, name, tmp_path):
    """A view whose largest element offset passes 2^31.

    Row stride 3 * 56 * 128 * 2 is that of a fused QKV, here scaled so that 160 tokens already pass 2^31. It stays a
    multiple of 8 elements: the kernels read such rows in place, others they have copied first.
    """
    lkv, dim = 160, backend.dim or 64
    stride = -(-(2**31 // (lkv - 8)) // 8) * 8
    elements = stride * (lkv - 1) + 2 * dim
    assert elements > 2**31
    big = _vast(backend.device, elements, tmp_path).as_strided((1, 2, lkv, dim), (0, dim, stride, 1))
    q, k, v = (x.half() for x in backend.qkv(lq=9, lkv=lkv, heads=2))
    for target, others in ((0, (k, v)), (1, (q, v)), (2, (q, k))):
        source = (q, k, v)[target]
        view = big[:, :, -source.shape[2] :]
        view.copy_(source)
        arguments = list(others)
        arguments.insert(target, view)
        out = backend.run(*arguments, PLANS[name])
        assert torch.equal(out, backend.run(q, k, v, PLANS[name]))
    assert relative(backend.run(q, k, big, PLANS[name]), exact(q, k, big)) < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_plan
def test_output_dtype_is_the_query_dtype(backend, name, dtype):
    q, k, v = (x.to(dtype) for x in backend.qkv())
    out = backend.run(q, k, v, PLANS[name])
    assert out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous()


def test_mixed_dtypes_are_refused_with_a_sentence(backend):
    q, k, v = backend.qkv()
    with pytest.raises(ValueError, match="share one dtype"):
        backend.run(q.half(), k, v, FAST)


@each_plan
def test_inputs_are_not_mutated(backend, name):
    tensors = [x.to(torch.bfloat16) for x in backend.qkv(lq=70, lkv=200, heads=2)]
    labels = backend.shuffled_labels(200, heads=2)
    before = [x.view(torch.int16).clone() for x in tensors], labels.clone()
    backend.run(*tensors, PLANS[name], labels)
    backend.group(tensors[2], 16)
    for x, old in zip(tensors, before[0], strict=True):
        assert torch.equal(x.view(torch.int16), old)
    assert torch.equal(labels, before[1])


@pytest.mark.parametrize("name", ["fast", "faithful", "four_bit", "exact"])
def test_custom_op_passes_opcheck(backend, name):
    """Schema, fake implementation and no mutation, as torch.compile relies on them."""
    q, k, v = (x.to(torch.bfloat16) for x in backend.qkv(lq=8, lkv=40, heads=2))
    labels = backend.shuffled_labels(40, heads=2)
    backend.require(PLANS[name], q)
    operator = torch.ops.vc_attention.attention.default
    for views in ((q, k, v), tuple(LAYOUTS["nhd"](x) for x in (q, k, v))):
        torch.library.opcheck(
            operator,
            (*views, labels, PLANS[name].encode(), 0.125, backend.name),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


@pytest.mark.parametrize("name", ["fast", "exact"])
def test_compiled_equals_eager_without_graph_breaks(backend, name):
    import torch._dynamo

    torch._dynamo.reset()
    q, k, v = backend.qkv(lq=8, lkv=40)
    backend.require(PLANS[name], q)

    def layer(q, k, v):
        return kernels.attention(q * 2, k, v, PLANS[name], backend=backend.name) + 1

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), layer(q, k, v))
