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
from ...compiler import Part, part
from ...simd.amx import TILE, WIDTH
from ...simd.bf16 import store_weights
from ...simd.order import turn_floats
from ...simd.terms import store_ordered_terms
from ...simd.vectors import LANES, load, load_half
from ..amx import tiles
from .formats import COLUMNS, FORMATS, UNIT, Format
from .grouped import ROWS, fetch
from .rounding import SPLIT, TERMS, TILED

BLOCK = 2 * TILE
"""Bytes of one term of 32 columns: of two groups, or of 32 activation rows."""
AHEAD = 4096
"""Prefetch distance in bytes while a packed weight is expanded."""
SHOWN = 3
"""bfloat16 terms that hold a float32."""


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A weight type for AMX tiles.

    Attributes:
        dtype: The type of the weight.
        activation_kind: The kind of `rounding` of its activations.
        term_count: bfloat16 terms of a weight.
        min_activation_rows: Activation rows (per expert, on average) from which on tiles are faster. Exception: float16
            is faster from 24 rows on; from 7 to 23 rows it is up to a third slower but ten times as exact.
        expand_blocks: ``(to, group, stride, left, first, last, n)`` expands blocks `first` to `last` of the `n` of a
            group. The terms are `BLOCK_BYTES` apart. Weight rows have `stride` bytes; `left` of them exist.
    """

    dtype: DType
    rounding: int
    terms: int
    least: int
    expand: Part

    @property
    def block(self) -> int:
        """Bytes of 32 columns of two groups."""
        return self.terms * BLOCK

    @property
    def x_block(self) -> int:
        """Bytes of 32 columns of 32 activation rows."""
        return TERMS[self.rounding] * BLOCK


@cache
def tiled_weight(dtype: DType) -> TiledWeight:
    """Return the tile parameters of a weight type."""
    if dtype in FORMATS:
        return TiledWeight(dtype, TILED, 1, 24, _packed(FORMATS[dtype]))
    if dtype is DType.BF16:
        return TiledWeight(dtype, SPLIT, 1, 7, _pairs)
    terms, least = {DType.F16: (2, 7), DType.F32: (SHOWN, 96)}[dtype]
    return TiledWeight(dtype, SPLIT, terms, least, _split(dtype, terms))


def _packed(form: Format) -> Part:
    """Make `AmxWeight.expand_blocks` of a packed type."""
    codes, scales, biases, nbytes, width = form.codes, form.scales, form.biases, form.nbytes, form.planes[0]
    high = form.planes[1] if len(form.planes) > 1 else 0
    lines = -(-nbytes // 64)

    def expand(to, group, stride, left, first, last, n):
        for block in range(first, last):
            fetch(group + block * nbytes, lines, AHEAD, AHEAD)
            start = block // UNIT * UNIT
            b, count, planes = block - start, min(UNIT, n - start), group + start * nbytes
            second = planes + count * 64 * width
            behind = second + count * 64 * high
            d, e = scales(behind, b)
            m, o = biases(behind, b)
            store_weights(to, codes(planes + b * 64 * width, second + b * 64 * high), d, e, m, o)
            to += BLOCK

    return part(expand)


@part
def _pairs(to, group, stride, left, first, last, n):
    """Expand bfloat16: pairs of columns are adjacent already."""
    for block in range(first, last):
        turn_floats(group + block * WIDTH, stride, left, LANES, to)
        to += BLOCK


def _split(dtype: DType, terms: int) -> Part:
    """Make `AmxWeight.expand_blocks` of float16 or float32: transpose, and split into terms."""
    size = dtype.storage.itemsize
    load_some, store = load_half if dtype is DType.F16 else load, store_ordered_terms(terms)

    def expand(to, group, stride, left, first, last, n):
        for block in range(first, last):
            for row in range(ROWS):
                at = group + min(row, left - 1) * stride + block * COLUMNS * size
                store(to + row * WIDTH, BLOCK, load_some(at), load_some(at + LANES * size))
            for _ in range(terms):
                turn_floats(to, WIDTH, ROWS, LANES, to)
                to += BLOCK

    return part(expand)


@cache
def products_of_terms(weight: TiledWeight, tiles_of_x: int) -> Part:
    """Make ``(mine, x, block)``: add the products of 1 or 2 activation tiles and a weight block to four registers.

    An activation tile has 16 rows. Small terms are added first.
    """
    of_x = TERMS[weight.rounding]
    pairs = [(i, j) for i in reversed(range(weight.terms)) for j in reversed(range(of_x)) if i + j < SHOWN]
    news = [k == 0 or pairs[k - 1][0] != i for k, (i, _) in enumerate(pairs)]
    made = (_product(i * BLOCK, j * BLOCK, new, tiles_of_x == 2) for (i, j), new in zip(pairs, news, strict=True))
    return reduce(_then, made)


def _product(i: int, j: int, new: bool, both: bool) -> Part:
    """Make the product of weight term `i` and activation term `j`, both byte offsets.

    The weight term is loaded if it is `new`. `both` selects two activation tiles instead of the first.
    """
    unit = tiles()
    load_x, load_y = unit.load[4:6]
    load_u, load_v = unit.pass_by[6:]  # other matrices need the activations in the first cache next
    multiply_0, multiply_1, multiply_2, multiply_3 = (
        unit.multiply(2 * row + group, 4 + row, 6 + group) for row in range(2) for group in range(2)
    )

    def product(mine, x, block):
        load_x(mine, x + j, WIDTH)
        if new:
            load_u(mine, block + i, WIDTH)
        multiply_0(mine)
        if new:
            load_v(mine, block + i + TILE, WIDTH)
        multiply_1(mine)
        if both:
            load_y(mine, x + j + TILE, WIDTH)
            multiply_2(mine)
            multiply_3(mine)

    return part(product)


def _then(before: Part, after: Part) -> Part:
    """Return a part that runs `before`, then `after`."""

    def both(mine, x, block):
        before(mine, x, block)
        after(mine, x, block)

    return part(both)
