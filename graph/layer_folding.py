"""Layer folding: divide a graph into blocks of nodes, with each repeated layer as one group.

Layers are found by structure, never by name:

1. Order the nodes.
2. Split the order into sections where only one value crosses, such as the residual stream. Long-lived values do not
   count.
3. Group adjacent sections of equal structure.
4. Merge the other sections into blocks of at most `MAX_BLOCK_NODES` nodes, split where few values cross.

Example::

    embed  layer layer layer wide  layer layer layer wide  head
    embed [[layer × 3] wide] × 2 head
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from .attrs import make_attribute_key
from .graph import Graph, topological_order
from .node import Node, Value

LONG_LIVED_SHARE = 0.4
"""A value that crosses more than this share of all points between nodes is long-lived and does not join sections.

In a graph of two layers a residual sum crosses a third of the points, and a mask for both layers crosses half.
"""
MAX_PERIOD_SECTIONS = 64
"""The largest number of sections in one repetition."""
MAX_BLOCK_NODES = 90
"""The largest number of nodes in one block."""


Spans = dict[Value, tuple[int, int]]
"""For each computed value, the positions of its node and of the last node that reads it."""


@dataclass(frozen=True, slots=True)
class NodeBlock:
    """A run of computed nodes of a graph that is displayed as one block; leaves are not included."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class RepeatedGroup:
    """Repeated layers of a graph that are displayed once, with their count.

    ``repetitions[i]`` has the blocks of repetition i, and inner groups if a part of it repeats again.
    """

    repetitions: tuple[tuple[Item, ...], ...]


Item = NodeBlock | RepeatedGroup


def fold_layers(graph: Graph) -> tuple[Item, ...]:
    """Divide the computed nodes of a graph into blocks and groups of repeated layers, so that each layer is shown once.

    Operands come before users.
    """
    nodes = _order_operands_before_users_for_folding(graph)
    spans = find_live_spans(graph, nodes)
    long_lived = find_long_lived_values(nodes, spans)
    sections = split_where_one_value_crosses(nodes, spans, long_lived)
    if not sections:
        return ()
    structures = SectionStructures(graph, sections, long_lived)
    crossing = _count_crossing_values(len(nodes), spans)
    starts = itertools.accumulate((len(p) for p in sections), initial=0)
    numbered = [
        _SectionBetweenSplits(p, s, start) for p, s, start in zip(sections, structures.keys, starts, strict=False)
    ]
    return tuple(_group_repeated_sections(numbered, crossing))


def iterate_blocks_of_all_repetitions(items: Sequence[Item]) -> Iterator[NodeBlock]:
    """Yield the blocks of all items in order, including the blocks of every repetition of a group."""
    for item in items:
        if isinstance(item, NodeBlock):
            yield item
        else:
            for repetition in item.repetitions:
                yield from iterate_blocks_of_all_repetitions(repetition)


def find_layer_nodes(graph: Graph) -> list[tuple[Node, ...]]:
    """Find the layers of a graph, and return the computed nodes of each layer in order.

    A section is a part of the node order between two points that only one value crosses. A layer is one repetition of
    the shortest sequence of sections with repeated ops, such as attention and feed-forward network. The sections
    between two layers are a layer too. Sections of one node do not count, because the last layer of a model may select
    rows in its middle.
    """
    nodes = _order_operands_before_users_for_folding(graph)
    spans = find_live_spans(graph, nodes)
    sections = [
        section
        for section in split_where_one_value_crosses(nodes, spans, find_long_lived_values(nodes, spans))
        if len(section) > 1
    ]
    position = {node: at for at, node in enumerate(nodes)}
    return [
        tuple(nodes[position[layer_sections[0][0]] : position[layer_sections[-1][-1]] + 1])
        for layer_sections in _group_sections_by_layer(sections)
    ]


def _group_sections_by_layer(sections: Sequence[Sequence[Node]]) -> Iterator[Sequence[Sequence[Node]]]:
    """Yield the sections of each layer; a layer is one repetition of the innermost repeated sequence of sections.

    A single section that occurs only twice is not a layer, because a decoder layer may have two attentions. Unrepeated
    sections between two layers are yielded as a layer.
    """
    unrepeated: list[Sequence[Node]] = []
    for start, length, count in find_adjacent_repetitions([tuple(n.op for n in section) for section in sections]):
        if length * count < 3:
            unrepeated += sections[start : start + length * count]
            continue
        yield from [unrepeated] if unrepeated else []
        unrepeated = []
        for first in range(start, start + length * count, length):
            yield from _group_sections_by_layer(sections[first : first + length])
    yield from [unrepeated] if unrepeated else []


def find_adjacent_repetitions(items: Sequence[object]) -> Iterator[tuple[int, int, int]]:
    """Divide `items` into runs of adjacent repetitions, from the first item to the last.

    Yields:
        Triples (start, length, count): the sequence of `length` items at index `start` occurs `count` times in a row.
        The count is 1 for items that do not repeat.
    """
    numbers: dict[object, int] = {}
    keys = [numbers.setdefault(item, len(numbers)) for item in items]
    at = 0
    while at < len(keys):
        best = (1, 1)
        for length in range(1, min(MAX_PERIOD_SECTIONS, (len(keys) - at) // 2) + 1):
            count = 1
            while keys[at : at + length] == keys[at + length * count : at + length * (count + 1)]:
                count += 1
            if count > 1 and length * count > best[0] * best[1]:
                best = (length, count)
        yield (at, *best)
        at += best[0] * best[1]


@dataclass(frozen=True, slots=True)
class _SectionBetweenSplits:
    """The nodes between two points of the node order that only one value crosses.

    - `nodes`: the nodes.
    - `structure`: the structural key, equal for repetitions of one structure.
    - `start`: the position of the first node in the order.
    """

    nodes: Sequence[Node]
    structure: object
    start: int


def _order_operands_before_users_for_folding(graph: Graph) -> list[Node]:
    """Order the computed nodes for layer folding, operands before users.

    Nodes for long-lived values come first. A node that only a state update needs follows its last operand.
    """
    nodes = _order_operands_before_users(graph, frozenset())
    early = frozenset(topological_order(find_long_lived_values(nodes, find_live_spans(graph, nodes))))
    return [
        *(n for n in nodes if n in early),
        *(n for n in _order_operands_before_users(graph, early) if n not in early),
    ]


def _order_operands_before_users(graph: Graph, early: Set[Node]) -> list[Node]:
    """Return the computed nodes in topological order; the nodes `early` count as computed before all others."""
    position: dict[Node, tuple[int, int]] = {}
    for at, node in enumerate(_iterate_deepest_operand_first(graph, early)):
        position[node] = (at, -1)
    for at, node in enumerate(n for n in graph.nodes if n not in position):
        position[node] = (max((position[s.node][0] for s in node.inputs if not s.node.is_leaf), default=-1), at)
    return sorted((n for n in graph.nodes if not n.is_leaf), key=position.__getitem__)


def _iterate_deepest_operand_first(graph: Graph, early: Set[Node]) -> Iterator[Node]:
    """Yield the nodes that the outputs need, operands before users; the operand with the deepest subgraph comes first.

    Therefore a whole encoder comes before its decoder. The nodes `early` count as depth 0. So the first layer of a
    decoder computes its own values before it reads the encoder.
    """
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        depth[node] = 0 if node in early else max((depth[s.node] + 1 for s in node.inputs), default=0)
    done: set[Node] = set()
    stack = [v.node for v in graph.outputs.values()][::-1]
    while stack:
        node = stack[-1]
        waiting = [s.node for s in node.inputs if s.node not in done]
        if node in done or not waiting:
            stack.pop()
            if node not in done:
                done.add(node)
                yield node
        else:
            stack.extend(sorted(waiting, key=depth.__getitem__))


def find_live_spans(graph: Graph, nodes: Sequence[Node]) -> Spans:
    """Return the live span of each computed value: the positions in `nodes` of its node and of its last reader.

    The span of an output ends at the last node.
    """
    spans: Spans = {}
    for at, node in enumerate(nodes):
        for source in node.inputs:
            if source in spans:
                spans[source] = (spans[source][0], at)
        spans.update((v, (at, at)) for v in node.results)
    spans.update((v, (spans[v][0], len(nodes) - 1)) for v in graph.outputs.values() if v in spans)
    return spans


def _count_crossing_values(points: int, spans: Spans) -> list[int]:
    """Count how many values are computed before and read after each point between two adjacent nodes.

    Args:
        points: The number of nodes.
        spans: The live spans of the values.
    """
    change = [0] * (points + 2)
    for first, last in spans.values():
        change[first + 1] += 1
        change[last + 1] -= 1
    return list(itertools.accumulate(change))


def find_long_lived_values(nodes: Sequence[Node], spans: Spans) -> frozenset[Value]:
    """Return the values that are needed during more than the share `LONG_LIVED_SHARE` of all nodes, such as a mask."""
    return frozenset(v for v, (a, b) in spans.items() if b - a > LONG_LIVED_SHARE * len(nodes))


def split_where_one_value_crosses(nodes: Sequence[Node], spans: Spans, long_lived: Set[Value]) -> list[Sequence[Node]]:
    """Split the nodes into sections wherever at most one value crosses; values in `long_lived` do not count."""
    crossing = _count_crossing_values(len(nodes), {v: span for v, span in spans.items() if v not in long_lived})
    splits = [0, *(p for p in range(1, len(nodes)) if crossing[p] <= 1), len(nodes)]
    return [nodes[a:b] for a, b in itertools.pairwise(splits) if a < b]


class SectionStructures:
    """Compares sections of a graph: sections with equal keys are repetitions of one structure, such as layers.

    A key has all properties of the nodes except their names and the names of the section's own leaves.

    - `keys`: the key of each section.
    - `own_leaves`: for each section its own leaves, which no other section reads, in the order of the reads.

    Args:
        graph: The graph.
        sections: The computed nodes of each section.
        long_lived: Values that do not belong to a repetition.
        own_leaf_ops: The ops of leaves that differ between repetitions; all other leaves must be the same.
    """

    def __init__(
        self,
        graph: Graph,
        sections: Sequence[Sequence[Node]],
        long_lived: frozenset[Value],
        own_leaf_ops: Set[str] = frozenset(("input", "weight", "state")),
    ) -> None:
        self.long_lived = long_lived
        self.section_of = {node: at for at, nodes in enumerate(sections) for node in nodes}
        self.index_in_section = {node: i for nodes in sections for i, node in enumerate(nodes)}
        self.own_leaves: list[dict[Node, int]] = [{} for _ in sections]
        readers: dict[Node, set[int]] = defaultdict(set)
        for node, at in self.section_of.items():
            for source in node.inputs:
                if source.node.op in own_leaf_ops:
                    readers[source.node].add(at)
        for leaf, (at, *others) in readers.items():
            if not others:
                self.own_leaves[at][leaf] = len(self.own_leaves[at])
        outputs = {v: name for name, v in graph.outputs.items()}
        self.keys = [
            tuple(
                (
                    n.op,
                    tuple([self.describe_value(at, value) for value in n.src]),
                    make_attribute_key(n.attrs),
                    n.specs,
                    tuple(map(outputs.get, n.results)),
                )
                for n in nodes
            )
            for at, nodes in enumerate(sections)
        ]

    def describe_value(self, at: int, value: Value | None) -> object:
        """Return a key of a value that section number `at` reads or computes, which is equal in all repetitions."""
        if value is None:
            return None
        node = value.node
        if node in self.own_leaves[at]:
            return "own", node.op, node.specs, self.own_leaves[at][node]
        if self.section_of.get(node) == at:
            return self.index_in_section[node], value.index
        return value if node.is_leaf or value in self.long_lived else ("before", value.spec)


def _group_repeated_sections(sections: Sequence[_SectionBetweenSplits], crossing: Sequence[int]) -> Iterator[Item]:
    """Yield adjacent sections of equal structure as groups, and the sections between them as blocks."""
    unrepeated: list[_SectionBetweenSplits] = []
    for start, length, count in find_adjacent_repetitions([p.structure for p in sections]):
        if count == 1:
            unrepeated.append(sections[start])
            continue
        yield from _merge_sections_into_blocks(unrepeated, crossing)
        unrepeated = []
        repetitions = (sections[start + length * i : start + length * (i + 1)] for i in range(count))
        yield RepeatedGroup(tuple(tuple(_group_repeated_sections(repetition, crossing)) for repetition in repetitions))
    yield from _merge_sections_into_blocks(unrepeated, crossing)


def _merge_sections_into_blocks(
    sections: Sequence[_SectionBetweenSplits], crossing: Sequence[int]
) -> Iterator[NodeBlock]:
    """Merge adjacent sections into blocks of at most `MAX_BLOCK_NODES` nodes, split where the fewest values cross."""
    nodes = [n for p in sections for n in p.nodes]
    first = sections[0].start if sections else 0
    at = 0
    while len(nodes) - at > MAX_BLOCK_NODES:
        candidates = range(at + MAX_BLOCK_NODES // 2, at + MAX_BLOCK_NODES + 1)
        end = min(candidates, key=lambda p: (crossing[first + p], -p))
        yield NodeBlock(tuple(nodes[at:end]))
        at = end
    if nodes[at:]:
        yield NodeBlock(tuple(nodes[at:]))
