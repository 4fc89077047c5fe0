"""Where each element of the sm_90a and sm_100a tile images lives: the only statement of swizzles and permutations.

Attention reads Q, K and V as pre-tiled images, so that a tile is one bulk copy of consecutive bytes. Preparation
kernels write them, `reference` builds them in torch, tests check them; all three call the functions below.
The functions use only //, %, *, +, &, ^, << and >>, so they take Python ints, integer tensors and CuTe Int32 alike.
The module imports nothing.

BH = B * H heads flattened, nq = query_tiles(Lq), nk = key_tiles(Lkv), nb = 2 nk key blocks, ng = mean_groups(Lkv):

    q   int8  [BH, nq, 128, 128]       rows beyond Lq are zero (FP8 scores: e4m3; so is k)
    qs  fp32  [BH, nq * 128]           scale of each row (16 consecutive rows share a value); rows beyond Lq: 1
    k   int8  [BH, nk, 256, 128]       keys beyond Lkv repeat keys of the last valid block, and within it a single one
    ks  fp32  [BH, nb]                 scale of each block; blocks beyond the last valid one repeat its scale
    v   e4m3  [BH, nk, 2, 136, 128]    V^T residual / sv, and the row-sum rows; padding is 0
    sv  fp32  [BH, 128]                channel scale of V, multiplied in the epilogue
    mu  bf16  [BH, ng, 128, 16]        block means / sv of 8 blocks, then the same 8 again; blocks beyond the last: 0
    qb  bf16  [BH, nq, 2, 2, 64, 64]   the query rows, not rotated (key means only); rows beyond Lq are zero
    km  bf16  [BH, ng, 2, 8, 64]       block means of K, not rotated (key means only); blocks beyond repeat the last
"""

from __future__ import annotations

HEAD_DIM = 128
#: Keys that share a score scale, a V mean and a K mean (`plan.BLOCK`; restated, as this module imports nothing).
BLOCK = 128
#: Query rows of one CTA: two consumer warpgroups of 64.
QUERY_TILE = 128
WARPGROUP_ROWS = 64
#: Query rows that share a score scale (score_groups "per_warp").
QUERY_GROUP = 16
#: Keys of one tile. 256 keys beat 128 by 10 % on an H200: the fixed cost of a tile is halved.
KEY_TILE = 256
#: Rows of the V^T image: 128 channels, then 8 rows of ones whose products are the row sums of 8 blocks.
V_ROWS = 136
#: Key blocks whose means form one tile of means, and the width of that tile, the K extent of one bf16 MMA. Its other 8
#: columns repeat the means: the low halves of the row sums meet them there, so that r counts to 16 bits, not 8.
MEAN_GROUP = 8
MEAN_WIDTH = 16
#: Key tiles of one mean group.
TILES_PER_GROUP = MEAN_GROUP * BLOCK // KEY_TILE
#: The E4M3 byte of 1.0, the value of a row-sum row at a valid token of its own block.
E4M3_ONE = 0x38


def query_tiles(lq):
    """Query tiles of `lq` query rows."""
    return (lq + QUERY_TILE - 1) // QUERY_TILE


def key_tiles(lkv):
    """Key tiles of `lkv` keys."""
    return (lkv + KEY_TILE - 1) // KEY_TILE


def key_blocks(lkv):
    """Key blocks in the images of `lkv` keys, the wholly padded last one included."""
    return key_tiles(lkv) * (KEY_TILE // BLOCK)


def mean_groups(lkv):
    """Tiles of means of `lkv` keys."""
    return (key_tiles(lkv) + TILES_PER_GROUP - 1) // TILES_PER_GROUP


def swizzle_128(row, byte):
    """Byte offset of (row, byte) in a K_SW128 tile: rows of 128 bytes, 16-byte chunks XORed with the row modulo 8."""
    return row * 128 + (byte ^ ((row & 7) << 4))


def swizzle_32(row, byte):
    """Byte offset of (row, byte) in a K_SW32 tile: rows of 32 bytes, two chunks exchanged in rows 4..7 of 8."""
    return row * 32 + (byte ^ (((row >> 2) & 1) << 4))


def slot_token(slot):
    """Token, within its 128-token block, that V^T stores at position `slot` of the block.

    With this order the accumulator fragment of Q K^T is the A fragment of P V lane by lane: no shuffle between them.
    """
    return (slot >> 4 << 4) + ((slot & 3) >> 1 << 3) + ((slot & 15) >> 2 << 1) + (slot & 1)


def token_slot(token):
    """The inverse of `slot_token`."""
    return (token >> 4 << 4) + ((token & 7) >> 1 << 2) + ((token & 15) >> 3 << 1) + (token & 1)


def q_offset(row, channel):
    """Byte in a q tile (16 KB) of query row `row` (0..127) and `channel`."""
    return swizzle_128(row, channel)


def k_offset(token, channel):
    """Byte in a k tile (32 KB) of key `token` (0..255) and `channel`."""
    return swizzle_128(token, channel)


def v_offset(row, token):
    """Byte in a v tile (34 KB) of V^T row `row` (channel, or `row_sum_row`) and key `token` (0..255)."""
    return (token >> 7) * (V_ROWS * BLOCK) + swizzle_128(row, token_slot(token & 127))


def row_sum_row(block):
    """The V^T row that holds ones at the tokens of key block `block` (counted over the whole head)."""
    return HEAD_DIM + (block & (MEAN_GROUP - 1))


def mu_offset(channel, block):
    """Element (bf16) in a mu tile (4 KB) of `channel` and key block `block` modulo 8, or that plus 8 for its repeat."""
    return swizzle_32(channel, block << 1) >> 1


def qb_offset(row, channel):
    """Element (bf16) in a qb tile (32 KB) of query row `row` (0..127) and `channel`."""
    panel = ((row >> 6) << 1) + (channel >> 6)
    return panel * (WARPGROUP_ROWS * 64) + (swizzle_128(row & 63, (channel & 63) << 1) >> 1)


def km_offset(block, channel):
    """Element (bf16) in a km tile (2 KB) of key block `block` modulo 8 and `channel`."""
    return (channel >> 6) * (MEAN_GROUP * 64) + (swizzle_128(block, (channel & 63) << 1) >> 1)
