"""Instructions of declared ops, traced to expressions, so that they can be fused with others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...graph.attrs import Attrs
from ...ops.declaration.expression import Expression
from .operand_views import PlacementInShape, RepetitionToShape, Shape, place_whole, reshape_repeated_operand
from .operands import NoKernelError, Operand

OperandPlacement = PlacementInShape | RepetitionToShape
"""How the shape of a group reads a value that does not fill it: in one place, or repeatedly."""


@dataclass(frozen=True, eq=False)
class TracedInstruction:
    """An instruction together with the scalar expression that it computes, so that it can be fused with others.

    Attributes:
        expression: the expression of the op.
        operands: operands of the expression; None for an absent one.
        producers: for each operand, the last instruction before this one that writes into its memory, or None.
        attributes: attributes of the instruction.
        out: the result.
        readers: the instructions that read the result; None if it is retained.
        starts: the index of the result at which each operand begins; None if operands broadcast to the result.
    """

    expression: Expression
    operands: Sequence[Operand | None]
    producers: Sequence[int | None]
    attributes: Attrs
    out: Operand
    readers: frozenset[int] | None
    starts: Sequence[Shape] | None = None

    @cached_property
    def shape(self) -> Shape:
        """The shape over which the expression is evaluated: the rows of a reduction, or the result."""
        if not self.expression.depends_on_row_reduction_or_length:
            return self.out.shape
        return next(o.shape for o in self.operands if o is not None)

    @cached_property
    def size(self) -> int:
        """The number of elements of `shape`."""
        return math.prod(self.shape)

    @cached_property
    def reason_against_fusion(self) -> str | None:
        """The reason why the instruction cannot be fused with others; None if it can be."""
        out, expression = self.out, self.expression
        if not self.size:
            return "an op has no elements"
        if self.readers is not None and not self.readers:
            return "nobody reads a result"
        if not (out.is_float and out.is_dense and out.declared_spec is None and out.size):
            return "a result is not dense float32 in the arena"
        if expression.steps_without_operands.issuperset(expression.results):
            return "a result needs no operand"
        return None

    @cached_property
    def moved_bytes(self) -> int:
        """The bytes that an unfused kernel reads and writes; raises `NoKernelError` if there is none."""
        read = [int(s.value) for s in self.expression.steps if s.function == "operand"]
        views = {
            (view.address, view.strides): view
            for view in (
                self.reshape_operand_view(k, self.shape) if self.starts is None else self.operand(k) for k in read
            )
        }
        return count_region_bytes([*views.values(), self.out])

    @cached_property
    def _views(self) -> dict[tuple[int, Shape], Operand]:
        return {}

    def operand(self, index: int) -> Operand:
        """Return operand number `index`, which must be present."""
        operand = self.operands[index]
        assert operand is not None
        return operand

    def compute_operand_placement(self, index: int, placement: OperandPlacement | None) -> OperandPlacement | None:
        """Compute where an operand lies in the shape of a fused group; None stands for the whole shape.

        Args:
            index: The number of the operand.
            placement: Where the result of the instruction lies in that shape.
        """
        if self.starts is None:
            return placement
        if isinstance(placement, RepetitionToShape):
            raise NoKernelError("a value with parts is repeated")
        operand = self.operand(index)
        return (placement or place_whole(self.shape)).compute_operand_placement_at(self.starts[index], operand.shape)

    def reshape_operand_view(self, index: int, shape: Shape) -> Operand:
        """Return an operand as a view of `shape`; raise `NoKernelError` if strides cannot express that."""
        operand = self.operand(index)
        if (index, shape) not in self._views:
            self._views[index, shape] = reshape_repeated_operand(operand, self.shape, shape)
        return self._views[index, shape]


def count_region_bytes(operands: Sequence[Operand]) -> int:
    """Return the bytes that operands span in memory: the sum of the distances from first to last byte."""
    return sum(o.region.high - o.region.low for o in operands)
