"""Collapse repeated layers to two sections each, so that the factor search grows with the number of different layers.

1. Split the graph wherever exactly one value crosses, as the residual stream of a model does. Long-lived values, such
   as a mask that every layer reads, do not count.
2. Find repetitions of sections with structural equality. Names of layers are not used.
3. Keep the first section of each group, which stands for all, and join the sections that are kept.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....graph.graph import Graph, order_updates_directly_after_operands
from ....graph.layer_folding import (
    SectionStructures,
    Spans,
    find_adjacent_repetitions,
    find_live_spans,
    find_long_lived_values,
    split_where_one_value_crosses,
)
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
    """A part of the graph between two points where a single value crosses, such as a decoder layer.

    - `incoming_value` and `outgoing_value` are the crossing values; None at the ends of the graph.
    - `own_leaves` maps each leaf that only these nodes read to its position.
    - `structure` is equal for repetitions: names, and the names of own leaves, do not count.
    """

    nodes: Sequence[Node]
    incoming_value: Value | None
    outgoing_value: Value | None
    own_leaves: Mapping[Node, int]
    structure: object


def collapse_repeated_layers_to_two(graph: Graph) -> CollapsedGraph | None:
    """Replace each sequence of equal layers by two layers, so that the factor search has a smaller graph.

    The first of the two stands for all layers but the last. The last layer is kept, because the layer after it
    decides where a sum over devices takes place. Returns None without repeated layers.
    """
    nodes = [
        n for n in order_updates_directly_after_operands(graph) if not n.is_leaf
    ]  # else a value for a state update alone would live to the end
    spans = find_live_spans(graph, nodes)
    lasting = find_long_lived_values(nodes, spans)
    sections = _make_layer_sections(graph, nodes, spans, lasting)
    groups: list[list[_LayerSection]] = []
    for start, length, times in find_adjacent_repetitions([section.structure for section in sections]):
        last = start + length * (times - 1)
        groups += [sections[start + i : last : length] for i in range(length) if times > 1]
        groups += [[section] for section in sections[last : last + length]]
    return None if len(groups) == len(sections) else _join_first_section_of_each_group(graph, groups)


def _make_layer_sections(
    graph: Graph, nodes: Sequence[Node], spans: Spans, lasting: frozenset[Value]
) -> list[_LayerSection]:
    """Split the computed nodes of a graph into sections where a single value crosses; long-lived values do not count.

    Args:
        graph: The graph.
        nodes: The nodes that compute, in order.
        spans: For each value the positions of its node and of its last reader.
        lasting: Long-lived values, such as a mask that every layer reads.
    """
    sections = split_where_one_value_crosses(nodes, spans, lasting)
    structures = SectionStructures(graph, sections, lasting, frozenset(("weight", "state")))
    cuts = [*itertools.accumulate(map(len, sections), initial=0)]
    points = frozenset(cuts)
    crossing = {
        point: value
        for value, (first, last) in spans.items()
        if value not in lasting
        for point in range(first + 1, last + 1)
        if point in points
    }
    layer_sections = []
    for at, own in enumerate(structures.own_leaves):
        before, after = (crossing.get(point) for point in cuts[at : at + 2])
        leaves = tuple((n.op, n.specs, structures.describe_value(at, graph.updates.get(n.results[0]))) for n in own)
        lasting_results = tuple(v for n in sections[at] for v in n.results if v in lasting)
        ends = None if before is None else before.spec, structures.describe_value(at, after)
        structure = structures.keys[at], lasting_results, leaves, ends
        layer_sections.append(_LayerSection(sections[at], before, after, own, structure))
    return layer_sections


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
