"""The quantiser of IQ3_S: magnitudes of four numbers are an entry of a code book, and signs are bits.

1. A search without the code book gives the first scale of 32 numbers.
2. Each of several scales near it has its best entries, by the weighted error of all entries; 16 entries are compared
   at once. The scale becomes the least squares solution for them.
3. The scales are odd multiples of a common scale. The nearest three are compared with their best entries.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .....graph.dtypes import DType
from .....ops.quantisation import load_code_book
from ...compilation.compiler import kernel, subroutine
from ...simd.candidate_lanes import find_lane, round_scalar_to_half, select_lane, to_int, to_scalar
from ...simd.half_memory import store_lane_0_as_f16
from ...simd.vectors import (
    LANES,
    absolute,
    fma,
    greater_bitmask,
    lane_min,
    load,
    load_byte,
    load_int,
    load_scalar,
    splat,
    store_byte,
    store_int,
    store_scalar,
    where_less,
    with_sign,
    zeros,
)
from ...steps.partition import compute_thread_range
from .code_blocks import ARGS
from .scale_search import (
    NO_FIT,
    ONE,
    ZERO,
    make_scale_search,
    round_to_codes,
    single,
    spread_one_side,
    write_error_weights,
)
from .small_blocks import BLOCK
from .super_blocks import CODES, SCALE_CODES, SCALES, SCRATCH_BYTES, SUPER_BLOCK, WEIGHTS

ENTRIES, WIDTH = 512, 4
"""Entries of the code book, and numbers of an entry."""
VECTORS = ENTRIES // LANES
FACTOR_COUNT, FIRST_FACTOR, FACTOR_STEP = 5, single(0.9), single(0.06)
"""Factors of the scales that are tried with the code book."""
LARGEST_MAGNITUDE, MAX_SCALE_CODE = single(15), 15
ENTRY_CODES = 1536
"""Offset in the scratch memory of 64 entry indices, int32. `CODES` has the entries of candidates."""


@cache
def make_book_table() -> np.ndarray:
    """Return a float32 table that has the IQ3_S code book twice: in an order for SIMD, then entry by entry.

    The first part is [vectors, 4, 16]: each vector has 16 entries of 4 numbers. The second part is [512 entries, 4].
    """
    book = load_code_book(DType.IQ3_S).astype(np.float32)
    return np.concatenate([book.reshape(VECTORS, LANES, WIDTH).transpose(0, 2, 1).ravel(), book.ravel()])


@subroutine
def round_to_odd(v, low, high):
    """Round each lane to the nearest odd number from -15 to 15.

    `low` and `high` have no effect: they are parameters of all rounding functions of `make_scale_search`.
    """
    half = round_to_codes(fma(absolute(v), splat(single(0.5)), splat(single(-0.5))), ZERO, single(7))
    return with_sign(fma(half, splat(single(2)), splat(ONE)), v)


search_odd_scale = make_scale_search(round_to_odd)


@subroutine
def find_entry(x, w, scale, table):
    """Find the code-book entry that fits the magnitudes of four numbers with the smallest weighted squared error.

    Args:
        x: address of the numbers.
        w: address of the weights of their squared errors.
        scale: scale of the entry.
        table: address of `make_book_table`.

    Returns:
        The index of the entry, and its error.
    """
    w0, w1, w2, w3 = load_scalar(w), load_scalar(w + 4), load_scalar(w + 8), load_scalar(w + 12)
    x0, x1, x2, x3 = abs(load_scalar(x)), abs(load_scalar(x + 4)), abs(load_scalar(x + 8)), abs(load_scalar(x + 12))
    double, square = single(-2) * scale, scale * scale
    p0, p1, p2, p3 = splat(double * w0 * x0), splat(double * w1 * x1), splat(double * w2 * x2), splat(double * w3 * x3)
    r0, r1, r2, r3 = splat(square * w0), splat(square * w1), splat(square * w2), splat(square * w3)
    best, chosen = splat(NO_FIT), zeros()
    for v in range(VECTORS):
        at = table + 4 * LANES * WIDTH * v
        g0, g1, g2, g3 = load(at), load(at + 64), load(at + 128), load(at + 192)
        first = fma(fma(r0, g0, p0), g0, fma(fma(r1, g1, p1), g1, zeros()))
        error = fma(fma(r2, g2, p2), g2, fma(fma(r3, g3, p3), g3, first))
        chosen = where_less(error, best, splat(to_scalar(v)), chosen)
        best = where_less(error, best, error, best)
    smallest = lane_min(best)
    lane = find_lane(best, smallest)
    base = w0 * x0 * x0 + w1 * x1 * x1 + w2 * x2 * x2 + w3 * x3 * x3
    return to_int(select_lane(chosen, lane)) * LANES + lane, smallest + base


@subroutine
def choose_entries(x, w, scale, table, to):
    """Choose the best code-book entry for each four of 32 numbers, for a given scale.

    Args:
        x: address of the numbers.
        w: address of the weights of their squared errors.
        scale: scale of the entries.
        table: address of `make_book_table`.
        to: address for the 8 entry indices, int32.

    Returns:
        The weighted squared error, and the least squares scale for the chosen entries.
    """
    total, products, energy = ZERO, ZERO, ZERO
    for i in range(BLOCK // WIDTH):
        xi, wi = x + 4 * WIDTH * i, w + 4 * WIDTH * i
        entry, error = find_entry(xi, wi, scale, table)
        store_int(to + 4 * i, entry)
        total += error
        values = table + 4 * WIDTH * (ENTRIES + entry)
        for j in range(WIDTH):
            g, wj = load_scalar(values + 4 * j), load_scalar(wi + 4 * j)
            products += wj * g * abs(load_scalar(xi + 4 * j))
            energy += wj * g * g
    return total, products / energy


@subroutine
def search_block_scale(x, w, table, memory):
    """Return the scale of 32 numbers with the smallest weighted squared error.

    Args:
        x: address of the numbers.
        w: address of the weights of their squared errors.
        table: address of `make_book_table`.
        memory: address for the 8 entry indices of a candidate.
    """
    first = abs(search_odd_scale(x, w, BLOCK, 0, 0, spread_one_side(LARGEST_MAGNITUDE, single(0.7), single(0.03)), 3))
    best, scale = NO_FIT, ZERO
    if first > ZERO:
        for k in range(FACTOR_COUNT + 1):
            # The last scale is for numbers of one magnitude, which the entry of ones stores.
            factor = FIRST_FACTOR + FACTOR_STEP * to_scalar(k) if k < FACTOR_COUNT else LARGEST_MAGNITUDE
            _, solution = choose_entries(x, w, first * factor, table, memory)
            error, _ = choose_entries(x, w, solution, table, memory)
            if error < best:
                best, scale = error, solution
    return scale


@kernel
def quantise_iq3_s(a, thread, threads):
    """Quantise rows to IQ3_S: a code-book entry for each four magnitudes, with a 4-bit scale for each 32 numbers."""
    x, y, importance, columns, table = ARGS.x(a), ARGS.y(a), ARGS.importance(a), ARGS.columns(a), ARGS.table(a)
    scratch = ARGS.scratch(a) + SCRATCH_BYTES * thread
    first, end = compute_thread_range(ARGS.rows(a), thread, threads)
    w, memory, entries = scratch + WEIGHTS, scratch + CODES, scratch + ENTRY_CODES
    for i in range(first, end):
        for c in range(0, columns, SUPER_BLOCK):
            block, source = y + (i * columns + c) // SUPER_BLOCK * 110, x + 4 * (i * columns + c)
            write_error_weights(source, importance + 4 * c if importance != 0 else 0, w, SUPER_BLOCK)
            largest = ZERO
            for j in range(8):
                scale = search_block_scale(source + 128 * j, w + 128 * j, table, memory)
                store_scalar(scratch + SCALES + 4 * j, scale)
                largest = max(largest, scale)
            common = round_scalar_to_half(largest / single(2 * MAX_SCALE_CODE + 1))
            store_lane_0_as_f16(block, splat(common))
            for j in range(8):
                xj, wj, code, best = source + 128 * j, w + 128 * j, 0, NO_FIT
                nearest = to_int(load_scalar(scratch + SCALES + 4 * j) / common * single(0.5)) if common > ZERO else 0
                for candidate in range(max(nearest - 1, 0), min(nearest + 1, MAX_SCALE_CODE) + 1):
                    error, _ = choose_entries(xj, wj, common * to_scalar(2 * candidate + 1), table, memory)
                    if error < best:
                        best, code = error, candidate
                choose_entries(xj, wj, common * to_scalar(2 * code + 1), table, entries + 32 * j)
                store_byte(scratch + SCALE_CODES + j, code)
                for k in range(2):
                    signs = greater_bitmask(zeros(), load(xj + 64 * k))
                    store_byte(block + 74 + 4 * j + 2 * k, signs & 255)
                    store_byte(block + 75 + 4 * j + 2 * k, signs >> 8)
                high = 0
                for k in range(8):
                    entry = load_int(entries + 32 * j + 4 * k)
                    store_byte(block + 2 + 8 * j + k, entry & 255)
                    high |= (entry >> 8) << k
                store_byte(block + 66 + j, high)
            for j in range(4):
                low, upper = load_byte(scratch + SCALE_CODES + 2 * j), load_byte(scratch + SCALE_CODES + 2 * j + 1)
                store_byte(block + 106 + j, low | upper << 4)
    return 0
