"""Products of few tokens with weights that are kept as floats, whose rows are dense."""

from __future__ import annotations

from itertools import accumulate

from .....graph.dtypes import DType
from ....operands import Operand
from ...binding.launches import Launches, Word, blocks, rows_of
from ...device.driver import Source
from ..elementwise import TYPES
from .routes import ALONE, NOTHING_SUMMED, Products, Summed, filled

OWN = 16
"""Rows of a block for few tokens, where each warp has two and all their columns."""
PARTS, COLUMNS = (8, 4, 2), 256
"""Into how many parts columns are shared out among warps where rows are too few for all processors, and the fewest of a
part."""
PAIR, WARPS = 2, 12
"""Rows of a block that sums entries, and its warps at most, which share those out."""
COUNTS = (1, 2, 4)
SOURCES = tuple(
    Source(
        "dense.cu",
        (*(f"few<{TYPES[dtype]}, {n}>" for n in COUNTS), f"summed<{TYPES[dtype]}>"),
        ("routes.cuh",),
    )
    for dtype in (DType.F32, DType.F16, DType.BF16)
)
BY_TYPE = dict(zip((DType.F32, DType.F16, DType.BF16), SOURCES, strict=True))


def _steps(w: Operand) -> list[Word]:
    """Rows, the steps between matrices and between rows."""
    steps = [s for n, s in zip(w.shape[:-2], w.strides[:-2], strict=True) if n != 1]
    return [w.shape[-2], steps[-1] if steps else 0, w.strides[-2]]


def few(
    launches: Launches,
    products: Products,
    x: Operand,
    entries: int,
    tokens: int,
    route: list[Word],
    unit: int = ALONE,
    others: Products = (),
    more: int = 0,
) -> None:
    """All entries in one launch, each of at most 4 rows of x; and `more` of one row, with the unit `others`."""
    count = next(n for n in COUNTS if n >= tokens)
    w = products[0][0]

    def taken_in(parts: int) -> list[int]:
        return [blocks(matrix.shape[-2], OWN // parts // (2 if unit else 1)) for matrix, _ in products]

    def is_worth(parts: int) -> bool:
        taken = taken_in(parts // 2)
        busy = (taken[0] if unit else sum(taken)) * (entries + more)
        return w.shape[-1] >= COLUMNS * parts and busy < launches.processors

    parts = next(filter(is_worth, PARTS), 1)
    taken = taken_in(parts)
    first = [0 if unit else n for n in accumulate(taken, initial=0)]
    fields = [
        [w, out, n, *_steps(w), rows_of(out)] for (w, out), n in zip([*products, *others], [*first, 0], strict=False)
    ]
    words = [*filled(fields), len(products), unit, parts, x, w.shape[-1], tokens, rows_of(x), *route, entries]
    words += NOTHING_SUMMED
    kernel = BY_TYPE[w.dtype][f"few<{TYPES[w.dtype]}, {count}>"]
    launches.add(kernel, (taken[0] if unit else sum(taken), entries + more), 256, words)


def summed(launches: Launches, w: Operand, x: Operand, out: Operand, summed: Summed) -> None:
    """The weighted sums of a token's products, in one launch; x is dense [tokens, used, columns]."""
    products = [(w, out), *([] if summed.other is None else [(summed.other, out)])]
    fields: list[list[Word]] = [[m, o, 0, *_steps(m), rows_of(o)] for m, o in products]
    words = [*filled(fields), 1, ALONE, 1, x, w.shape[-1], 1, rows_of(x), 1, 1, *summed.choice, 0, *summed.words]
    grid = blocks(w.shape[-2], PAIR), out.shape[0]
    launches.add(BY_TYPE[w.dtype][f"summed<{TYPES[w.dtype]}>"], grid, 32 * min(WARPS, summed.entries), words)
