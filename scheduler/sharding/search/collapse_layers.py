"""Collapse repeated layers to two sections each, so that the factor search grows with the number of different layers.

1. Split the graph wherever exactly one value crosses, as the residual stream of a model does. Long-lived values, such
   as a mask that every layer reads, do not count.
2. Find repetitions of sections with structural equality. Names of layers are not used.
3. Keep the first section of each group, which stands for all, and join the sections that are kept.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....graph.attrs import make_attribute_key
from ....graph.graph import Graph, order_updates_directly_after_operands
from ....graph.layer_folding import LONG_LIVED_SHARE, find_adjacent_repetitions, find_live_spans
from ....graph.node import Node, Value


@dataclass(frozen=True, slots=True)
class CollapsedGraph:
    """A graph in which one layer stands for several equal layers of the original graph.

    - `node_multiplicity`: the number of original nodes for which each node stands.
    - `leaf_copies`: for each leaf, by name, the names of the original leaves.
    """

    graph: Graph
    node_multiplicity: Mapping[Node, int]
    leaf_copies: Mapping[str, tuple[str, ...]]


@dataclass(slots=True)
class _LayerSection:
    """A section of the graph between two points where a single value crosses, such as a decoder layer.

    - `incoming_value` and `outgoing_value` are the crossing values; None at the ends of the graph.
    - `own_leaves` maps each leaf that only these nodes read to its position.
    """

    nodes: Sequence[Node]
    incoming_value: Value | None
    outgoing_value: Value | None
    own_leaves: dict[Node, int]


def collapse_repeated_layers_to_two(graph: Graph) -> CollapsedGraph | None:
    """Collapse each sequence of equal layers to two layers.

    The first of the two stands for all layers but the last. The last layer is kept, because the layer after it decides
    where a sum over devices takes place. Returns None without repeated layers.
    """
    nodes = [
        n for n in order_updates_directly_after_operands(graph) if not n.is_leaf
    ]  # else a value for a state update alone would live to the end
    spans = find_live_spans(graph, nodes)
    lasting = frozenset(v for v, (a, b) in spans.items() if b - a > LONG_LIVED_SHARE * len(nodes))
    sections = _split_at_single_crossing_values(nodes, spans, lasting)
    groups: list[list[_LayerSection]] = []
    for start, length, times in find_adjacent_repetitions(
        [_make_section_equality_key(graph, section, lasting) for section in sections]
    ):
        last = start + length * (times - 1)
        groups += [sections[start + i : last : length] for i in range(length) if times > 1]
        groups += [[section] for section in sections[last : last + length]]
    return None if len(groups) == len(sections) else _join_first_section_of_each_group(graph, groups)


def _split_at_single_crossing_values(
    nodes: Sequence[Node], spans: Mapping[Value, tuple[int, int]], lasting_values: frozenset[Value]
) -> list[_LayerSection]:
    """Split the graph into sections at each point that a single value crosses.

    Long-lived values may also cross this point.

    Args:
        nodes: The nodes that compute, in order.
        spans: For each value the positions of its node and of its last reader.
        lasting_values: Long-lived values, such as a mask that every layer reads; they do not count.
    """
    crossing: list[list[Value]] = [[] for _ in range(len(nodes) + 1)]
    for value, (defined_at, read) in spans.items():
        if value not in lasting_values:
            for point in range(defined_at + 1, read + 1):
                crossing[point].append(value)
    cuts = [0, *(p for p in range(1, len(nodes)) if len(crossing[p]) == 1), len(nodes)]
    sections = []
    readers: dict[Node, set[int]] = defaultdict(set)
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        before, after = (crossing[p][0] if 0 < p < len(nodes) else None for p in (start, stop))
        sections.append(_LayerSection(nodes[start:stop], before, after, {}))
        for node in nodes[start:stop]:
            for source in node.inputs:
                if source.node.is_leaf:
                    readers[source.node].add(number)
    for leaf, numbers in readers.items():
        if len(numbers) == 1 and leaf.op in ("weight", "state"):
            own = sections[next(iter(numbers))].own_leaves
            own[leaf] = len(own)
    return sections


def _make_section_equality_key(graph: Graph, section: _LayerSection, lasting: frozenset[Value]) -> object:
    """Make a key that is equal for two sections with the same structure.

    Names of nodes and of leaves that only the section reads do not count. Leaves that other sections read must be the
    same.
    """
    number = {node: i for i, node in enumerate(section.nodes)}
    outputs = {v: name for name, v in graph.outputs.items()}

    def ref(value: Value | None) -> object:
        if value is None or value == section.incoming_value:
            return value is None
        if value.node in section.own_leaves:
            return ("own", section.own_leaves[value.node])
        return (number[value.node], value.index) if value.node in number else value

    lines = [
        (n.op, tuple(map(ref, n.src)), make_attribute_key(n.attrs), n.specs, tuple(outputs.get(v) for v in n.results))
        for n in section.nodes
    ]
    lasting_values = tuple(v for n in section.nodes for v in n.results if v in lasting)
    leaves = tuple((n.op, n.specs, ref(graph.updates.get(n.results[0]))) for n in section.own_leaves)
    before = None if section.incoming_value is None else section.incoming_value.spec
    return (tuple(lines), lasting_values, leaves, before, ref(section.outgoing_value))


def _join_first_section_of_each_group(
    graph: Graph, section_groups: Sequence[Sequence[_LayerSection]]
) -> CollapsedGraph | None:
    """Join the first section of each group to a graph, in which it stands for the whole group.

    The result is None if the value between two joined sections would have another spec (shape or dtype).
    """
    new: dict[Value, Value] = {}
    times: Counter[Node] = Counter()
    leaf_copies: dict[str, tuple[str, ...]] = {}
    updates: dict[Value, Value] = {}
    last: Value | None = None
    for group in section_groups:
        section = group[0]
        if section.incoming_value is not None:
            if last is None or last.spec != section.incoming_value.spec:
                return None
            new[section.incoming_value] = last
        for node in section.nodes:
            copy = node.with_src(tuple(None if s is None else new.get(s, s) for s in node.src))
            new.update(zip(node.results, copy.results, strict=True))
            times[copy] = len(group)
        for at, leaf in enumerate(section.own_leaves):
            leaf_copies[leaf.name] = tuple(list(other.own_leaves)[at].name for other in group)
            times[leaf] = len(group)
        last = None if section.outgoing_value is None else new[section.outgoing_value]
    remaining_leaves = {leaf for group in section_groups for leaf in group[0].own_leaves}
    for state, new_value in graph.updates.items():
        if state.node in remaining_leaves or new_value in new:
            updates[state] = new.get(new_value, new_value)
    outputs = {name: new.get(v, v) for name, v in graph.outputs.items()}
    return CollapsedGraph(Graph(outputs, updates), times, leaf_copies)
