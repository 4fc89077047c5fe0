"""Tensor memory: loads and stores, allocation; every missing wait, fence or barrier as a fault, in each schedule."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import formats as fm
from ptx.parser import PtxError
from ptx.snippets import run
from ptx.tensor_snippets import (
    COMMIT,
    FREE,
    SETUP,
    SHARED,
    descriptor,
    execute,
    idesc,
    issue,
    mma,
    read,
    registers,
    store,
    wait,
)

G = np.random.default_rng(11)
SCHEDULES = ("orderly", "eager", "random")


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32, 64, 128])
def test_what_is_stored_is_loaded(count):
    """Each warp has its 32 lanes, each lane its row; the address's column counts."""
    words = G.integers(0, 2**32, (128, count), dtype=np.uint32)
    body = SETUP + store(count, 200) + "".join(f"mov.b32 %r{n}, 0;" for n in range(count)) + read(count, 200) + FREE
    assert np.array_equal(execute(body, np.zeros(512, np.uint8), count, words), words)


#: Rows of Q (A of the first MMA) and columns of both Bs, E4M3; P is A of the second one, 8 columns of tensor memory.
COLUMNS = 32
E4M3 = ("f8f6f4", "e4m3")
Q, K, V, SIZE = 0, 4096, 4096 + 1024, 4096 + 2048
S, P, O = 0, 64, 128  # noqa: E741 - the output's usual name
READ_S = (
    f"tcgen05.fence::after_thread_sync; tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(0, 32)}, [%r507+{S}];"
    "tcgen05.wait::ld.sync.aligned;"
)
#: Two fp32 of S as E4M3, the first in the lower byte: four of them are a word of P.
PACK = "".join(
    f"mov.b32 %f0, %r{4 * n}; mov.b32 %f1, %r{4 * n + 1}; cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f0;"
    f"mov.b32 %f0, %r{4 * n + 2}; mov.b32 %f1, %r{4 * n + 3}; cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f0;"
    f"mov.b32 %r{64 + n}, {{%h0, %h1}};"
    for n in range(8)
)
WRITE_P = (
    f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r507+{P}], {registers(64, 8)}; tcgen05.wait::st.sync.aligned;"
    "tcgen05.fence::before_thread_sync;"
)
ARRIVE = "elect.sync %r508|%p4, -1; @%p4 mbarrier.arrive.shared.b64 %d3, [%r500+@bar1];"
QK = mma("f8f6f4", descriptor(32, Q, 128, 0), descriptor(32, K, COLUMNS, 0), idesc(*E4M3, COLUMNS), 0, d=S)


def pv(accumulate: int) -> str:
    return mma("f8f6f4", f"[%r506+{P}]", descriptor(32, V, COLUMNS, 0), idesc(*E4M3, COLUMNS), accumulate, d=O)


#: Attention without a softmax, twice over the same keys: S = Q K^T, P = S rounded, O += P V. A barrier each way.
ATTENTION = (
    SETUP
    + issue(QK, "FIRST")
    + wait("bar0", 0)
    + READ_S
    + PACK
    + WRITE_P
    + ARRIVE
    + f"@%p1 bra SECOND; {wait('bar1', 0)} SECOND:"
    + issue(pv(0) + QK, "THIRD")
    + wait("bar0", 1)
    + READ_S
    + PACK
    + WRITE_P
    + ARRIVE
    + f"@%p1 bra FOURTH; {wait('bar1', 1)} FOURTH:"
    + issue(pv(1), "FIFTH")
    + wait("bar0", 0)
    + read(COLUMNS, O)
    + FREE
)


def operands() -> tuple[np.ndarray, np.ndarray]:
    """An image of Q, K and V in the layout of 32 swizzled bytes, and what O should be."""
    matrices = [fm.to_e4m3(G.standard_normal((rows, 32)).astype(np.float32)) for rows in (128, COLUMNS, COLUMNS)]
    image = np.zeros(SIZE, np.uint8)
    for matrix, start in zip(matrices, (Q, K, V), strict=True):
        row, byte = np.indices(matrix.shape)
        at = row * 32 + byte
        image[start + (at ^ (at >> 7 & 1) << 4)] = matrix
    q, k, v = (fm.E4M3[matrix] for matrix in matrices)
    p = fm.E4M3[fm.to_e4m3((q @ k.T).astype(np.float32))]
    once = (p @ v.T).astype(np.float32)
    return image, (once + p @ v.T).astype(np.float32)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_attention(schedule, seed):
    image, expected = operands()
    assert np.array_equal(execute(ATTENTION, image, COLUMNS, schedule=schedule, seed=seed).view(np.float32), expected)


def test_two_blocks_of_a_cluster():
    """Each has tensor memory of its own, and both come to the same."""
    image, expected = operands()
    found = execute(ATTENTION, image, COLUMNS, schedule="random", cluster=2, grid=(4,))
    assert np.array_equal(found.view(np.float32), expected)


AFTER, BEFORE = "tcgen05.fence::after_thread_sync;", "tcgen05.fence::before_thread_sync;"
#: name -> (what of ATTENTION is replaced, by what, which of its places, the message)
HAZARDS = {
    "S is read before the commit is waited for": (
        wait("bar0", 0),
        "",
        0,
        "RACE: read of .* columns 0|nobody has written",
    ),
    "S is read without the fence": (READ_S, READ_S.replace(AFTER, ""), 0, "RACE: read of tensor memory, columns 0"),
    "S is used before it is there": (
        "tcgen05.wait::ld.sync.aligned;",
        "",
        0,
        "read of the register %f1, which a tcgen05.ld fills: wait::ld is missing",
    ),
    "a register of S is written before it is filled": (
        "tcgen05.wait::ld.sync.aligned;",
        "mov.b32 %r3, 0; tcgen05.wait::ld.sync.aligned;",
        0,
        "write to the register %r3",
    ),
    "S is overwritten while it is read": (
        ARRIVE,
        ARRIVE
        + f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(0, 32)}, [%r507+{S}]; tcgen05.wait::ld.sync.aligned;",
        0,
        "RACE: (write|read) of tensor memory, columns 0",
    ),
    "P is written over what the first MMA reads": (
        wait("bar0", 1),
        "",
        0,
        "RACE: (read|write) of tensor memory|nobody has written",
    ),
    "P without its wait": ("tcgen05.wait::st.sync.aligned;", "", 0, "RACE: read of tensor memory, columns 64..71"),
    "P without the fence before": (WRITE_P, WRITE_P.replace(BEFORE, ""), 0, "RACE: (read|write) of tensor memory"),
    "P without the barrier": (wait("bar1", 0), "", 0, "RACE: read of tensor memory|nobody has written"),
    "P without the fence after": (
        "@%p1 bra THIRD; " + AFTER,
        "@%p1 bra THIRD; ",
        0,
        "RACE: read of tensor memory, columns 64",
    ),
    "an early arrival": (WRITE_P + ARRIVE, ARRIVE + WRITE_P, 0, "RACE: read of tensor memory|nobody has written"),
    "O is read without the fence": (
        read(COLUMNS, O),
        read(COLUMNS, O).replace(AFTER, ""),
        0,
        "RACE: read of tensor memory, columns 128",
    ),
    "O is read too early": (wait("bar0", 0), "", 1, "RACE: (read|write) of tensor memory, columns 128"),
    "freed without the fence": (
        read(COLUMNS, O),
        read(COLUMNS, O).replace(BEFORE, ""),
        0,
        "RACE: deallocation of .* after a read",
    ),
    "freed too early": (
        "bar.sync 0; @%p1 bra DONE;",
        "@%p1 bra DONE;",
        0,
        "RACE: deallocation|nobody has allocated|allocated: none",
    ),
    "V is overwritten by a store": (
        wait("bar0", 1),
        f"@%p1 bra KEPT; st.shared.b32 [%r500+{V}], 7; KEPT:" + wait("bar0", 1),
        0,
        "RACE: write to shared memory .* after its read",
    ),
    "V is overwritten by a copy": (
        wait("bar0", 1),
        f"@%p1 bra KEPT; elect.sync %r508|%p2, -1; @!%p2 bra KEPT; mov.b32 %r511, 64; add.s32 %r510, %r500, {V};"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r510], [image], %r511, [%r500+@bar1];KEPT:"
        + wait("bar0", 1),
        0,
        "RACE: write to shared memory .* after its read",
    ),
    "no proxy fence": ("fence.proxy.async.shared::cta;", "", 0, r"fence\.proxy\.async is missing"),
    "all lanes issue": ("@!%p2 bra FIRST;", "", 0, "32 lanes issue an MMA"),
    "all lanes commit": ("@!%p2 bra FIRST;" + " " + QK, "@!%p2 bra ONE; " + QK + "ONE:", 0, "32 lanes commit"),
    "another lane commits": (
        QK + " " + COMMIT + " FIRST:",
        QK + " FIRST: setp.ne.b32 %p2, tid, 1; @%p2 bra OTHER; " + COMMIT + " OTHER:",
        0,
        "lane 1 commits, but lane 0 issued",
    ),
    "no commit": (COMMIT, "", 0, "DEADLOCK: .*mbarrier"),
    "a barrier that is not fenced": ("fence.mbarrier_init.release.cluster;", "", 0, r"without fence\.mbarrier_init"),
    "two commits": (COMMIT, COMMIT + COMMIT, 0, r"more arrivals than its count|RACE|DEADLOCK|columns 64\.\.71"),
    "D that nobody has written": (pv(0), pv(1), 0, "nobody has written, in columns 128"),
    "other lanes": (f"[%r507+{S}]", f"[%r506+{S}]", 0, r"lanes 0\.\.31 by warp [123], which may only touch"),
    "beyond the columns": (
        f"[%r507+{S}]",
        "[%r507+481]",
        0,
        r"columns 481\.\.512 of tensor memory; allocated: 0\.\.511",
    ),
    "lanes differ": (f"[%r507+{S}]", f"[tid+{S}]", 0, "differs between the lanes"),
    "D and A overlap": (f"[%r506+{O}], [%r506+{P}]", f"[%r506+{P}], [%r506+{P}]", 0, "A and D of an MMA overlap"),
    "D of a lane": ("[%r506+0]", f"[%r506+{1 << 16}]", 0, "begins at lane 1"),
    "operands out of bounds": ("mov.b64 %d2, ", "mov.b64 %d2, 9", 0, "out of bounds|reserved|bits 46"),
}


def planted(name: str) -> tuple[str, str]:
    old, new, place, message = HAZARDS[name]
    parts = ATTENTION.split(old)
    assert len(parts) > place + 1, "there is no such place"
    text = old.join(parts[: place + 1]) + new + old.join(parts[place + 1 :])
    return text, message


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", HAZARDS)
def test_hazards(name, schedule):
    text, message = planted(name)
    with pytest.raises(PtxError, match=message):
        execute(text, operands()[0], COLUMNS, schedule=schedule, seed=5)


def test_the_end():
    """What must be over when a kernel ends; commits that nobody waits for are only signals."""
    image = operands()[0]
    body = SETUP + issue(QK) + wait("bar0", 0) + AFTER + FREE
    execute(body, image, 1)
    second = COMMIT.replace("@bar0", "@bar1")
    execute(SETUP + issue(QK, commit=second + COMMIT) + wait("bar0", 0) + AFTER + FREE, image, 1)
    for old, new, message in (
        (
            wait("bar0", 0),
            "",
            "RACE: deallocation of tensor memory, columns 0..511, is not ordered after its last write",
        ),
        (FREE, "", "tensor memory that it has not freed"),
        (FREE, store(1, 500).replace("tcgen05.wait::st.sync.aligned;", "") + FREE, r"RACE: deallocation"),
    ):
        assert old in body
        with pytest.raises(PtxError, match=message):
            execute(body.replace(old, new), image, 1, np.zeros((128, 1), np.uint32))
    load = f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {registers(0, 1)}, [%r507+500];"
    for text, message in (
        (SETUP + issue(QK, commit=""), r"ends with a tcgen05\.mma that nobody has waited for"),
        (SETUP + issue(QK), r"ends with a tcgen05\.mma that nobody has waited for"),
        (SETUP + store(1, 500).replace("tcgen05.wait::st.sync.aligned;", ""), r"ends with a tcgen05\.st"),
        (SETUP + store(1, 500) + load, r"ends with a tcgen05\.ld"),
        (SETUP, "tensor memory that it has not freed"),
    ):
        with pytest.raises(PtxError, match=message):
            execute(text, image, 1, np.zeros((128, 1), np.uint32))


def allocate(place: int, columns: int | str) -> str:
    return f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0+{place}], {columns};"


def free(register: str, columns: int | str) -> str:
    return f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {register}, {columns};"


GIVE_UP = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
TWO = "mov.b32 %r0, dyn;" + allocate(0, 128) + allocate(4, 64)
LOADED = "ld.shared.b32 %r1, [%r0]; ld.shared.b32 %r2, [%r0+4];"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_allocations(schedule):
    """Two allocations do not overlap, and a freed one can be had again; a random schedule puts them anywhere."""
    again = free("%r1", 128) + allocate(0, 256) + "ld.shared.b32 %r1, [%r0];" + free("%r1", 256) + free("%r2", 64)
    row = "mul.wide.u32 %d0, tid, 8; add.s64 %d0, %d0, out; st.global.b32 [%d0], %r1; st.global.b32 [%d0+4], %r2;"
    places = set()
    for seed in range(8):
        out = np.zeros((32, 2), np.uint32)
        body = TWO + LOADED + row + again
        run(body, {"out": out}, shared=SHARED, shared_bytes=64, target="sm_100a", schedule=schedule, seed=seed)
        first, second = (int(x) for x in out[0])
        assert (out == out[0]).all() and first % 128 == second % 64 == 0 and max(first + 128, second + 64) <= 512
        assert first + 128 <= second or second + 64 <= first
        places.add((first, second))
    assert (len(places) > 1) == (schedule == "random")


ALLOCATION_FAULTS = {
    "no power of two": (TWO.replace("128", "96"), "96 columns: an allocation has a power of two"),
    "too few": (TWO.replace("64;", "16;"), "16 columns: an allocation"),
    "too many": (TWO.replace("128;", "1024;"), "1024 columns: an allocation"),
    "more than there are": (TWO.replace("128;", "512;"), "DEADLOCK: .* 64 free columns of tensor memory"),
    "after the permit": (
        TWO.replace("tcgen05.alloc", GIVE_UP + "tcgen05.alloc").replace(GIVE_UP, "", 1),
        "after relinquish",
    ),
    "permit without any": (GIVE_UP, "no allocated tensor memory"),
    "freed twice": (TWO + LOADED + free("%r1", 128) + free("%r1", 128), "which is no allocation"),
    "another size freed": (TWO + LOADED + free("%r1", 64), "64 columns from 0, 0 on are freed, which is no allocation"),
    "another place freed": (TWO + LOADED + "add.s32 %r1, %r1, 32;" + free("%r1", 128), "which is no allocation"),
    "one not freed": (TWO + LOADED + free("%r1", 128), "tensor memory that it has not freed"),
    "lanes differ": (TWO.replace("[%r0+4]", "[tid]"), "the address differs between the lanes"),
    "half a warp": ("setp.lt.u32 %p0, tid, 16; @%p0 bra HALF;" + TWO + "HALF:", "needs the whole warp"),
    "beyond one's own": (
        TWO + LOADED + f"tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1+127], {registers(1, 2)};",
        r"a store to columns 127\.\.128 of tensor memory; allocated: 0\.\.127, 128\.\.191",
    ),
    "used after it is freed": (
        TWO + LOADED + free("%r1", 128) + f"tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {registers(1, 2)};",
        r"columns 0\.\.1 of tensor memory; allocated: 128\.\.191",
    ),
    "an unwritten load": (
        TWO + LOADED + f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {registers(3, 2)}, [%r1];",
        "nobody has written, in columns 0",
    ),
    "too few registers": (TWO + f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {registers(3, 2)}, [%r1];", "4 destinations"),
    "too few sources": (TWO + f"tcgen05.st.sync.aligned.32x32b.x4.b32 [%r1], {registers(3, 2)};", "4 sources"),
    "another shape": (
        TWO + f"tcgen05.ld.sync.aligned.16x64b.x2.b32 {registers(3, 2)}, [%r1];",
        r"modifier \.16x64b of tcgen05\.ld",
    ),
    "packed": (
        TWO + f"tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {registers(3, 2)}, [%r1];",
        r"modifier \.pack::16b",
    ),
    "a pair of blocks": (TWO.replace("cta_group::1", "cta_group::2"), "modifier .cta_group::2"),
    "a load after a store": (
        TWO + LOADED + f"tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {registers(1, 2)};"
        f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {registers(3, 2)}, [%r1];",
        "RACE: read of tensor memory, columns 0",
    ),
    "a store after a load": (
        TWO + LOADED + f"tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {registers(1, 2)}; tcgen05.wait::st.sync.aligned;"
        f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {registers(3, 2)}, [%r1];"
        f"tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {registers(1, 2)};",
        "RACE: write of .* not ordered after a read",
    ),
    "a load into a load": (
        TWO
        + LOADED
        + f"tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {registers(1, 2)}; tcgen05.wait::st.sync.aligned;"
        + 2 * f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {registers(3, 2)}, [%r1];",
        "write to the register %r3",
    ),
}


@pytest.mark.parametrize("name", ALLOCATION_FAULTS)
def test_faults_of_allocations(name):
    body, message = ALLOCATION_FAULTS[name]
    with pytest.raises(PtxError, match=message):
        run(body, shared=SHARED, shared_bytes=64, target="sm_100a")
