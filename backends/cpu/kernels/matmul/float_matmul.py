"""Matrix products with unpacked weights of float32, float16 or bfloat16, in float32 vectors.

Large products use AMX tiles instead (`amx_matmul`).
"""

from __future__ import annotations

from functools import cache, partial

from .....graph.dtypes import DType
from ....fusion.operands import BoundInstruction, Operand
from ...compilation.compiler import Kernel, Subroutine, kernel, subroutine
from ...compilation.kernel_args import declare_args
from ...simd.dot_tiles import make_add_row_products, make_dot_tile_intrinsics
from ...simd.vectors import (
    ADDRESS,
    LANES,
    MANY_REGISTERS,
    count_vector_registers,
    fma,
    load,
    load_bf16,
    load_f16,
    load_first_lanes,
    splat_from,
    store,
    zeros,
)
from ...steps.partition import compute_thread_range
from ...steps.step_table import StepTableBuilder
from ..vector.elementwise import load_lanes, store_lanes
from .tile_loops import (
    ARGS,
    GROUP_ROWS,
    WeightTiling,
    make_grouped_expert_matmul_kernel,
    prefetch_cache_lines_to_l1_and_l2,
    prefetch_section_and_advance,
)

VECTOR_BYTES = 4 * LANES
TILE_SIZES, TILE_SIZES_WITH_FEW_REGISTERS = (4, 6, 3, 2048), (3, 2, 1, 768)
"""Activation rows and weight rows of a tile; groups of weight rows and columns that are expanded at a time.

A tile has as many sums as registers can hold. The expanded weights fill a part of the second cache. The activations of
a tile fit the first cache.
"""
ROWS_PER_CHUNK, MAX_LEFTOVER_ROWS, MAX_UNEXPANDED_ROWS = 192, 2, 6
"""Activation rows per expansion; largest incomplete tile, and largest product, that uses the unexpanded weight."""
ROWS_PER_MATVEC = {DType.F32: 1, DType.F16: 2, DType.BF16: 2}
"""Weight rows that are multiplied with a single activation row at a time, by dtype.

Fewer rows are read from memory faster; but each row has only one sum, which has to wait for the last addition.
"""


@subroutine
def load_16_zero_padded_f32_columns(p, c, n):
    """Load 16 columns of a float32 weight row at `p` from column `c` on; lanes past its `n` columns are 0."""
    return load_lanes(p, c, n, 4)


@subroutine
def load_16_f16_weight_columns_as_f32(p, c, n):
    """Load 16 columns of the float16 weight row at `p` from column `c` on, as float32."""
    return load_f16(p + 2 * c)


@subroutine
def load_16_bf16_weight_columns_as_f32(p, c, n):
    """Load 16 columns of the bfloat16 weight row at `p` from column `c` on, as float32."""
    return load_bf16(p + 2 * c)


LANE_LOADERS = {
    DType.F32: load_16_zero_padded_f32_columns,
    DType.F16: load_16_f16_weight_columns_as_f32,
    DType.BF16: load_16_bf16_weight_columns_as_f32,
}
VECTOR_LOADERS = {DType.F32: load, DType.F16: load_f16, DType.BF16: load_bf16}


def _make_multiply_few_activation_rows(dtype: DType, row_count: int) -> Subroutine:
    """Make the subroutine that multiplies `row_count` activation rows with 16 float weight rows.

    Arguments are as in `WeightTiling.make_few_rows`. It computes up to 4 weight rows at a time. If a group has too few
    rows for that, the rest is computed one weight row at a time.
    """
    some_of_several = 4 if count_vector_registers() == MANY_REGISTERS else 2
    some = ROWS_PER_MATVEC[dtype] if row_count == 1 else some_of_several
    tile, size = make_dot_tile_intrinsics(row_count, some), dtype.storage.itemsize
    zero_sums, store_lane_sums = tile.zero_sums, tile.store_lane_sums
    add = make_add_row_products(row_count, some, VECTOR_LOADERS[dtype])
    add_part = make_add_row_products(row_count, some, load_first_lanes, ADDRESS)

    def multiply_few(to, group, stride, left, columns, x, l1_ahead, l2_ahead):
        i, stop = 0, min(LANES, left)
        while i < stop:
            there = some if i + some <= stop else 1
            p, apart = group + i * stride, stride if there > 1 else 0
            acc, c, coming = zero_sums(), 0, p
            while c + 4 * LANES <= columns:
                prefetch_cache_lines_to_l1_and_l2(coming, some * size, l1_ahead, l2_ahead)
                acc = add(acc, x, 4 * c, p + c * size, apart)
                acc = add(acc, x, 4 * c + 64, p + (c + 16) * size, apart)
                acc = add(acc, x, 4 * c + 128, p + (c + 32) * size, apart)
                acc = add(acc, x, 4 * c + 192, p + (c + 48) * size, apart)
                c += 4 * LANES
                coming += some * 4 * LANES * size
            while c + LANES <= columns:
                acc = add(acc, x, 4 * c, p + c * size, apart)
                c += LANES
            if c < columns:  # of float32 only
                acc = add_part(acc, x, 4 * c, p + c * size, apart, columns - c)
            store_lane_sums(to, 4 * i, acc, there)
            i += there

    return subroutine(multiply_few)


def _make_multiply_expanded_rows(
    dtype: DType, tile_rows: int, some: int, groups: int, columns_per_pass: int
) -> Subroutine:
    """Make the subroutine that expands float weight rows to float32, and multiplies them with some activation rows.

    Its arguments are as in `WeightTiling.multiply_expanded`. Each sum is a vector that adds every 16th column, as in
    `_make_multiply_few_activation_rows`, so both give equal results.

    Args:
        dtype: The type of the weight.
        tile_rows: Activation rows of a register tile.
        some: Weight rows of a register tile. Their float32 copies alternate every 16 columns.
        groups: Groups of 16 weight rows that one call expands.
        columns_per_pass: Columns that are expanded at a time.
    """
    tile, load_weights = make_dot_tile_intrinsics(tile_rows, some), LANE_LOADERS[dtype]
    select_rows, zero_sums, store_lane_sums = tile.row_addresses_by_slot, tile.zero_sums, tile.store_lane_sums
    spill, reload, block, pass_rows = tile.spill, tile.reload, some * VECTOR_BYTES, groups * GROUP_ROWS
    add = make_add_row_products(tile_rows, some, load)
    add_part = make_add_row_products(tile_rows, some, load_first_lanes, ADDRESS)

    def multiply_expanded(a, expanded, matrix, group, chunk, stop, coming):
        stride, columns, x, pitch = ARGS.stride(a), ARGS.columns(a), ARGS.x(a), ARGS.pitch(a)
        used, shared, slots = ARGS.used(a), ARGS.shared(a), ARGS.starts(a) + 4 * (ARGS.experts(a) + 2)
        p, y, step = matrix + group * GROUP_ROWS * stride, ARGS.y(a) + group * GROUP_ROWS * 4, ARGS.step(a)
        left = min(pass_rows, ARGS.rows(a) - group * GROUP_ROWS)
        parts = max(1, (columns + columns_per_pass - 1) // columns_per_pass)
        tiles = (stop - chunk + tile_rows - 1) // tile_rows * parts
        for first in range(0, max(1, columns), columns_per_pass):
            count, sums = min(columns_per_pass, columns - first), expanded + pass_rows * 4 * columns_per_pass
            to = expanded
            for row in range(0, left, some):
                for c in range(first, first + count, LANES):
                    for i in range(some):
                        store(to, load_weights(p + min(row + i, left - 1) * stride, c, columns))
                        to += VECTOR_BYTES
            for i in range(chunk, stop, tile_rows):
                r = select_rows(slots + 4 * i, stop - i, used, shared, x + 4 * first, pitch)
                results = select_rows(slots + 4 * i, stop - i, 1, 1, y, step)
                coming = prefetch_section_and_advance(coming, pass_rows * stride, tiles)
                at = expanded
                for row in range(0, left, some):
                    acc = reload(sums) if first > 0 else zero_sums()
                    c = 0
                    while c + LANES <= count:
                        acc = add(acc, r, 4 * c, at, VECTOR_BYTES)
                        c += LANES
                        at += block
                    if c < count:
                        acc = add_part(acc, r, 4 * c, at, VECTOR_BYTES, count - c)
                        at += block
                    if first + columns_per_pass < columns:
                        spill(sums, acc)
                    else:
                        store_lane_sums(results, 4 * row, acc, left - row)
                    sums += tile_rows * block

    return subroutine(multiply_expanded)


@cache
def make_float_weight_tiling(dtype: DType) -> WeightTiling:
    """Make the subroutines and tile sizes of matmuls with a float weight type.

    The sum of a result is the same for every number of activation rows: 16 lanes, each of every 16th column in order,
    then added in pairs.
    """
    many = count_vector_registers() == MANY_REGISTERS
    rows, some, groups, columns = TILE_SIZES if many else TILE_SIZES_WITH_FEW_REGISTERS
    return WeightTiling(
        tile_rows=rows,
        tile_groups=groups,
        rows_per_chunk=ROWS_PER_CHUNK,
        max_leftover_rows=MAX_LEFTOVER_ROWS,
        max_unexpanded_rows=MAX_UNEXPANDED_ROWS,
        scratch_bytes=groups * GROUP_ROWS * (4 * columns + ROWS_PER_CHUNK * VECTOR_BYTES),
        multiply_expanded=_make_multiply_expanded_rows(dtype, rows, some, groups, columns),
        make_few_rows=partial(_make_multiply_few_activation_rows, dtype),
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


def bind_batched_column_major_matmul(steps: StepTableBuilder, call: BoundInstruction) -> bool:
    """Add the step of a batched matmul with column-major weights, one matrix of w for each matrix of x.

    Return False if the kernel cannot compute it, or if x has more than `MAX_LEFTOVER_ROWS` rows. Then a kernel that
    first expands the columns is faster.
    """
    w, x, y = call.operand(0), call.operand(1), call.out
    if not has_batched_column_major_matmul_kernel(call):
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


def has_batched_column_major_matmul_kernel(call: BoundInstruction) -> bool:
    """Return whether the kernel for column-major weights should compute this `mul_mat`."""
    w, x = call.operand(0), call.operand(1)
    is_batched = len(w.shape) == len(x.shape) == 3 and w.shape[0] == x.shape[0] and x.shape[1] <= MAX_LEFTOVER_ROWS
    return is_batched and w.is_float and x.is_float and w.strides[1] == call.out.strides[-1] == 1


def is_readable_float_weight(w: Operand) -> bool:
    """Return whether kernels can read a float weight in place, without a copy."""
    return w.dtype in LANE_LOADERS and w.strides[-1] == 1 and (w.dtype is DType.F32 or w.shape[-1] % LANES == 0)
