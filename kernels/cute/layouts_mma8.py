"""Where each element of the 8-bit mma.sync images lives (sm_89, sm_120a): fragment-major tiles, no swizzle.

Every operand is stored in panels of 8 rows x 64 bytes, 512 consecutive bytes each. A lane's 128-bit load at 16 times
its number within a panel is then exactly two MMA steps of that operand: row lane // 4, bytes 16 (lane % 4) to + 15.
The bytes of one product's K dimension may come in any order as long as both operands agree, so they come as they lie
in memory: neighbouring channels of Q and K, neighbouring tokens of V^T. What makes P fit V^T without a shuffle is the
order of the keys within a K tile (`key_row`). Preparation kernels write the images, `reference_mma8` builds them in
torch, tests check them; all call the functions below. They use only //, %, *, +, &, ^, << and >>, so they take Python
ints, integer tensors and CuTe Int32 alike. The module imports nothing.

BH = B * H heads flattened, nq = query_tiles(Lq), nk = key_tiles(Lkv), ng = mean_groups(Lkv); a key tile is one block:

    q   int8  [BH, nq, 16384]   128 query rows, rotated; rows beyond Lq are zero
    qs  fp32  [BH, nq * 128]    scale of each row (16 consecutive rows share a value); rows beyond Lq: 1
    k   int8  [BH, nk, 16384]   128 keys, smoothed and rotated; keys beyond Lkv repeat one key of the last block
    ks  fp32  [BH, nk]          scale of each block
    v   e4m3  [BH, nk, 17408]   V^T residual / sv, and the row-sum rows; padding is 0
    sv  fp32  [BH, 128]         channel scale of V, multiplied in the epilogue
    mu  bf16  [BH, ng, 1024]    block means / sv of 8 blocks; blocks beyond the last: 0
    qb  bf16  [BH, nq, 16384]   the query rows, not rotated (key means only); rows beyond Lq are zero
    km  bf16  [BH, ng, 1024]    block means of K, not rotated (key means only); blocks beyond the last repeat it
"""

from __future__ import annotations

HEAD_DIM = 128
#: Keys of one tile, that share a score scale, a V mean and a K mean (`plan.BLOCK`; this module imports nothing).
BLOCK = 128
#: Query rows of one CTA, and of one warp; a warp's rows share a score scale (score_groups "per_warp").
QUERY_TILE = 128
WARP_ROWS = 16
#: Rows of the V^T image: 128 channels, then 8 rows of ones whose products are the row sums of 8 blocks.
V_ROWS = 136
#: Key blocks whose means form one tile of means. Their row sums, in two bf16 each, fill the K extent of a bf16 MMA.
MEAN_GROUP = 8
#: A panel: rows of one n8 or half an m16 fragment, bytes of two MMA steps.
PANEL_ROWS, PANEL_BYTES = 8, 64
PANEL = PANEL_ROWS * PANEL_BYTES
#: Bytes of the tiles, and elements (bf16) of those that hold bf16.
Q_BYTES = QUERY_TILE * HEAD_DIM
K_BYTES = BLOCK * HEAD_DIM
V_BYTES = V_ROWS * BLOCK
MU_ELEMENTS = KM_ELEMENTS = MEAN_GROUP * HEAD_DIM
QB_ELEMENTS = QUERY_TILE * HEAD_DIM
#: Largest value of the V^T image, by the type that sums a tile of P V^T: sv is the channel's largest residual over it.
#: fp16 ends at 65504, and 128 products of at most 448 and 0.875 add up to no more than 50176. There is a power of two
#: between the two: the codes differ only where they become subnormal, below 1.8 % of the channel's largest residual.
VALUE_TOP = {"f32": 448.0, "f16": 448.0 / 512.0}
#: The E4M3 byte of 1.0, the value of a row-sum row at a valid token of its own block.
E4M3_ONE = 0x38


def query_tiles(lq):
    """Query tiles of `lq` query rows."""
    return (lq + QUERY_TILE - 1) // QUERY_TILE


def key_tiles(lkv):
    """Key tiles, each one block, of `lkv` keys."""
    return (lkv + BLOCK - 1) // BLOCK


def mean_groups(lkv):
    """Tiles of means of `lkv` keys."""
    return (key_tiles(lkv) + MEAN_GROUP - 1) // MEAN_GROUP


def panel_offset(row, byte, width):
    """Byte offset of (row, byte) in a tile of rows of `width` bytes (a multiple of 64), stored panel by panel."""
    return ((row >> 3) * (width >> 6) + (byte >> 6)) * PANEL + ((row & 7) << 6) + (byte & 63)


def key_row(key):
    """Row of a K tile that holds key `key` (0..127) of its block.

    The accumulator of n8 tile i gives lane t of a quad columns 2 t and 2 t + 1. With this order the eight n8 tiles of
    half a block give it 16 neighbouring keys, whose P bytes are the A fragments of two MMA steps of P V^T.
    """
    return (key & 64) + ((key & 15) >> 1 << 3) + ((key & 63) >> 4 << 1) + (key & 1)


def row_key(row):
    """The inverse of `key_row`."""
    return (row & 64) + ((row & 7) >> 1 << 4) + ((row & 63) >> 3 << 1) + (row & 1)


def q_offset(row, channel):
    """Byte in a q tile of query row `row` (0..127) and `channel`."""
    return panel_offset(row, channel, HEAD_DIM)


def k_offset(key, channel):
    """Byte in a k tile of key `key` (0..127) of its block and `channel`."""
    return panel_offset(key_row(key), channel, HEAD_DIM)


def v_offset(row, token):
    """Byte in a v tile of V^T row `row` (channel, or `row_sum_row`) and token `token` (0..127) of its block."""
    return panel_offset(row, token, BLOCK)


def row_sum_row(block):
    """The V^T row that holds ones at the tokens of key block `block` (counted over the whole head)."""
    return HEAD_DIM + (block & (MEAN_GROUP - 1))


def mu_offset(channel, block):
    """Element (bf16) in a mu tile of `channel` and key block `block` modulo 8."""
    return channel * MEAN_GROUP + block


def qb_offset(row, channel):
    """Element (bf16) in a qb tile of query row `row` (0..127) and `channel`."""
    return panel_offset(row, channel << 1, 2 * HEAD_DIM) >> 1


def km_offset(block, channel):
    """Element (bf16) in a km tile of key block `block` modulo 8 and `channel`."""
    return panel_offset(block, channel << 1, 2 * HEAD_DIM) >> 1
