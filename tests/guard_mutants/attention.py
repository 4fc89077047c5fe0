"""One call: values, layouts, dtypes, what is declined, and what is handed on."""

from __future__ import annotations

from .mutant import CALLS, FAMILIES, LAYOUT, VALUES, Mutant

MUTANTS = (
    Mutant(
        "V extremes",
        "a zero amax gets scale 1, not 0",
        "kernels/spec/formats.py",
        *("torch.where(scale > _TINY, scale, torch.ones_like(scale))", "scale"),
        (VALUES,),
    ),
    Mutant(
        "V extremes",
        "rows without mass give 0, not 0 / 0",
        "kernels/spec/attention.py",
        *("torch.where(row_sum > 0, acc / row_sum, 0.0)", "(acc / row_sum)"),
        ("tests/kernels/test_attention.py",),
    ),
    Mutant(
        "ragged tails",
        "INT8 blocks drop their padding",
        "kernels/spec/values.py",
        *("pad(residual, (0, 0, 0, -length % block))", "pad(residual, (0, 0, 0, -length % block), value=9.0)"),
        (VALUES,),
    ),
    Mutant(
        "pad rows in a block mean",
        "the ragged block is divided by its own tokens",
        "kernels/spec/smoothing.py",
        *(
            "parts.append(_means(x[..., None, whole:, :], clip))",
            "parts.append(_means(x[..., None, whole:, :], clip) * ((length - whole) / block))",
        ),
        (VALUES,),
    ),
    Mutant(
        "pad rows in a block mean",
        "the restored mean weighs as much as its P",
        "kernels/spec/attention.py",
        *("acc = acc + r * values.means", "acc = acc + BLOCK * values.means"),
        (VALUES,),
    ),
    Mutant(
        "pad rows in the softmax",
        "K and V move together",
        "kernels/spec/attention.py",
        *("k, v = k.gather(-2, order), v.gather(-2, order)", "k = k.gather(-2, order)"),
        (VALUES, FAMILIES),
    ),
    Mutant(
        "32-bit offsets",
        "strides are never taken modulo 2^31",
        "kernels/spec/attention.py",
        *(
            "k[head].to(torch.float32),",
            "k.as_strided(k.shape, tuple(s % 2**24 for s in k.stride()), k.storage_offset())[head].to(torch.float32),",
        ),
        (LAYOUT, CALLS),
    ),
    Mutant(
        "strides",
        "views are read through their strides",
        "kernels/spec/attention.py",
        *(
            "v[head].to(torch.float32),",
            "v.as_strided(v.shape, torch.empty(v.shape, device='meta').stride(), v.storage_offset())[head].float(),",
        ),
        (LAYOUT,),
    ),
    Mutant(
        "dtypes",
        "mixed q, k, v are cast before the kernel",
        "nodes/engine.py",
        *("t if t.dtype == route.dtype else t.to(route.dtype)", "t"),
        (CALLS,),
    ),
    Mutant(
        "dtypes",
        "the output goes back to q's dtype",
        "nodes/engine.py",
        *("out = out if out.dtype == given else out.to(given)", "pass"),
        (CALLS,),
    ),
    Mutant(
        "dtypes",
        "unknown dtypes are declined",
        "nodes/eligibility.py",
        *('        return REASONS["dtype"]', "        pass"),
        (CALLS,),
        also=(("kernels/registry.py", "if dtype not in _DTYPES:", "if False:"),),
    ),
    Mutant(
        "masks dropped",
        "a masked call is declined",
        "nodes/eligibility.py",
        *("call.mask is not None or", "False or"),
        (CALLS,),
    ),
    Mutant(
        "head_dim",
        "other head dimensions are declined",
        "nodes/eligibility.py",
        *("if call.head_dim not in HEAD_DIMS:", "if False:"),
        (CALLS,),
    ),
    Mutant(
        "short calls",
        "min_tokens is honoured",
        "nodes/eligibility.py",
        *("if call.lkv < options.min_tokens:", "if False:"),
        (CALLS,),
    ),
    Mutant(
        "low_precision_attention",
        "a call that asks for full precision is declined",
        "nodes/eligibility.py",
        *('keywords.get("low_precision_attention", True) is False', "False"),
        (CALLS,),
    ),
    Mutant(
        "shared keys",
        "GQA is declined",
        "nodes/eligibility.py",
        *('if keywords.get("enable_gqa"):', "if False:"),
        (CALLS,),
        also=(("nodes/eligibility.py", "if not q.shape[1] == k.shape[1] == v.shape[1] == call.heads:", "if False:"),),
    ),
    Mutant(
        "inputs mutated",
        "V is smoothed in a copy",
        "kernels/spec/smoothing.py",
        *(
            "return x.to(torch.float32) - expand_blocks(means, block, length)",
            "return x.to(torch.float32).sub_(expand_blocks(means, block, length))",
        ),
        (LAYOUT, CALLS),
    ),
    Mutant(
        "inputs mutated",
        "K is smoothed in a copy",
        "kernels/spec/scores.py",
        *("return k - k.mean(dim=-2, keepdim=True)", "return k.sub_(k.mean(dim=-2, keepdim=True))"),
        (CALLS,),
    ),
    Mutant(
        "unknown keywords",
        "keywords are passed on",
        "nodes/hook.py",
        *(
            "        if previous is None:\n            return func(*args, **kwargs)",
            "        if previous is None:\n            kwargs.pop('from_the_future', None)\n"
            "            return func(*args, **kwargs)",
        ),
        (CALLS,),
    ),
    Mutant(
        "torch.compile",
        "the hook is opaque to dynamo",
        "nodes/hook.py",
        *("hooked: Any = torch.compiler.disable(override)", "hooked: Any = override"),
        ("tests/comfy/test_compile.py",),
    ),
    Mutant(
        "torch.compile",
        "the fake has the real strides",
        "kernels/ops.py",
        *("return q.new_empty((b, lq, h, d)).transpose(1, 2)", "return q.new_empty((b, h, lq, d))"),
        (LAYOUT,),
    ),
)
