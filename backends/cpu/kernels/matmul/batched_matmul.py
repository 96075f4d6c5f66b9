"""Products of two computed matrices: attention in separate ops, and convolutions.

A table holds the addresses of each matrix of w and of its rows of x and y. So one kernel serves all kinds of
broadcasting and transposition. To expand means to copy 16 rows of w to columns of float32 in scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from .....graph.dtypes import DType
from ....fusion.hooks import ResultPanels
from ....fusion.operands import BoundInstruction, Operand
from ...compilation.compiler import Kernel, Subroutine, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.dot_tiles import DotTileIntrinsics, make_dot_tile_intrinsics
from ...simd.lane_masks import gather_negative_lanes, load_negative_lanes
from ...simd.permute_lanes import transpose_bf16, transpose_f16, transpose_f32
from ...simd.vectors import (
    LANES,
    MANY_REGISTERS,
    count_vector_registers,
    gather_lanes,
    load,
    load_int,
    load_ints,
    load_long,
    store,
)
from ...steps.panel_hooks import call_hooks, list_hook_accesses, make_hook_words
from ...steps.partition import compute_thread_range
from ...steps.step_table import StepTableBuilder
from ..vector.elementwise import load_lanes
from .block_tiling import BlockTiling
from .float_matmul import LANE_LOADERS
from .tile_loops import GROUP_ROWS

Addresses = npt.NDArray[np.int64]
TABLE_WORDS = 3
"""Addresses of a product: its matrix of w, its first row of x, its first row of y."""
EXPANDED_COLUMNS, COLUMN_BYTES, ROWS_PER_CHUNK = 768, 64, 512
"""Columns that are expanded at a time, bytes of one column of a group, and activation rows per expansion.

The expanded columns fill a good part of the second cache. A tile loads them from there as fast as it multiplies. If
they had to fit the first cache, sums would be stored more often.
"""
ADJACENT, APART, ADJACENT_WITH_PADDING, APART_WITH_PADDING = WINDOW_GROUP_KINDS = range(4)
"""Whether the elements of 16 windows are adjacent in the image, and whether some of them lie in its padding."""
HOOK_ELEMENTS = 16384
"""Elements from which on hooks run on a panel. They fit the second cache; hooks of fewer elements take longer."""
TRANSPOSERS = {DType.F32: transpose_f32, DType.F16: transpose_f16, DType.BF16: transpose_bf16}
ARGS = declare_args(
    "table products count rows columns w_row w_column x_row y_row scratch windows entries groups taps hooks[*]"
)


def _make_transpose_weight_rows(dtype: DType) -> Subroutine:
    """Make the subroutine that transposes 16 float weight rows to columns of 16 float32.

    Its arguments are as in `BlockTiling.expand_blocks`.
    """
    transpose, size = TRANSPOSERS[dtype], dtype.storage.itemsize

    def expand_rows(to, group, stride, left, columns, first, count):
        for c in range(first, first + count, LANES):
            transpose(group + c * size, stride, left, columns - c, to + (c - first) * COLUMN_BYTES)

    return subroutine(expand_rows)


def _make_add_column_products(tile: DotTileIntrinsics, groups: int) -> Subroutine:
    """Make the subroutine that adds the products of one weight column and some activation rows to the sums of a tile.

    For column c and group g: ``acc[i, g] += w[g, :, c] * x[i, c]``. It is the `BlockTiling.add_block` of float weights.
    """
    add_outer_product, second, third = (
        tile.add_outer_product,
        EXPANDED_COLUMNS * COLUMN_BYTES,
        2 * EXPANDED_COLUMNS * COLUMN_BYTES,
    )

    def add_column(acc, p, r, at):
        return add_outer_product(acc, load(p), r, at)  # acc[i, row] += w[row, c] * x[i, c]

    def add_column_of_three(acc, p, r, at):
        return add_outer_product(acc, load(p), load(p + second), load(p + third), r, at)

    return subroutine(add_column if groups == 1 else add_column_of_three)


@cache
def make_batched_matmul_subroutines_and_tiling(dtype: DType) -> BlockTiling:
    """Make the subroutines and tile sizes of batched matmuls with a float matrix w.

    Weights are expanded to float32 columns. A tile has as many rows and groups as registers can hold sums.
    """
    rows, groups = (8, 3) if count_vector_registers() == MANY_REGISTERS else (6, 1)
    expand = _make_transpose_weight_rows(dtype)
    add = _make_add_column_products(make_dot_tile_intrinsics(rows, groups), groups)
    return BlockTiling(1, 4, COLUMN_BYTES, EXPANDED_COLUMNS, ROWS_PER_CHUNK, rows, groups, expand, add)


@cache
def make_expand_rows_to_f32_columns(dtype: DType) -> Subroutine:
    """Make the subroutine that expands 16 rows of w to columns of float32, for a matrix with dense rows.

    The subroutine is ``(a, to, w, row, left, first, count)``:

    - `a` are the kernel arguments, and `to` receives the columns.
    - `row` is the first of the rows in the matrix at `w`; `left` rows exist.
    - `first` is the first expanded column, `count` the number of columns.
    """
    expand = make_batched_matmul_subroutines_and_tiling(dtype).expand_blocks

    def expand_rows(a, to, w, row, left, first, count):
        expand(to, w + row * ARGS.w_row(a), ARGS.w_row(a), left, ARGS.columns(a), first, count)

    return subroutine(expand_rows)


@subroutine
def expand_column_major_rows_to_f32_columns(a, to, w, row, left, first, count):
    """Expand 16 rows of w to columns of float32, for a matrix with dense columns.

    Parameters are as in `make_expand_rows_to_f32_columns`.
    """
    for c in range(first, first + count):
        store(to + (c - first) * COLUMN_BYTES, load_lanes(w + 4 * row + c * ARGS.w_column(a), 0, left, 4))


@subroutine
def expand_image_windows_to_f32_columns(a, to, w, row, left, first, count):
    """Expand 16 rows of w to columns of float32, for a convolution: each row is a window of an image.

    Element [i, c] is ``windows[i] + entries[c]`` bytes after `w`. ``groups[row // 16]`` has a number of
    `WINDOW_GROUP_KINDS`, and for each of the `taps` of a window the place of a mask, in bytes after `groups`. Elements
    that a mask leaves out lie in the padding, and are 0. Parameters are as in `make_expand_rows_to_f32_columns`.
    """
    windows, entries, taps = ARGS.windows(a) + 4 * row, ARGS.entries(a), ARGS.taps(a)
    group = ARGS.groups(a) + row // GROUP_ROWS * 4 * (1 + taps)
    start, offsets, kind = w + load_int(windows), load_ints(windows), load_int(group)
    if kind == ADJACENT:
        for c in range(first, first + count):
            store(to + (c - first) * COLUMN_BYTES, load(start + load_int(entries + 4 * c)))
    elif kind == APART:
        for c in range(first, first + count):
            store(to + (c - first) * COLUMN_BYTES, gather_lanes(w + load_int(entries + 4 * c), offsets))
    else:
        places, tap = group + 4, first % taps
        for c in range(first, first + count):
            mask, entry = load_ints(ARGS.groups(a) + load_int(places + 4 * tap)), load_int(entries + 4 * c)
            if kind == ADJACENT_WITH_PADDING:
                store(to + (c - first) * COLUMN_BYTES, load_negative_lanes(start + entry, mask))
            else:
                store(to + (c - first) * COLUMN_BYTES, gather_negative_lanes(w + entry, offsets, mask))
            tap = tap + 1 if tap + 1 < taps else 0


@cache
def make_batched_matmul_kernel(name: str, dtype: DType, expand: Subroutine) -> Kernel:
    """Make the batched matmul kernel ``y[b] = x[b] @ w[b].T`` for each of `products` products.

    `count` rows of x are multiplied with `rows` rows of w; both have `columns` columns. `w_row`, `w_column`, `x_row`
    and `y_row` are strides in bytes. Each thread has `BlockTiling.scratch_bytes` of scratch. `hooks` are called for
    each panel of the result (`panel_hooks`): the rows of one product, and the columns of some tiles.

    Args:
        name: Part of the kernel name: the layout of w.
        dtype: The type of w.
        expand: The subroutine that expands rows of w, for example `expand_column_major_rows_to_f32_columns`.
    """
    blocks = make_batched_matmul_subroutines_and_tiling(dtype)
    tile = make_dot_tile_intrinsics(blocks.tile_rows, blocks.tile_groups)
    tile_rows, zeros, store_sums, spill, reload = (
        tile.row_addresses,
        tile.zero_sums,
        tile.store_rows,
        tile.spill,
        tile.reload,
    )
    add, record, size, wide = blocks.add_block, blocks.record_bytes, blocks.block_bytes, blocks.blocks_per_pass
    hooks_word = ARGS.first_word_index("hooks")
    span, wide_columns = blocks.expanded_group_bytes, blocks.tile_groups * GROUP_ROWS
    tall, tile_groups, scratch, many = (
        blocks.tile_rows,
        blocks.tile_groups,
        blocks.scratch_bytes_per_thread,
        blocks.rows_per_chunk,
    )

    def body(a, thread, threads):
        count, rows, columns = ARGS.count(a), ARGS.rows(a), ARGS.columns(a)
        x_row, y_row, expanded = ARGS.x_row(a), ARGS.y_row(a), ARGS.scratch(a) + thread * scratch
        groups = (rows + GROUP_ROWS - 1) // GROUP_ROWS
        panels = (groups + tile_groups - 1) // tile_groups
        lo, hi = compute_thread_range(ARGS.products(a) * panels, thread, threads)
        computed_panels = 0
        for unit in range(lo, hi):
            at, group = ARGS.table(a) + unit // panels * 8 * TABLE_WORDS, unit % panels * tile_groups
            w, x, y = load_long(at), load_long(at + 8), load_long(at + 16) + group * GROUP_ROWS * 4
            for chunk in range(0, count, many):
                stop = min(count, chunk + many)
                for first in range(0, max(1, columns), wide):
                    some_columns, sums = min(wide, columns - first), expanded + tile_groups * span
                    for g in range(min(tile_groups, groups - group)):
                        row = (group + g) * GROUP_ROWS
                        expand(a, expanded + g * span, w, row, rows - row, first, some_columns)
                    for i in range(chunk, stop, tall):
                        r = tile_rows(x + i * x_row + first * record, x_row, stop - i)
                        acc = reload(sums) if first > 0 else zeros()
                        for c in range(some_columns):
                            acc = add(acc, expanded + c * size, r, c * record)
                        if first + wide < columns:
                            spill(sums, acc)
                        else:
                            store_sums(tile_rows(y + i * y_row, y_row, stop - i), acc, rows - group * GROUP_ROWS)
                        sums += tall * tile_groups * GROUP_ROWS * 4
            computed_panels += 1
            if unit + 1 == hi or (unit + 1) % panels == 0 or computed_panels * count * wide_columns >= HOOK_ELEMENTS:
                column = group * GROUP_ROWS - (computed_panels - 1) * wide_columns
                width = min(computed_panels * wide_columns, rows - column)
                call_hooks(a, hooks_word, unit // panels * count, count, column, width)
                computed_panels = 0
        return 0

    return Kernel(f"batched_matmul.{name}.{dtype}", body)


def bind_batched_matmul(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of a batched matmul of two computed matrices; return False if kernels cannot read them.

    float16 and bfloat16 matrices need a multiple of 16 columns.
    """
    w, x = call.operand(0), call.operand(1)
    if not has_batched_matmul_kernel(call):
        return False
    if w.is_dense_along(-1) and (w.is_float or w.shape[-1] % LANES == 0):
        kernel = make_batched_matmul_kernel("rows", w.dtype, make_expand_rows_to_f32_columns(w.dtype))
    else:
        kernel = make_batched_matmul_kernel("columns", w.dtype, expand_column_major_rows_to_f32_columns)
    row, column = (s * w.dtype.storage.itemsize for s in w.strides[-2:])
    add_batched_matmul_step(
        steps, kernel, call, compute_operand_addresses_per_product(call), [w, x], w_row=row, w_column=column
    )
    return True


def has_batched_matmul_kernel(call: BoundInstruction) -> bool:
    """Return whether a kernel can compute this `mul_mat` as a batched product of two computed matrices."""
    w = call.operand(0)
    if w.dtype not in LANE_LOADERS or not can_read_and_write_f32_rows(call.operand(1), call.out):
        return False
    has_dense_rows = w.is_dense_along(-1) and (w.is_float or w.shape[-1] % LANES == 0)
    return has_dense_rows or (w.is_dense_along(-2) and w.is_float)


def find_batched_panels(call: BoundInstruction) -> ResultPanels | None:
    """Return the panels (some rows by some columns) in which `add_batched_matmul_step` computes a result.

    None means that the result is no dense matrix, or that the rows of one product are not consecutive in it.
    """
    w, x, y = call.operand(0), call.operand(1), call.out
    if not (y.is_dense and y.is_float and y.size) or _choose_longest_broadcast_axis(w, x) != len(x.shape) - 2:
        return None
    return ResultPanels(y.size // y.shape[-1], y.shape[-1], GROUP_ROWS)


def add_batched_matmul_step(
    steps: StepTableBuilder,
    kernel: Kernel,
    call: BoundInstruction,
    table: Addresses,
    reads: Sequence[Operand],
    **where: int,
) -> None:
    """Add the step of a batched matmul of computed matrices, with the hooks of `steps`.

    Args:
        steps: The steps of the program, with hooks only if `find_batched_panels` returns panels.
        kernel: The result of `make_batched_matmul_kernel`.
        call: The `mul_mat`.
        table: The result of `compute_operand_addresses_per_product`.
        reads: Operands that the kernel reads.
        where: Kernel arguments that locate rows and columns of w.
    """
    w, x, y = call.operand(0), call.operand(1), call.out
    size, along = (
        make_batched_matmul_subroutines_and_tiling(w.dtype).scratch_bytes_per_thread,
        _choose_longest_broadcast_axis(w, x),
    )
    words = ARGS(
        table=steps.constant(table).address,
        products=len(table),
        count=x.shape[along],
        rows=w.shape[-2],
        columns=w.shape[-1],
        x_row=4 * x.strides[along],
        y_row=4 * y.strides[along],
        scratch=steps.scratch(f"product {size}", size * steps.threads).address,
        hooks=make_hook_words(steps.hooks),
        **{"w_row": 0, "w_column": 0, "windows": 0, "entries": 0, "groups": 0, "taps": 0, **where},
    )
    hook_reads, hook_writes = list_hook_accesses(steps.hooks, 0, y.shape[-1])
    steps.add(kernel, words, reads=[*reads, *hook_reads], writes=[y, *hook_writes])


def can_read_and_write_f32_rows(x: Operand, y: Operand) -> bool:
    """Return whether kernels can read `x` and write `y` in place: float32 with dense rows."""
    return x.is_float and y.is_float and x.is_dense_along(-1) and y.is_dense_along(-1)


def _align_weight_sizes_with_activations(w: Operand, x: Operand) -> tuple[int, ...]:
    """Return the sizes of w along the axes of x except the last one; 1 for axes along which w is broadcast."""
    return (*(1,) * (len(x.shape) - len(w.shape)), *w.shape[:-2], 1)


def _choose_longest_broadcast_axis(w: Operand, x: Operand) -> int:
    """Return the longest axis of x along which w is broadcast; the entries of this axis are the rows of one product."""
    leading = _align_weight_sizes_with_activations(w, x)
    return max((axis for axis in reversed(range(len(leading))) if leading[axis] == 1), key=x.shape.__getitem__)


def compute_operand_addresses_per_product(call: BoundInstruction) -> Addresses:
    """Compute three addresses for each product: its matrix of w, its first row of x, and its first row of y.

    The result is [products, 3].
    """
    w, x, y = call.operand(0), call.operand(1), call.out
    leading, along, rank = (
        _align_weight_sizes_with_activations(w, x),
        _choose_longest_broadcast_axis(w, x),
        len(x.shape) - 1,
    )
    shape = [1 if axis == along else n for axis, n in enumerate(x.shape[:-1])]
    each = np.indices(shape, np.int64).reshape(rank, -1)
    own = [each[axis] * leading[axis] // x.shape[axis] for axis in range(len(x.shape) - len(w.shape), rank - 1)]
    reached = ((w, own), (x, [*each]), (y, [*each]))
    return np.stack([_compute_addresses_from_indices(o, at, each.shape[1]) for o, at in reached], axis=1)


def _compute_addresses_from_indices(operand: Operand, entries: Sequence[Addresses], count: int) -> Addresses:
    """Compute the addresses of `count` elements of an operand from their indices along its first axes.

    Args:
        operand: The operand, which has the strides.
        entries: For each of the first axes, the index of each element; all other indices are 0.
        count: The number of elements.
    """
    addresses = np.full(count, operand.address, np.int64)
    for at, stride in zip(entries, operand.strides, strict=False):
        addresses += operand.dtype.storage.itemsize * stride * at
    return addresses
