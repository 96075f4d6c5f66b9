"""Searches of scales and minima: 16 candidates at once, one in each lane, by the sum of weighted squared errors.

1. Candidates spread the numbers of a block over more or fewer codes than their range needs.
2. Each candidate rounds the numbers to codes. Scale and minimum become the least squares solution for them.
3. Step 2 is repeated. Its error never grows, because codes and solution are optimal for each other in turn.
4. The lane with the smallest error is selected.

Scales are stored as small integers times a common scale. `choose_scale_and_minimum_codes` compares the errors of the
integers that are nearest to the solution.
"""

from __future__ import annotations

import numpy as np

from ...compilation.compiler import Subroutine, subroutine
from ...simd.candidate_lanes import (
    find_first_lane_equal_to,
    lane_numbers,
    make_16_lane_constant,
    round_even,
    select_lane,
)
from ...simd.vectors import (
    LANES,
    absolute,
    add,
    clamp_max,
    clamp_min,
    div,
    fma,
    greater_bitmask,
    lane_max,
    lane_min,
    lane_sum,
    load,
    maximum,
    minimum,
    mul,
    negative,
    round_small_floats_to_int,
    splat,
    splat_from,
    square_root,
    store,
    store_byte,
    store_u8_lanes,
    sub,
    where_less,
    zeros,
)

single = np.float32
ZERO, ONE = single(0), single(1)
NO_FIT = np.float32(3e38)
"""The error of a candidate without a solution."""
RMS_SHARE = ONE
"""The share of the root mean square in the weights of numbers without importances."""
MIN_SPAN = np.float32(1e-15)
"""Blocks with a smaller range are stored as one value."""
scale_steps = make_16_lane_constant([-1, 0, 1] * 5 + [0])
minimum_steps = make_16_lane_constant([i // 3 - 2 for i in range(15)] + [3])
first_half = make_16_lane_constant([0] * 8 + [1] * 8)
half_numbers = make_16_lane_constant([*range(8)] * 2)


@subroutine
def store_sign_bits(x, n, to):
    """Store a bit for each of `n` float32 numbers at `x`, which is 1 for a number below zero; 16 numbers at a time."""
    for i in range(0, n, LANES):
        signs = greater_bitmask(zeros(), load(x + 4 * i))
        store_byte(to + i // 8, signs & 255)
        store_byte(to + i // 8 + 1, signs >> 8)


@subroutine
def write_error_weights(x, importance, to, n):
    """Write the weight of each number's squared error to `to`; numbers of larger magnitude have larger weights.

    Without importances a weight is ``abs(x) + rms``, where rms is the root mean square of the `n` numbers. With
    importances a weight is ``importance * sqrt(x**2 + rms**2)``.

    Args:
        x: address of `n` float32 numbers.
        importance: address of `n` float32 importances, or 0 if there are none.
        to: address for the `n` float32 weights.
        n: count of numbers.
    """
    total = zeros()
    for i in range(0, n, LANES):
        total = fma(load(x + 4 * i), load(x + 4 * i), total)
    mean = splat(lane_sum(total) / np.float32(n))
    if importance == 0:
        share = mul(square_root(mean), splat(RMS_SHARE))
        for i in range(0, n, LANES):
            store(to + 4 * i, add(absolute(load(x + 4 * i)), share))
    else:
        for i in range(0, n, LANES):
            v = load(x + 4 * i)
            store(to + 4 * i, mul(load(importance + 4 * i), square_root(fma(v, v, mean))))


@subroutine
def sum_weights(w, n):
    """Return the sum of the `n` float32 weights at address `w`."""
    total = zeros()
    for i in range(0, n, LANES):
        total = add(total, load(w + 4 * i))
    return lane_sum(total)


@subroutine
def make_inverse_scale_candidates(limit, first, step):
    """Return 16 candidates for the inverse scale of a block, one in each lane: ``limit * (first + step * lane)``.

    A candidate is an inverse scale times the peak of the block, which is the number of largest magnitude.
    """
    return mul(splat(limit), fma(lane_numbers(), splat(step), splat(first)))


@subroutine
def make_8_inverse_scales_per_peak(low, high, first, step):
    """Return 16 candidates for the inverse scale of a block: `low` and `high`, each times 8 factors.

    The factors are ``first + step * i`` for i from 0 to 7. A candidate is an inverse scale times the peak of the block,
    which is the number of largest magnitude.
    """
    limits = where_less(first_half(), splat(np.float32(0.5)), splat(low), splat(high))
    return mul(limits, fma(half_numbers(), splat(step), splat(first)))


@subroutine
def find_signed_peak(x, n):
    """Return the number of largest magnitude among `n` numbers at `x`, with its sign.

    The first of equal magnitudes is taken.
    """
    top = zeros()
    for i in range(0, n, LANES):
        top = maximum(top, absolute(load(x + 4 * i)))
    largest = lane_max(top)
    for i in range(0, n, LANES):
        lane = find_first_lane_equal_to(absolute(load(x + 4 * i)), largest)
        if lane < LANES:
            return select_lane(load(x + 4 * i), lane)
    return ZERO


@subroutine
def round_to_codes(v, low, high):
    """Round each lane to the nearest integer, clamped to the range from `low` to `high`."""
    return clamp_max(clamp_min(round_even(v), splat(low)), splat(high))


def make_search_best_scale(round_lanes: Subroutine) -> Subroutine:
    """Make a subroutine that finds the scale of a block with the smallest weighted squared error.

    Args:
        round_lanes: ``round_lanes(v, low, high)`` rounds each lane to the nearest code. The search passes its own
            arguments `low` and `high` on.
    """

    @subroutine
    def search(x, w, n, low, high, numerators, passes):
        """Return the scale d that minimises ``sum(w (x - d q)**2)`` over codes q; 0 if no scale fits.

        Args:
            x: address of `n` numbers.
            w: address of the weights of their squared errors.
            n: count of numbers.
            low: smallest code, for `round_lanes`.
            high: largest code, for `round_lanes`.
            numerators: one candidate in each lane: its inverse scale, multiplied by the peak of x.
            passes: count of alternations between rounding to codes and least squares solution.
        """
        peak = find_signed_peak(x, n)
        if abs(peak) < MIN_SPAN:
            return ZERO
        inverse = div(numerators, splat(peak))
        scale, fit = zeros(), zeros()
        for _ in range(passes):
            products, energy = zeros(), zeros()
            for i in range(n):
                xi = splat_from(x + 4 * i)
                q = round_lanes(mul(xi, inverse), low, high)
                wq = mul(splat_from(w + 4 * i), q)
                products, energy = fma(wq, xi, products), fma(wq, q, energy)
            scale = where_less(zeros(), energy, div(products, energy), zeros())
            fit = mul(scale, products)
            inverse = where_less(zeros(), fit, div(energy, products), inverse)
        best = lane_max(fit)
        if not best > ZERO:
            return ZERO
        return select_lane(scale, find_first_lane_equal_to(fit, best))

    return search


search_scale = make_search_best_scale(round_to_codes)


@subroutine
def search_scale_and_minimum(x, w, n, top, first, step, passes, signed):
    """Return the scale d and minimum m of a block with the smallest weighted squared error.

    They minimise ``sum(w (x - d q - m)**2)`` over integer codes q from 0 to `top`.

    Args:
        x: address of `n` numbers.
        w: address of the weights of their squared errors.
        n: count of numbers.
        top: largest code.
        first: the candidate in lane 0 divides the range of x into ``top * first`` steps.
        step: the candidate in each further lane has ``top * step`` steps more.
        passes: count of alternations between rounding to codes and least squares solution.
        signed: whether m may be positive.
    """
    v = load(x)
    smallest, largest, total, energy = v, v, zeros(), zeros()
    for i in range(0, n, LANES):
        v, wv = load(x + 4 * i), mul(load(x + 4 * i), load(w + 4 * i))
        smallest, largest = minimum(smallest, v), maximum(largest, v)
        total, energy = add(total, wv), fma(wv, v, energy)
    low, high, sum_x, sum_xx, sum_w = lane_min(smallest), lane_max(largest), lane_sum(total), lane_sum(energy), ZERO
    if low > ZERO and not signed:
        low = ZERO
    span = high - low
    if span < MIN_SPAN:
        return ZERO, low
    sum_w = sum_weights(w, n)
    sums_w, sums_x = splat(sum_w), splat(sum_x)
    inverse = mul(splat(top / span), fma(lane_numbers(), splat(step), splat(first)))
    scale, low_lanes, error = div(splat(ONE), inverse), splat(low), splat(NO_FIT)
    for _ in range(passes):
        offset = negative(mul(low_lanes, inverse))
        codes, code_energy, products = zeros(), zeros(), zeros()
        for i in range(n):
            xi = splat_from(x + 4 * i)
            q = round_to_codes(fma(xi, inverse, offset), ZERO, top)
            wq = mul(splat_from(w + 4 * i), q)
            codes, code_energy, products = add(codes, wq), fma(wq, q, code_energy), fma(wq, xi, products)
        determinant = sub(mul(sums_w, code_energy), mul(codes, codes))
        free_scale = div(sub(mul(sums_w, products), mul(sums_x, codes)), determinant)
        free_low = div(sub(mul(code_energy, sums_x), mul(codes, products)), determinant)
        if not signed:
            free_scale = where_less(zeros(), free_low, div(products, code_energy), free_scale)
            free_low = clamp_max(free_low, zeros())
        scale = where_less(zeros(), determinant, free_scale, zeros())
        low_lanes = where_less(zeros(), determinant, free_low, low_lanes)
        inverse = where_less(zeros(), scale, div(splat(ONE), scale), zeros())
        error = sub(splat(sum_xx), fma(scale, products, mul(low_lanes, sums_x)))
        error = where_less(zeros(), scale, error, splat(NO_FIT))
    best = lane_min(error)
    if best >= NO_FIT:
        return span / top, low
    lane = find_first_lane_equal_to(error, best)
    return select_lane(scale, lane), select_lane(low_lanes, lane)


@subroutine
def sum_weighted_errors_per_lane(x, w, n, scale, low, top):
    """Return the weighted squared error of each lane's candidate, which stores x as ``scale * code + low``.

    Args:
        x: address of `n` numbers.
        w: address of the weights of their squared errors.
        n: count of numbers.
        scale: scale of the candidate in each lane.
        low: minimum of the candidate in each lane.
        top: largest code; the smallest one is 0.
    """
    inverse = where_less(zeros(), scale, div(splat(ONE), scale), zeros())
    offset, error = negative(mul(low, inverse)), zeros()
    for i in range(n):
        xi = splat_from(x + 4 * i)
        q = round_to_codes(fma(xi, inverse, offset), ZERO, top)
        difference = sub(fma(scale, q, low), xi)
        error = fma(mul(splat_from(w + 4 * i), difference), difference, error)
    return error


@subroutine
def choose_scale_and_minimum_codes(x, w, n, top, common_scale, common_minimum, scale, low, limit):
    """Choose the integers that store the scale and the minimum of a block, with the smallest weighted squared error.

    16 pairs near the exact solution are compared: three scales with five minima, and one more minimum.

    Args:
        x: address of `n` numbers.
        w: address of the weights of their squared errors.
        n: count of numbers.
        top: largest code.
        common_scale: unit of the stored scale.
        common_minimum: unit of the stored minimum.
        scale: exact scale of the block.
        low: exact minimum of the block, 0 or less.
        limit: largest stored integer; the smallest one is 0.

    Returns:
        The integer of the scale and the integer of the minimum, as float32.
    """
    scale_code, minimum_code = splat(ZERO), splat(ZERO)
    if common_scale > ZERO:
        scale_code = add(round_even(splat(scale / common_scale)), scale_steps())
    if common_minimum > ZERO:
        minimum_code = add(round_even(splat(-low / common_minimum)), minimum_steps())
    scale_code = clamp_max(clamp_min(scale_code, zeros()), splat(limit))
    minimum_code = clamp_max(clamp_min(minimum_code, zeros()), splat(limit))
    lows = negative(mul(minimum_code, splat(common_minimum)))
    error = sum_weighted_errors_per_lane(x, w, n, mul(scale_code, splat(common_scale)), lows, top)
    lane = find_first_lane_equal_to(error, lane_min(error))
    return select_lane(scale_code, lane), select_lane(minimum_code, lane)


@subroutine
def quantise_to_byte_codes(x, n, scale, low, lowest, highest, to):
    """Quantise `n` numbers: write the nearest code of each number as one byte.

    A number x is stored as ``scale * code + low``.

    Args:
        x: address of the numbers.
        n: count of numbers.
        scale: scale of the codes.
        low: the number that code 0 means.
        lowest: smallest code; the byte is ``code - lowest``.
        highest: largest code.
        to: address for the bytes.
    """
    if scale != ZERO:
        inverse, offset = splat(ONE / scale), splat(-low / scale)
        for i in range(0, n, LANES):
            q = round_to_codes(fma(load(x + 4 * i), inverse, offset), lowest, highest)
            store_u8_lanes(to + i, round_small_floats_to_int(sub(q, splat(lowest))))
    else:
        for i in range(0, n, LANES):
            store_u8_lanes(to + i, round_small_floats_to_int(splat(-lowest)))


def make_choose_scale_code(round_lanes: Subroutine) -> Subroutine:
    """Make the subroutine that chooses the integer that stores the scale of a block, in units of a common scale.

    The choice has the smallest weighted squared error.

    Args:
        round_lanes: rounds each lane to the nearest code, as in `make_search_best_scale`.
    """

    @subroutine
    def choose(x, w, n, low, high, common_scale, scale, steps, smallest, limit):
        """Return the stored integer of `scale` with the smallest weighted squared error, as float32.

        Args:
            x: address of `n` numbers.
            w: address of the weights of their squared errors.
            n: count of numbers.
            low: smallest code, for `round_lanes`.
            high: largest code, for `round_lanes`.
            common_scale: unit of the stored integer.
            scale: exact scale of the block.
            steps: difference of each lane's candidate from the nearest integer.
            smallest: smallest stored integer.
            limit: largest stored integer.
        """
        if common_scale == ZERO:
            return ZERO
        code = round_to_codes(add(round_even(splat(scale / common_scale)), steps), smallest, limit)
        scales, error = mul(code, splat(common_scale)), zeros()
        inverse = where_less(zeros(), absolute(scales), div(splat(ONE), scales), zeros())
        for i in range(n):
            xi = splat_from(x + 4 * i)
            difference = sub(mul(scales, round_lanes(mul(xi, inverse), low, high)), xi)
            error = fma(mul(splat_from(w + 4 * i), difference), difference, error)
        return select_lane(code, find_first_lane_equal_to(error, lane_min(error)))

    return choose


choose_signed_scale = make_choose_scale_code(round_to_codes)
