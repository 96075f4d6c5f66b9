"""The trace of a short plan, whose runs are to follow each other in any order: what each carries to the next is of the
user's graph what every other run carries, but for the run.

A sum that is owed when it is carried has to add up there.  Those who read it may know no more of it: to them each
device brings one term of as many as there are devices.
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
"""More than any axis has: no terms of a contraction are taken for those of a sum that was carried."""


class Carrying(Trace):
    """Follows the short graphs of all devices; `faults` says also what of it does not hold of all runs."""

    def __init__(
        self, meaning: Meaning, graphs: Sequence[Graph], leaves: Mapping[tuple[int, str], Held], of: ShortenedGraph
    ) -> None:
        super().__init__(meaning, graphs, leaves)
        self.kinds = of.short_repetitions
        known = {graph: Runs(graph, of) for graph in set(graphs)}
        self.runs = [known[graph] for graph in graphs]
        self.owed: dict[tuple[int, Carried, int], dict[int, list[Held]]] = defaultdict(dict)
        self.names: dict[tuple[int, str, int], int] = {}  # chunks of one value may be put together
        self.made: dict[int, tuple[int, int]] = {}  # by the number of a value: which result of which node it first is
        for at, node in enumerate(of.short_nodes):
            for value in node.results:
                self.made.setdefault(meaning.number[value], (at, value.index))

    def faults(self) -> Iterator[str]:
        sound = True
        for why in super().faults():
            sound = False
            yield why
        if sound:
            yield from self._uncounted()
            yield from self._unlike()

    def _node(self, device: int, node: Node) -> Iterator[str]:
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
        """Sums that are carried and do not add up."""
        for (run, (place, ending), _), brought in self.owed.items():
            for number in {h.number for held in brought.values() for h in held}:
                parts = [[h for h in held if h.number == number] for _, held in sorted(brought.items())]
                if why := self._miscounted(number, parts):
                    yield f"the sum that run {run} carries from place {place}{ending}: {why}"

    def _miscounted(self, number: int, parts: Sequence[Sequence[Held]]) -> str | None:
        """Why what each device has of a value does not add up to it."""
        if len(parts) != len(self.graphs) or any(len(held) != 1 for held in parts):
            return "not every device brings a part"
        brought = [held[0] for held in parts]
        if not all(self.meaning.alike(number, brought[0].axes, held.axes) for held in brought):
            return "the devices bring different entries"
        return miscounted([held.owed for held in brought], self._counted)

    def _unlike(self) -> Iterator[str]:
        """What is carried from one run and is not what is carried from another."""
        for device, runs in enumerate(self.runs):
            known: dict[Carried, object] = {}
            for node, name in runs.carried.items():
                run = runs.kind[node]
                results = self.held[device][node]
                held = [{(*self._place(h.number, run), h.axes, h.owed) for h in some} for some in results]
                if known.setdefault(name, held) != held:
                    yield f"device {device}: {node!r} of run {run} is not what other runs carry there"

    def _place(self, number: int, run: int) -> tuple[int, int, int]:
        """Of a value of a run its place there, which result it is, and how many runs ago it was made; of one from
        before all runs its number, as if it were made in each."""
        at, index = self.made[number]
        there = self.kinds.repetition_of(at)
        if there == PREAMBLE and self.kinds.position_if_carried(at, 0) is None:
            return at, index, -1
        return at - self.kinds.first_node_of(there), index, run - there
