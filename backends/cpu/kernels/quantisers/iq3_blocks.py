"""Quantisers of IQ3_XXS and IQ3_S: magnitudes of four numbers are an entry of a code book, and signs are bits.

A group of IQ3_XXS has two entries, and its eight signs have even parity. If the signs of the numbers have odd parity,
the flipped sign is in the entry for which the error is smaller. `lattice_search` has the search.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .....graph.dtypes import DType
from ...compilation.compiler import subroutine
from ...simd.candidate_lanes import make_16_lane_constant, round_scalar_to_half, to_int
from ...simd.half_memory import store_lane_0_as_f16
from ...simd.vectors import (
    LANES,
    add,
    fma,
    load,
    load_byte,
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
    has_odd_bit_count,
    make_find_best_quad_entry_per_scale,
    make_find_cheapest_sign_flip,
    store_4_bytes,
    write_zero_padded_magnitudes,
)
from .lattice_tables import IQ3_LEVELS, LatticeTableLayout, make_nearest_entry_and_number_table
from .scale_search import ONE, ZERO, single, store_sign_bits, write_error_weights
from .super_blocks import SUPER_BLOCK

FIRST_PROBE, PROBE_STEP = single(0.62), single(0.045)
TOP_LEVEL, MAX_SCALE_CODE, BLOCKS, GROUPS = single(IQ3_LEVELS[-1]), 15, 8, 4
levels = make_16_lane_constant([*IQ3_LEVELS] * 2)
XXS_LATTICE = LatticeTableLayout(DType.IQ3_XXS, IQ3_LEVELS, 4, 3, 48)
ROWS, VECTORS = XXS_LATTICE.rows_offset, XXS_LATTICE.neighbour_count // LANES
S_LEVELS = tuple(range(1, 16, 2))
S_LATTICE, S_TOP_LEVEL = LatticeTableLayout(DType.IQ3_S, S_LEVELS, 4, 3, 48), single(S_LEVELS[-1])
S_ROWS, S_VECTORS = S_LATTICE.rows_offset, S_LATTICE.neighbour_count // LANES
write_s_list = make_find_best_quad_entry_per_scale(make_16_lane_constant(S_LEVELS * 2), False)
write_plain_list = make_find_best_quad_entry_per_scale(levels, False)
write_flipped_list = make_find_best_quad_entry_per_scale(levels, True)
find_flip = make_find_cheapest_sign_flip(levels, 3, 4)
SECOND = single(4096)
"""The factor of the code of the second entry in the code of a group."""


@cache
def make_iq3_xxs_table() -> np.ndarray:
    return make_nearest_entry_and_number_table(XXS_LATTICE)


@cache
def make_iq3_s_table() -> np.ndarray:
    return make_nearest_entry_and_number_table(S_LATTICE)


@subroutine
def combine_entry_lists_keeping_better_pairs(first, second, part, flag, to):
    """Pair the candidates for two halves of a group, and keep a pair in each lane of `to` if it has a smaller error.

    Each half has 4 numbers. A lane of a list has the best code-book entry for one scale, as in `lattice_search`.

    Args:
        first: address of the list of the first entry.
        second: address of the list of the second entry.
        part: the scale of each lane.
        flag: number of the entry with a flipped sign.
        to: address of the list of pairs. A lane is replaced only if its error becomes smaller.
    """
    a, c = add(load(first), load(second)), add(load(first + PRODUCT_LIST), load(second + PRODUCT_LIST))
    code = fma(load(second + CODE_LIST), splat(SECOND), load(first + CODE_LIST))
    old_a, old_c = load(to), load(to + PRODUCT_LIST)
    error, old = fma(part, a, c), fma(part, old_a, old_c)
    store(to, where_less(error, old, a, old_a))
    store(to + PRODUCT_LIST, where_less(error, old, c, old_c))
    store(to + CODE_LIST, where_less(error, old, code, load(to + CODE_LIST)))
    store(to + FLAG_LIST, where_less(error, old, splat(flag), load(to + FLAG_LIST)))


@subroutine
def find_best_iq3_pair_per_scale(m, w, scratch, unit, is_odd, table, to):
    """Find the best pair of code-book entries for 8 numbers at each of 16 scales; an entry is for four numbers.

    If `is_odd`, one sign is flipped, in the entry for which the error is smaller. `to` receives the list of pairs.
    """
    first, second, other = scratch + TEMPORARY, scratch + TEMPORARY + LIST_BYTES, scratch + TEMPORARY + 2 * LIST_BYTES
    products, rows, probes = scratch + PRODUCTS, table + ROWS, compute_16_scale_probes(unit, FIRST_PROBE, PROBE_STEP)
    store(to, zeros())
    store(to + PRODUCT_LIST, splat(single(1e38)))
    store(to + CODE_LIST, zeros())
    store(to + FLAG_LIST, zeros())
    write_plain_list(m, w, products, unit, FIRST_PROBE, PROBE_STEP, table, rows, VECTORS, first)
    write_plain_list(m + 16, w + 16, products, unit, FIRST_PROBE, PROBE_STEP, table, rows, VECTORS, second)
    if is_odd:
        write_flipped_list(m, w, products, unit, FIRST_PROBE, PROBE_STEP, table, rows, VECTORS, other)
        combine_entry_lists_keeping_better_pairs(other, second, probes, ZERO, to)
        write_flipped_list(m + 16, w + 16, products, unit, FIRST_PROBE, PROBE_STEP, table, rows, VECTORS, other)
        combine_entry_lists_keeping_better_pairs(first, other, probes, ONE, to)
    else:
        combine_entry_lists_keeping_better_pairs(first, second, probes, ZERO, to)


@row_quantiser(DType.IQ3_XXS)
def quantise_iq3_xxs(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to an IQ3_XXS block at `block`.

    The magnitudes of 4 numbers are one of 256 code book entries. Each 32 numbers have a 4-bit scale.
    """
    m, w = scratch + MAGNITUDES, scratch + WEIGHTS
    write_zero_padded_magnitudes(x, scratch, SUPER_BLOCK)
    write_error_weights(x, importance, w, SUPER_BLOCK)
    store_sign_bits(x, SUPER_BLOCK, scratch + SIGN_BYTES)
    for j in range(BLOCKS):
        unit, base = find_largest_magnitude(m + 128 * j, 32) / TOP_LEVEL, LISTS + LIST_BYTES * GROUPS * j
        store_int(scratch + BASES + 4 * j, base)
        for g in range(GROUPS):
            k = GROUPS * j + g
            is_odd = has_odd_bit_count(load_byte(scratch + SIGN_BYTES + k))
            to = scratch + base + LIST_BYTES * g
            find_best_iq3_pair_per_scale(m + 32 * k, w + 32 * k, scratch, unit, is_odd, table, to)
        scale, _ = find_best_block_scale_and_error(scratch + base, GROUPS)
        store_scalar(scratch + SCALES + 4 * j, scale)
    common = round_scalar_to_half(choose_common_super_block_scale(scratch, BLOCKS, GROUPS, MAX_SCALE_CODE))
    store_lane_0_as_f16(block, splat(common))
    for j in range(BLOCKS):
        lists = scratch + LISTS + LIST_BYTES * GROUPS * j
        code = choose_block_scale_code(lists, GROUPS, common, MAX_SCALE_CODE)
        word, scale = code << 28, common * single(2 * code + 1)
        for g in range(GROUPS):
            k, at = GROUPS * j + g, lists + LIST_BYTES * g
            lane = choose_list_lane_for_scale(at, scale)
            both, signs = to_int(load_scalar(at + CODE_LIST + 4 * lane)), load_byte(scratch + SIGN_BYTES + k)
            store_byte(block + 2 + 2 * k, find_entry_number_of_code(table, both & 4095))
            store_byte(block + 3 + 2 * k, find_entry_number_of_code(table, both >> 12))
            if has_odd_bit_count(signs):
                part = to_int(load_scalar(at + FLAG_LIST + 4 * lane))
                entry, offset = (both >> (12 * part)) & 4095, 32 * k + 16 * part
                signs ^= 1 << (4 * part + find_flip(m + offset, w + offset, entry))
            word |= (signs & 127) << (7 * g)
        store_4_bytes(block + 66 + 4 * j, word)


@row_quantiser(DType.IQ3_S)
def quantise_iq3_s(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to an IQ3_S block at `block`.

    The magnitudes of 4 numbers are one of 512 code book entries, with any signs. Each 32 numbers have a 4-bit scale.
    """
    m, w, products = scratch + MAGNITUDES, scratch + WEIGHTS, scratch + PRODUCTS
    write_zero_padded_magnitudes(x, scratch, SUPER_BLOCK)
    write_error_weights(x, importance, w, SUPER_BLOCK)
    store_sign_bits(x, SUPER_BLOCK, block + 74)
    for j in range(BLOCKS):
        unit, base = find_largest_magnitude(m + 128 * j, 32) / S_TOP_LEVEL, LISTS + LIST_BYTES * 8 * j
        store_int(scratch + BASES + 4 * j, base)
        for q in range(8):
            at, to = 128 * j + 16 * q, scratch + base + LIST_BYTES * q
            write_s_list(m + at, w + at, products, unit, FIRST_PROBE, PROBE_STEP, table, table + S_ROWS, S_VECTORS, to)
        scale, _ = find_best_block_scale_and_error(scratch + base, 8)
        store_scalar(scratch + SCALES + 4 * j, scale)
    common = round_scalar_to_half(choose_common_super_block_scale(scratch, BLOCKS, 8, MAX_SCALE_CODE))
    store_lane_0_as_f16(block, splat(common))
    for j in range(BLOCKS):
        lists = scratch + LISTS + LIST_BYTES * 8 * j
        code = choose_block_scale_code(lists, 8, common, MAX_SCALE_CODE)
        store_byte(scratch + SCALE_CODES + j, code)
        high, scale = 0, common * single(2 * code + 1)
        for q in range(8):
            at = lists + LIST_BYTES * q
            entry = to_int(load_scalar(at + CODE_LIST + 4 * choose_list_lane_for_scale(at, scale)))
            number = find_entry_number_of_code(table, entry)
            store_byte(block + 2 + 8 * j + q, number & 255)
            high |= (number >> 8) << q
        store_byte(block + 66 + j, high)
    for j in range(4):
        low, upper = load_byte(scratch + SCALE_CODES + 2 * j), load_byte(scratch + SCALE_CODES + 2 * j + 1)
        store_byte(block + 106 + j, low | upper << 4)
