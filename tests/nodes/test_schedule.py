"""Which step a forward pass is, and what is due in it, as tables written from the rule."""

from __future__ import annotations

import pytest
import torch
from node_fakes import FlowSampling
from vc_attention.nodes.options import PatchOptions
from vc_attention.nodes.schedule import DENSE, GROUP, PLAIN, REUSE, Schedule

LETTER = {GROUP: "G", REUSE: "r", PLAIN: ".", DENSE: "D"}


def schedule(sigmas, sampling=None, **chosen) -> Schedule:
    sampling = FlowSampling() if sampling is None else sampling
    return Schedule(
        list(map(float, sigmas)), PatchOptions(**chosen), sampling.percent_to_sigma, float(sampling.sigma_max)
    )


def phases(plan: Schedule) -> str:
    """One letter for each step of the sampler."""
    return "".join(LETTER[plan.locate(s).phase] for s in plan.sigmas[:-1])


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (1, "G"),
        (4, "G..."),
        (8, "Gr......"),
        (20, "GrrrG..............."),
        (40, "GrrrGrrrGr" + "." * 30),
        (50, "GrrrGrrrGrrrG" + "." * 37),
    ],
)
def test_full_schedule_first_quarter(steps, expected):
    """The paper's examples: n = 40 builds at 0, 4, 8; n = 50 at 0, 4, 8, 12; n = 8 at 0."""
    assert phases(schedule(FlowSampling().simple(steps))) == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"grouping": "off"}, "........"),
        ({"group_fraction": 0.0}, "........"),
        ({"grouping": "all steps"}, "GrrrGrrr"),
        ({"grouping": "all steps", "group_fraction": 0.0}, "GrrrGrrr"),
        ({"group_fraction": 1.0, "reuse_steps": 1}, "GGGGGGGG"),
        ({"group_fraction": 0.51, "reuse_steps": 2}, "GrGrG..."),
        ({"group_fraction": 0.5, "reuse_steps": 3}, "GrrG...."),
    ],
)
def test_widgets(chosen, expected):
    assert phases(schedule(FlowSampling().simple(8), **chosen)) == expected


def test_two_samplers_see_their_own_slice():
    """Wan2.2 high and low noise: 4 steps in all; only the first lies strictly above percent_to_sigma(0.25) = 0.96."""
    high, low = schedule([1.0, 0.96, 0.8889]), schedule([0.8889, 0.7273, 0.0])
    assert not high.full and not low.full
    assert (phases(high), phases(low)) == ("G.", "..")


@pytest.mark.parametrize("steps", [4, 8, 20, 40, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_split_and_full_agree_on_the_steps(steps, shift, cut):
    """The same steps are in the window, however a run is divided between two samplers."""
    sampling = FlowSampling(shift)
    sigmas = sampling.simple(steps)
    whole = schedule(sigmas, sampling, reuse_steps=64)
    parts = [schedule(part, sampling, reuse_steps=64) for part in (sigmas[: cut + 1], sigmas[cut:])]
    split = [plan.locate(s).grouping for plan in parts for s in plan.sigmas[:-1]]
    assert split == [whole.locate(s).grouping for s in whole.sigmas[:-1]]


def test_denoise_half_starts_below_the_window():
    sigmas = FlowSampling().simple(16)[8:]
    assert phases(schedule(sigmas)) == "........"
    assert phases(schedule(sigmas, group_fraction=0.6)) == "Gr......"


def test_a_model_sampling_node_moves_the_window():
    """The threshold is the running model's: with a smaller shift, the same noise level is later in the denoising."""
    slice_ = [0.97, 0.93, 0.9, 0.8]
    assert phases(schedule(slice_, FlowSampling(8.0))) == "G.."
    assert phases(schedule(slice_, FlowSampling(3.0))) == "Gr."  # percent_to_sigma(0.25) = 0.9, strictly


def test_evaluations_between_entries_belong_to_the_step_above():
    plan = schedule(FlowSampling().simple(8), group_fraction=0.5, reuse_steps=2)
    sigmas = plan.sigmas
    for step in range(8):
        middle = (sigmas[step] + sigmas[step + 1]) / 2
        assert plan.locate(middle).step == step
        assert plan.locate(middle).phase == plan.locate(sigmas[step]).phase
    assert plan.locate(sigmas[3] * (1 + 1e-7)).step == 3  # fp32 noise around an entry
    assert plan.locate(sigmas[3] * (1 - 1e-7)).step == 3
    assert plan.locate(sigmas[0] * 1.4).step == 0  # churn goes above the first entry
    assert plan.locate(0.0).step == 7


def test_second_evaluation_of_a_step_reuses():
    """Heun evaluates step 2 once as the end of step 1: one grouping serves both."""
    plan = schedule(FlowSampling().simple(8), group_fraction=0.5, reuse_steps=2)
    positions = [plan.locate(plan.sigmas[i]) for i in (0, 1, 1, 2, 2, 3)]
    assert [p.period for p in positions] == [0, 0, 0, 1, 1, 1]


def test_centroids_are_wanted_only_while_a_rebuild_follows():
    plan = schedule(FlowSampling().simple(20))  # window 5 steps: builds at 0 and 4
    assert [plan.locate(plan.sigmas[i]).last for i in range(5)] == [False, False, False, False, True]
    assert schedule(FlowSampling().simple(8)).locate(1.0).last


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0.0, 1.0, "GGGG...."), (0.25, 1.0, "DDGG...."), (0.0, 0.5, "GGGG.DDD"), (0.5, 0.5, "DDDD.DDD")],
)
def test_start_and_end_percent(start, end, expected):
    plan = schedule(FlowSampling().simple(8), start_percent=start, end_percent=end, group_fraction=0.5, reuse_steps=1)
    assert phases(plan) == expected


def test_rising_schedule_of_an_inversion():
    sigmas = FlowSampling().simple(8).flip(0)
    plan = schedule(sigmas, reuse_steps=2)
    assert plan.rising and not plan.full
    assert [plan.locate(float(s)).step for s in sigmas[:-1]] == list(range(8))
    assert [plan.locate(float(s)).grouping for s in sigmas[:-1]] == [False] * 7 + [True]


def test_without_a_sampling_object_steps_are_counted():
    assert phases(Schedule([0.5, 0.4, 0.3, 0.2, 0.1], PatchOptions(start_percent=0.5))) == "G..."


def test_percent_to_sigma_may_be_a_tensor():
    class Tensors(FlowSampling):
        def percent_to_sigma(self, percent):
            return torch.tensor(super().percent_to_sigma(percent))

    plan = schedule([0.97, 0.9, 0.0], Tensors())
    assert isinstance(plan.cut, float) and phases(plan) == "G."


@pytest.mark.parametrize("sigmas", [[], [1.0], [1.0, 1.0, 0.0]])
def test_odd_schedules_do_not_raise(sigmas):
    assert schedule(sigmas).locate(0.7).phase in LETTER


def test_strictly_above_in_spite_of_rounding():
    """percent_to_sigma(0.25) = 0.96 at shift 8: an fp32 step a rounding error above it is that step, not one before."""
    assert phases(schedule([1.0, 0.96 * (1 + 3e-7), 0.8889])) == "G."
