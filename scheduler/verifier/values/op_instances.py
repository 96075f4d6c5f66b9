"""The argument and result types of `infer_result_entries`.

The arguments are the attributes and specs of nodes. The results are the entries of a graph value that a device has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ....graph.attrs import Attr, Attrs
from ....graph.node import Node
from ....graph.spec import Spec
from .index_sets import IgnoredDigits, IndexRanges
from .partial_sums import OptionalPartialSum

AxisEntries: TypeAlias = tuple[IndexRanges, IgnoredDigits]
"""The local entries of an axis, and the digits on which the value does not depend."""
ValueEntries: TypeAlias = tuple[AxisEntries, ...]
"""The local entries of all axes of a value."""
AttrItems: TypeAlias = tuple[tuple[str, Attr], ...]


@dataclass(frozen=True, slots=True)
class NodeSpecs:
    """The properties of a node except its operands: attributes, operand specs and result specs.

    The node is of the user's graph or of a device's graph. Nodes with equal specs share one inference of result
    entries.
    """

    attrs: AttrItems
    src: tuple[Spec | None, ...]
    results: tuple[Spec, ...]

    @property
    def attrs_by_name(self) -> Attrs:
        """The attributes of the node as a dictionary."""
        return dict(self.attrs)


def make_node_specs(node: Node) -> NodeSpecs:
    """Return the attributes, operand specs and result specs of a node."""
    return NodeSpecs(tuple(node.attrs.items()), tuple(None if s is None else s.spec for s in node.src), node.specs)


@dataclass(frozen=True, slots=True)
class LocalTableRows:
    """The rows of a lookup table, such as an embedding table, that one device has.

    - `table_operand`: the name of the operand that is the table.
    - `index_operand`: the name of the operand with the row numbers.
    - `local_rows`: the rows that the device has.
    - `row_count`: the number of rows of the whole table in the user's graph.
    """

    table_operand: str
    index_operand: str
    local_rows: IndexRanges
    row_count: int


@dataclass(frozen=True, slots=True)
class InferredEntries:
    """The entries of a graph node's results that a device's node computes.

    - `axes`: the entries of each result, for each axis.
    - `partial_sum`: the terms of the node's contraction that the device sums; None if it sums all terms.
    - `table_rows`: the rows of a lookup table that the device has; None if it has all rows.
    - `is_empty_sum`: whether a contracted axis has size 0, so that the sum has no terms on any device.
    """

    axes: tuple[ValueEntries, ...]
    partial_sum: OptionalPartialSum
    table_rows: LocalTableRows | None = None
    is_empty_sum: bool = False
