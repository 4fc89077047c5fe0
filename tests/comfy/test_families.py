"""Every family, every way of sampling: with groups on and quantisation off, the latent is the unpatched one."""

from __future__ import annotations

import comfy_cases
import pytest
from comfy_cases import run_case
from vc_attention.tools import tiny_models

pytestmark = pytest.mark.comfy

each_family = pytest.mark.parametrize("name", tiny_models.NAMES)

#: What `comfy.sample.sample` is told. Two prompt lengths make two model calls of one CFG step.
SAMPLING = {
    "euler": {},
    "cfg 1": {"cfg": 1.0},
    "heun": {"sampler": "heun"},
    "dpmpp_2s_ancestral": {"sampler": "dpmpp_2s_ancestral"},
    "res_multistep": {"sampler": "res_multistep", "scheduler": "karras"},
    "resume at a step": {"start_step": 3},
    "denoise 0.5": {"denoise": 0.5},
}


@each_family
@pytest.mark.parametrize("case", SAMPLING)
def test_sampling(tiny, name, case):
    opts = comfy_cases.options(name, group_fraction=0.85) if case == "denoise 0.5" else None
    run_case(tiny(name), name, opts, **SAMPLING[case]).check()


@each_family
def test_prompts_of_different_length(tiny, name):
    negative = tiny_models.conditioning(name, 33, 2)
    outcome = run_case(tiny(name), name, negative=negative)
    outcome.check()
    assert {len(one.uuids) for one in outcome.passes} == {1}
