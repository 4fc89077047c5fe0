"""mbarriers, bulk copies, named barriers, clusters, setmaxnreg: the good pipeline in every schedule, and each fault."""

from __future__ import annotations

import numpy as np
import pytest
from ptx.parser import PtxError
from ptx.snippets import run

SHARED = ".extern .shared .align 128 .b8 dyn[];"
STAGES, TILE, TILES = 2, 256, 5


def wait(n: int, bar: str, parity: str) -> str:
    return f"{{ W: mbarrier.try_wait.parity.shared.b64 %p5, [{bar}], {parity}; @%p5 bra O; bra W; O: }}"


#: Warp 0 copies tiles of 64 words, warps 1 and 2 add them up: full barriers at dyn, empty ones at dyn + 16.
PIPELINE = f"""
mov.b32 %r1, dyn; shr.u32 %r2, tid, 5; and.b32 %r3, tid, 31;
setp.ne.b32 %p0, tid, 0; @%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 1;
mbarrier.init.shared.b64 [%r1+16], 2; mbarrier.init.shared.b64 [%r1+24], 2;
READY: fence.mbarrier_init.release.cluster; bar.sync 0;
mov.b32 %r4, 0; mov.b32 %r9, 0; setp.ne.b32 %p1, %r2, 0; @%p1 bra CONSUMER;
PRODUCER: and.b32 %r5, %r4, 1; shl.b32 %r6, %r5, 3; add.s32 %r6, %r6, %r1; shr.u32 %r7, %r4, 1; and.b32 %r7, %r7, 1;
xor.b32 %r8, %r7, 1; add.s32 %r10, %r6, 16;
{wait(0, "%r10", "%r8")}
elect.sync %r11|%p2, -1; @!%p2 bra SENT;
mbarrier.arrive.expect_tx.shared.b64 %d0, [%r6], {TILE};
shl.b32 %r12, %r5, 8; add.s32 %r12, %r12, %r1; mul.wide.u32 %d1, %r4, {TILE}; add.s64 %d1, %d1, data;
mov.b32 %r13, {TILE};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r12+128], [%d1], %r13, [%r6];
SENT: add.s32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, {TILES}; @%p3 bra PRODUCER; bra END;
CONSUMER: and.b32 %r5, %r4, 1; shl.b32 %r6, %r5, 3; add.s32 %r6, %r6, %r1; shr.u32 %r7, %r4, 1; and.b32 %r7, %r7, 1;
{wait(1, "%r6", "%r7")}
shl.b32 %r12, %r5, 8; add.s32 %r12, %r12, %r1; shl.b32 %r14, tid, 2; add.s32 %r12, %r12, %r14;
ld.shared.b32 %r15, [%r12]; add.s32 %r9, %r9, %r15;
elect.sync %r11|%p2, -1; @%p2 mbarrier.arrive.shared.b64 %d0, [%r6+16];
add.s32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, {TILES}; @%p3 bra CONSUMER;
sub.s32 %r16, tid, 32; mul.wide.u32 %d2, %r16, 4; add.s64 %d2, %d2, out; st.global.b32 [%d2], %r9;
END:
"""
SIZE = 128 + STAGES * TILE


def pipeline(body: str = PIPELINE, schedule: str = "orderly", seed: int = 0, size: int = SIZE, **options) -> np.ndarray:
    data = np.arange(TILES * 64, dtype=np.uint32)
    out = np.zeros(64, np.uint32)
    run(
        body,
        {"data": data, "out": out},
        block=96,
        shared=SHARED,
        shared_bytes=size,
        schedule=schedule,
        seed=seed,
        **options,
    )
    return out


@pytest.mark.parametrize("schedule", ["orderly", "eager", *range(6)])
def test_a_pipeline(schedule):
    options = {"schedule": "random", "seed": schedule} if isinstance(schedule, int) else {"schedule": schedule}
    assert np.array_equal(pipeline(**options), np.arange(TILES * 64).reshape(TILES, 64).sum(0))


FAULTS = {
    "too few arrivals expected": (("[%r1+16], 2", "[%r1+16], 1"), "DATA RACE|more arrivals than its count|DEADLOCK"),
    "too many arrivals expected": (("[%r1+16], 2", "[%r1+16], 3"), r"DEADLOCK: .*mbarrier 0x410 in phase 0: 1 of 3"),
    "too few bytes expected": ((f"[%r6], {TILE}", f"[%r6], {TILE // 2}"), "RACE|ends with|DEADLOCK|more arrivals"),
    "too many bytes expected": ((f"[%r6], {TILE}", f"[%r6], {TILE + 16}"), "DEADLOCK: .* 16 bytes expected"),
    "no wait of the producer": ((wait(0, "%r10", "%r8"), ""), "DATA RACE|more arrivals"),
    "no wait of the consumer": ((wait(1, "%r6", "%r7"), ""), "DATA RACE|nobody has written|more arrivals"),
    "producer's parity": (("xor.b32 %r8, %r7, 1", "mov.b32 %r8, %r7"), "DEADLOCK"),
    "a parity of 2": (("and.b32 %r7, %r7, 1;\n{ W", "mov.b32 %r7, 2;\n{ W"), "2 is not a parity"),
    "release before the read": (("ld.shared.b32 %r15, [%r12]; add.s32 %r9, %r9, %r15;", ""), None),
    "copies of every lane": (("@!%p2 bra SENT;", ""), "RACE|more arrivals"),
    "arrivals of every lane": (("@%p2 mbarrier.arrive", "mbarrier.arrive"), "DEADLOCK|DATA RACE"),
    "no fence after the initialisation": (
        ("fence.mbarrier_init.release.cluster;", ""),
        r"without fence\.mbarrier_init",
    ),
    "no barrier after the initialisation": (("bar.sync 0;", ""), "no initialised mbarrier|without being ordered"),
    "initialised twice": (("[%r1+8], 1", "[%r1], 1"), "initialised twice"),
    "shared memory too small": (None, "out of bounds"),
    "copy not aligned": (("[%r12+128]", "[%r12+136]"), "multiples of 16"),
    "copy over the barriers": (("[%r12+128]", "[%r12+16]"), "write over the mbarrier"),
    "copy beyond the data": (("mul.wide.u32 %d1, %r4,", "mul.wide.u32 %d1, 5,"), "global access out of bounds"),
    "plain store to a barrier": (("SENT:", "SENT: st.shared.b32 [%r1], 0;"), "write over the mbarrier"),
}


@pytest.mark.parametrize("schedule", ["orderly", "random"])
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_pipeline(name, schedule):
    change, message = FAULTS[name]
    body, size = PIPELINE, SIZE
    if name == "release before the read":
        read = change[0]
        assert read in body
        release = "@%p2 mbarrier.arrive.shared.b64 %d0, [%r6+16];"
        body = body.replace(read, "").replace(release, release + read)
        message = "DATA RACE"
    elif change is None:
        size -= 16
    else:
        assert change[0] in body
        body = body.replace(*change)
    with pytest.raises(PtxError, match=message):
        pipeline(body, schedule, 3, size)


def test_leftovers():
    start = "mov.b32 %r1, dyn; setp.ne.b32 %p0, tid, 0; @%p0 bra END; mbarrier.init.shared.b64 [%r1], 2;"
    start += "fence.mbarrier_init.release.cluster;"
    data = {"data": np.zeros(64, np.uint32)}
    copy = "mov.b32 %r13, 64;"
    copy += "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+64], [data], %r13, [%r1];"
    with pytest.raises(PtxError, match="1 copies in flight"):
        run(start + copy + "END:", data, shared=SHARED, shared_bytes=256)
    with pytest.raises(PtxError, match="bytes outstanding"):
        run(start + "mbarrier.arrive.expect_tx.shared.b64 %d0, [%r1], 64; END:", shared=SHARED, shared_bytes=256)
    with pytest.raises(PtxError, match="named barrier 3 that nobody collected"):
        run("bar.arrive 3, 64;")


def test_named_barriers():
    """Two warps hand a word to and fro: bar.arrive does not wait, bar.sync does."""
    body = """
    mov.b32 %r1, dyn; mul.wide.u32 %d0, tid, 4; add.s64 %d0, %d0, out; setp.lt.u32 %p0, tid, 32; @%p0 bra FIRST;
    bar.sync 1, 64; ld.shared.b32 %r2, [%r1]; st.global.b32 [%d0], %r2; bar.sync 2, 64; bra END;
    FIRST: st.shared.b32 [%r1], 41; bar.arrive 1, 64; bar.sync 2, 64; st.shared.b32 [%r1], 42; ld.shared.b32 %r2, [%r1];
    st.global.b32 [%d0], %r2; END:
    """

    def result(text, **options):
        out = np.zeros(64, np.uint32)
        run(text, {"out": out}, block=64, shared=SHARED, shared_bytes=64, **options)
        return out

    for seed in range(3):
        assert np.array_equal(result(body, schedule="random", seed=seed), np.repeat([42, 41], 32))
    with pytest.raises(PtxError, match="DATA RACE"):
        result(body.replace("bar.sync 2, 64;", ""))
    with pytest.raises(PtxError, match=r"DEADLOCK: .*barrier 1 of 96 threads"):
        result(body.replace("1, 64", "1, 96").replace("bar.arrive 1, 96;", ""))
    with pytest.raises(PtxError, match="for 64 and for 16 threads"):
        result(body.replace("bar.sync 1, 64", "bar.sync 1, 16"))
    with pytest.raises(PtxError, match="barrier 1 is awaited"):
        result(body.replace("bar.sync 1, 64", "bar.sync 1, 96"))


#: Each CTA of a pair fetches half a tile and sends it to both; both then read the whole of it.
CLUSTER = """
mov.b32 %r1, dyn; mov.u32 %r2, %cluster_ctarank; setp.ne.b32 %p0, tid, 0; @%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 2;
READY: fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;
elect.sync %r3|%p1, -1; @!%p1 bra SENT;
mbarrier.arrive.expect_tx.shared.b64 %d0, [%r1], 128; shl.b32 %r4, %r2, 6; add.s32 %r5, %r1, %r4;
mapa.shared::cluster.u32 %r5, %r5, %r2; cvt.u64.u32 %d1, %r4; add.s64 %d1, %d1, data; mov.b32 %r6, 64; mov.b16 %h0, 3;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r5+128], [%d1], %r6, [%r1], %h0;
SENT: { W: mbarrier.try_wait.parity.shared.b64 %p5, [%r1], 0; @%p5 bra O; bra W; O: }
shl.b32 %r7, tid, 2; add.s32 %r7, %r7, %r1; ld.shared.b32 %r8, [%r7+128];
elect.sync %r3|%p1, -1; @!%p1 bra TOLD; mov.b32 %r9, 1;
mapa.shared::cluster.u32 %r10, %r1, 0; mbarrier.arrive.shared::cluster.b64 _, [%r10+8], %r9;
mapa.shared::cluster.u32 %r10, %r1, 1; mbarrier.arrive.shared::cluster.b64 _, [%r10+8], %r9;
TOLD: add.s32 %r11, %r1, 8;
{ W: mbarrier.try_wait.parity.shared.b64 %p5, [%r11], 0; @%p5 bra O; bra W; O: }
mov.u32 %r12, %ctaid.x; shl.b32 %r12, %r12, 5; add.s32 %r12, %r12, tid;
mul.wide.u32 %d2, %r12, 4; add.s64 %d2, %d2, out;
st.global.b32 [%d2], %r8; barrier.cluster.arrive; barrier.cluster.wait;
"""
CLUSTER_FAULTS = {
    "mask of one": (("mov.b16 %h0, 3", "mov.b16 %h0, 1"), "DEADLOCK|RACE|bytes"),
    "mask of three": (("mov.b16 %h0, 3", "mov.b16 %h0, 7"), "does not fit a cluster of 2"),
    "no first cluster barrier": (
        ("cluster; barrier.cluster.arrive; barrier.cluster.wait;", "cluster; bar.sync 0;"),
        "no initialised mbarrier|without being ordered",
    ),
    "arrival without a wait": (("barrier.cluster.wait;\nelect", "barrier.cluster.arrive;\nelect"), "second arrival"),
    "wait without an arrival": (
        ("barrier.cluster.arrive; barrier.cluster.wait;\nelect", "barrier.cluster.wait;\nelect"),
        "without an arrival",
    ),
    "told one only": (("[%r10+8], %r9;\nmapa", "[%r1+8], %r9;\nmapa"), "DEADLOCK|more arrivals"),
    "mapa beyond": (("%r10, %r1, 1", "%r10, %r1, 2"), "mapa to a CTA"),
    "half the bytes": (("[%r1], 128", "[%r1], 64"), "bytes|RACE|nobody|DEADLOCK"),
}  # fmt: skip


def clustered(body: str = CLUSTER, schedule: str = "orderly", seed: int = 0) -> np.ndarray:
    data, out = np.arange(32, dtype=np.uint32), np.zeros(128, np.uint32)
    run(
        body,
        {"data": data, "out": out},
        shared=SHARED,
        shared_bytes=256,
        cluster=2,
        grid=(4,),
        schedule=schedule,
        seed=seed,
    )
    return out


@pytest.mark.parametrize("schedule", ["orderly", "eager", "random"])
def test_clusters(schedule):
    for seed in range(3):
        assert np.array_equal(clustered(schedule=schedule, seed=seed), np.tile(np.arange(32), 4))


@pytest.mark.parametrize("name", CLUSTER_FAULTS)
def test_faults_of_clusters(name):
    change, message = CLUSTER_FAULTS[name]
    assert change[0] in CLUSTER
    with pytest.raises(PtxError, match=message):
        clustered(CLUSTER.replace(*change), "random")


def test_a_block_must_not_leave_while_it_is_used():
    """The wait for the other's arrivals, or the last cluster barrier: one of the two keeps the memory alive."""
    told = "{ W: mbarrier.try_wait.parity.shared.b64 %p5, [%r11], 0; @%p5 bra O; bra W; O: }"
    last = "st.global.b32 [%d2], %r8; barrier.cluster.arrive; barrier.cluster.wait;"
    assert told in CLUSTER
    assert last in CLUSTER
    without = CLUSTER.replace(told, "")
    for body in (without, CLUSTER.replace(last, "st.global.b32 [%d2], %r8;")):
        assert np.array_equal(clustered(body), np.tile(np.arange(32), 4))
    with pytest.raises(PtxError, match="may have left before another one used its shared memory"):
        clustered(without.replace(last, "st.global.b32 [%d2], %r8;"))


def test_setmaxnreg():
    """384 threads start with 168 registers; what the first warpgroup gives back the other two may take."""
    body = """
    setp.lt.u32 %p0, tid, 128; @%p0 bra FEW; setmaxnreg.inc.sync.aligned.u32 {more}; bra END;
    FEW: setmaxnreg.dec.sync.aligned.u32 {less}; END:
    """

    def result(more: int, less: int) -> None:
        for schedule in ("orderly", "random"):
            run(body.format(more=more, less=less), block=384, schedule=schedule)

    result(240, 24)
    result(168, 168)
    with pytest.raises(PtxError, match=r"DEADLOCK: .* more registers"):
        result(248, 24)
    with pytest.raises(PtxError, match=r"DEADLOCK: .* more registers"):
        result(240, 32)
    with pytest.raises(PtxError, match=r"setmaxnreg\.inc from 168 to 160"):
        result(160, 24)
    with pytest.raises(PtxError, match="not a number of registers"):
        result(241, 24)
