"""The search of code-book entries and of scales for blocks of vectors, for IQ1, IQ2 and IQ3 types.

A block has one scale s. A group of 8 numbers x with weights w is stored as s times an entry g, or two entries of 4
numbers. Its error is ``s**2 A + s C`` and a constant, with ``A = sum(w g**2)`` and ``C = -2 sum(w x g)``. A and C do
not depend on s, so the best entries for many scales cost little:

1. There are 16 *probes*, scales from about half to 1.5 times the scale of the largest number. For a probe, the numbers
   are rounded to a point, and the nearest entries of the point are compared. The best entry of each probe is a lane of
   the *list* of the group. The last lane is an entry of ones, for numbers of one magnitude. Sums of table look-ups give
   A and C of 16 entries at once.
2. The scale of a block is the least squares solution for the lane with the smallest error, in turn with the best lane
   of each list for this solution.
3. Scales are stored as ``d (2 l + 1)`` with a common d and small integers l. 16 candidates of d are compared by the
   error of the whole super-block, twice, and then all integers l.

If the signs of a group have odd parity and the format has even ones only, then one sign is flipped. This adds
``4 w |x| g`` to the error, divided by s. The smallest of them is added to C.
"""

from __future__ import annotations

from ...compilation.compiler import Subroutine, subroutine
from ...simd.candidate_lanes import (
    find_first_lane_equal_to,
    lane_numbers,
    load_u16,
    load_u16_lanes,
    look_up_lanes_in_16_numbers,
    make_16_lane_constant,
    round_even,
    select_lane,
    to_int,
    to_scalar,
)
from ...simd.vectors import (
    LANES,
    Intrinsic,
    absolute,
    add,
    clamp_max,
    clamp_min,
    div,
    fma,
    greater_bitmask,
    lane_max,
    lane_min,
    load,
    load_int,
    load_scalar,
    maximum,
    minimum,
    mul,
    round_small_floats_to_int,
    shift_right,
    splat,
    splat_from,
    splat_int,
    store,
    store_byte,
    store_scalar,
    where_less,
    zeros,
)
from .lattice_tables import POWERS_BYTES
from .scale_search import NO_FIT, ZERO, single

MAGNITUDES, WEIGHTS, PRODUCTS, SCALES, BASES = 0, 1152, 2304, 2368, 2432
ENTRIES, SIGN_BYTES, SCALE_CODES, LISTS = 2496, 2752, 2784, 2816
TEMPORARY = LISTS + 64 * 256
"""Offsets in the scratch memory of a thread.

`MAGNITUDES` and `WEIGHTS` have the numbers of a super-block, `SCALES` and `BASES` the scales and the list offsets of
blocks. `TEMPORARY` has lists of parts of a group.
"""
LATTICE_SCRATCH_BYTES = TEMPORARY + 4 * 256
LIST_BYTES, PRODUCT_LIST, CODE_LIST, FLAG_LIST = 256, 64, 128, 192
"""A list has four vectors: A, C, the codes of entries, and a flag."""
HALF, TWO, MINUS_TWO = single(0.5), single(2), single(-2)
COMMON_FIRST, COMMON_STEP, FINE_FIRST, FINE_STEP = single(0.85), single(0.03), single(0.9775), single(0.003)
"""Factors of the candidates of a common scale."""


@subroutine
def sum_look_ups_in_four_tables(codes, shift, t0, t1, t2, t3):
    """Return the sum of four table look-ups for each of 16 codes: 4 bits from bit ``i * shift`` on index table i."""
    first = add(
        look_up_lanes_in_16_numbers(t0, codes), look_up_lanes_in_16_numbers(t1, shift_right(codes, splat_int(shift)))
    )
    third = look_up_lanes_in_16_numbers(t2, shift_right(codes, splat_int(2 * shift)))
    return add(first, add(third, look_up_lanes_in_16_numbers(t3, shift_right(codes, splat_int(3 * shift)))))


@subroutine
def find_largest_of_four_look_ups(codes, shift, t0, t1, t2, t3):
    """Return the largest of four table look-ups for each of 16 codes, indexed as in `sum_look_ups_in_four_tables`."""
    first = maximum(
        look_up_lanes_in_16_numbers(t0, codes), look_up_lanes_in_16_numbers(t1, shift_right(codes, splat_int(shift)))
    )
    third = look_up_lanes_in_16_numbers(t2, shift_right(codes, splat_int(2 * shift)))
    return maximum(first, maximum(third, look_up_lanes_in_16_numbers(t3, shift_right(codes, splat_int(3 * shift)))))


@subroutine
def store_best_code_of_all_lanes(row, error, vector_numbers, to):
    """Store the code at `row` with the smallest error; lane i is the error of code ``16 * vector_numbers[i] + i``."""
    lane = find_first_lane_equal_to(error, lane_min(error))
    entry = to_int(select_lane(vector_numbers, lane)) * LANES + lane
    store_scalar(to, to_scalar(load_u16(row + 2 * entry)))


def make_find_best_entry_for_four_scales(flips: bool) -> Subroutine:
    """Make the subroutine that finds the entry with the least error in a row of entries, for each of four scales.

    With `flips` the error includes the cheapest flip of one sign, which makes the number of negative signs even.
    """

    @subroutine
    def search_row(row, vectors, shift, a0, a1, a2, a3, c0, c1, c2, c3, f0, f1, f2, f3, flip, scale, step, to):
        """Store the codes of the best entries for the scales ``scale + step * i``, for i from 0 to 3.

        Args:
            row: address of the codes of the entries.
            vectors: count of vectors of 16 codes.
            shift: distance of the indices of tables in a code, in bits.
            a0, a1, a2, a3: tables of A.
            c0, c1, c2, c3: tables of C.
            f0, f1, f2, f3: tables of the products of flips.
            flip: the factor of the largest product of a flip.
            scale: the first scale.
            step: difference of the scales.
            to: address for four codes, float32.
        """
        s0, s1, s2, s3 = splat(scale), splat(scale + step), splat(scale + TWO * step), splat(scale + single(3) * step)
        best0, best1, best2, best3 = splat(NO_FIT), splat(NO_FIT), splat(NO_FIT), splat(NO_FIT)
        at0, at1, at2, at3 = zeros(), zeros(), zeros(), zeros()
        for v in range(vectors):
            codes = load_u16_lanes(row + 2 * LANES * v)
            a = sum_look_ups_in_four_tables(codes, shift, a0, a1, a2, a3)
            c = sum_look_ups_in_four_tables(codes, shift, c0, c1, c2, c3)
            if flips:
                c = fma(splat(flip), find_largest_of_four_look_ups(codes, shift, f0, f1, f2, f3), c)
            number = splat(to_scalar(v))
            e0, e1, e2, e3 = fma(s0, a, c), fma(s1, a, c), fma(s2, a, c), fma(s3, a, c)
            at0, best0 = where_less(e0, best0, number, at0), minimum(e0, best0)
            at1, best1 = where_less(e1, best1, number, at1), minimum(e1, best1)
            at2, best2 = where_less(e2, best2, number, at2), minimum(e2, best2)
            at3, best3 = where_less(e3, best3, number, at3), minimum(e3, best3)
        store_best_code_of_all_lanes(row, best0, at0, to)
        store_best_code_of_all_lanes(row, best1, at1, to + 4)
        store_best_code_of_all_lanes(row, best2, at2, to + 8)
        store_best_code_of_all_lanes(row, best3, at3, to + 12)

    return search_row


@subroutine
def make_scaled_pair_sums(first, second, low, high):
    """Return the table ``first * low[i] + second * high[i]`` as 16 lanes; `first` and `second` are addresses."""
    return fma(splat_from(second), high, mul(splat_from(first), low))


@subroutine
def make_scaled_pair_maxima(first, second, low, high):
    """Return the table ``max(first * low[i], second * high[i])`` as 16 lanes; `first` and `second` are addresses."""
    return maximum(mul(splat_from(first), low), mul(splat_from(second), high))


def make_find_best_octet_entry_per_scale(
    low_levels: Intrinsic,
    high_levels: Intrinsic,
    low_threshold: float,
    high_threshold: float,
    *,
    flips: bool,
    has_ones: bool,
) -> Subroutine:
    """Make the subroutine that finds the code-book entry with the least error for 8 numbers, at each of 16 scales.

    Args:
        low_levels: 16 lanes: the level (value in an entry) for the two low bits of the lane number.
        high_levels: 16 lanes: the level for the two high bits of the lane number.
        low_threshold: numbers above it, in units of the scale, are rounded to the second level.
        high_threshold: numbers above it are rounded to the third level.
        flips: whether groups with odd parity of signs have a flipped sign.
        has_ones: whether code 0 is an entry of ones, which is the last lane of each list.
    """
    low_limit, high_limit = single(low_threshold), single(high_threshold)
    search_row = make_find_best_entry_for_four_scales(flips)

    @subroutine
    def write_list(m, w, products, unit, first, step, flip, table, rows, vectors, to):
        """Write the list of a group.

        Args:
            m: address of 8 numbers; 16 are read.
            w: address of their weights; 16 are read.
            products: address for 16 products.
            unit: unit of the probes.
            first: the first probe in units.
            step: difference of the probes in units.
            flip: -2 if one sign has to be flipped, else 0.
            table: address of the table of `make_nearest_entry_and_number_table`.
            rows: address of the rows.
            vectors: count of vectors of 16 codes in a row.
            to: address of the list.
        """
        low, high, p = low_levels(), high_levels(), products
        low_energy, high_energy = mul(low, low), mul(high, high)
        numbers = load(m)
        store(p, mul(mul(numbers, load(w)), splat(MINUS_TWO)))
        a0, a1 = (
            make_scaled_pair_sums(w, w + 4, low_energy, high_energy),
            make_scaled_pair_sums(w + 8, w + 12, low_energy, high_energy),
        )
        a2 = make_scaled_pair_sums(w + 16, w + 20, low_energy, high_energy)
        a3 = make_scaled_pair_sums(w + 24, w + 28, low_energy, high_energy)
        c0, c1 = make_scaled_pair_sums(p, p + 4, low, high), make_scaled_pair_sums(p + 8, p + 12, low, high)
        c2, c3 = make_scaled_pair_sums(p + 16, p + 20, low, high), make_scaled_pair_sums(p + 24, p + 28, low, high)
        f0, f1 = make_scaled_pair_maxima(p, p + 4, low, high), make_scaled_pair_maxima(p + 8, p + 12, low, high)
        f2, f3 = make_scaled_pair_maxima(p + 16, p + 20, low, high), make_scaled_pair_maxima(p + 24, p + 28, low, high)
        for part in range(4):
            scale = unit * (first + step * to_scalar(4 * part))
            middle = scale + unit * step * single(1.5)
            above = greater_bitmask(numbers, splat(low_limit * middle)) & 255
            far_above = greater_bitmask(numbers, splat(high_limit * middle)) & 255
            point = load_int(table + 4 * above) + load_int(table + 4 * far_above)
            row, codes_to = rows + 2 * LANES * vectors * point, to + CODE_LIST + 16 * part
            search_row(
                row, vectors, 4, a0, a1, a2, a3, c0, c1, c2, c3, f0, f1, f2, f3, flip, scale, unit * step, codes_to
            )
        if has_ones:
            store_scalar(to + CODE_LIST + 4 * (LANES - 1), ZERO)
        codes = round_small_floats_to_int(load(to + CODE_LIST))
        c = sum_look_ups_in_four_tables(codes, 4, c0, c1, c2, c3)
        if flips:
            c = fma(splat(flip), find_largest_of_four_look_ups(codes, 4, f0, f1, f2, f3), c)
        store(to, sum_look_ups_in_four_tables(codes, 4, a0, a1, a2, a3))
        store(to + PRODUCT_LIST, c)

    return write_list


def make_find_best_quad_entry_per_scale(levels: Intrinsic, flips: bool) -> Subroutine:
    """Make the subroutine that finds the code-book entry with the least error for 4 numbers, at each of 16 scales.

    Args:
        levels: 16 lanes: the level (value in an entry) for the three low bits of the lane number.
        flips: whether one sign is flipped.
    """
    search_row = make_find_best_entry_for_four_scales(flips)

    @subroutine
    def write_list(m, w, products, unit, first, step, table, rows, vectors, to):
        """Write the list of 4 numbers; arguments as for `make_find_best_octet_entry_per_scale`."""
        low, p, flip = levels(), products, MINUS_TWO
        energy, numbers = mul(low, low), load(m)
        store(p, mul(mul(numbers, load(w)), splat(MINUS_TWO)))
        a0, a1 = mul(splat_from(w), energy), mul(splat_from(w + 4), energy)
        a2, a3 = mul(splat_from(w + 8), energy), mul(splat_from(w + 12), energy)
        c0, c1 = mul(splat_from(p), low), mul(splat_from(p + 4), low)
        c2, c3 = mul(splat_from(p + 8), low), mul(splat_from(p + 12), low)
        for part in range(4):
            scale = unit * (first + step * to_scalar(4 * part))
            middle = scale + unit * step * single(1.5)
            point = 0
            if middle > ZERO:
                half, top = HALF / middle, single(7)
                for i in range(4):
                    level = min(max(load_scalar(m + 4 * i) * half, ZERO), top)
                    point += to_int(level) << (3 * i)
            row, codes_to = rows + 2 * LANES * vectors * point, to + CODE_LIST + 16 * part
            search_row(
                row, vectors, 3, a0, a1, a2, a3, c0, c1, c2, c3, c0, c1, c2, c3, flip, scale, unit * step, codes_to
            )
        store_scalar(to + CODE_LIST + 4 * (LANES - 1), ZERO)
        codes = round_small_floats_to_int(load(to + CODE_LIST))
        c = sum_look_ups_in_four_tables(codes, 3, c0, c1, c2, c3)
        if flips:
            c = fma(splat(flip), find_largest_of_four_look_ups(codes, 3, c0, c1, c2, c3), c)
        store(to, sum_look_ups_in_four_tables(codes, 3, a0, a1, a2, a3))
        store(to + PRODUCT_LIST, c)

    return write_list


@subroutine
def compute_16_scale_probes(unit, first, step):
    """Return the 16 candidate scales (probes) of a block, one in each lane: ``unit * (first + step * lane)``."""
    return mul(splat(unit), fma(lane_numbers(), splat(step), splat(first)))


@subroutine
def find_best_block_scale_and_error(lists, groups):
    """Return the scale with the least squared error for a block, and this error without the part of ``sum(w x**2)``.

    Args:
        lists: address of the lists of the groups: the best entries of each group for 16 scales.
        groups: count of groups.
    """
    a, c = zeros(), zeros()
    for g in range(groups):
        at = lists + LIST_BYTES * g
        a, c = add(a, load(at)), add(c, load(at + PRODUCT_LIST))
    solution = where_less(zeros(), a, mul(div(c, a), splat(-HALF)), zeros())
    error = where_less(zeros(), solution, mul(mul(c, solution), splat(HALF)), zeros())
    smallest = lane_min(error)
    if smallest < ZERO:
        scale = select_lane(solution, find_first_lane_equal_to(error, smallest))
        for _ in range(2):
            energy, products = ZERO, ZERO
            for g in range(groups):
                at = lists + LIST_BYTES * g
                e = fma(splat(scale), load(at), load(at + PRODUCT_LIST))
                lane = find_first_lane_equal_to(e, lane_min(e))
                energy += load_scalar(at + 4 * lane)
                products += load_scalar(at + PRODUCT_LIST + 4 * lane)
            if energy > ZERO and products < ZERO:
                scale, smallest = -HALF * products / energy, -HALF * HALF * products * products / energy
        return scale, smallest
    return ZERO, ZERO


@subroutine
def compute_block_error_per_scale_lane(lists, groups, scales):
    """Return a block's squared error for the scale in each lane of `scales`, with the best entries of `lists`."""
    total = zeros()
    for g in range(groups):
        at, best = lists + LIST_BYTES * g, splat(NO_FIT)
        for i in range(LANES):
            best = minimum(best, fma(scales, splat_from(at + 4 * i), splat_from(at + PRODUCT_LIST + 4 * i)))
        total = add(total, best)
    return mul(total, scales)


@subroutine
def compute_super_block_error_per_scale_lane(scratch, blocks, groups, commons, top):
    """Return a super-block's squared error for each lane's common scale; each block has the best of three integers."""
    total, limit = zeros(), splat(to_scalar(top))
    for j in range(blocks):
        lists = scratch + load_int(scratch + BASES + 4 * j)
        nearest = mul(div(splat_from(scratch + SCALES + 4 * j), commons), splat(HALF))
        nearest = round_even(add(nearest, splat(-HALF)))
        best = splat(NO_FIT)
        for k in range(-1, 2):
            code = clamp_max(clamp_min(add(nearest, splat(to_scalar(k))), zeros()), limit)
            scales = mul(commons, fma(code, splat(TWO), splat(single(1))))
            best = minimum(best, compute_block_error_per_scale_lane(lists, groups, scales))
        total = add(total, best)
    return total


@subroutine
def choose_common_super_block_scale(scratch, blocks, groups, top):
    """Return the common scale with the smallest error for a super-block; 0 if all scales are 0.

    Args:
        scratch: address of the scratch memory with scales, lists, and the offsets of the lists of each block.
        blocks: count of blocks.
        groups: count of groups in a block.
        top: the largest integer of a scale.
    """
    largest = ZERO
    for j in range(blocks):
        largest = max(largest, load_scalar(scratch + SCALES + 4 * j))
    if not largest > ZERO:
        return ZERO
    common = largest / to_scalar(2 * top + 1)
    for stage in range(2):
        first, step = (COMMON_FIRST, COMMON_STEP) if stage == 0 else (FINE_FIRST, FINE_STEP)
        commons = compute_16_scale_probes(common, first, step)
        error = compute_super_block_error_per_scale_lane(scratch, blocks, groups, commons, top)
        common = select_lane(commons, find_first_lane_equal_to(error, lane_min(error)))
    return common


@subroutine
def choose_block_scale_code(lists, groups, common, top):
    """Return the integer l from 0 to `top` for which the block scale ``common * (2 l + 1)`` has the smallest error."""
    scales = mul(splat(common), fma(lane_numbers(), splat(TWO), splat(single(1))))
    error = compute_block_error_per_scale_lane(lists, groups, scales)
    error = where_less(splat(to_scalar(top) + HALF), lane_numbers(), splat(NO_FIT), error)
    return find_first_lane_equal_to(error, lane_min(error))


@subroutine
def choose_list_lane_for_scale(at, scale):
    """Return the number of the candidate with the smallest error for a scale, in a group's list of 16 at `at`."""
    e = fma(splat(scale), load(at), load(at + PRODUCT_LIST))
    return find_first_lane_equal_to(e, lane_min(e))


@subroutine
def find_entry_number_of_code(table, code):
    """Look up the number of a code-book entry by its code, in the table of `make_nearest_entry_and_number_table`."""
    return load_u16(table + POWERS_BYTES + 2 * code)


def make_find_cheapest_sign_flip(levels: Intrinsic, bits: int, count: int) -> Subroutine:
    """Make the subroutine that finds the position in an entry at which a flipped sign adds the least error.

    Args:
        levels: 16 lanes: the level (value in an entry) for the low bits of the lane number.
        bits: bits of a number in a code.
        count: numbers of an entry.
    """
    shifts, limit = make_16_lane_constant([bits * (i % count) for i in range(LANES)]), single(count - 0.5)

    @subroutine
    def find_flip(m, w, code):
        """Return the i with the smallest ``w[i] * m[i] * level``; `code` has the levels of the entry."""
        digits = shift_right(splat_int(code), round_small_floats_to_int(shifts()))
        costs = mul(look_up_lanes_in_16_numbers(levels(), digits), mul(load(m), load(w)))
        costs = where_less(lane_numbers(), splat(limit), costs, splat(NO_FIT))
        return find_first_lane_equal_to(costs, lane_min(costs))

    return find_flip


@subroutine
def has_odd_bit_count(bits):
    """Return 1 if an odd number of the 8 bits are set, else 0."""
    bits ^= bits >> 4
    bits ^= bits >> 2
    return (bits ^ bits >> 1) & 1


@subroutine
def write_zero_padded_magnitudes(x, scratch, count):
    """Write the magnitudes of `count` numbers at `x` to the scratch memory; pad them and their weights with zeros."""
    for i in range(0, count, LANES):
        store(scratch + MAGNITUDES + 4 * i, absolute(load(x + 4 * i)))
    store(scratch + MAGNITUDES + 4 * count, zeros())
    store(scratch + WEIGHTS + 4 * count, zeros())


@subroutine
def find_largest_magnitude(m, count):
    """Return the largest magnitude of `count` numbers at `m`. `count` is a multiple of 16."""
    top = zeros()
    for i in range(0, count, LANES):
        top = maximum(top, absolute(load(m + 4 * i)))
    return lane_max(top)


@subroutine
def store_4_bytes(to, word):
    """Store the low 32 bits of the integer `word` as four bytes at `to`."""
    for k in range(4):
        store_byte(to + k, (word >> (8 * k)) & 255)
