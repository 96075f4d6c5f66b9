"""What each thread has of a value whose columns a product dealt: columns of it, or heads that are so many columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ...graph.lazy_dataclass import dataclass
from ..operands import Operand
from .steps import Steps


@dataclass(frozen=True, slots=True)
class Pieces:
    """Thread i has the columns (axis -1) or heads (axis -2) from ``ends[i]`` to before ``ends[i + 1]``."""

    axis: int
    ends: Sequence[int]
    bounds: Sequence[int]
    """The same, always in columns."""

    def of(self, x: Operand) -> list[Operand | None]:
        """The piece of each thread, None where it has nothing; all of an operand that is broadcast along the axis."""
        axis = len(x.shape) + self.axis
        alike = axis < 0 or x.shape[axis] == 1 != self.ends[-1]
        pairs = list(pairwise(self.ends))
        return [None if first == last else x if alike else x.part(axis, first, last - first) for first, last in pairs]


def pieces_of(steps: Steps, sources: Sequence[Operand], out: Operand, *, whole_rows: bool = False) -> Pieces | None:
    """How threads that have columns of one of the sources go on with them; None if they have to meet anyway.

    With `whole_rows` no row of `out` may be cut.
    """
    bounds = steps.columns_of(sources)
    if bounds is None or not out.shape:
        return None
    if out.shape[-1] == bounds[-1] > 1 and not whole_rows:
        return Pieces(-1, bounds, bounds)
    size = out.shape[-1]
    one_row = out.is_dense and math.prod(out.shape) == bounds[-1] and math.prod(out.shape[:-2]) == 1
    if len(out.shape) < 2 or not one_row or any(b % size for b in bounds):
        return None
    return Pieces(-2, [b // size for b in bounds], bounds)
