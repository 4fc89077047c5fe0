"""Layers for the tests of the hook."""

from __future__ import annotations

import pytest
from node_fakes import self_attention


@pytest.fixture
def layers():
    return [self_attention(96, seed=i, block=("double", i)) for i in range(2)]
