"""Products with packed weights, also of routed experts; rows of them as float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ....graph.dtypes import DType
from ...operands import Bound, Operand
from ..axes import axes_of
from ..driver import Kernel, Source
from ..launches import Binding, Launches, Word, blocks, need
from ..packing import PACKINGS, ROWS
from .elementwise import as_float

COLUMNS = 32
FEW = 4
"""Tokens up to which integer dot products of single threads keep up with memory; for more there are tensor cores."""
WARPS, CHUNK = 16, 4
"""Warps of a block that share the columns of a row, and the blocks of columns that each takes at a time."""
SMALL, LARGE = (4, 1, 8), (8, 4, 1)
"""Tiles of many entries: groups of 8 entries, units of 32 rows, and warps that share the columns."""
BUSY = 48
"""Entries of a matrix from which large tiles are better filled than small ones."""
MOST_ENTRIES = 65535
COUNTS = (1, 2, 4)
IDS = {DType.I32: "i32", DType.I64: "i64"}


def _of(dtype: DType) -> Source:
    name = dtype.name
    tiles = (f"many<{name}, {', '.join(map(str, tile))}>" for tile in (SMALL, LARGE))
    names = (*(f"few<{name}, {n}>" for n in COUNTS), *tiles, *(f"unpack<{name}, {i}>" for i in IDS.values()))
    return Source("packed.cu", names, ("packed.cuh",))


BY_TYPE = {dtype: _of(dtype) for dtype in PACKINGS}
SHARED = Source("packed.cu", ("round_rows", "routes"), ("packed.cuh",))
SOURCES = (SHARED, *BY_TYPE.values())


# ---------------------------------------------------------------------------------------------------- operands


def _whole(w: Operand) -> list[Word]:
    """Blocks and bytes of a row."""
    need(w.is_whole, f"views of packed {w.dtype} are missing")
    columns = w.shape[-1]
    return [columns // COLUMNS, columns // w.dtype.block * w.dtype.block_bytes]


def _rows(x: Operand) -> tuple[int, int]:
    """How many rows of a float operand there are, and the step between them, in elements."""
    need(x.is_float and x.has_rows, "rows of activations do not lie evenly")
    return math.prod(x.shape[:-1]), x.row_step // 4


def _rounded(launches: Launches, x: Operand) -> tuple[Operand, Operand]:
    """Codes and scales of activations."""
    count, step = _rows(x)
    columns = x.shape[-1]
    per_row = columns // COLUMNS
    codes = launches.scratch((count, columns), DType.I8)
    scales = launches.scratch((count, per_row, 4))
    grid = blocks(count * blocks(per_row, CHUNK), 8)
    launches.add(SHARED["round_rows"], grid, 256, [x, step, count, per_row, codes, scales])
    return codes, scales


def _units(w: Operand) -> int:
    return blocks(w.shape[-2], ROWS)


# ------------------------------------------------------------------------------------------------- few entries


def _warps(columns: int) -> int:
    """As many as do not idle while others take a last chunk."""
    chunks = max(1, blocks(columns, CHUNK * COLUMNS))
    return blocks(chunks, blocks(chunks, WARPS))


def _launch_few(
    launches: Launches, w: Operand, x: Operand, out: Operand, chosen: Operand, tokens: int, route: list[Word]
) -> None:
    """One launch for all entries, of `tokens` rows each; `chosen` says which matrix an entry takes."""
    count = next(n for n in COUNTS if n >= tokens)
    entries, (_, step), units = math.prod(chosen.shape), _rows(x), _units(w)
    words = [w, x, out, chosen, *_whole(w), units, w.shape[-2], tokens, step, _rows(out)[1], *route]
    kernel = BY_TYPE[w.dtype][f"few<{w.dtype.name}, {count}>"]
    launches.add(kernel, (units, entries), 32 * _warps(w.shape[-1]), words)


# ------------------------------------------------------------------------------------------------ many entries


def _launch_many(
    launches: Launches,
    w: Operand,
    x: Operand,
    out: Operand,
    tiles: Operand,
    order: Operand | int,
    shape: tuple[int, int, int],
    route: list[Word],
) -> None:
    """One launch for a table of tiles."""
    codes, scales = _rounded(launches, x)
    groups, warps_of_rows, sharing = shape
    units = _units(w)
    words = [w, codes, scales, out, *_whole(w), units, w.shape[-2], _rows(out)[1], tiles, order, *route]
    stage = 3 * 16 * max(sharing, CHUNK) * 8 * groups
    grid = (blocks(units, warps_of_rows), tiles.shape[0])
    launches.add(_tile_kernel(w.dtype, shape), grid, 32 * warps_of_rows * sharing, words, shared_bytes=2 * stage)


def _tile_kernel(dtype: DType, shape: tuple[int, int, int]) -> Kernel:
    return BY_TYPE[dtype][f"many<{dtype.name}, {', '.join(map(str, shape))}>"]


def _tiling(entries: float) -> tuple[int, int, int]:
    """The shape of tiles for so many entries of a matrix."""
    return LARGE if entries >= BUSY else SMALL


# ------------------------------------------------------------------------------------------------------ products


def _matrix_of(w: Operand, x: Operand) -> npt.NDArray[np.int32]:
    """The matrix of each leading entry of `x`: each serves a run of neighbours along every axis."""
    leading = x.shape[:-2]
    sizes = (1,) * (len(leading) - len(w.shape) + 2) + w.shape[:-2]
    found = np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes)
    for axis, (n, m) in enumerate(zip(sizes, leading, strict=True)):
        found = np.repeat(found, m // n if n else 0, axis=axis)
    return found.reshape(-1)


def mul_mat(launches: Launches, call: Bound) -> None:
    """A product with a packed weight."""
    w, x, out = call.operand(0), as_float(launches, call.operand(1)), call.out
    _whole(w), _rows(x)
    matrices, tokens = _matrix_of(w, x), x.shape[-2]
    if w.shape[:-2] in ((), (1,)):
        matrices, tokens = np.zeros(1, np.int32), math.prod(x.shape[:-1])
    need(len(matrices) <= MOST_ENTRIES, f"{len(matrices)} matrices are too many for one launch")
    if tokens <= FEW:
        count = math.prod(w.shape[:-2])
        route: list[Word] = [0, count, count, 1, 1, 0, 0]  # no fault: all of them are there
        return _launch_few(launches, w, x, out, launches.constant(matrices), tokens, route)
    shape = _tiling(tokens)
    size = 8 * shape[0]
    tiles = [
        (matrix, entry * tokens + first, min(size, tokens - first), 0)
        for entry, matrix in enumerate(matrices.tolist())
        for first in range(0, tokens, size)
    ]
    need(len(tiles) <= MOST_ENTRIES, f"{len(tiles)} tiles are too many for one launch")
    _launch_many(launches, w, x, out, launches.constant(np.array(tiles, np.int32)), 0, shape, [1, 1])


def mul_mat_id(launches: Launches, call: Bound) -> None:
    """Products with the packed experts that were chosen, of which a part may be elsewhere."""
    w, x, ids, out = call.operand(0), as_float(launches, call.operand(1)), call.operand(2), call.out
    need(ids.is_dense and ids.dtype is DType.I32, "ids of experts do not lie densely")
    _whole(w), _rows(x)
    first, total = (int(np.asarray(call.attrs[name])) for name in ("first", "total"))
    experts, slots = w.shape[0], math.prod(ids.shape)
    total = total or experts
    spread: list[Word] = [ids.shape[-1], x.shape[-2]]
    fault = launches.fault(f"id {{value}} is none of {total} experts")
    flat = replace(ids, tensor=replace(ids.tensor, shape=(slots,), strides=(1,)))
    if slots <= max(FEW, total // 2):  # hardly two of one expert
        return _launch_few(launches, w, x, out, flat, 1, [first, experts, total, *spread, *fault])
    shape = _tiling(slots / total)
    size = 8 * shape[0]
    count = experts + 1 + slots // size
    need(count <= MOST_ENTRIES, f"{count} tiles are too many for one launch")
    tiles, order = launches.scratch((count, 4), DType.I32), launches.scratch((slots,), DType.I32)
    words = [flat, slots, first, experts, total, size, count, tiles, order, *fault]
    launches.add(SHARED["routes"], 1, min(1024, blocks(max(slots, experts + 1), 32) * 32), words, 8 * (experts + 1))
    _launch_many(launches, w, x, out, tiles, order, shape, spread)


def get_rows(launches: Launches, call: Bound) -> None:
    """Rows of a packed table by number."""
    table, ids, out = call.operand(0), call.operand(1), call.out
    need(len(table.shape) == 2, f"rows of several packed tables of {table.dtype} are missing")
    need(ids.dtype in IDS, f"ids of type {ids.dtype} are missing")
    fault = launches.fault(f"id {{value}} names no row of its table, which has {table.shape[0]}")
    _launch_unpack(launches, table, ids, out, fault)


def _launch_unpack(launches: Launches, table: Operand, ids: Operand, out: Operand, fault: list[Word]) -> None:
    rows, columns = table.shape
    axes = axes_of(ids.shape, [ids])
    words = [table, *_whole(table), rows, _rows(out)[1], *axes.words, *axes.walk(0, ids), out, *fault]
    threads = min(256, blocks(max(1, columns // 8), 32) * 32)
    launches.add(BY_TYPE[table.dtype][f"unpack<{table.dtype.name}, {IDS[ids.dtype]}>"], axes.count, threads, words)


BINDINGS: Mapping[str, Binding] = {"mul_mat_id": mul_mat_id}
