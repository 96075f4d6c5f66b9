"""Several products of the same rows in one launch, as their kernels take them; see ``routes.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....operands import Operand
from ...binding.launches import Word, rows_of

MOST_PRODUCTS = 4
ALONE, SWIGLU, GEGLU = range(3)
UNITS = {"swiglu": SWIGLU, "geglu": GEGLU}
"""Gated units that the kernels of products know, by the op that makes them."""
Products = Sequence[tuple[Operand, Operand]]
"""Weights of one type and length, and what becomes of each; of a gated unit the second result is not written."""


@dataclass(frozen=True, slots=True)
class Summed:
    """Products of a token that are added up, each times its share: those with the weights that `choice` gives, and one
    with `other`, whose share a sigmoid of `gate` gives if there is one."""

    shares: Operand
    """Dense [tokens, used]."""
    choice: Sequence[Word]
    other: Operand | None = None
    other_x: Operand | None = None
    gate: Operand | None = None

    @property
    def entries(self) -> int:
        return self.shares.shape[-1] + (self.other is not None)

    @property
    def words(self) -> list[Word]:
        x, gate = self.other_x, self.gate
        words: list[Word] = [self.shares, self.shares.shape[-1], x or 0, gate or 0]
        return [*words, 0 if x is None else rows_of(x), 0 if gate is None else rows_of(gate)]


NOTHING_SUMMED: Sequence[Word] = (0,) * 6


def filled(fields: Sequence[Sequence[Word]]) -> list[Word]:
    """The fields of all products that a kernel has room for."""
    rest: list[Word] = [0] * (len(fields[0]) * (MOST_PRODUCTS - len(fields)))
    return [word for product in fields for word in product] + rest
