"""Value numbering of the user's graph: values that are computed alike, and copies, share a number.

Two nodes are computed alike if they have the same op, attributes and specs, and operands with the same numbers. This
is global value numbering, as in the GVN pass of LLVM.

Example: `b` repeats `a`, and `c` copies it, so all three have one number. A device may compute any of them in place
of the others.

>>> from hocket.graph.node import input
>>> from hocket.ops import cont, neg
>>> x = input("x", (3,))
>>> a, b = neg(x), neg(x)
>>> c = cont(a)
>>> numbering = ValueNumbering(Graph({"a": a, "b": b, "c": c}))
>>> [numbering.number_by_value[value] for value in (x, a, b, c)]
[0, 1, 1, 1]

For each number, `digits_by_number` has the ignored digits of each axis (`index_sets`). `consumers` has for each op and
list of operand numbers the nodes with these operands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import TypeAlias

from ....graph.attrs import make_attribute_key
from ....graph.graph import Graph
from ....graph.node import Node, Value
from .facts import DeviceValueFact
from .index_sets import IgnoredDigits, IndexRanges, find_index_matching_both_values, make_index_of_all_entries
from .node_matching import ConsumerTable
from .op_instances import InferredEntries, NodeSpecs, ValueEntries, make_node_specs
from .restricted_ops import infer_result_entries

Key: TypeAlias = tuple[object, ...]


class ValueNumbering:
    """The values of the user's graph, numbered so that values which are computed alike share a number.

    A copy has the number of its operand.

    - `value_by_number`: for each number the first value that has it.
    - `number_by_value`: the number of each value.
    - `digits_by_number`: for each number the ignored digits of each axis, on which the value does not depend.
    - `consumers`: the nodes that apply an op to given operands, by op and operand numbers.
    - `leaf_by_name`: leaves by op and name.
    """

    def __init__(self, graph: Graph) -> None:
        self.value_by_number: list[Value] = []
        self.digits_by_number: list[tuple[IgnoredDigits, ...]] = []
        self.number_by_value: dict[Value, int] = {}
        self.consumers: dict[Key, ConsumerTable] = {}
        self._operand_numbers: dict[Key, list[tuple[int | None, ...]]] = {}
        self.leaf_by_name: dict[tuple[str, str], Node] = {}
        self._numbers_by_key: dict[Key, tuple[int, ...]] = {}
        for node in graph.nodes:
            if node.is_leaf:
                self.leaf_by_name[node.op, node.name] = node
            numbers = self._number_results(node)
            self.number_by_value.update(zip(node.results, numbers, strict=True))

    def _number_results(self, node: Node) -> tuple[int, ...]:
        """Return numbers for the results of a node: the numbers of an earlier equal node, else new ones."""
        if node.op == "cont":
            return (self.number_by_value[node.inputs[0]],)
        sources = tuple(None if s is None else self.number_by_value[s] for s in node.src)
        key = (node.op, make_attribute_key(node.attrs), sources, node.specs, node.name if node.is_leaf else "")
        if key not in self._numbers_by_key:
            numbers = tuple(range(len(self.value_by_number), len(self.value_by_number) + len(node.specs)))
            self._numbers_by_key[key] = numbers
            self.value_by_number += node.results
            if node.is_leaf:
                self.digits_by_number.append(((),) * len(node.specs[0].shape))
            else:
                here = make_node_specs(node)
                self.digits_by_number += self._infer_ignored_digits(node.op, here, sources)
                if (node.op, sources) not in self.consumers:
                    self.consumers[node.op, sources] = ConsumerTable(node.op)
                    for place in enumerate(sources):
                        self._operand_numbers.setdefault((node.op, place), []).append(sources)
                self.consumers[node.op, sources].add_consumer(here, numbers)
        return self._numbers_by_key[key]

    def find_consumer_operand_numbers(
        self, op: str, allowed_numbers: Sequence[Collection[int | None]]
    ) -> Iterator[tuple[int | None, ...]]:
        """Yield the operand numbers of each graph node that applies `op` to operands from the allowed sets only.

        Nodes with equal operand numbers are yielded once. For speed, the search starts at the operand with the fewest
        consumers.

        Args:
            op: Name of the op.
            allowed_numbers: For each operand the allowed numbers; ``{None}`` for an operand that must be missing.
        """
        if not allowed_numbers and (op, ()) in self.consumers:
            yield ()
        none: list[tuple[int | None, ...]] = []
        found = [
            [self._operand_numbers.get((op, (i, n)), none) for n in numbers]
            for i, numbers in enumerate(allowed_numbers)
        ]
        fewest = min(found, key=lambda lists: sum(map(len, lists)), default=[])
        for sources in chain.from_iterable(fewest):
            if len(sources) == len(allowed_numbers) and all(
                n in c for n, c in zip(sources, allowed_numbers, strict=True)
            ):
                yield sources

    def _infer_ignored_digits(
        self, op: str, instance: NodeSpecs, operand_numbers: Sequence[int | None]
    ) -> list[tuple[IgnoredDigits, ...]]:
        """Return on which parts of the entry numbers a node's results do not depend, for each axis of each result.

        Such an ignored digit (stride, size) is the part ``entry // stride % size``, for example of a broadcast axis.

        Args:
            op: Name of the op.
            instance: The attributes and specs of the node.
            operand_numbers: The number of each operand; None for a missing operand.
        """
        axes = tuple(
            None
            if s is None or number is None
            else self.attach_ignored_digits(number, tuple(map(make_index_of_all_entries, s.shape)))
            for s, number in zip(instance.src, operand_numbers, strict=True)
        )
        inferred_entries = infer_result_entries(op, instance, instance, axes)
        if isinstance(inferred_entries, InferredEntries):
            return [tuple(digits for _, digits in result) for result in inferred_entries.axes]
        return [((),) * len(r.shape) for r in instance.results]

    def attach_ignored_digits(self, value_number: int, indices: tuple[IndexRanges, ...]) -> ValueEntries:
        """Pair the entries of each axis of a value with the axis' ignored digits, on which the value does not depend.

        Args:
            value_number: The number of the graph value.
            indices: The entries of each axis that a device has.
        """
        return tuple(zip(indices, self.digits_by_number[value_number], strict=True))

    def is_proof_of_exact_entries(self, fact: DeviceValueFact, value: Value, indices: Sequence[IndexRanges]) -> bool:
        """Return whether a fact proves that a device value is exactly the given entries of a graph value.

        A fact about a partial sum does not prove it.

        Args:
            fact: The fact about the device value.
            value: The graph value.
            indices: The required entries of each axis; ignored digits may differ.
        """
        number = self.number_by_value[value]
        return (
            fact.value_number == number
            and fact.partial_sum is None
            and self.has_equal_entries(number, fact.axes, indices)
        )

    def has_equal_entries(
        self, value_number: int, indices: Sequence[IndexRanges], other_indices: Sequence[IndexRanges]
    ) -> bool:
        """Return whether two parts of one value have equal entries on each axis, up to ignored digits.

        Args:
            value_number: The number of the graph value.
            indices: Entries of each axis.
            other_indices: Entries of each axis to compare with.
        """
        digits = self.digits_by_number[value_number]
        return all(
            find_index_matching_both_values(a, d, b, d) is not None
            for a, b, d in zip(indices, other_indices, digits, strict=True)
        )
