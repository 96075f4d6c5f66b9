"""Matrices of 32 x 32 numbers for attention by AMX tiles: their layout, conversion and products.

Matrices are sums of bfloat16 terms, or float32. A matrix of two terms has four tiles: two of high terms, then two of
low terms. A left matrix (keys, values) has 32 rows of 32 numbers. A right matrix (queries, weights) has 16 rows of
pairs for 32 tokens. Both sides must agree on the pairs: for keys and queries they are columns 16 apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, reduce
from types import MappingProxyType

from .....graph.dtypes import DType
from ... import target_cpu
from ...compilation.compiler import Subroutine, subroutine
from ...simd import amx
from ...simd.bf16_pairs import store_two_vectors_as_bf16
from ...simd.bf16_terms import make_split_and_store_bf16_pair_terms, transpose_32x16_shorts
from ...simd.permute_lanes import transpose_16x16
from ...simd.vectors import LANES, load, load_bf16, load_f16, load_long, mul, splat, store_long, sub, zeros
from ..vector.amx_tiles import select_amx_tile_operations
from ..vector.cache_cells import CELLS_BY_DTYPE

MATRIX_SIZE = 32
"""Rows and columns of a matrix."""
TILE = amx.TILE_BYTES
TERM_BYTES = 2 * TILE
"""Bytes of one term of a matrix: two tiles."""
MATRIX_BYTES = 2 * TERM_BYTES
"""Bytes of a matrix of two terms, or of float32."""
ROW_BYTES = 4 * MATRIX_SIZE
"""Bytes of a row of float32."""

STEP_LEFT, STEP_RIGHT, STEP_TARGET, STEP_FLAGS = range(0, 32, 8)
STEP_BYTES = 32
"""Bytes of a step, which adds the product of two matrix terms to a matrix of sums in registers.

`STEP_LEFT`, `STEP_RIGHT`, `STEP_TARGET` and `STEP_FLAGS` are the offsets of its words.
"""
CLEAR_SUMS, LOAD_SUMS, STORE_SUMS = 1, 2, 4
"""Flags of a step: the sums begin at 0, the sums begin at the target, the sums are stored to the target."""
QUERY_TERMS, WEIGHT_TERMS = 3, 2
"""Terms of queries and of weights.

The error of a query counts times the size of a score. The error of a weight stays 2^-17 of it, while keys and values
have errors of at least 2^-12.
"""
store_query_terms, store_weight_terms = (
    make_split_and_store_bf16_pair_terms(QUERY_TERMS),
    make_split_and_store_bf16_pair_terms(WEIGHT_TERMS),
)


EXACT_DTYPES = frozenset((DType.F16, DType.BF16, DType.Q4_0))
"""Types of keys and values that two terms represent exactly."""


def is_exact_in_bf16_tiles(k: DType, v: DType) -> bool:
    """Return whether sums of bfloat16 terms represent keys of type `k` and values of type `v` exactly."""
    return {k, v} <= EXACT_DTYPES


def count_bf16_terms(dtype: DType) -> int:
    """Return how many bfloat16 terms represent a key or value of a type: 1 for bfloat16, otherwise 2."""
    return 1 if dtype is DType.BF16 else 2


def compute_softmax_weight_rounding_error(k: DType, v: DType) -> float | None:
    """Return the relative error of softmax weights that AMX tiles multiply.

    The error includes omitted products of small terms. The result is None if attention with these types does not use
    AMX tiles.
    """
    return (
        2.0 ** -(8 * WEIGHT_TERMS)
        if target_cpu.find_native_or_emulated_amx() and is_exact_in_bf16_tiles(k, v)
        else None
    )


@cache
def make_append_matmul_steps(left: int, right: int) -> Subroutine:
    """Make the subroutine that appends the AMX steps of a product of two matrices to a list of steps.

    A step multiplies one bfloat16 term of each matrix. Products of small terms come first. Products as small as the
    rounding of the right side are omitted. The subroutine ``(end, a, b, to, first, last)`` returns the new end of the
    list:

    - `end` is the end of the list so far.
    - `a`, `b` and `to` are the addresses of the left matrix, the right matrix and the sums.
    - `first` is `CLEAR_SUMS`, `LOAD_SUMS`, or 0 to continue with the sums in the registers.
    - `last` is `STORE_SUMS`, or 0 to leave the sums in the registers.

    Args:
        left: Terms of the left matrix.
        right: Terms of the right matrix.
    """
    pairs = [(i, j) for i in reversed(range(left)) for j in reversed(range(right)) if i + j < right]
    return reduce(
        _chain_append_subroutines,
        [
            _make_append_term_product_step(i * TERM_BYTES, j * TERM_BYTES, n == 0, n == len(pairs) - 1)
            for n, (i, j) in enumerate(pairs)
        ],
    )


def _make_append_term_product_step(i: int, j: int, is_first: bool, is_last: bool) -> Subroutine:
    """Make the subroutine that appends one AMX step, the product of one term of each matrix, to a list of steps.

    Args:
        i: Byte offset of the term in the left matrix.
        j: Byte offset of the term in the right matrix.
        is_first: Whether this is the first step of the matrix product.
        is_last: Whether this is its last step.
    """

    def list_step(end, a, b, to, first, last):
        store_long(end + STEP_LEFT, a + i)
        store_long(end + STEP_RIGHT, b + j)
        store_long(end + STEP_TARGET, to)
        store_long(end + STEP_FLAGS, (first if is_first else 0) | (last if is_last else 0))
        return end + STEP_BYTES

    return subroutine(list_step)


def _chain_append_subroutines(before: Subroutine, after: Subroutine) -> Subroutine:
    """Make the subroutine that appends the AMX steps of `before`, then the AMX steps of `after`."""

    def append_both(end, a, b, to, first, last):
        return after(before(end, a, b, to, first, last), a, b, to, first, last)

    return subroutine(append_both)


@cache
def make_load_amx_sums_and_terms() -> Subroutine:
    """Make the subroutine ``(mine, step)`` that loads the sums and the two terms of an AMX step to tile registers.

    `mine` is the scratch of the thread, `step` the address of the step.
    """
    unit = select_amx_tile_operations()
    clear_0, clear_1, clear_2, clear_3 = unit.clear[:4]
    load_0, load_1, load_2, load_3, load_x, load_y, load_u, load_v = unit.load

    def begin_step(mine, step):
        a, b, to = load_long(step + STEP_LEFT), load_long(step + STEP_RIGHT), load_long(step + STEP_TARGET)
        how = load_long(step + STEP_FLAGS)
        if how & CLEAR_SUMS:
            clear_0(mine)
            clear_1(mine)
            clear_2(mine)
            clear_3(mine)
        elif how & LOAD_SUMS:
            load_0(mine, to, ROW_BYTES)
            load_1(mine, to + amx.TILE_ROW_BYTES, ROW_BYTES)
            load_2(mine, to + 16 * ROW_BYTES, ROW_BYTES)
            load_3(mine, to + 16 * ROW_BYTES + amx.TILE_ROW_BYTES, ROW_BYTES)
        load_x(mine, a, amx.TILE_ROW_BYTES)
        load_u(mine, b, amx.TILE_ROW_BYTES)
        load_v(mine, b + TILE, amx.TILE_ROW_BYTES)
        load_y(mine, a + TILE, amx.TILE_ROW_BYTES)

    return subroutine(begin_step)


@cache
def make_run_amx_steps() -> Subroutine:
    """Make the subroutine ``(mine, first, last)`` that runs the AMX steps from address `first` to before `last`.

    Each step loads the operands of the step after it, so the operands of `last` are loaded at the end. The operands of
    `first` are in registers already. The reason: a load waits for an earlier store with the same low 12 address bits,
    and such a store waits for all products before it. So operands are loaded before vector code stores anything.
    """
    unit, begin_step = select_amx_tile_operations(), make_load_amx_sums_and_terms()
    store_0, store_1, store_2, store_3 = unit.store[:4]
    multiply_0, multiply_1, multiply_2, multiply_3 = (
        unit.multiply(2 * row + group, 4 + row, 6 + group) for row in range(2) for group in range(2)
    )

    def run_steps(mine, first, last):
        for step in range(first, last, STEP_BYTES):
            multiply_0(mine)
            multiply_1(mine)
            multiply_2(mine)
            multiply_3(mine)
            if load_long(step + STEP_FLAGS) & STORE_SUMS:
                to = load_long(step + STEP_TARGET)
                store_0(mine, to, ROW_BYTES)
                store_1(mine, to + amx.TILE_ROW_BYTES, ROW_BYTES)
                store_2(mine, to + 16 * ROW_BYTES, ROW_BYTES)
                store_3(mine, to + 16 * ROW_BYTES + amx.TILE_ROW_BYTES, ROW_BYTES)
            begin_step(mine, step + STEP_BYTES)

    return subroutine(run_steps)


@subroutine
def append_dummy_step_for_preloading(end):
    """Append a dummy AMX step with valid operands: the last real step loads the operands of the step after it."""
    store_long(end + STEP_LEFT, load_long(end - STEP_BYTES + STEP_LEFT))
    store_long(end + STEP_RIGHT, load_long(end - STEP_BYTES + STEP_RIGHT))
    store_long(end + STEP_FLAGS, 0)


@cache
def make_convert_rows_to_bf16_matrices(dtype: DType, count: int) -> Subroutine:
    """Make the subroutine that converts `count` rows of numbers to matrices of bfloat16 terms, with zeros as padding.

    The subroutine is ``(source, step, rows, size, to, wide)``:

    - `source` has `rows` rows of `size` columns, `step` bytes apart.
    - `to` receives `wide` matrices for each 32 rows.
    """
    load_first, store_pair = (
        CELLS_BY_DTYPE[dtype].load_first,
        make_split_and_store_bf16_pair_terms(count_bf16_terms(dtype)),
    )

    def copy_rows(source, step, rows, size, to, wide):
        for r in range(count):
            row = source + r * step
            at = to + r // MATRIX_SIZE * wide * MATRIX_BYTES + r % MATRIX_SIZE * amx.TILE_ROW_BYTES
            for c in range(0, wide * MATRIX_SIZE, MATRIX_SIZE):
                x = load_first(row, c, size) if r < rows and c < size else zeros()
                y = load_first(row, c + LANES, size) if r < rows and c + LANES < size else zeros()
                store_pair(at, TERM_BYTES, x, y)
                at += MATRIX_BYTES

    return subroutine(copy_rows)


@cache
def make_transpose_padded_rows_to_bf16(dtype: DType, count: int) -> Subroutine:
    """Make the subroutine that transposes `count` rows of numbers to matrices of bfloat16 terms, with zeros as padding.

    The subroutine is ``(source, step, rows, size, to, wide, between)``:

    - `source` has `rows` rows of `size` columns, `step` bytes apart.
    - `to` receives the matrices of `wide` times 32 columns. The matrices of 32 columns are adjacent for all rows.
    - `between` is scratch memory of one matrix.
    """
    transpose_padded, transpose_whole, height = (
        _make_transpose_16_columns_to_bf16(dtype),
        _COLUMN_TRANSPOSERS.get(dtype),
        count // MATRIX_SIZE,
    )
    is_short = transpose_whole is not None
    transpose_present = transpose_whole or transpose_padded

    def transpose_rows(source, step, rows, size, to, wide, between):
        for c in range(0, wide * MATRIX_SIZE, LANES):
            matrix = to + c // MATRIX_SIZE * height * MATRIX_BYTES + c % MATRIX_SIZE * amx.TILE_ROW_BYTES
            for first in range(0, count, MATRIX_SIZE):
                if is_short and first + MATRIX_SIZE <= rows and c + LANES <= size:
                    transpose_present(source + first * step, step, MATRIX_SIZE, c, size, matrix, between)
                else:
                    transpose_padded(source + first * step, step, rows - first, c, size, matrix, between)
                matrix += MATRIX_BYTES

    return subroutine(transpose_rows)


@cache
def _make_transpose_16_columns_to_bf16(dtype: DType) -> Subroutine:
    """Make the subroutine that transposes 16 columns of up to 32 rows to bfloat16 terms, with zeros as padding.

    The subroutine is ``(source, step, rows, c, size, to, between)``; the columns begin at `c`.
    """
    load_first, terms = CELLS_BY_DTYPE[dtype].load_first, count_bf16_terms(dtype)
    store_pair, end = make_split_and_store_bf16_pair_terms(terms), terms * TILE

    def transpose_padded(source, step, rows, c, size, to, between):
        for r in range(0, MATRIX_SIZE, 2):
            x = load_first(source + r * step, c, size) if r < rows and c < size else zeros()
            y = load_first(source + (r + 1) * step, c, size) if r + 1 < rows and c < size else zeros()
            store_pair(between + r * amx.TILE_ROW_BYTES // 2, TILE, x, y)
        for term in range(0, end, TILE):
            transpose_16x16(between + term, amx.TILE_ROW_BYTES, to, amx.TILE_ROW_BYTES)
            to += TERM_BYTES

    return subroutine(transpose_padded)


@subroutine
def _transpose_16_bf16_columns(source, step, rows, c, size, to, between):
    """Transpose 16 columns of 32 bfloat16 rows at `source`, from column `c` on, to a matrix of one term at `to`.

    Rows are `step` bytes apart. `size` and `between` are not used.
    """
    transpose_32x16_shorts(source + 2 * c, step, to)


@subroutine
def _transpose_f16_columns_to_bf16_terms(source, step, rows, c, size, to, between):
    """Transpose 16 columns of 32 float16 rows at `source`, from column `c` on, to two bfloat16 terms at `to`.

    Each number is the sum of two terms. Rows are `step` bytes apart; `between` is scratch memory.
    """
    transpose_32x16_shorts(source + 2 * c, step, between)
    for r in range(0, LANES * amx.TILE_ROW_BYTES, amx.TILE_ROW_BYTES):
        x, y = load_f16(between + r), load_f16(between + r + 32)
        store_two_vectors_as_bf16(to + r, x, y)
        x, y = sub(x, load_bf16(to + r)), sub(y, load_bf16(to + r + 32))
        store_two_vectors_as_bf16(to + r + TERM_BYTES, x, y)


_COLUMN_TRANSPOSERS: Mapping[DType, Subroutine] = MappingProxyType(
    {DType.F16: _transpose_f16_columns_to_bf16_terms, DType.BF16: _transpose_16_bf16_columns}
)


@subroutine
def convert_query_lanes_to_bf16_matrix(rows, factor, to):
    """Multiply 32 query columns of 32 tokens by `factor`, and store them at `to` as a matrix of bfloat16 terms.

    `rows` is the address of 32 float32 rows: a row has one column of all 32 tokens. AMX needs columns in pairs; the two
    columns of a pair are 16 rows apart.
    """
    for r in range(0, 16 * ROW_BYTES, ROW_BYTES):
        for group in range(2):
            at, p = to + r // 2 + group * TILE, rows + r + group * amx.TILE_ROW_BYTES
            store_query_terms(at, TERM_BYTES, mul(load(p), splat(factor)), mul(load(p + 16 * ROW_BYTES), splat(factor)))
