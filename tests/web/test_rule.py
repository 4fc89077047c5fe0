"""The rule in the browser (web/vc_attention/schedule.js) against the rule of the run (nodes/schedule.py)."""

from __future__ import annotations

import itertools

import pytest
from node_fakes import FlowSampling
from vc_attention.nodes.options import PatchOptions
from vc_attention.nodes.schedule import Schedule

STEPS = (1, 2, 3, 4, 6, 8, 10, 20, 25, 50)
FRACTIONS = (0.0, 0.05, 0.25, 0.3, 0.5, 0.75, 1.0)
REUSE = (1, 2, 3, 4, 64)
WINDOWS = ((0.0, 1.0), (0.1, 1.0), (0.0, 0.8), (0.25, 0.5), (0.3, 0.3))
FIELDS = ("grouping", "group_fraction", "reuse_steps", "start_percent", "end_percent")

PHASES = """
return data.map(({ sigmas, options, shift }) => m.phasesOf(sigmas, options, (p) => {
    if (p <= 0) return 1;
    if (p >= 1) return 0;
    const t = 1 - p;
    return (shift * t) / (1 + (shift - 1) * t);
}, 1));
"""
EXPECTED = "return data.map(({ sampler, options }) => m.expected(m.noiseLevels(sampler.steps, sampler), options));"


def phases(sigmas, chosen, sampling) -> list[str]:
    """What the run does."""
    plan = Schedule(sigmas, PatchOptions(**chosen), sampling.percent_to_sigma, float(sampling.sigma_max))
    return [plan.locate(sigma).phase for sigma in plan.sigmas[:-1]]


def grid():
    """Widget values, as keywords of PatchOptions."""
    for grouping, fraction, reuse, (start, end) in itertools.product(
        ("first steps", "all steps", "off"), FRACTIONS, REUSE, WINDOWS
    ):
        if grouping == "first steps" or fraction == FRACTIONS[0]:
            yield dict(zip(FIELDS, (grouping, fraction, reuse, start, end), strict=True))


def test_the_rule_is_the_same_on_any_schedule(javascript):
    """Whole schedules, both parts of one cut in two, and rising ones, with the sigmas that the run would have."""
    cases, wanted = [], []
    for steps, shift, chosen in itertools.product(STEPS, (1.0, 8.0), grid()):
        sampling = FlowSampling(shift)
        whole = sampling.simple(steps).tolist()
        half = steps // 2
        for sigmas in (whole, whole[: half + 1], whole[half:], whole[::-1]):
            cases.append({"sigmas": sigmas, "options": chosen, "shift": shift})
            wanted.append(phases(sigmas, chosen, sampling))
    got = javascript("schedule.js", PHASES, cases)
    assert len(got) == len(wanted) > 10_000
    wrong = [(case, g, w) for case, g, w in zip(cases, got, wanted, strict=True) if g != w]
    assert wrong == []


def test_what_is_expected_is_what_a_flow_model_does(javascript):
    """The timeline knows steps, not sigmas: with the scheduler "simple" it says what the run then does."""
    cases, wanted = [], []
    sampling = FlowSampling(8.0)
    for steps, chosen in itertools.product(STEPS, grid()):
        whole = sampling.simple(steps).tolist()
        half = steps // 2
        parts = {None: whole, "high": whole[: half + 1], "low": whole[half:]}
        for part, sigmas in parts.items():
            sampler = {"steps": steps}
            sampler |= {"high": {"start": 0, "end": half}, "low": {"start": half, "end": 10_000}}.get(part, {})
            cases.append({"sampler": sampler, "options": {"precision": "auto", **chosen}})
            wanted.append(phases(sigmas, chosen, sampling))
    got = javascript("schedule.js", EXPECTED, cases)
    assert len(got) == len(wanted) > 3_000
    wrong = [(case, g, w) for case, g, w in zip(cases, got, wanted, strict=True) if g != w]
    assert wrong == []


@pytest.mark.parametrize(("steps", "fraction"), [(100, 0.07), (25, 0.28), (50, 0.14)])
def test_a_share_that_is_whole_steps_but_for_rounding(javascript, steps, fraction):
    """0.07 * 100 is a little more than 7 in double precision, and means 7 steps."""
    chosen = dict(zip(FIELDS, ("first steps", fraction, 1, 0.0, 1.0), strict=True))
    cases = [{"sampler": {"steps": steps}, "options": {"precision": "auto", **chosen}}]
    (got,) = javascript("schedule.js", EXPECTED, cases)
    assert got.count("group") == round(steps * fraction)
    assert got == phases(FlowSampling().simple(steps).tolist(), chosen, FlowSampling())


@pytest.mark.parametrize(
    ("sampler", "noise"),
    [
        ({"steps": 4}, [1, 0.75, 0.5, 0.25, 0]),
        ({"steps": 2, "denoise": 0.5}, [0.5, 0.25, 0]),
        ({"steps": 3, "denoise": 0.0}, []),
        ({"steps": 4, "start": 2}, [0.5, 0.25, 0]),
        ({"steps": 4, "end": 2}, [1, 0.75, 0.5]),
        ({"steps": 4, "end": 2, "full": True}, [1, 0.75, 0]),
        ({"steps": 4, "start": 4}, []),
        ({"steps": 4, "start": 1, "end": 3}, [0.75, 0.5, 0.25]),
        ({"steps": 0}, []),
    ],
)
def test_noise_levels_of_samplers(javascript, sampler, noise):
    assert javascript("schedule.js", "return m.noiseLevels(data.steps, data);", sampler) == noise


def test_precision_off_is_16_bit(javascript):
    options = {"precision": "off", "grouping": "all steps", "group_fraction": 1, "reuse_steps": 1}
    options |= {"start_percent": 0, "end_percent": 1}
    (got,) = javascript("schedule.js", EXPECTED, [{"sampler": {"steps": 3}, "options": options}])
    assert got == ["dense"] * 3


def test_contrast_is_that_of_the_guidelines(javascript):
    """WCAG's own examples: black on white 21, and #777777 on white 4.48, just below AA."""
    code = "return data.map(([a, b]) => m.contrast(a, b));"
    black, white, grey = [0, 0, 0], [255, 255, 255], [0x77] * 3
    got = javascript("theme.js", code, [[black, white], [grey, white], [white, white]])
    assert got == pytest.approx([21, 4.48, 1], abs=0.005)
