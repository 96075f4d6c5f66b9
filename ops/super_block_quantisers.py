"""Rounding of numbers to super-blocks of 256: Q2_K to Q6_K and IQ4_XS, as GGML's CPU backend writes them.

A super-block has sub-blocks of 16 or 32 elements, each with a scale of few bits. Three steps quantise it:

1. Search the scale of each sub-block with the least weighted error.
2. Round the scales to multiples of the scale of the super-block.
3. Choose the nearest codes for the rounded scales.

Sources: ``quantize_row_*_ref`` of ggml-quants.c, with the same float32 operations in the same order. The bytes differ
in sub-blocks with a scale of 0 only: their codes have no effect. In this module a sub-block is a column: [elements, n].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from types import MappingProxyType

import numpy as np

from ..graph.dtypes import DType
from .block_layouts import F32, IQ4_NL_CODE_BOOK, U8
from .block_quantisers import IQ4_NL_BOUNDARIES, build_block_records, pack_2_bits_along_axis_1, pack_nibbles

SUPER_BLOCK = 256
ZERO_MAGNITUDE = np.float32(1e-15)
"""A sub-block with no larger magnitude counts as zero (``GROUP_MAX_EPS`` of ggml)."""
QX_STEPS, Q3_PASSES, IQ4_XS_STEPS = 9, 5, 7
"""Candidates on each side of the first scale, and passes over the codes of a Q3_K sub-block."""
TENTH = np.float32(0.1)


def _sum_in_order(terms: F32) -> F32:
    """Sum over the first axis from the first term to the last: [elements, n] to [n]."""
    return reduce(np.add, terms)


def _divide_or_zero(numerator: F32 | np.float32, denominator: F32) -> F32:
    """Return the quotient, or 0 where the denominator is 0."""
    out = np.zeros(np.broadcast_shapes(np.shape(numerator), denominator.shape), np.float32)
    return np.divide(numerator, denominator, out=out, where=denominator != 0)


def _round_to_codes(x: F32, low: int, high: int) -> F32:
    """Round to the nearest integer from `low` to `high`, ties to even; NaN becomes 0."""
    return np.clip(np.nan_to_num(np.rint(x)), low, high)


def _split_sub_blocks(x: F32, size: int) -> F32:
    """Return the sub-blocks of super-blocks as columns: [n, 256] to [size, n * 256 / size]."""
    return np.ascontiguousarray(x.reshape(-1, size).T)


def _find_signed_peak(x: F32) -> F32:
    """Return the first number of largest magnitude of each column, with its sign: [elements, n] to [n]."""
    return np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]


def _search_scale_and_minimum(
    x: F32, weights: F32, top: int, first: float, count: int, error: Callable[[F32], F32]
) -> tuple[F32, F32]:
    """Search the scale and the minimum of each column (``make_qkx2_quants`` of ggml).

    Args:
        x: float32 [elements, n].
        weights: weight of the error of each element, float32 [elements, n].
        top: the largest code.
        first: the first candidate divides the range by ``top + first``; the others follow in steps of 0.1. The range
            begins at the best minimum so far.
        count: number of candidates.
        error: function from a difference to its error.

    Returns:
        The scales [n] and the subtracted minima [n], which are at least 0.
    """
    low, high = np.minimum(x.min(0), 0), x.max(0)
    sum_w, sum_x = _sum_in_order(weights), _sum_in_order(weights * x)
    inverse = _divide_or_zero(np.float32(top), high - low)
    scale, minimum = _divide_or_zero(np.float32(1), inverse), low
    codes = _round_to_codes(inverse * (x - low), 0, top)
    best = _sum_in_order(weights * error(scale * codes + low - x))
    for step in range(count):
        factor = np.float32(first) + TENTH * np.float32(step) + np.float32(top)
        codes = _round_to_codes(_divide_or_zero(factor, high - minimum) * (x - minimum), 0, top)
        weighted = weights * codes
        sum_l, sum_l2, sum_xl = map(_sum_in_order, (weighted, weighted * codes, weighted * x))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = _divide_or_zero(sum_w * sum_xl - sum_x * sum_l, determinant)
        new_minimum = _divide_or_zero(sum_l2 * sum_x - sum_l * sum_xl, determinant)
        new_scale = np.where(new_minimum > 0, _divide_or_zero(sum_xl, sum_l2), new_scale)
        new_minimum = np.minimum(new_minimum, 0)
        new_error = _sum_in_order(weights * error(new_scale * codes + new_minimum - x))
        is_better = (determinant > 0) & (new_error < best)
        best, scale, minimum = (
            np.where(is_better, new, old)
            for new, old in ((new_error, best), (new_scale, scale), (new_minimum, minimum))
        )
    is_flat = high == low
    return np.where(is_flat, np.float32(0), scale), np.where(is_flat, -low, -minimum)


def _search_scale(x: F32, middle: int) -> F32:
    """Search the scale of each column for codes from ``-middle`` to ``middle - 1`` (``make_qx_quants`` of ggml)."""
    peak = _find_signed_peak(x)
    weighted = x * x * x
    scale = best = np.zeros_like(peak)
    for step in (0, *range(-QX_STEPS, 0), *range(1, QX_STEPS + 1)):
        codes = _round_to_codes(
            _divide_or_zero(-(np.float32(middle) + TENTH * np.float32(step)), peak) * x, -middle, middle - 1
        )
        sum_lx, sum_l2 = _sum_in_order(weighted * codes), _sum_in_order(x * x * codes * codes)
        is_better = (sum_l2 > 0) & ((sum_lx * sum_lx > best * sum_l2) | (step == 0))
        scale = np.where(is_better, _divide_or_zero(sum_lx, sum_l2), scale)
        best = np.where(is_better, scale * sum_lx, best)
    return np.where(np.abs(peak) < ZERO_MAGNITUDE, np.float32(0), scale)


def _search_q3_scale(x: F32) -> F32:
    """Search the scale of each column for codes from -4 to 3 (``make_q3_quants`` of ggml).

    One code after the other is changed if that lowers the error.
    """
    peak, weights = _find_signed_peak(x), x * x
    codes = _round_to_codes(_divide_or_zero(np.float32(-4), peak) * x, -4, 3)
    sum_lx, sum_l2 = _sum_in_order(weights * x * codes), _sum_in_order(weights * codes * codes)
    for _ in range(Q3_PASSES):
        for w, value, code in zip(weights, x, codes, strict=True):
            rest_lx, rest_l2 = sum_lx - w * value * code, sum_l2 - w * code * code
            new = _round_to_codes(_divide_or_zero(value * rest_l2, rest_lx), -4, 3)
            new_lx, new_l2 = rest_lx + w * value * new, rest_l2 + w * new * new
            is_better = (rest_lx > 0) & (new != code) & (new_l2 > 0)
            is_better &= new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2
            code[...] = np.where(is_better, new, code)
            sum_lx, sum_l2 = np.where(is_better, new_lx, sum_lx), np.where(is_better, new_l2, sum_l2)
    return np.where(np.abs(peak) < ZERO_MAGNITUDE, np.float32(0), _divide_or_zero(sum_lx, sum_l2))


def _round_to_float16(x: F32) -> F32:
    """Round to float16, in which the scale of a super-block is stored."""
    return x.astype(np.float16).astype(np.float32)


def _choose_codes(x: F32, scale: F32, minimum: F32 | np.float32, low: int, high: int) -> U8:
    """Choose the nearest codes of each column, counted from `low`, and arrange them as super-blocks: uint8 [n, 256].

    Args:
        x: float32 [elements, n].
        scale: rounded scales [n].
        minimum: subtracted minima [n], or 0.
        low: the smallest code.
        high: the largest code.
    """
    codes = _round_to_codes(_divide_or_zero(x + minimum, np.broadcast_to(scale, x.shape)), low, high)
    shifted: U8 = (np.where(scale == 0, low, codes) - low).astype(np.uint8).T.reshape(-1, SUPER_BLOCK)
    return shifted


def _pack_low_2_bits(codes: U8) -> U8:
    """Pack the low two bits of four codes, 32 apart, into a byte: [n, 256] to [n, 64]."""
    return pack_2_bits_along_axis_1((codes & np.uint8(3)).reshape(-1, 4, 32)).reshape(-1, 64)


def _pack_bit_planes(bits: U8) -> U8:
    """Pack eight bits, 32 elements apart, into a byte: 0 or 1 [n, 256] to [n, 32]."""
    planes = bits.reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    packed: U8 = np.bitwise_or.reduce(planes, axis=1)
    return packed


def _quantise_q2_k(x: F32) -> np.ndarray:
    columns = _split_sub_blocks(x, 16)
    scales, minima = (
        part.reshape(-1, 16) for part in _search_scale_and_minimum(columns, np.abs(columns), 3, -0.5, 16, np.abs)
    )
    top, deepest = scales.max(1, keepdims=True), minima.max(1, keepdims=True)
    ls, lm = (
        _round_to_codes(_divide_or_zero(np.float32(15), m) * s, 0, 15) for m, s in ((top, scales), (deepest, minima))
    )
    d, dmin = top / np.float32(15), deepest / np.float32(15)
    codes = _choose_codes(columns, (_round_to_float16(d) * ls).ravel(), (_round_to_float16(dmin) * lm).ravel(), 0, 3)
    blocks = build_block_records(DType.Q2_K, _pack_low_2_bits(codes), d=d, dmin=dmin)
    blocks["scales"] = ls.astype(np.uint8) | lm.astype(np.uint8) << 4
    return blocks


def _quantise_q3_k(x: F32) -> np.ndarray:
    columns = _split_sub_blocks(x, 16)
    scales = _search_q3_scale(columns).reshape(-1, 16)
    factor = _divide_or_zero(np.float32(-32), _find_signed_peak(scales.T)[:, None])
    levels = _round_to_codes(factor * scales, -32, 31)
    d = _divide_or_zero(np.float32(1), factor)
    codes = _choose_codes(columns, (_round_to_float16(d) * levels).ravel(), np.float32(0), -4, 3)
    blocks = build_block_records(DType.Q3_K, _pack_low_2_bits(codes), d=d)
    blocks["qh"] = _pack_bit_planes(codes >> np.uint8(2))
    stored = (levels + 32).astype(np.uint8)
    blocks["scales"][:, :8] = (stored[:, :8] & 15) | (stored[:, 8:] & 15) << 4
    blocks["scales"][:, 8:] = pack_2_bits_along_axis_1((stored >> np.uint8(4)).reshape(-1, 4, 4))
    return blocks


def _quantise_q4_or_q5_k(dtype: DType, top: int, first: float, count: int, x: F32) -> np.ndarray:
    """Quantise to Q4_K or Q5_K; `_search_scale_and_minimum` explains `top`, `first` and `count`."""
    columns = _split_sub_blocks(x, 32)
    weights = np.sqrt(_sum_in_order(columns * columns) / np.float32(32)) + np.abs(columns)
    scales, minima = (
        part.reshape(-1, 8)
        for part in _search_scale_and_minimum(
            columns, weights, top, first, count, lambda difference: difference * difference
        )
    )
    highest, deepest = scales.max(1, keepdims=True), minima.max(1, keepdims=True)
    ls, lm = (
        _round_to_codes(_divide_or_zero(np.float32(63), m) * s, 0, 63)
        for m, s in ((highest, scales), (deepest, minima))
    )
    d, dmin = highest / np.float32(63), deepest / np.float32(63)
    codes = _choose_codes(columns, (_round_to_float16(d) * ls).ravel(), (_round_to_float16(dmin) * lm).ravel(), 0, top)
    blocks = build_block_records(dtype, pack_nibbles(codes, 64), d=d, dmin=dmin)
    if dtype is DType.Q5_K:
        blocks["qh"] = _pack_bit_planes(codes >> np.uint8(4))
    s, m = ls.astype(np.uint8), lm.astype(np.uint8)
    blocks["scales"][:, :4] = s[:, :4] | s[:, 4:] >> 4 << 6
    blocks["scales"][:, 4:8] = m[:, :4] | m[:, 4:] >> 4 << 6
    blocks["scales"][:, 8:] = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return blocks


def _quantise_q6_k(x: F32) -> np.ndarray:
    columns = _split_sub_blocks(x, 16)
    scales = _search_scale(columns, 32).reshape(-1, 16)
    peak = _find_signed_peak(scales.T)[:, None]
    factor = _divide_or_zero(np.float32(-128), np.where(np.abs(peak) < ZERO_MAGNITUDE, np.float32(0), peak))
    levels = _round_to_codes(factor * scales, -128, 127)
    d = _divide_or_zero(np.float32(1), factor)
    codes = _choose_codes(columns, (_round_to_float16(d) * levels).ravel(), np.float32(0), -32, 31)
    blocks = build_block_records(DType.Q6_K, pack_nibbles(codes, 128), d=d)
    blocks["qh"] = _pack_low_2_bits(codes >> np.uint8(4))
    blocks["scales"] = levels.astype(np.int8)
    return blocks


def _find_nearest_iq4_nl_indices(x: F32) -> np.ndarray:
    """Return the index of the IQ4_NL code book value that is nearest to each number."""
    return np.searchsorted(IQ4_NL_BOUNDARIES, x, side="right")


def _search_iq4_nl_scale(x: F32) -> F32:
    """Search the scale of each column for IQ4_NL code book values (``quantize_row_iq4_nl_impl`` of ggml)."""
    peak, weights = _find_signed_peak(x), x * x
    scale = best = np.zeros_like(peak)
    for step in (None, *range(-IQ4_XS_STEPS, IQ4_XS_STEPS + 1)):
        if step is None:
            factor = _divide_or_zero(np.float32(1), -peak / IQ4_NL_CODE_BOOK[0])
        else:
            factor = _divide_or_zero(np.float32(step) + IQ4_NL_CODE_BOOK[0], peak)
        values = IQ4_NL_CODE_BOOK[_find_nearest_iq4_nl_indices(factor * x)]
        weighted = weights * values
        sum_qx, sum_q2 = _sum_in_order(weighted * x), _sum_in_order(weighted * values)
        is_better = (sum_q2 > 0) & ((sum_qx * sum_qx > best * sum_q2) | (step is None))
        scale = np.where(is_better, _divide_or_zero(sum_qx, sum_q2), scale)
        best = np.where(is_better, scale * sum_qx, best)
    return np.where(np.abs(peak) < ZERO_MAGNITUDE, np.float32(0), scale)


def _quantise_iq4_xs(x: F32) -> np.ndarray:
    columns = _split_sub_blocks(x, 32)
    scales = _search_iq4_nl_scale(columns).reshape(-1, 8)
    d = -_find_signed_peak(scales.T)[:, None] / np.float32(32)
    levels = _round_to_codes(_divide_or_zero(np.float32(1), d) * scales, -32, 31)
    codes = _find_nearest_iq4_nl_indices(_divide_or_zero(np.float32(1), (d * levels).ravel()) * columns)
    blocks = build_block_records(DType.IQ4_XS, pack_nibbles(codes.astype(np.uint8).T.reshape(-1, SUPER_BLOCK)), d=d)
    stored = (levels + 32).astype(np.uint16)
    blocks["scales_l"] = (stored[:, ::2] & 15) | (stored[:, 1::2] & 15) << 4
    blocks["scales_h"] = np.bitwise_or.reduce(stored >> 4 << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    return blocks


SUPER_BLOCK_QUANTISERS: Mapping[DType, Callable[[F32], np.ndarray]] = MappingProxyType(
    {
        DType.Q2_K: _quantise_q2_k,
        DType.Q3_K: _quantise_q3_k,
        DType.Q4_K: partial(_quantise_q4_or_q5_k, DType.Q4_K, 15, -1.0, 21),
        DType.Q5_K: partial(_quantise_q4_or_q5_k, DType.Q5_K, 31, -0.5, 16),
        DType.Q6_K: _quantise_q6_k,
        DType.IQ4_XS: _quantise_iq4_xs,
    }
)
"""By dtype, a function from float32 [n, 256] to block records [n]."""
