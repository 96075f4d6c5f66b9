"""Tables for the search of code-book entries: nearest entries of each rounded point, and entry numbers by code.

A *code* packs the numbers of the levels of an entry: 2 bits for each of 8 numbers, or 3 bits for each of 4 numbers. A
*point* is a vector of levels, whether or not the code book has it. A table in memory has three parts:

1. `POWERS_BYTES` bytes: for each byte, the sum of ``3**i`` over its set bits i, int32. Two of them, for the numbers
   above each of two thresholds, add up to the row of a point of three levels.
2. The entry number of each code, uint16.
3. For each point a row of the codes of the nearest entries, uint16.
"""

from __future__ import annotations

import numpy as np

from .....graph.dtypes import DType
from .....graph.lazy_dataclass import dataclass
from .....ops.quantisation import load_code_book

POWERS_BYTES = 1024
POINTS_PER_STEP = 512
"""Points that are compared with all entries at a time."""


@dataclass(frozen=True, slots=True)
class LatticeTableLayout:
    """The layout of the search table of a code book (`make_nearest_entry_and_number_table`).

    Attributes:
        dtype: The dtype with the code book.
        levels: The values that a number of an entry can have, ascending.
        width: Numbers of an entry: 4 or 8.
        bits: Bits of a number in a code.
        neighbour_count: Nearest entries that are stored for each point, a multiple of 16.
    """

    dtype: DType
    levels: tuple[float, ...]
    width: int
    bits: int
    neighbour_count: int

    @property
    def rows_offset(self) -> int:
        """Byte offset of the rows of nearest entries in the table."""
        return POWERS_BYTES + 2 * (1 << self.bits * self.width)

    @property
    def row_bytes(self) -> int:
        return 2 * self.neighbour_count


IQ2_LEVELS = (1.0, 3.125, 5.375)
"""The magnitudes of IQ2 types, which are 8, 25 and 43, by the factor of a scale."""
IQ3_LEVELS = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5)
IQ1_LEVELS = (-1.0, 0.0, 1.0)


def make_nearest_entry_and_number_table(lattice: LatticeTableLayout) -> np.ndarray:
    """Make the search table of a code book, in the three parts that the module docstring lists.

    Quantisers look up the entries that are nearest to rounded values, and the number of an entry.

    Returns:
        The bytes of the table as float32 words.
    """
    book = load_code_book(lattice.dtype)
    numbers = np.searchsorted(np.unique(book), book)
    shifts = lattice.bits * np.arange(lattice.width)
    codes = (numbers << shifts).sum(1)
    entry_numbers = np.zeros(1 << lattice.bits * lattice.width, np.uint16)
    entry_numbers[codes] = np.arange(len(codes))
    levels = np.array(lattice.levels, np.float32)
    base = len(levels)
    points = levels[np.arange(base**lattice.width)[:, None] // base ** np.arange(lattice.width) % base]
    entries = levels[numbers]
    energies = (entries * entries).sum(1)
    rows = []
    for first in range(0, len(points), POINTS_PER_STEP):
        distances = energies - 2 * points[first : first + POINTS_PER_STEP] @ entries.T
        nearest = np.argpartition(distances, lattice.neighbour_count - 1, axis=1)[:, : lattice.neighbour_count]
        rows.append(codes[nearest].astype(np.uint16))
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    powers = (bits * 3 ** np.arange(8)).sum(1).astype(np.int32)
    parts = (powers, entry_numbers, np.concatenate(rows))
    data = b"".join(part.tobytes() for part in parts)
    return np.frombuffer(data + bytes(-len(data) % 4), np.float32)
