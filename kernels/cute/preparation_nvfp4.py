"""The NVFP4 preparation kernels, for the build: beside those of `preparation`, whose sums, means, statistics of a plain
V, sorting and grouping serve both. An order of tokens is an argument here, not a kernel of its own."""

from __future__ import annotations

from functools import partial

from . import prep_qk_nvfp4, prep_v, prep_v_nvfp4
from .buildable import Buildable
from .preparation import ROWS, STRIDES


def buildables(emulated=False):
    """The kernels, both 16-bit input formats, in a fixed order. emulated: for a card without E2M1 conversions."""
    return [kernel for kind in ("bf16", "fp16") for kernel in _of_dtype(kind, emulated)]


def _of_dtype(kind, emulated):
    fp16 = kind == "fp16"
    keys = ("k", "order", "mean", "amax", "k_means")
    out = [
        Buildable(f"q4_amax_{kind}", partial(prep_qk_nvfp4.build_q_amax, fp16=fp16), prep_qk_nvfp4.AmaxQ4.SHARED, ROWS,
                  ("q", "amax", *STRIDES)),
        Buildable(f"v4_stats_{kind}_means", partial(prep_v.build_stats, fp16=fp16, gather=None, rounded=True),
                  prep_v.StatsV.SHARED, ROWS, ("v", "order", "means", "amax", *STRIDES)),
    ]  # fmt: skip
    for means in (False, True):
        name = f"{kind}" + "_means" * means
        out += [
            Buildable(f"q4_{name}", partial(prep_qk_nvfp4.build_q, fp16=fp16, means=means, emulated=emulated), 0, ROWS,
                      ("q", "amax", "q_image", "q_scale", "q_rows", *STRIDES, "adaptive")),
            Buildable(f"k4_amax_{name}", partial(prep_qk_nvfp4.build_k_amax, fp16=fp16, means=means),
                      prep_qk_nvfp4.AmaxK4.SHARED, ROWS, (*keys, *STRIDES)),
            Buildable(f"k4_{name}", partial(prep_qk_nvfp4.build_k, fp16=fp16, means=means, emulated=emulated),
                      prep_qk_nvfp4.PrepareK4.SHARED, ROWS, (*keys, "k_image", "k_scale", *STRIDES, "adaptive")),
            Buildable(f"v4_{name}", partial(prep_v_nvfp4.build, fp16=fp16, demean=means, emulated=emulated),
                      prep_v_nvfp4.PrepareV4.SHARED, ROWS,
                      ("v", "order", "means", "amax", "v_image", "v_scale", "v_means", *STRIDES, "adaptive")),
        ]  # fmt: skip
    return out
