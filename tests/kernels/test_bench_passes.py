"""What the benchmark counts as the bytes of each preparation and grouping pass, and which passes it lists."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vc_attention.benchmarks.bench import passes
from vc_attention.benchmarks.bench.shapes import tensors
from vc_attention.kernels import Reason, UnsupportedError, auto_groups
from vc_attention.kernels.launch import prepare as prep
from vc_attention.kernels.timing import Series


class Nothing:
    """Kernels that run nothing."""

    manifest = SimpleNamespace(arch="sm_90a")

    def kernel(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(launch=lambda grid, arguments, stream: None)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Nothing:
    monkeypatch.setattr(prep.Queue, "current", classmethod(lambda cls, library: cls(library, 0)))
    return Nothing()


def closed_forms(length: int) -> dict[str, int]:
    """Bytes a head of each pass, from the shapes in `kernels/cute/layouts.py` and the docstrings of the kernels."""

    def up(a: int, b: int) -> int:
        return -(-a // b)

    rows, order, blocks = 256 * length, 4 * length, up(length, 128)
    tiles, chunks, sums = up(length, 256), 1024 * up(length, 4096), 512 * up(length, 1024)
    mean_tiles = up(tiles, 4)
    q = rows + up(length, 128) * (128 * 128 + 128 * 4)
    k = rows + 2 * 128 * 4 + tiles * (256 * 128 + 2 * 4)
    v = rows + 512 + tiles * 2 * 136 * 128 + 128 * 4
    groups, sample = auto_groups(length), 4096
    table = 256 * 128 * 2 + 256 * 4
    return {
        "q_bf16": q,
        "q_bf16_means": q + up(length, 128) * 128 * 256,
        "k_sum_bf16": rows + sums,
        "k_mean": sums + 1024,
        "k_bf16": k,
        "k_bf16_gather": k + order,
        "k_bf16_gather_means": k + order + mean_tiles * 2 * 8 * 64 * 2,
        "v_stats_bf16": rows + 512,
        "v_stats_bf16_means": rows + 512 + blocks * 512,
        "v_stats_bf16_gather_means": rows + 512 + blocks * 512 + order,
        "v_bf16": v,
        "v_bf16_means": v + blocks * 512 + mean_tiles * 128 * 16 * 2,
        "v_bf16_gather_means": v + blocks * 512 + mean_tiles * 128 * 16 * 2 + order,
        "sort_count": length + chunks,
        "sort_order": length + chunks + order,
        "group_seed_bf16": groups * 256 + 256 * 512 + table,
        "group_assign_bf16": length * 257 + table,
        "group_assign_bf16 sampled": sample * 257 + table,
        "group_update_bf16": sample * 257 + 256 * 512 + table,
        "group_place_bf16": groups * 512 + 256 * 512 + table,
        "group_place_bf16_ranked": 2 * 256 * 512 + 1024 + table,
        "group_pairs_bf16": table + 256 * 256 * 4,
        "group_chain": 256 * 256 * 4 + 1024,
    }


@pytest.mark.parametrize(("length", "heads"), [(75_600, 40), (32_760, 40), (111_600, 16), (65_537, 3)])
def test_the_bytes_of_every_pass_are_those_of_its_closed_form(length: int, heads: int, library: Nothing) -> None:
    """At full size, on tensors without memory: what `prepare` really gives to each launch, against formulas."""
    q, k, v = (torch.empty(1, length, heads, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in "qkv")
    forms, seen = closed_forms(length), set()
    for call in passes.calls_of(library, q, k, v).values():
        launches = passes.recorded(call)
        full = max((i for i, (name, _, _) in enumerate(launches) if name == "group_assign_bf16"), default=None)
        for number, (name, arguments, _) in enumerate(launches):
            key = name + " sampled" * (name == "group_assign_bf16" and number != full)
            assert passes.launch_bytes(name, arguments) == heads * forms[key], key
            seen.add(key)
    assert seen == set(forms)


def test_the_passes_of_b300_are_those_of_fp8_scores_with_key_means(library: Nothing, monkeypatch) -> None:
    """As many bytes as for INT8 scores, under names of their own; no call is measured twice."""
    monkeypatch.setattr(library, "manifest", SimpleNamespace(arch="sm_103a"), raising=False)
    q, k, v = (torch.empty(1, 2, 32_760, 128, dtype=torch.bfloat16, device="meta") for _ in "qkv")
    calls, forms = passes.calls_of(library, q, k, v), closed_forms(32_760)
    assert not [title for title in calls if "key means" in title]
    forms["k_bf16_means"] = forms["k_bf16_gather_means"] - 4 * 32_760  # the token order
    names = set()
    for title, call in calls.items():
        for name, arguments, _ in passes.recorded(call) if title.startswith("preparation") else ():
            assert passes.launch_bytes(name, arguments) == 2 * forms[name.replace("_fp8", "")], name
            names.add(name)
    assert {name for name in names if name.startswith(("q", "k_fp8", "k_bf16"))} == {
        *("q_fp8_bf16", "q_fp8_bf16_means", "k_fp8_bf16", "k_fp8_bf16_means", "k_fp8_bf16_gather_means"),
    }


def test_the_passes_over_the_operands_add_up_to_the_bytes_of_the_notes(library: Nothing) -> None:
    """Wan 720p: 0.77 GB an operand in 16 bit; Q once and K and V twice make the 5 GB that `NOTES.md` counts."""
    q, k, v = (torch.empty(1, 40, 75_600, 128, dtype=torch.bfloat16, device="meta") for _ in "qkv")
    calls = passes.calls_of(library, q, k, v)
    plain = passes.recorded(calls["preparation without means"])
    assert sum(passes.launch_bytes(name, arguments) for name, arguments, _ in plain) == pytest.approx(5.06e9, rel=0.01)


def test_a_token_order_that_a_pass_ignores_is_not_counted() -> None:
    v, order = torch.empty(1, 2, 300, 128, dtype=torch.bfloat16), torch.empty(1, 2, 300, dtype=torch.int32)
    amax = torch.empty(2, 128)
    with_order = passes.launch_bytes("v_stats_bf16", (v, order, None, amax, 1, 2, 3))
    assert with_order == passes.launch_bytes("v_stats_bf16", (v, None, None, amax, 1, 2, 3)) == v.nbytes + amax.nbytes


def test_passes_are_listed_once_with_their_counts_and_the_whole_call_first(library: Nothing) -> None:
    q, k, v = tensors(600, 2, "cpu")
    card = SimpleNamespace(series=lambda call, count: (call(), Series([0.25] * count))[1])
    copied, found = passes.measure(library, q, k, v, card, 2)
    assert (copied.bytes, copied.ms) == (2 * q.nbytes, 0.25) and copied.rate == pytest.approx(2 * q.nbytes / 0.25e6)
    assert len({(one.of, one.name, one.bytes) for one in found}) == len(found)
    wholes = [one.of for one in found if one.name == passes.ALL]
    assert wholes == list(passes.calls_of(library, q, k, v))
    reuse = [one for one in found if one.of == "preparation, reuse step"]
    assert [one.name for one in reuse] == [
        "all", "sort_count", "sort_order", "q_bf16", "k_sum_bf16", "k_mean", "k_bf16_gather",
        "v_stats_bf16_gather_means", "v_bf16_gather_means",
    ]  # fmt: skip
    assert reuse[0].bytes == sum(one.launches * one.bytes for one in reuse[1:])
    cold = {one.name: one.launches for one in found if one.of == "grouping, cold"}
    assert cold["group_update_bf16"] == 2 and cold["group_chain"] == 1
    assert prep.Queue.__call__.__qualname__ == "Queue.__call__"


def test_a_refused_pass_is_an_error_with_its_reason() -> None:
    with pytest.raises(UnsupportedError, match="no such kernel"):
        passes.recorded(lambda: Reason("no_kernel", "no such kernel"))
