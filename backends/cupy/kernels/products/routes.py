"""The fields of several products of the same rows in one launch; see ``routes.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....operands import Operand
from ...binding.launches import Word, rows_of

MOST_PRODUCTS = 4
ALONE, SWIGLU, GEGLU = range(3)
UNITS = {"swiglu": SWIGLU, "geglu": GEGLU}
"""Codes of gated units in matmul kernels, by op."""
Products = Sequence[tuple[Operand, Operand]]
"""Weights of one dtype and row length, with their results. The second result of a gated unit is not written."""


@dataclass(frozen=True, slots=True)
class Summed:
    """A weighted sum of the products of a token.

    `choice` selects weights of experts; `shares` are the factors of their products. The product with `other` has the
    factor ``sigmoid(gate)``, or 1 without a gate.
    """

    shares: Operand
    """Contiguous [tokens, used]."""
    choice: Sequence[Word]
    other: Operand | None = None
    other_x: Operand | None = None
    gate: Operand | None = None

    @property
    def entries(self) -> int:
        """Products of a token."""
        return self.shares.shape[-1] + (self.other is not None)

    @property
    def words(self) -> list[Word]:
        """The fields of the sum in a kernel's struct."""
        x, gate = self.other_x, self.gate
        words: list[Word] = [self.shares, self.shares.shape[-1], x or 0, gate or 0]
        return [*words, 0 if x is None else rows_of(x), 0 if gate is None else rows_of(gate)]


NOTHING_SUMMED: Sequence[Word] = (0,) * 6


def filled(fields: Sequence[Sequence[Word]]) -> list[Word]:
    """Return the fields of all products, padded to the number that a kernel supports."""
    rest: list[Word] = [0] * (len(fields[0]) * (MOST_PRODUCTS - len(fields)))
    return [word for product in fields for word in product] + rest
