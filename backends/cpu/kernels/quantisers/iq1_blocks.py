"""Quantisers of IQ1_S and IQ1_M: eight numbers are an entry of a code book of -1, 0 and 1, plus 1/8 or minus 1/8.

The shift of 1/8 has one sign for 32 numbers of IQ1_S, and for 8 numbers of IQ1_M.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .....graph.dtypes import DType
from ...compilation.compiler import Subroutine, subroutine
from ...simd.candidate_lanes import make_16_lane_constant, round_scalar_to_half, to_int
from ...simd.half_memory import store_lane_0_as_f16
from ...simd.vectors import (
    LANES,
    fma,
    load,
    load_byte,
    load_int,
    load_scalar,
    splat,
    store,
    store_byte,
    store_int,
    store_scalar,
    where_less,
    zeros,
)
from .block_loop import row_quantiser
from .lattice_search import (
    BASES,
    CODE_LIST,
    ENTRIES,
    FLAG_LIST,
    LIST_BYTES,
    LISTS,
    MAGNITUDES,
    PRODUCT_LIST,
    PRODUCTS,
    SCALE_CODES,
    SCALES,
    SIGN_BYTES,
    TEMPORARY,
    WEIGHTS,
    choose_block_scale_code,
    choose_common_super_block_scale,
    choose_list_lane_for_scale,
    compute_16_scale_probes,
    find_best_block_scale_and_error,
    find_entry_number_of_code,
    find_largest_magnitude,
    make_find_best_octet_entry_per_scale,
)
from .lattice_tables import IQ1_LEVELS, LatticeTableLayout, make_nearest_entry_and_number_table
from .scale_search import ZERO, single, write_error_weights
from .super_blocks import SUPER_BLOCK

SHIFT = 0.125
FIRST_PROBE, PROBE_STEP = single(0.25), single(0.055)
TOP_LEVEL, MAX_SCALE_CODE = single(1 + SHIFT), 7
LATTICE = LatticeTableLayout(DType.IQ1_S, IQ1_LEVELS, 8, 2, 64)
ROWS, VECTORS = LATTICE.rows_offset, LATTICE.neighbour_count // LANES
NEGATIVE_LISTS = 32 * LIST_BYTES
"""Distance of the lists with the negative shift from the lists with the positive shift."""


def make_find_best_shifted_entry_per_scale(shift: float) -> Subroutine:
    """Make the subroutine that finds the IQ1 code-book entry with the least error for 8 numbers, at each of 16 scales.

    `shift` is added to each number of an entry. The result is a list in memory, as `lattice_search` describes.
    """
    levels = [level + shift for level in IQ1_LEVELS]
    low = make_16_lane_constant([*levels, 0.0] * 4)
    high = make_16_lane_constant([level for level in (*levels, 0.0) for _ in range(4)])
    return make_find_best_octet_entry_per_scale(low, high, shift - 0.5, shift + 0.5, flips=False, has_ones=False)


write_positive_list, write_negative_list = (
    make_find_best_shifted_entry_per_scale(SHIFT),
    make_find_best_shifted_entry_per_scale(-SHIFT),
)


@cache
def make_iq1_search_table() -> np.ndarray:
    """Make the table of the IQ1 code book in which quantisers look up nearby entries (`lattice_tables`)."""
    return make_nearest_entry_and_number_table(LATTICE)


@subroutine
def copy_256_numbers_and_append_zeros(x, scratch):
    """Copy 256 numbers to the scratch memory, and write zeros after them and after their weights."""
    for i in range(0, SUPER_BLOCK, LANES):
        store(scratch + MAGNITUDES + 4 * i, load(x + 4 * i))
    store(scratch + MAGNITUDES + 4 * SUPER_BLOCK, zeros())
    store(scratch + WEIGHTS + 4 * SUPER_BLOCK, zeros())


@subroutine
def find_best_entries_for_both_shifts(scratch, group, unit, table, positive, negative):
    """Find the best code-book entries for a group of 8 numbers at 16 scales, with shift +1/8 and with shift -1/8.

    `positive` and `negative` are the addresses that receive the lists of entries for both shifts. `unit` is the unit of
    the scales.
    """
    m, w, products = scratch + MAGNITUDES + 32 * group, scratch + WEIGHTS + 32 * group, scratch + PRODUCTS
    write_positive_list(m, w, products, unit, FIRST_PROBE, PROBE_STEP, ZERO, table, table + ROWS, VECTORS, positive)
    write_negative_list(m, w, products, unit, FIRST_PROBE, PROBE_STEP, ZERO, table, table + ROWS, VECTORS, negative)


@subroutine
def find_best_entries_of_super_block(scratch, table):
    """Find the best entries at 16 scales for all 32 groups of an IQ1_S super-block, for both signs of the shift."""
    for k in range(32):  # one long loop: LLVM would unroll a loop over the groups of a block
        unit = find_largest_magnitude(scratch + MAGNITUDES + 128 * (k >> 2), 32) / TOP_LEVEL
        to = scratch + LISTS + LIST_BYTES * k
        find_best_entries_for_both_shifts(scratch, k, unit, table, to, to + NEGATIVE_LISTS)


@subroutine
def choose_and_store_shift_sign(scratch, block):
    """Choose the sign of the shift of IQ1_S block number `block` by the smaller error; store the sign and the scale."""
    base = LISTS + 4 * LIST_BYTES * block
    scale, error = find_best_block_scale_and_error(scratch + base, 4)
    other_scale, other_error = find_best_block_scale_and_error(scratch + base + NEGATIVE_LISTS, 4)
    is_negative = 1 if other_error < error else 0
    store_byte(scratch + SIGN_BYTES + block, is_negative)
    store_int(scratch + BASES + 4 * block, base + NEGATIVE_LISTS * is_negative)
    store_scalar(scratch + SCALES + 4 * block, other_scale if is_negative else scale)


@row_quantiser(DType.IQ1_S)
def quantise_iq1_s(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to an IQ1_S block at `block`.

    Each 8 numbers are one of 2048 code book entries. Each 32 numbers have a 3-bit scale, and a shift of 1/8 or -1/8.
    """
    write_error_weights(x, importance, scratch + WEIGHTS, SUPER_BLOCK)
    copy_256_numbers_and_append_zeros(x, scratch)
    find_best_entries_of_super_block(scratch, table)
    for j in range(8):
        choose_and_store_shift_sign(scratch, j)
    common = round_scalar_to_half(choose_common_super_block_scale(scratch, 8, 4, MAX_SCALE_CODE))
    store_lane_0_as_f16(block, splat(common))
    for j in range(8):
        lists = scratch + load_int(scratch + BASES + 4 * j)
        code = choose_block_scale_code(lists, 4, common, MAX_SCALE_CODE)
        high, scale = code << 12 | load_byte(scratch + SIGN_BYTES + j) << 15, common * single(2 * code + 1)
        for g in range(4):
            at = lists + LIST_BYTES * g
            entry = to_int(load_scalar(at + CODE_LIST + 4 * choose_list_lane_for_scale(at, scale)))
            number = find_entry_number_of_code(table, entry)
            store_byte(block + 2 + 4 * j + g, number & 255)
            high |= (number >> 8) << (3 * g)
        store_byte(block + 34 + 2 * j, high & 255)
        store_byte(block + 35 + 2 * j, high >> 8)


@subroutine
def find_best_entry_and_shift_per_scale(scratch, group, unit, table, to):
    """Find the best entry of an IQ1_M group of 8 numbers at each of 16 scales, with the better sign of the shift."""
    positive, negative = scratch + TEMPORARY, scratch + TEMPORARY + LIST_BYTES
    find_best_entries_for_both_shifts(scratch, group, unit, table, positive, negative)
    probes = compute_16_scale_probes(unit, FIRST_PROBE, PROBE_STEP)
    a, c = load(positive), load(positive + PRODUCT_LIST)
    other_a, other_c = load(negative), load(negative + PRODUCT_LIST)
    error, other = fma(probes, a, c), fma(probes, other_a, other_c)
    store(to, where_less(other, error, other_a, a))
    store(to + PRODUCT_LIST, where_less(other, error, other_c, c))
    store(to + CODE_LIST, where_less(other, error, load(negative + CODE_LIST), load(positive + CODE_LIST)))
    store(to + FLAG_LIST, where_less(other, error, splat(single(1)), zeros()))


@row_quantiser(DType.IQ1_M)
def quantise_iq1_m(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to an IQ1_M block at `block`.

    Each 8 numbers are one of 2048 code book entries with a shift of 1/8 or -1/8. Each 16 numbers have a 3-bit scale.
    """
    write_error_weights(x, importance, scratch + WEIGHTS, SUPER_BLOCK)
    copy_256_numbers_and_append_zeros(x, scratch)
    for j in range(16):
        unit = find_largest_magnitude(scratch + MAGNITUDES + 64 * j, 16) / TOP_LEVEL
        base = LISTS + 2 * LIST_BYTES * j
        for g in range(2):
            find_best_entry_and_shift_per_scale(scratch, 2 * j + g, unit, table, scratch + base + LIST_BYTES * g)
        store_int(scratch + BASES + 4 * j, base)
        scale, _ = find_best_block_scale_and_error(scratch + base, 2)
        store_scalar(scratch + SCALES + 4 * j, scale)
    common = round_scalar_to_half(choose_common_super_block_scale(scratch, 16, 2, MAX_SCALE_CODE))
    for j in range(16):
        lists = scratch + LISTS + 2 * LIST_BYTES * j
        code = choose_block_scale_code(lists, 2, common, MAX_SCALE_CODE)
        store_byte(scratch + SCALE_CODES + j, code)
        high, scale = 0, common * single(2 * code + 1)
        for g in range(2):
            at = lists + LIST_BYTES * g
            lane = choose_list_lane_for_scale(at, scale)
            number = find_entry_number_of_code(table, to_int(load_scalar(at + CODE_LIST + 4 * lane)))
            store_byte(block + 2 * j + g, number & 255)
            is_negative = to_int(load_scalar(at + FLAG_LIST + 4 * lane))
            high |= (number >> 8 | is_negative << 3) << (4 * g)
        store_byte(block + 32 + j, high)
    store_lane_0_as_f16(scratch + ENTRIES, splat(common))
    bits = load_byte(scratch + ENTRIES) | load_byte(scratch + ENTRIES + 1) << 8
    for k in range(4):
        word = ((bits >> (4 * k)) & 15) << 12
        for j in range(4):
            word |= load_byte(scratch + SCALE_CODES + 4 * k + j) << (3 * j)
        store_byte(block + 48 + 2 * k, word & 255)
        store_byte(block + 49 + 2 * k, word >> 8)
