"""The numeric self-test, tested: it passes on the specification and names every planted fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vc_attention.kernels import FAST, Plan
from vc_attention.kernels.launch import selftest
from vc_attention.kernels.spec import values as spec_values
from vc_attention.kernels.spec.attention import attention as spec

CASES = selftest.cases(lambda plan, dtype: True)
FAST_BF16 = next(case for case in CASES if case.plan == FAST and case.dtype == torch.bfloat16)
FP8_BF16 = next(c for c in CASES if c.plan == replace(FAST, scores="fp8") and c.dtype == torch.bfloat16)
PLAIN_FP16 = next(c for c in CASES if c.plan == FAST.without_smoothing() and c.dtype == torch.float16)


def test_every_family_in_both_types_is_a_case():
    assert len(CASES) == 30 and len({(case.plan, case.dtype) for case in CASES}) == 30
    assert {case.dtype for case in CASES} == {torch.bfloat16, torch.float16}
    only = selftest.cases(lambda plan, dtype: plan == FAST and dtype == torch.float16)
    assert [str(case) for case in only] == ["fast in float16"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_specification_passes(case):
    assert selftest.problem(spec, [case], "cpu") is None


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_stated_errors_are_those_of_the_specification(case):
    """Half of the stated error is refused: the bound is as tight as it says."""
    strict = selftest.Case(case.name, case.plan, case.dtype, case.error / selftest.ERROR_MARGIN * 0.97)
    assert "random case" in selftest.problem(spec, [strict], "cpu")


def padded(q, k, v, plan, labels, scale):
    """Missing keys of the last tile keep their weight, as without a mask or a zero row sum."""
    missing = -k.shape[-2] % 128
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (k, v))
    labels = None if labels is None else torch.nn.functional.pad(labels, (0, missing))
    return spec(q, k, v, plan, labels, scale)


def last_key_lost(q, k, v, plan, labels, scale):
    keep = max(1, k.shape[-2] - 1)
    return spec(q, k[..., :keep, :], v[..., :keep, :], plan, None if labels is None else labels[..., :keep], scale)


def scale_off(q, k, v, plan, labels, scale):
    return spec(q, k, v, plan, labels, 1.01 * (q.shape[-1] ** -0.5 if scale is None else scale))


def output_scale_off(q, k, v, plan, labels, scale):
    return spec(q, k, v, plan, labels, scale) * 1.02


def heads_swapped(q, k, v, plan, labels, scale):
    return spec(q, k, v, plan, labels, scale).flip(1)


def batches_swapped(q, k, v, plan, labels, scale):
    return spec(q, k, v, plan, labels, scale).flip(0)


def rows_rolled(q, k, v, plan, labels, scale):
    return spec(q, k, v, plan, labels, scale).roll(1, 2)


def channels_swapped(q, k, v, plan, labels, scale):
    return spec(q, k, v, plan, labels, scale).flip(-1)


def not_a_number_in_the_last_row(q, k, v, plan, labels, scale):
    out = spec(q, k, v, plan, labels, scale).clone()
    out[:, :, -1, 5] = torch.nan
    return out


def infinity_once(q, k, v, plan, labels, scale):
    out = spec(q, k, v, plan, labels, scale).clone()
    out[-1, -1, 0, 0] = torch.inf
    return out


def only_keys_permuted(q, k, v, plan, labels, scale):
    if labels is not None:
        order = torch.argsort(labels, dim=-1, stable=True)[..., None].expand_as(k)
        return spec(q, k.gather(-2, order), v, plan, None, scale)
    return spec(q, k, v, plan, labels, scale)


def last_query_tile_missing(q, k, v, plan, labels, scale):
    out = spec(q, k, v, plan, labels, scale).clone()
    out[:, :, q.shape[2] // 128 * 128 :] = 0
    return out


FAULTS = {
    padded: "uniform attention over 1 tokens",
    last_key_lost: "uniform attention over 65 tokens",
    scale_off: "probabilit",
    output_scale_off: "uniform attention",
    heads_swapped: "uniform attention",
    batches_swapped: "random case",
    rows_rolled: "probabilit",
    channels_swapped: "uniform attention",
    not_a_number_in_the_last_row: "not finite",
    infinity_once: "not finite",
    only_keys_permuted: "random case",
    last_query_tile_missing: "uniform attention",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_planted_faults_are_named(fault):
    found = selftest.problem(fault, [FAST_BF16], "cpu")
    assert found is not None and found.startswith("fast in bfloat16: ") and FAULTS[fault] in found


@pytest.mark.parametrize("fault", [f for f in FAULTS if f is not only_keys_permuted], ids=lambda f: f.__name__)
def test_planted_faults_are_seen_without_smoothing_too(fault):
    assert selftest.problem(fault, [PLAIN_FP16], "cpu") is not None


def expcast_with(form: str, slope: float = 8.0, beta: float = -0.35, top: int = 126):
    """ExpCast with other constants, for the check of golden codes alone."""
    from vc_attention.kernels.spec.expcast import TOP_LOG2
    from vc_attention.kernels.spec.formats import e4m3_decode

    def expcast(u, form=form):
        y = slope * u + 8 * (TOP_LOG2[form] + 7) + beta
        return e4m3_decode(torch.round(torch.nan_to_num(y, neginf=0.0)).clamp(0, top).to(torch.uint8))

    return expcast


@pytest.mark.parametrize(
    "changes",
    [{"slope": 7.96}, {"slope": 8.04}, {"beta": 0.0}, {"beta": -0.6}, {"top": 125}],
    ids=str,
)
@pytest.mark.parametrize("case", [FAST_BF16, PLAIN_FP16, FP8_BF16], ids=str)
def test_another_expcast_fails_the_golden_codes(monkeypatch, changes, case):
    # `selftest` has its own reference to the true function, so only the tested one changes.
    monkeypatch.setattr(spec_values, "expcast", expcast_with("expcast_wide", **changes))
    found = selftest._golden(spec, case, torch.device("cpu"))
    assert found is not None and "probabilit" in found


def test_the_unchanged_expcast_passes_through_the_same_seam(monkeypatch):
    monkeypatch.setattr(spec_values, "expcast", expcast_with("expcast_wide"))
    for case in (FAST_BF16, FP8_BF16):
        assert selftest._golden(spec, case, torch.device("cpu")) is None


@pytest.mark.parametrize("dtype", selftest.DTYPES)
@pytest.mark.parametrize("scores", ["int8", "fp8"])
def test_golden_scores_are_exact(scores, dtype):
    """Q and K of the golden case have codes that stand for exactly what they are, so every score is known."""
    from vc_attention.kernels.spec.scores import hadamard, quantise_scores_operand, smooth_keys

    (q, k, _), levels = selftest._golden_case(dtype, scores)
    top, step = selftest._GOLDEN[scores]
    operands = (
        quantise_scores_operand(hadamard(x), scores, "per_warp", query)
        for x, query in ((q.float(), True), (smooth_keys(k.float()), False))
    )
    product = next(operands) @ next(operands).mT / 128
    rows = torch.tensor(selftest._ROW_FACTORS).repeat_interleave(16)
    want = rows[:, None] * (levels - top) * step
    torch.testing.assert_close(
        (product - product[..., :1]) * step, want.expand_as(product).float(), rtol=1e-5, atol=1e-5
    )


def golden_distances(scores, probability):
    """How near each golden score or probability is to a rounding boundary, in steps between codes."""
    from vc_attention.kernels.spec.formats import e4m3_decode

    top, step = selftest._GOLDEN[scores]
    u = torch.tensor(selftest._ROW_FACTORS)[:, None] * (selftest._levels(scores).double() - top) * step
    if probability == "expcast_wide":
        from vc_attention.kernels.spec.expcast import TOP_LOG2

        y = 8 * (u + TOP_LOG2[probability] + 7) - 0.35
        return (y - y.floor() - 0.5).abs()[(y > -0.6) & (y < 126.4)]
    values = e4m3_decode(torch.arange(127, dtype=torch.uint8)).double()
    middles, steps = (values[1:] + values[:-1]) / 2, values[1:] - values[:-1]
    p = torch.exp2(u).flatten() * 448
    return ((p[:, None] - middles).abs() / steps).amin(1)


@pytest.mark.parametrize("scores", ["int8", "fp8"])
def test_golden_scores_keep_away_from_rounding_boundaries(scores):
    assert golden_distances(scores, "expcast_wide").min() > 0.1
    assert golden_distances(scores, "exp2").min() > 0.0017


@pytest.mark.parametrize(("case", "count"), [(FAST_BF16, 90), (FP8_BF16, 70)], ids=str)
def test_one_code_too_many_is_seen_at_every_level(monkeypatch, case, count):
    """A decoder that is wrong at a single code, anywhere among those that the case shows."""
    from vc_attention.kernels.spec.expcast import expcast_codes
    from vc_attention.kernels.spec.formats import e4m3_decode

    levels = selftest._golden_case(torch.float32, case.plan.scores)[1]
    top, step = selftest._GOLDEN[case.plan.scores]
    u = torch.tensor(selftest._ROW_FACTORS)[:, None] * (levels[:64] - top) * step
    shown = sorted(set(expcast_codes(u, "expcast_wide").flatten().tolist()))
    assert shown[0] == 0 and shown[-1] == 126 and len(shown) > count
    for code in shown[:-1:7]:

        def wrong(u, form, code=code):
            codes = expcast_codes(u, form)
            return e4m3_decode(torch.where(codes == code, codes + 1, codes))

        monkeypatch.setattr(spec_values, "expcast", wrong)
        assert selftest._golden(spec, case, torch.device("cpu")) is not None, code


def test_nothing_is_kept_after_the_test():
    assert selftest.problem(spec, CASES[:1], "cpu") is None
    for made in (
        selftest._uniform_case,
        selftest._levels,
        selftest._golden_case,
        selftest._golden_outputs,
        selftest._random_case,
    ):
        assert made.cache_info().currsize == 0


def test_another_plan_than_the_one_asked_for_is_seen():
    faithful = next(case for case in CASES if case.name == "faithful without smoothing")

    def wrong(q, k, v, plan, labels, scale):
        return spec(q, k, v, Plan(demean=False), labels, scale)

    assert "probabilit" in selftest.problem(wrong, [faithful], "cpu")
