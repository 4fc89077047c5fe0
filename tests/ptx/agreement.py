"""The interpreter against a GPU of compute capability 9.0: the same kernels on the same inputs, output bits compared.

    CUTE_DSL_ARCH=sm_90a python kernels/build.py FOLDER --ptx        (needs the compiler, no GPU)
    python tests/ptx/agreement.py --kernels FOLDER [--json FILE] [--save OUTPUTS]      (needs the GPU, no compiler)
    python tests/ptx/agreement.py --kernels FOLDER --against OUTPUTS                   (needs neither)

Prints a table: elements of each output that are equal, how many representable values the others are apart at most, and
the relative L2 difference. Preparation should agree in every byte but for rounding ties of its reciprocals, attention
in nearly every bit: the interpreter cuts the sums of FP8 wgmma as silicon does (`--exact` shows what it gives without).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

HERE = Path(__file__).resolve().parent


def load_packages() -> None:
    """Make `ptx` and `vc_attention` importable, as the tests' conftest files do."""
    if "ptx" not in sys.modules:
        package = types.ModuleType("ptx")
        package.__path__ = [str(HERE)]
        sys.modules["ptx"] = package
    if "vc_attention" not in sys.modules:
        spec = importlib.util.spec_from_file_location("_pack_loader", HERE.parents[1] / "tools" / "pack.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.load_pack()


load_packages()

import numpy as np  # noqa: E402 - after the packages can be found
import torch  # noqa: E402
from ptx import on_torch  # noqa: E402
from torch import Tensor  # noqa: E402
from vc_attention.kernels.cute import reference  # noqa: E402
from vc_attention.kernels.cute.config import configs  # noqa: E402
from vc_attention.kernels.plan import Plan  # noqa: E402

#: (batch, heads, Lq, Lkv) of each comparison.
SHAPES = ((1, 1, 130, 600), (1, 2, 40, 1300))
#: What attention's inputs and outputs are called in the table, and the images of preparation.
IMAGES = ("q", "qs", "k", "ks", "v", "sv", "mu", "qb", "km")


@dataclass(frozen=True)
class Row:
    """One output of one launch. steps: representable values apart, at most."""

    what: str
    shape: str
    elements: int
    equal: int
    steps: int
    relative: float


def compare(what: str, shape: tuple, found: Tensor, expected: Tensor) -> Row:
    """Both on the CPU, of one dtype; uint8 counts as E4M3."""
    a, b = (ordered(x) for x in (found, expected))
    values = [x.view(torch.float8_e4m3fn).double() if x.dtype == torch.uint8 else x.double() for x in (found, expected)]
    relative = float((values[0] - values[1]).norm() / values[1].norm().clamp_min(1e-30))
    apart = np.abs(a - b)
    return Row(what, "x".join(map(str, shape)), apart.size, int((apart == 0).sum()), int(apart.max()), relative)


def ordered(x: Tensor) -> np.ndarray:
    """Integers in the order of the values, one apart for neighbours."""
    if x.dtype == torch.int8:
        return x.numpy().astype(np.int64).ravel()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    size = 8 * x.element_size()
    raw = x.contiguous().view(bits).numpy().astype(np.int64).ravel() & ((1 << size) - 1)
    sign = 1 << (size - 1)
    return np.where(raw >= sign, sign - raw, raw)


def inputs(shape: tuple, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v [B, H, L, 128] on the CPU; V has means of its blocks."""
    b, h, lq, lkv = shape
    g = torch.Generator().manual_seed(lq + lkv)
    q, k, v = (torch.randn(b, h, n, 128, generator=g) for n in (lq, lkv, lkv))
    v = v + torch.randn(b, h, -(-lkv // 128), 128, generator=g).repeat_interleave(128, 2)[:, :, :lkv]
    return [x.to(dtype) for x in (q, k, v)]


#: Fraction bits that Hopper's FP8 tensor cores keep: of 11 to 15, the one that gives the bits of an H200.
FRACTION_BITS = 13
Attend = Callable[[object, Plan, torch.dtype], Tensor]
Prepare = Callable[[Tensor, Tensor, Tensor, Plan, "Tensor | None"], object]


def rows(
    folder: Path, attend: Attend, prepare: Prepare | None, shapes=SHAPES, kernels=None, bits: int | None = None
) -> Iterator[Row]:
    """Compare what `attend` and `prepare` give with the interpreter, for every attention kernel and every plan.

    kernels: configs of the attention kernels to compare; all of them if None. bits: fraction bits of FP8 sums
    (`machine.Options`). Without `prepare` attention alone is compared.
    """
    for shape in shapes:
        for config in kernels or configs():
            plan = Plan(probability=config.probability, demean=config.demean, key_means=config.key_means)
            dtype = torch.bfloat16 if config.output == "bf16" else torch.float16
            q, k, v = inputs(shape, dtype)
            images = reference.prepare(q, k, v, plan)
            library = on_torch.InterpretedLibrary(folder, fp8_fraction_bits=bits)
            ours = on_torch.attend(library, images, plan, dtype)
            yield compare(config.name, shape, ours, attend(images, plan, dtype))
        if prepare is None:
            continue
        for plan in (Plan(), Plan(key_means=True), Plan().without_smoothing()):
            q, k, v = inputs(shape, torch.bfloat16)
            labels = torch.arange(shape[3]).remainder(7).to(torch.uint8).expand(*shape[:2], -1).contiguous()
            mine = on_torch.prepare(on_torch.InterpretedLibrary(folder), q, k, v, plan, labels)
            theirs = prepare(q, k, v, plan, labels)
            for name in IMAGES:
                if getattr(mine, name) is not None:
                    means = "+".join(["v"] * plan.demean + ["k"] * plan.key_means) or "none"
                    yield compare(f"image {name}, means {means}", shape, getattr(mine, name), getattr(theirs, name))


def on_gpu(folder: Path) -> tuple[Attend, Prepare]:
    """`attend` and `prepare` of the cubins in `folder` on the GPU, with CPU tensors in and out."""
    from dataclasses import replace

    from vc_attention.kernels.launch import attend as attend_module
    from vc_attention.kernels.launch import prepare as prepare_module
    from vc_attention.kernels.launch.loader import load_library
    from vc_attention.kernels.reasons import Reason

    if not torch.cuda.is_available():
        raise SystemExit("not run: this comparison needs a GPU of compute capability 9.0.")
    library = load_library(folder, torch.device("cuda"))
    if isinstance(library, Reason):
        raise SystemExit(f"not run: {library.text}")

    def moved(images, device):
        tensors = {f.name: getattr(images, f.name) for f in fields(images)}
        return replace(images, **{n: x.to(device) for n, x in tensors.items() if isinstance(x, Tensor)})

    def attend(images, plan, dtype):
        out = torch.empty((images.batch, images.lq, images.heads, 128), dtype=dtype, device="cuda")
        reason = attend_module.attend(moved(images, "cuda"), plan, out, folder=folder)
        if reason is not None:
            raise SystemExit(f"not run: {reason.text}")
        return out.cpu()

    def prepare(q, k, v, plan, labels):
        images = prepare_module.prepare(library, q.cuda(), k.cuda(), v.cuda(), plan, labels.cuda())
        if isinstance(images, Reason):
            raise SystemExit(f"not run: {images.text}")
        return moved(images, "cpu")

    return attend, prepare


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare interpreted kernels with a GPU, bit by bit.")
    parser.add_argument("--kernels", type=Path, required=True, help="folder of kernels/build.py --ptx")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--save", type=Path, help="also write the GPU's attention outputs to this file (torch.save)")
    parser.add_argument("--against", type=Path, help="compare with the outputs in this file, instead of a GPU's")
    parser.add_argument("--exact", action="store_true", help="sum FP8 products exactly, as no tensor core does")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    outputs: list[Tensor] = []
    if arguments.against:
        saved = iter(torch.load(arguments.against))
        attend, prepare = lambda images, plan, dtype: next(saved), None
    else:
        attend, prepare = on_gpu(arguments.kernels)
    bits = None if arguments.exact else FRACTION_BITS

    def kept(images, plan, dtype):
        outputs.append(attend(images, plan, dtype))
        return outputs[-1]

    print("| output | B x H x Lq x Lkv | elements | equal | steps apart | relative L2 |\n|---|---|---|---|---|---|")
    for row in rows(arguments.kernels, kept, prepare, bits=bits):
        found.append(asdict(row))
        share = row.equal / row.elements
        print(
            f"| {row.what} | {row.shape} | {row.elements} | {share:.6f} | {row.steps} | {row.relative:.2e} |",
            flush=True,
        )
    if arguments.save:
        torch.save(outputs, arguments.save)
    if arguments.json:
        device = torch.cuda.get_device_name() if prepare else str(arguments.against)
        arguments.json.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
