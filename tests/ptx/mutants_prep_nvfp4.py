"""Planted faults in the NVFP4 preparation kernels.

Kernel -> mutants of its PTX without the comments around inline assembly. `expected` as in `mutation`; where several
faults follow from an edit all are allowed.
"""

from __future__ import annotations

import struct

from .mutation import Mutant

_BARRIER = r"\tbar\.sync \t0;\n"
_RACE = "RACE|nobody has written"
#: Bytes that two CTAs write, that nobody writes, or that hold something else.
_PLACE = "RACE|not written|numbers|out of bounds|misaligned|nobody has written|two lanes"
#: A load of a row that exists only up to the last, and the test whether it does.
_GUARDED_LOAD = r"@p (ld\.global\.nc\.L1::no_allocate\.v4\.b32)"
_INSIDE = r"setp\.lt\.s32( p, %r\d+, %r\d+; selp\.s32 %r\d+, 1, 0, p;\}\n\t(?:add|min)\.s32)"
#: The choice between 4 and 6: whether the squared error with 6 is larger, and whether the plan allows 4.
_CHOICE = r"setp\.gt\.f32 p, (%r\d+), (%r\d+)(; selp\.s32 (%r\d+), 1, 0, p;\}\n\tand\.b32 \t%r\d+, )\4, (%r\d+);"
_GROUP_MAXIMUM = r"shfl\.sync\.bfly\.b32 (\t(%r\d+), (%r\d+), )1(, 31, -1;\n\tmax\.f32 \t%r\d+, \3, )\2;(?=\n\tmul)"
_ERROR_SUM = r"(bfly\.b32 \t(%r\d+), (%r\d+), 1, 31, -1;\n\tadd\.f32 \t%r\d+, )\2, \3;"
_SQUARE = r"mul\.f32 (\t%r\d+), (%r\d+), \2;"
_E2M1 = r"cvt\.rn\.satfinite\.e2m1x2\.f32 a, (%r\d+), (%r\d+);"
_SCALE_STORE = r"setp\.eq\.s32 p, (%r\d+), 0; @p st\.global\.v2\.b32"
_ORDER = r"setp\.ne\.s64( p, %rd\d+, 0; mov\.b32 %r\d+, %r\d+; @p ld\.global\.b32)"
_ORDER_HEAD = r"mul\.lo\.s64 (\t%rd\d+), %rd\d+, %rd\d+;(?=\n\tcvt\.s64\.s32 \t%rd\d+, %r\d+;\n\tadd\.s64)"
_ORDER_WIDTH = r"(shl\.b64 \t%rd\d+, %rd\d+, )2;"
_CENTRE = r"sub\.f32 (\t(%r\d+), %r\d+, %r\d+;\n(?:.*\n){0,3}?\tshfl\.sync\.bfly\.b32 \t%r\d+, \2, 1,)"
_ROUND_MEAN = r"cvt\.rn\.bf16x2"


def _bits(value: float) -> str:
    return str(struct.unpack("<I", struct.pack("<f", value))[0])


def _float(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


#: What a kernel that writes codes can get wrong in them: all of it for Q, for K and V the choice and the places.
_QUANTISE = (
    Mutant("the second level reaches 448 * 4", r", 1160249344;", f", {_bits(448 * 4)};", "numbers"),
    Mutant("a group's scale puts its maximum on 4", _float(6.0), _float(4.0), "numbers"),
    Mutant("a group's other scale puts its maximum on 6", r"0f40800000", _float(6.0), "numbers"),
    Mutant("4 is never taken", _CHOICE, r"setp.gt.f32 p, \1, \2\3\4, 0;", "numbers"),
    Mutant("4 is taken where 6 is better", _CHOICE, r"setp.gt.f32 p, \2, \1\3\4, \5;", "numbers"),
    Mutant("4 is taken though the plan has 6 alone", _CHOICE, r"setp.gt.f32 p, \1, \2\3\4, \4;", "numbers"),
    Mutant("the error of a group is that of eight, twice", _ERROR_SUM, r"\1\3, \3;", "numbers"),
    Mutant("the error of 6 in units of its scale", _SQUARE, rf"mul.f32 \1, \2, {_float(1.0)};", "numbers", 0),
    Mutant("the error of 4 in units of its scale", _SQUARE, rf"mul.f32 \1, \2, {_float(1.0)};", "numbers", 1),
    Mutant("a group's maximum is that of eight", _GROUP_MAXIMUM, r"shfl.sync.bfly.b32\g<1>1\g<4>\3;", "numbers"),
    Mutant("a group's maximum from the lane of another group", _GROUP_MAXIMUM,
           r"shfl.sync.bfly.b32\g<1>2\g<4>\2;", "numbers"),
    Mutant("two codes exchanged", _E2M1, r"cvt.rn.satfinite.e2m1x2.f32 a, \2, \1;", "numbers"),
    Mutant("a code shifted by a byte", r"mov\.b32 (%r\d+), \{a,b,c,d\};", r"mov.b32 \1, {b,a,c,d};", "numbers", 3),
    Mutant("the scale byte of 6 with the codes of 4", r"selp\.b32 (%r\d+), (%r\d+), (%r\d+)(, p;\}\n\tshl\.b32)",
           r"selp.b32 \1, \3, \2\4", "numbers"),
    Mutant("the third scale in the place of the second", r"(shl\.b32 \t%r\d+, %r\d+, )16;(?=\n\tor\.b32)", r"\g<1>8;",
           "numbers", -1),
    Mutant("scales of both lanes exchanged", r"0x5140", "0x1504", "numbers"),
    Mutant("the last four scales are the first", r"0x7362", "0x5140", "numbers"),
    Mutant("scales from the lane of the same group", r"(shfl\.sync\.bfly\.b32 \t%r\d+, %r\d+, )2(, 31, -1;\n\tprmt)",
           r"\g<1>1\2", "numbers"),
    Mutant("another lane stores the scales", _SCALE_STORE, r"setp.eq.s32 p, \1, 2; @p st.global.v2.b32", "numbers"),
    Mutant("a scale of zero is divided by", r"(setp\.gt\.f32 p, %r\d+, %r\d+; )(selp\.s32 %r\d+), 1, 0, p;"
           r"(?=\}\n(?:\tmov\.f32.*\n)+.*\n\tmul\.f32)", r"\1\2, 1, 1, p;", "numbers", 0),
    Mutant("an infinite reciprocal times zero", r"0f7F7FFFFF", "0f7F800000", "numbers", 2),
    Mutant("a head too small for a scale has one", r", 8388608;", ", -2147483648;", "numbers"),
)  # fmt: skip

_ROTATE = (
    Mutant("a sign of the rotation", r"-2147450880", "-2147483648", "numbers"),
    Mutant("a butterfly adds twice", r"\tsub\.f32 (\t%r\d+, %r\d+, %r\d+;\n\tadd\.f32)", r"\tadd.f32\1", "numbers", 6),
)

MUTANTS: dict[str, tuple[Mutant, ...]] = {
    "q4_amax_bf16": (
        Mutant("no barrier in front of the warps' maxima", _BARRIER, "", _RACE),
        Mutant("every warp has the same slot",
               r"shl\.b32 (\t%r\d+), %r\d+, 2;(?=\n\tadd\.s32 \t%r\d+, %r\d+, %r\d+;\n(?:\tmov.*\n)*\tst\.shared\.f32)",
               r"mov.b32 \1, 0;", "RACE"),
        Mutant("four warps are left out", r"(add\.s32 \t%r\d+, %r\d+, )16;(?=\n\tld\.shared)", r"\g<1>0;", "numbers"),
        Mutant("two lanes of eight are left out of a warp's maximum", r"(bfly\.b32 \t%r\d+, %r\d+, )16,", r"\g<1>8,",
               "two lanes|numbers"),
        Mutant("the smallest of all", r"red\.global\.max", "red.global.min", "numbers"),
        Mutant("heads are 8 bytes apart", r"mul\.wide\.u32 (\t%rd\d+, %r\d+, )4;", r"mul.wide.u32 \g<1>8;",
               "out of bounds"),
        Mutant("a magnitude with its sign", r"abs\.f32 t, (%r\d+);", r"mov.f32 t, \1;", "numbers", 5),
    ),
    "q4_bf16_means": (
        *_QUANTISE,
        *_ROTATE,
        Mutant("rows beyond the last are the last", _GUARDED_LOAD, r"\1", "numbers"),
        Mutant("rows beyond the last are the last, rows g + 8", _GUARDED_LOAD, r"\1", "numbers", 4),
        Mutant("the row behind the last counts", _INSIDE, r"setp.le.s32\1", "numbers"),
        Mutant("the scale is that of unnormalised rows", r"0f3DB504F3", _float(1.0), "numbers"),
        Mutant("scales of rows g and g + 8 in one place", r"(add\.s32 \t%r\d+, %r\d+, )8256;", r"\g<1>8192;",
               "not written"),
        Mutant("two words of the A fragment exchanged",
               r"(st\.global\.v4\.b32 \[%rd\d+\], \{%r\d+),(%r\d+),(%r\d+),", r"\1,\3,\2,", "numbers"),
        Mutant("channels from 64 on in the place of the next tile's",
               r"(or\.b32 \t%r\d+, %r\d+, )1024;(?=\n\tshr\.s32)",
               r"\g<1>2048;", _PLACE),
        Mutant("rows for key means: rows g and g + 8 exchanged",
               r"(st\.global\.v2\.b32 \[%rd\d+\], )\{(%r\d+),(%r\d+)\}", r"\1{\3,\2}", "numbers", 2),
        Mutant("rows for key means: a channel's place", r"(or\.b32 \t%r\d+, %r\d+, )2048;", r"\g<1>3072;", _PLACE),
        Mutant("the tile of another head", r"mad\.lo\.s32 (\t%r\d+, %r\d+, %r\d+), %r\d+;(?=\n\tmul\.wide)",
               r"mad.lo.s32 \1, 0;", _PLACE),
        Mutant("tiles of the image are 9200 bytes apart", r"(mul\.wide\.s32 \t%rd\d+, %r\d+, )9216;", r"\g<1>9200;",
               _PLACE),
    ),
    "k4_amax_bf16_means": (
        _ROTATE[1],
        Mutant("no barrier in front of the warps' sums", _BARRIER, "", _RACE, 0),
        Mutant("no barrier behind the centre", _BARRIER, "", _RACE, 1),
        Mutant("no barrier in front of the warps' maxima", _BARRIER, "", _RACE, 2),
        Mutant("the slots of the maxima lie in the centre", r"(add\.s32 \t%r\d+, %r\d+, )4608;", r"\g<1>4096;", "RACE"),
        Mutant("keys that do not exist count in the mean", r"cvt\.rn\.f32\.s32 (\t%r\d+), %r\d+;",
               rf"mov.b32 \1, {_bits(1.0)};", "numbers", 1),
        Mutant("the mean of a short block is over 128", r"min\.s32 (%r\d+), %r\d+, 128;", r"mov.b32 \1, 128;",
               "numbers"),
        Mutant("the channel mean is added", r"sub\.f32(?= \t%r\d+, %r\d+, %r\d+;\n(?:\tmov.*\n)*\tcvt\.rn\.bf16x2)",
               "add.f32", "numbers"),
        Mutant("block means are cut, not rounded", _ROUND_MEAN, "cvt.rz.bf16x2", "numbers"),
        Mutant("a lane's sum goes to the wrong lane", r"(bfly\.b32 \t%r\d+, %r\d+, )8,", r"\g<1>4,", "numbers", 3),
        Mutant("a lane keeps the half that it gives", r"selp\.b32 (%r\d+), (%r\d+), (%r\d+), p;",
               r"selp.b32 \1, \3, \2, p;",
               "numbers", 20),
        Mutant("a warp's sums are left out", r"(add\.s32 \t%r\d+, %r\d+, )1536;(?=\n\tld\.shared\.f32)", r"\g<1>1024;",
               "numbers"),
        Mutant("every block fills the missing ones", r"sub\.s32 (\t%r\d+), 1, %r\d+;", r"mov.b32 \1, 1;", "RACE"),
        Mutant("one block too many is filled", r"setp\.lt\.s32(?= p, %r\d+, %r\d+; (?:.*\n){2}\tshr\.u32)",
               "setp.le.s32", "out of bounds|RACE|numbers", -1),
        Mutant("the last missing block is not filled", r"st\.global\.b16 \[%rd\d+\], lo;", "mov.b16 lo, lo;",
               "not written", -1),
        Mutant("a key mean's place without its block", r"(and\.b32 \t%r\d+, %r\d+, )224;", r"\g<1>0;", _PLACE),
        Mutant("key means lie 1024 bytes apart", r"(mul\.wide\.s32 \t%rd\d+, %r\d+, )2048;", r"\g<1>1024;", _PLACE),
        Mutant("the centre with the other sign", _CENTRE, r"add.f32 \1", "numbers"),
        Mutant("the order is ignored", _ORDER, r"setp.lt.s64\1", "numbers"),
    ),
    "k4_bf16_means": (
        *_QUANTISE[3:6],
        _ROTATE[0],
        Mutant("no barrier behind the centre", _BARRIER, "", _RACE),
        Mutant("the order is ignored for rows g", _ORDER, r"setp.lt.s64\1", "numbers", 0),
        Mutant("the order is ignored for rows g + 8", _ORDER, r"setp.lt.s64\1", "numbers", 1),
        Mutant("the order of head 0 for all", _ORDER_HEAD, r"mov.b64 \1, 0;", "numbers"),
        Mutant("the order has 8 bytes a token", _ORDER_WIDTH, r"\g<1>3;", "out of bounds|numbers|misaligned"),
        Mutant("the last key but one stands in", r"(add\.s32 \t%r\d+, %r\d+, )-1;", r"\g<1>-2;", "numbers"),
        Mutant("nothing stands in for missing keys", r"selp\.b32 (%r\d+), (%r\d+), %r\d+, p;",
               r"selp.b32 \1, \2, \2, p;",
               "out of bounds|nobody has written"),
        Mutant("the centre with the other sign", _CENTRE, r"add.f32 \1", "numbers"),
        Mutant("the centre is rotated by the wrong lane", r"(bfly\.b32 \t%r\d+, %r\d+, )16,", r"\g<1>4,", "numbers"),
        Mutant("the block mean in the wrong half of a word", r"\{z, h\}", "{h, z}", "numbers"),
        Mutant("the block means of head 0 for all",
               r"mad\.lo\.s32 (\t%r\d+), %r\d+, %r\d+, (%r\d+);(?=\n\tmul\.wide\.s32)",
               r"mov.b32 \1, \2;", "numbers"),
        Mutant("the block mean of another block", r"(and\.b32 \t%r\d+, %r\d+, )224;", r"\g<1>192;", "numbers"),
        Mutant("the block means of another channel", r"(and\.b32 \t%r\d+, %r\d+, )6;", r"\g<1>4;", "numbers"),
        Mutant("channel means of head 0 for all", r"mul\.wide\.u32 (\t%rd\d+), %r\d+, 1024;", r"mov.b64 \1, 0;",
               "numbers"),
        Mutant("rows g and g + 8 have each other's centre",
               r"(\{%r\d+,%r\d+\}, \{(%r\d+),(%r\d+)),\2,\3\}", r"\1,\3,\2}", "numbers"),
        Mutant("a key's column without one of its bits", r"(and\.b32 \t%r\d+, %r\d+, )4;(?=\n\tand\.b32 \t%r\d+, "
               r"%r\d+, 1;)", r"\g<1>0;", _PLACE),
        Mutant("scales of a key in the place of the next one's", r"(add\.s32 \t%r\d+, %r\d+, )8192;", r"\g<1>8200;",
               _PLACE),
        Mutant("tiles of the image are 9200 bytes apart", r"(mul\.wide\.s32 \t%rd\d+, %r\d+, )9216;", r"\g<1>9200;",
               _PLACE),
    ),
    "v4_stats_bf16_means": (
        Mutant("no barrier in front of the warps' extremes", _BARRIER, "", _RACE),
        Mutant("the smallest value is not looked at", r"\tmin\.bf16x2", r"\tmax.bf16x2", "numbers", -1),
        Mutant("tokens that do not exist count in the mean", r"cvt\.rn\.f32\.s32 (\t%r\d+), %r\d+;",
               rf"mov.b32 \1, {_bits(1.0)};", "numbers", 5),
        Mutant("the mean of a short block is over 128", r"min\.s32 (%r\d+), %r\d+, 128;", r"mov.b32 \1, 128;",
               "numbers"),
        Mutant("magnitudes less the mean as it is, not as it is stored",
               r"(cvt\.rn\.bf16x2\.f32 %r\d+, %r\d+, (%r\d+);\n\t\{\.reg \.b32 a, b;[^\n]*; mov\.b32 %r\d+, )a;",
               r"\g<1>\2;", "numbers"),
        Mutant("a warp's sums are left out", r"(add\.s32 \t%r\d+, %r\d+, )2560;", r"\g<1>1536;", "numbers"),
        Mutant("half of a warp's lanes are left out", r"(bfly\.b32 \t%r\d+, %r\d+, )16,", r"\g<1>8,",
               "two lanes|numbers", -1),
        Mutant("extremes of the neighbour channel",
               r"setp\.ne\.s32 p, %r\d+, 0; selp\.b32 (%r\d+), (%r\d+), (%r\d+), p;",
               r"setp.ne.s32 p, 1, 0; selp.b32 \1, \2, \3, p;", "numbers", -2),
        Mutant("the order is ignored", _ORDER, r"setp.lt.s64\1", "numbers", 3),
        Mutant("means of one block over those of the next", r"mad\.lo\.s32 (\t%r\d+, %r\d+, %r\d+), %r\d+;",
               r"mad.lo.s32 \1, 0;", _PLACE),
        Mutant("largest magnitudes of head 0", r"mul\.wide\.u32 (\t%rd\d+), %r\d+, 512;", r"mov.b64 \1, 0;", "numbers"),
        Mutant("the smallest of all", r"red\.global\.max", "red.global.min", "numbers"),
    ),
    "v4_bf16_means": (
        *_QUANTISE[7:9],
        *_QUANTISE[13:16],
        Mutant("no barrier between tokens and channels", _BARRIER, "", _RACE),
        Mutant("rows are not swizzled where they are written", r"(and\.b32 \t%r\d+, %r\d+, )8;(?=\n\txor)", r"\g<1>0;",
               "numbers"),
        Mutant("rows are not swizzled where they are read", r"xor\.b32 (\t%r\d+), (%r\d+), %r\d+;(?=\n\tshl\.b32.*\n"
               r"\tadd\.s32.*\n\tadd\.s32.*\n\tld\.shared\.b32)", r"mov.b32 \1, \2;", "numbers", 8),
        Mutant("half of the tokens over the others", r"(add\.s32 \t%r\d+, %r\d+, )16384;(?=\n\tst\.shared)",
               r"\g<1>0;", "RACE|nobody has written|two lanes"),
        Mutant("channels of a word exchanged", r"mov\.b32 (%r\d+), a; mov\.b32 (%r\d+), b;",
               r"mov.b32 \1, b; mov.b32 \2, a;", "numbers", 7),
        Mutant("the order is ignored", _ORDER, r"setp.lt.s64\1", "numbers", 2),
        Mutant("the order of head 0 for all", _ORDER_HEAD, r"mov.b64 \1, 0;", "numbers"),
        # Of a lane's 32 tests whether a token exists: that of token 172, the first that does not.
        Mutant("the token behind the last counts",
               r"setp\.lt\.s32(?= p, %r\d+, %r\d+; [^\n]*\n\t\{\.reg \.pred p; setp\.lt)", "setp.le.s32",
               "numbers", 11),
        Mutant("padding is not zero", r"setp\.ne\.s32 p, %r\d+, 0; (selp\.b32 %r\d+, %r\d+, %r\d+, p;)",
               r"setp.ne.s32 p, 1, 0; \1", "numbers", 34),
        Mutant("the second level of four channels", r"(bfly\.b32 \t%r\d+, %r\d+, )16,", r"\g<1>8,",
               "numbers|two lanes"),
        Mutant("the second level from head 0", r"mul\.wide\.u32 (\t%rd\d+), %r\d+, 512;", r"mov.b64 \1, 0;", "numbers"),
        Mutant("the residual against the mean as it is stored, undone by no scale",
               r"mul\.f32 \t(%r\d+), %r\d+, (%r\d+);(?=\n(?:\tmov.*\n)*\tst\.shared\.f32)", r"mov.b32 \1, \2;",
               "numbers"),
        Mutant("means are cut, not rounded", _ROUND_MEAN, "cvt.rz.bf16x2", "numbers"),
        Mutant("means of blocks that do not exist", r"mov\.b32 \{lo, hi\}, 0;", "mov.b32 {lo, hi}, 16256;", "numbers"),
        Mutant("every block clears the missing ones", r"sub\.s32 (\t%r\d+), 1, %r\d+;", r"mov.b32 \1, 1;", "RACE", 1),
        Mutant("a mean's place without its block", r"(and\.b32 \t%r\d+, %r\d+, )7;(?=\n\tand\.b32.*28;)", r"\g<1>0;",
               _PLACE),
        Mutant("means of another head", r"mad\.lo\.s32 (\t%r\d+), %r\d+, %r\d+, (%r\d+);", r"mov.b32 \1, \2;", _PLACE),
        Mutant("the ones of one token are those of the next", r"selp\.b32 (%r\d+), 512, 0, p;",
               r"selp.b32 \1, 8192, 0, p;", "numbers"),
        Mutant("a one is a 2", r"selp\.b32 (%r\d+), 536870912, 0, p;", r"selp.b32 \1, 1073741824, 0, p;", "numbers"),
        Mutant("ones beyond the last token", r"setp\.lt\.s32( p, %r\d+, %r\d+; selp\.s32 (%r\d+), 1, 0, p;\}\n"
               r"\tand\.b32 \t%r\d+, )\2, (%r\d+);", r"setp.ge.s32\1\3, \3;", "numbers", 14),
        Mutant("the ones stand in the row of another block",
               r"xor\.b32 (\t%r\d+, %r\d+), %r\d+;(?=\n\tadd\.s32 \t%r\d+, "
               r"%r\d+, 7;)", r"xor.b32 \1, 5;", "numbers"),
        Mutant("the rows of ones stand in those of V", r"(or\.b16 \t%rs\d+, %rs\d+, )16384;", r"\g<1>0;", _PLACE),
        Mutant("tiles of the image are 9712 bytes apart", r"(mul\.wide\.s32 \t%rd\d+, %r\d+, )9728;", r"\g<1>9712;",
               _PLACE),
    ),
}  # fmt: skip
