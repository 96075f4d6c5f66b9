"""Where a graph repeats itself, and the short graph that stands for it.

The nodes of a model of many layers come again after some number of nodes, but for their leaves.  `repeats_of` finds
such runs by their structure; no layer is known by name.  Nodes are numbered as they stand `together`, so that a run has
what only its own new states need.  `shortened` keeps a few of the runs::

    before  run run run run ... run  after        long
    before  run run  after                        short, whose nodes are called by their numbers
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .graph import Graph, assign_names, order_with_state_updates
from .lazy_dataclass import dataclass
from .node import Node

MAX_REPETITION_NODES = 2048
"""Nodes of the longest run that is looked for."""
PREAMBLE = -1
"""The number of what stands before all runs."""
CHUNK_SUFFIX = re.compile(r"\.chunk\.\d+\Z", re.ASCII)
"""How the name of a chunk of a node ends: the run that makes it makes all of them, one after the other."""


@dataclass(frozen=True, slots=True)
class RepeatedRuns:
    """`times` runs of `length` nodes from node number `start` on.

    A node of a run reads nodes of that run, nodes before all runs, and of the run before nodes at `carried` places: so
    many nodes before the first run stand where a run has them.  What stands behind the runs reads the last one so.
    """

    start: int
    length: int
    count: int
    carried_positions: frozenset[int]

    def repetition_of(self, number: int) -> int:
        """The run in which a node is: `BEFORE`, and `times` behind all of them."""
        return (
            min(max((number - self.start) // self.length, PREAMBLE), self.count) if number >= self.start else PREAMBLE
        )

    def first_node_of(self, run: int) -> int:
        """The number of the first node of a run, of what is behind all runs, or of what stands for one before them."""
        return self.start + run * self.length

    def drop_first(self) -> RepeatedRuns:
        """The same, but the first run is part of what is before."""
        return RepeatedRuns(self.start + self.length, self.length, self.count - 1, self.carried_positions)

    def drop_last(self) -> RepeatedRuns:
        """The same, but the last run is part of what is behind, so that what is carried is always read alike."""
        return RepeatedRuns(self.start, self.length, self.count - 1, self.carried_positions)

    def position_if_carried(self, number: int, reader: int) -> int | None:
        """Where in a run node `number` is if a node of run `reader` reads it as one of the run before; else None."""
        place = number - self.first_node_of(reader - 1)
        return place if 0 <= place < self.length and place in self.carried_positions else None


def find_repeated_runs(graph: Graph) -> RepeatedRuns | None:
    """The runs that make up most of `graph`; None if no run comes three times."""
    kinds: dict[object, int] = {}
    nodes = order_with_state_updates(graph)
    keys = [kinds.setdefault((n.op, tuple(n.attrs.items()), n.specs), len(kinds)) for n in nodes]
    length, first, last = _find_longest_match(np.array(keys))
    if not length:
        return None
    place = {node: at for at, node in enumerate(nodes)}
    reads = [[None if s is None else (place[s.node], s.index) for s in node.src] for node in nodes]
    first, last = _find_largest_consistent_range(reads, length, first, last)
    spans = [(j, i) for i in range(first, last) for j, again in _pair_operands(reads, i, length) if again != j]
    first = _find_narrowest_start(spans, length, first, last)
    times = (last + length - first) // length
    if times < 3:
        return None
    found = RepeatedRuns(first, length, times, frozenset())
    behind = found.first_node_of(times)
    crossing = {
        (j - first) % length for j, i in spans if first <= i and found.repetition_of(j) != found.repetition_of(i)
    }
    last_read = (j for line in reads[behind:] for j in _list_present_operands(line) if first <= j < behind)
    carried = frozenset(crossing.union(j - found.first_node_of(times - 1) for j in last_read))
    found = RepeatedRuns(first, length, times, carried)
    tried = (found, found.drop_first())  # what the first reads may be a leaf, as an input is
    return next((runs for runs in tried if runs.count > 1 and _is_sound(graph, runs, place, reads)), None)


def _list_present_operands(line: Sequence[tuple[int, int] | None]) -> list[int]:
    return [source[0] for source in line if source is not None]


def _find_longest_match(keys: npt.NDArray[np.int64]) -> tuple[int, int, int]:
    """(n, first, last): nodes from `first` to `last` are each like the one n further on, and that are most nodes; n is
    0 if there are none."""
    best, found = 0, (0, 0, 0)
    for length in range(1, min(len(keys) // 3, MAX_REPETITION_NODES) + 1):
        ends = np.flatnonzero(np.concatenate([[True], keys[length:] != keys[:-length], [True]]))
        at = int(np.argmax(np.diff(ends)))
        first, last = int(ends[at]), int(ends[at + 1]) - 1
        if last - first >= 2 * length and last - first + length > best:
            best, found = last - first + length, (length, first, last)
    return found


def _pair_operands(reads: Sequence[Sequence[tuple[int, int] | None]], i: int, length: int) -> Iterator[tuple[int, int]]:
    """Nodes that node `i` reads, each with the one that its twin reads instead."""
    for mine, twin in zip(reads[i], reads[i + length], strict=True):
        if mine is not None and twin is not None:
            yield mine[0], twin[0]


def _find_largest_consistent_range(
    reads: Sequence[Sequence[tuple[int, int] | None]], length: int, first: int, last: int
) -> tuple[int, int]:
    """The longest part of these nodes of which each reads what its twin reads, or a twin of that."""

    def is_alike(i: int) -> bool:
        pairs = zip(reads[i], reads[i + length], strict=True)
        return all(a == b or (a is not None and b is not None and (a[0] + length, a[1]) == b) for a, b in pairs)

    ends = [first - 1, *(i for i in range(first, last) if not is_alike(i)), last]
    at = max(range(len(ends) - 1), key=lambda e: ends[e + 1] - ends[e])
    first, last = ends[at] + 1, ends[at + 1]
    lasting = (j for i in range(first, last) for j, twin in _pair_operands(reads, i, length) if j == twin)
    return max([first, *(j + 1 for j in lasting)]), last


def _find_narrowest_start(spans: Sequence[tuple[int, int]], length: int, first: int, last: int) -> int:
    """Where the first run best begins: where the fewest values cross into the next one."""
    crossing = np.zeros(length + 1, np.int64)
    made: dict[int, int] = {}
    for j, i in spans:
        made[j] = max(made.get(j, 0), i)
    for j, i in made.items():  # it crosses every point behind j, up to i
        low, high = max(j + 1, first + length) - first - length, min(i, first + 2 * length - 1) - first - length
        if low <= high:
            crossing[low] += 1
            crossing[high + 1] -= 1
    return first + int(np.argmin(np.cumsum(crossing[:-1])))


def _is_sound(
    graph: Graph, found: RepeatedRuns, place: dict[Node, int], reads: Sequence[Sequence[tuple[int, int] | None]]
) -> bool:
    """Whether runs read no further back than `Repeats` says, leaves are their own, and states stay in their run."""
    nodes, at = [*place], found.repetition_of
    carried = [found.first_node_of(PREAMBLE) + place for place in found.carried_positions]
    if any(number < 0 or nodes[number].is_leaf for number in carried):
        return False
    for i in range(found.start, len(nodes)):
        for j in _list_present_operands(reads[i]):
            if at(j) not in (at(i), PREAMBLE) and found.position_if_carried(j, at(i)) is None:
                return False
            if at(j) != at(i) and at(j) != PREAMBLE and nodes[j].is_leaf:
                return False
            if at(i) > 0 and at(j) == PREAMBLE and found.position_if_carried(j, 0) is not None:
                return False  # nobody could tell it from what the first run reads of the run before
    changed: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for old, new in graph.updates.items():
        run = at(place[old.node])
        if at(place[new.node]) != run:
            return False
        changed[run].add((place[old.node] - found.first_node_of(run), place[new.node] - found.first_node_of(run)))
    ends = {at(place[v.node]) for v in graph.outputs.values()}
    return ends <= {PREAMBLE, found.count} and all(changed[run] == changed[0] for run in range(found.count))


@dataclass(frozen=True, eq=False)
class ShortenedGraph:
    """`short` is `long` with the first `times` of its runs, which are called kinds; its nodes are called by their
    numbers.  Run r of `long` is of kind ``r % times``."""

    deep_graph: Graph
    short_graph: Graph
    deep_repetitions: RepeatedRuns
    short_count: int

    @cached_property
    def short_repetitions(self) -> RepeatedRuns:
        """The runs of `short`."""
        return RepeatedRuns(
            self.deep_repetitions.start,
            self.deep_repetitions.length,
            self.short_count,
            self.deep_repetitions.carried_positions,
        )

    @property
    def repetitions_with_kind(self) -> Iterator[tuple[int, int]]:
        """All runs of `long` in order, each with its kind; with what is before them, and behind."""
        yield PREAMBLE, PREAMBLE
        yield from ((run, run % self.short_count) for run in range(self.deep_repetitions.count))
        yield self.deep_repetitions.count, self.short_count

    def kind_of_name(self, name: str) -> int:
        """In which run of `short` a node is that is called by its number."""
        return self.short_repetitions.repetition_of(split_numbered_name(name)[0])

    def kind_by_node(self, graph: Graph) -> Mapping[Node, int]:
        """In which run of `short` each node of a device's graph is."""
        if graph not in self._kinds_of:
            self._kinds_of[graph] = DeviceRepetitions(self).kind_by_node(graph)
        return self._kinds_of[graph]

    @cached_property
    def _kinds_of(self) -> dict[Graph, Mapping[Node, int]]:
        """What is known: lowering, unfolding and proving ask for the same graphs."""
        return {}

    @cached_property
    def deep_nodes(self) -> tuple[Node, ...]:
        """The nodes of `long` by their numbers."""
        return order_with_state_updates(self.deep_graph)

    @cached_property
    def short_nodes(self) -> tuple[Node, ...]:
        """The nodes of `short` by their numbers."""
        return order_with_state_updates(self.short_graph)

    @cached_property
    def deep_names(self) -> tuple[str, ...]:
        """What the nodes of `long` are called."""
        known = assign_names(self.deep_graph)
        return tuple([known[node] for node in self.deep_nodes])

    def name_in_repetition(self, name: str, run: int, kind: int) -> str:
        """What has this name in `short`, as it is called in a run of that kind."""
        number, ending = split_numbered_name(name)
        return self.deep_names[number + (run - kind) * self.deep_repetitions.length] + ending


@dataclass(frozen=True, eq=False)
class DeviceRepetitions:
    """The runs of devices' graphs of ``of.short``, whose nodes are `called` by the numbers of its nodes."""

    shortened: ShortenedGraph
    name_of_node: Callable[[Node], str] = operator.attrgetter("name")

    def kind_by_node(self, graph: Graph) -> dict[Node, int]:
        """In which run each node is.  One whose name has an ending is a conversion: of what is carried to the next run
        it is made where it is read, unless it is a chunk, after which the next one of the same run comes."""
        runs = self.shortened.short_repetitions
        first_read: dict[Node, int] = {}
        kinds: dict[Node, int] = {}
        for node in reversed(graph.nodes):
            number, ending = split_numbered_name(self.name_of_node(node))
            kind = runs.repetition_of(number)
            later = bool(ending) and first_read.get(node) == kind + 1 and CHUNK_SUFFIX.search(ending) is None
            if later and runs.position_if_carried(number, kind + 1) is not None:
                kind += 1
            kinds[node] = kind
            for source in node.inputs:
                first_read[source.node] = min(first_read.get(source.node, kind), kind)
        return kinds

    def is_outside_repetitions(self, node: Node) -> bool:
        """Whether a node is before all runs and does not stand for what a run carries."""
        number, _ = split_numbered_name(self.name_of_node(node))
        return (
            self.shortened.short_repetitions.repetition_of(number) == PREAMBLE
            and self.shortened.short_repetitions.position_if_carried(number, 0) is None
        )


def split_numbered_name(name: str) -> tuple[int, str]:
    """The number that a name begins with, and its ending."""
    number, dot, rest = name.partition(".")
    return int(number), dot + rest


def shorten_graph(graph: Graph, repeats: RepeatedRuns, times: int) -> ShortenedGraph | None:
    """`graph` with so many of its runs; None where the nodes of such a graph come in another order."""
    first, behind = repeats.first_node_of(times), repeats.first_node_of(repeats.count)
    nodes, made = order_with_state_updates(graph), dict[Node, Node]()
    stands_for: dict[Node, Node] = {}  # what is behind the runs reads the last one that is left
    for number, node in enumerate((*nodes[:first], *nodes[behind:])):
        sources = [None if s is None else (stands_for.get(s.node) or made[s.node], s.index) for s in node.src]
        src = tuple([None if source is None else source[0].results[source[1]] for source in sources])
        made[node] = Node(node.op, src, node.attrs, node.specs, str(number))
        if number == first - 1:
            last = range(behind - repeats.length, behind)
            stands_for = {nodes[at]: made[nodes[at - behind + first]] for at in last}
    short = Graph(
        {name: made[v.node].results[v.index] for name, v in graph.outputs.items()},
        {made[a.node].results[0]: made[b.node].results[b.index] for a, b in graph.updates.items() if a.node in made},
    )
    of = ShortenedGraph(graph, short, repeats, times)
    in_order = [n.name for n in of.short_nodes] == [str(at) for at in range(len(made))]
    return of if in_order else None
