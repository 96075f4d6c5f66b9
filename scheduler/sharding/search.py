"""Which factors to cut: a greedy search over classes of factors, each judged by the cost of the whole graph.

Factors of identical layers form one class, recognised by how they are used and not by any name, so the search grows
with the number of different subgraphs, not with the number of layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...graph.graph import Graph
from ...graph.node import Node, Value
from ..hardware import Estimate, Hardware
from ..layout import Layout, Shard
from ..units import nbytes_text, time_text
from .assign import Assignment, assign
from .axes import Factor
from .condense import Condensed, condense
from .cost import Costs
from .factors import Factors

NO_TIMES: Mapping[Node, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Choice:
    """The factors to cut, the layout that follows, and what else was considered; `alone` is the time without cuts."""

    factors: frozenset[Factor]
    assignment: Assignment
    considered: tuple[str, ...]
    alone: float = math.inf


def choose(graph: Graph, factors: Factors, devices: int, hardware: Hardware, *, eager: bool = False) -> Choice:
    """The best set of factors found: from none, add the class that saves most per collective while the total falls; of
    choices that take about as long, the one that leaves fewer bytes on each device.

    `eager` adds classes that shorten the kernels even where their collectives cost more: the user asked for shards.
    Parts that repeat are judged once.
    """
    if devices == 1:
        return Choice(frozenset(), assign(graph, factors, frozenset()), ())
    if (small := condense(graph)) is not None:
        own = Factors(small.graph)
        best, notes, alone = _search(small.graph, own, Costs(small.graph, devices, hardware, small.times), eager)
        if (chosen := _spread(graph, factors, small, own, best.factors)) is not None:
            return Choice(chosen, assign(graph, factors, chosen), notes, alone)
    best, notes, alone = _search(graph, factors, Costs(graph, devices, hardware), eager)
    return Choice(best.factors, best.assignment, notes, alone)


def _search(graph: Graph, factors: Factors, costs: Costs, eager: bool) -> tuple[_Judged, tuple[str, ...], float]:
    """The best set of factors, what was considered, and the time without cuts."""
    current = uncut = _judge(graph, factors, frozenset(), costs)
    classes = classes_of(graph, factors, costs.times)
    notes = [f"uncut, each device does all: {_shown(current.cost)}"]
    while classes:
        tried: dict[str, _Judged] = {}
        for name, members in list(classes.items()):
            wanted = current.factors | frozenset(members)
            if clash(graph, factors, wanted):
                del classes[name]
            else:
                tried[name] = _judge(graph, factors, wanted, costs)
        worth = {name: _worth(current.cost, judged.cost, eager) for name, judged in tried.items()}
        ranked = sorted(tried, key=lambda n: -worth[n])
        if not ranked or worth[ranked[0]] <= 0:
            notes += [f"no further cut pays: {n} gives {_shown(tried[n].cost)}" for n in ranked[:1]]
            break
        name = ranked[0]
        if not eager:
            first, pays = tried[name], [n for n in ranked if worth[n] > 0]
            alike = [n for n in pays if abs(tried[n].cost.total - first.cost.total) <= ALIKE * first.cost.total]
            rivals = [n for n in alike if n == name or clash(graph, factors, first.factors | tried[n].factors)]
            name = min(rivals, key=lambda n: tried[n].held)
        beaten = "".join(
            f"; {_why(tried[name], tried[n], name == ranked[0])} {n}: {_shown(tried[n].cost)}"
            for n in [n for n in ranked if n != name][:1]
        )
        notes.append(f"cut {name}: {_shown(tried[name].cost)}{beaten}")
        current = tried[name]
        del classes[name]
    if not eager and current is not uncut:
        most = min(current.cost.total * (1 + ALIKE), uncut.cost.total * (1 - ALIKE))
        current, more = _lightened(graph, factors, costs, current, classes, most)
        notes += more
    return current, tuple(notes), uncut.cost.total


def _lightened(
    graph: Graph, factors: Factors, costs: Costs, current: _Judged, classes: Mapping[str, list[Factor]], most: float
) -> tuple[_Judged, list[str]]:
    """`current` with whatever else takes bytes off the devices in at most so many seconds, and notes."""
    left, notes = dict(classes), list[str]()
    while True:
        wanted = {name: current.factors | frozenset(members) for name, members in left.items()}
        tried = {n: _judge(graph, factors, w, costs) for n, w in wanted.items() if not clash(graph, factors, w)}
        left = {n: left[n] for n, j in tried.items() if j.cost.total <= most and j.held < current.held}
        if not left:
            return current, notes
        name = min(left, key=lambda n: tried[n].held)
        saved = nbytes_text(int(current.held - tried[name].held))
        notes.append(f"cut {name}: {_shown(tried[name].cost)}, about as long with {saved} less on each device")
        current = tried[name]
        del left[name]


def _spread(
    graph: Graph, factors: Factors, small: Condensed, own: Factors, chosen: frozenset[Factor]
) -> frozenset[Factor] | None:
    """The factors of `graph` that stand where the `chosen` ones of its condensed form do, in all twins; None if the
    two graphs turn out to have other factors."""
    leaves = {n.name: Value(n) for n in graph.nodes if n.op in ("weight", "state")}
    ours = {n.name: Value(n) for n in small.graph.nodes if n.op in ("weight", "state")}
    everywhere: set[Factor] = set()
    for name, axis, at, i in cuts_of(small.graph, own, chosen, {}):
        wanted = [[f.size for f in segment] for segment in own.axes(ours[name])[axis]]
        for twin in small.twins.get(name, (name,)):
            parts = factors.axes(leaves[twin])[axis]
            if [[f.size for f in segment] for segment in parts] != wanted or parts[at][i].blocked:
                return None
            everywhere.add(parts[at][i])
    return None if clash(graph, factors, frozenset(everywhere)) else frozenset(everywhere)


@dataclass(frozen=True, slots=True)
class _Judged:
    """A set of factors, the layout that follows, its predicted cost, and the bytes that each device keeps."""

    factors: frozenset[Factor]
    assignment: Assignment
    cost: Estimate
    held: float


ALIKE = 0.02
"""Predicted times that differ by no more than this part of them are taken to be alike: fewer bytes on each device
decide, as no cost is put on memory, unless shards are asked for anyway.  A plan that is about as fast as one device is
not made slower for that."""
RELUCTANCE = 0.1
"""How much of what its collectives cost a cut must save at least when shards are asked for."""


def _worth(now: Estimate, then: Estimate, eager: bool) -> float:
    """Seconds of kernels saved per second of collectives added; negative if the cut does not pay."""
    saved = now.compute - then.compute
    added = max(0.0, then.collectives - now.collectives)
    pays = saved > 0 and (saved > RELUCTANCE * added if eager else then.total < now.total)
    return saved / (added + 1e-9) if pays else -1.0


def _judge(graph: Graph, factors: Factors, chosen: frozenset[Factor], costs: Costs) -> _Judged:
    assignment = assign(graph, factors, chosen)
    return _Judged(chosen, assignment, costs.estimate(assignment), costs.held(assignment))


def _why(chosen: _Judged, other: _Judged, is_worth_most: bool) -> str:
    """In what one choice is better than another."""
    if not is_worth_most:
        return "has fewer bytes on each device than"
    faster = chosen.cost.total <= other.cost.total
    return "beat" if faster else "saves more for each second in collectives than"


def _shown(cost: Estimate) -> str:
    return f"{time_text(cost.total)}, {cost.meetings} collectives"


def classes_of(graph: Graph, factors: Factors, times: Mapping[Node, int] = NO_TIMES) -> dict[str, list[Factor]]:
    """Factors that cut a weight, or a state from end to end, grouped by use; those that can never be cut are left out.

    Rows of a state that this graph reads apart from the others are no place to cut: the next graph over the same state,
    of a longer step, reads others, and the state stays as it lies.

    `times` says how many leaves one stands for, if more than one.
    """
    uses: dict[Factor, set[str]] = defaultdict(set)
    first: dict[Factor, tuple[Node, int]] = {}
    counts: dict[Factor, int] = {}
    for node in graph.nodes:
        places = [(f"{node.op}.{i}", s) for i, s in enumerate(node.src) if s is not None]
        places += [(f"{node.op}>{v.index}", v) for v in node.results]
        for place, value in places:
            for axis, parts in enumerate(factors.axes(value)):
                for at, segment in enumerate(parts):
                    for i, factor in enumerate(segment):
                        uses[factor].add(f"{place}:{axis}.{at}.{i}/{len(segment)}:{value.shape}")
                        if node.op == "weight" or (node.op == "state" and all(factor in part for part in parts)):
                            first.setdefault(factor, (node, axis))
                            counts[factor] = min(counts.get(factor, times.get(node, 1)), times.get(node, 1))
    grouped: dict[tuple[object, ...], list[Factor]] = defaultdict(list)
    for factor in first:
        if not factor.blocked and factor.size > 1:
            grouped[(factor.size, frozenset(uses[factor]))].append(factor)
    classes: dict[str, list[Factor]] = {}
    for members in grouped.values():
        name = _named(factors, members[0], first[members[0]], sum(counts[f] for f in members))
        classes[name if name not in classes else f"{name}, part {len(classes)}"] = members
    return classes


def _named(factors: Factors, one: Factor, leaf: tuple[Node, int], layers: int) -> str:
    """A class of factors in plain words: ``kv heads of 30 layers (3 each), as in axis 1 of %blk.0.attn_output.weight``,
    ``axis 0 of %output.weight (128 pieces)``."""
    node, axis = leaf
    where, word = f"axis {axis} of %{node.name}", factors.word(one)
    of = f" of {layers} layers" if layers > 1 else ""
    if word:
        return f"{word}{of} ({one.size}{' each' if of else ''}), as in {where}"
    return f"{where}, and {layers - 1} alike ({one.size} pieces each)" if of else f"{where} ({one.size} pieces)"


def clash(graph: Graph, factors: Factors, chosen: frozenset[Factor]) -> bool:
    """Whether some weight or state would have two chosen factors, or one in two axes: it can be cut once only."""
    for node in graph.nodes:
        if node.op in ("weight", "state"):
            value = Value(node)
            if chosen.isdisjoint(factors.of(value)):
                continue
            axes = enumerate(factors.axes(value))
            places = {(a, f) for a, parts in axes for segment in parts for f in segment if f in chosen}
            if len(places) > 1:
                return True
    return False


def cuts_of(
    graph: Graph, factors: Factors, chosen: frozenset[Factor], leaves: Mapping[str, Layout]
) -> frozenset[tuple[str, int, int, int]]:
    """`chosen` in words that hold for every graph over the same leaves: (leaf, axis, segment, place) of each.

    A leaf is cut on one axis at most: where `leaves` has its layout, a factor is named by it only if it lies so.
    """
    named: dict[Factor, tuple[str, int, int, int]] = {}
    for node in graph.nodes:
        if node.op in ("weight", "state"):
            for axis, parts in enumerate(factors.axes(Value(node))):
                for at, segment in enumerate(parts):
                    for i, factor in enumerate(segment):
                        lies = leaves.get(node.name)
                        if factor in chosen and not (isinstance(lies, Shard) and lies.axis != axis):
                            named.setdefault(factor, (node.name, axis, at, i))
    return frozenset(named.values())


def factors_at(graph: Graph, factors: Factors, cuts: frozenset[tuple[str, int, int, int]]) -> frozenset[Factor]:
    """The factors of `graph` that `cuts_of` named in another graph over the same leaves."""
    leaves = {n.name: Value(n) for n in graph.nodes if n.op in ("weight", "state")}
    named = set()
    for name, axis, at, i in cuts:
        if name in leaves:
            named.add(factors.axes(leaves[name])[axis][at][i])
    return frozenset(named)
