"""Quantisers of IQ2_XXS, IQ2_XS and IQ2_S: magnitudes of eight numbers are an entry of a code book, and signs are bits.

`lattice_search` has the search. Layouts: ``ggml-common.h`` of llama.cpp, as in `hocket.ops.quantisation`.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np

from .....graph.dtypes import DType
from ...compilation.compiler import Subroutine, subroutine
from ...simd.candidate_lanes import make_16_lane_constant, round_scalar_to_half, to_int
from ...simd.half_memory import store_lane_0_as_f16
from ...simd.vectors import (
    LANES,
    load_byte,
    load_int,
    load_scalar,
    splat,
    store_byte,
    store_int,
    store_scalar,
)
from .block_loop import row_quantiser
from .lattice_search import (
    BASES,
    CODE_LIST,
    ENTRIES,
    LIST_BYTES,
    LISTS,
    MAGNITUDES,
    MINUS_TWO,
    PRODUCTS,
    SCALE_CODES,
    SCALES,
    SIGN_BYTES,
    WEIGHTS,
    choose_block_scale_code,
    choose_common_super_block_scale,
    choose_list_lane_for_scale,
    find_best_block_scale_and_error,
    find_entry_number_of_code,
    find_largest_magnitude,
    has_odd_bit_count,
    make_find_best_octet_entry_per_scale,
    make_find_cheapest_sign_flip,
    store_4_bytes,
    write_zero_padded_magnitudes,
)
from .lattice_tables import IQ2_LEVELS, LatticeTableLayout, make_nearest_entry_and_number_table
from .scale_search import ZERO, single, store_sign_bits, write_error_weights
from .super_blocks import SUPER_BLOCK

FIRST_PROBE, PROBE_STEP = single(0.42), single(0.07)
TOP_LEVEL, MAX_SCALE_CODE = single(IQ2_LEVELS[-1]), 15
LOW_THRESHOLD, HIGH_THRESHOLD = ((a + b) / 2 for a, b in pairwise(IQ2_LEVELS))
low_levels = make_16_lane_constant([*IQ2_LEVELS, 0.0] * 4)
high_levels = make_16_lane_constant([level for level in (*IQ2_LEVELS, 0.0) for _ in range(4)])
IQ2_XXS, IQ2_XS, IQ2_S = (
    LatticeTableLayout(dtype, IQ2_LEVELS, 8, 2, count)
    for dtype, count in ((DType.IQ2_XXS, 64), (DType.IQ2_XS, 64), (DType.IQ2_S, 64))
)
write_even_list, write_free_list = (
    make_find_best_octet_entry_per_scale(
        low_levels, high_levels, LOW_THRESHOLD, HIGH_THRESHOLD, flips=flips, has_ones=True
    )
    for flips in (True, False)
)
find_flip = make_find_cheapest_sign_flip(low_levels, 2, 8)


@cache
def make_iq2_xxs_table() -> np.ndarray:
    return make_nearest_entry_and_number_table(IQ2_XXS)


@cache
def make_iq2_xs_table() -> np.ndarray:
    return make_nearest_entry_and_number_table(IQ2_XS)


@cache
def make_iq2_s_table() -> np.ndarray:
    return make_nearest_entry_and_number_table(IQ2_S)


def make_choose_iq2_entries_and_scales(
    write_list: Subroutine, lattice: LatticeTableLayout, groups: int, has_even_signs: bool
) -> Subroutine:
    """Make the subroutine that chooses the code-book entries, signs and scales of 256 numbers.

    Args:
        write_list: lists the best entries of a group (`make_find_best_octet_entry_per_scale`).
        lattice: the layout of the search table.
        groups: count of groups of 8 numbers that share a scale.
        has_even_signs: whether an even number of signs of a group are negative.
    """
    blocks, rows_offset, vectors = SUPER_BLOCK // (8 * groups), lattice.rows_offset, lattice.neighbour_count // LANES

    @subroutine
    def search(x, importance, scratch, table, d):
        """Write the entries, signs and integers of scales to the scratch memory, and the common scale to `d`.

        Args:
            x: address of 256 numbers.
            importance: address of the importances of their columns, or 0.
            scratch: address of the scratch memory.
            table: address of the table of `make_nearest_entry_and_number_table`.
            d: address for the common scale, float16.
        """
        m, w = scratch + MAGNITUDES, scratch + WEIGHTS
        write_zero_padded_magnitudes(x, scratch, SUPER_BLOCK)
        write_error_weights(x, importance, w, SUPER_BLOCK)
        store_sign_bits(x, SUPER_BLOCK, scratch + SIGN_BYTES)
        for j in range(blocks):
            unit = find_largest_magnitude(m + 32 * groups * j, 8 * groups) / TOP_LEVEL
            base = LISTS + LIST_BYTES * groups * j
            store_int(scratch + BASES + 4 * j, base)
            for g in range(groups):
                k = groups * j + g
                flip = ZERO
                if has_even_signs:
                    flip = MINUS_TWO * single(has_odd_bit_count(load_byte(scratch + SIGN_BYTES + k)))
                write_list(
                    m + 32 * k,
                    w + 32 * k,
                    scratch + PRODUCTS,
                    unit,
                    FIRST_PROBE,
                    PROBE_STEP,
                    flip,
                    table,
                    table + rows_offset,
                    vectors,
                    scratch + base + LIST_BYTES * g,
                )
            scale, _ = find_best_block_scale_and_error(scratch + base, groups)
            store_scalar(scratch + SCALES + 4 * j, scale)
        common = round_scalar_to_half(choose_common_super_block_scale(scratch, blocks, groups, MAX_SCALE_CODE))
        store_lane_0_as_f16(d, splat(common))
        for j in range(blocks):
            lists = scratch + LISTS + LIST_BYTES * groups * j
            code = choose_block_scale_code(lists, groups, common, MAX_SCALE_CODE)
            store_byte(scratch + SCALE_CODES + j, code)
            scale = common * single(2 * code + 1)
            for g in range(groups):
                k, at = groups * j + g, lists + LIST_BYTES * g
                entry = to_int(load_scalar(at + CODE_LIST + 4 * choose_list_lane_for_scale(at, scale)))
                store_int(scratch + ENTRIES + 4 * k, find_entry_number_of_code(table, entry))
                if has_even_signs:
                    signs = load_byte(scratch + SIGN_BYTES + k)
                    if has_odd_bit_count(signs):
                        store_byte(scratch + SIGN_BYTES + k, signs ^ (1 << find_flip(m + 32 * k, w + 32 * k, entry)))

    return search


search_iq2_xxs = make_choose_iq2_entries_and_scales(write_even_list, IQ2_XXS, 4, True)
search_iq2_xs = make_choose_iq2_entries_and_scales(write_even_list, IQ2_XS, 2, True)
search_iq2_s = make_choose_iq2_entries_and_scales(write_free_list, IQ2_S, 2, False)


@subroutine
def store_4_bit_scale_pairs(scratch, y):
    """Store 16 scales of 4 bits from the scratch memory in 8 bytes at `y`; two neighbours share a byte."""
    for j in range(8):
        low, high = load_byte(scratch + SCALE_CODES + 2 * j), load_byte(scratch + SCALE_CODES + 2 * j + 1)
        store_byte(y + j, low | high << 4)


@row_quantiser(DType.IQ2_XXS)
def quantise_iq2_xxs(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to an IQ2_XXS block at `block`.

    The magnitudes of 8 numbers are one of 256 code book entries. Each 32 numbers have a 4-bit scale.
    """
    search_iq2_xxs(x, importance, scratch, table, block)
    for j in range(8):
        word = load_byte(scratch + SCALE_CODES + j) << 28
        for g in range(4):
            store_byte(block + 2 + 8 * j + g, load_int(scratch + ENTRIES + 16 * j + 4 * g))
            word |= (load_byte(scratch + SIGN_BYTES + 4 * j + g) & 127) << (7 * g)
        store_4_bytes(block + 6 + 8 * j, word)


@row_quantiser(DType.IQ2_XS)
def quantise_iq2_xs(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to an IQ2_XS block at `block`.

    The magnitudes of 8 numbers are one of 512 code book entries. Each 16 numbers have a 4-bit scale.
    """
    search_iq2_xs(x, importance, scratch, table, block)
    for k in range(32):
        signs = load_byte(scratch + SIGN_BYTES + k) & 127
        word = load_int(scratch + ENTRIES + 4 * k) | signs << 9
        store_byte(block + 2 + 2 * k, word & 255)
        store_byte(block + 3 + 2 * k, word >> 8)
    store_4_bit_scale_pairs(scratch, block + 66)


@row_quantiser(DType.IQ2_S)
def quantise_iq2_s(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to an IQ2_S block at `block`.

    The magnitudes of 8 numbers are one of 1024 code book entries, with any signs. Each 16 numbers have a 4-bit scale.
    """
    search_iq2_s(x, importance, scratch, table, block)
    for j in range(8):
        high = 0
        for g in range(4):
            k = 4 * j + g
            entry = load_int(scratch + ENTRIES + 4 * k)
            store_byte(block + 2 + k, entry & 255)
            store_byte(block + 34 + k, load_byte(scratch + SIGN_BYTES + k))
            high |= (entry >> 8) << (2 * g)
        store_byte(block + 66 + j, high)
    store_4_bit_scale_pairs(scratch, block + 74)
