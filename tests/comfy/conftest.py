"""Tiny models for the tests in real ComfyUI: built once a session, loaded once each."""

from __future__ import annotations

import pytest
from vc_attention.tools import tiny_models


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """`tiny(name)` is the loaded (unpatched) tiny model of a family; a family this ComfyUI lacks skips the test."""
    directory = tmp_path_factory.mktemp("tiny")
    loaded = {}

    def get(name: str):
        if name not in tiny_models.available():
            pytest.skip(f"comfy: this ComfyUI has no model behind {name}")
        if name not in loaded:
            loaded[name] = tiny_models.load(name, directory)
        return loaded[name]

    return get
