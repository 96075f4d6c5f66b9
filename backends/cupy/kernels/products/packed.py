"""Matmuls with packed weights, and dequantised rows of them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

from .....graph.dtypes import DType
from ....base import Tensor, contiguous_strides
from ....operands import Bound, Operand, need
from ...binding.axes import axes_of
from ...binding.launches import Launches, Word, blocks, rows_of
from ...binding.packing import PACKINGS, ROWS
from ...device.driver import Source
from ...device.limits import EVERYWHERE
from .routes import ALONE, NOTHING_SUMMED, Products, Summed, filled

HEADERS = ("routes.cuh", "packed.cuh", "rounding.cuh")
COLUMNS = 32
CHUNK, ROUNDED = 4, 8
"""Column blocks of a prefill stage (twice as many where warps share columns); column blocks that a warp quantises."""
WARPS, PIECE = 16, 16
"""The most warps of a GEMV block, and the bytes of an item of x in its shared memory."""
TOGETHER = 2048
"""The most results of a GEMV block."""
SMALL, TALL, LARGE = (4, 1, 8), (4, 4, 2), (8, 4, 1)
"""Prefill tiles: groups of 8 entries, units of 32 rows, and warps that share the columns."""
BUSY, FULL = 48, 96
"""Entries of a matrix from which large tiles are better filled than tiles of half the size.

`FULL_DEVICE_BLOCKS` is the number of blocks that fill a device; with fewer blocks, more warps share columns.
"""
COUNTS = (1, 2, 4)
IDS = {DType.I32: "i32", DType.I64: "i64"}


def _of(dtype: DType) -> Source:
    name = dtype.name
    tiles = (f"many<{name}, {', '.join(map(str, tile))}>" for tile in (SMALL, TALL, LARGE))
    return Source("packed.cu", (*tiles, *(f"unpack<{name}, {i}>" for i in IDS.values())), HEADERS)


OWN_RECORDS = frozenset((*(dtype for dtype in PACKINGS if dtype.block == COLUMNS), DType.NVFP4))
"""Dtypes with a separate record for each block of columns. A block of NVFP4 has two of them."""
BY_TYPE = {dtype: _of(dtype) for dtype in PACKINGS}
OF_FEW = {
    t: Source("packed_few.cu", (*(f"few<{t.name}, {n}>" for n in COUNTS), f"summed<{t.name}>"), HEADERS)
    for t in PACKINGS
}
SHARED = Source("packed.cu", ("round_rows",), HEADERS)
SOURCES = (SHARED, *BY_TYPE.values(), *OF_FEW.values())


# ---------------------------------------------------------------------------------------------------- operands


def _whole(w: Operand) -> list[Word]:
    """Return the column blocks and the bytes of a row."""
    assert w.is_whole
    columns = w.shape[-1]
    return [columns // COLUMNS, columns // w.dtype.block * w.dtype.block_bytes]


def _rounded(launches: Launches, x: Operand) -> tuple[Operand, Operand]:
    """Quantise activations to int8; return codes and scales."""
    count, step, columns = math.prod(x.shape[:-1]), rows_of(x), x.shape[-1]
    per_row = columns // COLUMNS
    codes = launches.scratch((count, columns), DType.I8)
    scales = launches.scratch((count, per_row, 4))
    grid = blocks(count * blocks(per_row, ROUNDED), 8)
    launches.add(SHARED["round_rows"], grid, 256, [x, step, count, per_row, codes, scales])
    return codes, scales


def _units(w: Operand) -> int:
    return blocks(w.shape[-2], ROWS)


# ----------------------------------------------------------------------------------------------------- products


def _part(dtype: DType, tokens: int) -> tuple[int, int]:
    """Return the rows and the column blocks that a warp processes at a time; ``Part`` in the kernel."""
    rows = 16 if dtype in OWN_RECORDS else 8
    return rows, 32 // rows * (2 if dtype is DType.Q8_0 or tokens > 1 else 4)


def _pieces(columns: int, tokens: int) -> int:
    """Return the shared-memory items of `columns` quantised column blocks of each token; ``place`` in the kernel."""
    return (3 * tokens | 1) * columns + blocks(columns, 8)


def few(
    launches: Launches,
    products: Products,
    x: Operand,
    entries: int,
    tokens: int,
    route: list[Word],
    unit: int = ALONE,
    others: Products = (),
    more: int = 0,
) -> None:
    """Multiply a few rows of x by several packed weights in one launch.

    Args:
        launches: Receives the launch.
        products: The weights and their results.
        x: Activations [entries * tokens, columns].
        entries: Entries of the route.
        tokens: Rows of x for each entry, at most 4.
        route: The fields of the routing.
        unit: Code of the gated unit that joins two products.
        others: Weights of additional entries, which have one row each.
        more: The number of additional entries.
    """
    count, w = next(n for n in COUNTS if n >= tokens), products[0][0]
    rows, columns = _part(w.dtype, count)
    groups = [blocks(matrix.shape[-2], rows) for matrix, _ in products]
    first, step = [0 if unit else n for n in accumulate(groups, initial=0)], 2 if unit else 1
    fields: list[list[Word]] = [
        [w, out, n, _units(w), w.shape[-2], rows_of(out)]
        for (w, out), n in zip([*products, *others], [*first, 0], strict=False)
    ]
    even = blocks(sum(groups), max(1, launches.processors // max(1, entries + more)))
    of_block = max(step, blocks(min(even, TOGETHER // (count * rows)), step) * step)
    all_chunks = max(1, blocks(w.shape[-1], COLUMNS * columns))
    of_sums = 4 * count * rows * (WARPS + 2 * of_block)
    fit = (EVERYWHERE - of_sums) // (PIECE * _pieces(8, count)) * 8 // columns
    chunks = blocks(all_chunks, blocks(all_chunks, fit))
    of_warp = blocks(of_block * chunks, WARPS)
    warps = blocks(of_block * chunks, of_warp)
    words = [*filled(fields), len(products), unit, x, *_whole(w), tokens, rows_of(x)]
    words += [sum(groups), of_block, of_warp, chunks, *route, entries, *NOTHING_SUMMED]
    kernel = OF_FEW[w.dtype][f"few<{w.dtype.name}, {count}>"]
    shared = PIECE * _pieces(chunks * columns, count) + of_sums
    launches.add(kernel, (blocks(sum(groups), of_block), entries + more), 32 * warps, words, shared)


def summed(launches: Launches, w: Operand, x: Operand, out: Operand, summed: Summed) -> None:
    """Add the weighted products of each token in one launch.

    Args:
        launches: Receives the launch.
        w: Packed weights of the experts.
        x: Activations, contiguous [tokens, used, columns].
        out: Results [tokens, rows].
        summed: The factors, and a further weight.
    """
    rows, columns = _part(w.dtype, 1)
    tokens, entries, groups = out.shape[0], summed.entries, blocks(w.shape[-2], rows)
    even = blocks(groups, max(1, launches.processors // tokens))
    of_block = entries * max(1, min(even, TOGETHER // (rows * entries)))
    chunks = blocks(w.shape[-1], COLUMNS * columns)
    of_warp = blocks(of_block * chunks, WARPS)
    warps = blocks(of_block * chunks, of_warp)
    shared = PIECE * _pieces(entries * blocks(chunks * columns, 8) * 8, 1) + 4 * rows * (WARPS + 2 * of_block)
    need(shared <= EVERYWHERE, "x of all entries is too long for shared memory")
    products = [(w, out), *([] if summed.other is None else [(summed.other, out)])]
    fields: list[list[Word]] = [[m, o, 0, _units(m), m.shape[-2], rows_of(o)] for m, o in products]
    words = [*filled(fields), 1, ALONE, x, *_whole(w), 1, rows_of(x), groups * entries, of_block, of_warp, chunks]
    words += [1, 1, *summed.choice, 0, *summed.words]
    launches.add(
        OF_FEW[w.dtype][f"summed<{w.dtype.name}>"],
        (blocks(groups * entries, of_block), tokens),
        32 * warps,
        words,
        shared,
    )


def shape_of_tiles(w: Operand, entries: float, matrices: int) -> tuple[int, int, int]:
    """Choose the largest tile that fills a device.

    Args:
        w: The weight.
        entries: Rows of x of each matrix, exactly or on average.
        matrices: The number of matrices.
    """

    def fills(tile: tuple[int, int, int]) -> bool:
        groups, units, _ = tile
        return matrices * blocks(w.shape[-2], ROWS * units) * max(1.0, entries / (8 * groups)) >= FULL

    return next(filter(fills, (LARGE, TALL) if entries >= BUSY else (TALL,)), SMALL)


def many(
    launches: Launches,
    w: Operand,
    x: Operand,
    out: Operand,
    tiles: Operand,
    shape: tuple[int, int, int],
    route: list[Word],
) -> None:
    """Quantise x, then multiply a table of tiles.

    Args:
        launches: Receives the launches.
        w: The packed weight.
        x: Activations [rows, columns].
        out: Results [rows, weight rows].
        tiles: The table of tiles [tiles, 4], int32.
        shape: The tile shape of `choose_tile_shape`.
        route: The fields of the routing.
    """
    codes, scales = _rounded(launches, x)
    groups, warps_of_rows, sharing = shape
    units = _units(w)
    words = [w, codes, scales, out, *_whole(w), units, w.shape[-2], rows_of(out), tiles, *route]
    chunk = CHUNK if sharing == 1 else 2 * CHUNK
    stages, sums = 2 * 3 * 16 * chunk * 8 * groups, 4 * warps_of_rows * (sharing // 2) * 8 * groups * 32
    grid = (blocks(units, warps_of_rows), tiles.shape[0])
    kernel = BY_TYPE[w.dtype][f"many<{w.dtype.name}, {', '.join(map(str, shape))}>"]
    launches.add(kernel, grid, 32 * warps_of_rows * sharing, words, shared_bytes=max(stages, sums))


# --------------------------------------------------------------------------------------------------------- rows


def get_rows(launches: Launches, call: Bound) -> None:
    """Read rows of one complete packed table by number."""
    table, ids, out = call.operand(0), call.operand(1), call.out
    need(ids.dtype in IDS, f"ids of type {ids.dtype} are missing")
    fault = launches.fault(f"id {{value}} names no row of its table, which has {table.shape[0]}")
    _launch_unpack(launches, table, ids, out, fault)


def expanded(launches: Launches, w: Operand) -> Operand:
    """Dequantise a packed weight, or a view of one, to float32 in scratch.

    All of its buffer is dequantised, for kernels that cannot read packed weights.
    """
    assert w.declared is not None
    whole = replace(w, address=w.address - w.tensor.offset, tensor=_dense_tensor(w.tensor, w.declared.shape))
    copy = launches.scratch(w.declared.shape)
    rows = replace(copy, tensor=_dense_tensor(copy.tensor, (math.prod(copy.shape[:-1]), copy.shape[-1])))
    _launch_unpack(launches, whole, None, rows, [0, 0])
    skipped = w.tensor.offset // w.dtype.block_bytes * w.dtype.block
    place = copy.tensor.offset + 4 * skipped
    return replace(
        copy,
        address=copy.address + 4 * skipped,
        tensor=replace(copy.tensor, offset=place, shape=w.shape, strides=w.strides),
    )


def _dense_tensor(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    offset = 0 if tensor.dtype.is_quantised else tensor.offset
    return replace(tensor, offset=offset, shape=shape, strides=contiguous_strides(shape))


def _launch_unpack(launches: Launches, table: Operand, ids: Operand | None, out: Operand, fault: list[Word]) -> None:
    """Launch the dequantisation of numbered rows, or of all rows of all matrices."""
    columns = table.shape[-1]
    count = math.prod(out.shape[:-1])
    axes = axes_of((count,), []) if ids is None else axes_of(ids.shape, [ids])
    walk: list[Word] = [0] * 11 if ids is None else axes.walk(0, ids)
    words = [table, *_whole(table), table.shape[-2], _units(table), math.prod(table.shape[:-1]), rows_of(out)]
    words += [*axes.words, *walk, out, *fault]
    threads = min(256, blocks(max(1, columns // 8), 32) * 32)
    kernel = BY_TYPE[table.dtype][f"unpack<{table.dtype.name}, {IDS[ids.dtype] if ids is not None else 'i32'}>"]
    launches.add(kernel, count, threads, words)
