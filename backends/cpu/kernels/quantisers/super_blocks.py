"""Quantisers of the K types: super-blocks of 256 numbers, with an integer scale for each block of 16 or 32.

Layouts: ``ggml-common.h`` of llama.cpp, as in `hocket.ops.quantisation`.
"""

from __future__ import annotations

from .....graph.dtypes import DType
from ...compilation.compiler import subroutine
from ...simd.candidate_lanes import make_16_lane_constant, round_scalar_to_half, to_int
from ...simd.half_memory import store_lane_0_as_f16
from ...simd.vectors import (
    LANES,
    add_int,
    and_int,
    load_byte,
    load_scalar,
    load_u8_as_i32,
    or_int,
    shift_left,
    shift_right,
    splat,
    splat_int,
    store_byte,
    store_scalar,
    store_u8_lanes,
)
from .block_loop import row_quantiser
from .scale_search import (
    ZERO,
    choose_scale_and_minimum_codes,
    choose_signed_scale,
    make_8_inverse_scales_per_peak,
    make_inverse_scale_candidates,
    quantise_to_byte_codes,
    search_scale,
    search_scale_and_minimum,
    single,
    sum_weights,
    write_error_weights,
)

SUPER_BLOCK = 256
WEIGHTS, CODES, SCALES, MINIMA, STRENGTHS, SCALE_CODES, MINIMUM_CODES = 0, 1024, 1280, 1344, 1408, 1472, 1488
"""Offsets in the scratch memory of a thread."""
FEW_BITS_FIRST, FEW_BITS_STEP = single(0.75), single(0.06)
"""Factors of the first candidates of 2 bits."""
FIRST, STEP = single(0.92), single(0.012)
COMMON_FIRST, COMMON_STEP = single(0.985), single(0.002)
integer_steps = make_16_lane_constant([*range(-8, 8)])


@subroutine
def quantise_super_block_with_minima(x, importance, scratch, size, top, first, step, limit, d, dmin):
    """Quantise 256 numbers with a scale and a minimum for each block of `size` numbers.

    Codes, and the integers that store scales and minima, go to `scratch`.

    Args:
        x: address of the numbers.
        importance: address of the importances, or 0 if there are none.
        scratch: address of the scratch memory of the thread.
        size: count of numbers of a block.
        top: largest code.
        first: factor of the first candidate, as in `search_scale_and_minimum`.
        step: difference of the factors, as in `search_scale_and_minimum`.
        limit: largest integer of a scale or minimum.
        d: address for the unit of the scales, float16.
        dmin: address for the unit of the minima, float16.
    """
    w, count = scratch + WEIGHTS, SUPER_BLOCK // size
    write_error_weights(x, importance, w, SUPER_BLOCK)
    for j in range(count):
        scale, low = search_scale_and_minimum(x + 4 * size * j, w + 4 * size * j, size, top, first, step, 3, False)
        store_scalar(scratch + SCALES + 4 * j, scale)
        store_scalar(scratch + MINIMA + 4 * j, -low)
        store_scalar(scratch + STRENGTHS + 4 * j, sum_weights(w + 4 * size * j, size))
    for j in range(count, LANES):
        store_scalar(scratch + SCALES + 4 * j, ZERO)
        store_scalar(scratch + MINIMA + 4 * j, ZERO)
        store_scalar(scratch + STRENGTHS + 4 * j, ZERO)
    numerators = make_inverse_scale_candidates(limit, COMMON_FIRST, COMMON_STEP)
    strengths = scratch + STRENGTHS
    common = round_scalar_to_half(search_scale(scratch + SCALES, strengths, LANES, ZERO, limit, numerators, 2))
    unit = round_scalar_to_half(search_scale(scratch + MINIMA, strengths, LANES, ZERO, limit, numerators, 2))
    store_lane_0_as_f16(d, splat(common))
    store_lane_0_as_f16(dmin, splat(unit))
    for j in range(count):
        xj = x + 4 * size * j
        scale_code, minimum_code = choose_scale_and_minimum_codes(
            xj,
            w + 4 * size * j,
            size,
            top,
            common,
            unit,
            load_scalar(scratch + SCALES + 4 * j),
            -load_scalar(scratch + MINIMA + 4 * j),
            limit,
        )
        store_byte(scratch + SCALE_CODES + j, to_int(scale_code))
        store_byte(scratch + MINIMUM_CODES + j, to_int(minimum_code))
        low = -(minimum_code * unit)
        quantise_to_byte_codes(xj, size, scale_code * common, low, ZERO, top, scratch + CODES + size * j)


@subroutine
def store_6_bit_scales_and_minima(scratch, y):
    """Store 8 scales and 8 minima of 6 bits each in 12 bytes at `y`, in the layout of ``get_scale_min_k4`` of ggml."""
    for j in range(4):
        scale, minimum = load_byte(scratch + SCALE_CODES + j), load_byte(scratch + MINIMUM_CODES + j)
        later, later_minimum = load_byte(scratch + SCALE_CODES + 4 + j), load_byte(scratch + MINIMUM_CODES + 4 + j)
        store_byte(y + j, scale | (later >> 4) << 6)
        store_byte(y + 4 + j, minimum | (later_minimum >> 4) << 6)
        store_byte(y + 8 + j, (later & 15) | (later_minimum & 15) << 4)


@subroutine
def pack_code_fields_into_bytes(p, distance, width, mask):
    """Pack the low `width` bits of ``8 / width`` codes into each byte.

    Args:
        p: address of the first codes, one byte each.
        distance: bytes between the codes that share a byte.
        width: bits of a code.
        mask: ``2**width - 1``.
    """
    out = and_int(load_u8_as_i32(p), splat_int(mask))
    for k in range(1, 8 // width):
        out = or_int(out, shift_left(and_int(load_u8_as_i32(p + distance * k), splat_int(mask)), splat_int(width * k)))
    return out


@subroutine
def pack_code_high_bits_into_bytes(p, distance, width, above, count):
    """Pack the high bits of `count` codes into each byte; the low bits of the codes are stored elsewhere.

    Args:
        p: address of the first codes, one byte each.
        distance: bytes between the codes that share a byte.
        width: bits that are taken from each code.
        above: position of the lowest bit that is taken.
        count: count of codes that share a byte.
    """
    out = splat_int(0)
    for k in range(count):
        field = shift_right(load_u8_as_i32(p + distance * k), splat_int(above))
        out = or_int(out, shift_left(and_int(field, splat_int((1 << width) - 1)), splat_int(width * k)))
    return out


@subroutine
def store_2_bit_codes_4_per_byte(codes, y):
    """Store the low 2 bits of 256 codes in 64 bytes: four codes that are 32 apart share a byte."""
    for h in range(0, 2):
        for c in range(0, 32, LANES):
            store_u8_lanes(y + 32 * h + c, pack_code_fields_into_bytes(codes + 128 * h + c, 32, 2, 3))


@subroutine
def store_4_bit_codes_2_per_byte(codes, y):
    """Store the low 4 bits of 256 codes in 128 bytes: two codes that are 32 apart share a byte."""
    for h in range(0, 4):
        for c in range(0, 32, LANES):
            store_u8_lanes(y + 32 * h + c, pack_code_fields_into_bytes(codes + 64 * h + c, 32, 4, 15))


@row_quantiser(DType.Q2_K)
def quantise_q2_k(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to a Q2_K block at `block`: 2-bit codes, 4-bit scale and minimum per 16."""
    quantise_super_block_with_minima(
        x,
        importance,
        scratch,
        16,
        single(3),
        FEW_BITS_FIRST,
        FEW_BITS_STEP,
        single(15),
        block + 80,
        block + 82,
    )
    scales, minima = load_u8_as_i32(scratch + SCALE_CODES), load_u8_as_i32(scratch + MINIMUM_CODES)
    store_u8_lanes(block, or_int(scales, shift_left(minima, splat_int(4))))
    store_2_bit_codes_4_per_byte(scratch + CODES, block + 16)


@row_quantiser(DType.Q4_K)
def quantise_q4_k(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to a Q4_K block at `block`: 4-bit codes, 6-bit scale and minimum per 32."""
    quantise_super_block_with_minima(x, importance, scratch, 32, single(15), FIRST, STEP, single(63), block, block + 2)
    store_6_bit_scales_and_minima(scratch, block + 4)
    store_4_bit_codes_2_per_byte(scratch + CODES, block + 16)


@row_quantiser(DType.Q5_K)
def quantise_q5_k(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to a Q5_K block at `block`: 5-bit codes, 6-bit scale and minimum per 32.

    The fifth bits of all codes are stored together, apart from the low bits.
    """
    quantise_super_block_with_minima(x, importance, scratch, 32, single(31), FIRST, STEP, single(63), block, block + 2)
    store_6_bit_scales_and_minima(scratch, block + 4)
    for k in range(0, 32, LANES):
        store_u8_lanes(block + 16 + k, pack_code_high_bits_into_bytes(scratch + CODES + k, 32, 1, 4, 8))
    store_4_bit_codes_2_per_byte(scratch + CODES, block + 48)


@subroutine
def quantise_super_block_with_signed_scales(x, importance, scratch, lowest, highest, smallest, limit, numerators, d):
    """Quantise 256 numbers with a signed scale for each block of 16 numbers.

    The codes, and the integers that store the scales, go to `scratch`. Each integer is written minus `smallest`, so
    that it is not negative.

    Args:
        x: address of the numbers.
        importance: address of the importances, or 0 if there are none.
        scratch: address of the scratch memory of the thread.
        lowest: smallest code.
        highest: largest code.
        smallest: smallest integer of a scale.
        limit: largest integer of a scale.
        numerators: numerators of the first candidates, as in `make_search_best_scale`.
        d: address for the unit of the scales, float16.
    """
    w = scratch + WEIGHTS
    write_error_weights(x, importance, w, SUPER_BLOCK)
    for j in range(LANES):
        scale = search_scale(x + 64 * j, w + 64 * j, LANES, lowest, highest, numerators, 3)
        store_scalar(scratch + SCALES + 4 * j, scale)
        store_scalar(scratch + STRENGTHS + 4 * j, sum_weights(w + 64 * j, LANES))
    spread = make_8_inverse_scales_per_peak(smallest, limit, single(0.99), single(0.005))
    common = search_scale(scratch + SCALES, scratch + STRENGTHS, LANES, smallest, limit, spread, 2)
    common = round_scalar_to_half(common)
    store_lane_0_as_f16(d, splat(common))
    for j in range(LANES):
        scale = load_scalar(scratch + SCALES + 4 * j)
        code = choose_signed_scale(
            x + 64 * j, w + 64 * j, LANES, lowest, highest, common, scale, integer_steps(), smallest, limit
        )
        store_byte(scratch + SCALE_CODES + j, to_int(code - smallest))
        quantise_to_byte_codes(x + 64 * j, LANES, code * common, ZERO, lowest, highest, scratch + CODES + 16 * j)


@row_quantiser(DType.Q3_K)
def quantise_q3_k(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to a Q3_K block at `block`: 3-bit codes, a signed 6-bit scale per 16 numbers.

    The third bits of all codes are stored together, apart from the low bits.
    """
    spread = make_8_inverse_scales_per_peak(single(-4), single(3), single(0.8), single(0.08))
    quantise_super_block_with_signed_scales(
        x,
        importance,
        scratch,
        single(-4),
        single(3),
        single(-32),
        single(31),
        spread,
        block + 108,
    )
    for k in range(0, 32, LANES):
        store_u8_lanes(block + k, pack_code_high_bits_into_bytes(scratch + CODES + k, 32, 1, 2, 8))
    store_2_bit_codes_4_per_byte(scratch + CODES, block + 32)
    for j in range(8):
        low, high = load_byte(scratch + SCALE_CODES + j), load_byte(scratch + SCALE_CODES + 8 + j)
        store_byte(block + 96 + j, (low & 15) | (high & 15) << 4)
    for j in range(4):
        bits = 0
        for k in range(4):
            bits |= (load_byte(scratch + SCALE_CODES + 4 * k + j) >> 4) << (2 * k)
        store_byte(block + 104 + j, bits)


@row_quantiser(DType.Q6_K)
def quantise_q6_k(x, importance, scratch, table, block):
    """Quantise the 256 numbers at `x` to a Q6_K block at `block`: 6-bit codes, a signed 8-bit scale per 16 numbers."""
    spread = make_inverse_scale_candidates(single(-32), single(0.96), single(0.006))
    quantise_super_block_with_signed_scales(
        x,
        importance,
        scratch,
        single(-32),
        single(31),
        single(-128),
        single(127),
        spread,
        block + 208,
    )
    codes = scratch + CODES
    for h in range(2):
        for k in range(0, 64, LANES):
            store_u8_lanes(block + 64 * h + k, pack_code_fields_into_bytes(codes + 128 * h + k, 64, 4, 15))
        for k in range(0, 32, LANES):
            high = pack_code_high_bits_into_bytes(codes + 128 * h + k, 32, 2, 4, 4)
            store_u8_lanes(block + 128 + 32 * h + k, high)
    shifted = add_int(load_u8_as_i32(scratch + SCALE_CODES), splat_int(-128))
    store_u8_lanes(block + 192, shifted)
