"""Checks of the preparation and grouping kernels on a GPU, against the torch reference and the specification.

Each takes the loaded kernels and prints what it found. `benchmarks/preparation.py` and the tests marked `gpu` run them.
"""

from __future__ import annotations

import itertools

import torch

from ..kernels.cute import layouts as lo
from ..kernels.cute import reference
from ..kernels.launch import prepare as prep
from ..kernels.launch.attend import attend
from ..kernels.plan import FAITHFUL, Plan
from ..kernels.reasons import Reason
from ..kernels.spec import grouping as spec_grouping
from ..kernels.spec.attention import attention as spec_attention

PLANS = {"demean": Plan(), "plain": Plan().without_smoothing(), "key_means": Plan(key_means=True)}
SHAPES = ((1, 2, 1, 1), (1, 2, 128, 128), (2, 3, 200, 333), (1, 2, 257, 256), (1, 2, 1000, 1025), (1, 2, 130, 129),
          (1, 3, 64, 2049), (1, 1, 4040, 4040))  # fmt: skip
LAYOUTS = ("heads", "tokens", "fused", "padded")


def must(value):
    """`value`, or an error that says why a kernel did not run."""
    if isinstance(value, Reason):
        raise SystemExit(f"not run: {value.code}: {value.text}")
    return value


def tensors(b, h, lq, lkv, layout, dtype, seed=0, device="cuda"):
    """Random q, k, v [B, H, L, 128] with channel offsets and clusters, in one of four memory layouts."""
    g = torch.Generator(device).manual_seed(seed)
    out = []
    for n, length in enumerate((lq, lkv, lkv)):
        x = torch.randn(b, h, length, 128, device=device, generator=g)
        x += 3 * torch.randn(b, h, 1, 128, device=device, generator=g) * (n > 0)
        centres = torch.randn(b, h, 16, 128, device=device, generator=g)
        pick = torch.randint(16, (b, h, length), device=device, generator=g)
        x += 1.5 * centres.gather(2, pick[..., None].expand(-1, -1, -1, 128))
        out.append(in_layout(x.to(dtype), layout, n))
    return out


def in_layout(x, layout, n=0):
    """The values of `x` [B, H, L, 128] in another memory layout, NaN around them; `n`: of q, k, v, which one it is."""
    b, h, length, _ = x.shape
    if layout == "tokens":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        wide = x.new_full((b, length, 3, h, 128), torch.nan)
        wide[:, :, n] = x.transpose(1, 2)
        return wide[:, :, n].transpose(1, 2)
    if layout == "padded":
        wide = x.new_full((b, h, length + 3, 144), torch.nan)
        wide[:, :, 2 : length + 2, 8:136] = x
        return wide[:, :, 2 : length + 2, 8:136]
    return x


def poison(*arguments):
    """`allocate` whose tensors hold 0xA5 in every byte."""
    images = _allocate(*arguments)
    for x in vars(images).values():
        if isinstance(x, torch.Tensor):
            x.view(torch.uint8).fill_(0xA5)
    return images


_allocate = prep.allocate


def e4m3_steps(a, b):
    """How many representable values lie between two E4M3 byte tensors."""

    def rank(x):
        x = x.to(torch.int32)
        return torch.where(x >= 128, 128 - x, x)

    return (rank(a) - rank(b)).abs()


def tokens_of(image, lkv):
    """Codes [BH, Lkv, 128] of a V image, and the rest of it with those bytes cleared."""
    flat = image.flatten(2).clone()
    at = torch.arange(lkv, device=image.device)
    tile, offset = at // 256, lo.v_offset(torch.arange(128, device=image.device)[None], (at % 256)[:, None])
    codes = flat[:, tile[:, None], offset]
    flat[:, tile[:, None], offset] = 0
    return codes, flat


def means_of(image, lkv):
    """Means [BH, Lkv, 128] of a mu image, for each token."""
    block = torch.arange(lkv, device=image.device) // 128
    offset = lo.mu_offset(torch.arange(128, device=image.device)[None], (block % 8)[:, None])
    return image.flatten(2)[:, (block // 8)[:, None], offset]


def compare_v(ours, theirs, lkv):
    """(differing codes, codes, most steps apart), and -1 for any difference outside the codes.

    Where the stored means differ (their bf16 rounding fell to different sides) residuals differ by design.
    """
    (a, rest_a), (b, rest_b) = tokens_of(ours.v, lkv), tokens_of(theirs.v, lkv)
    if not torch.equal(rest_a, rest_b):
        return -1, a.numel(), float("inf")
    steps = e4m3_steps(a, b)
    if ours.mu is not None:
        steps = torch.where(means_of(ours.mu, lkv) == means_of(theirs.mu, lkv), steps, 0)
    return int((steps > 0).sum()), a.numel(), float(steps.max())


def compare(name, ours, theirs, lkv):
    """(differing elements, elements, largest difference) of one image; the difference in codes or relative."""
    if name == "k" and lkv <= ours.shape[1] * 256 - 128:
        # The wholly padded block repeats the block before it, where the reference repeats one key.
        ours, theirs = (x.flatten(1, 2) for x in (ours, theirs))
        if not torch.equal(ours[:, -128:], ours[:, -256:-128]):
            return -1, ours.numel(), float("inf")
        ours, theirs = ours[:, :-128], theirs[:, :-128]
    if name in ("q", "k") and theirs.dtype == torch.uint8:
        steps = e4m3_steps(ours, theirs)
        return int((steps > 0).sum()), steps.numel(), float(steps.max())
    a, b = ours.to(torch.float64), theirs.to(torch.float64)
    if a.isnan().any():
        return -1, a.numel(), float("inf")
    if name in ("q", "k"):
        return int((a != b).sum()), a.numel(), float((a - b).abs().max())
    return int((a != b).sum()), a.numel(), float(((a - b).abs() / b.abs().clamp_min(1e-3)).max())


#: Largest difference of an element, and largest share of differing elements (rounding ties; a reciprocal, no division).
LIMITS = {"q": (1, 1e-3), "k": (1, 1e-2), "v": (1, 5e-3), "qs": (1e-6, 1), "ks": (2e-4, 1), "sv": (1e-6, 1),
          "mu": (8e-3, 1e-2), "qb": (0, 0), "km": (8e-3, 1)}  # fmt: skip
# ks, km: differences of nearly equal numbers (a block of one key, a head of one block), relative to 1e-3 at least.


def check(library):
    """All cases; prints failures and totals by image."""
    prep.allocate = poison
    totals, failed, cases = {}, 0, 0
    grid = itertools.product(SHAPES, PLANS.items(), (torch.bfloat16, torch.float16), (False, True))
    for n, ((b, h, lq, lkv), (plan_name, plan), dtype, grouped) in enumerate(grid):
        layout = LAYOUTS[n % 4]
        q, k, v = tensors(b, h, lq, lkv, layout, dtype, n)
        g = torch.Generator("cuda").manual_seed(n)
        labels = torch.randint(13, (b, h, lkv), device="cuda", generator=g, dtype=torch.uint8) if grouped else None
        ours = must(prep.prepare(library, q, k, v, plan, labels))
        used = labels if plan.demean or plan.key_means else None
        theirs = reference.prepare(q, k, v, plan, used)
        torch.cuda.synchronize()
        cases += 1
        for name, (limit, share) in LIMITS.items():
            a, c = getattr(ours, name), getattr(theirs, name)
            if c is None:
                continue
            different, count, worst = compare_v(ours, theirs, lkv) if name == "v" else compare(name, a, c, lkv)
            total = totals.setdefault(name, [0, 0, 0.0])
            total[0] += different
            total[1] += count
            total[2] = max(total[2], worst)
            if different < 0 or worst > limit or different > max(share * count, 2):
                failed += 1
                if failed < 20:
                    print(f"FAIL {name} {(b, h, lq, lkv)} {layout} {plan_name} {dtype} grouped={grouped}: "
                          f"{different} of {count}, worst {worst:.3g}")  # fmt: skip
    for name, (different, count, worst) in totals.items():
        print(f"{name}: {different} of {count} elements differ ({different / count:.2e}), worst {worst:.3g}")
    print(f"images: {cases} cases, {failed} failures")
    prep.allocate = _allocate
    return {"cases": cases, "failures": failed, "totals": totals}


def check_layouts(library):
    """Element offsets beyond 2^31: the second batch of a fused view gives the bytes of its contiguous copy."""
    wide = torch.empty((2, 75600, 3, 40, 128), dtype=torch.bfloat16, device="cuda")
    for part in wide[1].split(8192):
        part.normal_()
    q, k, v = (wide[1:, :, n, 36:].transpose(1, 2) for n in range(3))
    far = (q.data_ptr() - wide.data_ptr()) // 2
    labels = torch.randint(256, (1, 4, 75600), device="cuda", dtype=torch.uint8)
    a = must(prep.prepare(library, q, k, v, Plan(key_means=True), labels))
    copies = [x.contiguous() for x in (q, k, v)]
    b = must(prep.prepare(library, *copies, Plan(key_means=True), labels))
    same = all(torch.equal(getattr(a, n).view(torch.uint8), getattr(b, n).view(torch.uint8)) for n in LIMITS)
    last = far + 75600 * 3 * 40 * 128
    print(f"64-bit offsets (elements {far} to {last}): {'equal' if same else 'DIFFERENT'}")
    return same


def energy_removed(v, order):
    """Share of V's energy that the means of 128-token blocks remove."""
    x = v.float()
    x = x.gather(2, order.long()[..., None].expand_as(x))
    whole = x.shape[2] // 128 * 128
    if not whole:
        return 0.0
    x = x[:, :, :whole].unflatten(2, (-1, 128))
    return float(1 - (x - x.mean(3, keepdim=True)).square().sum() / x.square().sum())


def check_grouping(library):
    """Sort: exact. Labels: against the specification on the same data, agreement and energy removed; twice the same."""
    ok, out = True, []
    for b, h, length, high in ((1, 2, 1, 1), (2, 3, 333, 7), (1, 2, 4097, 256), (1, 3, 32760, 128), (1, 1, 12288, 1)):
        labels = torch.randint(high, (b, h, length), device="cuda", dtype=torch.uint8)
        order = must(prep.token_order(library, labels))
        if not torch.equal(order.long(), torch.argsort(labels, dim=-1, stable=True)):
            ok = False
            print(f"FAIL order {(b, h, length, high)}")
    for b, h, length, groups, dtype in (
        (1, 2, 32760, 0, torch.bfloat16), (2, 2, 5000, 0, torch.float16), (1, 2, 300, 0, torch.bfloat16),
        (1, 1, 10, 16, torch.bfloat16), (1, 2, 9000, 37, torch.bfloat16), (1, 2, 75600, 0, torch.bfloat16),
    ):  # fmt: skip
        g = torch.Generator("cuda").manual_seed(length)
        k = 200
        centres = torch.randn(b, h, k, 128, device="cuda", generator=g)
        pick = torch.randint(k, (b, h, length), device="cuda", generator=g)
        v = torch.randn(b, h, length, 128, device="cuda", generator=g)
        v = (v + centres.gather(2, pick[..., None].expand_as(v))).to(dtype)
        labels, centroids = must(prep.group(library, v, groups))
        again, _ = must(prep.group(library, v, groups))
        spec_labels, spec_centroids = spec_grouping.group(v, groups)
        warm, _ = must(prep.group(library, v, 0, centroids))
        still, _ = must(prep.group(library, v, 0, centroids, False))
        spec_warm = spec_grouping.group(v, previous=centroids)[0]
        # Renumbering differs after a near tie in the chain, so centroids are matched by distance.
        match = torch.cdist(centroids, spec_centroids).argmin(-1)
        agree = float((match.gather(2, labels.long()) == spec_labels.long()).float().mean())
        warm_agree = float((warm == spec_warm).float().mean())
        every = (labels, spec_labels, warm, spec_warm)
        energies = [energy_removed(v, must(prep.token_order(library, x))) for x in every]
        same = torch.equal(labels, again) and torch.equal(still, warm)
        ok &= same and bool(centroids.isfinite().all()) and (length < 128 or energies[0] > 0.98 * energies[1] - 1e-3)
        line = (f"group {(b, h, length, groups)} {str(dtype)[6:]}: labels like the specification {agree:.4f}, warm "
                f"{warm_agree:.4f}; energy {energies[0]:.4f} spec {energies[1]:.4f}, warm {energies[2]:.4f} spec "
                f"{energies[3]:.4f}; repeatable {same}")  # fmt: skip
        out.append(line)
        print(line)
    print(f"grouping: {'ok' if ok else 'FAILED'}")
    return {"ok": ok, "lines": out}


def check_random(library, cases=150):
    """Random legal shapes, layouts, dtypes and plans, at most 2000 tokens; the number of cases that differ."""
    prep.allocate = poison
    g = torch.Generator().manual_seed(7)
    pick = lambda n: int(torch.randint(n, (1,), generator=g))  # noqa: E731
    failed = 0
    for n in range(cases):
        shape = (1 + pick(2), 1 + pick(3), 1 + pick(2000), 1 + pick(2000))
        plan = list(PLANS.values())[pick(3)]
        q, k, v = tensors(*shape, LAYOUTS[pick(4)], (torch.bfloat16, torch.float16)[pick(2)], 1000 + n)
        labels = torch.randint(1 + pick(256), (*shape[:2], shape[3]), dtype=torch.uint8).cuda() if pick(2) else None
        ours = must(prep.prepare(library, q, k, v, plan, labels))
        theirs = reference.prepare(q, k, v, plan, labels if plan.demean or plan.key_means else None)
        for name, (limit, share) in LIMITS.items():
            a, c = getattr(ours, name), getattr(theirs, name)
            if c is not None:
                result = compare_v(ours, theirs, shape[3]) if name == "v" else compare(name, a, c, shape[3])
                if result[0] < 0 or result[2] > limit or result[0] > max(share * result[1], 2):
                    failed += 1
                    print(f"FAIL {name} {shape} {plan.encode()}: {result}")
    prep.allocate = _allocate
    print(f"random shapes: {cases} cases, {failed} failures")
    return failed


def check_capture(library):
    """A captured graph, replayed on new data in its buffers, gives the bytes of a direct call; so does a stream."""
    q, k, v = tensors(1, 4, 3000, 3000, "fused", torch.bfloat16, 1)
    call = lambda: (x := must(prep.group(library, v)), must(prep.prepare(library, q, k, v, Plan(), x[0])))  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (labels, centroids), images = call()
    same = True
    for seed in (2, 3):
        for x, y in zip((q, k, v), tensors(1, 4, 3000, 3000, "fused", torch.bfloat16, seed), strict=True):
            x.copy_(y)
        graph.replay()
        (labels2, centroids2), direct = call()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _, aside = call()
        torch.cuda.synchronize()
        same &= torch.equal(labels, labels2) and torch.equal(centroids, centroids2)
        for other in (direct, aside):
            pairs = zip(vars(images).values(), vars(other).values(), strict=True)
            same &= all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs if torch.is_tensor(a))
    print(f"graph replay and side stream: {'equal' if same else 'DIFFERENT'}")
    return same


def check_call(library, folder):
    """Grouping, preparation and attention together: relative error against fp32 beside the specification's."""
    ok = True
    plans = {**PLANS, "faithful": FAITHFUL}
    for n, ((b, h, lq, lkv), (name, plan)) in enumerate(
        itertools.product(((1, 2, 515, 1100), (2, 1, 300, 2048), (1, 1, 1000, 129)), plans.items())
    ):
        q, k, v = tensors(b, h, lq, lkv, LAYOUTS[n % 4], torch.bfloat16, 50 + n)
        labels = None if name == "plain" else must(prep.group(library, v))[0]
        images = must(prep.prepare(library, q, k, v, plan, labels))
        out = torch.full((b, lq, h, 128), torch.nan, dtype=q.dtype, device="cuda")
        reason = attend(images, plan, out, folder=folder)
        if reason is not None:
            must(reason)
        exact = torch.softmax(q.double() @ k.double().transpose(-2, -1) * 128**-0.5, -1) @ v.double()
        ours, theirs = ((x.double() - exact).norm() / exact.norm()
                        for x in (out.transpose(1, 2), spec_attention(q, k, v, plan, labels)))  # fmt: skip
        good = bool(ours <= 1.1 * theirs)
        ok &= good
        print(f"call {(b, h, lq, lkv)} {name}: error {ours:.5f}, specification {theirs:.5f}{'' if good else ' FAIL'}")
    return ok
