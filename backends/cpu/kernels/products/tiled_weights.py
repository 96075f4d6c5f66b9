"""Weights as tiles of AMX take them: groups of 16 rows, expanded to blocks of 32 columns in terms of bfloat16.

A packed weight is one term, rounded as an activation is, by 2^-8 of it at most.  One that is not packed is as many
terms as hold it, and meets activations in three, which hold float32.  Each term is 2^-8 of the one before it or less,
so products of terms i and j with i + j > 2 are left out, which float32 would not show.
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
"""Bytes of 32 columns in one term: of two groups, and of 32 rows of activations."""
AHEAD = 4096
"""How many bytes ahead a packed weight is fetched while it is expanded."""
SHOWN = 3
"""Terms of float32."""


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """One type of weight: its `terms`, the kind of `rounding` of activations that meet it, and from how many rows of
    these on tiles take it: of an expert, on average.  From there on they are faster than products for which less has
    to be expanded; with float16 faster from 24 rows on, up to a third slower before, but ten times as exact.

    ``expand(to, group, stride, left, first, last, n)`` writes blocks of a group of `n`, from the first to before the
    last, to `to`, term after term `BLOCK` apart; rows are `stride` bytes long, and `left` exist.
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
        """Bytes of 32 columns of 32 rows of activations."""
        return TERMS[self.rounding] * BLOCK


@cache
def tiled_weight(dtype: DType) -> TiledWeight:
    """A type of weight that tiles take."""
    if dtype in FORMATS:
        return TiledWeight(dtype, TILED, 1, 24, _packed(FORMATS[dtype]))
    if dtype is DType.BF16:
        return TiledWeight(dtype, SPLIT, 1, 7, _pairs)
    terms, least = {DType.F16: (2, 7), DType.F32: (SHOWN, 96)}[dtype]
    return TiledWeight(dtype, SPLIT, terms, least, _split(dtype, terms))


def _packed(form: Format) -> Part:
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
    """Of bfloat16: pairs of columns lie side by side already."""
    for block in range(first, last):
        turn_floats(group + block * WIDTH, stride, left, LANES, to)
        to += BLOCK


def _split(dtype: DType, terms: int) -> Part:
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
    """``(mine, x, block)``: add products of one or two tiles of activations, 16 rows each, and a block of a weight to
    the first four registers."""
    of_x = TERMS[weight.rounding]
    pairs = [(i, j) for i in reversed(range(weight.terms)) for j in reversed(range(of_x)) if i + j < SHOWN]
    news = [k == 0 or pairs[k - 1][0] != i for k, (i, _) in enumerate(pairs)]
    made = (_product(i * BLOCK, j * BLOCK, new, tiles_of_x == 2) for (i, j), new in zip(pairs, news, strict=True))
    return reduce(_then, made)


def _product(i: int, j: int, new: bool, both: bool) -> Part:
    """Of a term of each; that of the weight is loaded if it is `new`; of activations `both` tiles, or the first."""
    unit = tiles()
    load_x, load_y = unit.load[4:6]
    load_u, load_v = unit.pass_by[6:]  # the first cache is for rows of activations: other squares meet them next
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
    def both(mine, x, block):
        before(mine, x, block)
        after(mine, x, block)

    return part(both)
