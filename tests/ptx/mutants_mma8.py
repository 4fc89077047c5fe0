"""Deliberately broken copies of the 8-bit mma.sync kernels: what each breaks, and the PTX of it.

    CUTE_DSL_ARCH=sm_120a python tests/ptx/mutants_mma8.py FOLDER

compiles every mutant of that architecture into FOLDER/NUMBER.ptx, in one process.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BULK, ASYNC = "sm_120a", "sm_89"
#: (probability, demean, key_means)
PLAIN, MEANS, KEY_MEANS = ("expcast_wide", 0, 0), ("expcast_wide", 1, 0), ("exp2", 1, 1)
SHORT, LONG = (150, 300), (20, 1300)


class Mutant(NamedTuple):
    """One edit: in `file`, `old` (which must occur exactly once) becomes `new`. lengths: (Lq, Lkv) that show it."""

    fault: str
    arch: str
    plan: tuple[str, int, int]
    lengths: tuple[int, int]
    file: str
    old: str
    new: str


_ATTENTION, _PIPELINE, _SOFTMAX, _MMA = "attention_mma8.py", "pipeline_mma8.py", "softmax_mma8.py", "mma8.py"
_PRODUCT = """        scores = mma8.product(mma8.mma_int8, f.queries, keys, range(_KEY_TILES), Int32(MAGIC_BITS))
"""
_RELEASE = "        loader.release_keys(j)\n"
_VALUES = """            self.multiply_values(f, values, probabilities, rescale)
        loader.release_values(j)
"""

MUTANTS = (
    Mutant("rows of an A fragment exchanged", BULK, PLAIN, SHORT, _MMA,
           "[first[0], second[0], first[1], second[1]]", "[first[0], first[1], second[0], second[1]]"),
    Mutant("the second step multiplies the first step's B words", ASYNC, PLAIN, SHORT, _MMA,
           "words[i][2 * half : 2 * half + 2]", "words[i][0:2]"),
    Mutant("scores start from zero bits", ASYNC, PLAIN, SHORT, _ATTENTION,
           "range(_KEY_TILES), Int32(MAGIC_BITS)", "range(_KEY_TILES), Int32(0)"),
    Mutant("every warp reads the first 16 queries", BULK, PLAIN, SHORT, _ATTENTION,
           "query.to(Int64) * WARPS + warp", "query.to(Int64) * WARPS"),
    Mutant("every warp takes the first rows' scale", ASYNC, PLAIN, SHORT, _ATTENTION,
           "lo.QUERY_TILE + first_row)", "lo.QUERY_TILE)"),
    Mutant("all tiles take the first key scale", BULK, PLAIN, SHORT, _ATTENTION, "gKs[j]", "gKs[0]"),
    Mutant("rows beyond Lq are written", BULK, PLAIN, SHORT, _ATTENTION, "if row + 8 * r < lq:", "if row < lq:"),
    Mutant("O is not rescaled", ASYNC, PLAIN, SHORT, _ATTENTION,
           "f.acc[4 * i + e] * rescale[e // 2] + gain[e]", "f.acc[4 * i + e] + gain[e]"),
    Mutant("each lane has its own maximum", ASYNC, PLAIN, SHORT, _SOFTMAX, "quad_maximum(largest)", "largest"),
    Mutant("the bytes of P in another order", BULK, PLAIN, SHORT, _SOFTMAX,
           "for d in range(2) for c in range(2)]", "for c in range(2) for d in range(2)]"),
    Mutant("l is not rescaled", BULK, MEANS, LONG, _ATTENTION,
           "f.row_sum[r] = f.row_sum[r] * rescale[r]", "f.row_sum[r] = f.row_sum[r] * 1.0"),
    Mutant("means of the first buffer only", ASYNC, MEANS, LONG, _ATTENTION,
           "means[f.lane, i, group & 1]", "means[f.lane, i, 0]"),
    Mutant("low halves of the row sums are the high ones", BULK, MEANS, SHORT, _ATTENTION,
           "[*high, *low], [word, word]", "[*high, *high], [word, word]"),
    Mutant("row sums are restored twice", ASYNC, MEANS, LONG, _ATTENTION,
           "f.acc[4 * _SUMS + 2 * r + b] = Float32(0.0)", "f.acc[4 * _SUMS + 2 * r + b] = exact[b]"),
    Mutant("the bias of another block", BULK, KEY_MEANS, SHORT, _ATTENTION,
           "(f.lane & 28) + j % lo.MEAN_GROUP // 2", "(f.lane & 28) + j % 4"),
    Mutant("padded keys count in the row sums", ASYNC, KEY_MEANS, SHORT, _ATTENTION,
           "quad_sum(sums[r]) - Float32(missing) * padding", "quad_sum(sums[r])"),
    Mutant("the row sum lands in another block's column", BULK, KEY_MEANS, SHORT, _ATTENTION,
           "j % lo.MEAN_GROUP - 2 * (f.lane % 4)", "j % lo.MEAN_GROUP - (f.lane % 4)"),
    Mutant("K is released before it is read", BULK, PLAIN, SHORT, _ATTENTION, _PRODUCT + _RELEASE,
           _RELEASE + _PRODUCT),
    Mutant("V is released before it is read", BULK, PLAIN, SHORT, _ATTENTION, _VALUES,
           "            loader.release_values(j)\n" + _VALUES.splitlines(keepends=True)[0]),
    Mutant("V is not waited for", BULK, PLAIN, SHORT, _ATTENTION, "        loader.await_values(j)\n", ""),
    Mutant("seven of eight warps free a K tile", BULK, PLAIN, SHORT, _PIPELINE,
           "mbarrier_init(loader.k_empty + i, WARPS)", "mbarrier_init(loader.k_empty + i, WARPS - 1)"),
    Mutant("a V tile waits for nine warps", BULK, PLAIN, SHORT, _PIPELINE,
           "mbarrier_init(loader.v_empty + i, WARPS)", "mbarrier_init(loader.v_empty + i, WARPS + 1)"),
    Mutant("the bytes of the means are not expected", BULK, MEANS, SHORT, _PIPELINE,
           "extra = Int32(2 * lo.MU_ELEMENTS)", "extra = Int32(0)"),
    Mutant("the producer waits for the other phase", BULK, PLAIN, SHORT, _PIPELINE,
           "mbarrier_wait(loader.k_empty + stage, phase ^ 1)", "mbarrier_wait(loader.k_empty + stage, phase)"),
    Mutant("the barriers' start is not fenced", BULK, PLAIN, SHORT, _ATTENTION,
           "            cute.arch.sync_threads()\n", ""),
    Mutant("the next tile is requested before all warps are done", ASYNC, PLAIN, (150, 400), _PIPELINE,
           "        cute.arch.sync_threads()\n        self.request(j + 1)\n",
           "        self.request(j + 1)\n        cute.arch.sync_threads()\n"),
    Mutant("copies are not waited for", ASYNC, PLAIN, SHORT, _PIPELINE,
           "cp_async_wait_group(0)\n        cute.arch.sync_threads()\n        self", "sync_threads()\n        self"),
    Mutant("the tail of a V tile is not copied", ASYNC, PLAIN, SHORT, _PIPELINE,
           "for start in range(0, size, 16 * CONSUMERS)", "for start in range(0, size - 1024, 16 * CONSUMERS)"),
)  # fmt: skip


def compile_mutants(arch: str, folder: Path) -> None:
    """PTX of every mutant of `arch`, as FOLDER/NUMBER.ptx."""
    for number, mutant in enumerate(MUTANTS):
        if mutant.arch != arch:
            continue
        with tempfile.TemporaryDirectory() as place:
            copy = Path(place) / "kernels"
            shutil.copytree(ROOT / "kernels" / "cute", copy / "cute")
            shutil.copy(ROOT / "kernels" / "plan.py", copy)
            path = copy / "cute" / mutant.file
            text = path.read_text(encoding="utf-8")
            if text.count(mutant.old) != 1:
                raise ValueError(f"{mutant.fault}: {mutant.old!r} occurs {text.count(mutant.old)} times.")
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
            ptx = _compile(copy, mutant, Path(place) / "dump")
        (folder / f"{number}.ptx").write_text(ptx, encoding="utf-8")


def _compile(copy: Path, mutant: Mutant, dump: Path) -> str:
    package = f"mutant_{abs(hash(mutant.fault))}"
    for name, path in ((package, copy.parent), (f"{package}.kernels", copy)):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module
    attention = importlib.import_module(f"{package}.kernels.cute.attention_mma8")
    config = attention.configs()[0].__class__(mutant.plan[0], bool(mutant.plan[1]), bool(mutant.plan[2]))
    (kernel,) = [kernel for kernel in attention.buildables(mutant.arch) if kernel.name == config.name]
    dump.mkdir()
    kernel.compile(f"--keep-ptx --dump-dir {dump} --gpu-arch {mutant.arch}")
    (path,) = dump.glob("*.ptx")
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    compile_mutants(os.environ["CUTE_DSL_ARCH"], Path(sys.argv[1]))
