"""The NVFP4 attention kernel for sm_120 on an H200, with the instructions that only sm_120 has computed exactly.

    CUTE_DSL_ARCH=sm_90a python tests/support/nvfp4_build.py FOLDER emulated       (once, where the compiler is)
    python benchmarks/nvfp4_on_sm90.py FOLDER [--count 50] [--seed 0] [--save FILE] [--json FILE]

Random shapes, plans and output types; images come from the torch reference. Each result is compared with exact
attention in fp64, and its error with the specification's for the same plan: at most 1.1 times, or the rounding of the
output. `--save` keeps images and outputs of the small cases, which `tests/ptx/replay_nvfp4.py` runs in the interpreter.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("vc_pack", ROOT / "tools" / "pack.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.load_pack()

from vc_attention.kernels import FOUR_BIT, Plan, Reason  # noqa: E402
from vc_attention.kernels.cute import layouts_nvfp4 as lo  # noqa: E402
from vc_attention.kernels.cute.config_nvfp4 import config_of  # noqa: E402
from vc_attention.kernels.cute.reference_nvfp4 import prepare  # noqa: E402
from vc_attention.kernels.launch.images import Images  # noqa: E402
from vc_attention.kernels.launch.loader import Library, load_library  # noqa: E402
from vc_attention.kernels.spec.attention import attention as spec_attention  # noqa: E402

PLANS = {"none": FOUR_BIT.without_smoothing(), "v": FOUR_BIT, "v_k": replace(FOUR_BIT, key_means=True)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = lo.HEAD_DIM**-0.5
#: The interpreter takes a third of a second for a tile of 128 x 128.
LARGEST_SAVED = 12

Attention = Callable[[Images, Plan, str], Tensor]


def on_the_card(library: Library) -> Attention:
    """Attention of prepared images by a kernel of `library`: [B, H, Lq, 128]."""

    def attention(images: Images, plan: Plan, output: str) -> Tensor:
        config = config_of(plan, output)
        assert config is not None
        kernel = library.kernel(replace(config, emulated=True).name)
        if isinstance(kernel, Reason):
            raise RuntimeError(kernel.text)
        shape = (images.batch, images.lq, images.heads, lo.HEAD_DIM)
        # Not a number wherever the kernel writes nothing.
        out = torch.full(shape, math.nan, dtype=DTYPES[output], device=images.q.device)
        tensors = (images.q, images.k, images.v, images.qs, images.ks, images.sv, images.mu, images.qb, images.km, out)
        numbers = (images.lq, images.lkv, images.heads, SCALE * math.log2(math.e))
        grid = (lo.query_tiles(images.lq), images.batch * images.heads, 1)
        reason = kernel.launch(grid, (*tensors, *numbers))
        if reason is not None:
            raise RuntimeError(reason.text)
        torch.cuda.synchronize()
        return out.transpose(1, 2)

    return attention


def compare(attention: Attention, device: str, seed: int, longest: int = 4000) -> dict:
    """One random case: its shape, the errors, and whether they are within bounds; with images and output under "saved"
    if it is small."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    name, output = dice.choice(list(PLANS)), dice.choice(list(DTYPES))
    batch, heads = dice.randint(1, 2), dice.randint(1, 4)
    lq, lkv = (min(longest, int(2 ** dice.uniform(0, 12))) for _ in range(2))
    q, k, v = (torch.randn(batch, heads, n, lo.HEAD_DIM, generator=generator) for n in (lq, lkv, lkv))
    q *= 2 ** dice.uniform(-1, 3)
    v += dice.choice((0.0, 1.0, 8.0)) * torch.randn(batch, heads, 1, lo.HEAD_DIM, generator=generator)
    q, k, v = (x.to(device) for x in (q, k, v))
    labels = None
    if dice.random() < 0.5:
        labels = torch.randint(16, (batch, heads, lkv), generator=generator).to(torch.uint8).to(device)
    plan = PLANS[name]
    images = prepare(q, k, v, plan, labels)
    out = attention(images, plan, output)
    exact = torch.softmax(q.double() @ k.double().transpose(2, 3) * SCALE, -1) @ v.double()
    spec = spec_attention(q, k, v, plan, labels).to(DTYPES[output])
    norm = float(exact.norm())
    error, spec_error = (float((x.double() - exact).norm()) / norm for x in (out, spec))
    found = {
        "seed": seed,
        "plan": name,
        "output": output,
        "shape": [batch, heads, lq, lkv],
        "error": error,
        "spec_error": spec_error,
        "within": bool(torch.isfinite(out).all()) and error <= 1.1 * spec_error + 2.0**-10,
    }
    if batch * heads * lo.query_tiles(lq) * lo.key_tiles(lkv) <= LARGEST_SAVED:
        tensors = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in vars(images).items()}
        found["saved"] = {"images": tensors, "out": out.cpu()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", type=Path, help="folder with the emulated kernels and their manifest")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--save", type=Path, help="file for images and outputs of the small cases")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no NVIDIA GPU that torch can use.")
        return 2
    library = load_library(arguments.kernels, torch.device("cuda", torch.cuda.current_device()))
    if isinstance(library, Reason):
        print(library.text)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| seed | plan | B, H, Lq, Lkv | output | error | specification's | |\n|---|---|---|---|---|---|---|")
    attention, rows, saved = on_the_card(library), [], []
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        row = compare(attention, "cuda", seed)
        kept = row.pop("saved", None)
        if kept is not None:
            saved.append({**row, **kept})
        rows.append(row)
        shape = ", ".join(map(str, row["shape"]))
        verdict = "" if row["within"] else "FAIL"
        print(
            f"| {seed} | {row['plan']} | {shape} | {row['output']} | {row['error']:.5f} | {row['spec_error']:.5f} "
            f"| {verdict} |",
            flush=True,
        )
    failures = sum(not row["within"] for row in rows)
    print(f"\n{len(rows)} cases, {failures} failures, {len(saved)} small enough for the interpreter")
    if arguments.save:
        torch.save(saved, arguments.save)
    if arguments.json:
        arguments.json.write_text(json.dumps({"cases": rows, "failures": failures}, indent=1), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
