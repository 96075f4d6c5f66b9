"""Consumers: the nodes of the user's graph that read certain values, found by the attributes of a device's node.

A value may have thousands of consumers. A device's node is compared only with nodes of the same attributes. Slices
are compared only if they contain the first entry of the device's slice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, islice

from ....ops import REGISTRY
from ....ops.collectives import narrow_to_integer
from .index_sets import slice_and_shift_index
from .op_instances import AttrItems, NodeSpecs, ValueEntries
from .restricted_ops import list_attrs_that_may_differ

Consumer = tuple[NodeSpecs, tuple[int, ...]]
"""A node of the user's graph and the numbers of its results."""
MAX_EXAMPLES = 4
"""Maximum nodes with other attributes that serve as examples in the text of a fault."""


class ConsumerTable:
    """The nodes of the user's graph that apply one op to the same operands, for a fast search by attributes.

    The verifier looks up which of these nodes a device's node computes.
    """

    def __init__(self, op: str) -> None:
        self._op = op
        self._groups: dict[AttrItems, _ConsumersWithSharedAttrs] = {}

    def add_consumer(self, graph_node: NodeSpecs, result_numbers: tuple[int, ...]) -> None:
        """Add a node of the user's graph to the table, with the value numbers of its results."""
        self._groups.setdefault(
            self._list_attrs_equal_on_devices(graph_node), _ConsumersWithSharedAttrs(self._op)
        ).consumers.append((graph_node, result_numbers))

    def find_graph_nodes_with_agreeing_attributes(
        self, device_node: NodeSpecs, operand_entries: Sequence[ValueEntries | None]
    ) -> Iterator[Consumer]:
        """Yield the graph nodes that a device's node may compute, whole or in part, because their attributes agree.

        Without such a node, at most `MAX_EXAMPLES` other nodes are yielded, from which the caller explains the fault. A
        node with empty results may be a part of any graph node, so all are yielded.

        Args:
            device_node: The device's node.
            operand_entries: Entries of each operand that the device has.
        """
        group = self._groups.get(self._list_attrs_equal_on_devices(device_node))
        if group is not None:
            yield from group.find_graph_nodes_that_may_match(device_node, operand_entries)
            return
        others = (reader for group in self._groups.values() for reader in group.consumers)
        yield from others if all(s.size == 0 for s in device_node.results) else islice(others, MAX_EXAMPLES)

    def _list_attrs_equal_on_devices(self, node: NodeSpecs) -> AttrItems:
        """List the attributes that a device's node must share with its graph node, sorted by name.

        Other attributes, such as sizes, differ if the device computes only a part.
        """
        local = list_attrs_that_may_differ(REGISTRY[self._op])
        return tuple(sorted(item for item in node.attrs if item[0] not in local))


class _ConsumersWithSharedAttrs:
    """The nodes of a `ConsumerTable` with equal attributes.

    Attributes that may differ on a device, such as sizes, do not count.
    """

    def __init__(self, op: str) -> None:
        self._op = op
        self.consumers: list[Consumer] = []

    def find_graph_nodes_that_may_match(
        self, device_node: NodeSpecs, operand_entries: Sequence[ValueEntries | None]
    ) -> Iterator[Consumer]:
        """Yield the graph nodes that a device's node may compute, completely or in part.

        All of them are among `consumers`. For a slice they are the slices that contain its first entry; for another op
        they are all consumers.

        Args:
            device_node: The node of the device.
            operand_entries: The entries of each operand that the device has.
        """
        (operand, *_) = operand_entries or (None,)
        if (
            self._op != "slice"
            or operand is None
            or len(self.consumers) <= MAX_EXAMPLES
            or not device_node.results[0].size
        ):
            yield from self.consumers
            return
        attrs = device_node.attrs_by_name
        index, _ = operand[narrow_to_integer(attrs["axis"]) % len(operand)]
        entries = slice_and_shift_index(index, narrow_to_integer(attrs["start"]), narrow_to_integer(attrs["stop"]))
        if not entries:
            yield from self.consumers[:MAX_EXAMPLES]
            return
        starts, ends, order = self._slices_sorted_by_start
        first, found = entries[0][0], list[int]()
        for at in range(bisect_right(starts, first) - 1, -1, -1):
            if ends[at] <= first:  # no earlier slice reaches `first`
                break
            found.append(order[at])
        yield from (self.consumers[at] for at in sorted(found) or range(MAX_EXAMPLES))

    @cached_property
    def _slices_sorted_by_start(self) -> tuple[list[int], list[int], list[int]]:
        """The slices of the group, sorted by start, for a search of the slices that contain a position.

        Returns:
            Three lists in this order: the start of each slice; the largest end of the slice and all earlier ones; its
            position in `consumers`.
        """
        spans = [
            (narrow_to_integer(a["start"]), narrow_to_integer(a["stop"]))
            for a in (user.attrs_by_name for user, _ in self.consumers)
        ]
        order = sorted(range(len(spans)), key=spans.__getitem__)
        return [spans[i][0] for i in order], list(accumulate((spans[i][1] for i in order), max)), order
