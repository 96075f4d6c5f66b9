"""Repeated layers of deep graphs, and the shortened graph that has few repetitions and stands for the deep graph.

Repetitions are found by equal structure, never by name (`find_largest_repeated_runs`). Nodes have the numbers of
`order_updates_directly_after_operands`, so that a repetition includes the nodes for its own state updates.
`shorten_graph` keeps the first few repetitions; the names of its nodes are their numbers::

    preamble  repetition repetition repetition ... repetition  end        deep graph
    preamble  repetition repetition  end                                  short graph

A carried value is computed in one repetition and read in the next one, such as the residual stream. Its position is
the index of its node in the repetition.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .attrs import make_attribute_key
from .graph import Graph, assign_names, order_updates_directly_after_operands
from .lazy_dataclass import dataclass
from .node import Node

MAX_REPETITION_NODES = 2048
"""The largest number of nodes in one repetition."""
PREAMBLE = -1
"""The repetition number of the nodes before all repetitions."""
CHUNK_SUFFIX = re.compile(r"\.chunk\.\d+\Z", re.ASCII)
"""The end of the name of an overlap chunk. One repetition computes all chunks of a node in order."""


@dataclass(frozen=True, slots=True)
class RepeatedRuns:
    """The adjacent repetitions of equal structure in a graph, such as the layers of a model.

    There are `count` repetitions of `length` nodes each. The first one begins at node number `start`; the nodes before
    it are the preamble.

    A node may read values of its own repetition and of the preamble. It may also read carried values, which the
    previous repetition computes, such as the residual stream. `carried_positions` has their node positions within a
    repetition. The first repetition reads the last nodes of the preamble in their place. Nodes after the last
    repetition read its carried values.
    """

    start: int
    length: int
    count: int
    carried_positions: frozenset[int]

    def repetition_of(self, node_number: int) -> int:
        """Return the repetition number of a node. It is `PREAMBLE` before all repetitions, and `count` after them."""
        return (
            min(max((node_number - self.start) // self.length, PREAMBLE), self.count)
            if node_number >= self.start
            else PREAMBLE
        )

    def first_node_of(self, repetition: int) -> int:
        """Return the number of the first node of a repetition.

        For `PREAMBLE`, which is -1, the result is ``start - length``. The nodes from there to `start` compute the
        values that the first repetition reads in place of carried values.
        """
        return self.start + repetition * self.length

    def without_first_repetition(self) -> RepeatedRuns:
        """Return the same layers with the first one counted as a part of the preamble before them."""
        return RepeatedRuns(self.start + self.length, self.length, self.count - 1, self.carried_positions)

    def without_last_repetition(self) -> RepeatedRuns:
        """Return the same layers without the last one, so that all readers of values between layers are alike."""
        return RepeatedRuns(self.start, self.length, self.count - 1, self.carried_positions)

    def find_position_of_carried_value(self, node_number: int, reader_repetition: int) -> int | None:
        """Return where in its layer a value is computed that `reader_repetition` reads from the layer before.

        The result is None if node `node_number` computes no such carried value.
        """
        position = node_number - self.first_node_of(reader_repetition - 1)
        return position if 0 <= position < self.length and position in self.carried_positions else None


def find_largest_repeated_runs(graph: Graph) -> RepeatedRuns | None:
    """Find the repeated layers of a graph with the most nodes; None if fewer than three layers repeat in a row."""
    kinds: dict[object, int] = {}
    nodes = order_updates_directly_after_operands(graph)
    keys = [kinds.setdefault((n.op, make_attribute_key(n.attrs), n.specs), len(kinds)) for n in nodes]
    length, first, last = _find_longest_periodic_range(np.array(keys))
    if not length:
        return None
    position = {node: at for at, node in enumerate(nodes)}
    reads = [[None if s is None else (position[s.node], s.index) for s in node.src] for node in nodes]
    first, last = _find_largest_consistent_range(reads, length, first, last)
    spans = [
        (j, i)
        for i in range(first, last)
        for j, repeated in _pair_operands_one_period_apart(reads, i, length)
        if repeated != j
    ]
    first = _choose_repetition_start_crossed_by_fewest_values(spans, length, first, last)
    count = (last + length - first) // length
    if count < 3:
        return None
    found = RepeatedRuns(first, length, count, frozenset())
    end = found.first_node_of(count)
    crossing = {
        (j - first) % length for j, i in spans if first <= i and found.repetition_of(j) != found.repetition_of(i)
    }
    last_read = (j for line in reads[end:] for j in _list_present_operands(line) if first <= j < end)
    carried = frozenset(crossing.union(j - found.first_node_of(count - 1) for j in last_read))
    found = RepeatedRuns(first, length, count, carried)
    candidates = (found, found.without_first_repetition())  # the first repetition may read a leaf
    return next(
        (runs for runs in candidates if runs.count > 1 and _is_valid_repetition(graph, runs, position, reads)), None
    )


def _list_present_operands(line: Sequence[tuple[int, int] | None]) -> list[int]:
    return [source[0] for source in line if source is not None]


def _find_longest_periodic_range(keys: npt.NDArray[np.int64]) -> tuple[int, int, int]:
    """Find the longest range of node keys that repeats with a period, such as the nodes of one layer.

    Example: the keys e a b a b a b have the period 2 from position 1 on.

    Returns:
        The tuple (length, first, last). `length` is the period in nodes, 0 if there is no such range. `first` is the
        first node. `last` is the end of the nodes that have an equal node one period later.
    """
    best, found = 0, (0, 0, 0)
    for length in range(1, min(len(keys) // 3, MAX_REPETITION_NODES) + 1):
        ends = np.flatnonzero(np.concatenate([[True], keys[length:] != keys[:-length], [True]]))
        at = int(np.argmax(np.diff(ends)))
        first, last = int(ends[at]), int(ends[at + 1]) - 1
        if last - first >= 2 * length and last - first + length > best:
            best, found = last - first + length, (length, first, last)
    return found


def _pair_operands_one_period_apart(
    reads: Sequence[Sequence[tuple[int, int] | None]], i: int, length: int
) -> Iterator[tuple[int, int]]:
    """Yield pairs of node numbers: an operand of node `i`, and the same operand of the node one period after `i`.

    Args:
        reads: The node number and the result index of each operand of each node.
        i: The number of the node.
        length: The period, in nodes.
    """
    for operand, repeated in zip(reads[i], reads[i + length], strict=True):
        if operand is not None and repeated is not None:
            yield operand[0], repeated[0]


def _find_largest_consistent_range(
    reads: Sequence[Sequence[tuple[int, int] | None]], length: int, first: int, last: int
) -> tuple[int, int]:
    """Shorten a periodic range of nodes to the largest part in which the operands repeat as well as the ops.

    An operand repeats if it is one period later too, or if it is the same value in all repetitions.

    Args:
        reads: The node number and the result index of each operand of each node.
        length: The period, in nodes.
        first: The first node of the range.
        last: The end of the nodes that have an equal node one period later.

    Returns:
        The new values of `first` and `last`.
    """

    def is_consistent(i: int) -> bool:
        pairs = zip(reads[i], reads[i + length], strict=True)
        return all(a == b or (a is not None and b is not None and (a[0] + length, a[1]) == b) for a, b in pairs)

    ends = [first - 1, *(i for i in range(first, last) if not is_consistent(i)), last]
    at = max(range(len(ends) - 1), key=lambda e: ends[e + 1] - ends[e])
    first, last = ends[at] + 1, ends[at + 1]
    shared = (
        j
        for i in range(first, last)
        for j, repeated in _pair_operands_one_period_apart(reads, i, length)
        if j == repeated
    )
    return max([first, *(j + 1 for j in shared)]), last


def _choose_repetition_start_crossed_by_fewest_values(
    spans: Sequence[tuple[int, int]], length: int, first: int, last: int
) -> int:
    """Choose the node at which repetitions begin, so that the fewest values cross from one repetition to the next.

    Args:
        spans: Pairs of a node and a node that reads it.
        length: The period, in nodes.
        first: The first node of the periodic range.
        last: The end of the nodes that have an equal node one period later.
    """
    crossing = np.zeros(length + 1, np.int64)
    copies: dict[int, int] = {}
    for j, i in spans:
        copies[j] = max(copies.get(j, 0), i)
    for j, i in copies.items():  # node j crosses each point after j, up to i
        low, high = max(j + 1, first + length) - first - length, min(i, first + 2 * length - 1) - first - length
        if low <= high:
            crossing[low] += 1
            crossing[high + 1] -= 1
    return first + int(np.argmin(np.cumsum(crossing[:-1])))


def _is_valid_repetition(
    graph: Graph, found: RepeatedRuns, position: dict[Node, int], reads: Sequence[Sequence[tuple[int, int] | None]]
) -> bool:
    """Return whether all operands, leaves, outputs and state updates obey the rules of `RepeatedRuns`.

    Args:
        graph: The graph.
        found: The repetitions to check.
        position: The number of each node.
        reads: The node number and the result index of each operand of each node.
    """
    nodes, at = [*position], found.repetition_of
    carried = [found.first_node_of(PREAMBLE) + position for position in found.carried_positions]
    if any(number < 0 or nodes[number].is_leaf for number in carried):
        return False
    for i in range(found.start, len(nodes)):
        for j in _list_present_operands(reads[i]):
            if at(j) not in (at(i), PREAMBLE) and found.find_position_of_carried_value(j, at(i)) is None:
                return False
            if at(j) != at(i) and at(j) != PREAMBLE and nodes[j].is_leaf:
                return False
            if at(i) > 0 and at(j) == PREAMBLE and found.find_position_of_carried_value(j, 0) is not None:
                return False  # ambiguous: the first repetition reads the same node as a carried value
    changed: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for old, new in graph.updates.items():
        repetition = at(position[old.node])
        if at(position[new.node]) != repetition:
            return False
        changed[repetition].add(
            (position[old.node] - found.first_node_of(repetition), position[new.node] - found.first_node_of(repetition))
        )
    ends = {at(position[v.node]) for v in graph.outputs.values()}
    return ends <= {PREAMBLE, found.count} and all(
        changed[repetition] == changed[0] for repetition in range(found.count)
    )


@dataclass(frozen=True, eq=False)
class ShortenedGraph:
    """A graph with many repeated layers ("deep"), and a short graph with only the first `short_count` of them.

    The planner works on the short graph, which is faster. Repetition r of the deep graph corresponds to repetition
    ``r % short_count`` of the short graph, which has equal structure. The names of the nodes of the short graph are
    their numbers.
    """

    deep_graph: Graph
    short_graph: Graph
    deep_repetitions: RepeatedRuns
    short_count: int

    @cached_property
    def short_repetitions(self) -> RepeatedRuns:
        """The repetitions of the short graph."""
        return RepeatedRuns(
            self.deep_repetitions.start,
            self.deep_repetitions.length,
            self.short_count,
            self.deep_repetitions.carried_positions,
        )

    @property
    def deep_and_short_repetitions(self) -> Iterator[tuple[int, int]]:
        """Pairs of each repetition of the deep graph and its corresponding repetition of the short graph, in order.

        The first pair stands for the preamble, and the last pair for the nodes after all repetitions.
        """
        yield PREAMBLE, PREAMBLE
        yield from ((repetition, repetition % self.short_count) for repetition in range(self.deep_repetitions.count))
        yield self.deep_repetitions.count, self.short_count

    def short_repetition_of_name(self, name: str) -> int:
        """Return the repetition of the short graph that contains the node called `name`."""
        return self.short_repetitions.repetition_of(split_numbered_name(name)[0])

    def short_repetition_by_node(self, graph: Graph) -> Mapping[Node, int]:
        """Return, for each node in the graph of a device, the repetition of the short graph that it belongs to."""
        if graph not in self._repetition_cache_by_graph:
            self._repetition_cache_by_graph[graph] = DeviceNodeRepetitions(self).short_repetition_by_node(graph)
        return self._repetition_cache_by_graph[graph]

    @cached_property
    def _repetition_cache_by_graph(self) -> dict[Graph, Mapping[Node, int]]:
        """The results of `short_repetition_by_node` by graph, a cache for lowering, unrolling and verification."""
        return {}

    @cached_property
    def deep_nodes_by_number(self) -> tuple[Node, ...]:
        """The nodes of the deep graph by their numbers."""
        return order_updates_directly_after_operands(self.deep_graph)

    @cached_property
    def short_nodes(self) -> tuple[Node, ...]:
        """The nodes of the short graph by their numbers."""
        return order_updates_directly_after_operands(self.short_graph)

    @cached_property
    def deep_node_names_by_number(self) -> tuple[str, ...]:
        """The printed names of the nodes of the deep graph by their numbers."""
        printed_names = assign_names(self.deep_graph)
        return tuple([printed_names[node] for node in self.deep_nodes_by_number])

    def deep_name_in_repetition(self, name: str, repetition: int, short_repetition: int) -> str:
        """Translate the name of a node of the short graph to the name of the same node in one layer of the deep graph.

        Args:
            name: A node name of the short graph, which begins with the node number.
            repetition: The repetition of the deep graph.
            short_repetition: The repetition of the short graph that contains the node.
        """
        number, ending = split_numbered_name(name)
        return (
            self.deep_node_names_by_number[number + (repetition - short_repetition) * self.deep_repetitions.length]
            + ending
        )


@dataclass(frozen=True, eq=False)
class DeviceNodeRepetitions:
    """Tells to which repeated layer of the shortened graph each node in the graph of a device belongs.

    `name_of_node` returns the name of the corresponding node of the short graph. It has a suffix if the device node
    converts a layout or computes an overlap chunk.
    """

    shortened: ShortenedGraph
    name_of_node: Callable[[Node], str] = operator.attrgetter("name")

    def short_repetition_by_node(self, graph: Graph) -> dict[Node, int]:
        """Return, for each node in the graph of a device, the repetition of the short graph that it belongs to.

        A name with a suffix belongs to a layout conversion or to an overlap chunk, which is one part of a node's
        computation. The conversion of a carried value belongs to the repetition that reads the value. An overlap chunk
        belongs to the repetition of its node, because further chunks follow.
        """
        runs = self.shortened.short_repetitions
        first_read: dict[Node, int] = {}
        kinds: dict[Node, int] = {}
        for node in reversed(graph.nodes):
            number, ending = split_numbered_name(self.name_of_node(node))
            kind = runs.repetition_of(number)
            later = bool(ending) and first_read.get(node) == kind + 1 and CHUNK_SUFFIX.search(ending) is None
            if later and runs.find_position_of_carried_value(number, kind + 1) is not None:
                kind += 1
            kinds[node] = kind
            for source in node.inputs:
                first_read[source.node] = min(first_read.get(source.node, kind), kind)
        return kinds

    def is_preamble_without_carried_value(self, node: Node) -> bool:
        """Return whether a node is in the preamble and carries no value into the first repetition."""
        number, _ = split_numbered_name(self.name_of_node(node))
        return (
            self.shortened.short_repetitions.repetition_of(number) == PREAMBLE
            and self.shortened.short_repetitions.find_position_of_carried_value(number, 0) is None
        )


def split_numbered_name(name: str) -> tuple[int, str]:
    """Split a name such as ``12.suffix`` into the node number at its beginning and the rest."""
    number, dot, rest = name.partition(".")
    return int(number), dot + rest


def shorten_graph(graph: Graph, repeats: RepeatedRuns, count: int) -> ShortenedGraph | None:
    """Build the short form of a graph, which has only the first `count` of its repetitions.

    The result is None if the nodes of the short graph would have another order.
    """
    first, end = repeats.first_node_of(count), repeats.first_node_of(repeats.count)
    nodes, copies = order_updates_directly_after_operands(graph), dict[Node, Node]()
    stands_for: dict[Node, Node] = {}  # nodes at the end read the last repetition that stays
    for number, node in enumerate((*nodes[:first], *nodes[end:])):
        sources = [None if s is None else (stands_for.get(s.node) or copies[s.node], s.index) for s in node.src]
        src = tuple([None if source is None else source[0].results[source[1]] for source in sources])
        copies[node] = Node(node.op, src, node.attrs, node.specs, str(number))
        if number == first - 1:
            last = range(end - repeats.length, end)
            stands_for = {nodes[at]: copies[nodes[at - end + first]] for at in last}
    short = Graph(
        {name: copies[v.node].results[v.index] for name, v in graph.outputs.items()},
        {
            copies[a.node].results[0]: copies[b.node].results[b.index]
            for a, b in graph.updates.items()
            if a.node in copies
        },
    )
    of = ShortenedGraph(graph, short, repeats, count)
    in_order = [n.name for n in of.short_nodes] == [str(at) for at in range(len(copies))]
    return of if in_order else None
