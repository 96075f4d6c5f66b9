"""Quantisers of Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0, which are blocks of 32 numbers with their own scale, and of BF16.

Without importances the range of a block determines its scale, and the bytes are the result of ``quantize_row_*_ref`` in
ggml-quants.c. With importances, which may be equal, the scale has the smallest weighted error.
"""

from __future__ import annotations

from .....graph.dtypes import DType
from ...compilation.compiler import kernel, subroutine
from ...simd.half_memory import store_first_bf16, store_lane_0_as_f16
from ...simd.vectors import (
    LANES,
    absolute,
    add,
    and_int,
    greater_bitmask,
    lane_max,
    lane_min,
    load,
    load_first_lanes,
    load_u8_as_i32,
    maximum,
    minimum,
    mul,
    or_int,
    round_away,
    round_small_floats_to_int,
    round_to_zero,
    shift_left,
    splat,
    splat_int,
    store_byte,
    store_u8_lanes,
    sub,
    to_float,
)
from ...steps.partition import compute_thread_range
from .block_loop import ARGS, row_quantiser
from .scale_search import (
    ONE,
    ZERO,
    find_signed_peak,
    make_8_inverse_scales_per_peak,
    quantise_to_byte_codes,
    round_to_codes,
    search_scale,
    search_scale_and_minimum,
    single,
    write_error_weights,
)
from .super_blocks import CODES, FIRST, STEP, WEIGHTS

BLOCK = 32
HALF, LARGEST_INT8 = single(0.5), single(127)


@subroutine
def compute_reciprocal_or_zero(scale):
    """Return ``1 / scale``; return 0 if `scale` is 0."""
    return ONE / scale if scale != ZERO else ZERO


@subroutine
def truncate_and_clamp_to_codes(v, top):
    """Truncate each lane to an integer code, clamped to the range from 0 to `top`.

    The caller has added 0.5 to the numbers, so that the truncation rounds halves up.
    """
    return round_to_codes(round_to_zero(v), ZERO, top)


@subroutine
def quantise_symmetric_block(x, importance, scratch, middle, d):
    """Quantise 32 numbers with a scale and no minimum, to codes from 0 to ``2 * middle - 1``.

    Args:
        x: address of the numbers.
        importance: address of the importances, or 0 if there are none.
        scratch: address of the scratch memory, which receives the codes.
        middle: the code that means 0.
        d: address for the scale, float16.
    """
    codes = scratch + CODES
    if importance == 0:
        scale = find_signed_peak(x, BLOCK) / -middle
        inverse, shift = splat(compute_reciprocal_or_zero(scale)), splat(middle + HALF)
        for i in range(0, BLOCK, LANES):
            q = truncate_and_clamp_to_codes(add(mul(load(x + 4 * i), inverse), shift), middle + middle - ONE)
            store_u8_lanes(codes + i, round_small_floats_to_int(q))
    else:
        write_error_weights(x, importance, scratch + WEIGHTS, BLOCK)
        spread = make_8_inverse_scales_per_peak(-middle, middle - ONE, single(0.86), single(0.04))
        scale = search_scale(x, scratch + WEIGHTS, BLOCK, -middle, middle - ONE, spread, 3)
        quantise_to_byte_codes(x, BLOCK, scale, ZERO, -middle, middle - ONE, codes)
    store_lane_0_as_f16(d, splat(scale))


@subroutine
def quantise_block_with_minimum(x, importance, scratch, top, d, m):
    """Quantise 32 numbers with a scale and a minimum, to codes from 0 to `top`.

    Args:
        x: address of the numbers.
        importance: address of the importances, or 0 if there are none.
        scratch: address of the scratch memory, which receives the codes.
        top: largest code.
        d: address for the scale.
        m: address for the minimum.
    """
    codes = scratch + CODES
    if importance == 0:
        first, second = load(x), load(x + 4 * LANES)
        low = lane_min(minimum(first, second))
        scale = (lane_max(maximum(first, second)) - low) / top
        inverse, shift = splat(compute_reciprocal_or_zero(scale)), splat(HALF)
        for i in range(0, BLOCK, LANES):
            q = truncate_and_clamp_to_codes(add(mul(sub(load(x + 4 * i), splat(low)), inverse), shift), top)
            store_u8_lanes(codes + i, round_small_floats_to_int(q))
    else:
        write_error_weights(x, importance, scratch + WEIGHTS, BLOCK)
        scale, low = search_scale_and_minimum(x, scratch + WEIGHTS, BLOCK, top, FIRST, STEP, 3, True)
        quantise_to_byte_codes(x, BLOCK, scale, low, ZERO, top, codes)
    store_lane_0_as_f16(d, splat(scale))
    store_lane_0_as_f16(m, splat(low))


@subroutine
def store_32_nibbles(codes, y):
    """Store the low 4 bits of 32 codes at `codes` in 16 bytes at `y`: codes i and ``i + 16`` share a byte."""
    low, high = load_u8_as_i32(codes), load_u8_as_i32(codes + 16)
    low, high = and_int(low, splat_int(15)), shift_left(and_int(high, splat_int(15)), splat_int(4))
    store_u8_lanes(y, or_int(low, high))


@subroutine
def store_32_fifth_bits(codes, y):
    """Store bit 4 (the fifth bit) of each of 32 codes at `codes` in 4 bytes at `y`."""
    for h in range(2):
        bits = greater_bitmask(to_float(load_u8_as_i32(codes + 16 * h)), splat(single(15.5)))
        store_byte(y + 2 * h, bits & 255)
        store_byte(y + 2 * h + 1, bits >> 8)


@row_quantiser(DType.Q4_0)
def quantise_q4_0(x, importance, scratch, table, block):
    """Quantise the 32 numbers at `x` to a Q4_0 block at `block`: a scale, and 4-bit codes."""
    quantise_symmetric_block(x, importance, scratch, single(8), block)
    store_32_nibbles(scratch + CODES, block + 2)


@row_quantiser(DType.Q4_1)
def quantise_q4_1(x, importance, scratch, table, block):
    """Quantise the 32 numbers at `x` to a Q4_1 block at `block`: a scale, a minimum, and 4-bit codes."""
    quantise_block_with_minimum(x, importance, scratch, single(15), block, block + 2)
    store_32_nibbles(scratch + CODES, block + 4)


@row_quantiser(DType.Q5_0)
def quantise_q5_0(x, importance, scratch, table, block):
    """Quantise the 32 numbers at `x` to a Q5_0 block at `block`: a scale, and 5-bit codes."""
    quantise_symmetric_block(x, importance, scratch, single(16), block)
    store_32_fifth_bits(scratch + CODES, block + 2)
    store_32_nibbles(scratch + CODES, block + 6)


@row_quantiser(DType.Q5_1)
def quantise_q5_1(x, importance, scratch, table, block):
    """Quantise the 32 numbers at `x` to a Q5_1 block at `block`: a scale, a minimum, and 5-bit codes."""
    quantise_block_with_minimum(x, importance, scratch, single(31), block, block + 2)
    store_32_fifth_bits(scratch + CODES, block + 4)
    store_32_nibbles(scratch + CODES, block + 8)


@row_quantiser(DType.Q8_0)
def quantise_q8_0(x, importance, scratch, table, block):
    """Quantise the 32 numbers at `x` to a Q8_0 block at `block`: a scale, and 8-bit codes. Importances are not used."""
    low, high = load(x), load(x + 4 * LANES)
    scale = lane_max(maximum(absolute(low), absolute(high))) / LARGEST_INT8
    inverse = splat(compute_reciprocal_or_zero(scale))
    store_lane_0_as_f16(block, splat(scale))
    store_u8_lanes(block + 2, round_small_floats_to_int(round_away(mul(low, inverse))))
    store_u8_lanes(block + 2 + LANES, round_small_floats_to_int(round_away(mul(high, inverse))))


@kernel
def round_bf16(a, thread, threads):
    """Round rows to bfloat16, ties to even. Importances have no effect."""
    x, y, columns = ARGS.x(a), ARGS.y(a), ARGS.columns(a)
    first, end = compute_thread_range(ARGS.rows(a), thread, threads)
    for i in range(first * columns, end * columns, LANES):
        count = min(LANES, end * columns - i)
        store_first_bf16(y + 2 * i, load_first_lanes(x + 4 * i, count), count)
    return 0
