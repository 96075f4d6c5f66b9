"""Matrix products with unpacked weights of float32, float16 or bfloat16, in float32 vectors.

Large products use AMX tiles instead (`amx_matmul`).
"""

from __future__ import annotations

from functools import cache, partial

from .....graph.dtypes import DType
from ....fusion.operands import BoundInstruction, Operand
from ...compilation.compiler import Kernel, Subroutine, kernel, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.dot_tiles import DotTileIntrinsics, make_dot_tile_intrinsics
from ...simd.permute_lanes import transpose_bf16, transpose_f16, transpose_f32
from ...simd.vectors import (
    LANES,
    MANY_REGISTERS,
    count_vector_registers,
    fma,
    load,
    load_bf16,
    load_f16,
    splat_from,
    zeros,
)
from ...steps.partition import compute_thread_range
from ...steps.step_table import StepTableBuilder
from ..vector.elementwise import load_lanes, store_lanes
from .tile_loops import WeightTiling, make_grouped_expert_matmul_kernel, prefetch_cache_lines

EXPANDED_COLUMNS, COLUMN_BYTES = 768, 64
"""Columns that are expanded at a time, and bytes of one column of a group.

The expanded columns fill a good part of the second cache. A tile loads them from there as fast as it multiplies. If
they had to fit the first cache, sums would be stored more often.
"""
ROWS_PER_CHUNK, MAX_LEFTOVER_ROWS, MAX_UNEXPANDED_ROWS = 512, 3, 6
"""Activation rows per expansion; largest incomplete tile, and largest product, that uses the unexpanded weight."""


@subroutine
def load_f32_weight_lanes(p, c, n):
    """Load 16 columns of a float32 weight row from column `c` on, or as many of its `n` columns as are left."""
    return load_lanes(p, c, n, 4)


@subroutine
def load_f16_weight_lanes(p, c, n):
    """Load 16 columns of a float16 weight row from column `c` on, as float32."""
    return load_f16(p + 2 * c)


@subroutine
def load_bf16_weight_lanes(p, c, n):
    """Load 16 columns of a bfloat16 weight row from column `c` on, as float32."""
    return load_bf16(p + 2 * c)


LANE_LOADERS = {DType.F32: load_f32_weight_lanes, DType.F16: load_f16_weight_lanes, DType.BF16: load_bf16_weight_lanes}
TRANSPOSERS = {DType.F32: transpose_f32, DType.F16: transpose_f16, DType.BF16: transpose_bf16}


def _make_expand_weight_rows_to_columns(dtype: DType) -> Subroutine:
    """Make the subroutine that expands 16 float weight rows to columns of float32 (`WeightTiling.expand_blocks`)."""
    transpose, size = TRANSPOSERS[dtype], dtype.storage.itemsize

    def expand_rows(to, group, stride, left, columns, first, count):
        for c in range(first, first + count, LANES):
            transpose(group + c * size, stride, left, columns - c, to + (c - first) * COLUMN_BYTES)

    return subroutine(expand_rows)


def _make_add_column_products(tile: DotTileIntrinsics, groups: int) -> Subroutine:
    """Make the subroutine that adds the products of one weight column and some activation rows to the sums of a tile.

    It is `WeightTiling.add_block` of float weights. For column c and group g: ``acc[i, g] += w[g, :, c] * x[i, c]``.
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


def _make_multiply_few_activation_rows(dtype: DType, row_count: int) -> Subroutine:
    """Make the subroutine that multiplies `row_count` activation rows with 16 float weight rows.

    It is the result of `WeightTiling.make_few_rows`. The weight rows are read in the order of memory. Each row has four
    independent sums.
    """
    rows = make_dot_tile_intrinsics(row_count, 1)
    weights, size = LANE_LOADERS[dtype], dtype.storage.itemsize
    zero_sums, add_inner, add_partial_inner = rows.zero_sums, rows.add_inner_product, rows.add_partial_inner_product
    add_tiles, store_lane_sums = rows.add_tiles, rows.store_lane_sums

    def multiply_few(to, group, stride, left, columns, x, l1_ahead, l2_ahead):
        for i in range(min(LANES, left)):
            row, c = group + i * stride, 0
            first, second, third, fourth = zero_sums(), zero_sums(), zero_sums(), zero_sums()
            while c + 4 * LANES <= columns:
                prefetch_cache_lines(row + c * size, size, l1_ahead, l2_ahead)
                first = add_inner(first, weights(row, c, columns), x, 4 * c)
                second = add_inner(second, weights(row, c + 16, columns), x, 4 * c + 64)
                third = add_inner(third, weights(row, c + 32, columns), x, 4 * c + 128)
                fourth = add_inner(fourth, weights(row, c + 48, columns), x, 4 * c + 192)
                c += 4 * LANES
            while c < columns:
                first = add_partial_inner(first, weights(row, c, columns), x, 4 * c, columns - c)
                c += LANES
            store_lane_sums(to, 4 * i, add_tiles(add_tiles(first, second), add_tiles(third, fourth)))

    return subroutine(multiply_few)


@cache
def make_float_weight_tiling(dtype: DType) -> WeightTiling:
    """Make the subroutines and tile sizes of matmuls with a float weight type.

    A tile has as many rows and groups as registers can hold sums.
    """
    rows, groups = (8, 3) if count_vector_registers() == MANY_REGISTERS else (6, 1)
    expand, add = (
        _make_expand_weight_rows_to_columns(dtype),
        _make_add_column_products(make_dot_tile_intrinsics(rows, groups), groups),
    )
    few = partial(_make_multiply_few_activation_rows, dtype)
    return WeightTiling(
        1,
        4,
        COLUMN_BYTES,
        EXPANDED_COLUMNS,
        ROWS_PER_CHUNK,
        rows,
        groups,
        MAX_LEFTOVER_ROWS,
        MAX_UNEXPANDED_ROWS,
        expand,
        add,
        few,
    )


@cache
def make_float_matmul_kernel(dtype: DType) -> Kernel:
    """Make the matmul kernel of a float weight type. float16 and bfloat16 weights need a multiple of 16 columns."""
    return make_grouped_expert_matmul_kernel(f"float_matmul.multiply.{dtype}", make_float_weight_tiling(dtype))


COLUMN_MATMUL_ARGS = declare_args(
    "matrices count rows columns w w_between w_step x x_between x_row y y_between y_row x_step"
)


@kernel
def multiply_column_major_weights(a, thread, threads):
    """Compute the batched matmul ``y[b, i] = w[b] @ x[b, i]`` with column-major w: numbers of a column are adjacent.

    Each of `matrices` matrices has `count` rows of x. Kernel arguments in bytes: ``*_between`` from matrix to matrix,
    ``*_row`` from row to row, `w_step` from column to column of w, `x_step` from element to element of x.
    """
    count, rows, n = COLUMN_MATMUL_ARGS.count(a), COLUMN_MATMUL_ARGS.rows(a), COLUMN_MATMUL_ARGS.columns(a)
    lo, hi = compute_thread_range(COLUMN_MATMUL_ARGS.matrices(a) * count, thread, threads)
    for unit in range(lo, hi):
        b, i = unit // count, unit % count
        w = COLUMN_MATMUL_ARGS.w(a) + b * COLUMN_MATMUL_ARGS.w_between(a)
        x = COLUMN_MATMUL_ARGS.x(a) + b * COLUMN_MATMUL_ARGS.x_between(a) + i * COLUMN_MATMUL_ARGS.x_row(a)
        y = COLUMN_MATMUL_ARGS.y(a) + b * COLUMN_MATMUL_ARGS.y_between(a) + i * COLUMN_MATMUL_ARGS.y_row(a)
        for c in range(0, rows, LANES):
            acc = zeros()
            for k in range(n):  # acc[c] += w[b, c, k] * x[b, i, k]
                acc = fma(
                    load_lanes(w + k * COLUMN_MATMUL_ARGS.w_step(a), c, rows, 4),
                    splat_from(x + k * COLUMN_MATMUL_ARGS.x_step(a)),
                    acc,
                )
            store_lanes(y, c, rows, acc)
    return 0


def bind_column_major_matmul(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of a batched matmul with column-major weights, one matrix of w for each matrix of x.

    Return False if the kernel cannot compute it, or if x has more than `MAX_LEFTOVER_ROWS` rows. Then a kernel that
    first expands the columns is faster.
    """
    w, x, y = call.operand(0), call.operand(1), call.out
    is_batched = len(w.shape) == len(x.shape) == 3 and w.shape[0] == x.shape[0] and x.shape[1] <= MAX_LEFTOVER_ROWS
    if not is_batched or not (w.is_float and x.is_float) or w.strides[1] != 1 or y.strides[-1] != 1:
        return False
    (matrices, count, _), (_, rows, width) = x.shape, w.shape
    words = COLUMN_MATMUL_ARGS(
        matrices=matrices,
        count=count,
        rows=rows,
        columns=width,
        w=w.address,
        w_between=4 * w.strides[0],
        w_step=4 * w.strides[2],
        x=x.address,
        x_between=4 * x.strides[0],
        x_row=4 * x.strides[1],
        x_step=4 * x.strides[2],
        y=y.address,
        y_between=4 * y.strides[0],
        y_row=4 * y.strides[1],
    )
    steps.add(multiply_column_major_weights, words, reads=[w, x], writes=[y])
    return True


def is_readable_float_weight(w: Operand) -> bool:
    """Return whether kernels can read a float weight in place, without a copy."""
    return w.dtype in LANE_LOADERS and w.strides[-1] == 1 and (w.dtype is DType.F32 or w.shape[-1] % LANES == 0)
