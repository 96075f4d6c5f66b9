"""GEMV with float weights that have contiguous rows."""

from __future__ import annotations

from itertools import accumulate

from .....graph.dtypes import DType
from ....operands import Operand
from ...binding.launches import Launches, Word, blocks, rows_of
from ...device.driver import Source
from ..elementwise import TYPES
from .routes import ALONE, NOTHING_SUMMED, Products, Summed, filled

OWN = 16
"""Weight rows of a block. Each warp has two rows and all their columns."""
PARTS, COLUMNS = (8, 4, 2), 256
"""Numbers of column parts for weights with few rows, and the fewest columns of a part. Warps share the parts."""
PAIR, WARPS = 2, 12
"""Weight rows of a block that adds entries, and the most warps of it. The warps share the entries."""
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
    """Return the row count, and the strides between matrices and between rows."""
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
    """Multiply a few rows of x by several weights in one launch.

    Args:
        launches: Receives the launch.
        products: The weights and their results.
        x: Activations [entries * tokens, columns].
        entries: Entries of the route.
        tokens: Rows of x for each entry, at most 4.
        route: The fields of the routing.
        unit: Code of the gated unit that joins two products.
        others: Weights of additional entries, which have one row each.
        more: The number of additional entries.
    """
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
    """Add the weighted products of each token in one launch.

    Args:
        launches: Receives the launch.
        w: Weights of the experts.
        x: Activations, contiguous [tokens, used, columns].
        out: Results [tokens, rows].
        summed: The factors, and a further weight.
    """
    products = [(w, out), *([] if summed.other is None else [(summed.other, out)])]
    fields: list[list[Word]] = [[m, o, 0, *_steps(m), rows_of(o)] for m, o in products]
    words = [*filled(fields), 1, ALONE, 1, x, w.shape[-1], 1, rows_of(x), 1, 1, *summed.choice, 0, *summed.words]
    grid = blocks(w.shape[-2], PAIR), out.shape[0]
    launches.add(BY_TYPE[w.dtype][f"summed<{TYPES[w.dtype]}>"], grid, 32 * min(WARPS, summed.entries), words)
