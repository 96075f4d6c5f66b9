"""Matmuls with packed quantised weights for few and many rows, and lookups of dequantised weight rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from .....graph.dtypes import DType
from ....base import Tensor, contiguous_strides
from ....fusion.operands import BoundInstruction, Operand, require_supported
from ...binding.iteration_axes import build_merged_tiling_iteration_axes
from ...binding.launch_builder import LaunchBuilder, LaunchWord, compute_row_stride, count_blocks
from ...binding.weight_packing import PLANE_LAYOUTS, UNIT_ROWS
from ...device.device_limits import DEFAULT_SHARED_BYTES
from ...device.driver import KernelSource
from ...generated.row_prologue import (
    BLOCK_SUM_FLOATS,
    LANES_HEADER,
    PLAIN_PROLOGUE,
    PLAIN_PROLOGUE_WORDS,
    RowPrologue,
)
from .routes import NO_SUM_FIELDS, NO_UNIT, WeightedExpertSum, WeightsAndResults, join_and_pad_product_words

CODE_BOOK_ENTRIES = {
    **{DType.IQ1_S: 2048, DType.IQ1_M: 2048},
    **{DType.IQ2_XXS: 256, DType.IQ2_XS: 512, DType.IQ2_S: 1024, DType.IQ3_XXS: 256, DType.IQ3_S: 512},
}
"""Entries of the code book that kernels of a dtype have in shared memory, 4 bytes each."""
CODE_BOOK_HEADERS = ("book_levels.cuh", "code_books.cuh")
BLOCK_COLUMNS, MAX_RECORD_COLUMNS = 32, 64
STAGE_BLOCKS, QUANTISED_BLOCKS_PER_WARP = 4, 8
"""Column blocks of a prefill stage (twice as many where warps share columns); column blocks that a warp quantises."""
MAX_GEMV_WARPS, SHARED_ITEM_BYTES = 16, 16
"""Maximum warps of a GEMV block, and the bytes of an item of x in its shared memory."""
HEAD_BLOCKS = 8
"""Column blocks that a warp brings at once."""
MAX_BLOCK_RESULTS = 2048
"""Maximum number of results of a GEMV block."""
SMALL_TILE, TALL_TILE, LARGE_TILE = (4, 1, 8), (4, 4, 2), (8, 4, 1)
"""Prefill tiles: groups of 8 entries, units of 32 rows, and warps that share the columns."""
MIN_LARGE_TILE_ENTRIES, FULL_DEVICE_BLOCKS = 48, 96
"""Entries of a matrix from which large tiles are better filled than tiles of half the size.

`FULL_DEVICE_BLOCKS` is the number of blocks that fill a device; with fewer blocks, more warps share columns.
"""
TOKEN_COUNTS = (1, 2, 4)
ID_TYPE_NAMES = {DType.I32: "i32", DType.I64: "i64"}


def list_format_headers(dtype: DType | None) -> tuple[str, ...]:
    """List the headers that a kernel source needs for the packed format of `dtype`; none without a dtype."""
    return ("packed.cuh", *(CODE_BOOK_HEADERS if dtype in CODE_BOOK_ENTRIES else ()))


def count_code_book_bytes(dtype: DType) -> int:
    """Return the bytes of shared memory that kernels of a dtype declare for its code book; 0 if it has none."""
    return 4 * CODE_BOOK_ENTRIES.get(dtype, 0)


def _list_packed_headers(dtype: DType | None) -> tuple[str, ...]:
    return ("routes.cuh", *list_format_headers(dtype), "rounding.cuh")


def _make_packed_source(dtype: DType) -> KernelSource:
    name = dtype.name
    tiles = (f"many<{name}, {', '.join(map(str, tile))}>" for tile in (SMALL_TILE, TALL_TILE, LARGE_TILE))
    return KernelSource(
        "packed.cu", (*tiles, *(f"unpack<{name}, {i}>" for i in ID_TYPE_NAMES.values())), _list_packed_headers(dtype)
    )


HALF_ROWS, MIN_HALF_GAIN = 4, 1.08
"""Weight rows of a smaller GEMV tile for one token, and the factor of time from which it is better."""


def list_gemv_names(dtype: DType) -> tuple[str, ...]:
    """List the names of the GEMV kernels of a dtype: by the number of tokens, and the one with smaller tiles."""
    names = tuple(f"few<{dtype.name}, {count}>" for count in TOKEN_COUNTS)
    return names if dtype in BLOCK_RECORD_DTYPES else (*names, f"few<{dtype.name}, 1, {HALF_ROWS}>")


BLOCK_RECORD_DTYPES = frozenset(dtype for dtype in PLANE_LAYOUTS if dtype.block <= MAX_RECORD_COLUMNS)
"""Dtypes with a record for each one or two blocks of columns."""
TILED_SOURCE_BY_DTYPE = {dtype: _make_packed_source(dtype) for dtype in PLANE_LAYOUTS}
GEMV_SOURCE_BY_DTYPE = {
    t: KernelSource(
        "packed_few.cu",
        (*list_gemv_names(t), f"summed<{t.name}>"),
        (*_list_packed_headers(t), PLAIN_PROLOGUE),
    )
    for t in PLANE_LAYOUTS
}
SHARED_SOURCE = KernelSource("packed.cu", ("round_rows",), _list_packed_headers(None))
SOURCES = (SHARED_SOURCE, *TILED_SOURCE_BY_DTYPE.values(), *GEMV_SOURCE_BY_DTYPE.values())


# ---------------------------------------------------------------------------------------------------- operands


def _make_row_size_words(w: Operand) -> list[LaunchWord]:
    """Return the size of a packed row as launch words: its blocks of 32 columns, and its bytes."""
    assert w.is_whole_buffer
    columns = w.shape[-1]
    return [columns // BLOCK_COLUMNS, columns // w.dtype.block * w.dtype.block_bytes]


def _quantise_activations(launches: LaunchBuilder, x: Operand) -> tuple[Operand, Operand]:
    """Launch the quantisation of activations to int8, with one scale per 32 columns; return (codes, scales)."""
    count, step, columns = math.prod(x.shape[:-1]), compute_row_stride(x), x.shape[-1]
    per_row = columns // BLOCK_COLUMNS
    codes = launches.allocate_scratch((count, columns), DType.I8)
    scales = launches.allocate_scratch((count, per_row, 4))
    grid = count_blocks(count * count_blocks(per_row, QUANTISED_BLOCKS_PER_WARP), 8)
    launches.add_launch(SHARED_SOURCE["round_rows"], grid, 256, [x, step, count, per_row, codes, scales])
    return codes, scales


def _count_row_units(w: Operand) -> int:
    return count_blocks(w.shape[-2], UNIT_ROWS)


# ----------------------------------------------------------------------------------------------------- products


def _choose_gemv_rows_and_blocks(dtype: DType, tokens: int) -> tuple[int, int]:
    """Return how many weight rows, and how many blocks of 32 columns, a warp of a GEMV processes at a time.

    The struct ``Part`` in C++ has the same numbers.
    """
    rows = 16 if dtype in BLOCK_RECORD_DTYPES else 8
    own = 1 if dtype is DType.TQ1_0 and tokens > 2 else 2 if dtype is DType.Q8_0 or tokens > 1 else 4
    return rows, 32 // rows * own


def _choose_gemv_tile_for_grid(
    dtype: DType, tokens: int, weight_rows: Sequence[int], columns: int, blocks: int, step: int
) -> tuple[int, int]:
    """Return the weight rows and column blocks that a GEMV warp processes at a time, adapted to the number of blocks.

    For one token the rows are halved if that divides the work more evenly among the blocks that run at once.

    Args:
        dtype: Dtype of the weights.
        tokens: The number of tokens.
        weight_rows: Rows of each weight.
        columns: Columns of the weights.
        blocks: Blocks that run at once.
        step: Groups of rows that a block has together.
    """
    tile = _choose_gemv_rows_and_blocks(dtype, tokens)
    if tokens > 1 or dtype in BLOCK_RECORD_DTYPES:
        return tile

    def count_work(rows: int, own: int) -> int:
        groups = sum(count_blocks(n, rows) for n in weight_rows)
        of_block = count_blocks(count_blocks(groups, blocks), step) * step
        return of_block * rows * count_blocks(columns, BLOCK_COLUMNS * own) * own

    half = HALF_ROWS, tile[1] * tile[0] // HALF_ROWS
    return half if count_work(*tile) >= MIN_HALF_GAIN * count_work(*half) else tile


def _count_shared_activation_items(columns: int, tokens: int) -> int:
    """Return how many items the shared memory for the quantised activations of all tokens has in a GEMV.

    The function ``place`` in C++ computes the positions of these items.

    Args:
        columns: Column blocks of a token.
        tokens: The number of tokens.
    """
    return (3 * tokens | 1) * columns + count_blocks(columns, 8)


def make_gemv_source(dtype: DType, prologue: RowPrologue) -> KernelSource:
    """Make the source of the GEMV kernels of a dtype that compute the rows of x in a prologue."""
    headers = (*_list_packed_headers(dtype), LANES_HEADER)
    return KernelSource("packed_few.cu", list_gemv_names(dtype), headers, generated=prologue.text)


def launch_gemv(
    launches: LaunchBuilder,
    products: WeightsAndResults,
    x: Operand,
    entries: int,
    tokens: int,
    route: list[LaunchWord],
    unit: int = NO_UNIT,
    other_products: WeightsAndResults = (),
    other_entries: int = 0,
    prologue: RowPrologue | None = None,
) -> None:
    """Launch a GEMV: multiply a few rows of x by several packed weights.

    An entry is one weight matrix with its rows of x. With experts it is a pair of a token and a chosen expert.

    Args:
        launches: Receives the launch.
        products: The weights and their results.
        x: Activations [entries * tokens, columns].
        entries: The number of entries.
        tokens: Rows of x for each entry, at most 4.
        route: The fields that map each entry to its matrix and rows.
        unit: Code of the gated unit, such as SwiGLU, that joins two products.
        other_products: Weights of additional entries, which have one row each.
        other_entries: The number of additional entries.
        prologue: The computation of x, which is not read then.
    """
    count, w = next(n for n in TOKEN_COUNTS if n >= tokens), products[0][0]
    blocks = max(1, launches.multiprocessor_count // max(1, entries + other_entries))
    rows, columns = _choose_gemv_tile_for_grid(
        w.dtype, count, [m.shape[-2] for m, _ in products], w.shape[-1], blocks, 2 if unit else 1
    )
    groups = [count_blocks(matrix.shape[-2], rows) for matrix, _ in products]
    first, step = [0 if unit else n for n in accumulate(groups, initial=0)], 2 if unit else 1
    fields: list[list[LaunchWord]] = [
        [w, out, n, _count_row_units(w), w.shape[-2], compute_row_stride(out)]
        for (w, out), n in zip([*products, *other_products], [*first, 0], strict=False)
    ]
    even = count_blocks(sum(groups), blocks)
    of_block = max(step, count_blocks(min(even, MAX_BLOCK_RESULTS // (count * rows)), step) * step)
    all_chunks = max(1, count_blocks(w.shape[-1], BLOCK_COLUMNS * columns))
    of_sums = 4 * count * rows * (MAX_GEMV_WARPS + 2 * of_block)
    room = DEFAULT_SHARED_BYTES - count_code_book_bytes(w.dtype) - of_sums
    fit = room // (SHARED_ITEM_BYTES * _count_shared_activation_items(8, count)) * 8 // columns
    chunks = count_blocks(all_chunks, count_blocks(all_chunks, fit))
    of_warp = count_blocks(of_block * chunks, MAX_GEMV_WARPS)
    warps = count_blocks(of_block * chunks, of_warp)
    shared = SHARED_ITEM_BYTES * _count_shared_activation_items(chunks * columns, count) + of_sums
    half = f", {HALF_ROWS}" if rows == HALF_ROWS else ""
    kernel = GEMV_SOURCE_BY_DTYPE[w.dtype][f"few<{w.dtype.name}, {count}{half}>"]
    if prologue is not None:
        require_supported(
            not prologue.is_per_head or chunks == all_chunks or chunks * columns % HEAD_BLOCKS == 0,
            "a stretch of columns has parts of heads",
        )
        kernel, warps = make_gemv_source(w.dtype, prologue)[kernel.name], MAX_GEMV_WARPS
        shared += 4 * (count * prologue.numbers_per_row + BLOCK_SUM_FLOATS)
        book = count_code_book_bytes(w.dtype)
        require_supported(not book or shared + book <= DEFAULT_SHARED_BYTES, "a code book leaves no shared memory")
    words = [
        *join_and_pad_product_words(fields),
        len(products),
        unit,
        x if prologue is None else 0,
        *_make_row_size_words(w),
        tokens,
        compute_row_stride(x),
    ]
    words += [sum(groups), of_block, of_warp, chunks, *route, entries, *NO_SUM_FIELDS]
    words += PLAIN_PROLOGUE_WORDS if prologue is None else prologue.words
    launches.add_launch(
        kernel, (count_blocks(sum(groups), of_block), entries + other_entries), 32 * warps, words, shared
    )


def launch_gemv_with_expert_sum(
    launches: LaunchBuilder, w: Operand, x: Operand, out: Operand, summed: WeightedExpertSum
) -> None:
    """Launch a GEMV with the packed weights of chosen experts, which also adds up the weighted results of each token.

    Args:
        launches: Receives the launch.
        w: Packed weights of the experts.
        x: Activations, contiguous [tokens, used experts, columns].
        out: Results [tokens, rows].
        summed: The factors of the products, and the weight of an additional product.
    """
    rows, columns = _choose_gemv_rows_and_blocks(w.dtype, 1)
    tokens, entries, groups = out.shape[0], summed.products_per_token, count_blocks(w.shape[-2], rows)
    even = count_blocks(groups, max(1, launches.multiprocessor_count // tokens))
    of_block = entries * max(1, min(even, MAX_BLOCK_RESULTS // (rows * entries)))
    chunks = count_blocks(w.shape[-1], BLOCK_COLUMNS * columns)
    of_warp = count_blocks(of_block * chunks, MAX_GEMV_WARPS)
    warps = count_blocks(of_block * chunks, of_warp)
    shared = SHARED_ITEM_BYTES * _count_shared_activation_items(
        entries * count_blocks(chunks * columns, 8) * 8, 1
    ) + 4 * rows * (MAX_GEMV_WARPS + 2 * of_block)
    room = DEFAULT_SHARED_BYTES - count_code_book_bytes(w.dtype)
    require_supported(shared <= room, "x of all entries is too long for shared memory")
    products = [(w, out), *([] if summed.other is None else [(summed.other, out)])]
    fields: list[list[LaunchWord]] = [
        [m, o, 0, _count_row_units(m), m.shape[-2], compute_row_stride(o)] for m, o in products
    ]
    words = [
        *join_and_pad_product_words(fields),
        1,
        NO_UNIT,
        x,
        *_make_row_size_words(w),
        1,
        compute_row_stride(x),
        groups * entries,
        of_block,
        of_warp,
        chunks,
    ]
    words += [1, 1, *summed.choice, 0, *summed.words, *PLAIN_PROLOGUE_WORDS]
    launches.add_launch(
        GEMV_SOURCE_BY_DTYPE[w.dtype][f"summed<{w.dtype.name}>"],
        (count_blocks(groups * entries, of_block), tokens),
        32 * warps,
        words,
        shared,
    )


def choose_largest_tile_filling_device(w: Operand, entries: float, matrices: int) -> tuple[int, int, int]:
    """Choose the largest tile shape for which there are enough tiles to fill a device.

    Args:
        w: The packed weight.
        entries: Rows of x of each matrix, exactly or on average.
        matrices: The number of matrices.

    Returns:
        The number of groups of 8 rows of x in a tile, of units of 32 weight rows, and of warps that share the columns.
    """

    def fills_device(tile: tuple[int, int, int]) -> bool:
        groups, units, _ = tile
        return (
            matrices * count_blocks(w.shape[-2], UNIT_ROWS * units) * max(1.0, entries / (8 * groups))
            >= FULL_DEVICE_BLOCKS
        )

    return next(
        filter(fills_device, (LARGE_TILE, TALL_TILE) if entries >= MIN_LARGE_TILE_ENTRIES else (TALL_TILE,)), SMALL_TILE
    )


def quantise_and_launch_tiled_matmul(
    launches: LaunchBuilder,
    w: Operand,
    x: Operand,
    out: Operand,
    tiles: Operand,
    shape: tuple[int, int, int],
    route: list[LaunchWord],
) -> None:
    """Launch a tiled matmul with a packed weight: quantise x to int8, then compute the tiles of a table.

    Args:
        launches: Receives the launches.
        w: The packed weight.
        x: Activations [rows, columns].
        out: Results [rows, weight rows].
        tiles: The table of tiles [tiles, 4], int32.
        shape: The tile shape of `choose_largest_tile_filling_device`.
        route: The fields of the routing.
    """
    codes, scales = _quantise_activations(launches, x)
    groups, warps_of_rows, sharing = shape
    units = _count_row_units(w)
    words = [
        w,
        codes,
        scales,
        out,
        *_make_row_size_words(w),
        units,
        w.shape[-2],
        compute_row_stride(out),
        tiles,
        *route,
    ]
    chunk = STAGE_BLOCKS if sharing == 1 else 2 * STAGE_BLOCKS
    stages, sums = 2 * 3 * 16 * chunk * 8 * groups, 4 * warps_of_rows * (sharing // 2) * 8 * groups * 32
    grid = (count_blocks(units, warps_of_rows), tiles.shape[0])
    kernel = TILED_SOURCE_BY_DTYPE[w.dtype][f"many<{w.dtype.name}, {', '.join(map(str, shape))}>"]
    launches.add_launch(kernel, grid, 32 * warps_of_rows * sharing, words, shared_bytes=max(stages, sums))


# --------------------------------------------------------------------------------------------------------- rows


def bind_packed_get_rows(launches: LaunchBuilder, call: BoundInstruction) -> None:
    """Add the launches of `get_rows` on a packed quantised table; only the rows with the given ids are dequantised."""
    table, ids, out = call.operand(0), call.operand(1), call.out
    require_supported(ids.dtype in ID_TYPE_NAMES, f"ids of type {ids.dtype} are missing")
    fault = launches.add_fault_message(f"id {{value}} names no row of its table, which has {table.shape[0]}")
    _launch_row_dequantisation(launches, table, ids, out, fault)


def dequantise_weight(launches: LaunchBuilder, w: Operand) -> Operand:
    """Launch the dequantisation of a packed weight to float32 in scratch memory, for kernels that cannot read it.

    The whole buffer of the weight is dequantised, even if `w` is a view of a part. The result has the shape of `w`.
    """
    assert w.declared_spec is not None
    whole = replace(w, address=w.address - w.tensor.offset, tensor=_make_dense_tensor(w.tensor, w.declared_spec.shape))
    copy = launches.allocate_scratch(w.declared_spec.shape)
    rows = replace(copy, tensor=_make_dense_tensor(copy.tensor, (math.prod(copy.shape[:-1]), copy.shape[-1])))
    _launch_row_dequantisation(launches, whole, None, rows, [0, 0])
    skipped = w.tensor.offset // w.dtype.block_bytes * w.dtype.block
    place = copy.tensor.offset + 4 * skipped
    return replace(
        copy,
        address=copy.address + 4 * skipped,
        tensor=replace(copy.tensor, offset=place, shape=w.shape, strides=w.strides),
    )


def _make_dense_tensor(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    offset = 0 if tensor.dtype.is_quantised else tensor.offset
    return replace(tensor, offset=offset, shape=shape, strides=contiguous_strides(shape))


def _launch_row_dequantisation(
    launches: LaunchBuilder, table: Operand, ids: Operand | None, out: Operand, fault: list[LaunchWord]
) -> None:
    """Launch the dequantisation of rows of a packed table to float32.

    Args:
        launches: Receives the launch.
        table: The packed weight.
        ids: The row numbers; `None` for all rows of all matrices.
        out: The float32 rows.
        fault: The fields of the fault for illegal row numbers.
    """
    columns = table.shape[-1]
    count = math.prod(out.shape[:-1])
    axes = (
        build_merged_tiling_iteration_axes((count,), [])
        if ids is None
        else build_merged_tiling_iteration_axes(ids.shape, [ids])
    )
    walk: list[LaunchWord] = [0] * 11 if ids is None else axes.make_address_and_stride_fields(0, ids)
    words = [
        table,
        *_make_row_size_words(table),
        table.shape[-2],
        _count_row_units(table),
        math.prod(table.shape[:-1]),
        compute_row_stride(out),
    ]
    words += [*axes.axes_struct_fields, *walk, out, *fault]
    threads = min(256, count_blocks(max(1, columns // 8), 32) * 32)
    kernel = TILED_SOURCE_BY_DTYPE[table.dtype][
        f"unpack<{table.dtype.name}, {ID_TYPE_NAMES[ids.dtype] if ids is not None else 'i32'}>"
    ]
    launches.add_launch(kernel, count, threads, words)
