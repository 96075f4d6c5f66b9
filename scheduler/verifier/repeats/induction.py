"""The verifier of plans with repeated layers: the proof of a short plan also holds for the deep plan.

The deep graph is the user's graph with all repetitions of a layer. The short graph keeps only a few repetitions, the
kinds; each kind stands for many repetitions of the deep graph. The short plan is proven like any other plan. The rest
is an induction over the repetitions. Before each repetition:

1. the memory of a device has the same layout;
2. each location has the same graph value, shifted by the repetition index;
3. all partial sums are complete.

So a repetition may follow any other, and the proof of its kind holds for each equal repetition.

- `find_shortened_graph_mismatches`: the deep graph is the short graph with more repetitions.
- `find_faults_of_reordering_repetitions`: accesses of each device's repetitions (`repeatable_runs`), and equal
  collectives.
- `CarriedValueTrace` of `carried_values`: the values of all devices that are carried from repetition to repetition.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from ....graph.graph import Graph
from ....graph.node import Node
from ....graph.repeated_runs import PREAMBLE, ShortenedGraph
from ...ir.execution_plan import DevicePlan, Plan
from ...ir.layout import Layout
from .repeatable_runs import RepetitionsOfDeviceGraph, find_faults_of_any_repetition_order

NUMBERED_NAME = re.compile(r"(\d{1,9})(\..*)?", re.ASCII | re.DOTALL)
"""Names of device nodes: the number of a node of the short graph, and an ending if they convert it."""


def find_common_shortened_graph(plan: Plan) -> ShortenedGraph | None:
    """Return the shortened graph, with few repeated layers, from which all device plans are unrolled; else None.

    Without a common shortened graph, the verifier checks every instruction of the plan.
    """
    shorts = [device_plan.short for device_plan in plan.device_plans]
    first = shorts[0] if shorts else None
    return (
        first.shortened_graph
        if first is not None and all(s is not None and s.shortened_graph is first.shortened_graph for s in shorts)
        else None
    )


def make_plan_before_unrolling(plan: Plan, shortened: ShortenedGraph) -> Plan:
    """Return the plan of the short graph, which has few repeated layers, from a plan that was unrolled to all layers.

    Args:
        plan: The plan of the deep graph.
        shortened: The shortened graph, which has few repetitions of the repeated layers.
    """
    device_plans = [
        DevicePlan(device_plan.device, device_plan.backend, device_plan.short.graph, device_plan.short.program)
        for device_plan in plan.device_plans
        if device_plan.short is not None
    ]
    shift = (shortened.deep_repetitions.count - shortened.short_count) * shortened.deep_repetitions.length
    leaves: dict[str, Layout] = {}
    for number, node in enumerate(shortened.short_nodes):
        if node.is_leaf:
            long = shortened.deep_nodes_by_number[
                number + (shift if shortened.short_repetitions.repetition_of(number) == shortened.short_count else 0)
            ]
            leaves[node.name] = plan.leaves[long.name]
    return replace(
        plan, graph=shortened.short_graph, device_plans=tuple(device_plans), leaves=leaves, sharded_factors=frozenset()
    )


def find_shortened_graph_mismatches(plan: Plan, shortened: ShortenedGraph) -> Iterator[str]:
    """Yield the differences that forbid a short graph, with few of the repeated layers, to stand for the plan's graph.

    Each repetition is compared with the repetition of the short graph that stands for it. Ops, operands and the
    layouts of leaves must be equal. Outputs and state updates must agree as well.
    """
    runs, left_out = (
        shortened.deep_repetitions,
        (shortened.deep_repetitions.count - shortened.short_count) * shortened.deep_repetitions.length,
    )
    sizes = len(shortened.deep_graph.nodes), len(shortened.short_graph.nodes)
    if plan.graph is not shortened.deep_graph or plan.pinned_nodes:
        yield "its device plans repeat parts of another graph, or nodes are pinned"
        return
    room = sizes[0] - runs.start - runs.count * runs.length
    if (
        min(runs.start, runs.length - 1, shortened.short_count - 1, left_out, room) < 0
        or sizes[0] != sizes[1] + left_out
    ):
        yield (
            f"its device plans repeat {shortened.short_count} kinds of {runs}, "
            f"which the graph of {sizes[0]} nodes does not have"
        )
        return
    place = {
        node: at for nodes in (shortened.deep_nodes_by_number, shortened.short_nodes) for at, node in enumerate(nodes)
    }
    for number, node in enumerate(shortened.deep_nodes_by_number):
        run = runs.repetition_of(number)
        kind = _find_short_repetition(shortened, run)
        short = shortened.short_nodes[number - (run - kind) * runs.length]
        if (node.op, node.attrs, node.specs) != (short.op, short.attrs, short.specs) or short.name != str(place[short]):
            yield f"{node!r} of repetition {run} differs from {short!r}"
            return
        reads = [
            None if s is None else (_translate_operand_to_short_graph(shortened, place[s.node], run, kind), s.index)
            for s in node.src
        ]
        if reads != [None if s is None else (place[s.node], s.index) for s in short.src]:
            yield f"{node!r} of repetition {run} reads other values than {short!r}"
            return
        if (
            node.is_leaf
            and plan.leaves[node.name]
            != plan.leaves[
                shortened.deep_nodes_by_number[_find_node_in_first_repetition_of_kind(shortened, number, run)].name
            ]
        ):
            yield (
                f"{node.op} %{node.label} of repetition {run} has another layout than in another repetition of its kind"
            )
    yield from _find_unequal_output_and_update_faults(shortened, place)


def _find_short_repetition(shortened: ShortenedGraph, repetition: int) -> int:
    """Return the repetition of the short graph that stands for a repetition of the full ("deep") graph.

    If the short graph has n repetitions, repetition k stands for k, k + n, k + 2n and so on. The parts before and after
    all repetitions stand for themselves.
    """
    return (
        PREAMBLE
        if repetition == PREAMBLE
        else shortened.short_count
        if repetition == shortened.deep_repetitions.count
        else repetition % shortened.short_count
    )


def _find_node_in_first_repetition_of_kind(shortened: ShortenedGraph, node_number: int, repetition: int) -> int:
    """Find the node at the same position in the first deep repetition that corresponds to the same short one.

    Corresponding nodes have the same position in their repetitions. If the short graph has n repetitions, repetition k
    stands for k, k + n, k + 2n and so on in the deep graph. Example: with n = 2, a node of repetition 5 corresponds to
    a node of repetition 1.

    Args:
        shortened: The short graph, the deep graph, and the repetitions of both.
        node_number: The number of a node in the deep graph.
        repetition: The repetition of this node.

    Returns:
        The number of the node in the deep graph.
    """
    return (
        node_number
        if repetition in (PREAMBLE, shortened.deep_repetitions.count)
        else node_number - (repetition - repetition % shortened.short_count) * shortened.deep_repetitions.length
    )


def _translate_operand_to_short_graph(
    shortened: ShortenedGraph, source_number: int, reader_repetition: int, reader_kind: int
) -> int | None:
    """Translate an operand from the full ("deep") graph to the short graph: return the number of its node there.

    The operand must be in the repetition of its reader, in the repetition before (a carried value), or before all
    repetitions; else the result is None.

    Args:
        shortened: The short graph, the deep graph, and the repetitions of both.
        source_number: The number of the node that is read in the deep graph.
        reader_repetition: The repetition of the reader in the deep graph.
        reader_kind: The repetition of the short graph that stands for it.

    Returns:
        The number of the short graph's node; None if the reader may not read the node of the deep graph.
    """
    there, length = shortened.deep_repetitions.repetition_of(source_number), shortened.deep_repetitions.length
    if there == reader_repetition:
        return source_number - (reader_repetition - reader_kind) * length
    carried = (
        shortened.deep_repetitions.find_position_of_carried_value(source_number, reader_repetition)
        if reader_repetition != PREAMBLE
        else None
    )
    if carried is not None and there == reader_repetition - 1:
        return shortened.short_repetitions.first_node_of(reader_kind - 1) + carried
    lasts = there == PREAMBLE and shortened.deep_repetitions.find_position_of_carried_value(source_number, 0) is None
    return source_number if lasts else None


def _find_unequal_output_and_update_faults(
    shortened: ShortenedGraph, position_by_node: Mapping[Node, int]
) -> Iterator[str]:
    """Yield faults of outputs and state updates that are not the same in the deep graph and the short graph.

    An output must not belong to a repetition. All repetitions of one kind must update their states in the same way.
    """

    def changes(graph: Graph) -> dict[int, set[tuple[int, int, int]]]:
        runs = shortened.deep_repetitions if graph is shortened.deep_graph else shortened.short_repetitions
        found = defaultdict[int, set[tuple[int, int, int]]](set)
        for old, new in graph.updates.items():
            first = runs.first_node_of(runs.repetition_of(position_by_node[old.node]))
            found[runs.repetition_of(position_by_node[old.node])].add(
                (position_by_node[old.node] - first, position_by_node[new.node] - first, new.index)
            )
        return found

    long, short = changes(shortened.deep_graph), changes(shortened.short_graph)
    for run in {*long, *(r for r, kind in shortened.deep_and_short_repetitions if kind in short)}:
        if long[run] != short[_find_short_repetition(shortened, run)]:
            yield f"states of repetition {run} change differently from those of its kind"
    if shortened.deep_graph.outputs.keys() != shortened.short_graph.outputs.keys():
        yield "the short graph has other outputs"
        return
    for name, value in shortened.deep_graph.outputs.items():
        run, short_value = (
            shortened.deep_repetitions.repetition_of(position_by_node[value.node]),
            shortened.short_graph.outputs[name],
        )
        if 0 <= run < shortened.deep_repetitions.count:
            yield f"output {name!r} belongs to repetition {run}"
        elif (
            _translate_operand_to_short_graph(
                shortened, position_by_node[value.node], run, _find_short_repetition(shortened, run)
            )
            != position_by_node[short_value.node]
            or value.index != short_value.index
        ):
            yield f"output {name!r} of the short graph is another value"


def find_names_without_short_node_number(short_plan: Plan, shortened: ShortenedGraph) -> Iterator[str]:
    """Yield faults of the names of device nodes, which must begin with the number of a node of the short graph.

    This number decides to which repeated layer the device's node belongs. An example is ``12.suffix``.
    """
    for device, device_plan in enumerate(short_plan.device_plans):
        for node in device_plan.graph.nodes:
            named = NUMBERED_NAME.fullmatch(node.name)
            if named is None or int(named[1]) >= len(shortened.short_graph.nodes):
                yield f"device {device}: {node!r} does not have the number of a short graph node as its name"


def find_faults_of_reordering_repetitions(short_plan: Plan, shortened: ShortenedGraph) -> Iterator[str]:
    """Yield the reasons why a proof for a few layers does not hold for all: the layers cannot be repeated freely.

    All devices must also have their collectives in the same repetitions, and by ascending sequence number.

    Args:
        short_plan: The proven plan of the short graph, which has few repetitions of the repeated layers.
        shortened: The shortened graph.
    """
    faults_by_program: dict[tuple[object, ...], list[str]] = {}
    collective_numbers = [
        RepetitionsOfDeviceGraph(device_plan.graph, shortened).list_sequence_numbers_with_repetition()
        for device_plan in short_plan.device_plans[:1]
    ]
    for device, device_plan in enumerate(short_plan.device_plans):
        key = type(device_plan.backend), device_plan.backend.name, id(device_plan.graph), id(device_plan.program)
        if key not in faults_by_program:
            faults_by_program[key] = list(
                find_faults_of_any_repetition_order(
                    device_plan.graph, device_plan.program, device_plan.backend, shortened
                )
            )
            if (
                RepetitionsOfDeviceGraph(device_plan.graph, shortened).list_sequence_numbers_with_repetition()
                != collective_numbers[0]
            ):
                faults_by_program[key].append("its collectives are in other repetitions than those of device 0")
        yield from (f"device {device}: {why}" for why in faults_by_program[key])
    for (number, run), (following, later) in pairwise(collective_numbers[0]):
        if following != number + 1 or later < run:
            yield f"collective {following} of repetition {later} follows collective {number} of repetition {run}"
