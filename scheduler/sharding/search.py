"""Which factors to cut: a greedy search over classes of factors, each judged by the cost of the whole graph.

Factors of identical layers form one class, recognised by how they are used and not by any name, so the search grows
with the number of different subgraphs, not with the number of layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from ...graph.graph import Graph
from ...graph.node import Node, Value
from ..layout import Layout, Shard
from ..machines.hardware import Estimate, Hardware
from ..units import nbytes_text, time_text
from .again import Layer
from .assign import Assignment
from .axes import Factor
from .condense import Condensed, condense
from .cost import Costs
from .factors import Factors
from .shares import Shares, dealt

NO_TIMES: Mapping[Node, int] = MappingProxyType({})
NO_LEAVES: Mapping[str, Layout] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Choice:
    """The factors to cut, what else was considered, and what is predicted: the time of a run, how much of it is `sent`
    to others, the time without any cut (`alone`), and the bytes of weights and states on each device."""

    factors: frozenset[Factor]
    considered: tuple[str, ...] = ()
    seconds: float = math.inf
    alone: float = math.inf
    held: float = math.inf
    sent: float = 0.0


class Search:
    """What may be cut in a graph, over any number of devices.  Parts that repeat are judged once, and so is each set of
    factors, however many devices it is judged for."""

    def __init__(self, graph: Graph, factors: Factors) -> None:
        self.graph, self.factors = graph, factors

    @cached_property
    def _all(self) -> _Judge:
        return _Judge(self.graph, self.factors, NO_TIMES)

    @cached_property
    def _condensed(self) -> tuple[Condensed, _Judge] | None:
        small = condense(self.graph)
        return None if small is None else (small, _Judge(small.graph, Factors(small.graph), small.times))

    def choose(self, devices: int, hardware: Hardware, *, eager: bool = False) -> Choice:
        """The best set of factors for so many devices: from none, add the class that saves most per collective while
        the total falls; of choices that take about as long, the one that leaves fewer bytes on each device.

        `eager` adds classes that shorten the kernels even where their collectives cost more: the user asked for shards.
        """
        if self._condensed is not None:
            small, judge = self._condensed
            choice = judge.choose(devices, hardware, eager)
            if (chosen := _spread(self.graph, self.factors, small, judge.factors, choice.factors)) is not None:
                return replace(choice, factors=chosen)
        return self._all.choose(devices, hardware, eager)


class _Judge:
    """Sets of factors of one graph, each with the layout that follows, and what that would cost."""

    def __init__(self, graph: Graph, factors: Factors, times: Mapping[Node, int]) -> None:
        self.graph, self.factors, self.times = graph, factors, times
        self.classes = classes_of(graph, factors, times)
        self._layer = Layer(graph, factors)
        self._laid: dict[frozenset[Factor], Assignment | None] = {frozenset(): self._layer.uncut}

    def laid(self, chosen: frozenset[Factor], current: frozenset[Factor]) -> Assignment | None:
        """The layout that follows from these factors, found from that of the `current` ones; None where they clash."""
        if chosen not in self._laid:
            base = self._laid[current]
            assert base is not None
            fits = cut_twice(self.graph, self.factors, chosen) is None
            self._laid[chosen] = self._layer.lay(chosen, base) if fits else None
        return self._laid[chosen]

    def choose(self, devices: int, hardware: Hardware, eager: bool) -> Choice:
        """What `Search.choose` says, for this graph."""
        costs = Costs(self.graph, devices, hardware, self.times)
        uncut = _judged(costs, self._layer.uncut)
        notes = [f"uncut, each device does all: {_shown(uncut.cost)}"]
        best = self._grown(costs, uncut, eager, notes)
        if not eager and best is not uncut:
            most = min(best.cost.total * (1 + ALIKE), uncut.cost.total * (1 - ALIKE))
            best = self._lightened(costs, best, most, notes)
        return Choice(best.factors, tuple(notes), best.cost.total, uncut.cost.total, best.held, best.cost.collectives)

    def _tried(self, costs: Costs, names: Iterable[str], current: _Judged) -> dict[str, _Judged]:
        """Each of these classes that can be cut beside what is cut already, together with that."""
        sets = {name: current.factors.union(self.classes[name]) for name in names}
        laid = {n: self.laid(chosen, current.factors) for n, chosen in sets.items() if chosen != current.factors}
        return {name: _judged(costs, assignment) for name, assignment in laid.items() if assignment is not None}

    def _grown(self, costs: Costs, uncut: _Judged, eager: bool, notes: list[str]) -> _Judged:
        """`uncut` with one class after the other, as long as that pays."""
        current = uncut
        while tried := self._tried(costs, self.classes, current):
            worth = {name: _worth(current.cost, judged.cost, eager) for name, judged in tried.items()}
            ranked = sorted(tried, key=lambda n: -worth[n])
            name = ranked[0]
            if worth[name] <= 0:
                notes.append(f"no further cut pays: {name} gives {_shown(tried[name].cost)}")
                break
            if not eager:
                first, pays = tried[name], [n for n in ranked if worth[n] > 0]
                alike = [n for n in pays if abs(tried[n].cost.total - first.cost.total) <= ALIKE * first.cost.total]
                rivals = [
                    n for n in alike if n == name or self.laid(first.factors | tried[n].factors, first.factors) is None
                ]
                name = min(rivals, key=lambda n: tried[n].held)
            beaten = "".join(
                f"; {_why(tried[name], tried[n], name == ranked[0])} {n}: {_shown(tried[n].cost)}"
                for n in [n for n in ranked if n != name][:1]
            )
            notes.append(f"cut {name}: {_shown(tried[name].cost)}{beaten}")
            current = tried[name]
        return current

    def _lightened(self, costs: Costs, current: _Judged, most: float, notes: list[str]) -> _Judged:
        """`current` with whatever else takes bytes off the devices in at most so many seconds."""
        left: Iterable[str] = self.classes
        while True:
            tried = self._tried(costs, left, current)
            left = [n for n, judged in tried.items() if judged.cost.total <= most and judged.held < current.held]
            if not left:
                return current
            name = min(left, key=lambda n: tried[n].held)
            saved = nbytes_text(int(current.held - tried[name].held))
            notes.append(f"cut {name}: {_shown(tried[name].cost)}, about as long with {saved} less on each device")
            current = tried[name]


def _spread(
    graph: Graph, factors: Factors, small: Condensed, own: Factors, chosen: frozenset[Factor]
) -> frozenset[Factor] | None:
    """The factors of `graph` that stand where the `chosen` ones of its condensed form do, in all twins; None if the
    two graphs turn out to have other factors."""
    leaves = {n.name: n.results[0] for n in graph.nodes if n.op in ("weight", "state")}
    ours = {n.name: n.results[0] for n in small.graph.nodes if n.op in ("weight", "state")}
    everywhere: set[Factor] = set()
    for name, axis, at, i in cuts_of(small.graph, own, chosen, {}):
        wanted = [[f.size for f in segment] for segment in own.axes(ours[name])[axis]]
        for twin in small.twins.get(name, (name,)):
            parts = factors.axes(leaves[twin])[axis]
            if [[f.size for f in segment] for segment in parts] != wanted or parts[at][i].blocked:
                return None
            everywhere.add(parts[at][i])
    return frozenset(everywhere) if cut_twice(graph, factors, frozenset(everywhere)) is None else None


@dataclass(frozen=True, slots=True)
class _Judged:
    """A set of factors, its predicted cost, and the bytes that each device keeps."""

    factors: frozenset[Factor]
    cost: Estimate
    held: float


def _judged(costs: Costs, assignment: Assignment) -> _Judged:
    return _Judged(assignment.chosen, costs.estimate(assignment), costs.held(assignment))


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
        if factor.can_be_cut:
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


def cut_twice(graph: Graph, factors: Factors, chosen: frozenset[Factor]) -> Value | None:
    """A weight or state that would have two chosen factors, or one in two axes, and can be cut once only; else None."""
    for node in graph.nodes:
        if node.op in ("weight", "state"):
            value = node.results[0]
            if chosen.isdisjoint(factors.of(value)):
                continue
            axes = enumerate(factors.axes(value))
            places = {(a, f) for a, parts in axes for segment in parts for f in segment if f in chosen}
            if len(places) > 1:
                return value
    return None


def cuts_of(
    graph: Graph, factors: Factors, chosen: frozenset[Factor], leaves: Mapping[str, Layout]
) -> frozenset[tuple[str, int, int, int]]:
    """`chosen` in words that hold for every graph over the same leaves: (leaf, axis, segment, place) of each.

    A leaf is cut on one axis at most: where `leaves` has its layout, a factor is named by it only if it lies so.
    """
    named: dict[Factor, tuple[str, int, int, int]] = {}
    for factor, place in _places(graph, factors, chosen):
        lies = leaves.get(place[0])
        if not (isinstance(lies, Shard) and lies.axis != place[1]):
            named.setdefault(factor, place)
    return frozenset(named.values())


def all_cuts_of(graph: Graph, factors: Factors, chosen: frozenset[Factor]) -> frozenset[tuple[str, int, int, int]]:
    """What `cuts_of` gives, by every leaf that has a factor, for graphs over some of the leaves."""
    return frozenset(place for _, place in _places(graph, factors, chosen))


def _places(
    graph: Graph, factors: Factors, chosen: frozenset[Factor]
) -> Iterator[tuple[Factor, tuple[str, int, int, int]]]:
    """Where weights and states have `chosen` factors."""
    for node in graph.nodes:
        if node.op in ("weight", "state"):
            for axis, parts in enumerate(factors.axes(node.results[0])):
                for at, segment in enumerate(parts):
                    yield from ((f, (node.name, axis, at, i)) for i, f in enumerate(segment) if f in chosen)


def factors_at(graph: Graph, factors: Factors, cuts: frozenset[tuple[str, int, int, int]]) -> frozenset[Factor]:
    """The factors of `graph` that `cuts_of` named in another graph over the same leaves, where it has such."""
    leaves = {n.name: n.results[0] for n in graph.nodes if n.op in ("weight", "state")}
    named = set()
    for name, axis, at, i in cuts:
        if name in leaves:
            parts = factors.axes(leaves[name])[axis]
            named |= {s[i] for s in parts[at : at + 1] if i < len(s)}
    return frozenset(named)


def deal(
    graph: Graph,
    factors: Factors,
    cuts: frozenset[tuple[str, int, int, int]],
    proportions: Sequence[float],
    lies: Mapping[str, Layout] = NO_LEAVES,
) -> Shares:
    """Shares of all factors that are cut, dealt in the order of their leaves, so that related plans agree; what `lies`
    on the devices already is dealt as it lies."""
    shares = Shares(proportions)
    leaves = {n.name: factors.axes(n.results[0]) for n in graph.nodes if n.op in ("weight", "state")}
    for name, axis, at, place in sorted(cuts, key=_natural):
        segments, layout = leaves[name][axis], lies.get(name)
        if isinstance(layout, Shard) and layout.axis == axis:
            shares.keep(segments[at][place], dealt(segments, at, segments[at][place], layout.runs))
        else:
            shares.of(segments[at][place])
    return shares


def _natural(cut: tuple[str, int, int, int]) -> tuple[object, ...]:
    """Sort key in which layer 9 comes before layer 10."""
    name = tuple((part.isdecimal(), int(part) if part.isdecimal() else part) for part in cut[0].split("."))
    return (tuple((flag, str(value).zfill(12)) for flag, value in name), *cut[1:])
