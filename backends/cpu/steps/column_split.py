"""Column splits: the columns or heads of a value that each thread owns after a matmul that was split by columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ....graph.lazy_dataclass import dataclass
from ...fusion.operands import Operand
from .step_table import StepTableBuilder


@dataclass(frozen=True, slots=True)
class ColumnSplit:
    """A split of a value over threads: thread i owns columns (axis -1) or heads (axis -2).

    Thread i owns the indices from ``axis_bounds[i]`` to ``axis_bounds[i + 1]``.
    """

    axis: int
    axis_bounds: Sequence[int]
    column_bounds: Sequence[int]
    """The bounds in columns, also for a split by heads."""

    def slice_by_thread(self, x: Operand) -> list[Operand | None]:
        """Return the slice of `x` that each thread owns, or None for a thread without work.

        An operand that broadcasts along the axis is returned whole.
        """
        axis = len(x.shape) + self.axis
        is_broadcast = axis < 0 or x.shape[axis] == 1 != self.axis_bounds[-1]
        pairs = list(pairwise(self.axis_bounds))
        return [
            None if first == last else x if is_broadcast else x.slice_axis(axis, first, last - first)
            for first, last in pairs
        ]


def find_continued_column_split(
    steps: StepTableBuilder, sources: Sequence[Operand], out: Operand, *, whole_rows: bool = False
) -> ColumnSplit | None:
    """Find a split of the next step in which each thread reads only the columns that it wrote itself.

    Such a step needs no barrier. The result is the split of `out`; None means that the step needs a barrier.

    Args:
        steps: The builder with the previous steps.
        sources: Operands of the next step.
        out: Result of the next step.
        whole_rows: Whether each row of `out` must stay in one thread.
    """
    bounds = steps.find_column_bounds_written_since_barrier(sources)
    if bounds is None or not out.shape:
        return None
    if out.shape[-1] == bounds[-1] > 1 and not whole_rows:
        return ColumnSplit(-1, bounds, bounds)
    size = out.shape[-1]
    one_row = out.is_dense and math.prod(out.shape) == bounds[-1] and math.prod(out.shape[:-2]) == 1
    if len(out.shape) < 2 or not one_row or any(b % size for b in bounds):
        return None
    return ColumnSplit(-2, [b // size for b in bounds], bounds)
