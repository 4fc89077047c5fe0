"""The measures on a GPU: the CPU's numbers, and no wait for the device."""

from __future__ import annotations

import pytest
import torch
from vc_attention.kernels import guard as bound
from vc_attention.kernels import measures, sampled_sums


def call(lq: int = 1000, lkv: int = 3000, heads: int = 12):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, heads, n, 128, generator=generator).bfloat16() for n in (lq, lkv, lkv))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return q, k, v, out + 0.01 * torch.randn(out.shape, generator=generator).to(out.dtype)


def test_strides_change_nothing():
    tensors = call()
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    assert torch.equal(sampled_sums(*tensors, turn=1), sampled_sums(*strided, turn=1))


@pytest.mark.gpu
def test_on_a_gpu_the_numbers_are_the_same_and_nothing_synchronises():
    tensors = call()
    wanted = measures(sampled_sums(*tensors, turn=1).tolist())
    on_gpu = [t.transpose(1, 2).contiguous().cuda().transpose(1, 2) for t in tensors]
    sampled_sums(*on_gpu, turn=1)  # the first call loads libraries
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = sampled_sums(*on_gpu, turn=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 1.1 * bound.TEMPORARY_BYTES + (4 << 20)
    got = measures(found.tolist())
    assert got["relative_l2"] == pytest.approx(wanted["relative_l2"], rel=1e-4)
    assert got["psnr_db"] == pytest.approx(wanted["psnr_db"], abs=1e-3)
