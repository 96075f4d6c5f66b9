"""float32 matrix products with unpacked weights of float32, float16 or bfloat16. AMX tiles take large products."""

from __future__ import annotations

from functools import cache, partial

from .....graph.dtypes import DType
from ....operands import Bound, Operand
from ...compiler import Kernel, Part, kernel, part
from ...simd.order import turn_bf16, turn_floats, turn_halves
from ...simd.tiles import Tile, tile
from ...simd.vectors import LANES, MANY, fma, load, load_bf16, load_half, splat_from, vectors_in_registers, zeros
from ...steps import Steps
from ...words import words
from ..packing import share
from ..rows import lanes, put
from .grouped import Blocks, fetch, product_of

WIDE, COLUMN = 768, 64
"""Columns that are expanded at a time, and bytes of one column of a group.

The expanded columns fill a good part of the second cache. A tile loads them from there as fast as it multiplies. If
they had to fit the first cache, sums would be stored more often.
"""
CHUNK, FEW, LYING = 512, 3, 6
"""Activation rows per expansion; largest incomplete tile, and largest product, that uses the unexpanded weight."""


@part
def f32_lanes(p, c, n):
    """Load 16 columns of a float32 weight row from column `c`, or as many as there are."""
    return lanes(p, c, n, 4)


@part
def f16_lanes(p, c, n):
    """Load 16 columns of a float16 weight row from column `c` as float32."""
    return load_half(p + 2 * c)


@part
def bf16_lanes(p, c, n):
    """Load 16 columns of a bfloat16 weight row from column `c` as float32."""
    return load_bf16(p + 2 * c)


LOADS = {DType.F32: f32_lanes, DType.F16: f16_lanes, DType.BF16: bf16_lanes}
SQUARES = {DType.F32: turn_floats, DType.F16: turn_halves, DType.BF16: turn_bf16}


def _expand(dtype: DType) -> Part:
    """Make `WeightTiling.expand_blocks`: transpose 16 weight rows to columns of float32."""
    turn, size = SQUARES[dtype], dtype.storage.itemsize

    def expand(to, group, stride, left, columns, first, count):
        for c in range(first, first + count, LANES):
            turn(group + c * size, stride, left, columns - c, to + (c - first) * COLUMN)

    return part(expand)


def _add(some: Tile, groups: int) -> Part:
    """Make `WeightTiling.add_block`: ``acc[i, g] += w[g, :, c] * x[i, c]`` for one column c."""
    outer, second, third = some.outer, WIDE * COLUMN, 2 * WIDE * COLUMN

    def add(acc, p, r, at):
        return outer(acc, load(p), r, at)  # acc[i, row] += w[row, c] * x[i, c]

    def add_three(acc, p, r, at):
        return outer(acc, load(p), load(p + second), load(p + third), r, at)

    return part(add if groups == 1 else add_three)


def _few(dtype: DType, count: int) -> Part:
    """Make `WeightTiling.make_few_rows` of `count` activation rows, for weight rows in the order of memory.

    Each row has four independent sums.
    """
    rows = tile(count, 1)
    weights, size = LOADS[dtype], dtype.storage.itemsize
    zeros, inner, inner_some = rows.zeros, rows.inner, rows.inner_some
    joined, put_totals = rows.joined, rows.put_totals

    def few(to, group, stride, left, columns, x, near, far):
        for i in range(min(LANES, left)):
            row, c = group + i * stride, 0
            first, second, third, fourth = zeros(), zeros(), zeros(), zeros()
            while c + 4 * LANES <= columns:
                fetch(row + c * size, size, near, far)
                first = inner(first, weights(row, c, columns), x, 4 * c)
                second = inner(second, weights(row, c + 16, columns), x, 4 * c + 64)
                third = inner(third, weights(row, c + 32, columns), x, 4 * c + 128)
                fourth = inner(fourth, weights(row, c + 48, columns), x, 4 * c + 192)
                c += 4 * LANES
            while c < columns:
                first = inner_some(first, weights(row, c, columns), x, 4 * c, columns - c)
                c += LANES
            put_totals(to, 4 * i, joined(joined(first, second), joined(third, fourth)))

    return part(few)


@cache
def blocks_of(dtype: DType) -> Blocks:
    """Make the tiling of a float weight type. A tile has as many rows and groups as registers can hold sums."""
    rows, groups = (8, 3) if vectors_in_registers() == MANY else (6, 1)
    expand, add, few = _expand(dtype), _add(tile(rows, groups), groups), partial(_few, dtype)
    return Blocks(1, 4, COLUMN, WIDE, CHUNK, rows, groups, FEW, LYING, expand, add, few)


@cache
def product(dtype: DType) -> Kernel:
    """Make the product kernel of a float weight type. float16 and bfloat16 weights have a multiple of 16 columns."""
    return product_of(f"dense.product.{dtype}", blocks_of(dtype))


COLUMNS = words("matrices count rows columns w w_between w_step x x_between x_row y y_between y_row x_step")


@kernel
def columns(a, thread, threads):
    """Compute ``y[b, i] = w[b] @ x[b, i]`` where the columns of w are dense: `count` rows of x in each of `matrices`.

    Words in bytes: ``*_between`` from matrix to matrix, ``*_row`` from row to row, `w_step` from column to column of w,
    `x_step` from element to element of x.
    """
    count, rows, n = COLUMNS.count(a), COLUMNS.rows(a), COLUMNS.columns(a)
    lo, hi = share(COLUMNS.matrices(a) * count, thread, threads)
    for unit in range(lo, hi):
        b, i = unit // count, unit % count
        w, x = COLUMNS.w(a) + b * COLUMNS.w_between(a), COLUMNS.x(a) + b * COLUMNS.x_between(a) + i * COLUMNS.x_row(a)
        y = COLUMNS.y(a) + b * COLUMNS.y_between(a) + i * COLUMNS.y_row(a)
        for c in range(0, rows, LANES):
            acc = zeros()
            for k in range(n):  # acc[c] += w[b, c, k] * x[b, i, k]
                acc = fma(lanes(w + k * COLUMNS.w_step(a), c, rows, 4), splat_from(x + k * COLUMNS.x_step(a)), acc)
            put(y, c, rows, acc)
    return 0


def bind_columns(steps: Steps, call: Bound) -> bool:
    """Add a product of a w with dense columns and a matrix for each matrix of x; False if it does not fit.

    With more than `MAX_LEFTOVER_ROWS` rows of x it pays to expand the columns instead.
    """
    w, x, y = call.operand(0), call.operand(1), call.out
    alike = len(w.shape) == len(x.shape) == 3 and w.shape[0] == x.shape[0] and x.shape[1] <= FEW
    if not alike or not (w.is_float and x.is_float) or w.strides[1] != 1 or y.strides[-1] != 1:
        return False
    (matrices, count, _), (_, rows, width) = x.shape, w.shape
    words = COLUMNS(
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
    steps.add(columns, words, reads=[w, x], writes=[y])
    return True


def fits(w: Operand) -> bool:
    """Return whether kernels can read the weight in place."""
    return w.dtype in LOADS and w.strides[-1] == 1 and (w.dtype is DType.F32 or w.shape[-1] % LANES == 0)
