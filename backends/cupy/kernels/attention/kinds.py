"""The variants of attention kernels, and the sizes and dtypes of keys and values that each supports."""

from __future__ import annotations

from dataclasses import dataclass

from .....graph.dtypes import DType
from ...device.driver import Source
from ..elementwise import CELLS, HALVES, TYPES

HEADERS = ("cells.cuh", "attention.cuh")
OF_MANY = (*HEADERS, "attention_powers.cuh", "attention_many.cuh")
THREADS, WARPS, ROWS = 128, 4, 64
OWN = 16
"""Rows of a block of `attend_cells`, and keys that a warp processes at a time."""
TERMS = {DType.F16: 2, DType.BF16: 3}
"""Terms of the cell dtype that together are as precise as float32."""


@dataclass(frozen=True, slots=True)
class Few:
    """`attend_few` for keys and values up to some sizes; 0 means any size.

    `lanes` lanes share a key. Each has `keys` groups of four columns of a key, and `values` groups of a value.
    """

    lanes: int
    keys: int
    values: int
    cells: DType = DType.F32

    @property
    def rows(self) -> tuple[int, ...]:
        """Possible numbers of rows that a block processes together."""
        return (1, 2, 4, 8) if self.values * self.lanes <= 64 else (1, 2, 4)

    def together(self, rows: int) -> int:
        """Return how many of `rows` rows a block processes together."""
        return next((r for r in self.rows if r >= rows), self.rows[-1])

    def name(self, rows: int) -> str:
        """Return the C++ name of the kernel for `rows` rows."""
        sizes = f"{self.lanes}, {self.keys}, {self.values}, {rows}"
        return f"attend_few<{sizes}, {str(self.keys > 0).lower()}, {TYPES[self.cells]}>"

    def source(self) -> Source:
        """Return the source with the kernels for all row counts."""
        return Source("attention_few.cu", tuple(map(self.name, self.rows)), before=HEADERS)

    def takes(self, size: int, width: int, cells: DType) -> bool:
        """Return whether the variant supports these key columns, value columns and cell dtype."""
        fits = size <= 4 * self.lanes * self.keys and width <= 4 * self.lanes * self.values
        return cells is self.cells and (fits or not self.keys)


@dataclass(frozen=True, slots=True)
class Tiled:
    """`attend_tiles` for keys and values of up to `size` and `width` columns, in tiles of `tile` keys.

    Queries are in registers (`has_register_queries`) or in shared memory. No block has more than 96 KiB of it.
    """

    size: int
    width: int
    tile: int
    held: bool
    rows: int = ROWS
    threads: int = THREADS

    def takes(self, size: int, width: int, cells: DType) -> bool:
        """Return whether the variant supports these key columns, value columns and cell dtype."""
        return size <= self.size and width <= self.width

    @property
    def by_warpgroups(self) -> bool:
        """Whether the variant needs a device with warpgroup products."""
        return False

    @property
    def seen_rows(self) -> int:
        """Rows of a tile of the visibility table."""
        return max(ROWS, self.rows)

    @property
    def file(self) -> str:
        return "attention_tiles.cu"

    @property
    def name(self) -> str:
        """The C++ name of the kernel."""
        return f"attend_tiles<{self.size}, {self.width}, {self.tile}, {str(self.held).lower()}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 4 * (self.tile * (self.size + self.width) + (0 if self.held else ROWS * self.size))

    def source(self) -> Source:
        return Source(self.file, (self.name,), before=(*HEADERS, "attention_scores.cuh"))


@dataclass(frozen=True, slots=True)
class Wide(Tiled):
    """`attend_wide`. Queries pass through shared memory before keys and values do."""

    rows: int = 32
    threads: int = 256

    @property
    def file(self) -> str:
        return "attention_wide.cu"

    @property
    def name(self) -> str:
        return f"attend_wide<{self.size}, {self.width}>"

    @property
    def shared_bytes(self) -> int:
        return 4 * max(self.tile * (self.size + self.width), self.rows * self.size)


@dataclass(frozen=True, slots=True)
class Short(Tiled):
    """`attend_short` for 16-bit caches. It loads tiles of keys and values in stages, without conversion."""

    stages: int = 2
    cells: DType = DType.F16

    @property
    def file(self) -> str:
        return "attention_short.cu"

    def source(self) -> Source:
        return Source(self.file, (self.name,), OF_MANY)

    def takes(self, size: int, width: int, cells: DType) -> bool:
        return size <= self.size and width <= self.width and cells is self.cells

    @property
    def name(self) -> str:
        sizes = f"{self.size}, {self.width}, {self.tile}, {self.stages}, {self.threads // 32}"
        return f"attend_short<{TYPES[self.cells]}, {sizes}, {str(self.held).lower()}>"

    @property
    def shared_bytes(self) -> int:
        stages, queries = 2 * self.stages * self.tile * (self.size + self.width), 2 * self.rows * self.size
        return 16 * self.rows + (max(stages, queries) if self.held else stages + queries)


@dataclass(frozen=True, slots=True)
class Grouped(Short):
    """`attend_warpgroups`. Its operands in shared memory begin at a multiple of 1024."""

    @property
    def by_warpgroups(self) -> bool:
        return True

    @property
    def file(self) -> str:
        return "attention_warpgroups.cu"

    def source(self) -> Source:
        return Source(self.file, (self.name,), (*OF_MANY, "wgmma.cuh"), architectures=("sm_90a",))

    @property
    def name(self) -> str:
        sizes = f"{self.size}, {self.width}, {self.tile}, {self.threads // 32}"
        return f"attend_warpgroups<{TYPES[self.cells]}, {sizes}>"

    @property
    def shared_bytes(self) -> int:
        return 1024 + 4 * self.tile * (self.size + self.width) + self.rows * (2 * self.size + 16)


@dataclass(frozen=True, slots=True)
class Cells:
    """`attend_cells` for keys and values of up to `size` and `width` columns. Their rows support vector loads."""

    size: int
    width: int
    cells: DType

    @property
    def name(self) -> str:
        return f"attend_cells<{TYPES[self.cells]}, {self.size}, {self.width}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        queries, sums = 4 * TERMS[self.cells] * OWN * self.size, 4 * WARPS * self.width // 8 * (8 * OWN + 4)
        return max(queries, sums)

    def source(self) -> Source:
        return Source("attention_cells.cu", (self.name,), before=(*HEADERS, "attention_powers.cuh"))

    def takes(self, size: int, width: int, cells: DType) -> bool:
        """Return whether the variant supports these key columns, value columns and cell dtype."""
        return size <= self.size and width <= self.width and cells is self.cells


_FLOATS = (Few(8, 2, 2), Few(8, 4, 4), Few(16, 4, 4))
_ALL = tuple(Few(32, fours, 4, cells) for fours in (5, 0) for cells in CELLS)
FEW = {f: f.source() for f in (*_FLOATS, *_ALL)}
"""Sources of variants for few rows. The first variant that supports the sizes is the best; the last supports any."""
CELLS_OF_FEW = {
    c: c.source()
    for c in (Cells(*sizes, t) for t in HALVES for sizes in ((64, 64), (128, 128), (192, 128), (256, 256)))
}
_SIZES = (
    (64, 64, 64, True, 128, 256, 3),
    (128, 128, 64, False, 128, 256, 2),
    (192, 128, 32, False, 128, 256, 2),
    (256, 256, 32, False, 64, 128, 2),
)
_GROUPED = (
    (64, 64, 128, False, 128, 256),
    (128, 128, 128, False, 128, 256),
    (192, 128, 128, False, 128, 256),
    (256, 256, 64, False, 128, 256),
)
TILED = {
    t: t.source()
    for t in (
        *(Grouped(*sizes, cells=cells) for cells in HALVES for sizes in _GROUPED),
        *(Short(*sizes, cells=cells) for cells in HALVES for sizes in _SIZES),
        Tiled(64, 64, 64, True),
        Tiled(128, 128, 32, True),
        Tiled(192, 128, 32, False),
        Tiled(256, 256, 16, False),
        Wide(576, 512, 16, held=True),
    )
}
"""Sources of tiled variants. The first variant that supports the sizes is the best."""
_COMBINE = ("attention_combine", "attention_combine_few")
_AROUND = ("attention_seen", *(f"attention_split<{TYPES[cells]}>" for cells in CELLS), *_COMBINE)
AROUND = Source("attention_around.cu", _AROUND, before=HEADERS)
SOURCES = (*FEW.values(), *CELLS_OF_FEW.values(), *TILED.values(), AROUND)
