"""Quantisers of Q1_0, Q2_0 and NVFP4: signs, codes from -1 to 2, and 4-bit floats with an 8-bit float as their scale.

Q1_0 has the least squares scale. The scales of the other types are the ones with the smallest weighted error.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .....graph.dtypes import DType
from .....ops.block_layouts import FP4_VALUES_TIMES_2, HALF_OF_E4M3
from ...compilation.compiler import subroutine
from ...simd.candidate_lanes import (
    find_first_lane_equal_to,
    lane_numbers,
    round_scalar_to_half,
    select_lane,
    to_int,
    to_scalar,
)
from ...simd.half_memory import store_lane_0_as_f16
from ...simd.vectors import (
    LANES,
    absolute,
    add,
    clamp_max,
    clamp_min,
    div,
    fma,
    gather_lanes,
    greater_bitmask,
    lane_max,
    lane_min,
    lane_sum,
    load,
    load_byte,
    load_four,
    load_scalar,
    mul,
    round_small_floats_to_int,
    splat,
    splat_from,
    store_byte,
    store_u8_lanes,
    sub,
    where_less,
    zeros,
)
from .block_loop import row_quantiser
from .code_blocks import CELL_COUNT, look_up_nearest_values_or_indices, make_nearest_value_table
from .scale_search import (
    ONE,
    ZERO,
    make_8_inverse_scales_per_peak,
    quantise_to_byte_codes,
    search_scale,
    single,
    write_error_weights,
)
from .small_blocks import compute_reciprocal_or_zero
from .super_blocks import CODES, WEIGHTS

Q1_BLOCK, Q2_BLOCK, FP4_BLOCK = 128, 64, 64
SCALE_TABLE = 8 * CELL_COUNT
"""Offset in the table of NVFP4 of the scales by their code, float32."""
MAX_SCALE_CODE, LOWEST_STEP, LARGEST_FP4 = 126, 10, single(12)
"""The largest code of a scale; the codes of candidates below the scale of the range; and twice the largest float."""


@cache
def make_nvfp4_value_and_scale_table() -> np.ndarray:
    """Return the lookup table of 4-bit floats (see `make_nearest_value_table`), and the scale of each code below
    127.
    """
    return np.concatenate([make_nearest_value_table(FP4_VALUES_TIMES_2), HALF_OF_E4M3[: MAX_SCALE_CODE + 1]]).astype(
        np.float32
    )


@row_quantiser(DType.Q1_0)
def quantise_q1_0(x, importance, scratch, table, block):
    """Quantise the 128 numbers at `x` to a Q1_0 block at `block`: a scale, and a sign for each number."""
    total, strength = zeros(), zeros()
    for k in range(0, Q1_BLOCK, LANES):
        v = load(x + 4 * k)
        w = load(importance + 4 * k) if importance != 0 else splat(ONE)
        total, strength = fma(w, absolute(v), total), add(strength, w)
        bits = greater_bitmask(zeros(), v) ^ 65535
        store_byte(block + 2 + k // 8, bits & 255)
        store_byte(block + 3 + k // 8, bits >> 8)
    store_lane_0_as_f16(block, splat(lane_sum(total) / lane_sum(strength)))


@row_quantiser(DType.Q2_0)
def quantise_q2_0(x, importance, scratch, table, block):
    """Quantise the 64 numbers at `x` to a Q2_0 block at `block`: a scale of any sign, and codes from -1 to 2."""
    low, high = -ONE, single(2)
    write_error_weights(x, importance, scratch + WEIGHTS, Q2_BLOCK)
    spread = make_8_inverse_scales_per_peak(low, high, single(0.8), single(0.12))
    scale = search_scale(x, scratch + WEIGHTS, Q2_BLOCK, low, high, spread, 4)
    scale = round_scalar_to_half(scale)
    store_lane_0_as_f16(block, splat(scale))
    quantise_to_byte_codes(x, Q2_BLOCK, scale, ZERO, low, high, scratch + CODES)
    for k in range(Q2_BLOCK // 4):
        four = load_four(scratch + CODES + 4 * k)
        store_byte(block + 2 + k, four & 3 | four >> 6 & 12 | four >> 12 & 48 | four >> 18 & 192)


@subroutine
def find_largest_scale_code_up_to(value, scales):
    """Return the largest code with a scale of at most `value`; `scales` is the address of the scales by code."""
    low, high = 0, MAX_SCALE_CODE + 1
    for _ in range(7):
        middle = (low + high) >> 1
        if load_scalar(scales + 4 * min(middle, MAX_SCALE_CODE)) <= value:
            low = middle
        else:
            high = middle
    return min(low, MAX_SCALE_CODE)


@subroutine
def choose_scale_code(x, w, table):
    """Return the code of the scale with which 16 numbers at `x`, weighted by `w`, have the smallest squared error."""
    largest = lane_max(absolute(load(x)))
    nearest = find_largest_scale_code_up_to(largest / LARGEST_FP4, table + SCALE_TABLE)
    codes = add(lane_numbers(), splat(to_scalar(nearest - LOWEST_STEP)))
    codes = clamp_max(clamp_min(codes, zeros()), splat(single(MAX_SCALE_CODE)))
    scales = gather_lanes(table + SCALE_TABLE, round_small_floats_to_int(mul(codes, splat(single(4)))))
    inverse, error = where_less(zeros(), scales, div(splat(ONE), scales), zeros()), zeros()
    for i in range(LANES):
        v = splat_from(x + 4 * i)
        difference = sub(mul(scales, look_up_nearest_values_or_indices(mul(v, inverse), table)), v)
        error = fma(mul(splat_from(w + 4 * i), difference), difference, error)
    return to_int(select_lane(codes, find_first_lane_equal_to(error, lane_min(error))))


@row_quantiser(DType.NVFP4)
def quantise_nvfp4(x, importance, scratch, table, block):
    """Quantise the 64 numbers at `x` to an NVFP4 block at `block`: 4-bit floats, and an 8-bit float as scale per 16."""
    write_error_weights(x, importance, scratch + WEIGHTS, FP4_BLOCK)
    for j in range(4):
        xj = x + 64 * j
        code = choose_scale_code(xj, scratch + WEIGHTS + 64 * j, table)
        store_byte(block + j, code)
        inverse = splat(compute_reciprocal_or_zero(load_scalar(table + SCALE_TABLE + 4 * code)))
        indices = look_up_nearest_values_or_indices(mul(load(xj), inverse), table + 4 * CELL_COUNT)
        store_u8_lanes(scratch + CODES, round_small_floats_to_int(indices))
        for k in range(8):
            high = load_byte(scratch + CODES + 8 + k)
            store_byte(block + 4 + 8 * j + k, load_byte(scratch + CODES + k) | high << 4)
