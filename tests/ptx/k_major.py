"""Where a K-major operand of wgmma or tcgen05.mma lies in shared memory: the canonical layouts, which both share."""

from __future__ import annotations

import numpy as np

#: Bytes of a swizzled row -> address bits that are XORed into bits 4 ..., from bit 7 on. 0: no swizzle.
SWIZZLES = {0: 0, 32: 1, 64: 3, 128: 7}


def addresses(start: int, leading: int, stride: int, width: int, rows: int) -> np.ndarray:
    """Shared addresses [rows, 32] of one K step, which has 32 bytes in each row.

    start: address of the step's first byte. stride: bytes from eight rows to the next eight. width: of a swizzled row
    in bytes, 0 for none; rows then follow each other at 16 bytes, and the step's second half lies `leading` bytes on.
    """
    row, byte = np.arange(rows)[:, None], np.arange(32)[None, :]
    if not width:
        return start + row // 8 * stride + row % 8 * 16 + byte // 16 * leading + byte % 16
    plain = start + row // 8 * stride + row % 8 * width + byte
    return plain ^ ((plain >> 7 & SWIZZLES[width]) << 4)
