"""Kept groups: keys, budget, free memory, devices, threads."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from vc_attention.kernels import Labels
from vc_attention.nodes.state import RESERVE_BYTES, GroupState, Key

CPU = torch.device("cpu")
KEY = Key("double", 0, 0, "a", None, 64, 64, 2, CPU)
SHAPE = (1, 2, 64)


def grouping(length: int = 64, groups: int = 4, fill: int = 0) -> Labels:
    return Labels(torch.full((1, 2, length), fill, dtype=torch.uint8), torch.randn(1, 2, groups, 64))


def state(budget: int = 1 << 20, free: int | None = None) -> GroupState:
    return GroupState(budget, lambda device: free)


LABELS = 2 * 64
CENTROIDS = 2 * 4 * 64 * 2  # bf16


def test_labels_are_bytes_and_centroids_bf16():
    s = state()
    assert s.keep(KEY, 0, grouping(), centroids=True)
    entry = s.get(KEY, SHAPE)
    assert entry.labels.dtype == torch.uint8 and entry.centroids.dtype == torch.bfloat16
    assert s.nbytes() == s.nbytes(CPU) == entry.nbytes == LABELS + CENTROIDS
    start = entry.warm_start()
    assert start.centroids.dtype == torch.float32 and start.labels is entry.labels


def test_without_a_rebuild_ahead_only_labels_are_kept():
    s = state()
    s.keep(KEY, 0, grouping(), centroids=False)
    assert s.nbytes() == LABELS and s.get(KEY, SHAPE).warm_start() is None


@pytest.mark.parametrize(
    "change",
    [
        {"block_type": "single"},
        {"block_index": 1},
        {"ordinal": 1},
        {"branch": "b"},
        {"scope": ((0, 1, 2), None)},
        {"lq": 65},
        {"lkv": 65},
        {"heads": 3},
        {"device": torch.device("cuda", 1)},
    ],
)
def test_every_part_of_the_key_separates(change):
    s = state()
    s.keep(KEY, 0, grouping(), centroids=True)
    assert s.get(replace(KEY, **change), SHAPE) is None
    assert s.get(KEY, SHAPE) is not None


def test_labels_of_another_shape_are_no_hit():
    s = state()
    s.keep(KEY, 0, grouping(), centroids=True)
    assert s.get(KEY, (2, 2, 64)) is None


def test_replacing_an_entry_counts_it_once():
    s = state(budget=LABELS + CENTROIDS)
    for period in range(3):
        assert s.keep(KEY, period, grouping(fill=period), centroids=True)
        assert s.get(KEY, SHAPE).period == period
        assert s.nbytes() == LABELS + CENTROIDS and len(s) == 1


def test_budget_refuses_and_never_holds_more():
    s = state(budget=2 * LABELS + 10)
    keys = [replace(KEY, block_index=i) for i in range(4)]
    assert [s.keep(k, 0, grouping(), centroids=False) for k in keys] == [True, True, False, False]
    assert s.nbytes() == 2 * LABELS
    assert s.get(keys[0], SHAPE) is not None and s.get(keys[2], SHAPE) is None


def test_budget_is_for_each_device():
    s = state(budget=LABELS)
    other = replace(KEY, device=torch.device("meta"))
    assert s.keep(KEY, 0, grouping(), centroids=False) and s.keep(other, 0, grouping(), centroids=False)
    s.clear(CPU)
    assert s.nbytes(CPU) == 0 and s.nbytes(torch.device("meta")) == LABELS and len(s) == 1


def test_a_refused_rebuild_drops_the_stale_grouping():
    s = state(budget=LABELS + 10)
    s.keep(KEY, 0, grouping(), centroids=False)
    assert not s.keep(KEY, 1, grouping(), centroids=True)
    assert s.get(KEY, SHAPE) is None and s.nbytes() == 0


@pytest.mark.parametrize(
    ("free", "kept"), [(None, True), (RESERVE_BYTES + LABELS, True), (RESERVE_BYTES, False), (0, False)]
)
def test_free_memory_is_asked_before_keeping(free, kept):
    asked = []
    s = GroupState(1 << 20, lambda device: asked.append(device) or free)
    assert s.keep(KEY, 0, grouping(), centroids=False) is kept
    assert asked == [CPU] and s.nbytes() == (LABELS if kept else 0)


def test_zero_budget_keeps_nothing():
    assert not state(budget=0).keep(KEY, 0, grouping(), centroids=False)


def test_clear_forgets_everything():
    s = state()
    s.keep(KEY, 0, grouping(), centroids=True)
    s.clear()
    assert len(s) == 0 and s.nbytes() == 0 and s.get(KEY, SHAPE) is None


def test_threads_of_several_devices():
    s = state(budget=1 << 30)
    devices = [torch.device("cuda", i) for i in range(4)]
    problems = []

    def work(device):
        try:
            for i in range(200):
                key = replace(KEY, device=device, block_index=i % 7)
                s.keep(key, i, grouping(), centroids=bool(i % 2))
                s.get(key, SHAPE)
                if i % 50 == 49:
                    s.clear(device)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in devices]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems and len(s) == 0 and s.nbytes() == 0
