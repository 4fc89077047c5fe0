"""Where each element of the NVFP4 images for sm_120a lives: fragment-major tiles for mma.m16n8k64 with block scales.

The words that a lane feeds to one or two MMAs lie together, so an operand fragment is one 128-bit load: no swizzle, no
ldmatrix, no bank conflict. Preparation kernels write the images, `reference_nvfp4` builds them in torch, tests check
them against CuTe's layouts; all call the functions below. They use only //, %, *, +, &, ^, << and >>, so they take
Python ints, integer tensors and CuTe Int32 alike. The module imports nothing.

BH = B * H heads flattened, nq = query_tiles(Lq), nk = key_tiles(Lkv), ng = mean_groups(Lkv). A tile is consecutive
bytes: E2M1 codes of 4 bits, then E4M3 scale bytes of groups of 16. Code x of a tile is the low (x even) or the high
half of byte x // 2.

    q   uint8 [BH, nq, 9216]   128 rows, rotated, groups of 16 channels; rows beyond Lq are zero
    qs  fp32  [BH]             second-level scale of q
    k   uint8 [BH, nk, 9216]   128 keys, smoothed and rotated, groups of 16 channels; keys beyond Lkv repeat key Lkv - 1
    ks  fp32  [BH]             second-level scale of k
    v   uint8 [BH, nk, 9728]   V^T residual / sv in groups of 16 tokens, and the row-sum rows; padding is 0
    sv  fp32  [BH]             second-level scale of v, multiplied in the epilogue
    mu  bf16  [BH, ng, 1024]   block means / sv of 8 blocks; blocks beyond the last: 0
    qb  bf16  [BH, nq, 16384]  the query rows, not rotated (key means only); rows beyond Lq are zero
    km  bf16  [BH, ng, 1024]   block means of K, not rotated (key means only); blocks beyond the last repeat it

Padding repeats the last key and no other, as it then never raises the largest P of a group of 16 that holds real keys:
the groups are those of the specification at every length. V^T and the row-sum rows are zero there, so no kernel masks.
"""

from __future__ import annotations

HEAD_DIM = 128
#: Keys of one tile, that share a V mean and a K mean (`plan.BLOCK`; restated, as this module imports nothing).
BLOCK = 128
#: Query rows of one CTA, and of one warp.
QUERY_TILE = 128
WARP_ROWS = 16
#: Elements that share an E4M3 scale.
GROUP = 16
#: Rows of the V^T image: 128 channels, then 8 rows of ones whose products are the row sums of 8 blocks.
V_ROWS = 136
#: Key blocks whose means form one tile of means: the K extent of one bf16 MMA.
MEAN_GROUP = 8
#: Bytes of codes in a tile of 128 rows, and in a V^T tile; its scales follow them.
CODE_BYTES = QUERY_TILE * HEAD_DIM // 2
V_CODE_BYTES = V_ROWS * BLOCK // 2
SCALE_BYTES = QUERY_TILE * HEAD_DIM // GROUP
Q_BYTES = K_BYTES = CODE_BYTES + SCALE_BYTES
#: The row-sum rows have no scales in the image: they are E4M3_ONE throughout, a constant of the kernel.
V_BYTES = V_CODE_BYTES + SCALE_BYTES
MU_ELEMENTS = KM_ELEMENTS = MEAN_GROUP * HEAD_DIM
QB_ELEMENTS = QUERY_TILE * HEAD_DIM
#: The E2M1 code and the E4M3 byte of 1.0: value and scale of a row-sum row at a valid token of its own block.
E2M1_ONE = 0x2
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


def column_key(column):
    """Key, within its tile, whose score is column `column` (0..127) of Q K^T.

    With this order the accumulators of 16 n8 tiles are the A fragments of P V lane by lane, and slot k of P is key k:
    V^T keeps its tokens in order and a group of 16 slots is 16 consecutive keys.
    """
    return (column >> 5 << 5) + ((column & 7) >> 1 << 3) + ((column & 31) >> 3 << 1) + (column & 1)


def key_column(key):
    """The inverse of `column_key`."""
    return (key >> 5 << 5) + ((key & 7) >> 1 << 3) + ((key & 31) >> 3 << 1) + (key & 1)


def _b_code(n, k):
    """Code of (n, k), k < 128, in a B operand: lane 4 (n % 8) + k % 32 / 8 has 4 words of 8 consecutive k each."""
    lane = ((n & 7) << 2) + ((k & 31) >> 3)
    return ((((n >> 3) << 5) + lane) << 5) + (k >> 5 << 3) + (k & 7)


def _b_scale(n, group):
    """Byte, behind the codes, of the scale of B row `n` and group `group` (0..7): two n8 tiles in one 128-bit load."""
    return ((n >> 4) << 7) + ((n & 7) << 4) + ((n & 15) >> 3 << 3) + group


def q_code(row, channel):
    """Code in a q tile of query row `row` (0..127) and `channel`.

    For each warp and each 64 channels, lane 4 (row % 8) + channel % 32 / 8 has the words of rows r, r + 8 and of the
    channels c, c + 32: a0 to a3 of the MMA.
    """
    lane = ((row & 7) << 2) + ((channel & 31) >> 3)
    tile = (row >> 4 << 1) + (channel >> 6)
    word = ((row & 15) >> 3) + ((channel & 63) >> 5 << 1)
    return (((tile << 5) + lane) << 5) + (word << 3) + (channel & 7)


def q_scale(row, group):
    """Byte in a q tile of the scale of query row `row` and channel group `group` (0..7)."""
    return CODE_BYTES + (row << 3) + group


def k_code(key, channel):
    """Code in a k tile of `key` (0..127) and `channel`."""
    return _b_code(key_column(key), channel)


def k_scale(key, group):
    """Byte in a k tile of the scale of `key` and channel group `group` (0..7)."""
    return CODE_BYTES + _b_scale(key_column(key), group)


def v_code(row, token):
    """Code in a v tile of V^T row `row` (channel, or `row_sum_row`) and `token` (0..127)."""
    return _b_code(row, token)


def v_scale(channel, group):
    """Byte in a v tile of the scale of `channel` and token group `group` (0..7)."""
    return V_CODE_BYTES + _b_scale(channel, group)


def row_sum_row(block):
    """The V^T row that holds ones at the tokens of key block `block` (counted over the whole head)."""
    return HEAD_DIM + (block & (MEAN_GROUP - 1))


def mu_offset(channel, block):
    """Element (bf16) in a mu tile of `channel` and key block `block` modulo 8: B words of four n8 tiles together."""
    lane = ((channel & 7) << 2) + (block >> 1)
    return (((channel >> 5 << 5) + lane) << 3) + ((channel & 31) >> 3 << 1) + (block & 1)


def qb_offset(row, channel):
    """Element (bf16) in a qb tile of query row `row` and `channel`: A fragments of m16n8k16, one 128-bit load each."""
    lane = ((row & 7) << 2) + ((channel & 7) >> 1)
    tile = (row >> 4 << 3) + (channel >> 4)
    word = ((row & 15) >> 3) + ((channel & 15) >> 3 << 1)
    return (((tile << 5) + lane) << 3) + (word << 1) + (channel & 1)


def km_offset(block, channel):
    """Element (bf16) in a km tile of key block `block` modulo 8 and `channel`: B words of two k16 steps together."""
    lane = (block << 2) + ((channel & 7) >> 1)
    return (((channel >> 5 << 5) + lane) << 3) + ((channel & 31) >> 3 << 1) + (channel & 1)
