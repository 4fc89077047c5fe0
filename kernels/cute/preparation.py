"""Every 8-bit preparation and grouping kernel, for the build; `kernels.launch.prepare` launches them by these names.

The names are the same for every architecture: which image the kernels write is that of the attention kernels beside
them (`selection`). Kernels that make FP8 scores' operands are called by that format.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from . import group_assign, group_chain, group_update, layouts, layouts_mma8, prep_k, prep_q, prep_v, sort
from .buildable import Buildable

STRIDES = ("stride_b", "stride_h", "stride_l", "heads", "length")
ROWS = "batch * heads, rows of tiles, 1"


#: Kind of 8-bit images -> the layout module, and the V^T image.
_IMAGES = {"wgmma8": (layouts, prep_v.ImageV()), "mma8": (layouts_mma8, prep_v.PanelImageV())}


def buildables(images="wgmma8", scores=("int8",)):
    """The kernels, both 16-bit input formats, in a fixed order.

    images: kind of 8-bit images that they write. scores: formats of Q and K.
    """
    out = [
        Buildable("k_mean", prep_k.build_mean, 0, "batch * heads, 1, 1",
                  ("sums", "mean", "chunks", "length")),
        Buildable("group_chain", group_chain.build, 0, "batch * heads, 1, 1", ("scores", "rank", "groups")),
        Buildable("sort_count", sort.build_count, sort.SortCount.SHARED, ROWS, ("labels", "counts", "length")),
        Buildable("sort_order", sort.build_order, sort.SortOrder.SHARED, ROWS,
                  ("labels", "counts", "order", "length")),
    ]  # fmt: skip
    for kind in ("bf16", "fp16"):
        out += _of_dtype(kind, *_IMAGES[images], scores)
    return out


def _of_dtype(kind, layout, v_image, scores):
    fp16 = kind == "fp16"
    grouping = ("centroids", "packed", "bias")
    out = [
        Buildable(f"k_sum_{kind}", partial(prep_k.build_sum, fp16=fp16), prep_k.SumK.SHARED, ROWS,
                  ("k", "sums", *STRIDES)),
        Buildable(f"group_seed_{kind}", partial(group_update.build_seed, fp16=fp16), 0, "batch * heads, 32, 1",
                  ("v", *grouping, *STRIDES, "count", "groups")),
        Buildable(f"group_update_{kind}", partial(group_update.build, fp16=fp16), group_update.Update.SHARED,
                  "batch * heads, 32, 1", ("v", "labels", *grouping, *STRIDES, "count", "groups", "all_labels")),
        Buildable(f"group_pairs_{kind}", partial(group_chain.build_pairs, fp16=fp16), group_chain.SHARED,
                  "batch * heads, 2, 1", ("packed", "bias", "scores", "groups")),
        Buildable(f"group_assign_{kind}", partial(group_assign.build, fp16=fp16), group_assign.SHARED, ROWS,
                  ("v", "packed", "bias", "labels", *STRIDES, "count", "groups", "steps")),
    ]  # fmt: skip
    for ranked in (False, True):
        out.append(
            Buildable(f"group_place_{kind}" + "_ranked" * ranked,
                      partial(group_update.build_place, fp16=fp16, ranked=ranked), 0, "batch * heads, 32, 1",
                      ("source", "rank", *grouping, "groups", "source_rows"))
        )  # fmt: skip
    flavours = [(form, means) for form in scores for means in (False, True)]
    for form, means in flavours:
        build = partial(prep_q.build, fp16=fp16, means=means, layout=layout, scores=form)
        out.append(
            Buildable(q_name(kind, means, form), build, 0, ROWS, ("q", "q_image", "q_scale", "q_rows", *STRIDES))
        )
    for gather, means in product((False, True), repeat=2):
        for form in (form for form, with_means in flavours if with_means == means):
            out.append(
                Buildable(k_name(kind, gather, means, form),
                          partial(prep_k.build, fp16=fp16, gather=gather, means=means, layout=layout, scores=form),
                          prep_k.PrepareK.SHARED, ROWS,
                          ("k", "order", "mean", "k_image", "k_scale", "k_means", *STRIDES))
            )  # fmt: skip
        flags = {"fp16": fp16, "demean": means, "gather": gather}
        if means or not gather:
            out.append(
                Buildable(v_name(kind, gather, means, "v_stats"), partial(prep_v.build_stats, **flags),
                          prep_v.StatsV.SHARED, ROWS, ("v", "order", "means", "amax", *STRIDES))
            )  # fmt: skip
        out.append(
            Buildable(v_name(kind, gather, means), partial(prep_v.build, image=v_image, **flags),
                      prep_v.PrepareV.SHARED, ROWS,
                      ("v", "order", "means", "amax", "v_image", "v_scale", "v_means", *STRIDES))
        )  # fmt: skip
    return out


def _name(stem, kind, gather, means):
    return f"{stem}_{kind}" + "_gather" * gather + "_means" * means


def q_name(kind, means, scores="int8"):
    return _name("q" + "_fp8" * (scores == "fp8"), kind, False, means)


def k_name(kind, gather, means, scores="int8"):
    return _name("k" + "_fp8" * (scores == "fp8"), kind, gather, means)


def v_name(kind, gather, means, stem="v"):
    return _name(stem, kind, gather, means)
