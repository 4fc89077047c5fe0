"""Deliberately broken copies of the NVFP4 attention kernel: each an edit of its PTX, of its images or of its launch.

`caught` says what a run of a mutant must give: "fault" (the interpreter stops and names the PTX line), "wrong" (numbers
beyond the thresholds), or "equivalent" (nothing may change, and why is said).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from vc_attention.kernels.cute import layouts_nvfp4 as lo
from vc_attention.kernels.launch.images import Images

_WAIT = r"\t// begin inline asm\n\t\{\n\t\.reg \.pred\s+P1;(?:.*\n)*?\t\}\n\t// end inline asm\n"
_MMA = r"mma\.sync\.aligned\.m16n8k64[^;]*;"
_SHUFFLE = r"(shfl\.sync\.bfly\.b32 \t%r\d+, %r\d+, )"
_FROM_NEIGHBOUR = _SHUFFLE[:-1] + r"1, 31, -1;\n\tselp\.f32 \t%r\d+, )(%r\d+), (%r\d+)"
_AND = r"(and\.b32 \t%r\d+, %r\d+, )"


@dataclass(frozen=True)
class Mutant:
    """text: edit of the PTX. images: edit of the images. less_shared: bytes taken from the shared memory.
    plan: "v" (V means) or "v_k" (key means as well). keys: length of the case.
    """

    name: str
    caught: str
    text: Callable[[str], str] | None = None
    images: Callable[[Images], Images] | None = None
    less_shared: int = 0
    plan: str = "v"
    keys: int = 620


def edit(pattern: str, new: str | Callable[[re.Match], str], nth: int = 0) -> Callable[[str], str]:
    """Replace match number `nth` of `pattern`, which must exist and change."""

    def apply(text: str) -> str:
        found = list(re.finditer(pattern, text))
        assert len(found) > (nth if nth >= 0 else -nth - 1), f"{pattern} occurs {len(found)} times"
        match = found[nth]
        changed = new(match) if callable(new) else match.expand(new)
        assert changed != match[0], pattern
        return text[: match.start()] + changed + text[match.end() :]

    return apply


def _without(pattern: str, nth: int = 0) -> Callable[[str], str]:
    return edit(pattern, "", nth)


def _selectors(a: str, b: str, nth: int) -> Callable[[str], str]:
    def change(match: re.Match) -> str:
        head, (one, other) = match[0].split("{0,0}")[0], match[0].split("{0,0}")[1:]
        return head + a + one + b + other

    return edit(_MMA, change, nth)


def _float(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


def _early_arrival(text: str) -> str:
    """The consumers' release of a stage, moved in front of the loads of V."""
    release = r"\telect\.sync[^;]*;\n(?:.*\n){1,3}?\tmov\.b32[^;]*, 1;\n\tmbarrier\.arrive\.shared[^;]*;\n\$L\w+:\n"
    found = re.search(release, text)
    assert found
    text = text[: found.start()] + text[found.end() :]
    place = re.search(r"\t// begin inline asm\n\tprmt\.b32", text)
    assert place
    return text[: place.start()] + found[0] + text[place.start() :]


def _swap_scales_of_steps(text: str) -> str:
    """Both scale words of an n8 tile of K exchanged."""
    return edit(r"(ld\.shared\.v4\.b32 \t\{)(%r\d+), (%r\d+)(, %r\d+, %r\d+\}, \[%r\d+\+\d{5}\])", r"\1\3, \2\4")(text)


def _swap_first_p(text: str) -> str:
    return edit(r"e2m1x2\.f32 a, (%r\d+), (%r\d+);", r"e2m1x2.f32 a, \2, \1;")(text)


def _image(name: str, change: Callable[[torch.Tensor, Images], torch.Tensor]) -> Callable[[Images], Images]:
    def apply(images: Images) -> Images:
        tensor = getattr(images, name)
        changed = change(tensor.clone(), images).contiguous()
        assert changed.shape != tensor.shape or not torch.equal(changed, tensor)
        return replace(images, **{name: changed})

    return apply


def _move_codes(image: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Codes at `source` of each tile put to `target` (both flat code numbers); those there before are lost."""
    nibbles = torch.stack((image & 15, image >> 4), -1).flatten(2)
    moved = nibbles.clone()
    moved[..., target] = nibbles[..., source]
    return moved[..., 0::2] | moved[..., 1::2] << 4


def _rolled_tokens(image, images):
    channel, token = torch.arange(lo.HEAD_DIM)[:, None], torch.arange(lo.BLOCK)[None]
    return _move_codes(image, lo.v_code(channel, token).flatten(), lo.v_code(channel, (token + 1) % 128).flatten())


def _unpermuted_keys(image, images):
    key, channel = torch.arange(lo.BLOCK)[:, None], torch.arange(lo.HEAD_DIM)[None]
    return _move_codes(image, lo.k_code(key, channel).flatten(), lo.v_code(key, channel).flatten())


def _swapped_query_scales(image, images):
    row, group = torch.arange(16)[:, None], torch.arange(8)[None]
    image[..., lo.q_scale(row, group)] = image[..., lo.q_scale((row + 8) % 16, group)]
    return image


def _rotated_key_scales(image, images):
    places = lo.k_scale(37, torch.arange(8))
    image[..., places] = image[..., places.roll(1)]
    return image


def _ones_in_the_tail(image, images):
    token = torch.arange(images.lkv % 128, 128)
    block = images.lkv // 128
    places = lo.v_code(lo.row_sum_row(block), token)
    for place in places.tolist():
        image[:, block, place // 2] |= lo.E2M1_ONE << 4 * (place % 2)
    return image


def _values_in_the_tail(image, images):
    block = images.lkv // 128
    channel, token = torch.arange(128)[:, None], torch.arange(images.lkv % 128, 128)[None]
    places = lo.v_code(channel, token).flatten()
    for place in places.tolist():
        image[:, block, place // 2] |= 0x5 << 4 * (place % 2)
    image[:, block, lo.v_scale(torch.arange(128), 7)] = 0x70
    return image


def _next_blocks_ones(image, images):
    token = torch.arange(lo.BLOCK)
    own, other = lo.v_code(lo.row_sum_row(0), token), lo.v_code(lo.row_sum_row(1), token)
    image[:, :1] = _move_codes(_move_codes(image[:, :1], own, other), lo.v_code(lo.row_sum_row(5), token), own)
    return image


MUTANTS = (
    # Barriers and copies.
    Mutant(
        "empty barrier waits for 9 warps", "fault", edit(r"(mov\.b32 \t%r\d+, )8(;\n\tmbarrier\.init)", r"\g<1>9\2")
    ),
    Mutant(
        "empty barrier waits for 7 warps", "fault", edit(r"(mov\.b32 \t%r\d+, )8(;\n\tmbarrier\.init)", r"\g<1>7\2")
    ),
    Mutant(
        "full barrier waits for 2 arrivals", "fault", edit(r"(mov\.b32 \t%r\d+, )1(;\n\tmbarrier\.init)", r"\g<1>2\2")
    ),
    Mutant("expect_tx is one line short", "fault", edit(r"20992, 18944", "20976, 18928")),
    Mutant("expect_tx is one line too much", "fault", edit(r"20992, 18944", "21008, 18960")),
    Mutant("expect_tx without the means", "fault", edit(r"20992, 18944", "18944, 18944")),
    Mutant("producer does not wait", "fault", _without(_WAIT, 0)),
    Mutant("consumer does not wait", "fault", _without(_WAIT, 1)),
    Mutant("producer waits for the other parity", "fault", edit(r"not\.b32( \t%r\d+, %r\d+)", r"mov.b32\1")),
    Mutant("every lane copies", "fault", _without(r"\t@%p\d+ bra \t\$L\w+;\n(?=\tld\.param)")),
    Mutant(
        "every lane releases the stage",
        "fault",
        _without(r"\t@%p\d+ bra \t\$L\w+;\n(?=\tmov\.b32 \t%r\d+, 1;\n\tmbarrier\.arrive)"),
    ),
    Mutant("no lane releases the stage", "fault", _without(r"\tmbarrier\.arrive\.shared\.b64[^;]*;\n")),
    Mutant("stage released before V is read", "fault", _early_arrival),
    Mutant("no bar.sync behind the barriers' initialisation", "fault", _without(r"\tbar\.sync \t0;\n")),
    Mutant("no fence.mbarrier_init", "fault", _without(r"\tfence\.mbarrier_init[^;]*;\n")),
    Mutant("more registers than the SM has", "fault", edit(r"(setmaxnreg\.inc\S+ \t)240", r"\g<1>248")),
    Mutant("setmaxnreg.dec is missing", "fault", _without(r"\tsetmaxnreg\.dec[^;]*;\n")),
    Mutant("V lands one line late", "fault", edit(r"(add\.s32 \t%r\d+, %r\d+, )41088", r"\g<1>41104")),
    Mutant(
        "V's tiles are taken K's size apart", "wrong", edit(r"(mul\.wide\.s32 \t%rd\d+, %r\d+, )9728", r"\g<1>9216")
    ),
    Mutant("means always go to buffer 0", "fault", edit(_AND + "2048", r"\g<1>0"), keys=1100),
    Mutant("means are read from buffer 0", "wrong", edit(_AND + "2048", r"\g<1>0", 1), keys=1100),
    # Scales.
    Mutant("A's scales from the other lane pair", "equivalent", _selectors("{0,1}", "{0,0}", 40)),
    Mutant("B's scales from another quad lane", "equivalent", _selectors("{0,0}", "{0,2}", 5)),
    Mutant("B's scales from byte 1", "fault", _selectors("{0,0}", "{1,0}", 5)),
    Mutant("scale bytes of the lane pairs exchanged", "wrong", edit(r"20800, 5380", "5380, 20800")),
    Mutant("second scale word is the first", "wrong", edit(r"29538, 14118", "20800, 5380")),
    Mutant("scale bytes in the order of the registers", "wrong", edit(r"20800, 5380", "21520, 21520")),
    Mutant(
        "scale bytes from the neighbour lane",
        "wrong",
        edit(_SHUFFLE + r"2(, 31, -1;\n\t// begin inline asm\n\tprmt)", r"\g<1>1\2"),
    ),
    Mutant(
        "rows g and g + 8 exchanged in a group's maximum",
        "wrong",
        edit(r"selp\.f32( \t%r\d+), (%r\d+), (%r\d+), (%p\d+;\n\tselp)", r"selp.f32\1, \3, \2, \4"),
    ),
    Mutant("rows g and g + 8 exchanged in a group's scale", "wrong", edit(_FROM_NEIGHBOUR, r"\1\3, \2")),
    Mutant("rows g and g + 8 exchanged in the rescale factor", "wrong", edit(_FROM_NEIGHBOUR, r"\1\3, \2", 4)),
    Mutant("rows g and g + 8 exchanged in the output", "wrong", edit(_FROM_NEIGHBOUR, r"\1\3, \2", -1)),
    Mutant("scales of two k64 steps of K exchanged", "wrong", _swap_scales_of_steps),
    Mutant("row sums with scale 2", "wrong", edit(r"943208504", str(0x40404040))),
    Mutant("scale words of the neighbour column", "wrong", edit(_AND + "28;", r"\g<1>24;")),
    # Softmax.
    Mutant("a group's maximum from the wrong lane", "wrong", edit(_SHUFFLE + "1", r"\g<1>2")),
    Mutant("a row's maximum from one lane pair", "wrong", edit(_SHUFFLE + "2", r"\g<1>1")),
    Mutant("two elements of P exchanged", "wrong", _swap_first_p),
    Mutant("group scales half as large", "wrong", edit(r"0f410CEAED", _float(7.80735492))),
    Mutant("elements twice as large", "wrong", edit(r"0f413646EF", _float(12.39231742))),
    Mutant(
        "one output is not rescaled",
        "wrong",
        edit(r"fma\.rn\.f32 (\t%r\d+), (%r\d+), %r\d+, (%r\d+);", r"add.rn.f32 \1, \2, \3;", -1),
    ),
    Mutant(
        "l is not rescaled",
        "wrong",
        edit(r"mul\.f32 (\t%r\d+), (%r\d+), %r\d+;(?=\n\tadd\.s32)", r"mov.b32 \1, \2;"),
        keys=1100,
    ),
    Mutant("row maximum starts at 0", "wrong", edit("0fFF800000", _float(1000.0))),
    # Means.
    Mutant("l adds the first of two row sums", "wrong", edit(r"and\.b32 (%r\d+),%r\d+,0xffff0000;", r"mov.b32 \1, 0;")),
    Mutant(
        "the sums of two blocks exchanged",
        "wrong",
        edit(r"cvt\.rn\.bf16x2\.f32 (%r\d+),(%r\d+),(%r\d+);", r"cvt.rn.bf16x2.f32 \1,\3,\2;"),
    ),
    Mutant("the bias of block 0", "wrong", edit(r"(add\.s32 \t(%r\d+), \2, )64;", r"\g<1>0;"), plan="v_k"),
    Mutant(
        "the bias of rows g and g + 8 exchanged",
        "wrong",
        edit(r"(st\.shared\.v2\.b32 \t\[%r\d+\+\d+\], )\{(%r\d+), (%r\d+)\}", r"\1{\3, \2}"),
        plan="v_k",
    ),
    Mutant("fragments of another n8 tile", "wrong", edit(r"\+4736\]", "+5248]")),
    Mutant("a load 8 bytes off", "fault", edit(r"\+4736\]", "+4744]")),
    Mutant("rows beyond the last are stored", "fault", _without(r"\t@%p\d+ bra \t\$L\w+;\n(?=\tmul\.wide\.s32)")),
    Mutant("shared memory a line short", "fault", less_shared=16),
    # Images.
    Mutant("image: V's tokens one slot on", "wrong", images=_image("v", _rolled_tokens)),
    Mutant("image: K's columns in the order of the keys", "wrong", images=_image("k", _unpermuted_keys)),
    Mutant("image: scales of query rows exchanged", "wrong", images=_image("q", _swapped_query_scales)),
    Mutant("image: one key's scales rotated", "wrong", images=_image("k", _rotated_key_scales)),
    Mutant("image: padding counts in the row sums", "wrong", images=_image("v", _ones_in_the_tail)),
    Mutant("image: V's padding is not zero", "wrong", images=_image("v", _values_in_the_tail)),
    Mutant("image: the ones of block 0 stand in the row of block 1", "wrong", images=_image("v", _next_blocks_ones)),
    Mutant("image: K is a tile short", "fault", images=_image("k", lambda image, _: image[:, :-1])),
)
