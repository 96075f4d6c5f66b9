"""Incremental propagation: derive the layouts of a set of factors from an assignment for a similar set.

The factor search tries each of many factors together with the chosen ones. A node is visited again only if one of these
has changed:

- the choice of a factor of its operands or results,
- the layout of an operand,
- the other users of an operand.

The result equals the result of `propagate_layouts`.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush

from ...graph.graph import Graph
from ...graph.node import Node, Value
from .assign import Assignment, Conversion, Pass, settled
from .axes import Factor
from .factors import Factors
from .states import State


class Layer:
    """Derives the layouts of one graph for many sets of factors, each from an earlier assignment."""

    def __init__(self, graph: Graph, factors: Factors) -> None:
        self.graph, self.factors, self.users = graph, factors, graph.users()
        self.place = {node: at for at, node in enumerate(graph.nodes)}
        near: dict[Factor, set[Node]] = defaultdict(set)
        for node in graph.nodes:
            for value in (*node.inputs, *node.results):
                for factor in factors.of(value):
                    near[factor].add(node)
        self.near = near
        uncut = Pass(graph, factors, frozenset(), self.users, frozenset())
        self.uncut, self.stored = uncut.run(), uncut.stored

    def lay(self, chosen: frozenset[Factor], base: Assignment) -> Assignment:
        """Return the assignment that `propagate_layouts` returns for the `chosen` factors.

        Args:
            chosen: The factors to shard.
            base: An assignment of the same graph, as similar as possible.
        """
        changed = set[Node]()
        for factor in chosen ^ base.chosen:
            changed |= self.near[factor]
        changed |= {user for node in changed for source in node.inputs for user in self.users[source]}
        return settled(lambda whole: _Again(self, chosen, whole, base).rerun(changed))


class _Again(Pass):
    """One propagation over the nodes that may differ from `base`, operands first."""

    def __init__(self, layer: Layer, chosen: frozenset[Factor], whole: frozenset[Value], base: Assignment) -> None:
        super().__init__(layer.graph, layer.factors, chosen, layer.users, whole)
        made, by, wants, dealt = dict(base.made), dict(base.by), dict(base.wants), dict(base.dealt)
        self.out = Assignment(chosen, made, by, wants, dealt, whole=whole, base=base)
        self.place, self.now, self.last = layer.place, 0, len(layer.place)
        self.kept: dict[Value, list[tuple[int, int, Conversion]]] = defaultdict(
            list
        )  # position of the reader, and number
        for number, conversion in enumerate(base.conversions):
            if conversion.node is not None:
                self.kept[conversion.value].append((self.place[conversion.node], number, conversion))
        self.count = len(base.conversions)
        self.stored, self.base = layer.stored, base

    def rerun(self, changed: set[Node]) -> Assignment:
        """Visit the `changed` nodes and all nodes that depend on a difference; return the new assignment."""
        nodes, out, base = self.graph.nodes, self.out, self.base
        leaves = {value.node for value in self.whole ^ base.whole}
        waiting = [self.place[node] for node in {*changed, *leaves}]
        heapify(waiting)
        seen, fresh = set(waiting), list[Node]()
        while waiting:
            self.now = heappop(waiting)
            node = nodes[self.now]
            for source in node.inputs:
                if kept := self.kept.get(source):
                    self.kept[source] = [entry for entry in kept if entry[0] != self.now]
            out.dealt.pop(node, None)
            self._visit(node)
            fresh.append(node)
            differ = [v for v in node.results if out.made[v] != base.made[v]]
            if not node.is_leaf:
                wanted = zip(node.inputs, out.wants[node], base.wants[node], strict=True)
                differ += [s for s, now, then in wanted if now != then]
            for value in differ:
                for user in self.users[value]:
                    place = self.place[user]
                    if place > self.now and place not in seen:
                        seen.add(place)
                        heappush(waiting, place)
        self.now = self.last
        self._end()
        entries = sorted((entry for some in self.kept.values() for entry in some), key=lambda entry: entry[:2])
        out.conversions = [conversion for *_, conversion in entries]
        out.fresh = tuple(fresh)
        return out

    def _is_converted(self, value: Value, state: State) -> bool:
        return any(c.after == state for place, _, c in self.kept.get(value, ()) if place <= self.now)

    def _is_stored(self, value: Value) -> bool:
        return value in self.stored and self.place[value.node] < self.now

    def _note(self, conversion: Conversion) -> None:
        self.kept[conversion.value].append((self.now, self.count, conversion))
        self.count += 1
