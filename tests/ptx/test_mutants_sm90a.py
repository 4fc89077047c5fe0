"""Planted faults in the sm_90a attention kernels: the interpreter names each, or its numbers are wrong.

A text change stands for a mistake in the source or in the compiler. Where several faults follow from it all are
allowed: which one is met first depends on the schedule.
"""

from __future__ import annotations

import re

import pytest
import torch
from ptx import attention_model, on_torch
from ptx.mutation import Mutant, outcome
from vc_attention.kernels import Plan
from vc_attention.kernels.cute.config import config_of
from vc_attention.kernels.cute.reference import prepare

pytestmark = pytest.mark.xdist_group("cubins")

#: An mbarrier wait, as CuTe writes it: all of the inline assembly.
WAIT = r"\{\n\t\.reg \.pred       P1; \n\tLAB_WAIT: [^}]*DONE: \n\t\}"
EX2 = "attention_exp2_means_v_bf16"
EXPCAST = "attention_expcast_wide_means_v_bf16"
RELEASE = r"(\twgmma\.wait_group\.sync\.aligned \t0;\n)((?:.*\n){1,14}?\$L__BB0_\d+:\n)"
BULK = r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes"

CLUSTER_MUTANTS = [
    Mutant(
        "an empty barrier counts 15",
        r"(mov\.b32 \t%r\d+, )16;(?=\n\tmbarrier\.init)",
        r"\g<1>15;",
        "RACE|more arriv|DEADLOCK",
    ),
    Mutant("an empty barrier counts 17", r"(mov\.b32 \t%r\d+, )16;(?=\n\tmbarrier\.init)", r"\g<1>17;", "DEADLOCK"),
    Mutant("a full barrier counts 2", r"(mov\.b32 \t%r\d+, )1;(?=\n\tmbarrier\.init)", r"\g<1>2;", "DEADLOCK"),
    Mutant(
        "K expects half its bytes",
        r"(mov\.b32 \t%r\d+, )32768;(?=\n\tmbarrier\.arrive)",
        r"\g<1>16384;",
        "RACE|DEADLOCK|bytes|more arriv",
    ),
    Mutant("V expects 16 bytes more", r", 34816, (%p\d+);", r", 34832, \g<1>;", "DEADLOCK"),
    Mutant("the means are not expected", r"38912, 34816", "34816, 34816", "RACE|DEADLOCK|bytes|more arriv"),
    Mutant("the producer does not wait for an empty K", WAIT, "", "RACE|more arriv", 0),
    Mutant("the producer does not wait for an empty V", WAIT, "", "RACE|more arriv", 1),
    Mutant("a consumer does not wait for Q", WAIT, "", "RACE|nobody has written", 2),
    Mutant("a consumer does not wait for K", WAIT, "", "RACE|nobody has written", 3),
    Mutant("a consumer does not wait for V", WAIT, "", "RACE|nobody has written", 4),
    Mutant("the producer's parity is not inverted", r"not\.b32 (\t%r\d+, %r\d+;)", r"mov.b32 \g<1>", "DEADLOCK"),
    Mutant("K is released before its product is over", RELEASE, r"\g<2>\g<1>", "RACE", 0),
    Mutant("V is released before its product is over", RELEASE, r"\g<2>\g<1>", "RACE", 1),
    Mutant(
        "a release tells one CTA only",
        r"mapa\.shared::cluster\.u32 (\t%r\d+, %r\d+), 1;",
        r"mapa.shared::cluster.u32 \g<1>, 0;",
        "DEADLOCK|more arriv|RACE",
    ),
    Mutant(
        "K goes to the first CTA only", r"mov\.b16 (\t%rs\d+), 3;", r"mov.b16 \g<1>, 1;", "DEADLOCK|RACE|bytes|nobody"
    ),
    Mutant(
        "V goes to the second CTA only",
        r"mov\.b16 (\t%rs\d+), 3;",
        r"mov.b16 \g<1>, 2;",
        "DEADLOCK|RACE|bytes|nobody",
        1,
    ),
    Mutant(
        "a copy goes to the whole warp's lanes",
        r"@%p\d+ bra \t\$L__BB0_\d+;(?=\n(?:.*\n){1,16}.*multicast)",
        "",
        "RACE|more arriv|DEADLOCK",
        -2,
    ),
    Mutant(
        "no fence after the barriers' initialisation",
        r"fence\.mbarrier_init\.release\.cluster;",
        "",
        r"fence\.mbarrier_init",
    ),
    Mutant(
        "no cluster barrier at the start",
        r"barrier\.cluster\.arrive;\n\tbarrier\.cluster\.wait;",
        "bar.sync 0;",
        "mbarrier at|initialised",
    ),
    Mutant(
        "no cluster barrier at the end",
        r"barrier\.cluster\.arrive;\n\tbarrier\.cluster\.wait;",
        "",
        "may have left",
        -1,
    ),
    Mutant("no proxy fence after zeroing", r"fence\.proxy\.async\.shared::cta;", "", r"fence\.proxy\.async is missing"),
    Mutant(
        "the zeroing starts 256 words late", r"\[%r(\d+)\+5120\], 0;", r"[%r\g<1>+6144], 0;", "nobody has written|RACE"
    ),
    Mutant("no wgmma.fence before Q K", r"wgmma\.fence\.sync\.aligned;", "", r"wgmma\.fence"),
    Mutant("no wait for Q K", r"wgmma\.wait_group\.sync\.aligned \t0;", "", "not been waited for"),
    Mutant("no wait for P V", r"wgmma\.wait_group\.sync\.aligned \t0;", "", "not been waited for", 1),
    Mutant("P V is not committed", r"wgmma\.commit_group\.sync\.aligned;", "", "not been waited for", 1),
    Mutant(
        "K is read with a swizzle of 64 bytes",
        r"or\.b64 (\t%rd\d+, %rd\d+, )4611686293305360384;",
        r"or.b64 \g<1>-9223371762427371520;",
        "numbers|nobody|RACE|disagree",
        0,
    ),
    Mutant("a K step of Q starts 32 bytes late", r"(add\.s64 \t%rd\d+, %rd\d+, )2;", r"\g<1>4;", "numbers|RACE|nobody"),
    Mutant(
        "a consumer asks for too many registers",
        r"(setmaxnreg\.inc\.sync\.aligned\.u32 \t)240",
        r"\g<1>248",
        "DEADLOCK: .*registers",
    ),
    Mutant(
        "the producer keeps too many registers",
        r"(setmaxnreg\.dec\.sync\.aligned\.u32 \t)24",
        r"\g<1>40",
        "DEADLOCK: .*registers",
    ),
    Mutant(
        "the quad maximum leaves out two lanes", r"(shfl\.sync\.bfly\.b32 \t%r\d+, %r\d+, )2,", r"\g<1>1,", "numbers"
    ),
    Mutant(
        "one rescale is forgotten",
        r"fma\.rn\.f32 (\t%r\d+, %r\d+), %r\d+, (%r\d+);(?=\n\tfma\.rn\.f32 \t%r\d+, %r\d+, %r\d+, %r\d+;\n\tfma)",
        r"add.f32 \g<1>, \g<2>;",
        "numbers",
        40,
    ),
    Mutant(
        "two P bytes are exchanged",
        r"cvt\.pack\.sat\.u8\.s32\.b32 t, d, c, 0;",
        "cvt.pack.sat.u8.s32.b32 t, c, d, 0;",
        "numbers",
        17,
    ),
    Mutant(
        "the means are read without a swizzle",
        r"(or\.b64 \t%rd\d+, %rd\d+, )-4611685949707845632;",
        r"\g<1>68719542272;",
        "numbers",
    ),
    Mutant(
        "rows beyond the last are written",
        r"setp\.ge\.s32 (\t%p\d+, %r\d+, %r\d+;)",
        r"setp.gt.s32 \g<1>",
        "out of bounds",
        1,
    ),
    Mutant(
        "the output is one element off",
        r"st\.global\.b32 \t\[(%rd\d+)\+240\]",
        r"st.global.b32 \t[\g<1>+244]",
        "DATA RACE|written|two lanes|out of bounds|numbers",
    ),
    Mutant(
        "the V stage is one row off", r"(mad\.lo\.s32 \t%r\d+, %r\d+, )34816,", r"\g<1>34688,", "RACE|multiples|numbers"
    ),
    Mutant(
        "an instruction that nobody knows",
        r"ex2\.approx\.ftz\.f32",
        "tanh.approx.f32",
        r"tanh\.approx\.f32 is not modelled",
    ),
]

TURN_MUTANTS = [
    Mutant("the first turn is not given", r"bar\.arrive (%r\d+), 256;", "", "DEADLOCK"),
    Mutant("a turn is given twice", r"bar\.arrive (%r\d+), 256;", r"\g<0> \g<0>", "32 more arrive|DEADLOCK", 1),
    Mutant("a turn is never awaited", r"bar\.sync \t%r\d+, 256;", "", "32 more arrive|nobody collected|DEADLOCK", 1),
    Mutant("a turn of 288 threads", r"(bar\.sync \t%r\d+, )256;", r"\g<1>288;", "awaited for"),
    Mutant("the last turn is not given", r"bar\.arrive (%r\d+), 256;", "", "DEADLOCK|nobody collected", -1),
    Mutant("no barrier after the initialisation", r"bar\.sync \t0;", "", "initialised|without being ordered"),
    Mutant(
        "padding stays in the row sums",
        r"fma\.rn\.f32 (\t%r\d+, )%r\d+, %r\d+, (%r\d+;)(?=\n(?:.*\n){0,8}.*setp)",
        r"add.f32 \g<1>0f00000000, \g<2>",
        "numbers",
        0,
    ),
    Mutant(
        "an exponential loses its offset",
        r"(ex2\.approx\.ftz\.f32 \t%r\d+, )%r\d+;",
        r"\g<1>0f00000000;",
        "numbers",
        30,
    ),
]


@pytest.fixture(scope="module")
def case():
    """Two query tiles, six key tiles of which the last is ragged: two groups of means, each stage used twice."""
    g = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(1, 1, n, 128, generator=g) for n in (200, 1300, 1300))
    # Blocks with means of their own, so that a row sum in the wrong place shows.
    v = v + torch.randn(1, 1, 11, 128, generator=g).repeat_interleave(128, 2)[:, :, :1300]
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    plans = {EXPCAST: Plan(), EX2: Plan(probability="exp2")}
    images = {name: prepare(q, 2 * k, v, plan) for name, plan in plans.items()}
    expected = {name: attention_model.attention(images[name], config_of(plan, "bf16")) for name, plan in plans.items()}
    return plans, images, expected


def check(folder, case, name: str, schedule: str, seed: int):
    """A function of PTX text that runs it in place of the kernel `name`."""
    plans, images, expected = case

    def run(text: str) -> str | None:
        library = on_torch.InterpretedLibrary(folder, schedule=schedule, seed=seed)
        library.replaced[name] = text
        out = on_torch.attend(library, images[name], plans[name], torch.bfloat16, complete=False)
        missing = library.storages.unwritten(out)
        if missing:
            return f"{missing} bytes not written"
        found = out.to(torch.float64).transpose(1, 2).numpy()[0]
        return attention_model.mismatch(found, expected[name])

    return run


@pytest.mark.parametrize("name", [EXPCAST, EX2])
def test_the_kernel_itself_is_right(ptx, case, name):
    assert check(ptx, case, name, "random", 1)((ptx / f"{name}.ptx").read_text()) is None


@pytest.mark.parametrize(
    ("name", "mutant"),
    [(EXPCAST, m) for m in CLUSTER_MUTANTS] + [(EX2, m) for m in TURN_MUTANTS],
    ids=lambda x: x.name if isinstance(x, Mutant) else "",
)
def test_mutants_are_caught(ptx, case, name, mutant):
    text = (ptx / f"{name}.ptx").read_text()
    found = outcome(mutant, text, check(ptx, case, name, "random", 1))
    assert re.search(mutant.expected, found), found
    if "numbers" not in mutant.expected:
        assert "PTX line" in found or "ends with" in found or "may have left" in found, found
