"""Several products of the same rows in one launch, as their kernels take them; see ``routes.cuh``."""

from __future__ import annotations

from collections.abc import Sequence

from ...operands import Operand
from ..binding.launches import Word

MOST_PRODUCTS = 4
ALONE, SWIGLU, GEGLU = range(3)
UNITS = {"swiglu": SWIGLU, "geglu": GEGLU}
"""Gated units that the kernels of products know, by the op that makes them."""
Products = Sequence[tuple[Operand, Operand]]
"""Weights of one type and length, and what becomes of each; of a gated unit the second result is not written."""


def filled(fields: Sequence[Sequence[Word]]) -> list[Word]:
    """The fields of all products that a kernel has room for."""
    rest: list[Word] = [0] * (len(fields[0]) * (MOST_PRODUCTS - len(fields)))
    return [word for product in fields for word in product] + rest
