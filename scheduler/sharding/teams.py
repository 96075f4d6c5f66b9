"""Stages of layers, each cut over a team of devices: the layer split and the cuts of factors, composed.

A stage is a graph of its own, whose inputs are what earlier stages make; it is cut among its team as a whole graph is
among all devices.  What another stage reads ends whole on every device of the team; each device of the other team has
it from one of them.  All meetings of a stage come before its letters, and both before those of the next stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...backends.base import Program
from ...graph.errors import PlanError
from ...graph.graph import Graph, assign_names
from ...graph.node import Node, Value, input
from ...graph.rewrite import rewrite_graph
from ...ops.collectives import COLLECTIVES, find_collective_number, receive, send
from ..layout import REPLICATE, Layout, Local, Replicate, Shard
from ..lowering.lane import teams_of
from ..machines.hardware import Hardware
from .assign import Assignment
from .chunks import WHOLE, Chunks, laid_in_chunks, tokens_of
from .emit import Sharded, shard, unused, with_meetings
from .factors import Factors
from .layers import Placement, homes
from .pins import Pins, as_before
from .rows import Laying
from .search import cuts_of, deal, factors_at

Cuts = frozenset[tuple[str, int, int, int]]
Teams = Sequence[Sequence[int]]
"""The devices of each stage."""


@dataclass(frozen=True)
class Stage:
    """The graph of one stage.  `taken` are its inputs that others make, `given` its outputs that others read, by name:
    in each case the value of the whole graph."""

    graph: Graph
    taken: Mapping[str, Value]
    given: Mapping[str, Value]


def teams_by(machine: int, devices: int) -> list[list[int]]:
    """Devices in teams, one after the other: those of each machine, or where all are in one machine, the squarest
    division.  Raises `PlanError` where there is none."""
    size = machine
    if not 0 < machine < devices:
        size = devices // max(d for d in range(1, devices + 1) if devices % d == 0 and d * d <= devices)
    if size in (1, devices) or devices % size:
        raise PlanError(
            f"split mode layer,tensor needs teams of several devices, equal in number; {devices} devices make none; "
            "use layer or tensor, or another number of devices"
        )
    return [list(range(start, start + size)) for start in range(0, devices, size)]


def teams_like(programs: Sequence[Program]) -> list[list[int]] | None:
    """The teams of programs whose stages are each cut among several devices; None of others."""
    devices, teams = len(programs), teams_of(programs)
    if not any(1 < len(team) < devices for team in teams):
        return None
    size = next(len(team) for team in teams if len(team) > 1)
    return [list(range(start, start + size)) for start in range(0, devices, size)]


@dataclass(frozen=True)
class Composed:
    """The graphs of all devices, the cuts that are made, and whether a stage goes in chunks, or could, if whole."""

    sharded: Sharded
    cuts: Cuts
    has_chunks: bool


def compose(
    graph: Graph,
    where: Placement,
    teams: Teams,
    cuts: Cuts,
    proportions: Sequence[float],
    hardware: Hardware,
    earlier: Mapping[str, Layout] | None = None,
    chunks: Chunks = WHOLE,
) -> Composed:
    """The nodes in stages as `where` says, each cut as `cuts` say; those that have enough tokens, in `chunks` of them.
    `earlier` says how weights and states lie already.  Raises `PlanError` where a value would have to go back to an
    earlier stage."""
    stages = staged(graph, where, teams, earlier or {})
    whole = frozenset[str]()  # leaves that several stages read, and would cut along different axes
    while True:
        made = _Composition(graph, stages, teams, cuts, proportions, hardware, whole, earlier, chunks)
        if made.torn <= whole:
            return Composed(made.sharded(), made.cuts, made.has_chunks)
        whole |= made.torn


def staged(graph: Graph, where: Placement, teams: Teams, earlier: Mapping[str, Layout]) -> list[Stage]:
    """The graph of every stage; states stay where they lie already.  Raises `PlanError` where a value would have to go
    back."""
    home, called, stages = homes(graph, where), assign_names(graph), len(teams)
    for state in graph.states:
        if (lies := earlier.get(state.node.name)) is not None and not _has(lies, teams[home[state]]):
            there = [stage for stage, team in enumerate(teams) if _has(lies, team)]
            home[state] = next(iter([s for s in there if s > home[state]] or there), home[state])
    leaves = {n.name for n in graph.nodes if n.is_leaf}
    local: dict[tuple[int, Value], Value] = {}
    taken: list[dict[str, Value]] = [{} for _ in range(stages)]
    given: list[dict[str, Value]] = [{} for _ in range(stages)]

    def on(stage: int, value: Value) -> Value:
        """`value` in a stage: its own, a leaf, or an input."""
        at = home.get(value, stage)
        if at > stage:
            raise PlanError(f"{value!r} would go back from stage {at} to {stage}; use split mode layer or tensor")
        if (stage, value) not in local and at < stage:
            label = f"{called[value.node]}#{value.index}"
            name = unused(f"{label}.from.{at}", leaves)
            local[stage, value] = input(name, value.shape, value.dtype)
            taken[stage][name] = value
            given[at].setdefault(unused(f"{label}.out", graph.outputs), value)
        return local.setdefault((stage, value), value)

    for node in graph.nodes:
        if not node.is_leaf:
            stage = where[node]
            src = tuple(None if s is None else on(stage, s) for s in node.src)
            copy = Node(node.op, src, node.attrs, node.specs, called[node])
            local.update(((stage, v), new) for v, new in zip(node.results, copy.results, strict=True))
    outputs: list[dict[str, Value]] = [{} for _ in range(stages)]
    updates: list[dict[Value, Value]] = [{} for _ in range(stages)]
    for name, value in graph.outputs.items():
        stage = home.get(value, 0)
        outputs[stage][name] = on(stage, value)
    for state, new in graph.updates.items():
        stage = home[state]
        updates[stage][on(stage, state)] = on(stage, new)
    for stage in range(stages):
        outputs[stage].update((name, on(stage, value)) for name, value in given[stage].items())
    return [Stage(Graph(outputs[s], updates[s]), taken[s], given[s]) for s in range(stages)]


class _Composition:
    """The stages cut, one after the other; `torn` are leaves that two of them have cut along different axes."""

    def __init__(
        self,
        graph: Graph,
        stages: Sequence[Stage],
        teams: Teams,
        cuts: Cuts,
        proportions: Sequence[float],
        hardware: Hardware,
        whole: frozenset[str],
        earlier: Mapping[str, Layout] | None,
        chunks: Chunks,
    ) -> None:
        self.graph, self.stages, self.teams, self.proportions = graph, stages, teams, proportions
        self.asked, self.hardware, self.whole, self.earlier = cuts, hardware, whole, earlier
        self.chunks, self.has_chunks, self.number = chunks, False, 0
        self.cuts: Cuts = frozenset()
        self.sent: list[list[tuple[str, int, int]]] = [[] for _ in proportions]  # output, to whom, under which number
        self.received: list[dict[str, tuple[int, int]]] = [{} for _ in proportions]  # by input: from whom, and number
        self.parts: list[Sharded] = []
        for number, stage in enumerate(stages):
            part = self._cut(number, stage)
            self.parts.append(part)
            self._post(number, stage)
        self.leaves = {leaf.name: self._layout(leaf) for leaf in graph.nodes if leaf.is_leaf}
        self.torn = frozenset(name for name, layout in self.leaves.items() if layout is None)

    def _cut(self, number: int, stage: Stage) -> Sharded:
        """One stage over its team."""
        graph, team, factors = stage.graph, self.teams[number], Factors(stage.graph)
        chosen = factors_at(graph, factors, self.asked) if len(team) > 1 else frozenset()
        chosen = frozenset(f for f in chosen if f.can_be_cut)
        own = [self.proportions[d] for d in team]
        shares = deal(graph, factors, cuts_of(graph, factors, chosen, {}), own if sum(own) else [1.0] * len(team))
        shown = {graph.outputs[name] for name in stage.given}
        stored, earlier = [*graph.weights, *graph.states], self.earlier or {}
        before = {v.node.name: _within(earlier[v.node.name], v.shape, team) for v in stored if v.node.name in earlier}
        pins = Pins({}, {v: REPLICATE for v in stored if v.node.name in self.whole})
        while True:
            laying = Laying(graph, factors, chosen, pins, len(team), self.hardware, shown)
            part = shard(graph, factors, laying.fastest(), shares, first=self.number, whole=shown)
            known, pins = pins, as_before(pins, graph, part.leaves, before)
            if pins == known:
                self.cuts |= cuts_of(graph, factors, chosen, part.leaves)
                break
        if (tokens := tokens_of(laying.plain, factors)) is not None:
            of: Assignment | None = laying.plain
            if (saving := self.chunks.saving) is not None:
                of = laying.with_less_work(tokens, saving / len(self.stages))
            self.has_chunks |= of is not None
            if (count := self.chunks.count) > 1:
                of, first = of or laying.plain, self.number
                part = laid_in_chunks(graph, factors, of, shares, tokens, count, first=first, whole=shown) or part
        met = (find_collective_number(node.op, node.attrs) for own in part.graphs for node in own.nodes)
        self.number = max((number + 1 for number in met if number is not None), default=self.number)
        return part

    def _post(self, number: int, stage: Stage) -> None:
        """Letters of a stage to later ones, numbered."""
        for name, value in stage.given.items():
            for later in range(number + 1, len(self.stages)):
                for label in (n for n, v in self.stages[later].taken.items() if v == value):
                    team = self.teams[number]
                    for place, device in enumerate(self.teams[later]):
                        sender = team[place % len(team)]
                        self.sent[sender].append((name, device, self.number))
                        self.received[device][label] = sender, self.number
                        self.number += 1

    def _layout(self, leaf: Node) -> Layout | None:
        """How a leaf lies on all devices; None where that is no layout."""
        if leaf.op not in ("weight", "state"):
            return REPLICATE
        if self.earlier is not None and leaf.name in self.earlier:
            return self.earlier[leaf.name]
        own: dict[int, tuple[Layout, int]] = {}
        for team, part in zip(self.teams, self.parts, strict=True):
            layout = part.leaves.get(leaf.name)
            for place, device in enumerate(team if layout is not None else ()):
                assert layout is not None
                if not isinstance(layout, Local) or place in layout.devices:
                    own[device] = layout, place
        cut = {layout.axis for layout, _ in own.values() if isinstance(layout, Shard)}
        if not cut:
            return Local(tuple(sorted(own)) or (0,))
        if len(cut) > 1:
            return None
        (axis,) = cut
        all_of_it = ((0, leaf.specs[0].shape[axis]),)
        runs = [
            layout.runs[place] if isinstance(layout, Shard) else all_of_it if layout is not None else ()
            for layout, place in (own.get(d, (None, 0)) for d in range(len(self.proportions)))
        ]
        return Shard(axis, tuple(runs))

    def sharded(self) -> Sharded:
        """All devices."""
        graphs: dict[int, Graph] = {}
        outputs: dict[str, Layout] = {}
        for number, (team, part) in enumerate(zip(self.teams, self.parts, strict=True)):
            given = self.stages[number].given
            for place, device in enumerate(team):
                graphs[device] = self._posted(device, part.graphs[place], given)
            for name in part.outputs.keys() - given.keys():
                layout = part.outputs[name]
                if isinstance(layout, Shard):
                    runs = {device: layout.runs[place] for place, device in enumerate(team)}
                    outputs[name] = Shard(layout.axis, tuple(runs.get(d, ()) for d in range(len(self.proportions))))
                else:
                    outputs[name] = Local((team[0],))
        devices = range(len(self.proportions))
        leaves = {name: layout for name, layout in self.leaves.items() if layout is not None}
        ordered = {name: outputs[name] for name in self.graph.outputs}
        return Sharded(tuple(graphs[d] for d in devices), tuple({} for _ in devices), leaves, ordered)

    def _posted(self, device: int, graph: Graph, given: Mapping[str, Value]) -> Graph:
        """The graph of a device with letters in place of what other stages make, and for what they read."""
        received = self.received[device]

        def rule(node: Node) -> Value | None:
            if node.op != "input" or node.name not in received:
                return None
            source, number = received[node.name]
            spec = node.specs[0]
            return receive(shape=spec.shape, dtype=spec.dtype, source=source, sequence=number, name=node.name)

        graph = rewrite_graph(graph, rule)
        met = [n.results[0] for n in graph.nodes if n.op in COLLECTIVES]
        outputs = {name: value for name, value in graph.outputs.items() if name not in given}
        for name, to, number in self.sent[device]:
            value = graph.outputs[name]
            label = f"{value.node.name or value.node.op}.to.{to}"
            outputs[unused(f"sent.{number}", self.graph.outputs)] = send(value, to=to, sequence=number, name=label)
        return with_meetings(Graph(outputs, graph.updates), met)


def _within(layout: Layout, shape: Sequence[int], team: Sequence[int]) -> Layout:
    """How a leaf of this shape lies on the devices of a team."""
    if isinstance(layout, Shard):
        runs = tuple(layout.runs[d] for d in team)
        return REPLICATE if set(runs) == {((0, shape[layout.axis]),)} else Shard(layout.axis, runs)
    return REPLICATE if isinstance(layout, Local) and set(team) <= set(layout.devices) else layout


def stages_like(graph: Graph, leaves: Mapping[str, Layout], teams: Teams) -> Placement:
    """The stages of a graph over weights and states that lie on teams already: a node runs where a weight or state of
    its own lies, otherwise with the last of its sources."""
    where: dict[Node, int] = {}
    for node in graph.nodes:
        if node.is_leaf:
            continue
        follows = max((where[s.node] for s in node.inputs if not s.node.is_leaf), default=0)
        options = [
            [s for s, team in enumerate(teams) if _has(leaves[v.node.name], team)]
            for v in node.inputs
            if v.node.op in ("weight", "state") and v.node.name in leaves
        ]
        where[node] = follows if all(follows in o for o in options if o) else max(max(o) for o in options if o)
    return where


def _has(layout: Layout, team: Sequence[int]) -> bool:
    """Whether a team has anything of what lies so."""
    if isinstance(layout, Shard):
        return any(layout.runs[d] for d in team)
    return isinstance(layout, Replicate) or (isinstance(layout, Local) and not set(team).isdisjoint(layout.devices))
