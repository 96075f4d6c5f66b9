"""Decoding of ternary weight codes (TQ1): five base-3 digits in a byte.

A byte is ``v * 256 / 243``, rounded up, for a number v of five digits. The first digit is the byte times 3, divided by
256; the remainder has the next digits. With four digits:

>>> digits, byte = [], -(-int("2012", 3) * 256 // 81)
>>> for _ in range(4):
...     digits.append(3 * byte >> 8)
...     byte = 3 * byte & 255
>>> digits
[2, 0, 1, 2]

In a block of 32 columns of 16 rows the first 64 bytes have vectors 0 to 4 of the codes, one digit each. 40 bytes have
the other three vectors: digit n of byte m is byte ``40 n + m`` of these vectors.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from . import vectors as simd
from .dot_tiles import CODES_TYPE, pack_vectors_into_array
from .vectors import ADDRESS, BYTES, INTS, LANES, bytes_of, intrinsic, llvm_type

_B, _I = llvm_type(BYTES), llvm_type(INTS)
DIGITS, SHORT_BYTES, SHORT_LANES = 5, 40, 10
"""Base-3 digits of a byte; bytes of the last three vectors of a block; and 32-bit lanes of these bytes."""
MIN_BYTE_OF_ONE, MIN_BYTE_OF_TWO = 86, 171
"""The smallest byte with first digit 1, and the smallest byte with first digit 2."""


def _move_each_digit_first(b: Any, coded: Any) -> list[Any]:
    """Multiply bytes of base-3 digits so that digit n becomes the first one; return the vectors for n from 0 to 4."""
    remainders = [coded]
    for _ in range(DIGITS - 1):
        last = remainders[-1]
        remainders.append(b.add(b.add(last, last), last))
    return remainders


def _first_digit(b: Any, x: Any) -> Any:
    one = b.select(b.icmp_unsigned(">=", x, bytes_of(MIN_BYTE_OF_ONE)), bytes_of(1), bytes_of(0))
    return b.select(b.icmp_unsigned(">=", x, bytes_of(MIN_BYTE_OF_TWO)), bytes_of(2), one)


def _select_concatenated_lanes(b: Any, parts: list[Any], lane_numbers: range) -> Any:
    """Concatenate the first `SHORT_LANES` lanes of each part, and select the 16 lanes `lane_numbers` of the result."""
    sources = [divmod(number, SHORT_LANES) for number in lane_numbers]
    joined = parts[sources[0][0]]
    for part in sorted({part for part, _ in sources}):
        order = [LANES + lane if of == part else i if of < part else 0 for i, (of, lane) in enumerate(sources)]
        joined = b.shuffle_vector(joined, parts[part], ir.Constant(_I, order))
    return joined


@intrinsic(CODES_TYPE, ADDRESS, ADDRESS)
def load_ternary_codes_of_32_columns(b, long_address, short_address):
    """Load and decode the ternary codes of 32 columns of 16 rows.

    The codes are in 64 bytes at `long_address` and 40 bytes at `short_address`. The 24 bytes behind the latter must be
    readable, too.
    """
    vectors = _move_each_digit_first(b, simd.load_bytes.body(b, long_address))
    short = [b.bitcast(x, _I) for x in _move_each_digit_first(b, simd.load_bytes.body(b, short_address))]
    for first in range(0, 3 * LANES, LANES):
        vectors.append(b.bitcast(_select_concatenated_lanes(b, short, range(first, first + LANES)), _B))
    return pack_vectors_into_array(b, [_first_digit(b, x) for x in vectors])
