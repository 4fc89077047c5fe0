"""Known failures at the hook: masks, head dimensions, dtypes, strides, offsets, mutation, keywords, branches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from call_bench import Bench, attention, flat_qkv, headed
from comfy_cases import options
from vc_attention.kernels import EXACT, FAST

pytestmark = pytest.mark.comfy

NAME = "wan22_t2v"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def bench(tiny):
    return Bench(tiny(NAME), options(NAME))


# -- masks: never ignored -------------------------------------------------------------------------------------------


def _masks(lq: int, lkv: int, heads: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(lq, lkv, generator=generator) > 0.3
    one_row = keep.clone()
    one_row[5] = False
    additive = torch.randn(1, 1, lq, lkv, generator=generator)
    return {
        "bool": keep,
        "bool, a fully masked row": one_row,
        "additive": additive,
        "additive, a fully masked row": additive.masked_fill(~one_row, float("-inf")),
        "per head": torch.randn(1, heads, lq, lkv, generator=generator),
        "broadcast over queries": torch.zeros(1, 1, 1, lkv).masked_fill(torch.arange(lkv) >= lkv - 9, -1e9),
        "all zeros": torch.zeros(1, 1, lq, lkv),
    }


@pytest.mark.parametrize("how", ["keyword", "positional"])
@pytest.mark.parametrize("kind", _masks(96, 96, 2))
def test_masked_calls_are_comfyuis_bit_for_bit(bench, kind, how):
    q, k, v = flat_qkv()
    mask = _masks(96, 96, 2)[kind]
    rest, keywords = ((mask,), {}) if how == "positional" else ((), {"mask": mask})
    plain = attention(q, k, v, 2, *rest, **keywords)
    out = bench.forward(lambda to: attention(q, k, v, 2, *rest, transformer_options=to, **keywords))
    assert torch.equal(out.isnan(), plain.isnan())  # a fully masked row is NaN in some backends
    assert torch.equal(out.nan_to_num(), plain.nan_to_num())
    assert bench.session.stats.declined == {"mask": 1}
    assert bench.session.stats.accelerated == 0


# -- what else falls through ----------------------------------------------------------------------------------------

DECLINED = {
    "head_dim 512 (VAE)": ({"heads": 1, "dim": 512}, {}, "head_dim"),
    "head_dim 96": ({"dim": 96}, {}, "head_dim"),
    "head_dim 32": ({"dim": 32}, {}, "head_dim"),
    "few keys": ({"lkv": 63}, {}, "short"),
    "fp64": ({"dtype": torch.float64}, {}, "dtype"),
    "full precision asked for": ({}, {"low_precision_attention": False}, "low_precision"),
}


@pytest.mark.parametrize("case", DECLINED)
def test_unsupported_calls_fall_through_bit_for_bit(bench, case):
    shape, keywords, code = DECLINED[case]
    q, k, v = flat_qkv(**shape)
    heads = shape.get("heads", 2)
    plain = attention(q, k, v, heads, **keywords)
    out = bench.forward(lambda to: attention(q, k, v, heads, transformer_options=to, **keywords))
    assert torch.equal(out, plain)
    assert bench.session.stats.declined == {code: 1}


def test_shared_keys_fall_through(bench):
    """GQA: the hook must not read fewer key heads than query heads."""
    q, k, v = headed(flat_qkv(heads=4), 4)
    k, v = k[:, :2], v[:, :2]
    got = {}

    def func(q, k, v, heads, **keywords):
        got.update(keywords)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    out = bench.forward(
        lambda to: to["optimized_attention_override"](
            func, q, k, v, 4, skip_reshape=True, skip_output_reshape=True, enable_gqa=True, transformer_options=to
        )
    )
    assert out.shape == q.shape and got["enable_gqa"] is True
    assert bench.session.stats.declined == {"gqa": 1}


def test_calls_from_outside_the_model_are_left_alone(bench):
    """A ControlNet tower has its own transformer_options, without the record of the pass."""
    q, k, v = flat_qkv()
    override = bench.model.model_options["transformer_options"]["optimized_attention_override"]
    outside = {"optimized_attention_override": override}
    plain = attention(q, k, v, 2)
    assert torch.equal(attention(q, k, v, 2, transformer_options=outside), plain)
    assert bench.session.stats.declined == {"no_context": 1}
    assert bench.session.stats.accelerated == 0


# -- dtypes, layouts, scale -----------------------------------------------------------------------------------------


def _short(dtypes: tuple[torch.dtype, ...]) -> str:
    return "-".join(str(dtype)[6:] for dtype in dtypes)


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)), ids=_short)
def test_any_mix_of_dtypes_runs(bench, dtypes):
    """GGUF and fp8 checkpoints mix them: never an error in the middle of sampling, and the output is q's dtype."""
    tensors = [x.to(dtype) for x, dtype in zip(flat_qkv(), dtypes, strict=True)]
    out = bench.forward(lambda to: attention(*tensors, 2, transformer_options=to))
    assert out.dtype == dtypes[0]
    assert bench.session.stats.accelerated == 1
    true = attention(*(x.float() for x in tensors), 2)
    assert (out.float() - true).abs().max() < 0.03


LAYOUTS = {
    "fused qkv": lambda q, k, v: torch.cat((q, k, v), -1).split(q.shape[-1], -1),
    "storage offset": lambda q, k, v: tuple(torch.cat((x.new_zeros(3), x.flatten()))[3:].view_as(x) for x in (q, k, v)),
    "expanded batch": lambda q, k, v: tuple(x[:1].expand(2, -1, -1) for x in (q, k, v)),
    "transposed": lambda q, k, v: tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)),
}


@pytest.mark.parametrize("plan", [EXACT, FAST], ids=["exact", "fast"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_equal_contiguous_tensors(tiny, layout, plan):
    bench = Bench(tiny(NAME), options(NAME, plan=plan))
    views = LAYOUTS[layout](*flat_qkv(batch=2))
    copies = [x.contiguous() for x in views]
    out = bench.forward(lambda to: attention(*views, 2, transformer_options=to))
    assert torch.equal(out, bench.forward(lambda to: attention(*copies, 2, transformer_options=to)))
    assert bench.session.stats.accelerated == 2


@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_heads_first_layout(bench, skip_output_reshape):
    tensors = flat_qkv(batch=2)
    keywords = {"skip_reshape": True, "skip_output_reshape": skip_output_reshape}
    plain = attention(*headed(tensors), 2, **keywords)
    out = bench.forward(lambda to: attention(*headed(tensors), 2, transformer_options=to, **keywords))
    assert out.shape == plain.shape
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
    assert bench.session.stats.grouped == 1


def test_queries_and_keys_of_different_length(bench):
    """Animate-2 and LongCat: Lq != Lkv in self-attention is accelerated; few queries are not grouped."""
    for lq, lkv, grouped in ((96, 160, 1), (70, 200, 0)):
        q, k, v = flat_qkv(lq, lkv)
        before = bench.session.stats.grouped
        out = bench.forward(lambda to: attention(q, k, v, 2, transformer_options=to))  # noqa: B023
        torch.testing.assert_close(out, attention(q, k, v, 2), rtol=1e-5, atol=1e-5)
        assert bench.session.stats.grouped - before == grouped
    assert bench.session.stats.accelerated == 2


def test_scale_is_honoured(bench):
    q, k, v = flat_qkv()
    out = bench.forward(lambda to: attention(q, k, v, 2, transformer_options=to, scale=0.3))
    torch.testing.assert_close(out, attention(q * 0.3 * 8, k, v, 2), rtol=1e-5, atol=1e-5)
    assert bench.session.stats.accelerated == 1


def test_offsets_beyond_32_bits(bench, tmp_path):
    """q and k are views of one fused buffer whose last rows lie beyond 2^31 elements (a sparse file)."""
    tokens, width = 96, 128
    stride = 2**31 // (tokens - 8)
    elements = stride * (tokens - 1) + 3 * width
    file = tmp_path / "sparse.bin"
    with file.open("wb") as handle:
        handle.truncate(elements * 2)
    store = torch.from_numpy(np.memmap(file, dtype=np.float16, mode="r+", shape=(elements,)))
    views = [store.as_strided((1, tokens, width), (0, stride, 1), i * width) for i in range(3)]
    small = flat_qkv(dtype=torch.float16)
    for view, values in zip(views, small, strict=True):
        view.copy_(values)
    out = bench.forward(lambda to: attention(*views, 2, transformer_options=to))
    assert torch.equal(out, bench.forward(lambda to: attention(*small, 2, transformer_options=to)))
    assert (out.float() - attention(*(x.float() for x in small), 2)).abs().max() < 2e-3
    assert bench.session.stats.accelerated == 2


@pytest.mark.parametrize("plan", [EXACT, FAST], ids=["exact", "fast"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_not_mutated(tiny, plan, dtype):
    bench = Bench(tiny(NAME), options(NAME, plan=plan))
    tensors = flat_qkv(dtype=dtype, batch=2)
    before = [x.clone() for x in tensors]
    for step in range(5):
        bench.forward(lambda to: attention(*tensors, 2, transformer_options=to), step=step)
    assert bench.session.stats.accelerated == 5
    assert all(torch.equal(x, old) for x, old in zip(tensors, before, strict=True))


# -- keywords -------------------------------------------------------------------------------------------------------


def test_unknown_keywords_are_accepted_and_passed_on(bench):
    """A later ComfyUI will pass keywords that do not exist yet, to accelerated and to declined calls."""
    got = []

    def func(q, k, v, heads, **keywords):
        got.append(keywords)
        return torch.zeros_like(q)

    def body(to):
        override = to["optimized_attention_override"]
        keywords = {"from_the_future": 42, "_inside_attn_wrapper": True, "attn_precision": None}
        q, k, v = flat_qkv()
        accelerated = override(func, q, k, v, heads=2, transformer_options=to, **keywords)
        q, k, v = flat_qkv(lkv=20)
        override(func, q, k, v, heads=2, transformer_options=to, **keywords)
        return accelerated

    out = bench.forward(body)
    assert out.abs().sum() > 0
    assert len(got) == 1
    assert got[0]["from_the_future"] == 42
    assert got[0]["_inside_attn_wrapper"] is True
    assert "attn_precision" in got[0] and "transformer_options" in got[0]


# -- branches, windows, steps ---------------------------------------------------------------------------------------


def test_a_batch_of_two_equals_two_batches_of_one(tiny):
    """Outputs and counts; then with the branches in the other order: each finds its own groups again."""
    tensors = flat_qkv(batch=2)
    together, apart = Bench(tiny(NAME), options(NAME)), Bench(tiny(NAME), options(NAME))
    both = together.forward(lambda to: attention(*tensors, 2, transformer_options=to), uuids=("a", "b"))
    for i, uuid in enumerate("ab"):
        one = [x[i : i + 1] for x in tensors]
        alone = apart.forward(lambda to, one=one: attention(*one, 2, transformer_options=to), uuids=(uuid,))
        assert torch.equal(alone, both[i : i + 1])
    assert together.session.stats.grouped == apart.session.stats.grouped == 2

    seen = []
    together.session.observers.append(lambda record, *_: seen.append(record.phase))
    flipped = [x.flip(0) for x in tensors]
    back = together.forward(lambda to: attention(*flipped, 2, transformer_options=to), step=1, uuids=("b", "a"))
    assert torch.equal(back.flip(0), both)
    assert seen == ["reuse"]
    assert together.session.stats.reused == 2


def _labels(monkeypatch) -> list[torch.Tensor]:
    """Collect the labels that reach the kernels."""
    from vc_attention.nodes import engine

    seen = []
    real = engine.attention

    def spy(q, k, v, plan, labels, *rest):
        seen.append(labels)
        return real(q, k, v, plan, labels, *rest)

    monkeypatch.setattr(engine, "attention", spy)
    return seen


def test_each_branch_keeps_its_own_groups(tiny, monkeypatch):
    """Reused labels are those of the branch's own V, not of the other branch, another window, layer or length."""
    bench, seen = Bench(tiny(NAME), options(NAME)), _labels(monkeypatch)

    class Window:
        def __init__(self, *index: int) -> None:
            self.index_list = list(index)

    def call(seed: int, lkv: int = 96):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(1, n, 128, generator=generator) for n in (lkv, lkv, lkv)]

    passes = {
        ("a", None): (call(1), call(2), call(3, 120)),
        ("b", None): (call(4), call(5), call(6, 120)),
        ("a", (0, 1)): (call(7), call(8), call(9, 120)),
        ("a", (1, 2)): (call(10), call(11), call(12, 120)),
    }
    first: dict = {}
    for step in (0, 1):
        for (uuid, window), calls in passes.items():
            del seen[:]

            def body(to, calls=calls):
                for q, k, v in calls:
                    attention(q, k, v, 2, transformer_options=to)
                return torch.zeros(1)

            bench.forward(body, step, (uuid,), None if window is None else Window(*window))
            if step == 0:
                first[uuid, window] = list(seen)
            else:
                for old, new in zip(first[uuid, window], seen, strict=True):
                    assert torch.equal(old, new)
    stats = bench.session.stats
    assert (stats.grouped, stats.reused, stats.plain) == (12, 12, 0)
    everything = [labels for group in first.values() for labels in group]
    for one, other in itertools.combinations(everything, 2):
        assert one.shape != other.shape or not torch.equal(one, other)


def test_a_new_schedule_starts_afresh(bench):
    """The same cached model in a second run: a new sample_sigmas object, and no group of the first run is left."""
    tensors = flat_qkv()
    for _ in range(2):
        bench.forward(lambda to: attention(*tensors, 2, transformer_options=to))
        assert bench.session.stats.grouped == 1 and bench.session.stats.reused == 0
        bench.forward(lambda to: attention(*tensors, 2, transformer_options=to), step=1)
        assert bench.session.stats.grouped == 1 and bench.session.stats.reused == 1
        bench.sigmas = bench.sigmas.clone()
