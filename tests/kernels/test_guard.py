"""The numeric guard's statistic: correct arithmetic passes on hard data, planted faults do not, and it stays cheap."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vc_attention import kernels
from vc_attention.benchmarks import hook_overhead, synthetic
from vc_attention.kernels import EXACT, FAITHFUL, FAST, FOUR_BIT, Plan, agreement, guard, least_agreement
from vc_attention.kernels.spec import attention as spec

TOKENS = 1024
PLANS = {
    "fast": FAST,
    "fast_paper": replace(FAST, probability="expcast"),
    "fast_plain": FAST.without_smoothing(),
    "faithful": FAITHFUL,
    "key_means": replace(FAITHFUL, key_means=True),
    "fp8_scores": replace(FAST, scores="fp8"),
    "int8_values": Plan(values="int8", probability="exp2"),
    "four_bit": FOUR_BIT,
    "fp8_nvfp4": Plan(scores="fp8", values="nvfp4", probability="exp2"),
    "exact": EXACT,
}


def gaussian(lq=1000, lkv=1000, heads=2, dim=128, batch=1, spread=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, n, dim, generator=g) for n in (lq, lkv, lkv))
    return spread * q, k, v


def tokens(spread=1.0, **recipe):
    return synthetic.make_qkv(TOKENS, heads=2, recipe=replace(synthetic.RECIPE, score_std=spread, **recipe))


def one_hot():
    _, k, v = gaussian()
    return 6 * k, k, v


def outlier_token(gain):
    q, k, v = tokens()
    v[:, :, 100] *= gain
    return q, k, v


def outlier_queries():
    q, k, v = tokens()
    q[:, :, ::64] *= 30
    return q, k, v


def outlier_channel():
    q, k, v = tokens()
    q[..., 3] *= 50
    return q, k, v


def sink(value=1.0):
    """Nearly all mass on one key; with value 0 the output is the little that the others have."""
    q, k, v = tokens()
    k[:, :, 77] = q.mean(-2) * 20
    v[:, :, 77] *= value
    return q, k, v


def cancelling():
    q, k, v = gaussian()
    return q, k, v[:, :, :1] * torch.tensor([1.0, -1.0]).repeat(500)[:, None]


def spike():
    q, k, v = gaussian()
    v = torch.zeros_like(v)
    v[:, :, 5] = 100.0
    return q * 0, k * 0, v


def changed(change):
    q, k, v = tokens()
    return q, k, change(v)


DATA = {
    "0.3 nats": lambda: tokens(0.3),
    "1 nat": tokens,
    "8 nats": lambda: tokens(8.0),
    "20 nats": lambda: tokens(20.0),
    "30 nats": lambda: gaussian(spread=30.0),
    "one-hot": one_hot,
    "outlier token x1e3": lambda: outlier_token(1e3),
    "outlier token x1e5": lambda: outlier_token(1e5),
    "outlier queries": outlier_queries,
    "outlier channel": outlier_channel,
    "sink": sink,
    "sink without value": lambda: sink(0.0),
    "cancelling values": cancelling,
    "uniform, one spike": spike,
    "constant V": lambda: changed(lambda v: torch.full_like(v, 3.0)),
    "tiny V": lambda: changed(lambda v: v * 1e-30),
    "huge V": lambda: changed(lambda v: v * 1e30),
    "zero V": lambda: changed(torch.zeros_like),
    "V with a large mean": lambda: changed(lambda v: v + 20.0),
    "V without a mean": lambda: changed(lambda v: v - v.mean(-2, keepdim=True)),
    "K with a large mean": lambda: (lambda q, k, v: (q, k + 50.0, v))(*tokens()),
    "1 token": lambda: gaussian(1, 1),
    "17 tokens": lambda: gaussian(17, 17),
    "129 tokens": lambda: gaussian(129, 129),
    "64 channels": lambda: gaussian(700, 700, dim=64, spread=3.0),
    "short queries": lambda: gaussian(5, 900),
}


@pytest.mark.parametrize("data", DATA)
def test_correct_arithmetic_passes_on_hard_data(data):
    """Three times the error energy that any plan has here would still pass in 8 bit, and half more in 4 bit."""
    q, k, v = (t.bfloat16() for t in DATA[data]())
    labels = kernels.group(v).labels
    for name, plan in PLANS.items():
        found = float(agreement(q, k, v, kernels.attention(q, k, v, plan, labels, backend="spec")))
        least = least_agreement(plan)
        assert 1 - found <= (1 - least) / (1.5 if least < 0.5 else 3.0), (name, found)


def test_the_numbers_of_the_docstring():
    """A row of the table in `kernels.guard`."""
    q, k, v = (t.bfloat16() for t in DATA["1 nat"]())
    labels = kernels.group(v).labels
    found = {
        p: float(agreement(q, k, v, kernels.attention(q, k, v, p, labels, backend="spec"))) for p in PLANS.values()
    }
    assert min(f for p, f in found.items() if least_agreement(p) == 0.9) == pytest.approx(0.9994, abs=2e-4)
    assert min(f for p, f in found.items() if least_agreement(p) == 0.4) == pytest.approx(0.995, abs=2e-3)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    assert float(agreement(q, k, v, sdpa(q, k[:, :, order], v))) == pytest.approx(0.62, abs=0.02)
    assert float(agreement(q, k, v, sdpa(q, k, v, scale=2 * 128**-0.5))) == pytest.approx(0.53, abs=0.02)


# -- planted faults -------------------------------------------------------------------------------------------------


def sdpa(q, k, v, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)


def labels_of(v, turned=0):
    return kernels.group(v.roll(turned, -2)).labels


def pairs_broken(q, k, v, plan, monkeypatch):
    """V in the order of another step's labels than K."""
    order = spec.permutation(labels_of(v, 300))[..., None].expand_as(v)
    return kernels.attention(q, k, v.gather(-2, order), plan, backend="spec")


def stale_means(q, k, v, plan, monkeypatch):
    """Block means of an older grouping than the residuals'."""
    real = spec.quantise_values

    def quantise(values, *rest):
        made = real(values, *rest)
        return replace(made, means=made.means.roll(1, -2))

    monkeypatch.setattr(spec, "quantise_values", quantise)
    return kernels.attention(q, k, v, plan, labels_of(v), backend="spec")


def without_means(q, k, v, plan, monkeypatch):
    real = spec.quantise_values
    monkeypatch.setattr(spec, "quantise_values", lambda *given: replace(real(*given), means=None))
    return kernels.attention(q, k, v, plan, labels_of(v), backend="spec")


def key_tail_lost(q, k, v, plan, monkeypatch):
    return kernels.attention(q, k[:, :, :-104], v[:, :, :-104], plan, backend="spec")


def query_tail_lost(q, k, v, plan, monkeypatch):
    out = kernels.attention(q, k, v, plan, backend="spec")
    out[:, :, -104:] = 0
    return out


def shifted_rows(q, k, v, plan, monkeypatch):
    return kernels.attention(q, k, v, plan, backend="spec").roll(1, -2)


def heads_swapped(q, k, v, plan, monkeypatch):
    return kernels.attention(q, k, v.flip(1), plan, backend="spec")


FAULTS = {
    "K and V in different orders": pairs_broken,
    "block means of an older grouping": stale_means,
    "block means forgotten": without_means,
    "last key tile lost": key_tail_lost,
    "last query tile lost": query_tail_lost,
    "query rows moved by one": shifted_rows,
    "another head's V": heads_swapped,
    "scores doubled": lambda q, k, v, plan, _: kernels.attention(q, k, v, plan, scale=2 * 128**-0.5, backend="spec"),
    "scores halved": lambda q, k, v, plan, _: kernels.attention(q, k, v, plan, scale=0.5 * 128**-0.5, backend="spec"),
    "output doubled": lambda q, k, v, plan, _: 2 * kernels.attention(q, k, v, plan, backend="spec"),
    "output negated": lambda q, k, v, plan, _: -kernels.attention(q, k, v, plan, backend="spec"),
    "zeros": lambda q, k, v, plan, _: torch.zeros_like(q),
}
#: Not told from a sound 4-bit kernel: on some data that errs as much.
TOO_SMALL_FOR_FOUR_BIT = {
    "block means of an older grouping",
    "block means forgotten",
    "last query tile lost",
    "scores doubled",
    "scores halved",
    "output doubled",
}
BROKEN = [(f, p) for f in FAULTS for p in ("fast", "faithful")]
BROKEN += [(f, "four_bit") for f in FAULTS if f not in TOO_SMALL_FOR_FOUR_BIT]


@pytest.mark.parametrize(("fault", "plan"), BROKEN)
def test_a_broken_kernel_does_not_pass(fault, plan, monkeypatch):
    """1000 tokens, whose last tile (104) holds a tenth of them; scores of 4 nats, so that rows differ."""
    q, k, v = (t[:, :, :1000].bfloat16() for t in tokens(4.0))
    k[:, :, -104:] += q.float().mean(-2, keepdim=True)  # the tail counts
    found = agreement(q, k, v, FAULTS[fault](q, k, v, PLANS[plan], monkeypatch))
    assert float(found) < least_agreement(PLANS[plan])


def test_a_fault_in_one_head_is_found_in_some_turn():
    q, k, v = gaussian(200, 200, heads=40, dim=64)
    out = sdpa(q, k, v)
    out[:, 33] = out[:, 32]
    found = [float(agreement(q, k, v, out, turn=turn)) < 0.9 for turn in range(10)]
    assert found == [turn % 5 == 33 % 5 for turn in range(10)]


def test_a_fault_in_one_clip_of_a_large_batch_is_found():
    q, k, v = gaussian(96, 96, heads=2, dim=64, batch=19)
    out = sdpa(q, k, v)
    assert float(agreement(q, k, v, out)) > 0.999
    out[17] = 0
    assert float(agreement(q, k, v, out)) < 0.5


# -- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lkv", [1, 511, 512, 513, 1024, 5000])
def test_exact_rows_in_any_number_of_chunks(lkv, dtype, monkeypatch):
    q, k, v = (t.to(dtype) for t in gaussian(40, lkv, heads=3, dim=64, spread=2.0))
    true = torch.softmax(q.double() @ k.double().mT * 0.3, -1) @ v.double()
    for most in (guard.TEMPORARY_BYTES, 1 << 21, 1):
        monkeypatch.setattr(guard, "TEMPORARY_BYTES", most)
        rows, energy = guard.exact_rows(q[0].float(), k, v, 0.3)
        torch.testing.assert_close(rows[None], true.float(), rtol=0, atol=2e-5)
        torch.testing.assert_close(energy[None], v.double().square().sum(-1).mean(-1).float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("layout", ["nhd", "fused", "expanded"])
def test_strides_do_not_matter(layout):
    q, k, v = gaussian(300, 700, batch=2)
    views = {
        "nhd": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "fused": lambda t: torch.stack((t, t, t), -2).select(-2, 1),
        "expanded": lambda t: t[:1].expand(2, -1, -1, -1),
    }[layout]
    a, b, c = views(q), views(k), views(v)
    out = sdpa(a, b, c) + 0.05
    strided = agreement(a, b, c, out)
    assert torch.equal(strided, agreement(a.contiguous(), b.contiguous(), c.contiguous(), out.contiguous()))
    assert 0.5 < float(strided) < 0.99


def test_scale_is_honoured():
    q, k, v = gaussian(200, 200)
    assert float(agreement(q, k, v, sdpa(q, k, v, scale=0.31), 0.31)) > 0.9999
    assert float(agreement(q, k, v, sdpa(q, k, v, scale=0.31))) < 0.9


def test_inputs_are_not_modified():
    given = [*gaussian(200, 700), torch.zeros(1, 2, 200, 128)]
    before = [t.clone() for t in given]
    agreement(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


# -- not finite -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_nan(bad):
    q, k, v = gaussian(200, 200)
    out = sdpa(q, k, v)
    out[0, 1, 199, 3] = bad  # the last row is always sampled
    assert agreement(q, k, v, out).isnan()


def test_inputs_that_are_not_finite_are_not_the_kernels_fault():
    q, k, v = gaussian(200, 200)
    out = sdpa(q, k, v)
    v[:, :, 7, 2] = torch.inf
    assert float(agreement(q, k, v, out)) == 1.0
    assert float(agreement(q * 1e30, k * 1e30, v, out)) == 1.0  # scores beyond fp32


# -- what is sampled ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 24, 127, 128, 129, 1000, 32_768, 75_600, 111_601])
def test_rows(length):
    rows = guard.sample_rows(length, torch.device("cpu"))
    spread, tail = rows[: guard.SPREAD_ROWS], rows[guard.SPREAD_ROWS :]
    assert rows.shape == (32,) and rows.dtype == torch.int64 and int(rows.min()) == 0 and int(rows[-1]) == length - 1
    assert bool((spread.diff() >= 0).all()) and int(spread.max()) < length
    assert int(tail.min()) >= (length - 1) // 128 * 128 and bool((tail.diff() >= 0).all())
    if length > 1000:
        assert torch.equal(spread * guard.SPREAD_ROWS // length, torch.arange(guard.SPREAD_ROWS))
        assert len(set((spread % 128).tolist())) >= 16  # not the same row of each tile
        assert len(set(tail.tolist())) == guard.TAIL_ROWS


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 16, 24, 40, 56, 63])
def test_heads_of_all_turns_are_all_heads(heads):
    taken = [list(range(heads))[guard.sample_heads(heads, turn)] for turn in range(-(-heads // guard.HEADS))]
    assert sorted(head for one in taken for head in one) == list(range(heads))
    assert all(1 <= len(one) <= guard.HEADS for one in taken)


# -- cost -----------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """The most bytes of tensors made under this mode that were alive at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage):
        key = storage.data_ptr()
        if key and key not in self._seen:
            self._seen.add(key)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key, size):
        self._seen.discard(key)
        self.now -= size


@pytest.mark.parametrize(("heads", "dim", "batch"), [(40, 128, 1), (8, 128, 2), (3, 64, 1)])
def test_temporary_memory_is_bounded(heads, dim, batch, monkeypatch):
    """A tenth of the bound and of a long clip: no fp32 copy of K or V."""
    most = guard.TEMPORARY_BYTES // 10
    monkeypatch.setattr(guard, "TEMPORARY_BYTES", most)
    q, k, v = (t.bfloat16() for t in gaussian(64, 7600, heads=heads, dim=dim, batch=batch))
    out = torch.zeros_like(q)
    with Live() as live:
        agreement(q, k, v, out)
    assert live.peak < 1.2 * most + (1 << 20)
    assert live.peak > 0.5 * most  # the mode does see them


def test_nothing_waits_for_the_device():
    q, k, v = gaussian(200, 1500)
    out = sdpa(q, k, v)
    with hook_overhead.MethodReads() as methods, hook_overhead.OperationReads() as operations:
        agreement(q, k, v, out, turn=3)
    assert methods.seen == [] and operations.seen == []


@pytest.mark.gpu
def test_on_a_gpu_the_number_is_the_same_and_nothing_synchronises():
    q, k, v = (t.bfloat16() for t in gaussian(1000, 3000, heads=12, batch=2, spread=3.0))
    out = sdpa(q, k, v)
    out[:, 3] += 0.02
    wanted = agreement(q, k, v, out, turn=1)
    on_gpu = [t.transpose(1, 2).contiguous().cuda().transpose(1, 2) for t in (q, k, v, out)]
    agreement(*on_gpu, turn=1)  # the first call loads libraries
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = agreement(*on_gpu, turn=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 1.1 * guard.TEMPORARY_BYTES + (1 << 20)
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-3)
