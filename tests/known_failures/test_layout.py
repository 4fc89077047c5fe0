"""Strides, offsets beyond 32 bits, dtypes and mutation, at the library's own door."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import PLANS, each_plan, exact, qkv, relative, run, shuffled_labels
from vc_attention import kernels
from vc_attention.kernels import EXACT


def _offset(x: torch.Tensor, by: int) -> torch.Tensor:
    buffer = torch.full((x.numel() + by + 8,), float("nan"), dtype=x.dtype)
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
def test_any_view_equals_its_contiguous_copy(name, layout):
    tensors = [x.to(torch.bfloat16) for x in qkv(lq=33, lkv=140, heads=2, batch=2)]
    views = [LAYOUTS[layout](x) for x in tensors]
    labels = shuffled_labels(140, heads=2, batch=2)
    assert torch.equal(run(*views, name, labels), run(*(x.contiguous() for x in views), name, labels))


@pytest.mark.parametrize("name", ["fast", "exact"])
def test_offsets_beyond_32_bits(name, tmp_path):
    """A view whose largest element offset passes 2^31, in a sparse file: only the touched pages exist.

    Row stride 3 * 56 * 128 * 2 is that of a fused QKV, here scaled so that 160 tokens already pass 2^31.
    """
    lkv, dim = 160, 64
    stride = 2**31 // (lkv - 8)
    elements = stride * (lkv - 1) + 2 * dim
    assert elements > 2**31
    file = tmp_path / "sparse.bin"
    with file.open("wb") as handle:
        handle.truncate(elements * 2)
    store = torch.from_numpy(np.memmap(file, dtype=np.float16, mode="r+", shape=(elements,)))
    big = store.as_strided((1, 2, lkv, dim), (0, dim, stride, 1))
    q, k, v = (x.half() for x in qkv(lq=9, lkv=lkv, heads=2))
    for target, others in ((0, (k, v)), (1, (q, v)), (2, (q, k))):
        source = (q, k, v)[target]
        view = big[:, :, -source.shape[2] :]
        view.copy_(source)
        arguments = list(others)
        arguments.insert(target, view)
        out = run(*arguments, name)
        assert torch.equal(out, run(q, k, v, name))
    assert relative(run(q, k, big, name), exact(q, k, big)) < 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_plan
def test_output_dtype_is_the_query_dtype(name, dtype):
    q, k, v = (x.to(dtype) for x in qkv())
    out = run(q, k, v, name)
    assert out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous()


def test_mixed_dtypes_are_refused_with_a_sentence():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="share one dtype"):
        kernels.attention(q.half(), k, v, EXACT, backend="spec")


@each_plan
def test_inputs_are_not_mutated(name):
    tensors = [x.to(torch.bfloat16) for x in qkv(lq=70, lkv=200, heads=2)]
    labels = shuffled_labels(200, heads=2)
    before = [x.view(torch.int16).clone() for x in tensors], labels.clone()
    run(*tensors, name, labels)
    kernels.group(tensors[2], 16)
    for x, old in zip(tensors, before[0], strict=True):
        assert torch.equal(x.view(torch.int16), old)
    assert torch.equal(labels, before[1])


@pytest.mark.parametrize("name", ["fast", "faithful", "four_bit", "exact"])
def test_custom_op_passes_opcheck(name):
    """Schema, fake implementation and no mutation, as torch.compile relies on them."""
    q, k, v = (x.to(torch.bfloat16) for x in qkv(lq=8, lkv=40, heads=2))
    labels = shuffled_labels(40, heads=2)
    operator = torch.ops.vc_attention.attention.default
    for views in ((q, k, v), tuple(LAYOUTS["nhd"](x) for x in (q, k, v))):
        torch.library.opcheck(
            operator,
            (*views, labels, PLANS[name].encode(), 0.125, "spec"),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


@pytest.mark.parametrize("name", ["fast", "exact"])
def test_compiled_equals_eager_without_graph_breaks(name):
    import torch._dynamo

    torch._dynamo.reset()
    q, k, v = qkv(lq=8, lkv=40)

    def layer(q, k, v):
        return run(q * 2, k, v, name) + 1

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), layer(q, k, v))
