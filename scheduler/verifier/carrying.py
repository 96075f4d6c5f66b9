"""The value trace of a short plan with repetitions that may follow each other in any order.

The values that a repetition carries to the next must be the same graph values in every repetition, shifted by the
repetition index. A partial sum must be complete where it is carried. Its readers need not know its terms: for them
each device has one term, of as many terms as there are devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...graph.graph import Graph
from ...graph.node import Node
from ...graph.repeated_runs import CHUNK_SUFFIX, PREAMBLE, ShortenedGraph
from .held import Held
from .indices import whole
from .runs import Carried, Runs
from .summands import miscounted, terms
from .trace import Meaning, Trace

ABOVE_ALL = 1 << 62
"""A start above all axis sizes, so that terms of a contraction never equal terms of a carried partial sum."""


class Carrying(Trace):
    """Follows the short graphs of all devices; `find_faults` also yields facts that do not hold for all repetitions."""

    def __init__(
        self, meaning: Meaning, graphs: Sequence[Graph], leaves: Mapping[tuple[int, str], Held], of: ShortenedGraph
    ) -> None:
        super().__init__(meaning, graphs, leaves)
        self.kinds = of.short_repetitions
        known = {graph: Runs(graph, of) for graph in set(graphs)}
        self.runs = [known[graph] for graph in graphs]
        self.owed: dict[tuple[int, Carried, int], dict[int, list[Held]]] = defaultdict(dict)
        self.names: dict[tuple[int, str, int], int] = {}  # equal for the chunks of one value, which may be joined
        self.made: dict[int, tuple[int, int]] = {}  # value number: (position of the node, result)
        for at, node in enumerate(of.short_nodes):
            for value in node.results:
                self.made.setdefault(meaning.number[value], (at, value.index))

    def faults(self) -> Iterator[str]:
        """Yield all faults of the short graphs, and carried values that are incomplete or vary between repetitions."""
        sound = True
        for why in super().faults():
            sound = False
            yield why
        if sound:
            yield from self._uncounted()
            yield from self._unlike()

    def _node(self, device: int, node: Node) -> Iterator[str]:
        """Infer the facts of a node. A carried partial sum becomes one opaque term per device for its readers."""
        yield from super()._node(device, node)
        runs = self.runs[device]
        if (name := runs.carried.get(node)) is None or node not in self.held[device]:
            return
        carried: list[list[Held]] = []
        for index, held in enumerate(self.held[device][node]):
            if any(h.owed is not None for h in held):
                self.owed[runs.kind[node], name, index][device] = held
                place, ending = name
                value = place, CHUNK_SUFFIX.sub("", ending), index
                size = ABOVE_ALL + self.names.setdefault(value, len(self.names))
                term = terms((((device, 1),), whole(size)), (len(self.graphs), size))
                held = self._known([h if h.owed is None else replace(h, owed=term) for h in held])
            carried.append(held)
        self.held[device][node] = carried

    def _uncounted(self) -> Iterator[str]:
        """Yield carried partial sums that are not complete."""
        for (run, (place, ending), _), brought in self.owed.items():
            for number in {h.number for held in brought.values() for h in held}:
                parts = [[h for h in held if h.number == number] for _, held in sorted(brought.items())]
                if why := self._miscounted(number, parts):
                    yield f"the sum that run {run} carries from place {place}{ending}: {why}"

    def _miscounted(self, number: int, parts: Sequence[Sequence[Held]]) -> str | None:
        """Return why the devices' facts of a value are not complete; None if they are."""
        if len(parts) != len(self.graphs) or any(len(held) != 1 for held in parts):
            return "not every device brings a part"
        brought = [held[0] for held in parts]
        if not all(self.meaning.alike(number, brought[0].axes, held.axes) for held in brought):
            return "the devices bring different entries"
        return miscounted([held.owed for held in brought], self._counted)

    def _unlike(self) -> Iterator[str]:
        """Yield carried values that differ between repetitions."""
        for device, runs in enumerate(self.runs):
            known: dict[Carried, object] = {}
            for node, name in runs.carried.items():
                run = runs.kind[node]
                results = self.held[device][node]
                held = [{(*self._place(h.number, run), h.axes, h.owed) for h in some} for some in results]
                if known.setdefault(name, held) != held:
                    yield f"device {device}: {node!r} of run {run} is not what other runs carry there"

    def _place(self, number: int, run: int) -> tuple[int, int, int]:
        """Return a value's position in its repetition, its result index, and how many repetitions ago it was computed.

        For a value from before all repetitions, return the position in the graph and -1 repetitions.
        """
        at, index = self.made[number]
        there = self.kinds.repetition_of(at)
        if there == PREAMBLE and self.kinds.position_if_carried(at, 0) is None:
            return at, index, -1
        return at - self.kinds.first_node_of(there), index, run - there
