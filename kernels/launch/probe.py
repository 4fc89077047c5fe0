"""Is a block-scaled MMA on this card what PTX says? Single MMAs and casts whose exact results are known beforehand.

Attention can be a little wrong in many ways; one MMA of a one-hot operand is right or shows what differs: which element
a code is taken for, which scale it is multiplied by, from which lane that scale comes. The kernel is
`cute.probe_nvfp4`; operands are made here as matrices and put into registers by the layouts that attention reads
(`cute.layouts_nvfp4`), so that what is tested is what attention relies on. Results must be equal, not near.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cute import layouts_nvfp4 as lo
from ..reasons import Reason, UnsupportedError
from ..spec.formats import e2m1, e4m3, e4m3_decode
from .loader import Library

#: The kernel's name in manifests that have it.
KERNEL = "probe_nvfp4"

#: Value of each E2M1 code, and the codes whose values differ: all but -0.
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_DISTINCT = torch.tensor([*range(8), *range(9, 16)], dtype=torch.uint8)
_ROWS, _COLUMNS, _K = 16, 8, 64
_GROUPS = _K // lo.GROUP
_LANE = torch.arange(32)


@dataclass(frozen=True)
class Product:
    """One MMA, D = C + (A scale_A) (B scale_B)^T. what: what differs if it is wrong.

    a uint8 [16, 64], b [8, 64]: E2M1 codes. a_scales uint8 [16, 4], b_scales [8, 4]: E4M3 bytes of groups of 16.
    c fp32 [16, 8]. a_others, b_others: scales in the lanes of a quad that the selectors {0, 0} pass over; None: the
    same, as in attention.
    """

    what: str
    a: Tensor
    b: Tensor
    a_scales: Tensor
    b_scales: Tensor
    c: Tensor
    a_others: Tensor | None = None
    b_others: Tensor | None = None

    def result(self) -> Tensor:
        """D, fp32 [16, 8]; exact, as every sum here has few bits."""
        a, b = (
            _E2M1[codes.long()].double() * e4m3_decode(scales).double().repeat_interleave(lo.GROUP, 1)
            for codes, scales in ((self.a, self.a_scales), (self.b, self.b_scales))
        )
        return (self.c + (a[:, None] * b).sum(-1)).float()

    def registers(self) -> Tensor:
        """int32 [32, 12]: for each lane A, B, their scale words, and the bits of C."""
        row, column, k = torch.arange(_ROWS)[:, None], torch.arange(_COLUMNS)[:, None], torch.arange(_K)
        a, b = _words(self.a, lo.q_code(row, k)), _words(self.b, lo.v_code(column, k))[:, :2]
        # As `attention_nvfp4` loads them: rows g and g + 8 in even and odd lanes of a quad, column g in all four.
        row, column, quad = _LANE // 4 + _LANE % 2 * 8, _LANE // 4, _LANE % 4
        a_scales = _chosen(self.a_scales, self.a_others, quad < 2, row)
        b_scales = _chosen(self.b_scales, self.b_others, quad < 1, column)
        return torch.cat((a, b, a_scales, b_scales, _accumulators(self.c).view(torch.int32)), 1)


def _words(codes: Tensor, place: Tensor) -> Tensor:
    """Codes at their places among 32 lanes of four words: int32 [32, 4]."""
    image = torch.zeros(32 * 32, dtype=torch.uint8)
    image[place.flatten()] = codes.flatten()
    return (image[0::2] | image[1::2] << 4).view(torch.int32).reshape(32, 4)


def _chosen(scales: Tensor, others: Tensor | None, read: Tensor, row: Tensor) -> Tensor:
    """The scale word of each lane's row, int32 [32, 1]; from `others` where the lane is not read."""
    words = scales[row] if others is None else torch.where(read[:, None], scales[row], others[row])
    return words.contiguous().view(torch.int32)


def _accumulators(matrix: Tensor) -> Tensor:
    """[16, 8] as the four accumulators of each lane, [32, 4]: rows g, g + 8 and columns 2 t, 2 t + 1."""
    return matrix.reshape(2, 8, 4, 2).permute(1, 2, 0, 3).reshape(32, 4).contiguous()


def _matrices(registers: Tensor) -> Tensor:
    """The inverse of `_accumulators` for [n, 32, 4]."""
    return registers.reshape(-1, 8, 4, 2, 2).permute(0, 3, 1, 2, 4).reshape(-1, 16, 8)


# -- products -------------------------------------------------------------------------------------------------------


def _codes(rows: int, value: int) -> Tensor:
    return torch.full((rows, _K), value, dtype=torch.uint8)


def _one_hot(rows: int, first: int, step: int = 1) -> Tensor:
    """1.0 in each row i at k = first + step i."""
    codes = _codes(rows, 0)
    codes[torch.arange(rows), first + step * torch.arange(rows)] = lo.E2M1_ONE
    return codes


def _digits(rows: int, digit: int) -> Tensor:
    """Codes that number the elements: the three digits of 64 row + k to the base 15, one a product."""
    return _DISTINCT[torch.arange(rows * _K).reshape(rows, _K) // 15**digit % 15]


def _scales(rows: int, of_row: int, of_group: int, first: int) -> Tensor:
    row, group = torch.arange(rows)[:, None], torch.arange(_GROUPS)
    return (first + of_row * row + of_group * group).to(torch.uint8)


def products() -> list[Product]:
    """Every MMA of the probe, the simplest first: a fault is named by the first that shows it."""
    return [*_plain(), *_sides(), *_together()]


def _plain() -> Iterator[Product]:
    """What can be told whatever order k has: C alone, and rows that differ in how many ones they have."""
    unit, c = _scales(_ROWS, 0, 0, lo.E4M3_ONE), torch.arange(-64.0, 64.0).reshape(_ROWS, _COLUMNS)
    ones, zero = _codes(_ROWS, lo.E2M1_ONE), _codes(_ROWS, 0)
    yield Product("the accumulator input of an MMA differs", zero, zero[:8], unit, unit[:8], c)
    yield Product("the rows of operand A's codes differ", _counted(_ROWS), ones[:8], unit, unit[:8], 0 * c)
    yield Product("the columns of operand B's codes differ", ones, _counted(_COLUMNS), unit, unit[:8], 0 * c)


def _counted(rows: int) -> Tensor:
    """Row i has _K / rows (i + 1) ones."""
    return (torch.arange(_K) < _K // rows * torch.arange(1, rows + 1)[:, None]).to(torch.uint8) * lo.E2M1_ONE


def _sides() -> Iterator[Product]:
    """Operands A and B in turn: its codes and scales vary, and one-hot rows of the other show them one by one."""
    for name, rows, others in (("A", _ROWS, _COLUMNS), ("B", _COLUMNS, _ROWS)):
        ones, unit = _codes(rows, lo.E2M1_ONE), _scales(rows, 0, 0, lo.E4M3_ONE)
        sweep = [_one_hot(others, first) for first in range(0, _K, others)]
        # Two or four elements of each group.
        spread = [_one_hot(others, 0, _K // others)]
        for digit in range(3):
            # Only where A's order is not B's can be seen, and only that matters.
            yield from _shown(name, "the order of the codes along k differs", _digits(rows, digit), unit, sweep)
        along = _scales(rows, 0, 8, 0x20)
        yield from _shown(name, f"the order of operand {name}'s scales along k differs", ones, along, spread)
        across = _scales(rows, 3, 0, 0x10)
        yield from _shown(name, f"the lanes that operand {name}'s scales come from differ", ones, across, spread)
        # Every scale byte, 0 to 0x7e, and all of a product different.
        count = rows * _GROUPS
        for first in range(0, 127, count):
            every = _scales(rows, _GROUPS, 1, min(first, 127 - count))
            yield from _shown(name, f"the scales of operand {name} differ", ones, every, sweep)
        own, other = (_scales(rows, _GROUPS, 1, first) for first in (1, 63))
        yield from _shown(name, f"the scale selector of operand {name} differs", ones, own, spread, other)


def _shown(
    name: str, what: str, codes: Tensor, scales: Tensor, hot: list[Tensor], others: Tensor | None = None
) -> Iterator[Product]:
    """Products of an operand with each of the one-hot ones."""
    c = torch.zeros(_ROWS, _COLUMNS)
    for one in hot:
        unit = _scales(len(one), 0, 0, lo.E4M3_ONE)
        if name == "A":
            yield Product(what, codes, one, scales, unit, c, a_others=others)
        else:
            yield Product(what, one, codes, unit, scales, c, b_others=others)


def _together() -> Iterator[Product]:
    """All 64 elements at once: +-1 and +-2 under scales 1 and 2, so that sums fit even a narrow accumulator."""
    g = torch.Generator().manual_seed(64)
    a, b = (torch.tensor([2, 4, 10, 12], dtype=torch.uint8)[_random(g, 4, n, _K)] for n in (_ROWS, _COLUMNS))
    a_scales, b_scales = (lo.E4M3_ONE + 8 * _random(g, 2, n, _GROUPS).to(torch.uint8) for n in (_ROWS, _COLUMNS))
    c = _random(g, 64, _ROWS, _COLUMNS).float()
    yield Product("the sum of an MMA differs", a, b, a_scales, b_scales, c)


def _random(g: torch.Generator, below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=g)


# -- casts ----------------------------------------------------------------------------------------------------------


def cast_numbers() -> tuple[Tensor, Tensor]:
    """Numbers (fp32) for the casts to E2M1 and to E4M3: every value, every tie and its neighbours, what saturates."""
    bytes_ = e4m3_decode(torch.arange(127, dtype=torch.uint8))
    return _around(_E2M1[:8], 7.0), _around(bytes_, 464.0)


def _around(values: Tensor, beyond: float) -> Tensor:
    ties = (values[1:] + values[:-1]) / 2
    low, high = (torch.nextafter(ties, torch.full_like(ties, to)) for to in (0.0, torch.inf))
    found = torch.cat((values, ties, low, high, torch.tensor([beyond, 1e30, torch.inf])))
    return torch.cat((found, -found))


def _placed(count: int) -> Tensor:
    """fp32 [count, 32, 8]: lanes of E2M1's numbers, then lanes whose first four are E4M3's."""
    small, fine = cast_numbers()
    placed = torch.zeros(count * 32, 8)
    lanes = -(-len(small) // 8)
    placed[:lanes].view(-1)[: len(small)] = small
    quarters = torch.nn.functional.pad(fine, (0, -len(fine) % 4)).reshape(-1, 4)
    placed[lanes : lanes + len(quarters), :4] = quarters
    return placed.reshape(count, 32, 8)


# -- the probe ------------------------------------------------------------------------------------------------------


def problem(kernels: Library, device: torch.device) -> str | None:
    """What differs on `device`, in a sentence; None if nothing does, or if `kernels` have no probe.

    Waits for the device. Raises UnsupportedError when the kernel cannot be launched.
    """
    if KERNEL not in kernels.manifest.kernels:
        return None
    asked = products()
    count = len(asked)
    operands = torch.stack([product.registers() for product in asked])
    numbers = _placed(count)
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with current:
        d = torch.empty((count, 32, 4), dtype=torch.float32, device=device)
        codes = torch.empty((count, 32, 2), dtype=torch.int32, device=device)
        values = torch.empty((count, 32, 12), dtype=torch.float32, device=device)
        kernel = kernels.kernel(KERNEL)
        arguments = (operands.to(device), numbers.to(device), d, codes, values)
        reason = kernel if isinstance(kernel, Reason) else kernel.launch((count, 1, 1), arguments)
        if reason is not None:
            raise UnsupportedError(reason)
        return _wrong_product(asked, _matrices(d.cpu())) or _wrong_cast(numbers, codes.cpu(), values.cpu())


def _wrong_product(asked: list[Product], found: Tensor) -> str | None:
    for product, got in zip(asked, found, strict=True):
        want = product.result()
        if not torch.equal(got, want):
            row, column = (got != want).nonzero()[0].tolist()
            return (
                f"{product.what} on this card (row {row}, column {column} of a probe is {got[row, column].item():g} "
                f"instead of {want[row, column].item():g})."
            )
    return None


def _wrong_cast(numbers: Tensor, codes: Tensor, values: Tensor) -> str | None:
    """Compared as values: nothing depends on the sign of a zero."""
    nibbles = codes[..., :1] >> 4 * torch.arange(8) & 15
    bytes_ = codes[..., 1:].contiguous().view(torch.uint8)
    small, fine = _E2M1[nibbles.long()], e4m3_decode(bytes_)
    for what, source, got, want in (
        ("rounding to E2M1", numbers, small, e2m1(numbers)),
        ("rounding to E4M3", numbers[..., :4], fine, e4m3(numbers[..., :4])),
        ("reading E2M1", nibbles.float(), values[..., :8], small),
        ("reading E4M3", bytes_.float(), values[..., 8:], fine),
    ):
        if not torch.equal(got, want):
            at = tuple((got != want).nonzero()[0].tolist())
            return f"{what} differs on this card ({source[at]:.9g} becomes {got[at]:g} instead of {want[at]:g})."
    return None
