"""The numeric guard: a few rows of a finished attention call against exact attention, on the device.

A broken kernel (wrong order, wrong scale, a lost tail) gives finite numbers of the right size, so a look for NaN does
not find it. `agreement` computes sampled query rows exactly and returns one device scalar; nothing waits for it here.

What the scalar is: for each head, with o the rows found and e the exact ones (means over the sampled rows),

    1 - mean |o - e|^2 / (mean |o - mean o|^2 + mean |e - mean e|^2 + (0.2 |mean e|)^2 + (0.1 rms |v|)^2)

For small errors that is the cosine of the two after what all rows share is taken off, and unlike a cosine it sees a
wrong length. What all rows share has to go: where attention is diffuse every output is V's channel mean and little
else, and a kernel that pairs each key with a random value still has a cosine of 0.97 (synthetic tokens, 1 nat). The
last two terms keep apart the heads whose rows hardly differ, or whose output is next to nothing: there the rounding of
a correct kernel is large beside the differences, and small beside these terms.

The lower of two heads on bf16 tensors, 1000 or 1024 tokens (the cases of tests/kernels/test_guard.py): the worst of
seven 8-bit plans and of two 4-bit ones in the specification, and three planted faults (K permuted and V not; scores
doubled; last query tile zero):

| data                          | 8 bit  | 4 bit | permuted | doubled | lost tile |
|-------------------------------|--------|-------|----------|---------|-----------|
| scores of 0.3 nats            | 0.9998 | 0.999 | 0.97     | 0.97    | 0.15      |
| scores of 1 nat               | 0.9994 | 0.995 | 0.62     | 0.53    | 0.26      |
| scores of 8 nats              | 0.9946 | 0.925 | 0        | 0.97    | 0.72      |
| scores of 20 nats             | 0.9881 | 0.828 | 0        | 0.99    | 0.70      |
| scores of 30 nats, Gaussian   | 0.9719 | 0.811 | 0        | 0.99    | 0.77      |
| one-hot softmax               | 0.9996 | 0.995 | 0        | 1.00    | 0.78      |
| a token of V 10^5 times longer| 0.9996 | 0.988 | 0.76     | 0.83    | 0.82      |
| a channel of Q 50 times larger| 0.9959 | 0.914 | 0.01     | 0.60    | 0.40      |
| all mass on one key           | 0.9857 | 0.878 | 0        | 0.86    | 0         |
| the same, and its value is 0  | 0.9870 | 0.615 | 0        | 0.88    | 0.89      |
| V constant, or 20 + noise     | 0.9999 | 1.000 | 1.00     | 1.00    | 0         |
| V * 10^-30                    | 0.9989 | 0.991 | 0.18     | 0.44    | 0         |
| 17 Gaussian tokens            | 0.9981 | 0.977 | 0.03     | 0.76    | 0         |

Hence 0.9 for 8 bit and 0.4 for 4 bit: 3.5 and 1.5 times the error energy of anything here. A fault that changes nothing
that counts passes (equal values in another order, a sharper softmax that was one-hot before), and so may the lost
keys' tail of a long clip, which holds a thousandth of the mass. One head is enough to find a fault, and a model has
hundreds. The key with all the mass and no value gets no worse with length (16,384 tokens: 0.992 and 0.879 at a mass of
0.7). V beyond 10^18 is not judged.

Cost of one call: with h = HEADS heads, r = 32 rows, L keys, 4 h r L D operations in fp32 and 32 h L D bytes
moved (K and V read as bf16, written and read as fp32, V once more for its norm, and 8 passes over the scores), in
about 20 launches for every 8,704 keys. For Wan 720p (75,600 tokens, 40 heads) 10 GFLOP and 2.5 GB, part of it inside
the cache, where the attention call has 117 TFLOP.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .plan import BLOCK, Plan

#: Query rows for each head: some spread over the sequence, the others inside the last, ragged tile of queries.
SPREAD_ROWS = 24
TAIL_ROWS = 8
#: Heads looked at in one call. The next call takes their neighbours, so a few layers cover them all.
HEADS = 8
#: Clips of a batch that are worked on at once.
_BATCH = 8
#: Lowest agreement of a correct kernel, by whether 4-bit numbers are in it: the table above, with a margin.
LEAST = 0.9
LEAST_FOUR_BIT = 0.4
#: Share of the mean output, and of V's root mean square, below which differences do not count.
_OF_MEAN = 0.2
_OF_VALUES = 0.1
#: Bound on what the copies of K, V and the scores take at any one time.
TEMPORARY_BYTES = 48 << 20
#: Keys of one product. Many small products fill a GPU, where one of 32 rows and all keys would leave it idle.
_SPLIT = 512


def least_agreement(plan: Plan) -> float:
    """The `agreement` below which the result of a call under `plan` is not that of a correct kernel."""
    return LEAST_FOUR_BIT if "nvfp4" in (plan.scores, plan.values) else LEAST


def agreement(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float | None = None, turn: int = 0) -> Tensor:
    """How well sampled rows of `out` agree with exact attention: fp32 scalar on q's device, 1 at best, 0 at worst.

    q: [B, H, Lq, D]; k, v: [B, H, Lkv, D]; out: [B, H, Lq, D], the result under any plan; any strides and floating
    dtypes. scale: of the scores, 1 / sqrt(D) if None. turn: which of the heads, see `sample_heads`.
    The least of the sampled heads. NaN when a sampled row of `out` is not finite; rows whose exact result is not
    finite (so are the inputs, or the scores) are not judged. Queued on the current stream, without a host wait.
    """
    found = [_agreement(*part).amin() for part in sampled(q, k, v, out, scale, turn)]
    return found[0] if len(found) == 1 else torch.stack(found).amin()


def sampled(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float | None = None, turn: int = 0
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The sampled rows of a call, a few clips of the batch at a time. Arguments as `agreement` takes them.

    Yields the rows of `out` and the exact ones, both fp32 [clips * heads, rows, D], and the mean square of V's rows
    [clips * heads]: the heads of `sample_heads`, the rows of `sample_rows`.
    """
    heads = sample_heads(q.shape[1], turn)
    rows = sample_rows(q.shape[2], q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for start in range(0, q.shape[0], _BATCH):
        part = slice(start, start + _BATCH)
        query, got = (_fp32(t[part, heads].index_select(2, rows)).flatten(0, 1) for t in (q, out))
        exact, energy = exact_rows(query, k[part, heads], v[part, heads], scale)
        yield got, exact, energy


def _agreement(got: Tensor, exact: Tensor, energy: Tensor) -> Tensor:
    """[N] from rows [N, rows, D] and V's mean square [N]."""
    # In units of the largest element: squares of fp32 data near 1e30 would overflow.
    unit = torch.maximum(got.abs().amax((1, 2)), exact.abs().amax((1, 2)))
    unit = torch.where(unit > 0, unit, 1.0)
    o, e = got / unit[:, None, None], exact / unit[:, None, None]
    shared = e.mean(1, keepdim=True)
    spread = (o - o.mean(1, keepdim=True)).square() + (e - shared).square()
    floor = _OF_MEAN**2 * shared.square().sum((1, 2)) + _OF_VALUES**2 * (energy / unit / unit)
    error = (o - e).square().sum(2).mean(1)
    value = (1 - error / (spread.sum(2).mean(1) + floor)).clamp(min=0)
    value = torch.where((error > 0) & torch.isfinite(unit), value, 1.0)
    return torch.where(torch.isfinite(got).all((1, 2)), value, torch.nan)


def sample_rows(length: int, device: torch.device) -> Tensor:
    """The query rows that are looked at: int64 [SPREAD_ROWS + TAIL_ROWS] in 0..length - 1, made on `device`.

    One row of each of SPREAD_ROWS equal parts of the sequence, at the golden section's multiples inside its part: in a
    sequence of 2^n tokens a fixed place would always be the same row of a tile. Then TAIL_ROWS rows of the last tile,
    ending with the last row; ragged tails fail first. Repeats where there are fewer rows than that.
    """
    i = torch.arange(SPREAD_ROWS, device=device)
    spread = (i * 65536 + i * 40503 % 65536) * length // (SPREAD_ROWS * 65536)
    tail = (length - 1) % BLOCK + 1
    j = torch.arange(1, TAIL_ROWS + 1, device=device)
    return torch.cat((spread, length - tail + (j * tail + TAIL_ROWS - 1) // TAIL_ROWS - 1))


def sample_heads(heads: int, turn: int) -> slice:
    """At most HEADS evenly spaced heads of `heads`: others at each `turn`, all of them after heads / HEADS turns."""
    step = max(1, -(-heads // HEADS))
    return slice(turn % step, None, step)


def exact_rows(query: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(query k^T scale) v in fp32, and the mean square of V's rows.

    query: [N, rows, D] fp32. k, v: [B, H, Lkv, D] with B H = N, any strides, floating. Returns [N, rows, D] and [N],
    fp32. Keys come in chunks, so that no fp32 copy of a long K or V is made: TEMPORARY_BYTES at most.
    """
    n, rows, dim = query.shape
    length = k.shape[-2]
    maximum = query.new_full((n, rows, 1), -torch.inf)
    row_sum = query.new_zeros((n, rows, 1))
    acc = torch.zeros_like(query)
    energy = query.new_zeros(n)
    repeated: dict[int, Tensor] = {}
    for start, parts, size in _chunks(length, n, rows, dim):
        keys = slice(start, start + parts * size)
        if parts not in repeated:
            repeated = {parts: query[:, None].expand(n, parts, rows, dim).reshape(n * parts, rows, dim)}
        key = _fp32(k[..., keys, :]).view(n * parts, size, dim)
        # Unscaled operands hold 16-bit values, which TF32 (should it be allowed here) multiplies exactly.
        p = torch.baddbmm(key.new_empty(1), repeated[parts], key.mT, beta=0, alpha=scale)
        del key
        by_head = p.view(n, parts, rows, size)
        highest = torch.maximum(maximum, by_head.amax((1, 3))[..., None])
        by_head.sub_(highest[:, None]).exp_()
        value = _fp32(v[..., keys, :]).view(n * parts, size, dim)
        energy += torch.linalg.vector_norm(value.view(n, -1), dim=-1).square()
        rescale = torch.exp(maximum - highest)
        acc = acc * rescale + torch.bmm(p, value).view(n, parts, rows, dim).sum(1)
        row_sum = row_sum * rescale + by_head.sum((1, 3))[..., None]
        maximum = highest
        del value, p, by_head
    return acc / row_sum, energy / length


def _fp32(x: Tensor) -> Tensor:
    """A contiguous fp32 copy of `x`, in one pass."""
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)


def _chunks(length: int, n: int, rows: int, dim: int) -> Iterator[tuple[int, int, int]]:
    """(first key, products, keys of a product) of each chunk."""
    # K or V in fp32, scores, repeated queries and partial results: bytes for each key of all heads.
    each = 4 * n * (dim + rows + 2 * rows * dim / _SPLIT)
    most = max(1, int(TEMPORARY_BYTES / each) // _SPLIT)
    whole = length // _SPLIT
    for first in range(0, whole, most):
        yield first * _SPLIT, min(most, whole - first), _SPLIT
    if length % _SPLIT:
        yield whole * _SPLIT, 1, length % _SPLIT
