"""Deliberately broken copies of the tcgen05 attention kernels: what each breaks, and the PTX of it.

    CUTE_DSL_ARCH=sm_100a python tests/ptx/mutants_sm100.py FOLDER

compiles every mutant of the sources into FOLDER/NUMBER.ptx, in one process.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
#: (scores, probability, demean, key_means)
PLAIN, MEANS = ("fp8", "expcast_wide", False, False), ("fp8", "expcast_wide", True, False)
EXACT, KEYS = ("fp8", "exp2", True, False), ("fp8", "expcast_wide", True, True)
#: (batch, heads, Lq, Lkv): three key tiles, six, and more than one group of means.
SHORT, MIDDLE, LONG = (1, 1, 130, 300), (1, 1, 130, 700), (1, 1, 130, 1100)


class Mutant(NamedTuple):
    """One edit: in `file`, `old` (which must occur exactly once) becomes `new`. shape: of a call that shows it."""

    fault: str
    config: tuple[str, str, bool, bool]
    shape: tuple[int, int, int, int]
    file: str
    old: str
    new: str


_ATTENTION, _CORRECTION, _MMA = "attention_sm100.py", "correction_sm100.py", "mma_sm100.py"
_PIPELINE, _SOFTMAX, _TMEM = "pipeline_sm100.py", "softmax_sm100.py", "tmem.py"

MUTANTS = (
    # Waits.
    Mutant("Q is not waited for", PLAIN, SHORT, _MMA, "    cute.arch.mbarrier_wait(bars.q_full, 0)\n", ""),
    Mutant("V is not waited for", PLAIN, SHORT, _MMA,
           "        cute.arch.mbarrier_wait(bars.v_full + stage, (j // stages) & 1)\n", ""),
    Mutant("P is not waited for", PLAIN, SHORT, _MMA,
           "            cute.arch.mbarrier_wait(bars.p_full + half, parity)\n", ""),
    Mutant("the rescale of O is not waited for", PLAIN, SHORT, _MMA,
           "            cute.arch.mbarrier_wait(bars.out_ready + half, parity)\n", ""),
    Mutant("S is overwritten before its row sums are read", PLAIN, SHORT, _MMA,
           "cute.arch.mbarrier_wait(bars.sums_read + half, parity)", "pass"),
    Mutant("a K tile is loaded over one in use", PLAIN, MIDDLE, _PIPELINE,
           "        cute.arch.mbarrier_wait(bars.k_empty + stage, phase ^ 1)\n", ""),
    Mutant("S is not waited for", PLAIN, SHORT, _ATTENTION,
           "            cute.arch.mbarrier_wait(bars.scores_full + half, parity)\n", ""),
    Mutant("alpha is not waited for", PLAIN, SHORT, _CORRECTION,
           "            cute.arch.mbarrier_wait(bars.alpha_full + half, parity)\n", ""),
    Mutant("the row sums are not waited for", PLAIN, SHORT, _CORRECTION,
           "                cute.arch.mbarrier_wait(bars.sums_full + half, parity)\n", ""),
    Mutant("the last exact sum is not waited for", EXACT, SHORT, _CORRECTION,
           "            cute.arch.mbarrier_wait(bars.sums_full + half, 0)\n", ""),
    Mutant("the last P V is not waited for", PLAIN, SHORT, _CORRECTION,
           "        cute.arch.mbarrier_wait(bars.out_full + half, 0)\n", ""),
    Mutant("the last means are not waited for", MEANS, SHORT, _CORRECTION,
           "cute.arch.mbarrier_wait(bars.out_full + half, 1)", "pass"),
    Mutant("the last means go ahead of their row sums", MEANS, SHORT, _MMA,
           "            cute.arch.mbarrier_wait(bars.out_ready + half, tiles & 1)\n", ""),
    # Arrivals and commits.
    Mutant("three of four warps make P", PLAIN, SHORT, _PIPELINE,
           "mbarrier_init(barrier + i, 4)\n", "mbarrier_init(barrier + i, 3)\n"),
    Mutant("Q K is committed before it is queued", PLAIN, SHORT, _MMA,
           """                    multiply_keys(ops, half, following)
                    tcgen05.commit(bars.scores_full + half)
""", """                    tcgen05.commit(bars.scores_full + half)
                    multiply_keys(ops, half, following)
"""),
    Mutant("a V stage is freed before its last P V", PLAIN, MIDDLE, _MMA,
           """                multiply_values(ops, half, stage, cutlass.min(j, 1))
                if const_expr(half == HALVES - 1):
                    tcgen05.commit(bars.v_empty + stage)
""", """                if const_expr(half == HALVES - 1):
                    tcgen05.commit(bars.v_empty + stage)
                multiply_values(ops, half, stage, cutlass.min(j, 1))
"""),
    # Fences.
    Mutant("no fence after S is there", PLAIN, SHORT, _ATTENTION,
           "bars.scores_full + half, parity)\n            tmem.after_sync()\n", "bars.scores_full + half, parity)\n"),
    Mutant("no fence before P is announced", PLAIN, SHORT, _ATTENTION,
           "tmem.wait_store()\n            tmem.before_sync()\n", "tmem.wait_store()\n"),
    Mutant("P is announced before it is stored", PLAIN, SHORT, _ATTENTION, "            tmem.wait_store()\n", ""),
    Mutant("scores are used before they are loaded", PLAIN, SHORT, _SOFTMAX, "    tmem.wait_load()\n", ""),
    Mutant("O is announced before it is stored", PLAIN, SHORT, _CORRECTION, "    tmem.wait_store()\n", ""),
    Mutant("r is not shown to the async proxy", MEANS, SHORT, _CORRECTION,
           "    cute.arch.fence_view_async_shared()\n", ""),
    Mutant("the zeros are not shown to the async proxy", PLAIN, SHORT, _PIPELINE,
           "    cute.arch.fence_view_async_shared()\n", ""),
    Mutant("V^T rows 136 to 143 are not zeroed", PLAIN, SHORT, _ATTENTION,
           "        clear(config, shared, thread)\n", ""),
    Mutant("no barrier after the start", PLAIN, SHORT, _ATTENTION, """        tmem.before_sync()
        cute.arch.sync_threads()
        tmem.after_sync()
        base""", """        tmem.before_sync()
        base"""),
    Mutant("tensor memory is freed before it is read", PLAIN, SHORT, _ATTENTION, """        tmem.before_sync()
        cute.arch.sync_threads()
        if warp""", """        if warp"""),
    # Operands.
    Mutant("the second MMA of a row reads 16 bytes later", PLAIN, SHORT, _MMA,
           "tmem.K_BYTES // 16, tmem.K_BYTES // 4", "1, tmem.K_BYTES // 4"),
    Mutant("row sums lie where P is", PLAIN, SHORT, _MMA, "SUMS_AT, BIAS_AT = 64", "SUMS_AT, BIAS_AT = 16"),
    Mutant("row sums of another block are read", PLAIN, SHORT, _CORRECTION,
           "SUMS_AT + j % lo.MEAN_GROUP", "SUMS_AT + (j + 1) % lo.MEAN_GROUP"),
    Mutant("means of the first buffer only", MEANS, LONG, _MMA, "(group & 1) * (MU", "0 * (MU"),
    Mutant("the means of a group are restored a tile late", MEANS, LONG, _MMA,
           "if j % lo.MEAN_GROUP == 0:", "if j % lo.MEAN_GROUP == 1:"),
    Mutant("Q . (key mean) of the group before", KEYS, LONG, _MMA,
           "multiply_key_means(ops, half, group, ops.scores", "multiply_key_means(ops, half, 0 * group, ops.scores"),
    Mutant("S is overwritten before q . (key mean) is read", KEYS, LONG, _MMA,
           "cute.arch.mbarrier_wait(bars.bias_read + half, group & 1)", "pass"),
    Mutant("q . (key mean) is used before it is there", KEYS, LONG, _ATTENTION,
           "cute.arch.mbarrier_wait(bars.bias_read + half, (j // lo.MEAN_GROUP) & 1)", "pass"),
    Mutant("the key means are not expected", KEYS, SHORT, _PIPELINE, "Int32(4 * 2 * KM_ELEMENTS)", "Int32(0)"),
    Mutant("a panel of Q in the place of another", KEYS, SHORT, _PIPELINE,
           "4 * half + 2 * (panel % 2) + panel // 2", "4 * half + panel"),
    # Arithmetic.
    Mutant("the bias is not in P", KEYS, SHORT, _SOFTMAX, "offset = offset + bias", "offset = offset + 0.0 * bias"),
    Mutant("O is never rescaled", PLAIN, SHORT, _CORRECTION, "if cute.arch.vote_any_sync(alpha < 1.0):",
           "if cute.arch.vote_any_sync(alpha < 0.0):"),
    Mutant("only warps whose rows all rise rescale", PLAIN, (1, 1, 130, 600), _CORRECTION, "vote_any_sync(alpha < 1.0)",
           "vote_all_sync(alpha < 1.0)"),
    Mutant("pending row sums are not rescaled", MEANS, SHORT, _CORRECTION,
           "rows.sums[b, half] = rows.sums[b, half] * alpha", "rows.sums[b, half] = rows.sums[b, half] * 1.0"),
    Mutant("row sums are restored twice", MEANS, LONG, _CORRECTION,
           "rows.sums[b + n, half] = Float32(0.0)", "rows.sums[b + n, half] = exact[n]"),
    Mutant("the chunks of r are not exchanged", MEANS, SHORT, _CORRECTION,
           "lo.swizzle_32(thread, 16) // 4", "(thread * 32 + 16) // 4"),
    Mutant("padded keys count in the row sums", EXACT, SHORT, _ATTENTION,
           "total - Float32(missing) * last", "total - Float32(0.0) * last"),
    Mutant("both halves take the first rows' scales", PLAIN, SHORT, _ATTENTION,
           "cutlass.min(query_tile + half, query_tiles - 1)", "query_tile"),
    Mutant("keys keep their order in P", PLAIN, SHORT, _SOFTMAX, "[*pairs[c], *pairs[c + 4]]",
           "[*pairs[2 * c], *pairs[2 * c + 1]]"),
    Mutant("a score is left out of the maximum", PLAIN, (1, 1, 130, 256), _SOFTMAX, "maximum_of(scores)",
           "maximum_of(scores[:-1])"),
    Mutant("a polynomial without its power of two", EXACT, SHORT, _SOFTMAX,
           "as_float((as_int(n) << 23) + as_int(m))", "as_float(as_int(m))"),
    Mutant("rows beyond Lq are written", PLAIN, SHORT, _CORRECTION, "        if row < lq:", "        if row < lq + 1:"),
    Mutant("a lone query tile reads past the end", PLAIN, (1, 1, 100, 300), _PIPELINE,
           "cutlass.min(query_tile + half, query_tiles - 1)", "(query_tile + half)"),
)  # fmt: skip


def compile_mutants(folder: Path) -> None:
    """PTX of every mutant, as FOLDER/NUMBER.ptx."""
    for number, mutant in enumerate(MUTANTS):
        with tempfile.TemporaryDirectory() as place:
            copy = Path(place) / "kernels"
            shutil.copytree(ROOT / "kernels" / "cute", copy / "cute")
            shutil.copy(ROOT / "kernels" / "plan.py", copy)
            path = copy / "cute" / mutant.file
            text = path.read_text(encoding="utf-8")
            if text.count(mutant.old) != 1:
                raise ValueError(f"{mutant.fault}: {mutant.old!r} occurs {text.count(mutant.old)} times.")
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
            ptx = _compile(copy, number, mutant, Path(place) / "dump")
        (folder / f"{number}.ptx").write_text(ptx, encoding="utf-8")


def _compile(copy: Path, number: int, mutant: Mutant, dump: Path) -> str:
    package = f"mutant_{number}"
    for name, path in ((package, copy.parent), (f"{package}.kernels", copy)):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module
    attention = importlib.import_module(f"{package}.kernels.cute.attention_sm100")
    config = attention.configs("sm_100a")[0].__class__(*mutant.config)
    (kernel,) = [kernel for kernel in attention.buildables("sm_100a") if kernel.name == config.name]
    dump.mkdir()
    kernel.compile(f"--keep-ptx --dump-dir {dump} --gpu-arch sm_100a")
    (path,) = dump.glob("*.ptx")
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    compile_mutants(Path(sys.argv[1]))
