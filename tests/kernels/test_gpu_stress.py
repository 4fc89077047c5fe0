"""The whole call, from bf16 q, k, v to the output, under what breaks kernels: every tail, dirty memory, far offsets,
many streams, graphs, wrong arguments. On an sm_90 GPU.
"""

from __future__ import annotations

import math
import threading

import pytest
import torch
from vc_attention import kernels
from vc_attention.benchmarks import preparation_checks, stress_checks
from vc_attention.benchmarks.stress_checks import PLANS, allowed, dirty_memory, estimate, exact, relative, spec_call
from vc_attention.kernels import FAST, FOUR_BIT, Plan, UnsupportedError
from vc_attention.kernels.launch import attend, call, prepare
from vc_attention.kernels.launch import images as prepare_images

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("only_kernels")]

MAIN_PLANS = ("fast", "fast key means", "faithful", "fast plain")
BF16 = torch.bfloat16


def ours(q, k, v, plan, labels=None, scale=None):
    return kernels.attention(q, k, v, plan, labels, scale, backend="cubin")


def tensors(heads, lq, lkv, seed=0, batch=1):
    """bf16 q, k, v [B, H, L, 128], stored as a model stores them ([B, L, H, 128])."""
    return preparation_checks.tensors(batch, heads, lq, lkv, "tokens", BF16, seed)


def labels_for(v, plan):
    return kernels.group(v).labels if plan.demean else None


def errors(q, k, v, plan, labels):
    """[squared error, the specification's, the squared norm of the exact output], and the estimate, of one call into
    dirty memory."""
    p, o = exact(q, k, v)
    with dirty_memory(0xFF):
        out = ours(q, k, v, plan, labels)
    spec = spec_call(q, k, v, plan, labels, None)
    squares = [(out.double() - o).square().sum(), (spec.double() - o).square().sum(), o.square().sum()]
    return torch.stack([*squares, estimate(q, k, v, plan, None, p, o).double()])


@pytest.mark.parametrize("lq", [1, 128, 300])
@pytest.mark.parametrize("name", MAIN_PLANS)
def test_every_length_modulo_128_is_as_accurate_as_the_specification(name, lq):
    """Each residue with no whole block before it, and with 1 to 10 of them: both halves of a key tile of 256, and more
    than one group of 8 block means."""
    heads = 4 if lq == 1 else 2
    plan, lengths, found = PLANS[name], [], []
    for residue in range(128):
        for blocks in (0, 1 + residue * 7 % 10):
            lkv = 128 * blocks + residue
            if lkv:
                q, k, v = tensors(heads, lq, lkv, seed=lkv)
                lengths.append(lkv)
                found.append(errors(q, k, v, plan, labels_for(v, plan)))
    table = torch.stack(found)
    rows = heads * lq
    bad = []
    for lkv, (mine, theirs, norm, guess) in zip(lengths, table.tolist(), strict=True):
        error, spec = math.sqrt(mine / norm), math.sqrt(theirs / norm)
        if not error <= allowed(spec, guess, rows, BF16, plan):
            bad.append((lkv, error, spec))
    assert not bad
    # All lengths together, where few rows leave little noise.
    mine, theirs, norm, _ = table.sum(0).tolist()
    guess = table[:, 3].max().item()
    assert math.sqrt(mine / norm) <= allowed(math.sqrt(theirs / norm), guess, rows * len(found), BF16, plan)


@pytest.mark.parametrize("lkv", [65_537, 100_000, 131_072, 150_063, 199_999, 200_000])
@pytest.mark.parametrize("name", MAIN_PLANS)
def test_long_sequences_are_as_accurate_as_the_specification(name, lkv):
    plan = PLANS[name]
    q, k, v = tensors(1, 256, lkv, seed=lkv)
    mine, theirs, norm, guess = errors(q, k, v, plan, labels_for(v, plan)).tolist()
    assert math.sqrt(mine / norm) <= allowed(math.sqrt(theirs / norm), guess, 256, BF16, plan)


@pytest.mark.parametrize("name", PLANS)
def test_dirty_memory_does_not_reach_the_result(name):
    """0xFF is NaN in every format; 0x7F is E4M3's other NaN, and huge in the others; 0xA5 is a plausible number."""
    plan = PLANS[name]
    inputs = [tensors(3, 130, 257, seed=1), tensors(2, 700, 4097, seed=2)]
    results = {}
    for byte in (0x00, 0xFF, 0x7F, 0xA5):
        outputs = []
        with dirty_memory(byte) as filled:
            for q, k, v in inputs:
                found = kernels.group(v)
                again = kernels.group(v, previous=found)
                outputs += [found.labels, found.centroids, again.labels, again.centroids]
                outputs += [ours(q, k, v, plan, found.labels), ours(q, k, v, plan)]
        # Images, workspaces of grouping and the output of each call: or the kernels have got memory by another way.
        assert len(filled) > 40 and sum(filled) > 2 << 20
        results[byte] = outputs
    clean = results.pop(0x00)
    for outputs in results.values():
        assert all(torch.equal(a, b) for a, b in zip(clean, outputs, strict=True))
    assert all(bool(x.isfinite().all()) for x in clean)


class Guards:
    """Tensors in the middle of larger memory, whose margins can be checked."""

    MARGIN = 4096
    BYTE = 0xA5

    def __init__(self):
        self.memory = []

    def empty(self, shape, dtype):
        size = math.prod(shape) * dtype.itemsize
        memory = torch.full((size + 2 * self.MARGIN,), self.BYTE, dtype=torch.uint8, device="cuda")
        self.memory.append(memory)
        return memory[self.MARGIN : self.MARGIN + size].view(dtype).view(shape)

    def allocate(self, batch, heads, lq, lkv, plan, device, kind):
        """In place of `images.allocate`."""
        shapes = prepare_images.image_shapes(batch, heads, lq, lkv, plan, kind)
        tensors = {name: self.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
        return prepare_images.Images(batch, heads, lq, lkv, **tensors)

    def intact(self):
        margins = [m for memory in self.memory for m in (memory[: self.MARGIN], memory[-self.MARGIN :])]
        return bool(torch.stack(margins).eq(self.BYTE).all())


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (2, 3, 129, 257), (1, 2, 300, 1023), (1, 1, 128, 2049)], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_written_beyond_the_images_and_the_output(monkeypatch, name, shape):
    b, h, lq, lkv = shape
    plan, guards = PLANS[name], Guards()
    q, k, v = tensors(h, lq, lkv, batch=b)
    labels = labels_for(v, plan)
    monkeypatch.setattr(prepare, "allocate", guards.allocate)
    images = preparation_checks.must(prepare.prepare(call.kernels_for(q.device), q, k, v, plan, labels))
    out = guards.empty((b, lq, h, 128), BF16)
    assert attend.attend(images, plan, out) is None
    assert len(guards.memory) >= 7 and guards.intact()
    assert torch.equal(out.transpose(1, 2), ours(q, k, v, plan, labels))


@pytest.mark.parametrize("name", MAIN_PLANS)
def test_offsets_beyond_32_bits(name):
    """Views of a fused [B, L, 3, H, D] of more than 2^31 elements, read in place, against contiguous copies."""
    plan = PLANS[name]
    fused = torch.empty((2, 75_600, 3, 40, 128), dtype=BF16, device="cuda")
    fused[:, :, :, 38:].normal_(generator=torch.Generator("cuda").manual_seed(2))
    views = [fused[:, :, n, 38:].transpose(1, 2) for n in range(3)]
    # Of one launch, counted from its own base pointer.
    assert all(view.stride(0) + 75_599 * view.stride(2) > 2**31 for view in views)
    assert all(prepare.rows_of(view) is view for view in views)
    copies = [view.contiguous() for view in views]
    found, expected = kernels.group(views[2]), kernels.group(copies[2])
    assert torch.equal(found.labels, expected.labels) and torch.equal(found.centroids, expected.centroids)
    labels = found.labels if plan.demean else None
    assert torch.equal(ours(*views, plan, labels), ours(*copies, plan, labels))


@pytest.mark.parametrize("name", PLANS)
def test_two_hundred_calls_give_the_same_bits(name):
    plan = PLANS[name]
    q, k, v = tensors(3, 515, 3000)
    first = kernels.group(v)
    out = ours(q, k, v, plan, first.labels)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(200):
        again = kernels.group(v)
        same &= (again.labels == first.labels).all() & (again.centroids == first.centroids).all()
        same &= (ours(q, k, v, plan, again.labels) == out).all()
    assert bool(same)


def test_streams_and_threads_at_once_do_not_mix():
    """Four threads, each with a stream and inputs of its own, group and attend as fast as they can."""
    cases = [(tensors(2, 300 + 100 * n, 900 + 200 * n, seed=n), list(PLANS.values())[n]) for n in range(4)]

    def whole(q, k, v, plan):
        found = kernels.group(v)
        return found.labels, found.centroids, ours(q, k, v, plan, found.labels)

    expected = [whole(*inputs, plan) for inputs, plan in cases]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(n):
        inputs, plan = cases[n]
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                same = torch.ones((), dtype=torch.bool, device="cuda")
                for _ in range(100):
                    for a, b in zip(whole(*inputs, plan), expected[n], strict=True):
                        same &= (a == b).all()
                stream.synchronize()
                if not bool(same):
                    wrong.append(f"thread {n}: another result")
        except Exception as error:  # a thread's exception would be lost
            wrong.append(f"thread {n}: {error!r}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", PLANS)
def test_a_captured_grouping_and_call_replay_on_new_data(name):
    plan = PLANS[name]
    q, k, v = tensors(2, 300, 1500, seed=1)

    def whole():
        found = kernels.group(v)
        warm = kernels.group(v, previous=found)
        return found.labels, warm.labels, warm.centroids, ours(q, k, v, plan, warm.labels)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        whole()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = whole()
    for seed in (2, 3):
        for x, new in zip((q, k, v), tensors(2, 300, 1500, seed=seed), strict=True):
            x.copy_(new)
        graph.replay()
        replayed = [x.clone() for x in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, whole(), strict=True))


def bad_calls():
    """Name: (exception, words of its sentence, a call) of q, k, v, labels."""
    centroids = torch.zeros(1, 2, 16, 128, device="cuda")
    nowhere = torch.empty(0, dtype=torch.uint8)
    wide = torch.zeros(1, 65_536, 1, 128, dtype=BF16, device="cuda")
    return {
        "fp32": (UnsupportedError, "float32", lambda q, k, v, _: ours(q.float(), k.float(), v.float(), FAST)),
        "dim 64": (
            UnsupportedError,
            "head dimension",
            lambda *qkv: ours(*(x[..., :64] for x in qkv[:3]), FAST),
        ),
        "four bit": (UnsupportedError, "plan", lambda q, k, v, _: ours(q, k, v, FOUR_BIT)),
        "clipped means": (UnsupportedError, "clipped", lambda q, k, v, _: ours(q, k, v, Plan(clip_means=True))),
        "heads": (UnsupportedError, "65535", lambda *_: ours(wide, wide, wide, FAST)),
        "k on the CPU": (ValueError, "device", lambda q, k, v, _: ours(q, k.cpu(), v, FAST)),
        "labels on the CPU": (ValueError, "on cpu", lambda q, k, v, labels: ours(q, k, v, FAST, labels.cpu())),
        "labels too short": (ValueError, "uint8", lambda q, k, v, labels: ours(q, k, v, FAST, labels[..., 1:])),
        "labels of int64": (ValueError, "uint8", lambda q, k, v, labels: ours(q, k, v, FAST, labels.long())),
        "no keys": (ValueError, "no tokens", lambda q, k, v, _: ours(q, k[:, :, :0], v[:, :, :0], FAST)),
        "257 groups": (ValueError, "1 to 256", lambda q, k, v, _: kernels.group(v, 257)),
        "no values": (ValueError, "no value tokens", lambda q, k, v, _: kernels.group(v[:, :, :0])),
        "other groups": (
            ValueError,
            "previous centroids have shape",
            lambda q, k, v, _: kernels.group(v, 32, kernels.Labels(nowhere, centroids)),
        ),
        "other heads": (
            ValueError,
            "previous centroids have shape",
            lambda q, k, v, _: kernels.group(v[:, :1], 0, kernels.Labels(nowhere, centroids)),
        ),
        "centroids on the CPU": (
            ValueError,
            "previous centroids are on cpu",
            lambda q, k, v, _: kernels.group(v, 0, kernels.Labels(nowhere, centroids.cpu())),
        ),
    }


def test_wrong_inputs_are_sentences_and_leave_the_device_well():
    q, k, v = tensors(2, 130, 300)
    labels = kernels.group(v).labels
    expected = ours(q, k, v, FAST, labels)
    for name, (kind, words, wrong) in bad_calls().items():
        with pytest.raises(kind, match=words) as error:
            wrong(q, k, v, labels)
        assert str(error.value).endswith("."), name
        torch.cuda.synchronize()
        assert torch.equal(ours(q, k, v, FAST, labels), expected), name


def test_no_queries_and_no_heads_give_empty_outputs():
    q, k, v = tensors(2, 1, 300)
    assert ours(q[:, :, :0], k, v, FAST).shape == (1, 2, 0, 128)
    assert ours(q[:, :0], k[:, :0], v[:, :0], FAST).shape == (1, 0, 1, 128)


def test_random_legal_calls():
    """A few hundred of the cases of `benchmarks/stress_sm90.py`."""
    run = stress_checks.Stress(ours, "cuda")
    run.run(stress_checks.make_case(seed, longest=2000) for seed in range(300))
    assert run.done == 300 and run.failures == []
    assert all(tally.within for tally in run.tallies.values())


def test_the_checks_see_a_wrong_kernel():
    """The bounds of this file have teeth: a call without its last 16 keys does not pass them."""

    def short(q, k, v, plan, labels=None, scale=None):
        keep = slice(0, max(1, k.shape[2] - 16))
        return ours(q, k[:, :, keep], v[:, :, keep], plan, None if labels is None else labels[..., keep], scale)

    run = stress_checks.Stress(short, "cuda")
    run.run(stress_checks.make_case(seed, longest=500) for seed in range(64))
    assert len(run.failures) > 32
    q, k, v = tensors(1, 300, 500)
    assert relative(short(q, k, v, FAST), exact(q, k, v)[1]) > 2 * relative(ours(q, k, v, FAST), exact(q, k, v)[1])
