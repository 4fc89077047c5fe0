"""Preparation and grouping kernels on an sm_90 GPU: the checks of `benchmarks/preparation_checks.py`."""

from __future__ import annotations

import pytest
import torch
from vc_attention.benchmarks import preparation_checks as checks
from vc_attention.kernels.launch.loader import load_library

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def library(gpu_kernels):
    return checks.must(load_library(gpu_kernels, torch.device("cuda")))


def test_images_are_the_references(library):
    assert checks.check(library)["failures"] == 0


def test_random_shapes(library):
    assert checks.check_random(library, 40) == 0


def test_grouping_is_the_specifications(library):
    assert checks.check_grouping(library)["ok"]


def test_graph_and_stream_give_the_same_bytes(library):
    assert checks.check_capture(library)


def test_offsets_beyond_32_bits(library):
    assert checks.check_layouts(library)


def test_whole_call_is_as_accurate_as_the_specification(library, gpu_kernels):
    assert checks.check_call(library, gpu_kernels)
