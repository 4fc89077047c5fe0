"""The kernels for RTX Blackwell on an H200, preparation and attention, where block-scaled MMAs and E2M1 conversions are
computed exactly by other instructions and the 8-bit kernels load as on Ada.

    CUTE_DSL_ARCH=sm_90a python kernels/build.py FOLDER --trial rtx        (once, where the compiler is)
    python benchmarks/rtx_on_sm90.py FOLDER [--json FILE]

and the preparation for B200 and B300, whose attention needs tcgen05, with `--trial datacenter` and `--as sm_103a`.

Two tables. Images: random shapes, plans, memory layouts and 16-bit types; the share of numbers that differ from the
torch reference of the images (ties of rounding fall to either side), and the largest difference of a second-level or
row scale. Self-test: the probe of single instructions, then every family that the launcher would ask a card for,
through the launcher itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("vc_pack", ROOT / "tools" / "pack.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.load_pack()

from vc_attention.benchmarks.preparation_checks import LAYOUTS, must, tensors  # noqa: E402
from vc_attention.kernels import FAITHFUL, FAST, FOUR_BIT, Reason  # noqa: E402
from vc_attention.kernels.cute import reference, reference_mma8, reference_nvfp4  # noqa: E402
from vc_attention.kernels.launch import attend, call, prepare, probe, selftest  # noqa: E402
from vc_attention.kernels.launch.loader import Library, load_library  # noqa: E402
from vc_attention.kernels.plan import BLOCK  # noqa: E402

ARCH = "sm_120a"
#: Plans whose images are compared, by the architecture that the kernels are for.
PLANS = {
    "sm_120a": (FAST, FAITHFUL, FOUR_BIT),
    "sm_103a": (replace(FAST, scores="fp8"), replace(FAITHFUL, scores="fp8")),
}
REFERENCES = {"sm_120a": reference_mma8, "sm_103a": reference}
#: Bytes of an image that may differ: a group of 16 that is a tie changes nine of them, a mean that is one its block.
SHARE = {"q": 2e-3, "k": 2e-2, "v": 2e-2}
#: Largest multiple of a scale of K, and what rounding may leave of a single key, to its largest element.
TOP = {"int8": 127.0, "fp8": 448.0, "nvfp4": 448.0 * 6}
NOISE = 1e-6
#: Relative difference of a scale.
SCALE = 2e-4


def compare(library: Library, seed: int) -> dict:
    """One random case: its shape, the share of differing bytes of each image, the largest difference of scales."""
    dice = random.Random(seed)
    arch = library.manifest.arch
    plan = dice.choice(PLANS[arch])
    if dice.random() < 0.6:
        plan = dice.choice((plan.without_smoothing(), replace(plan, key_means=True)))
    dtype = dice.choice((torch.bfloat16, torch.float16))
    shape = (dice.randint(1, 2), dice.randint(1, 4), int(2 ** dice.uniform(0, 12)), int(2 ** dice.uniform(0, 12)))
    q, k, v = tensors(*shape, dice.choice(LAYOUTS), dtype, seed)
    labels = None
    if dice.random() < 0.5:
        generator = torch.Generator("cuda").manual_seed(seed)
        labels = torch.randint(99, (*shape[:2], shape[3]), device="cuda", generator=generator).to(torch.uint8)
    ours = must(prepare.prepare(library, q, k, v, plan, labels))
    expected = reference_nvfp4 if plan.scores == "nvfp4" else REFERENCES[arch]
    theirs = expected.prepare(q, k, v, plan, labels if plan.demean else None)
    residual = None
    if shape[3] == 1:
        # A single key is its own mean. What rounding leaves of it has no codes or scale to compare, but must be small.
        scales = torch.where(ours.ks == 1, 0.0, ours.ks)  # nothing but zeros has a scale of 1
        residual = float(scales.max()) * TOP[plan.scores] / float(k.abs().max())
        ours, theirs = (replace(x, k=torch.zeros_like(x.k), ks=torch.ones_like(x.ks)) for x in (ours, theirs))
    differing = {}
    for name in SHARE:
        a, b = (getattr(x, name).view(torch.uint8) for x in (ours, theirs))
        if name == "k" and arch == "sm_103a":
            # A block without a key, which an image of 256 may have: one key again and again, or the block before.
            a, b = (x.reshape(len(a), -1, BLOCK * 128)[:, : -(-shape[3] // BLOCK)] for x in (a, b))
        differing[name] = float((a != b).float().mean())
    off = 0.0
    for name in ("qs", "ks", "sv"):
        a, b = getattr(ours, name), getattr(theirs, name)
        off = max(off, float(((a - b).abs() / b.abs().clamp_min(1e-3)).max()))
    # A few ties in a small image are a large share.
    within = off <= SCALE and all(differing[n] <= max(SHARE[n], 200 / getattr(ours, n).numel()) for n in SHARE)
    within = within and (residual is None or residual <= NOISE)
    return {"seed": seed, "plan": plan.encode(), "shape": shape, "dtype": str(dtype)[6:], "differing": differing,
            "scales": off, "residual": residual, "within": within}  # fmt: skip


def self_test(library: Library) -> str | None:
    """What is wrong in the launcher's own probe and test of every family, or None."""

    def attention(q, k, v, plan, labels, scale):
        return call.attention_on(library, q, k, v, plan, labels, scale)

    cases = selftest.cases(lambda plan, dtype: attend.kernel_name(plan, dtype, ARCH) in library.manifest.kernels)
    print(f"self-test: {len(cases)} families and types")
    return probe.problem(library, torch.device("cuda", 0)) or selftest.problem(attention, cases, "cuda:0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", type=Path, help="folder of kernels/build.py --trial rtx")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--as", dest="arch", choices=PLANS, default=ARCH, help="the architecture that they are for")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no NVIDIA GPU that torch can use.")
        return 2
    library = load_library(arguments.kernels, torch.device("cuda", 0))
    if isinstance(library, Reason):
        print(library.text)
        return 2
    # They run on this card, and the launcher is to treat them as those of the other one.
    library.manifest = replace(library.manifest, arch=arguments.arch)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| seed | plan | B, H, Lq, Lkv | type | q | k | v | scales | |\n|---|---|---|---|---|---|---|---|---|")
    rows = []
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        row = compare(library, seed)
        rows.append(row)
        plan = row["plan"].split(",")
        words = " ".join(x.split("=")[1] for x in plan[:3]) + "".join(f" {x[:-2]}" for x in plan[3:5] if x[-1] == "1")
        shares = " | ".join(f"{row['differing'][name]:.1e}" for name in SHARE)
        verdict = "" if row["within"] else "FAIL"
        if row["residual"] is not None:
            verdict += f" one key: {row['residual']:.1e} of it is left"
        print(f"| {seed} | {words} | {', '.join(map(str, row['shape']))} | {row['dtype']} | {shares} "
              f"| {row['scales']:.1e} | {verdict} |", flush=True)  # fmt: skip
    problem = self_test(library) if arguments.arch == ARCH else None
    failures = sum(not row["within"] for row in rows)
    tested = f"self-test: {problem or 'passed'}\n\n" if arguments.arch == ARCH else ""
    print(f"{tested}{len(rows)} cases of images, {failures} failures")
    if arguments.json:
        arguments.json.write_text(json.dumps({"cases": rows, "failures": failures, "self_test": problem}, indent=1))
    return 1 if failures or problem else 0


if __name__ == "__main__":
    raise SystemExit(main())
