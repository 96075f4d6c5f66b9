"""Cache rows in blocks of 32 numbers, in the layout of ggml: a float16 scale before the codes.

Packed weights have another layout (`packed.format_table`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from .....graph.dtypes import DType
from .....graph.lazy_dataclass import dataclass
from .....ops.block_layouts import IQ4_NL_CODE_BOOK
from .....ops.block_quantisers import IQ4_NL_BOUNDARIES
from ...compilation.compiler import Subroutine, subroutine
from ...simd.candidate_lanes import (
    load_u16,
    look_up_lanes_in_16_numbers,
    make_16_lane_constant,
    make_16_lane_integer_constant,
    make_reached_boundary_counter,
)
from ...simd.half_memory import load_splat_f16, store_lane_0_as_f16
from ...simd.vectors import (
    LANES,
    absolute,
    add,
    and_int,
    div,
    greater_bitmask,
    lane_max,
    lane_min,
    lane_sum,
    larger,
    load_16_i8_as_i32,
    load_u8_as_i32,
    minimum,
    mul,
    or_int,
    round_away,
    round_to_zero,
    shift_left,
    shift_right,
    smaller,
    splat,
    splat_int,
    store,
    store_int,
    store_u8_lanes,
    sub,
    sub_int,
    to_float,
    truncate_to_int,
    where_less,
    where_nonzero,
    zeros,
)

BLOCK_ELEMENTS, SCALE_BYTES = 32, 2
"""Elements of a block, and bytes of its scale."""
FLOAT_ONE, Q8_0_MAX_CODE, LARGEST_NIBBLE, IQ4_NL_FIRST = (np.float32(x) for x in (1, 127, 15, IQ4_NL_CODE_BOOK[0]))
IQ4_NL_BYTES = DType.IQ4_NL.block_bytes
iq4_nl_values = make_16_lane_constant([*map(float, IQ4_NL_CODE_BOOK)])
lane_integers = make_16_lane_integer_constant(range(LANES))
find_iq4_nl_indices = make_reached_boundary_counter([*map(float, IQ4_NL_BOUNDARIES)])


@dataclass(frozen=True, slots=True)
class CacheBlock:
    """A block of 32 codes of 4 or 5 bits after a float16 scale.

    - `has_minimum`: whether a float16 minimum is between scale and codes; code 0 means this minimum.
    - `offset`: the code that means 0, if there is no minimum.
    - `top`: the largest code.
    - `high_bits`: the byte offset of the fifth bits in the block, or 0 if codes have 4 bits.
    - `has_book`: whether codes are indices of the code book of IQ4_NL.
    """

    dtype: DType
    has_minimum: bool = False
    offset: int = 0
    top: int = 0
    high_bit_offset: int = 0
    has_book: bool = False

    @property
    def nibble_offset(self) -> int:
        """The byte offset of the nibbles (low 4 bits of all codes) in the block; the nibbles are last."""
        return self.dtype.block_bytes - BLOCK_ELEMENTS // 2


@subroutine
def load_16_q8_0_elements(row, c):
    """Load 16 elements of a Q8_0 cache row as float32, from column `c`, a multiple of 16."""
    block = row + c // BLOCK_ELEMENTS * 34
    return mul(to_float(load_16_i8_as_i32(block + SCALE_BYTES + c % BLOCK_ELEMENTS)), load_splat_f16(block))


def _make_expand_cache_blocks(nbytes: int, load: Subroutine) -> Subroutine:
    """Make the subroutine ``(row, c, n, to)`` that expands columns `c` to `n` of a quantised cache row to float32.

    `c` and `n` are multiples of 32. A block of 32 columns has `nbytes` bytes; `load` loads 16 columns.
    """

    def expand(row, c, n, to):
        for block in range(row + c // BLOCK_ELEMENTS * nbytes, row + n // BLOCK_ELEMENTS * nbytes, nbytes):
            store(to, load(block, 0))
            store(to + 64, load(block, 16))
            to += 4 * BLOCK_ELEMENTS

    return subroutine(expand)


@subroutine
def compute_reciprocal_or_zero(scale):
    """Return ``1 / scale``, or 0 if the scale is 0."""
    return where_nonzero(scale, div(splat(FLOAT_ONE), scale), zeros())


@subroutine
def quantise_and_store_q8_0_block(row, c, x, y):
    """Quantise 32 elements to Q8_0 and store the block at column `c` of a cache row.

    The vectors `x` and `y` are the halves of the block. The largest magnitude gets the code 127 or -127.
    """
    d = div(splat(lane_max(larger(absolute(x), absolute(y)))), splat(Q8_0_MAX_CODE))
    block, factor = row + c // BLOCK_ELEMENTS * 34, compute_reciprocal_or_zero(d)
    store_lane_0_as_f16(block, d)
    store_u8_lanes(block + SCALE_BYTES, truncate_to_int(round_away(mul(x, factor))))
    store_u8_lanes(block + SCALE_BYTES + 16, truncate_to_int(round_away(mul(y, factor))))


def _make_load_16_elements(form: CacheBlock) -> Subroutine:
    """Make the subroutine ``(row, c)`` that loads 16 elements of 4 or 5 bits as float32; `c` is a multiple of 16.

    Low nibbles are the first half of a block, high nibbles the second half.
    """
    nbytes, high_bits, codes, offset = form.dtype.block_bytes, form.high_bit_offset, form.nibble_offset, form.offset
    has_minimum, has_book = form.has_minimum, form.has_book

    def load_16_elements(row, c):
        block, half = row + c // BLOCK_ELEMENTS * nbytes, c % BLOCK_ELEMENTS // LANES
        q = and_int(shift_right(load_u8_as_i32(block + codes), splat_int(4 * half)), splat_int(15))
        if high_bits > 0:
            bits = shift_right(splat_int(load_u16(block + high_bits + 2 * half)), lane_integers())
            q = or_int(q, shift_left(and_int(bits, splat_int(1)), splat_int(4)))
        d = load_splat_f16(block)
        if has_book:
            return mul(look_up_lanes_in_16_numbers(iq4_nl_values(), q), d)
        x = mul(to_float(sub_int(q, splat_int(offset))), d)
        return add(x, load_splat_f16(block + SCALE_BYTES)) if has_minimum else x

    return subroutine(load_16_elements)


@subroutine
def store_codes_of_5_bits(block, high_bits, codes, x, y):
    """Store the codes `x` and `y` of up to 5 bits to a block: nibbles at byte `codes`, fifth bits at byte `high_bits`.

    With `high_bits` 0 there are only nibbles.
    """
    q, r = truncate_to_int(x), truncate_to_int(y)
    low, high = and_int(q, splat_int(15)), and_int(r, splat_int(15))
    store_u8_lanes(block + codes, or_int(low, shift_left(high, splat_int(4))))
    if high_bits > 0:
        first, second = greater_bitmask(x, splat(LARGEST_NIBBLE)), greater_bitmask(y, splat(LARGEST_NIBBLE))
        store_int(block + high_bits, first | second << 16)


def _make_quantise_and_store_block(form: CacheBlock) -> Subroutine:
    """Make the subroutine ``(row, c, x, y)`` that quantises 32 elements and stores the block at column `c` of a row.

    The vectors `x` and `y` are the halves of the block. Without a minimum, the number with the largest magnitude gets
    the code 0. With a minimum, the smallest number does.
    """
    nbytes, high_bits, codes, has_minimum = (
        form.dtype.block_bytes,
        form.high_bit_offset,
        form.nibble_offset,
        form.has_minimum,
    )
    first, shift, top = np.float32(-form.offset), np.float32(form.offset + 0.5), np.float32(form.top)

    def store_block(row, c, x, y):
        block = row + c // BLOCK_ELEMENTS * nbytes
        low, high = splat(lane_min(smaller(x, y))), splat(lane_max(larger(x, y)))
        if has_minimum:
            d = div(sub(high, low), splat(top))
            store_lane_0_as_f16(block + SCALE_BYTES, low)
            x, y = sub(x, low), sub(y, low)
        else:
            d = div(where_less(sub(zeros(), low), high, high, low), splat(first))
        factor = compute_reciprocal_or_zero(d)
        store_lane_0_as_f16(block, d)
        x = minimum(round_to_zero(add(mul(x, factor), splat(shift))), splat(top))
        y = minimum(round_to_zero(add(mul(y, factor), splat(shift))), splat(top))
        store_codes_of_5_bits(block, high_bits, codes, x, y)

    return subroutine(store_block)


@subroutine
def quantise_and_store_iq4_nl_block(row, c, x, y):
    """Quantise 32 elements to IQ4_NL and store the block at column `c` of a cache row, as `ops.block_quantisers` does.

    The vectors `x` and `y` are the halves of the block.
    """
    low, high = splat(lane_min(smaller(x, y))), splat(lane_max(larger(x, y)))
    factor = compute_reciprocal_or_zero(div(where_less(sub(zeros(), low), high, high, low), splat(IQ4_NL_FIRST)))
    q, r = find_iq4_nl_indices(mul(x, factor)), find_iq4_nl_indices(mul(y, factor))
    u, v = look_up_lanes_in_16_numbers(iq4_nl_values(), q), look_up_lanes_in_16_numbers(iq4_nl_values(), r)
    s, t = mul(mul(x, x), u), mul(mul(y, y), v)
    square = splat(lane_sum(add(mul(s, u), mul(t, v))))
    d = where_nonzero(square, div(splat(lane_sum(add(mul(s, x), mul(t, y)))), square), zeros())
    block = row + c // BLOCK_ELEMENTS * IQ4_NL_BYTES
    store_lane_0_as_f16(block, d)
    store_u8_lanes(block + SCALE_BYTES, or_int(q, shift_left(r, splat_int(4))))


_FORMS = (
    CacheBlock(DType.Q4_0, offset=8, top=15),
    CacheBlock(DType.Q4_1, has_minimum=True, top=15),
    CacheBlock(DType.Q5_0, offset=16, top=31, high_bit_offset=2),
    CacheBlock(DType.Q5_1, has_minimum=True, top=31, high_bit_offset=4),
)
BLOCK_LOADERS: Mapping[DType, Subroutine] = MappingProxyType(
    {
        DType.Q8_0: load_16_q8_0_elements,
        DType.IQ4_NL: _make_load_16_elements(CacheBlock(DType.IQ4_NL, has_book=True)),
        **{form.dtype: _make_load_16_elements(form) for form in _FORMS},
    }
)
BLOCK_EXPANDERS: Mapping[DType, Subroutine] = MappingProxyType(
    {dtype: _make_expand_cache_blocks(dtype.block_bytes, load) for dtype, load in BLOCK_LOADERS.items()}
)
BLOCK_STORERS: Mapping[DType, Subroutine] = MappingProxyType(
    {
        DType.Q8_0: quantise_and_store_q8_0_block,
        DType.IQ4_NL: quantise_and_store_iq4_nl_block,
        **{form.dtype: _make_quantise_and_store_block(form) for form in _FORMS},
    }
)
