"""Whole calls against a stub driver with the real manifest: what reaches the driver is what the manifest states."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from stub_driver import Stream, StubDriver, machine
from vc_attention.kernels import FAITHFUL, FAST, Plan
from vc_attention.kernels.cute import layouts as lo
from vc_attention.kernels.launch import attend, call
from vc_attention.kernels.launch.loader import load_library

pytestmark = pytest.mark.xdist_group("cubins")
B, H, LQ, LKV = 2, 3, 300, 391


@pytest.fixture
def loaded(cubins, monkeypatch, tmp_path):
    """(stub, library): the real cubins, loaded into the stub; tensors stay on the CPU."""
    stub = machine(monkeypatch, tmp_path, StubDriver())
    library = load_library(cubins, torch.device("cuda", 0))
    assert library.load_all() is None
    assert len(stub.loaded) == len(library.manifest.kernels)
    # CPU tensors have no device number; the call must not look for their device.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return stub, library


def run(loaded, plan, dtype=torch.bfloat16, labels=None):
    """Queue one call; returns its launches by kernel name, and q, k, v."""
    stub, library = loaded
    q, k, v = (torch.zeros(B, H, n, 128, dtype=dtype) for n in (LQ, LKV, LKV))
    out = call.attention_on(library, q, k, v, plan, labels, 0.125)
    assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()
    # By its image: kernels that differ in a compile-time choice share a symbol.
    names = {entry.sha256: name for name, entry in library.manifest.kernels.items()}
    assert len(names) == len(library.manifest.kernels)
    return {names[launched.image]: launched for launched in stub.launched}, (q, k, v, out)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize(
    "plan", [FAST, FAST.without_smoothing(), Plan(key_means=True), FAITHFUL, FAITHFUL.without_smoothing()], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_launch_is_as_the_manifest_says(loaded, plan, dtype, labelled):
    labels = torch.zeros(B, H, LKV, dtype=torch.uint8) if labelled else None
    launches, (q, k, v, _) = run(loaded, plan, dtype, labels)
    stub, library = loaded
    assert attend.kernel_name(plan, dtype, "sm_90a") in launches and len(launches) == len(stub.launched)
    for name, launched in launches.items():
        entry = library.manifest.kernels[name]
        assert launched.block == entry.block and launched.shared == entry.shared
        assert launched.cluster == entry.cluster and launched.grid[0] % entry.cluster == 0
        assert launched.stream == 77
        assert [len(a) for a in launched.arguments] == [size for _, size in entry.params]
        assert min(launched.grid) >= 1 and launched.grid[2] == 1
    assert ("sort_order" in launches) == (labelled and plan.demean)
    for name, tensor in (("q_", q), ("k_sum_", k), ("v_stats_", v)):
        (found,) = [launched for key, launched in launches.items() if key.startswith(name)]
        assert struct.unpack("<Q", found.arguments[0])[0] == tensor.data_ptr()


def test_the_attention_launch_argument_by_argument(loaded):
    launches, (*_, out) = run(loaded, FAST)
    _, library = loaded
    name = attend.kernel_name(FAST, torch.bfloat16, "sm_90a")
    entry, launched = library.manifest.kernels[name], launches[name]
    tiles = -(-lo.query_tiles(LQ) // entry.cluster) * entry.cluster
    assert launched.grid == (tiles, B * H, 1)
    numbers = launched.arguments[-4:]
    assert [struct.unpack("<I", data)[0] for data in numbers[:3]] == [LQ, LKV, H]
    assert struct.unpack("<f", numbers[3])[0] == pytest.approx(0.125 * math.log2(math.e), rel=1e-6)
    pointers = [struct.unpack("<Q", data)[0] for data in launched.arguments[:10]]
    assert pointers[9] == out.data_ptr()
    assert pointers[7] == pointers[8] == 0  # without key means there is no bf16 Q and no key mean
    assert all(pointers[:7]) and len(set(pointers[:7])) == 7
    # The images that preparation wrote are the ones that attention reads.
    q_launch = next(x for key, x in launches.items() if key.startswith("q_"))
    assert struct.unpack("<Q", q_launch.arguments[1])[0] == pointers[0]


def test_one_stream_lookup_and_one_context_check_a_call(loaded, monkeypatch):
    stub, _ = loaded
    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=0: asked.append(device) or Stream(5))
    stub.asked.clear()
    launches, _ = run(loaded, FAST, labels=torch.zeros(B, H, LKV, dtype=torch.uint8))
    assert len(asked) == 1 and stub.asked.count("cuCtxGetCurrent") == 1
    assert set(stub.asked) == {"cuCtxGetCurrent", "cuLaunchKernelEx"}
    assert {launched.stream for launched in launches.values()} == {5}


def test_grouping_launches_are_as_the_manifest_says(loaded):
    from vc_attention.kernels.launch import prepare

    stub, library = loaded
    v = torch.zeros(B, H, LKV, 128, dtype=torch.bfloat16)
    found = prepare.group(library, v, 16)
    assert found[0].shape == (B, H, LKV) and found[1].shape == (B, H, 16, 128)
    entries = {entry.sha256: entry for entry in library.manifest.kernels.values()}
    assert len(stub.launched) > 6
    for launched in stub.launched:
        entry = entries[launched.image]
        assert launched.symbol == entry.symbol
        assert (launched.block, launched.shared, launched.cluster) == (entry.block, entry.shared, entry.cluster)
        assert [len(a) for a in launched.arguments] == [size for _, size in entry.params]
