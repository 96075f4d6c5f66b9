"""The verifier of plans that repeat a part of a short graph: the proof of the short plan holds for the long one.

The short plan is proven like any other plan. The rest is an induction over the repetitions. Before each repetition:

1. the memory of a device has the same layout;
2. each place holds the same graph value, shifted by the repetition index;
3. all partial sums are complete.

So a repetition may follow any other, and the proof of its kind holds for each equal repetition.

- `find_length_faults`: the long graph is the short graph with more repetitions.
- `find_repetition_faults`: reads, writes and saves of each device's repetitions (`runs`), and equal collectives.
- `CarriedValueTrace` of `carrying`: the values of all devices that are carried from repetition to repetition.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from ...graph.graph import Graph
from ...graph.node import Node
from ...graph.repeated_runs import PREAMBLE, ShortenedGraph
from ..layout import Layout
from ..plan import Lane, Plan
from .runs import DeviceRepetitions, find_device_repetition_faults

NUMBERED_NAME = re.compile(r"(\d{1,9})(\..*)?", re.ASCII | re.DOTALL)
"""Names of device nodes: the number of a node of the short graph, and an ending if they convert it."""


def find_shortened_graph(plan: Plan) -> ShortenedGraph | None:
    """Return the shortened graph of a plan; None if each instruction of the plan is to be checked."""
    shorts = [device_plan.short for device_plan in plan.lanes]
    first = shorts[0] if shorts else None
    return (
        first.shortened_graph
        if first is not None and all(s is not None and s.shortened_graph is first.shortened_graph for s in shorts)
        else None
    )


def make_short_plan(plan: Plan, of: ShortenedGraph) -> Plan:
    """Make the plan of the short graph from the plan of the long one."""
    device_plans = [
        Lane(device_plan.device, device_plan.backend, device_plan.short.graph, device_plan.short.program)
        for device_plan in plan.lanes
        if device_plan.short is not None
    ]
    shift = (of.deep_repetitions.count - of.short_count) * of.deep_repetitions.length
    leaves: dict[str, Layout] = {}
    for number, node in enumerate(of.short_nodes):
        if node.is_leaf:
            long = of.deep_nodes[
                number + (shift if of.short_repetitions.repetition_of(number) == of.short_count else 0)
            ]
            leaves[node.name] = plan.leaves[long.name]
    return replace(plan, graph=of.short_graph, lanes=tuple(device_plans), leaves=leaves, cuts=frozenset())


def find_length_faults(plan: Plan, of: ShortenedGraph) -> Iterator[str]:
    """Yield the differences between the plan's graph and the short graph with more repetitions.

    The function compares nodes, operands, and the layouts of leaves and outputs in each repetition.
    """
    runs, left_out = of.deep_repetitions, (of.deep_repetitions.count - of.short_count) * of.deep_repetitions.length
    sizes = len(of.deep_graph.nodes), len(of.short_graph.nodes)
    if plan.graph is not of.deep_graph or plan.placed:
        yield "its lanes repeat runs of another graph, or nodes are placed"
        return
    room = sizes[0] - runs.start - runs.count * runs.length
    if min(runs.start, runs.length - 1, of.short_count - 1, left_out, room) < 0 or sizes[0] != sizes[1] + left_out:
        yield f"its lanes repeat {of.short_count} kinds of {runs}, which the graph of {sizes[0]} nodes does not have"
        return
    place = {node: at for nodes in (of.deep_nodes, of.short_nodes) for at, node in enumerate(nodes)}
    for number, node in enumerate(of.deep_nodes):
        run = runs.repetition_of(number)
        kind = _find_repetition_kind(of, run)
        short = of.short_nodes[number - (run - kind) * runs.length]
        if (node.op, node.attrs, node.specs) != (short.op, short.attrs, short.specs) or short.name != str(place[short]):
            yield f"{node!r} of run {run} is not like {short!r}"
            return
        reads = [
            None if s is None else (_find_representative_node(of, place[s.node], run, kind), s.index) for s in node.src
        ]
        if reads != [None if s is None else (place[s.node], s.index) for s in short.src]:
            yield f"{node!r} of run {run} reads other values than {short!r}"
            return
        if (
            node.is_leaf
            and plan.leaves[node.name] != plan.leaves[of.deep_nodes[_find_first_equivalent_node(of, number, run)].name]
        ):
            yield f"{node.op} %{node.label} of run {run} lies otherwise than that of another run of its kind"
    yield from _find_output_and_update_faults(of, place)


def _find_repetition_kind(of: ShortenedGraph, run: int) -> int:
    """Return the kind of a repetition."""
    return PREAMBLE if run == PREAMBLE else of.short_count if run == of.deep_repetitions.count else run % of.short_count


def _find_first_equivalent_node(of: ShortenedGraph, number: int, run: int) -> int:
    """Return the equivalent of node `number` in the first repetition of the same kind."""
    return (
        number
        if run in (PREAMBLE, of.deep_repetitions.count)
        else number - (run - run % of.short_count) * of.deep_repetitions.length
    )


def _find_representative_node(of: ShortenedGraph, source: int, run: int, kind: int) -> int | None:
    """Return the short node for node `source` of the long graph, as a repetition of that kind reads it.

    It is None if the repetition may not read the source.
    """
    there, length = of.deep_repetitions.repetition_of(source), of.deep_repetitions.length
    if there == run:
        return source - (run - kind) * length
    carried = of.deep_repetitions.position_if_carried(source, run) if run != PREAMBLE else None
    if carried is not None and there == run - 1:
        return of.short_repetitions.first_node_of(kind - 1) + carried
    lasts = there == PREAMBLE and of.deep_repetitions.position_if_carried(source, 0) is None
    return source if lasts else None


def _find_output_and_update_faults(of: ShortenedGraph, place: Mapping[Node, int]) -> Iterator[str]:
    """Yield outputs that belong to a repetition, and states that change differently in equal repetitions."""

    def changes(graph: Graph) -> dict[int, set[tuple[int, int, int]]]:
        runs = of.deep_repetitions if graph is of.deep_graph else of.short_repetitions
        found = defaultdict[int, set[tuple[int, int, int]]](set)
        for old, new in graph.updates.items():
            first = runs.first_node_of(runs.repetition_of(place[old.node]))
            found[runs.repetition_of(place[old.node])].add(
                (place[old.node] - first, place[new.node] - first, new.index)
            )
        return found

    long, short = changes(of.deep_graph), changes(of.short_graph)
    for run in {*long, *(r for r, kind in of.repetitions_with_kind if kind in short)}:
        if long[run] != short[_find_repetition_kind(of, run)]:
            yield f"states of run {run} change otherwise than those of its kind"
    if of.deep_graph.outputs.keys() != of.short_graph.outputs.keys():
        yield "the short graph has other outputs"
        return
    for name, value in of.deep_graph.outputs.items():
        run, short_value = of.deep_repetitions.repetition_of(place[value.node]), of.short_graph.outputs[name]
        if 0 <= run < of.deep_repetitions.count:
            yield f"output {name!r} belongs to run {run}"
        elif (
            _find_representative_node(of, place[value.node], run, _find_repetition_kind(of, run))
            != place[short_value.node]
            or value.index != short_value.index
        ):
            yield f"output {name!r} of the short graph is another"


def find_name_faults(short: Plan, of: ShortenedGraph) -> Iterator[str]:
    """Yield device nodes without the number of a short node as their name."""
    for device, device_plan in enumerate(short.lanes):
        for node in device_plan.graph.nodes:
            named = NUMBERED_NAME.fullmatch(node.name)
            if named is None or int(named[1]) >= len(of.short_graph.nodes):
                yield f"device {device}: {node!r} is called by no number of a node of the short graph"


def find_repetition_faults(short: Plan, of: ShortenedGraph) -> Iterator[str]:
    """Yield why the repetitions of a proven short plan cannot be repeated, or where devices run other collectives."""
    faults_by_program: dict[tuple[object, ...], list[str]] = {}
    collective_numbers = [
        DeviceRepetitions(device_plan.graph, of).list_collective_numbers() for device_plan in short.lanes[:1]
    ]
    for device, device_plan in enumerate(short.lanes):
        key = type(device_plan.backend), device_plan.backend.name, id(device_plan.graph), id(device_plan.program)
        if key not in faults_by_program:
            faults_by_program[key] = list(
                find_device_repetition_faults(device_plan.graph, device_plan.program, device_plan.backend, of)
            )
            if DeviceRepetitions(device_plan.graph, of).list_collective_numbers() != collective_numbers[0]:
                faults_by_program[key].append("it meets others in other runs than device 0 does")
        yield from (f"device {device}: {why}" for why in faults_by_program[key])
    for (number, run), (following, later) in pairwise(collective_numbers[0]):
        if following != number + 1 or later < run:
            yield f"meeting {following} of run {later} follows meeting {number} of run {run}"
