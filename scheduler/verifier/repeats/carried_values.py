"""The value trace of a plan with repeated layers, in which repetitions may follow each other in any order.

A repetition is one repeated layer of a graph. The values that a repetition carries to the next one must be the same
graph values in every repetition, shifted by the repetition index. A partial sum must be complete where a repetition
carries it. The readers of a carried partial sum see one opaque term per device in place of the terms of the sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ....graph.graph import Graph
from ....graph.node import Node
from ....graph.repeated_runs import CHUNK_SUFFIX, PREAMBLE, ShortenedGraph
from ..values.device_values import ValueTrace
from ..values.facts import DeviceValueFact
from ..values.index_sets import make_index_of_all_entries
from ..values.partial_sums import check_sum_is_complete, make_contraction_partial_sum
from ..values.value_numbering import ValueNumbering
from .repeatable_runs import CarriedKey, RepetitionsOfDeviceGraph

UNREACHABLE_INDEX = 1 << 62
"""A start above all axis sizes, so that terms of a contraction never equal terms of a carried partial sum."""


class CarriedValueTrace(ValueTrace):
    """A value trace that also checks the values that one repetition of a repeated layer passes to the next.

    These carried values must be the same in all repetitions, relative to the repetition. Carried partial sums must be
    complete.

    Args:
        numbering: The numbered values of the user's shortened graph.
        graphs: The shortened graph of each device.
        leaf_facts: The fact about each leaf except constants, by device number and leaf name.
        shortened: The user's shortened graph, with few repetitions of the repeated layers.
    """

    def __init__(
        self,
        numbering: ValueNumbering,
        graphs: Sequence[Graph],
        leaf_facts: Mapping[tuple[int, str], DeviceValueFact],
        shortened: ShortenedGraph,
    ) -> None:
        super().__init__(numbering, graphs, leaf_facts)
        self.short_repetitions = shortened.short_repetitions
        known = {graph: RepetitionsOfDeviceGraph(graph, shortened) for graph in set(graphs)}
        self.device_repetitions = [known[graph] for graph in graphs]
        self.carried_partial_sums: dict[tuple[int, CarriedKey, int], dict[int, list[DeviceValueFact]]] = defaultdict(
            dict
        )
        self.carried_sum_numbers: dict[
            tuple[int, str, int], int
        ] = {}  # equal for the chunks of one value, which may be joined
        self.producer_by_number: dict[int, tuple[int, int]] = {}  # value number: (position of the node, result)
        for at, node in enumerate(shortened.short_nodes):
            for value in node.results:
                self.producer_by_number.setdefault(numbering.number_by_value[value], (at, value.index))

    def find_faults(self) -> Iterator[str]:
        """Yield all faults of the device graphs.

        If there are none, yields faults of carried values. A carried value is wrong if it is an incomplete sum, or if
        it differs between repetitions.
        """
        sound = True
        for why in super().find_faults():
            sound = False
            yield why
        if sound:
            yield from self._find_incomplete_carried_sums()
            yield from self._find_unequal_carried_values()

    def _record_node_facts(self, device: int, node: Node) -> Iterator[str]:
        """Record which graph values the results of a device's node equal, and yield the faults of the node.

        A result may be a partial sum that is carried to the next repetition. For its readers each device then has one
        opaque term, so no proof can depend on the terms of one repetition.
        """
        yield from super()._record_node_facts(device, node)
        runs = self.device_repetitions[device]
        if (name := runs.carried_key_by_node.get(node)) is None or node not in self.facts_by_node[device]:
            return
        carried: list[list[DeviceValueFact]] = []
        for index, facts in enumerate(self.facts_by_node[device][node]):
            if any(h.partial_sum is not None for h in facts):
                self.carried_partial_sums[runs.kind_by_node[node], name, index][device] = facts
                place, ending = name
                value = place, CHUNK_SUFFIX.sub("", ending), index
                size = UNREACHABLE_INDEX + self.carried_sum_numbers.setdefault(value, len(self.carried_sum_numbers))
                term = make_contraction_partial_sum(
                    (((device, 1),), make_index_of_all_entries(size)), (len(self.graphs), size)
                )
                facts = self._intern_facts(
                    [h if h.partial_sum is None else replace(h, partial_sum=term) for h in facts]
                )
            carried.append(facts)
        self.facts_by_node[device][node] = carried

    def _find_incomplete_carried_sums(self) -> Iterator[str]:
        """Yield faults of partial sums that are incomplete when a repetition carries them to the next one.

        A sum is complete if each of its terms is on exactly one device.
        """
        for (run, (place, ending), _), facts_by_device in self.carried_partial_sums.items():
            for number in {h.value_number for facts in facts_by_device.values() for h in facts}:
                parts = [[h for h in facts if h.value_number == number] for _, facts in sorted(facts_by_device.items())]
                if why := self._explain_incomplete_carried_sum(number, parts):
                    yield f"the sum that repetition {run} carries from position {place}{ending}: {why}"

    def _explain_incomplete_carried_sum(
        self, value_number: int, facts_by_device: Sequence[Sequence[DeviceValueFact]]
    ) -> str | None:
        """Return why a partial sum that a repetition carries to the next one is incomplete over all devices, or None.

        Args:
            value_number: The number of the graph value.
            facts_by_device: The facts of each device about this value; each device must have exactly one.
        """
        if len(facts_by_device) != len(self.graphs) or any(len(facts) != 1 for facts in facts_by_device):
            return "not every device has exactly one partial sum"
        device_facts = [facts[0] for facts in facts_by_device]
        if not all(self.numbering.has_equal_entries(value_number, device_facts[0].axes, f.axes) for f in device_facts):
            return "the devices have different entries"
        return check_sum_is_complete([fact.partial_sum for fact in device_facts], self._complete_sums)

    def _find_unequal_carried_values(self) -> Iterator[str]:
        """Yield faults of repetitions that do not carry the same values to the next one as all others.

        They must carry the same graph value (relative to the repetition), the same entries and the same partial sum.
        """
        for device, runs in enumerate(self.device_repetitions):
            known: dict[CarriedKey, object] = {}
            for node, name in runs.carried_key_by_node.items():
                run = runs.kind_by_node[node]
                results = self.facts_by_node[device][node]
                carried_facts = [
                    {
                        (*self._find_position_relative_to_repetition(h.value_number, run), h.axes, h.partial_sum)
                        for h in some
                    }
                    for some in results
                ]
                if known.setdefault(name, carried_facts) != carried_facts:
                    yield (
                        f"device {device}: {node!r} of repetition {run} differs from the value that other "
                        "repetitions carry"
                    )

    def _find_position_relative_to_repetition(self, value_number: int, repetition: int) -> tuple[int, int, int]:
        """Return where a graph value is computed, counted from a repeated layer, so that layers can be compared.

        Returns:
            Three numbers: the position of the value's node in its repetition, the result number, and the number of
            repetitions from there to `repetition`. For a value from before all repetitions, the first is the position
            in the graph, and the last is -1.
        """
        at, index = self.producer_by_number[value_number]
        there = self.short_repetitions.repetition_of(at)
        if there == PREAMBLE and self.short_repetitions.find_position_of_carried_value(at, 0) is None:
            return at, index, -1
        return at - self.short_repetitions.first_node_of(there), index, repetition - there
