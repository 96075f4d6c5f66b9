"""Rounding of numbers to quantisation blocks: the dtypes to which a run can write, as GGML's CPU backend writes them.

The range of a block determines its scale, so that blocks decoded and encoded again are unchanged. The exceptions are
Q4_1 and Q5_1 with a minimum that exceeds the steps by far, and NVFP4 blocks below 0.01. A scale is rounded to its
stored format only after the codes are chosen. Sources: ``quantize_row_*_ref`` of ggml-quants.c; the scales of NVFP4 are
rounded to the nearest, which ggml does not for the smallest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..graph.dtypes import DType
from .block_layouts import BLOCK_LAYOUTS, F32, FP4_VALUES_TIMES_2, HALF_OF_E4M3, IQ4_NL_CODE_BOOK, U8

HALF = np.float32(0.5)
IQ4_NL_BOUNDARIES = (IQ4_NL_CODE_BOOK[1:] + IQ4_NL_CODE_BOOK[:-1]) / 2
"""The numbers between two neighbours of the code book, which round up."""
MAX_E4M3_INDEX = 126
"""The largest E4M3 scale of an NVFP4 block; 127 is NaN."""
TERNARY_DIGITS, DIGIT_RANGE = 5, 243
"""Digits in a byte of TQ1_0, and the number of their values."""


def _safe_reciprocal(scale: F32) -> F32:
    """Return ``1 / scale``, or 0 for a scale of 0."""
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def build_block_records(dtype: DType, qs: npt.NDArray[np.generic], **columns: npt.NDArray[np.generic]) -> np.ndarray:
    """Build the structured array of quantised blocks from the codes `qs` [n, ...] and one number per block [n, 1]."""
    blocks = np.empty(len(qs), BLOCK_LAYOUTS[dtype])
    blocks["qs"] = qs
    for name, column in columns.items():
        blocks[name] = column[:, 0]
    return blocks


def _truncate_to_codes(numbers: F32, top: int) -> U8:
    """Truncate numbers to codes from 0 to `top`; NaN becomes 0."""
    return np.clip(np.nan_to_num(np.trunc(numbers)), 0, top).astype(np.uint8)


def _round_half_away(x: F32) -> F32:
    """Round to the nearest integer, ties away from 0; NaN becomes 0."""
    whole = np.trunc(x)
    return np.nan_to_num(whole + np.copysign(np.float32(1), x) * (np.abs(x - whole) >= HALF))


def _find_largest_absolute_value(x: F32) -> F32:
    """Return the largest magnitude of each block: [n, elements] to [n, 1]."""
    return np.abs(x).max(1, keepdims=True)


def _find_signed_peak(x: F32) -> F32:
    """Return the number of largest magnitude of each block, with its sign: [n, elements] to [n, 1]."""
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    return np.where(-low < high, high, low)


def pack_nibbles(codes: U8, width: int = 32) -> U8:
    """Pack two codes of 4 bits into a byte: codes i and ``i + width / 2`` of each `width` neighbours."""
    parts = (codes & np.uint8(15)).reshape(len(codes), codes.shape[1] // width, 2, width // 2)
    packed: U8 = parts[:, :, 0] | parts[:, :, 1] << np.uint8(4)
    return packed.reshape(len(codes), codes.shape[1] // 2)


def _pack_fifth_bits(codes: U8) -> U8:
    """Pack bit 4 of 32 codes into 4 bytes: [n, 32] to [n, 4]."""
    bits: U8 = np.packbits(codes >> 4, axis=1, bitorder="little")
    return bits


def _quantise_q8_0(x: F32) -> np.ndarray:
    d = _find_largest_absolute_value(x) / np.float32(127)
    codes = np.clip(_round_half_away(x * _safe_reciprocal(d)), -127, 127)
    return build_block_records(DType.Q8_0, codes.astype(np.int8), d=d)


def _quantise_without_minimum(dtype: DType, middle: int, x: F32) -> np.ndarray:
    """Quantise blocks to a scale and unsigned codes; a number is ``scale * (code - middle)``.

    Codes are from 0 to ``2 * middle - 1``.
    """
    d = _find_signed_peak(x) / np.float32(-middle)
    codes = _truncate_to_codes(x * _safe_reciprocal(d) + (np.float32(middle) + HALF), 2 * middle - 1)
    return _store_fifth_bits_of_codes(build_block_records(dtype, pack_nibbles(codes), d=d), codes)


def _quantise_with_minimum(dtype: DType, top: int, x: F32) -> np.ndarray:
    """Quantise blocks to a scale, a minimum and codes from 0 to `top`; a number is ``minimum + scale * code``."""
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    d = (high - low) / np.float32(top)
    codes = _truncate_to_codes((x - low) * _safe_reciprocal(d) + HALF, top)
    return _store_fifth_bits_of_codes(build_block_records(dtype, pack_nibbles(codes), d=d, dmin=low), codes)


def _store_fifth_bits_of_codes(blocks: np.ndarray, codes: U8) -> np.ndarray:
    """Store the fifth bit of each code in field ``qh`` of the blocks, and return the blocks.

    Dtypes of 4 bits have no such field.
    """
    if "qh" in (blocks.dtype.names or ()):
        blocks["qh"] = _pack_fifth_bits(codes)
    return blocks


def _sum_by_halves(x: F32) -> F32:
    """Sum the numbers of each block in the order of SIMD code: [n, elements] to [n, 1].

    The second half is added to the first until one number is left; `elements` is a power of two.
    """
    while x.shape[1] > 1:
        middle = x.shape[1] // 2
        x = x[:, :middle] + x[:, middle:]
    return x


def _quantise_iq4_nl(x: F32) -> np.ndarray:
    """Quantise blocks to IQ4_NL: round to the nearest values of the code book, then fit the scale.

    1. Divide each block so that its number of largest magnitude becomes the first value of the code book.
    2. Round to the nearest values of the code book.
    3. Choose the scale with the least squared error, where the weight of an element is its square.
    """
    scaled = x * _safe_reciprocal(_find_signed_peak(x) / IQ4_NL_CODE_BOOK[0])
    codes = (15 - (scaled[..., None] < IQ4_NL_BOUNDARIES).sum(-1)).astype(np.uint8)
    values = IQ4_NL_CODE_BOOK[codes]
    weighted = x * x * values
    square = _sum_by_halves(weighted * values)
    d = np.divide(_sum_by_halves(weighted * x), square, out=np.zeros_like(square), where=square != 0)
    return build_block_records(DType.IQ4_NL, pack_nibbles(codes), d=d)


def _round_to_4_bit_floats(x: F32, half_scale: F32) -> U8:
    """Return the code of the 4-bit float nearest to each number of `x`.

    Of two equally near ones, the first is taken. The values of the codes are ``FP4_VALUES_TIMES_2 * half_scale``.
    """
    errors = np.abs(FP4_VALUES_TIMES_2 * half_scale[..., None] - x[..., None])
    return np.where(np.isnan(errors), np.float32(np.inf), errors).argmin(-1).astype(np.uint8)


def _quantise_mxfp4(x: F32) -> np.ndarray:
    largest = np.fmax.reduce(np.abs(x), axis=1, keepdims=True, initial=np.float32(0))  # NaN becomes 0
    e = np.maximum((largest.view(np.uint32) >> 23).astype(np.int64) - 2, 0).astype(np.uint32)
    half = np.where(e < 2, np.uint32(0x00200000) << e, (e - 1) << 23).astype(np.uint32).view(np.float32)
    return build_block_records(DType.MXFP4, pack_nibbles(_round_to_4_bit_floats(x, half)), e=e)


def _quantise_nvfp4(x: F32) -> np.ndarray:
    groups = x.reshape(len(x), 4, 16)
    target = np.fmax.reduce(np.abs(groups), axis=-1, initial=np.float32(0)) / np.float32(
        12
    )  # scales are halved, as the 4-bit floats are doubled
    table = HALF_OF_E4M3[: MAX_E4M3_INDEX + 1]
    scales = np.searchsorted((table[1:] + table[:-1]) / 2, target, side="right").astype(np.uint8)
    codes = _round_to_4_bit_floats(groups, HALF_OF_E4M3[scales][..., None])
    blocks = build_block_records(DType.NVFP4, pack_nibbles(codes.reshape(len(x), 64), 16))
    blocks["scales"] = scales
    return blocks


def pack_2_bits_along_axis_1(codes: U8) -> U8:
    """Pack four codes of 2 bits, which are neighbours along axis 1, into a byte: [n, 4, m] to [n, m]."""
    return np.bitwise_or.reduce(codes << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=1)


def _quantise_q1_0(x: F32) -> np.ndarray:
    d = _sum_by_halves(np.abs(x)) / np.float32(x.shape[1])
    return build_block_records(DType.Q1_0, np.packbits(x >= 0, axis=1, bitorder="little"), d=d)


def _round_to_ternary(x: F32) -> tuple[U8, F32]:
    """Return codes 0, 1, 2 for -1, 0, 1 times the largest magnitude of a block, and this magnitude."""
    d = _find_largest_absolute_value(x)
    return (np.clip(_round_half_away(x * _safe_reciprocal(d)), -1, 1) + 1).astype(np.uint8), d


def _quantise_q2_0(x: F32) -> np.ndarray:
    codes, d = _round_to_ternary(x)
    return build_block_records(DType.Q2_0, pack_2_bits_along_axis_1(codes.reshape(len(x), 16, 4).swapaxes(1, 2)), d=d)


def _quantise_tq2_0(x: F32) -> np.ndarray:
    codes, d = _round_to_ternary(x)
    packed = pack_2_bits_along_axis_1(codes.reshape(len(x) * 2, 4, 32)).reshape(len(x), 64)
    return build_block_records(DType.TQ2_0, packed, d=d)


def _pack_ternary(codes: U8) -> U8:
    """Pack up to five ternary digits into one byte: [n, digits, m] to [n, m].

    The digits form a number in base 3, the first digit highest. The byte is this number as a fraction of 3^5, in units
    of 1/256, rounded up.
    """
    digits = codes.shape[1]
    weights = 3 ** np.arange(TERNARY_DIGITS - 1, TERNARY_DIGITS - 1 - digits, -1)
    number = (codes * weights[:, None]).sum(1)
    return ((number * 256 + DIGIT_RANGE - 1) // DIGIT_RANGE).astype(np.uint8)


def _quantise_tq1_0(x: F32) -> np.ndarray:
    codes, d = _round_to_ternary(x)
    first, second, rest = np.split(codes, [160, 240], axis=1)
    parts = [first.reshape(-1, 5, 32), second.reshape(-1, 5, 16), rest.reshape(-1, 4, 4)]
    packed = np.concatenate([_pack_ternary(part) for part in parts], axis=1)
    blocks = build_block_records(DType.TQ1_0, packed[:, :48], d=d)
    blocks["qh"] = packed[:, 48:]
    return blocks


QUANTISERS: Mapping[DType, Callable[[F32], np.ndarray]] = MappingProxyType(
    {
        DType.Q8_0: _quantise_q8_0,
        DType.Q4_0: partial(_quantise_without_minimum, DType.Q4_0, 8),
        DType.Q4_1: partial(_quantise_with_minimum, DType.Q4_1, 15),
        DType.Q5_0: partial(_quantise_without_minimum, DType.Q5_0, 16),
        DType.Q5_1: partial(_quantise_with_minimum, DType.Q5_1, 31),
        DType.IQ4_NL: _quantise_iq4_nl,
        DType.MXFP4: _quantise_mxfp4,
        DType.NVFP4: _quantise_nvfp4,
        DType.Q1_0: _quantise_q1_0,
        DType.Q2_0: _quantise_q2_0,
        DType.TQ1_0: _quantise_tq1_0,
        DType.TQ2_0: _quantise_tq2_0,
    }
)
"""By dtype, a function from float32 [n, elements of a block] to block records [n]."""
