"""What each step of a whole flow-matching schedule does, as the run itself decides it, one letter a step."""

from __future__ import annotations

from typing import Any

from node_fakes import FlowSampling
from vc_attention.nodes.options import PatchOptions
from vc_attention.nodes.schedule import Schedule


def letters(steps: int, **chosen: Any) -> str:
    """g group, r reuse, p plain, d 16 bit; `chosen` are fields of PatchOptions."""
    sampling = FlowSampling()
    plan = Schedule(sampling.simple(steps).tolist(), PatchOptions(**chosen), sampling.percent_to_sigma, 1.0)
    return "".join(plan.locate(sigma).phase[0] for sigma in plan.sigmas[:-1])
