"""Weights for AMX tiles: groups of 16 rows, expanded to blocks of 32 columns in bfloat16 terms.

- A packed weight has one term, rounded by at most 2^-8 of it, as an activation is.
- Another weight has as many terms as it needs to be exact. Its activations have three terms, which hold float32.

Each term is at most 2^-8 of the term before it. Products of terms i and j with i + j > 2 are omitted: float32 sums
would not show them.
"""

from __future__ import annotations

from functools import cache, reduce

from .....graph.dtypes import DType
from .....graph.lazy_dataclass import dataclass
from ...compilation.compiler import Subroutine, subroutine
from ...simd.amx import TILE_BYTES, TILE_ROW_BYTES
from ...simd.bf16_pairs import store_dequantised_bf16_tile
from ...simd.bf16_terms import make_split_and_store_ordered_bf16_terms
from ...simd.permute_lanes import transpose_f32
from ...simd.vectors import LANES, load, load_f16
from ..packed.activation_quantisation import SPLIT_KIND, TERMS_BY_KIND, TILED_KIND
from ..packed.format_table import BLOCK_COLUMNS, FORMATS, UNIT_BLOCKS, PackedFormat
from ..vector.amx_tiles import select_amx_tile_operations
from .tile_loops import GROUP_ROWS, prefetch_cache_lines_to_l1_and_l2

BLOCK_BYTES = 2 * TILE_BYTES
"""Bytes of one term of 32 columns: of two groups, or of 32 activation rows."""
PREFETCH_BYTES = 4096
"""Prefetch distance in bytes while a packed weight is expanded."""
FLOAT32_TERMS = 3
"""bfloat16 terms that hold a float32."""


@dataclass(frozen=True, slots=True)
class AmxBf16WeightType:
    """A weight type for AMX tiles: how its rows expand to bfloat16 terms.

    Attributes:
        dtype: The type of the weight.
        activation_kind: The form of its activations: a kind of rounding of `activation_quantisation`.
        term_count: bfloat16 terms of a weight.
        min_activation_rows: Activation rows (per expert, on average) from which on tiles are faster. Exception: float16
            is faster from 24 rows on; from 7 to 23 rows it is up to a third slower but ten times as exact.
        expand_blocks: ``(to, group, stride, left, first, last, n)`` expands blocks `first` to `last` of the `n` blocks
            of a group. The terms are `BLOCK_BYTES` apart. Weight rows have `stride` bytes; `left` of them exist.
    """

    dtype: DType
    activation_kind: int
    term_count: int
    min_activation_rows: int
    expand_blocks: Subroutine

    @property
    def expanded_block_bytes(self) -> int:
        """Bytes of an expanded weight block: 32 columns of two groups of 16 rows, in all bfloat16 terms."""
        return self.term_count * BLOCK_BYTES

    @property
    def activation_block_bytes(self) -> int:
        """Bytes of an activation block: 32 columns of 32 activation rows, in all bfloat16 terms."""
        return TERMS_BY_KIND[self.activation_kind] * BLOCK_BYTES


@cache
def make_amx_weight_type(dtype: DType) -> AmxBf16WeightType:
    """Make the description of a weight type for AMX tiles: its terms, and how its rows are expanded."""
    if dtype in FORMATS:
        return AmxBf16WeightType(dtype, TILED_KIND, 1, 24, _make_expand_packed_to_bf16(FORMATS[dtype]))
    if dtype is DType.BF16:
        return AmxBf16WeightType(dtype, SPLIT_KIND, 1, 7, _expand_bf16_weights_to_tiles)
    terms, min_rows = {DType.F16: (2, 7), DType.F32: (FLOAT32_TERMS, 96)}[dtype]
    return AmxBf16WeightType(dtype, SPLIT_KIND, terms, min_rows, _make_expand_floats_to_bf16_terms(dtype, terms))


def _make_expand_packed_to_bf16(form: PackedFormat) -> Subroutine:
    """Make the subroutine that dequantises blocks of a packed weight to bfloat16, in the layout of AMX tiles.

    Its arguments are as in `AmxBf16WeightType.expand_blocks`.
    """
    codes, scales, biases, nbytes = form.load_codes, form.load_scales, form.load_biases, form.packed_block_bytes
    of_first, of_second = form.plane_bytes
    lines = -(-nbytes // 64)

    def expand_packed(to, group, stride, left, first, last, n):
        for block in range(first, last):
            prefetch_cache_lines_to_l1_and_l2(group + block * nbytes, lines, PREFETCH_BYTES, PREFETCH_BYTES)
            start = block // UNIT_BLOCKS * UNIT_BLOCKS
            b, count, planes = block - start, min(UNIT_BLOCKS, n - start), group + start * nbytes
            second = planes + count * of_first
            behind = second + count * of_second
            d, e = scales(behind, b)
            m, o = biases(behind, b)
            store_dequantised_bf16_tile(to, codes(planes + b * of_first, second + b * of_second), d, e, m, o)
            to += BLOCK_BYTES

    return subroutine(expand_packed)


@subroutine
def _expand_bf16_weights_to_tiles(to, group, stride, left, first, last, n):
    """Copy blocks of a bfloat16 weight to the layout of AMX tiles; each block is transposed in pairs of columns.

    A pair of columns is adjacent in the weight, as AMX tiles need it. Arguments are as in
    `AmxBf16WeightType.expand_blocks`.
    """
    for block in range(first, last):
        transpose_f32(group + block * TILE_ROW_BYTES, stride, left, LANES, to)
        to += BLOCK_BYTES


def _make_expand_floats_to_bf16_terms(dtype: DType, terms: int) -> Subroutine:
    """Make the subroutine that splits float16 or float32 weights into bfloat16 terms, in the layout of AMX tiles.

    It splits the numbers of a row into terms, then transposes each term. Its arguments are as in
    `AmxBf16WeightType.expand_blocks`.
    """
    size = dtype.storage.itemsize
    load_16, store = load_f16 if dtype is DType.F16 else load, make_split_and_store_ordered_bf16_terms(terms)

    def expand_split(to, group, stride, left, first, last, n):
        for block in range(first, last):
            for row in range(GROUP_ROWS):
                at = group + min(row, left - 1) * stride + block * BLOCK_COLUMNS * size
                store(to + row * TILE_ROW_BYTES, BLOCK_BYTES, load_16(at), load_16(at + LANES * size))
            for _ in range(terms):
                transpose_f32(to, TILE_ROW_BYTES, GROUP_ROWS, LANES, to)
                to += BLOCK_BYTES

    return subroutine(expand_split)


@cache
def make_multiply_bf16_terms(weight: AmxBf16WeightType, tiles_of_x: int) -> Subroutine:
    """Make the subroutine ``(mine, x, block)`` that adds the products of activation tiles `x` and a weight block.

    It multiplies all pairs of bfloat16 terms that float32 sums can show, small terms first. Four tile registers hold
    the sums.

    Args:
        weight: The weight type.
        tiles_of_x: The number of activation tiles of 16 rows: 1 or 2.
    """
    of_x = TERMS_BY_KIND[weight.activation_kind]
    pairs = [(i, j) for i in reversed(range(weight.term_count)) for j in reversed(range(of_x)) if i + j < FLOAT32_TERMS]
    news = [k == 0 or pairs[k - 1][0] != i for k, (i, _) in enumerate(pairs)]
    parts = (
        _make_multiply_weight_and_activation_term(i * BLOCK_BYTES, j * BLOCK_BYTES, new, tiles_of_x == 2)
        for (i, j), new in zip(pairs, news, strict=True)
    )
    return reduce(_chain_two_subroutines, parts)


def _make_multiply_weight_and_activation_term(i: int, j: int, new: bool, both: bool) -> Subroutine:
    """Make the subroutine that multiplies one weight term and one activation term in AMX registers.

    Args:
        i: Byte offset of the weight term.
        j: Byte offset of the activation term.
        new: Whether to load the weight term.
        both: Whether to multiply two activation tiles instead of the first.
    """
    unit = select_amx_tile_operations()
    load_x, load_y = unit.load[4:6]
    load_u, load_v = unit.load_streaming[6:]  # other matrices need the activations in the first cache next
    multiply_0, multiply_1, multiply_2, multiply_3 = (
        unit.multiply(2 * row + group, 4 + row, 6 + group) for row in range(2) for group in range(2)
    )

    def multiply_term(mine, x, block):
        load_x(mine, x + j, TILE_ROW_BYTES)
        if new:
            load_u(mine, block + i, TILE_ROW_BYTES)
        multiply_0(mine)
        if new:
            load_v(mine, block + i + TILE_BYTES, TILE_ROW_BYTES)
        multiply_1(mine)
        if both:
            load_y(mine, x + j + TILE_BYTES, TILE_ROW_BYTES)
            multiply_2(mine)
            multiply_3(mine)

    return subroutine(multiply_term)


def _chain_two_subroutines(before: Subroutine, after: Subroutine) -> Subroutine:
    """Make the subroutine that calls `before`, then `after`, both with its own arguments."""

    def run_both(mine, x, block):
        before(mine, x, block)
        after(mine, x, block)

    return subroutine(run_both)
