"""The checks of the stress run: a right backend passes them, and a slightly wrong one does not."""

from __future__ import annotations

import pytest
import torch
from vc_attention.benchmarks import stress_checks as checks


def stress(attention, seeds=range(30), **options):
    run = checks.Stress(attention, "cpu", **options)
    cases = (checks.make_case(seed, longest=120) for seed in seeds)
    run.run((case for case in cases if case.rows * case.lkv < 20_000), batch=8)
    return run


def test_the_specification_passes_against_itself():
    run = stress(checks.spec_call, every=3)
    assert run.done > 15 and run.failures == []
    compared = [tally for tally in run.tallies.values() if tally.rows]
    assert len(compared) > 3 and all(tally.pooled == pytest.approx(1.0) for tally in compared)


def without_the_last_key(q, k, v, plan, labels, scale):
    keep = slice(0, max(1, k.shape[2] - 1))
    return checks.spec_call(q, k[:, :, keep], v[:, :, keep], plan, None if labels is None else labels[..., keep], scale)


def without_the_scale(q, k, v, plan, labels, scale):
    return checks.spec_call(q, k, v, plan, labels, None)


def a_third_more_error(q, k, v, plan, labels, scale):
    true = checks.exact(q, k, v, scale)[1]
    out = checks.spec_call(q, k, v, plan, labels, scale)
    return (true + 1.33 * (out.double() - true)).to(q.dtype)


def one_row_not_written(q, k, v, plan, labels, scale):
    out = checks.spec_call(q, k, v, plan, labels, scale)
    out[:, :, -1] = torch.nan
    return out


@pytest.mark.parametrize("wrong", [without_the_last_key, without_the_scale, one_row_not_written])
def test_a_wrong_backend_fails(wrong):
    failures = stress(wrong).failures
    assert len(failures) > 8 and all(failure.startswith("seed ") for failure in failures)


def test_a_third_more_error_fails_in_the_pool():
    tallies = stress(a_third_more_error, seeds=range(60), every=1).tallies.values()
    assert sum(not tally.within for tally in tallies) >= 3


def test_a_refusal_is_a_failure_that_names_the_case():
    def refused(q, k, v, plan, labels, scale):
        raise ValueError("no")

    run = stress(refused, seeds=range(3))
    assert run.done == len(run.failures) and run.failures[0].endswith("refused: no")


def test_a_case_is_its_seed():
    assert checks.make_case(5) == checks.make_case(5) != checks.make_case(6)
    first, again = (checks.make_tensors(checks.make_case(5, 100), "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3], strict=True))


def test_layouts_keep_the_values():
    x = torch.randn(2, 3, 5, 128)
    views = {layout: checks._in_layout(x, layout, 1) for layout in checks.LAYOUTS}
    assert all(torch.equal(view, x) for view in views.values())
    assert len({(view.stride(), view.storage_offset()) for view in views.values()}) == len(views)
