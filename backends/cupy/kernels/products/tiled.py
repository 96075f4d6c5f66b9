"""Prefill matmuls on tensor cores, in 16-bit terms; see ``tiled.cu``.

1. Split x into 16-bit terms: x = t0 + t1, or one term. For float16 weights, scale each row of x first.
2. Choose a tile shape that fills the device, by threads, warpgroups or clusters.
3. Multiply each tile of a table. Blocks may share the columns of a tile; their partial results are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .....graph.dtypes import DType
from ....operands import Operand
from ...binding.launches import Launches, Word, blocks, rows_of
from ...binding.packing import PACKINGS, ROWS
from ...device.driver import Kernel, Source
from ..elementwise import TYPES


@dataclass(frozen=True, slots=True)
class Tile:
    """The weight rows and the entries of a block, and of a warp (`warp_rows`, `warp_entries`)."""

    rows: int
    entries: int
    high: int
    wide: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.rows // self.high) * (self.entries // self.wide)

    def __str__(self) -> str:
        return f"Sizes<{self.rows}, {self.entries}, {self.high}, {self.wide}>"


SMALL, LARGE, TALL = Tile(64, 64, 32, 32), Tile(128, 128, 64, 32), Tile(256, 128, 64, 64)
"""Tiles of plain warps. Packed weights use the large one."""
GROUPED = Tile(256, 128, 256, 16)
"""The tile of warpgroups. It replaces the tall tile, and the large tile of packed weights."""
CLUSTERED = Tile(128, 256, 16, 256)
"""The tile of clusters of warpgroup blocks, for 16-bit weights. The blocks of a cluster share entries."""
CLUSTERS = (4, 2, 1)
"""Possible blocks of a cluster. For eight blocks with rows, at most one block may be without rows."""
FULL, SHARES, SHARED_COLUMNS = 96, (1, 2, 4, 8), 512
"""Number of tiles that fill a device; possible numbers of blocks that share columns; and the fewest columns of each."""
FEWEST, WORTH = 128, 32
"""Entries of a matrix, and large tiles, from which packed weights use bfloat16 tensor cores, not ``packed.cu``.

In the time model of an H200, one large tile takes as long as 130 of them. Products of bytes take time proportional to
their work.
"""
UNPACKED, MOST_UNPACKED = 512, 512 << 20
"""Entries from which a packed matrix is unpacked once for clusters, and the most bytes of the unpacked matrix.

On an H100, 2,048 entries of 9216 x 2560 take 329 microseconds unpacked tile by tile, 201 as bfloat16.
"""
STAGED = 64
"""Rows of terms are padded with zeros to a multiple of these columns."""
FLOATS = (DType.F16, DType.BF16)
HEADERS = ("columns.cuh", "routes.cuh", "packed.cuh")


def _of(*names: str) -> Source:
    return Source("tiled.cu", names, HEADERS)


def _grouped(*names: str) -> Source:
    return Source("warpgroups.cu", names, (*HEADERS, "tiled.cu", "wgmma.cuh"), architectures=("sm_90a",))


def _clustered(t: DType) -> Source:
    names = (f"{kernel}<{TYPES[t]}, {terms}>" for terms in (1, 2) for kernel in ("split_tiles", "clustered"))
    before = (*HEADERS, "tiled.cu", "wgmma.cuh", "warpgroups.cu", "cluster.cuh")
    return Source("clusters.cu", tuple(names), before, architectures=("sm_90a",))


BY_TYPE = {
    **{
        t: _of(f"split_rows<{TYPES[t]}, 2>", *(f"tiled<{TYPES[t]}, {n}>" for n in (SMALL, LARGE, TALL))) for t in FLOATS
    },
    **{t: _of(f"tiled_packed<{t.name}>") for t in PACKINGS},
}
BY_WARPGROUPS = {
    **{t: _grouped(*(f"grouped<{TYPES[t]}, {terms}>" for terms in (1, 2))) for t in FLOATS},
    **{t: _grouped(f"grouped_packed<{t.name}>", f"unpacked<{t.name}>") for t in PACKINGS},
}
BY_CLUSTERS = {t: _clustered(t) for t in FLOATS}
SHARED = _of(*(f"split_rows<{TYPES[t]}, 1>" for t in FLOATS), "add_shares")
SOURCES = (SHARED, *BY_TYPE.values(), *BY_WARPGROUPS.values(), *BY_CLUSTERS.values())


def _shared_bytes(dtype: DType, tile: Tile) -> int:
    """Return the shared memory of the stages of a block: rows of weights and of terms.

    Rows have 8 additional columns, which puts them into different banks. Stages of warpgroups are swizzled, begin at a
    multiple of 1024, and are three for two terms or four for one term. Stages of clusters have two mbarriers each.
    """
    is_float = dtype in FLOATS
    if tile == CLUSTERED:
        columns, of_weights, of_x, more = 64, 4, 4, 1024 + 64
    elif tile == GROUPED:
        columns, of_weights, of_x, more = (64, 3, 6, 1024) if is_float else (64, 4, 4, 1024)
    else:
        columns, of_weights, of_x, more = (40, 3, 6, 0) if is_float else (72, 2, 3, 0)
    return (of_weights * tile.rows + of_x * tile.entries) * columns * 2 + more


def shape_of_tiles(
    launches: Launches, w: Operand, entries: float, matrices: int, is_even: bool
) -> tuple[Tile, int] | None:
    """Choose a tile shape.

    Args:
        launches: Knows the limits of the device.
        w: The weight.
        entries: Rows of x of each matrix, exactly or on average.
        matrices: The number of matrices.
        is_even: Whether each matrix has exactly `entries` rows.

    Returns:
        The tile and the number of blocks that share its columns, or `None` where other kernels are better.
    """

    def fills(tile: Tile, shares: int, many: int) -> bool:
        """Return whether this many blocks have work, and a block has enough shared memory."""
        tiles = blocks(w.shape[-2], tile.rows) * matrices * max(1.0, entries / tile.entries)
        return launches.fits(_shared_bytes(w.dtype, tile)) and shares * tiles >= many

    if not (w.dtype in PACKINGS or w.dtype in FLOATS):
        return None
    largest = GROUPED if launches.limits.has_warpgroups else TALL
    most = 1 if not is_even else w.shape[-1] // SHARED_COLUMNS if largest == GROUPED else 2
    shares = [n for n in SHARES if n <= max(1, most)]
    tall = [(largest, n) for n in shares] if entries >= largest.entries else []
    if w.dtype in FLOATS:
        if largest == GROUPED and is_even and _shares_entries(w.shape[-2], int(entries)):
            both = [*((CLUSTERED, n) for n in shares), *tall]
            tall = sorted(both, key=lambda choice: choice[1] > 2)  # above two only if no other choice fills a device
        return next(((tile, shares) for tile, shares in (*tall, (LARGE, 1)) if fills(tile, shares, FULL)), (SMALL, 1))
    if largest == GROUPED and (found := next((choice for choice in tall if fills(*choice, FULL)), None)):
        return found
    return (LARGE, 1) if entries >= FEWEST and fills(LARGE, 1, WORTH) else None


def unpacked(launches: Launches, w: Operand, entries: int) -> Operand | None:
    """Unpack a packed matrix to bfloat16 in scratch, or return `None` where that is slower.

    Args:
        launches: Receives the launch.
        w: The packed matrix [rows, columns].
        entries: Rows of x.
    """
    rows, columns = w.shape[-2:]
    copy = replace(w, tensor=replace(w.tensor, shape=(rows, columns), dtype=DType.BF16, strides=(columns, 1)))
    is_worth = entries >= UNPACKED and 2 * rows * columns <= MOST_UNPACKED and launches.limits.has_warpgroups
    if not is_worth or (choice := shape_of_tiles(launches, copy, entries, 1, True)) is None or choice[0] != CLUSTERED:
        return None
    to = launches.scratch((rows, columns), DType.BF16)
    words: list[Word] = [w, to, rows, columns // 32, columns // w.dtype.block * w.dtype.block_bytes]
    kernel = BY_WARPGROUPS[w.dtype][f"unpacked<{w.dtype.name}>"]
    launches.add(kernel, (blocks(columns, 512), blocks(rows, ROWS)), 128, words)
    return to


def _shares_entries(rows: int, entries: int) -> bool:
    """Return whether clusters are faster than warpgroup tiles of half the width.

    They are, if clusters of several blocks are possible and their tiles have room for at most 5/4 of the entries of the
    narrower tiles.
    """
    room, half = (blocks(entries, tile.entries) * tile.entries for tile in (CLUSTERED, GROUPED))
    return _cluster(blocks(rows, CLUSTERED.rows)) > 1 and 4 * room <= 5 * half


def _cluster(row_blocks: int) -> int:
    """Return the best number of blocks in a cluster that leaves almost no block without rows."""
    return next(size for size in CLUSTERS if 8 * (-row_blocks % size) <= row_blocks)


def terms_of(dtype: DType, tile: Tile, is_exact: bool) -> int:
    """Return the number of terms of x: one for packed weights, and for 16-bit weights that are not exact."""
    return 1 if dtype in PACKINGS or (tile in (GROUPED, CLUSTERED) and not is_exact) else 2


def rounding(dtype: DType, is_exact: bool) -> float | None:
    """Return the relative rounding error of activations for weights of a dtype, or `None` without rounding."""
    if dtype in FLOATS and is_exact:
        return 2.0**-16
    return 2.0**-8 if dtype in PACKINGS else {DType.F16: 2.0**-11, DType.BF16: 2.0**-8}.get(dtype)


def _split(launches: Launches, w: Operand, x: Operand, terms: int, tile: Tile, tiles: int) -> tuple[Operand, Word]:
    """Split rows of x into terms, for clusters in the order of tiles.

    Returns:
        The terms, and the factors that undo the scales of rows (0: no scales).
    """
    count, step, columns = math.prod(x.shape[:-1]), rows_of(x), x.shape[-1]
    kind = w.dtype if w.dtype in FLOATS else DType.BF16
    if tile == CLUSTERED:
        kernel, room = BY_CLUSTERS[kind][f"split_tiles<{TYPES[kind]}, {terms}>"], tiles * tile.entries
        tokens: list[Word] = [count if math.prod(w.shape[:-2]) == 1 else x.shape[-2]]
    else:
        kernel, room = (SHARED if terms == 1 else BY_TYPE[kind])[f"split_rows<{TYPES[kind]}, {terms}>"], count
        tokens = []
    to = launches.scratch((room, terms, blocks(columns, STAGED) * STAGED), DType.BF16)
    undo: Word = launches.scratch((count,)) if kind is DType.F16 else 0
    # The block that scales a row reads all of the row.
    grid, threads = ((count, 1), 1024) if kind is DType.F16 else ((count, blocks(columns, 1024)), 256)
    launches.add(kernel, grid, threads, [x, step, columns, to, undo, *tokens])
    return to, undo


def _steps(w: Operand) -> list[Word]:
    """Return the strides between matrices and between rows."""
    if w.dtype in PACKINGS:
        return [blocks(w.shape[-2], ROWS), w.shape[-1] // w.dtype.block * w.dtype.block_bytes]
    steps = [s for n, s in zip(w.shape[:-2], w.strides[:-2], strict=True) if n != 1]
    return [steps[-1] if steps else 0, w.strides[-2]]


def _kernel(dtype: DType, tile: Tile, terms: int) -> Kernel:
    """Return the kernel for a dtype, a tile and a number of terms."""
    if tile == CLUSTERED:
        return BY_CLUSTERS[dtype][f"clustered<{TYPES[dtype]}, {terms}>"]
    if tile == GROUPED:
        name = f"grouped<{TYPES[dtype]}, {terms}>" if dtype in FLOATS else f"grouped_packed<{dtype.name}>"
        return BY_WARPGROUPS[dtype][name]
    return BY_TYPE[dtype][f"tiled<{TYPES[dtype]}, {tile}>" if dtype in FLOATS else f"tiled_packed<{dtype.name}>"]


def many(
    launches: Launches,
    w: Operand,
    x: Operand,
    out: Operand,
    tiles: Operand,
    tile: Tile,
    shares: int,
    terms: int,
    route: list[Word],
) -> None:
    """Split x, multiply a table of tiles, and add the partial results of blocks that share columns.

    Args:
        launches: Receives the launches.
        w: The weight.
        x: Activations [rows, columns].
        out: Results [rows, weight rows].
        tiles: The table of tiles [tiles, 4], int32.
        tile: The tile shape.
        shares: Blocks that share the columns of a tile.
        terms: Terms of x.
        route: The fields of the routing.
    """
    taken_apart, undo = _split(launches, w, x, terms, tile, tiles.shape[0])
    rows, count = w.shape[-2], math.prod(out.shape[:-1])
    row_blocks = blocks(rows, tile.rows)
    cluster = _cluster(row_blocks) if tile == CLUSTERED else 1
    grid = (tiles.shape[0], blocks(row_blocks, cluster) * cluster, shares)
    run = blocks(w.shape[-1], shares * STAGED) * STAGED
    parts = None
    more: list[Word] = []
    if tile in (GROUPED, CLUSTERED):
        more = [0, 0]
        if shares > 1:
            left = launches.scratch((math.prod(grid), tile.rows * tile.entries))
            more = [left, launches.constant(np.zeros(grid[:2], np.int32))]  # kernels reset it to zeros
    elif shares > 1:
        parts = launches.scratch((shares, count, rows))
    to: list[Word] = [parts or out, w.shape[-1], rows, *_steps(w), rows if parts else rows_of(out)]
    words = [w, taken_apart, undo, *to, tiles, *route, run, count * rows, *more]
    kernel, shared_bytes = _kernel(w.dtype, tile, terms), _shared_bytes(w.dtype, tile)
    launches.add(kernel, grid, tile.threads, words, shared_bytes, (1, cluster, 1))
    if parts:
        words = [parts, out, shares, count * rows, rows, rows_of(out)]
        launches.add(SHARED["add_shares"], (count, blocks(rows, 1024)), 256, words)
