"""Which factors to cut: a greedy search over classes of factors, each judged by the cost of the whole graph.

Factors of identical layers form one class, recognised by how they are used and not by any name, so the search grows
with the number of different subgraphs, not with the number of layers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..graph.graph import Graph
from ..graph.node import Value
from .assign import Assignment, assign
from .cost import Estimate, Hardware, estimate
from .factors import Factor, Factors


@dataclass(frozen=True, slots=True)
class Choice:
    """The factors to cut, the layout that follows, its cost, and what else was considered."""

    factors: frozenset[Factor]
    assignment: Assignment
    cost: Estimate
    considered: tuple[str, ...]


def choose(graph: Graph, factors: Factors, devices: int, hardware: Hardware, *, eager: bool = False) -> Choice:
    """The best set of factors found: from none, add the class that saves most per collective while the total falls.

    `eager` adds classes that shorten the kernels even where their collectives cost more: the user asked for shards.
    """
    current = _judge(graph, factors, frozenset(), devices, hardware)
    if devices == 1:
        return current
    classes = classes_of(graph, factors)
    notes: list[str] = [f"one device: {current.cost.total * 1e3:.3f} ms"]
    while classes:
        tried: dict[str, Choice] = {}
        for name, members in list(classes.items()):
            wanted = current.factors | frozenset(members)
            if clash(graph, factors, wanted):
                del classes[name]
                continue
            tried[name] = _judge(graph, factors, wanted, devices, hardware)
            notes.append(f"with {name}: {tried[name].cost.total * 1e3:.3f} ms, {tried[name].cost.meetings} collectives")
        name = max(tried, key=lambda n: _worth(current.cost, tried[n].cost, eager), default="")
        if not name or _worth(current.cost, tried[name].cost, eager) <= 0:
            break
        notes.append(f"chosen: {name}")
        current = tried[name]
        del classes[name]
    return Choice(current.factors, current.assignment, current.cost, tuple(notes))


RELUCTANCE = 0.1
"""How much of what its collectives cost a cut must save at least when shards are asked for."""


def _worth(now: Estimate, then: Estimate, eager: bool) -> float:
    """Seconds of kernels saved per second of collectives added; negative if the cut does not pay."""
    saved = now.compute - then.compute
    added = max(0.0, then.collectives - now.collectives)
    pays = saved > 0 and (saved > RELUCTANCE * added if eager else then.total < now.total)
    return saved / (added + 1e-9) if pays else -1.0


def _judge(graph: Graph, factors: Factors, chosen: frozenset[Factor], devices: int, hardware: Hardware) -> Choice:
    assignment = assign(graph, factors, chosen)
    return Choice(chosen, assignment, estimate(graph, assignment, devices, hardware), ())


def classes_of(graph: Graph, factors: Factors) -> dict[str, list[Factor]]:
    """Factors that weights or states have, grouped by use; those that can never be cut are left out."""
    uses: dict[Factor, set[str]] = defaultdict(set)
    first: dict[Factor, str] = {}
    for node in graph.nodes:
        places = [(f"{node.op}.{i}", s) for i, s in enumerate(node.src) if s is not None]
        places += [(f"{node.op}>{v.index}", v) for v in node.results]
        for place, value in places:
            for axis, parts in enumerate(factors.axes(value)):
                for at, segment in enumerate(parts):
                    for i, factor in enumerate(segment):
                        uses[factor].add(f"{place}:{axis}.{at}.{i}/{len(segment)}:{value.shape}")
                        if node.op in ("weight", "state"):
                            first.setdefault(factor, f"factor {at}.{i} of axis {axis} of %{node.name}")
    grouped: dict[tuple[object, ...], list[Factor]] = defaultdict(list)
    for factor in first:
        if not factor.blocked and factor.size > 1:
            grouped[(factor.size, frozenset(uses[factor]))].append(factor)
    classes = {f"{len(m)} x {m[0].size} ({first[m[0]]})": m for m in grouped.values()}
    assert len(classes) == len(grouped), "a factor is named by where it first stands, so no two share a name"
    return classes


def clash(graph: Graph, factors: Factors, chosen: frozenset[Factor]) -> bool:
    """Whether some weight or state would have two chosen factors, or one in two axes: it can be cut once only."""
    for node in graph.nodes:
        if node.op in ("weight", "state"):
            places = {
                (axis, factor)
                for axis, parts in enumerate(factors.axes(Value(node)))
                for segment in parts
                for factor in segment
                if factor in chosen
            }
            if len(places) > 1:
                return True
    return False


def cuts_of(graph: Graph, factors: Factors, chosen: frozenset[Factor]) -> frozenset[tuple[str, int, int, int]]:
    """`chosen` in words that hold for every graph over the same leaves: (leaf, axis, segment, place) of each."""
    found: dict[Factor, tuple[str, int, int, int]] = {}
    for node in graph.nodes:
        if node.op in ("weight", "state"):
            for axis, parts in enumerate(factors.axes(Value(node))):
                for at, segment in enumerate(parts):
                    for i, factor in enumerate(segment):
                        if factor in chosen:
                            found.setdefault(factor, (node.name, axis, at, i))
    return frozenset(found.values())


def factors_at(graph: Graph, factors: Factors, cuts: frozenset[tuple[str, int, int, int]]) -> frozenset[Factor]:
    """The factors of `graph` that `cuts_of` named in another graph over the same leaves."""
    leaves = {n.name: Value(n) for n in graph.nodes if n.op in ("weight", "state")}
    found = set()
    for name, axis, at, i in cuts:
        if name in leaves:
            found.add(factors.axes(leaves[name])[axis][at][i])
    return frozenset(found)
