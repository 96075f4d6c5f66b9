"""The fields of several products of the same rows in one launch; see ``routes.cuh``.

A launch computes entries: the products of one weight matrix with its rows of x. The routing maps each entry to its
matrix and rows. With experts, an entry is a slot: a pair of a token and a chosen expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....fusion.operands import Operand
from ...binding.launch_builder import LaunchWord, compute_row_stride

MAX_PRODUCTS = 4
NO_UNIT, SWIGLU, GEGLU = range(3)
GATED_UNIT_CODES = {"swiglu": SWIGLU, "geglu": GEGLU}
"""Codes of gated units in matmul kernels, by op."""
WeightsAndResults = Sequence[tuple[Operand, Operand]]
"""Weights of one dtype and row length, each with its result. The second result of a gated unit is not written."""


@dataclass(frozen=True, slots=True)
class WeightedExpertSum:
    """The operands of the weighted sum of expert outputs that one launch computes for each token.

    - `choice`: the chosen experts, which select the weights.
    - `shares`: the factors of their outputs, the routing weights.
    - `other`: the weight of an additional product, such as a shared expert.
    - `gate`: the additional product has the factor ``sigmoid(gate)``, or 1 without a gate.
    """

    shares: Operand
    """Contiguous [tokens, used]."""
    choice: Sequence[LaunchWord]
    other: Operand | None = None
    other_x: Operand | None = None
    gate: Operand | None = None

    @property
    def products_per_token(self) -> int:
        """The number of products that are summed for each token."""
        return self.shares.shape[-1] + (self.other is not None)

    @property
    def words(self) -> list[LaunchWord]:
        """The launch words of the sum in a kernel's struct."""
        x, gate = self.other_x, self.gate
        words: list[LaunchWord] = [self.shares, self.shares.shape[-1], x or 0, gate or 0]
        return [*words, 0 if x is None else compute_row_stride(x), 0 if gate is None else compute_row_stride(gate)]


NO_SUM_FIELDS: Sequence[LaunchWord] = (0,) * 6


def join_and_pad_product_words(fields: Sequence[Sequence[LaunchWord]]) -> list[LaunchWord]:
    """Join the launch words of several products of one launch into one list, padded to `MAX_PRODUCTS` with zeros."""
    rest: list[LaunchWord] = [0] * (len(fields[0]) * (MAX_PRODUCTS - len(fields)))
    return [word for product in fields for word in product] + rest
