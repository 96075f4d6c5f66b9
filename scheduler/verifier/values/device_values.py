"""The value trace: for each device value, the graph value that it equals, the entries, and the partial sum.

All devices are traced together, operands first. A device's node must be one of two things:

- a local version of a node of the user's graph, on the entries of its operands;
- a conversion that keeps the value (`facts`).

A value may have several facts: a slice of the graph may also be a shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TypeAlias

from ....graph.graph import Graph
from ....graph.node import Node, Value
from ....ops import REGISTRY
from ....ops.collectives import COLLECTIVES, cast_to_index_ranges, narrow_to_integer
from .collective_order import make_shared_collective_key, order_nodes_by_operands_and_sequence
from .facts import (
    CONVERSION_OPS,
    DeviceValueFact,
    infer_copied_or_sliced_value_facts,
    infer_shard_fact_after_scatter,
    with_empty_index_on_axis,
)
from .index_sets import (
    IndexRanges,
    concatenate_indices,
    count_entries,
    format_index,
    is_full_index,
    make_index_of_all_entries,
    merge_scattered_entries,
)
from .op_instances import NodeSpecs, make_node_specs
from .partial_sum_rules import propagate_partial_sum
from .partial_sums import EMPTY_SUM, OptionalPartialSum, check_sum_is_complete
from .restricted_ops import infer_result_entries
from .value_numbering import ValueNumbering

MAX_COMBINATIONS_PER_VALUE = 64
"""Maximum operand combinations for one node, per value of the user's graph. A fault after this limit says so."""


DeviceNode: TypeAlias = tuple[int, Node]
"""A device number and a node of its graph. Devices may share node objects."""
_FollowedNode: TypeAlias = tuple[list[list[DeviceValueFact]], list[set[int]]]
"""The facts of each result of a node, and the sets of devices to which each device with such a node is added."""


class ValueTrace:
    """Derives which values of the user's graph the values on devices equal; such a proven statement is called a fact.

    After `find_faults`:

    - `facts_by_node` has for each device the facts of each result of each node.
    - `computing_devices` maps a set of value numbers that a node may compute to the devices with such a node. A
      product with a slice of a weight, for example, is a part of the whole product.
    - `complete_devices` maps a value number to the devices that compute all of its entries.
    - `search_limit_note` is the end of a message, if a search was stopped.

    Args:
        numbering: The numbered values of the user's graph.
        graphs: The graph of each device.
        leaf_facts: The fact about each leaf except constants, by device number and leaf name.
    """

    def __init__(
        self, numbering: ValueNumbering, graphs: Sequence[Graph], leaf_facts: Mapping[tuple[int, str], DeviceValueFact]
    ) -> None:
        self.numbering, self.graphs, self.leaf_facts = numbering, graphs, leaf_facts
        self.facts_by_node: list[dict[Node, list[list[DeviceValueFact]]]] = [{} for _ in graphs]
        self.computing_devices: dict[frozenset[int], set[int]] = {}
        self.complete_devices: dict[int, set[int]] = {}
        self.max_combinations = MAX_COMBINATIONS_PER_VALUE * len(numbering.value_by_number)
        self.search_limit_note = ""
        self._interned_facts: dict[tuple[DeviceValueFact, ...], list[DeviceValueFact]] = {}
        self._instance_by_node: dict[Node, tuple[int, NodeSpecs]] = {}
        self._instance_numbers: dict[tuple[str, NodeSpecs], tuple[int, NodeSpecs]] = {}
        self._followed_nodes: dict[tuple[int, ...], _FollowedNode] = {}
        self._facts_by_number: dict[int, dict[int | None, list[DeviceValueFact]]] = {}
        self._complete_sums: dict[tuple[int, ...], Sequence[OptionalPartialSum]] = {}
        self.collective_groups: dict[object, dict[int, Node]] = {}
        self.missing_participants: dict[object, set[DeviceNode]] = {}
        for device, graph in enumerate(graphs):
            for node in graph.nodes:
                if node.op in COLLECTIVES and node.op != "receive":
                    self.collective_groups.setdefault(make_shared_collective_key(device, node), {})[device] = node
                    self.missing_participants.setdefault(make_shared_collective_key(device, node), set()).add(
                        (device, node)
                    )

    def find_equal_graph_values(self, device: int, value: Value) -> list[DeviceValueFact]:
        """Return the facts about a device value: the graph values that it equals. The list is empty without a fact."""
        results = self.facts_by_node[device].get(value.node)
        return results[value.index] if results else []

    def find_faults(self) -> Iterator[str]:
        """Derive the facts of all device values; yield a fault for each node that computes nothing of the user's graph.

        Collectives that wait for each other in a circle are faults too.
        """
        orders = {graph: order_nodes_by_operands_and_sequence(graph) for graph in set(self.graphs)}
        ahead = [list(reversed(orders[graph])) for graph in self.graphs]
        moved = True
        while moved:
            moved = False
            for device, nodes in enumerate(ahead):  # each device continues until it must wait
                while nodes and self._mark_reached_and_check_participants(device, nodes[-1]):
                    yield from self._record_node_facts(device, nodes.pop())
                    moved = True
        if any(ahead):
            yield "devices wait for each other in a circle"

    def _mark_reached_and_check_participants(self, device: int, node: Node) -> bool:
        """Return whether a node can be traced now; a collective waits until all participants have reached it.

        The call also marks a collective as reached by this device.
        """
        if node.op not in COLLECTIVES:
            return True
        missing = self.missing_participants.get(make_shared_collective_key(device, node), set())
        missing.discard((device, node))
        return not missing

    # ------------------------------------------------------------------------------------------------ one device

    def _record_node_facts(self, device: int, node: Node) -> Iterator[str]:
        """Record the graph values that the results of a device's node equal; yield a fault if there are none."""
        if node.is_leaf:
            yield from self._record_leaf_facts(device, node)
            return
        if node.op == "receive":
            for source, sender in self.collective_groups.get(make_shared_collective_key(device, node), {}).items():
                if sender.specs != node.specs:
                    yield f"device {device}: {node!r} receives {sender!r}"
                self.facts_by_node[device][node] = [self.find_equal_graph_values(source, sender.results[0])]
            return
        if node.op in COLLECTIVES and node.op != "send":
            if members := self.collective_groups.pop(
                make_shared_collective_key(device, node), None
            ):  # the last one infers all results
                yield from self._record_collective_facts(members)
            return
        device_facts = self.facts_by_node[device]
        known = [[] if s is None else self.find_equal_graph_values(device, s) for s in node.src]
        if not all(known) and any(s is not None and not k for s, k in zip(node.src, known, strict=True)):
            return  # a source has a fault that was yielded before
        number, mine = self._intern_node_specs(node)
        key = (number, *map(id, filter(None, known)))  # equal nodes on equal facts have equal results
        if (done := self._followed_nodes.get(key)) is None:
            reasons: list[str] = []
            results, computed, complete = self._infer_node_facts(node, mine, known, reasons)
            if not results[0]:
                why = "; ".join(dict.fromkeys(reasons)) or "the graph has no such node with these operands"
                yield f"device {device}: {node!r} is not a node of the graph: {why}"
                return
            done = self._followed_nodes[key] = (
                [self._intern_facts(result_facts) for result_facts in results],
                [
                    *([self.computing_devices.setdefault(computed, set())] if computed else ()),
                    *(self.complete_devices.setdefault(n, set()) for n in complete),
                ],
            )
        device_facts[node], devices = done
        for those in devices:
            those.add(device)

    def _intern_node_specs(self, node: Node) -> tuple[int, NodeSpecs]:
        """Return one shared object for nodes with equal attributes and specs, and the number of this object."""
        if node not in self._instance_by_node:
            mine = make_node_specs(node)
            self._instance_by_node[node] = self._instance_numbers.setdefault(
                (node.op, mine), (len(self._instance_numbers), mine)
            )
        return self._instance_by_node[node]

    def _infer_node_facts(
        self, node: Node, instance: NodeSpecs, operand_facts: Sequence[list[DeviceValueFact]], reasons: list[str]
    ) -> tuple[list[list[DeviceValueFact]], frozenset[int], set[int]]:
        """Infer the facts of each result of a device's node from the facts of its operands.

        Args:
            node: The device's node.
            instance: The attributes and specs of the node.
            operand_facts: The facts of each operand.
            reasons: Receives the reasons why nodes of the user's graph do not match.

        Returns:
            The facts of each result (empty without a match); the numbers of the computed graph values, without copies;
            and among them the values with all entries.
        """
        results: list[list[DeviceValueFact]] = [[] for _ in node.specs]
        computed, complete = set[int](), set[int]()
        for pair in self._list_fact_choices_of_conversion_operands(operand_facts) if node.op in CONVERSION_OPS else ():
            self._add_new_facts(results[0], infer_copied_or_sliced_value_facts(node, pair))
        for operands in self._list_fact_combinations_with_graph_node(node, operand_facts):
            is_copy = REGISTRY[node.op].is_view or bool(infer_copied_or_sliced_value_facts(node, operands))
            for match in self._infer_facts_for_operands(node.op, instance, operands, reasons):
                if not is_copy:
                    computed.add(match[0].value_number)
                complete |= {fact.value_number for fact in match if self._is_fact_of_complete_value(fact)}
                for facts, fact in zip(results, match, strict=True):
                    self._add_new_facts(facts, [fact])
        return results, frozenset(computed), complete

    @staticmethod
    def _list_fact_choices_of_conversion_operands(
        operand_facts: Sequence[list[DeviceValueFact]],
    ) -> Iterator[tuple[DeviceValueFact, ...]]:
        """Yield the combinations of facts to try for the operands of a conversion, a node that only moves entries.

        A combination is one fact, or two facts about parts of one graph value, such as the halves of a concatenation.
        """
        if len(operand_facts) == 1:
            yield from ((fact,) for fact in operand_facts[0])
        elif len(operand_facts) == 2:
            yield from ((a, b) for a, b in product(*operand_facts) if a.value_number == b.value_number)

    def _list_fact_combinations_with_graph_node(
        self, node: Node, operand_facts: Sequence[list[DeviceValueFact]]
    ) -> Iterator[tuple[DeviceValueFact | None, ...]]:
        """Yield the combinations of operand facts for which the user's graph has a node of this op with these operands.

        A combination has one fact for each operand. After `max_combinations` combinations the search ends, and
        `search_limit_note` says so.
        """
        left_out: dict[int | None, list[None]] = {None: [None]}
        choices = [
            self._group_facts_by_value_number(k) if s is not None else left_out
            for s, k in zip(node.src, operand_facts, strict=True)
        ]
        tried = 0
        for sources in self.numbering.find_consumer_operand_numbers(node.op, choices):
            for operands in product(*(c[n] for n, c in zip(sources, choices, strict=True))):
                tried += 1
                if tried > self.max_combinations:
                    self.search_limit_note = (
                        f"; the search for the graph node of %{node.label} ended after "
                        f"{self.max_combinations} combinations"
                    )
                    return
                yield operands

    def _is_fact_of_complete_value(self, fact: DeviceValueFact) -> bool:
        """Return whether a fact states that a device has all entries of a graph value, and not only a partial sum."""
        shape = self.numbering.value_by_number[fact.value_number].shape
        digits = self.numbering.digits_by_number[fact.value_number]
        return fact.partial_sum is None and all(map(is_full_index, fact.axes, digits, shape))

    def _intern_facts(self, facts: list[DeviceValueFact]) -> list[DeviceValueFact]:
        """Return one shared object for all equal lists of facts; so nodes with equal operands are inferred once."""
        return self._interned_facts.setdefault(tuple(facts), facts)

    def _group_facts_by_value_number(self, facts: list[DeviceValueFact]) -> dict[int | None, list[DeviceValueFact]]:
        """Group facts by the number of the graph value; the groups of lists from `_intern_facts` are cached."""
        if (numbered := self._facts_by_number.get(id(facts))) is None:
            numbered = self._facts_by_number[id(facts)] = {}
            for fact in facts:
                numbered.setdefault(fact.value_number, []).append(fact)
        return numbered

    @staticmethod
    def _add_new_facts(facts: list[DeviceValueFact], new_facts: Sequence[DeviceValueFact]) -> None:
        """Append to `facts` each of `new_facts` that is missing in it."""
        facts += [h for h in new_facts if h not in facts]

    def _record_leaf_facts(self, device: int, node: Node) -> Iterator[str]:
        """Record the graph value that a device's leaf equals; yield a fault if its layout is missing or wrong."""
        fact = self.leaf_facts.get((device, node.name))
        if node.op == "constant":
            theirs = self.numbering.leaf_by_name.get((node.op, node.name))
            if theirs is None or theirs.attrs != node.attrs or theirs.specs != node.specs:
                yield f"device {device}: constant %{node.label} differs from the constant of the graph"
                return
            fact = DeviceValueFact(
                self.numbering.number_by_value[theirs.results[0]],
                tuple(map(make_index_of_all_entries, node.specs[0].shape)),
            )
        if fact is None:
            yield f"device {device}: {node.op} %{node.label} is not bound"
        elif tuple(map(count_entries, fact.axes)) != node.specs[0].shape:
            yield f"device {device}: {node!r}, but it is bound to entries {[format_index(i) for i in fact.axes]}"
        else:
            self.facts_by_node[device][node] = [self._intern_facts([fact])]

    def _infer_facts_for_operands(
        self, op: str, instance: NodeSpecs, operand_facts: Sequence[DeviceValueFact | None], reasons: list[str]
    ) -> Iterator[list[DeviceValueFact]]:
        """Find the nodes of the user's graph that a device's node may compute; yield the facts of its results for each.

        `operand_facts` has one fact per operand. `reasons` receives the reasons why a graph node does not match.
        """
        meaning = self.numbering
        key = (op, tuple(None if o is None else o.value_number for o in operand_facts))
        axes = tuple(
            None if o is None else meaning.attach_ignored_digits(o.value_number, o.axes) for o in operand_facts
        )
        readers = meaning.consumers.get(key)
        for user, numbers in (
            readers.find_graph_nodes_with_agreeing_attributes(instance, axes) if readers is not None else ()
        ):
            if [s.dtype for s in user.results] != [s.dtype for s in instance.results]:
                reasons.append(f"the results have other dtypes than {user.results}")
                continue
            inferred_entries = infer_result_entries(op, user, instance, axes)
            if isinstance(inferred_entries, str):
                reasons.append(inferred_entries)
                continue
            try:
                operand_sums = [None if o is None else o.partial_sum for o in operand_facts]
                result_sum = propagate_partial_sum(op, user, operand_sums, inferred_entries, key[1])
            except ValueError as why:
                reasons.append(str(why))
                continue
            for partial_sum in (
                (EMPTY_SUM, result_sum) if inferred_entries.is_empty_sum and result_sum is None else (result_sum,)
            ):
                yield [
                    DeviceValueFact(number, tuple(i for i, _ in result), partial_sum)
                    for number, result in zip(numbers, inferred_entries.axes, strict=True)
                ]

    # ------------------------------------------------------------------------ all devices of one collective group

    def _record_collective_facts(self, node_by_device: Mapping[int, Node]) -> Iterator[str]:
        """Record which graph values a collective's results equal on all devices; yield a fault if there are none."""
        one = next(iter(node_by_device.values()))
        if len({n.op for n in node_by_device.values()}) > 1:
            yield f"not every device calls {one!r}"
            return
        devices = sorted(node_by_device)
        nodes = [node_by_device[d] for d in devices]
        known = [self.find_equal_graph_values(d, n.inputs[0]) for d, n in zip(devices, nodes, strict=True)]
        if not all(known):
            return
        reasons, has_match = list[str](), False
        after: list[list[DeviceValueFact]] = [[] for _ in nodes]
        for first in known[0]:
            choices = [[first], *(self._group_facts_by_value_number(k).get(first.value_number, []) for k in known[1:])]
            for device_facts in self._list_device_fact_combinations(nodes, choices):
                results = self._infer_collective_result_facts(nodes, device_facts)
                if isinstance(results, str):
                    reasons.append(results)
                    continue
                has_match = True
                for facts, fact in zip(after, results, strict=True):
                    self._add_new_facts(facts, [fact])
                break  # other facts of the other devices give the same results
        for device, node, results_there in zip(devices, nodes, after, strict=True):
            self.facts_by_node[device][node] = [self._intern_facts(results_there)]
        if not has_match:
            yield f"{one!r}: {'; '.join(dict.fromkeys(reasons)) or 'the devices have different values'}"

    def _list_device_fact_combinations(
        self, nodes: Sequence[Node], facts_by_device: Sequence[list[DeviceValueFact]]
    ) -> Iterator[tuple[DeviceValueFact, ...]]:
        """Yield the combinations of facts, one for each device, in which all devices have parts of one graph value.

        It is the graph value of the first device. A device without a fitting fact takes part with any fact, so that a
        fault is found. After `max_combinations` combinations the search ends, and `search_limit_note` says so.
        """
        (first,), attrs = facts_by_device[0], nodes[0].attrs
        sums = nodes[0].op in ("all_reduce", "reduce_scatter")
        axis = -1 if sums else narrow_to_integer(attrs["old_axis" if nodes[0].op == "all_to_all" else "axis"])
        runs = () if sums else cast_to_index_ranges(attrs["old_runs" if nodes[0].op == "all_to_all" else "runs"])
        fitting: list[list[DeviceValueFact]] = []
        for device, facts in enumerate(facts_by_device):
            expected_axes = list(first.axes)
            if device < len(runs) and axis < len(expected_axes):
                expected_axes[axis] = concatenate_indices([runs[device]])
            fitting_facts = [
                h
                for h in facts
                if self.numbering.has_equal_entries(first.value_number, expected_axes, h.axes)
                and (sums or h.partial_sum is None)
            ]
            fitting.append(fitting_facts or facts[:1])
        for tried, device_facts in enumerate(product(*fitting)):
            if tried == self.max_combinations:
                self.search_limit_note = (
                    f"; the search for the operands of {nodes[0]!r} ended after {self.max_combinations} combinations"
                )
                return
            yield device_facts

    def _infer_collective_result_facts(
        self, nodes: Sequence[Node], device_facts: Sequence[DeviceValueFact]
    ) -> list[DeviceValueFact] | str:
        """Infer the graph value that each device has after a collective, or return why the collective is wrong."""
        first, attrs = device_facts[0], nodes[0].attrs
        if nodes[0].op in ("all_reduce", "reduce_scatter"):
            if not all(self.numbering.has_equal_entries(first.value_number, first.axes, h.axes) for h in device_facts):
                return "the devices have different entries"
            if why := check_sum_is_complete([h.partial_sum for h in device_facts], self._complete_sums):
                return why
            whole_axes = first.axes
        else:
            axis = narrow_to_integer(attrs["old_axis" if nodes[0].op == "all_to_all" else "axis"])
            runs = cast_to_index_ranges(attrs["old_runs" if nodes[0].op == "all_to_all" else "runs"])
            gathered = self._concatenate_shard_entries(device_facts, axis, runs)
            if isinstance(gathered, str):
                return gathered
            whole_axes = gathered
        if nodes[0].op in ("all_reduce", "all_gather"):
            results = [DeviceValueFact(first.value_number, whole_axes)] * len(nodes)
        else:
            results = [
                infer_shard_fact_after_scatter(first.value_number, whole_axes, d, n) for d, n in enumerate(nodes)
            ]
        for node, fact in zip(nodes, results, strict=True):
            if tuple(map(count_entries, fact.axes)) != node.specs[0].shape:
                return f"{node!r} gives entries {[format_index(i) for i in fact.axes]}"
        return results

    def _concatenate_shard_entries(
        self, device_facts: Sequence[DeviceValueFact], axis: int, ranges_by_device: Sequence[IndexRanges]
    ) -> tuple[IndexRanges, ...] | str:
        """Return the entries of a value that all shards have together, as after an all-gather; return a misfit as text.

        `axis` is the sharded axis, and `ranges_by_device` has the positions of each device's entries in the whole
        value.
        """
        number, axes = device_facts[0].value_number, device_facts[0].axes
        if any(h.partial_sum is not None for h in device_facts):
            return "it is a partial sum that no all-reduce completes"
        if len(ranges_by_device) != len(device_facts):
            return f"index ranges are given for {len(ranges_by_device)} devices"
        for fact in device_facts:
            if not self.numbering.has_equal_entries(
                number, (*axes[:axis], (), *axes[axis + 1 :]), with_empty_index_on_axis(fact.axes, axis)
            ):
                return "the devices have different entries of another axis"
        for device, (fact, own) in enumerate(zip(device_facts, ranges_by_device, strict=True)):
            if count_entries(fact.axes[axis]) != count_entries(own):
                return (
                    f"device {device} has {count_entries(fact.axes[axis])} entries for {count_entries(own)} positions"
                )
        index = merge_scattered_entries(
            tuple(concatenate_indices([r]) for r in ranges_by_device), tuple(h.axes[axis] for h in device_facts)
        )
        n = self.numbering.value_by_number[number].shape[axis]
        if index is None:
            return f"the index ranges leave positions of axis {axis} empty, or put two entries at one position"
        is_all = is_full_index(index, self.numbering.digits_by_number[number][axis], n)
        return (*axes[:axis], make_index_of_all_entries(n) if is_all else index, *axes[axis + 1 :])
