"""Planted faults in the preparation kernels of the 8-bit mma.sync path, and in those that the NVFP4 path has as well:
sums and means of K, the order of the tokens. As in `mutants_prep_nvfp4`. Also edits of kernels of both that provably
change nothing.
"""

from __future__ import annotations

from .mutants_prep_nvfp4 import (
    _BARRIER,
    _CENTRE,
    _GUARDED_LOAD,
    _INSIDE,
    _ORDER_HEAD,
    _ORDER_WIDTH,
    _PLACE,
    _RACE,
    _ROTATE,
    _ROUND_MEAN,
    _bits,
)
from .mutation import Mutant

_ROUND = r"cvt\.rni\.s32\.f32 b,"
_PACK = r"cvt\.pack\.sat\.s8\.s32\.b32 t, d, c, 0;"
_MAXIMUM = r"(bfly\.b32 \t%r\d+, %r\d+, )16,"
_TOP_127 = r", 1123942400;"
_ORDER = r"ld\.global\.b32 (%r\d+), \[%rd\d+\];"
#: Whether one of a row of ones' four tokens in a word exists, and whether the row is the block's own.
_ONE = r"setp\.lt\.s32( p, %r\d+, %r\d+; selp\.s32 (%r\d+), 1, 0, p;\}\n\tand\.b32 \t%r\d+, )\2, (%r\d+);(?=\n.*selp)"

MUTANTS: dict[str, tuple[Mutant, ...]] = {
    "q_bf16_means": (
        *_ROTATE,
        Mutant("codes are cut, not rounded", _ROUND, "cvt.rzi.s32.f32 b,", "numbers", 9),
        Mutant("two codes of a word exchanged", _PACK, "cvt.pack.sat.s8.s32.b32 t, c, d, 0;", "numbers", 3),
        Mutant("codes wrap instead of ending at 127", _TOP_127, f", {_bits(160.0)};", "numbers"),
        Mutant("scales end at 128", _TOP_127, f", {_bits(128.0)};", "numbers"),
        Mutant("the scale of half of the rows", _MAXIMUM, r"\g<1>8,", "numbers|two lanes"),
        Mutant("the scale of unnormalised rows", r"0f3DB504F3", "0f3F800000", "numbers"),
        Mutant("rows too small for a scale have one", r", 8388608;", ", -2147483648;", "numbers"),
        Mutant("rows beyond the last are the last", _GUARDED_LOAD, r"\1", "numbers"),
        Mutant("the row behind the last counts", _INSIDE, r"setp.le.s32\1", "numbers"),
        Mutant("scales of eight rows in the place of sixteen", r"(and\.b32 \t%r\d+, %r\d+, )15;", r"\g<1>7;",
               "not written"),
        Mutant("words of two steps exchanged", r"(st\.global\.v2\.b32 \[%rd\d+\], )\{(%r\d+),(%r\d+)\}", r"\1{\3,\2}",
               "numbers", 5),
        Mutant("rows g + 8 in the place of another step", r"(or\.b32 \t%r\d+, %r\d+, )1024;", r"\g<1>1536;", _PLACE),
        Mutant("rows for key means: channels from 32 on in another place", r"(or\.b32 \t%r\d+, %r\d+, )2560;",
               r"\g<1>2048;", _PLACE),
        Mutant("rows for key means: a word of row g + 8", r"(st\.global\.v4\.b32 \[%rd\d+\], \{%r\d+,)(%r\d+),(%r\d+)",
               r"\1\3,\2", "numbers", 4),
    ),
    "k_bf16_gather_means": (
        _ROTATE[0],
        Mutant("no barrier in front of the warps' sums", _BARRIER, "", _RACE, 0),
        Mutant("no barrier behind the centre", _BARRIER, "", _RACE, 1),
        Mutant("no barrier in front of the warps' maxima", _BARRIER, "", _RACE, 2),
        Mutant("codes are cut, not rounded", _ROUND, "cvt.rzi.s32.f32 b,", "numbers", 2),
        Mutant("the order is ignored for rows g", _ORDER, r"mov.b32 \1, 3;", "numbers", 0),
        Mutant("the order is ignored for rows g + 8", _ORDER, r"mov.b32 \1, 3;", "numbers", 1),
        Mutant("the order of head 0 for all", _ORDER_HEAD, r"mov.b64 \1, 0;", "numbers"),
        Mutant("the order has 8 bytes a token", _ORDER_WIDTH, r"\g<1>3;", "out of bounds|numbers|misaligned"),
        Mutant("nothing stands in for missing keys", r"selp\.b32 (%r\d+), (%r\d+), %r\d+, p;",
               r"selp.b32 \1, \2, \2, p;",
               "out of bounds|nobody has written"),
        Mutant("keys that do not exist count in the mean", r"cvt\.rn\.f32\.s32 (\t%r\d+), %r\d+;",
               rf"mov.b32 \1, {_bits(1.0)};", "numbers", 1),
        Mutant("the mean of a short block is over 128", r"min\.s32 (%r\d+), %r\d+, 128;", r"mov.b32 \1, 128;",
               "numbers"),
        Mutant("block means are cut, not rounded", _ROUND_MEAN, "cvt.rz.bf16x2", "numbers"),
        Mutant("the centre with the other sign", _CENTRE, r"add.f32 \1", "numbers"),
        Mutant("a warp's maximum is left out",
               r"(max\.f32 \t(%r\d+), )(%r\d+), %r\d+;(?=\n\tmax\.f32 \t%r\d+, \2, %r\d+;\n(?:\tmov.*\n)*\tmul)",
               r"\1\3, \3;", "numbers"),
        Mutant("every block fills the missing ones", r"sub\.s32 (\t%r\d+), 1, %r\d+;", r"mov.b32 \1, 1;", "RACE"),
        Mutant("the scale of the first block for all", r"mul\.wide\.s32 (\t%rd\d+), %r\d+, 4;", r"mov.b64 \1, 0;",
               "not written|RACE"),
        Mutant("a key's place without two of its bits", r"(and\.b32 \t%r\d+, %r\d+, )56;", r"\g<1>32;", _PLACE),
        Mutant("keys g + 8 in the place of another step", r"(or\.b32 \t%r\d+, %r\d+, )512;", r"\g<1>0;", _PLACE),
    ),
    "v_stats_bf16_gather_means": (
        Mutant("no barrier in front of the warps' extremes", _BARRIER, "", _RACE),
        Mutant("the largest value is not looked at", r"\tmax\.bf16x2", r"\tmin.bf16x2", "numbers", -1),
        Mutant("tokens that do not exist count in the mean", r"cvt\.rn\.f32\.s32 (\t%r\d+), %r\d+;",
               rf"mov.b32 \1, {_bits(1.0)};", "numbers", 3),
        Mutant("the mean of a short block is over 128", r"min\.s32 (%r\d+), %r\d+, 128;", r"mov.b32 \1, 128;",
               "numbers"),
        Mutant("the order is ignored", _ORDER, r"mov.b32 \1, 3;", "numbers", 1),
        Mutant("half of a warp's lanes are left out", r"(bfly\.b32 \t%r\d+, %r\d+, )16,", r"\g<1>4,",
               "two lanes|numbers", -1),
        Mutant("means of one block over those of the next", r"mad\.lo\.s32 (\t%r\d+, %r\d+, %r\d+), %r\d+;",
               r"mad.lo.s32 \1, 0;", _PLACE),
        Mutant("a sum of two channels in one place", r"(add\.s32 \t%r\d+, %r\d+, )528;", r"\g<1>512;",
               "numbers|nobody has written"),
    ),
    "v_bf16_gather_means": (
        Mutant("no barrier behind scales and means", _BARRIER, "", _RACE, 0),
        Mutant("no barrier between tokens and channels", _BARRIER, "", _RACE, 1),
        Mutant("rows are not swizzled where they are written", r"xor\.b32 (\t%r\d+, %r\d+), 48;", r"xor.b32 \1, 32;",
               "numbers|nobody has written"),
        Mutant("rows are not swizzled where they are read", r"xor\.b32 (\t%r\d+), (%r\d+), %r\d+;(?=\n\tshl\.b32.*4;\n"
               r"\tor\.b32.*\n\tadd\.s32.*\n\tld\.shared\.v4)", r"mov.b32 \1, \2;", "numbers"),
        Mutant("the scale ends at 416", r", 1138753536;", f", {_bits(416.0)};", "numbers"),
        Mutant("a channel too small for a scale has one", r", 8388608;", ", -2147483648;", "numbers"),
        Mutant("codes of two tokens exchanged", r"e4m3x2\.f32 a,(%r\d+),(%r\d+);", r"e4m3x2.f32 a,\2,\1;",
               "numbers", 4),
        Mutant("the code of a token that does not exist", r"(selp\.b32 %r\d+), 65280, 0, p;", r"\1, 65280, 65280, p;",
               "numbers"),
        Mutant("the order is ignored", _ORDER, r"mov.b32 \1, 3;", "numbers", 6),
        Mutant("the order of head 0 for all", _ORDER_HEAD, r"mov.b64 \1, 0;", "numbers"),
        Mutant("the residual without its mean", r"sub\.f32 (\t%r\d+), (%r\d+), %r\d+;(?=\n\tmul)", r"mov.b32 \1, \2;",
               "numbers", 17),
        Mutant("the residual against the stored mean, undone by no scale",
               r"mul\.f32 \t(%r\d+), %r\d+, (%r\d+);(?=\n(?:\tmov.*\n)*\tst\.shared\.f32)", r"mov.b32 \1, \2;",
               "numbers"),
        Mutant("means are not divided by the scale", r"div\.rn\.f32 (%r\d+), (%r\d+), %r\d+;(?=\n(?:\tmov.*\n)*\t\{)",
               r"mov.b32 \1, \2;", "numbers", -1),
        Mutant("means are cut, not rounded", _ROUND_MEAN, "cvt.rz.bf16x2", "numbers"),
        Mutant("means of blocks that do not exist", r"mov\.b32 \{lo, hi\}, 0;", "mov.b32 {lo, hi}, 16256;", "numbers"),
        Mutant("a mean's place without its block", r"(and\.b32 \t%r\d+, %r\d+, )7;(?=\n\tmul\.lo\.s32)", r"\g<1>0;",
               _PLACE),
        Mutant("a one is a 2", r"selp\.b32 (%r\d+), 939524096, 0, p;", r"selp.b32 \1, 1073741824, 0, p;", "numbers", 1),
        Mutant("ones beyond the last token", _ONE, r"setp.ge.s32\1\3, \3;", "numbers", 9),
        Mutant("the ones stand in the row of another block",
               r"xor\.b32 (\t%r\d+, %r\d+), %r\d+;(?=\n\tadd\.s32 \t%r\d+, "
               r"%r\d+, 7;)", r"xor.b32 \1, 5;", "numbers"),
        Mutant("the rows of ones stand in those of V", r"(or\.b32 \t%r\d+, %r\d+, )16384;", r"\g<1>0;", _PLACE),
        Mutant("a quarter of the image is another one's", r"(add\.s64 \t%rd\d+, %rd\d+, )12288;", r"\g<1>8192;",
               _PLACE),
    ),
    "k_sum_bf16": (
        Mutant("no barrier in front of the warps' sums", _BARRIER, "", _RACE),
        Mutant("tokens beyond the last count", _GUARDED_LOAD, r"\1", "numbers", 2),
        Mutant("the last of a chunk's steps is left out", r"(setp\.ne\.b32 \t%p\d+, %r\d+, )1136;", r"\g<1>1008;",
               "numbers"),
        Mutant("chunks overlap", r"(shl\.b32 \t%r\d+, %r\d+, )10;", r"\g<1>9;", "numbers"),
        Mutant("a warp is added twice", r"(add\.s32 \t%r\d+, %r\d+, )3584;", r"\g<1>3072;", "numbers"),
        Mutant("lanes add up the wrong ones", r"(bfly\.b32 \t%r\d+, %r\d+, )16,", r"\g<1>8,", "two lanes|numbers", 3),
        Mutant("sums of another chunk", r"mad\.lo\.s32 (\t%r\d+), %r\d+, %r\d+, (%r\d+);", r"mov.b32 \1, \2;", _PLACE),
    ),
    "k_mean": (
        Mutant("chunks that do not exist count", r"setp\.ne\.s32 p, %r\d+, 0; (selp\.b32 %r\d+, %r\d+, %r\d+, p;)",
               r"setp.ne.s32 p, 1, 0; \1", "numbers", 2),
        Mutant("the mean is over the chunks", r"cvt\.rn\.f32\.s32 (\t%r\d+), %r\d+;", rf"mov.b32 \1, {_bits(2.0)};",
               "numbers"),
        Mutant("the rotated mean with its own sign", _CENTRE, r"add.f32 \1",
               "numbers", 0),
        Mutant("a step of the rotation from the wrong lane", r"(bfly\.b32 \t%r\d+, %r\d+, )2,", r"\g<1>4,", "numbers"),
        Mutant("the rotated mean over the mean", r"(add\.s64 \t%rd\d+, %rd\d+, )512;", r"\g<1>0;",
               "nobody has written"),
    ),
    "sort_order": (
        Mutant("tokens of a group in any order", r"sub\.s32 m, m, 1; and\.b32 m", "and.b32 m", _PLACE),
        Mutant("a group's place does not move on", r"@p red\.shared\.add\.u32 (\[%r\d+\], %r\d+);", "", _PLACE, 0),
        Mutant("labels of head 0", r"mul\.lo\.s64 (\t%rd\d+), %rd\d+, %rd\d+;", r"mov.b64 \1, 0;", _PLACE),
    ),
}  # fmt: skip

#: Kernel -> edits after which every image must be what it was, each with the proof.
EQUIVALENT: dict[str, tuple[Mutant, ...]] = {
    "q4_amax_bf16": (
        # The bits of numbers that are not negative are in the same order, signed or not.
        Mutant("the maximum of signed integers", r"red\.global\.max\.u32", "red.global.max.s32", "MISSED"),
        # After the barrier every thread has the largest of all eight slots; a maximum taken twice is the same.
        Mutant("every thread raises the maximum", r"setp\.eq\.s32 p, (%r\d+), 0; @p red",
               r"setp.ge.s32 p, \1, 0; @p red",
               "MISSED"),
        # What a thread has of its own warp is in that warp's slot as well.
        Mutant("the largest of the slots alone", r"max\.f32 (\t%r\d+), %r\d+, (%r\d+);(?=\n\tmax\.f32)",
               r"mov.b32 \1, \2;", "MISSED", -6),
    ),
    "q4_bf16_means": (
        # The address of a row that does not exist is formed, but its load is predicated off.
        Mutant("the last row is no limit for addresses", r"min\.s32 (%r\d+), (%r\d+), %r\d+;", r"mov.b32 \1, \2;",
               "MISSED"),
    ),
    "v4_bf16_means": (
        # Numbers of tokens that do not exist are replaced by 0 when the mean is subtracted; the index is clamped.
        Mutant("tokens beyond the last are the last", _GUARDED_LOAD, r"\1", "MISSED", 5),
    ),
    "k_bf16_gather_means": (
        # There are ceil(L / 128) blocks, each of which has a key: none is past the last one.
        Mutant("the last block is no limit", r"min\.s32 (%r\d+), (%r\d+), %r\d+;", r"mov.b32 \1, \2;", "MISSED", 0),
    ),
    "sort_order": (
        # Tokens that do not exist come behind all others of their warp, and each warp has counters of its own: they are
        # in nobody's rank, and a count that they raise is not read again.
        Mutant("tokens that do not exist have the label 0",
               r"setp\.ne\.s32 p, %r\d+, 0; (selp\.b32 %r\d+, %r\d+, 256, p;)",
               r"setp.ne.s32 p, 1, 0; \1", "MISSED", 5),
    ),
}  # fmt: skip
