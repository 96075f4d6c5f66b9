"""A graph as blocks for people: layers that repeat are found by their structure and told once.

No layer is known by name.  The nodes are put in order, the order is cut where one value crosses (the residual stream
of a model) besides those that live long, and pieces of equal structure that follow each other are one group::

    embed  layer layer layer wide  layer layer layer wide  head
    embed [[layer × 3] wide] × 2 head

What has no such cuts is divided where few values cross, so that no block has more nodes than a picture can show.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from .graph import Graph, topological_order
from .node import Node, Value

LONG_LIVED_SHARE = 0.4
"""A value that crosses this part of all points of a graph lives long: it belongs to no piece.  Of two layers alone each
sum that is carried on crosses a third, and what serves both of them half."""
MAX_PERIOD_SECTIONS = 64
"""How many pieces are looked through for a repetition."""
MAX_BLOCK_NODES = 90
"""Nodes of a block beyond which it is divided."""


Spans = dict[Value, tuple[int, int]]
"""For each computed value the place of the node that makes it, and of the last that reads it."""


@dataclass(frozen=True, slots=True)
class NodeBlock:
    """Computed nodes that follow each other; no leaves."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class RepeatedGroup:
    """The same structure several times in a row: ``each[i]`` are the items of repetition i, alike in all of them."""

    repetitions: tuple[tuple[Item, ...], ...]


Item = NodeBlock | RepeatedGroup


def fold_layers(graph: Graph) -> tuple[Item, ...]:
    """The computed nodes of `graph`, each in one block, in an order in which sources come before users."""
    nodes = _order_for_folding(graph)
    spans = find_live_spans(graph, nodes)
    lasting = _find_long_lived_values(nodes, spans)
    pieces = _split_at_single_values(nodes, spans, lasting)
    if not pieces:
        return ()
    structures = _StructuralKeys(graph, pieces, lasting)
    crossing = _count_crossing_values(len(nodes), spans)
    starts = itertools.accumulate((len(p) for p in pieces), initial=0)
    numbered = [_Section(p, s, start) for p, s, start in zip(pieces, structures.keys, starts, strict=False)]
    return tuple(_group_repetitions(numbered, crossing))


def iterate_blocks(items: Sequence[Item]) -> Iterator[NodeBlock]:
    """All blocks in order, those of every repetition."""
    for item in items:
        if isinstance(item, NodeBlock):
            yield item
        else:
            for one in item.repetitions:
                yield from iterate_blocks(one)


def find_layer_nodes(graph: Graph) -> list[tuple[Node, ...]]:
    """The computed nodes of each layer, in order; what stands before, between and behind layers is in none.

    A layer is the shortest run of pieces whose ops come again, or what is left between such runs.  A piece of one node
    is no part of a layer's shape: the last layer of a model may choose rows in its midst.
    """
    nodes = _order_for_folding(graph)
    spans = find_live_spans(graph, nodes)
    pieces = [
        piece
        for piece in _split_at_single_values(nodes, spans, _find_long_lived_values(nodes, spans))
        if len(piece) > 1
    ]
    place = {node: at for at, node in enumerate(nodes)}
    return [tuple(nodes[place[run[0][0]] : place[run[-1][-1]] + 1]) for run in _iterate_layer_sections(pieces)]


def _iterate_layer_sections(pieces: Sequence[Sequence[Node]]) -> Iterator[Sequence[Sequence[Node]]]:
    """The pieces of each layer: of what repeats in turn the shortest that does.  One piece that comes but twice is no
    layer: a decoder attends twice in one."""
    loose: list[Sequence[Node]] = []
    for start, length, times in find_repetitions([tuple(n.op for n in piece) for piece in pieces]):
        if length * times < 3:
            loose += pieces[start : start + length * times]
            continue
        yield from [loose] if loose else []
        loose = []
        for first in range(start, start + length * times, length):
            yield from _iterate_layer_sections(pieces[first : first + length])
    yield from [loose] if loose else []


def find_repetitions(items: Sequence[object]) -> Iterator[tuple[int, int, int]]:
    """`items` as (start, length, times): runs of a few that come several times in a row, and what is between."""
    numbers: dict[object, int] = {}
    line = [numbers.setdefault(item, len(numbers)) for item in items]
    at = 0
    while at < len(line):
        best = (1, 1)
        for length in range(1, min(MAX_PERIOD_SECTIONS, (len(line) - at) // 2) + 1):
            times = 1
            while line[at : at + length] == line[at + length * times : at + length * (times + 1)]:
                times += 1
            if times > 1 and length * times > best[0] * best[1]:
                best = (length, times)
        yield (at, *best)
        at += best[0] * best[1]


@dataclass(frozen=True, slots=True)
class _Section:
    """Nodes between two cuts, what they have in common with their twins, and where in the order they start."""

    nodes: Sequence[Node]
    structure: object
    start: int


def _order_for_folding(graph: Graph) -> list[Node]:
    """The computed nodes in order: first those on which long-lived values rest and which no layer needs otherwise, and
    those that only a new state needs straight behind the last that they read."""
    nodes = _place_operands_first(graph, frozenset())
    early = frozenset(topological_order(_find_long_lived_values(nodes, find_live_spans(graph, nodes))))
    return [*(n for n in nodes if n in early), *(n for n in _place_operands_first(graph, early) if n not in early)]


def _place_operands_first(graph: Graph, early: Set[Node]) -> list[Node]:
    """The computed nodes, sources before users, if those that are `early` are there from the start."""
    place: dict[Node, tuple[int, int]] = {}
    for at, node in enumerate(_deepest_first(graph, early)):
        place[node] = (at, -1)
    for at, node in enumerate(n for n in graph.nodes if n not in place):
        place[node] = (max((place[s.node][0] for s in node.inputs if not s.node.is_leaf), default=-1), at)
    return sorted((n for n in graph.nodes if not n.is_leaf), key=place.__getitem__)


def _deepest_first(graph: Graph, early: Set[Node]) -> Iterator[Node]:
    """What the outputs rest on, sources before users; of several sources the one with the longest way behind it first,
    so that all of an encoder stands before the decoder that reads it.  No way goes behind what is `early`: the first
    layer of a decoder, too, does its own work before it reads the encoder."""
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
    """From where to where in this order each value is kept."""
    spans: Spans = {}
    for at, node in enumerate(nodes):
        for source in node.inputs:
            if source in spans:
                spans[source] = (spans[source][0], at)
        spans.update((v, (at, at)) for v in node.results)
    spans.update((v, (spans[v][0], len(nodes) - 1)) for v in graph.outputs.values() if v in spans)
    return spans


def _count_crossing_values(points: int, spans: Spans) -> list[int]:
    """For each point between nodes how many values cross it."""
    change = [0] * (points + 2)
    for made, read in spans.values():
        change[made + 1] += 1
        change[read + 1] -= 1
    return list(itertools.accumulate(change))


def _find_long_lived_values(nodes: Sequence[Node], spans: Spans) -> frozenset[Value]:
    """The values that live long."""
    return frozenset(v for v, (a, b) in spans.items() if b - a > LONG_LIVED_SHARE * len(nodes))


def _split_at_single_values(nodes: Sequence[Node], spans: Spans, lasting: Set[Value]) -> list[Sequence[Node]]:
    """The nodes cut wherever one value crosses besides those that are `lasting`."""
    crossing = _count_crossing_values(len(nodes), {v: span for v, span in spans.items() if v not in lasting})
    cuts = [0, *(p for p in range(1, len(nodes)) if crossing[p] <= 1), len(nodes)]
    return [nodes[a:b] for a, b in itertools.pairwise(cuts) if a < b]


class _StructuralKeys:
    """What pieces have in common with their twins: everything but the names of nodes and of their own leaves."""

    def __init__(self, graph: Graph, pieces: Sequence[Sequence[Node]], lasting: frozenset[Value]) -> None:
        self.lasting = lasting
        self.outputs = {v: name for name, v in graph.outputs.items()}
        self.updates = graph.updates
        self.piece = {node: at for at, nodes in enumerate(pieces) for node in nodes}
        self.number = {node: i for nodes in pieces for i, node in enumerate(nodes)}
        readers: dict[Node, set[int]] = defaultdict(set)
        for node, at in self.piece.items():
            for source in node.inputs:
                if source.node.is_leaf:
                    readers[source.node].add(at)
        self.own = {leaf for leaf, where in readers.items() if len(where) == 1}
        self.keys = [self._key(at, nodes) for at, nodes in enumerate(pieces)]

    def _key(self, at: int, nodes: Sequence[Node]) -> object:
        """Equal for twins; hashed once, since a piece may have thousands of nodes."""
        leaves: dict[Node, int] = {}

        def ref(value: Value | None) -> object:
            if value is None:
                return None
            node = value.node
            if node in self.own and node.op != "constant":
                return "own", node.op, node.specs, leaves.setdefault(node, len(leaves))
            if not node.is_leaf and self.piece[node] == at:
                return self.number[node], value.index
            return value if node.is_leaf or value in self.lasting else ("before", value.spec)

        return tuple(
            (n.op, tuple(map(ref, n.src)), tuple(n.attrs.items()), n.specs, tuple(map(self.outputs.get, n.results)))
            for n in nodes
        )


def _group_repetitions(pieces: Sequence[_Section], crossing: Sequence[int]) -> Iterator[Item]:
    """Pieces as blocks and groups: runs that repeat are groups, what is between them is put together."""
    loose: list[_Section] = []
    for start, length, times in find_repetitions([p.structure for p in pieces]):
        if times == 1:
            loose.append(pieces[start])
            continue
        yield from _merge_into_blocks(loose, crossing)
        loose = []
        each = (pieces[start + length * i : start + length * (i + 1)] for i in range(times))
        yield RepeatedGroup(tuple(tuple(_group_repetitions(one, crossing)) for one in each))
    yield from _merge_into_blocks(loose, crossing)


def _merge_into_blocks(pieces: Sequence[_Section], crossing: Sequence[int]) -> Iterator[NodeBlock]:
    """Neighbours as few blocks of at most `LARGEST` nodes, cut where the fewest values cross."""
    nodes = [n for p in pieces for n in p.nodes]
    first = pieces[0].start if pieces else 0
    at = 0
    while len(nodes) - at > MAX_BLOCK_NODES:
        near = range(at + MAX_BLOCK_NODES // 2, at + MAX_BLOCK_NODES + 1)
        end = min(near, key=lambda p: (crossing[first + p], -p))
        yield NodeBlock(tuple(nodes[at:end]))
        at = end
    if nodes[at:]:
        yield NodeBlock(tuple(nodes[at:]))
