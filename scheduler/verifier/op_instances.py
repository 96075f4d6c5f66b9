"""The arguments and the result of `restrict_op`: an op with its specs, its local entries, and the result entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...graph.attrs import Attr, Attrs
from ...graph.node import Node
from ...graph.spec import Spec
from .indices import (
    Digits,
    IndexRanges,
)
from .summands import OptionalPartialSum

AxisEntries: TypeAlias = tuple[IndexRanges, Digits]
"""The local entries of an axis, and the digits on which the value does not depend."""
ValueEntries: TypeAlias = tuple[AxisEntries, ...]
"""The local entries of all axes of a value."""
AttrItems: TypeAlias = tuple[tuple[str, Attr], ...]


@dataclass(frozen=True, slots=True)
class OpInstance:
    """One of the two nodes that are compared: its attributes and the specs of its operands and results."""

    attrs: AttrItems
    src: tuple[Spec | None, ...]
    results: tuple[Spec, ...]

    @property
    def attrs_by_name(self) -> Attrs:
        return dict(self.attrs)


def make_op_instance(node: Node) -> OpInstance:
    return OpInstance(tuple(node.attrs.items()), tuple(None if s is None else s.spec for s in node.src), node.specs)


@dataclass(frozen=True, slots=True)
class TableRows:
    """The local rows of a lookup table.

    The operand `table_operand` has `row_count` rows in the user's graph. The operand `index_operand` names the rows.
    """

    table_operand: str
    index_operand: str
    local_rows: IndexRanges
    row_count: int


@dataclass(frozen=True, slots=True)
class RestrictedResult:
    """The result of a device's node: the entries of each result, the partial sum, and the local rows of a lookup table.

    `table_rows` is None if all rows are local. `is_empty_sum` is set if the contraction has no terms.
    """

    axes: tuple[ValueEntries, ...]
    partial_sum: OptionalPartialSum
    table_rows: TableRows | None = None
    is_empty_sum: bool = False
