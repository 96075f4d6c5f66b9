"""Products of many tokens on tensor cores, in 16-bit terms; see ``tiled.cu``."""

from __future__ import annotations

import math

from ....graph.dtypes import DType
from ...operands import Operand
from ..binding.launches import Launches, Word, blocks, rows_of
from ..binding.packing import PACKINGS, ROWS
from ..device.driver import Source
from .elementwise import TYPES

SMALL, LARGE = 64, 128
"""Rows and entries of a tile; packed weights have large ones."""
FULL = 96
"""Large tiles from which they fill a device better than four times as many small ones."""
FEWEST, WORTH = 128, 32
"""Entries of a matrix, and large tiles, from which packed weights are better unpacked for tensor cores of 16 bits than
multiplied as bytes by ``packed.cu``: by the model of time for an H200 one large tile takes as long as 130 of them, and
bytes take as long as their work."""
STAGED = 64
"""Columns to a multiple of which rows of terms are filled with zeros."""
FLOATS = (DType.F16, DType.BF16)
HEADERS = ("columns.cuh", "routes.cuh", "packed.cuh")


def _of(*names: str) -> Source:
    return Source("tiled.cu", names, HEADERS)


BY_TYPE = {
    **{t: _of(f"split_rows<{TYPES[t]}, 2>", *(f"tiled<{TYPES[t]}, {n}>" for n in (SMALL, LARGE))) for t in FLOATS},
    **{t: _of(f"tiled_packed<{t.name}>") for t in PACKINGS},
}
SHARED = _of("split_rows<bf16_bits, 1>")
SOURCES = (SHARED, *BY_TYPE.values())


def _shared_bytes(dtype: DType, size: int) -> int:
    """Of the stages of a block: rows of weights and of terms, with 8 columns more that keep them in different banks."""
    columns, of_weights, of_x = (32, 3, 6) if dtype in FLOATS else (64, 2, 3)
    return (of_weights + of_x) * size * (columns + 8) * 2


def size_of_tiles(launches: Launches, w: Operand, entries: float, matrices: int) -> int | None:
    """For so many entries of each matrix; nothing where others multiply such weights better, or at all."""
    tiles = blocks(w.shape[-2], LARGE) * matrices * max(1.0, entries / LARGE)
    fits = launches.fits(_shared_bytes(w.dtype, LARGE))
    if w.dtype in FLOATS:
        return LARGE if tiles >= FULL and fits else SMALL
    return LARGE if w.dtype in PACKINGS and entries >= FEWEST and tiles >= WORTH and fits else None


def _split(launches: Launches, x: Operand, dtype: DType) -> tuple[Operand, Word]:
    """Rows of x as terms, and what undoes their scales."""
    count, step, columns = math.prod(x.shape[:-1]), rows_of(x), x.shape[-1]
    terms = 2 if dtype in FLOATS else 1
    to = launches.scratch((count, terms, blocks(columns, STAGED) * STAGED), DType.BF16)
    undo: Word = launches.scratch((count,)) if dtype is DType.F16 else 0
    kernel = BY_TYPE[dtype][f"split_rows<{TYPES[dtype]}, 2>"] if dtype in FLOATS else SHARED["split_rows<bf16_bits, 1>"]
    # Who scales a row has to see all of it.
    grid, threads = ((count, 1), 1024) if dtype is DType.F16 else ((count, blocks(columns, 1024)), 256)
    launches.add(kernel, grid, threads, [x, step, columns, to, undo])
    return to, undo


def _steps(w: Operand) -> list[Word]:
    """Between matrices, and between rows."""
    if w.dtype in PACKINGS:
        return [blocks(w.shape[-2], ROWS), w.shape[-1] // w.dtype.block * w.dtype.block_bytes]
    steps = [s for n, s in zip(w.shape[:-2], w.strides[:-2], strict=True) if n != 1]
    return [steps[-1] if steps else 0, w.strides[-2]]


def many(
    launches: Launches, w: Operand, x: Operand, out: Operand, tiles: Operand, size: int, route: list[Word]
) -> None:
    """One launch for a table of tiles, and one that takes x apart."""
    terms, undo = _split(launches, x, w.dtype)
    words = [w, terms, undo, out, w.shape[-1], w.shape[-2], *_steps(w), rows_of(out), tiles, *route]
    name = f"tiled<{TYPES[w.dtype]}, {size}>" if w.dtype in FLOATS else f"tiled_packed<{w.dtype.name}>"
    grid = (tiles.shape[0], blocks(w.shape[-2], size))
    launches.add(BY_TYPE[w.dtype][name], grid, 2 * size, words, _shared_bytes(w.dtype, size))
