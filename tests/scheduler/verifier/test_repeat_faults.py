"""Faults planted in and between the runs of plans that repeat themselves: the verifier finds every one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from hocket.backends.base import Instruction, Program, Tensor, find_device
from hocket.graph import Graph, Node
from hocket.graph.repeated_runs import RepeatedRuns, ShortenedGraph
from hocket.graph.rewrite import rewrite_graph
from hocket.scheduler import Plan, plan_for_group
from hocket.scheduler.lowering.device_plan import UnrollableProgram
from hocket.scheduler.lowering.device_plan import make_lazily_unrolled_device_plan as lane_of
from hocket.scheduler.lowering.lower import lower_graph
from hocket.scheduler.planning import repeated_layers
from hocket.scheduler.verifier.plan_verifier import find_plan_faults
from hocket.scheduler.verifier.repeats.repeatable_runs import find_faults_of_any_repetition_order

from ...given.graphs.layered import decoder
from ...given.plans.ways import SLOW

LAYERS, DEVICE = 14, 1


@cache
def plan_graph() -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_layers, "MIN_SAVED_NODES", 1)
        group = [find_device(f"cpu:{d}") for d in range(3)]
        plan = plan_for_group(decoder(LAYERS), group, split_mode="tensor", tensor_split=(5, 4, 2), hardware=SLOW)
    return plan


def shorts(plan: Plan) -> list[UnrollableProgram]:
    return [device_plan.short for device_plan in plan.device_plans if device_plan.short is not None]


def with_shorts(plan: Plan, shorts: list[UnrollableProgram], **changes: Any) -> Plan:
    device_plans = [
        lane_of(device_plan.device, device_plan.backend, short)
        for device_plan, short in zip(plan.device_plans, shorts, strict=True)
    ]
    return dataclasses.replace(plan, device_plans=tuple(device_plans), **changes)


def with_program_change(change: Callable[[Program], Program]) -> Plan:
    """The plan in which the short program of one device is changed."""
    parts = shorts(plan_graph())
    parts[DEVICE] = UnrollableProgram(parts[DEVICE].graph, change(parts[DEVICE].program), parts[DEVICE].shortened_graph)
    return with_shorts(plan_graph(), parts)


def with_step_change(at: Callable[[Instruction], bool], change: Callable[[Instruction], Instruction]) -> Plan:
    """The plan in which the one step that is `at` a place of one device is changed."""

    def change_step(program: Program) -> Program:
        assert sum(map(at, program.instructions)) == 1
        return dataclasses.replace(program, instructions=tuple(change(i) if at(i) else i for i in program.instructions))

    return with_program_change(change_step)


def at_node(kind: int, place: int, ending: str = "") -> Callable[[Instruction], bool]:
    """The step of a node by its place in a run."""
    number = shorts(plan_graph())[DEVICE].shortened_graph.short_repetitions.first_node_of(kind) + place
    return lambda i: i.node == f"{number}{ending}"


def place_of(name: str, run: int = 0) -> int:
    """Where in a run a node of the user's graph is."""
    of = shorts(plan_graph())[DEVICE].shortened_graph
    (at,) = (at for at, node in enumerate(of.deep_nodes_by_number) if node.name == name)
    return at - of.deep_repetitions.first_node_of(run)


def of_another(change: Callable[[ShortenedGraph], ShortenedGraph], **changes: Any) -> Plan:
    """Return the plan with device plans that repeat another graph, or other runs."""
    of = change(shorts(plan_graph())[0].shortened_graph)
    return with_shorts(
        plan_graph(), [UnrollableProgram(s.graph, s.program, of) for s in shorts(plan_graph())], **changes
    )


def shift_tensor(t: Tensor, **changes: Any) -> Tensor:
    return dataclasses.replace(t, **{name: getattr(t, name) + more for name, more in changes.items()})


def wrong_leaf() -> Plan:
    """A product of a run reads the weight of another."""
    program, other = shorts(plan_graph())[DEVICE].program, str(called_number(2, place_of("blk.1.gate")))
    (number,) = (at for at, b in enumerate(program.buffers) if b.name == other)
    return with_step_change(
        at_node(3, place_of("blk.1.gateed")),
        lambda i: dataclasses.replace(i, src=(dataclasses.replace(i.src[0], buffer=number), *i.src[1:])),
    )


def called_number(kind: int, place: int) -> int:
    return shorts(plan_graph())[DEVICE].shortened_graph.short_repetitions.first_node_of(kind) + place


def without_a_step() -> Plan:
    at = at_node(5, place_of("blk.1.gateed"))
    return with_program_change(
        lambda p: dataclasses.replace(p, instructions=tuple(i for i in p.instructions if not at(i)))
    )


def wrong_offset() -> Plan:
    return with_step_change(
        at_node(4, place_of("blk.1.gateed")),
        lambda i: dataclasses.replace(i, dst=(shift_tensor(i.dst[0], offset=64),)),
    )


def with_exchanged_collectives() -> Plan:
    """One device meets the others under exchanged numbers in two runs."""
    short = shorts(plan_graph())[DEVICE]
    numbers = [n.attrs["sequence"] for n in short.graph.nodes if n.op == "all_reduce"]
    exchanged = {numbers[3]: numbers[4], numbers[4]: numbers[3]}

    def rule(node: Node) -> Any:
        if node.op != "all_reduce":
            return None
        attrs = {**node.attrs, "sequence": exchanged.get(node.attrs["sequence"], node.attrs["sequence"])}
        return dataclasses.replace(node, attrs=type(node.attrs)(attrs)).results

    graph = rewrite_graph(short.graph, rule)
    nodes = graph.nodes
    steps = (
        i if i.index < 0 else dataclasses.replace(i, attrs=nodes[i.index].attrs) for i in short.program.instructions
    )
    parts = shorts(plan_graph())
    parts[DEVICE] = UnrollableProgram(
        graph, dataclasses.replace(short.program, instructions=tuple(steps)), short.shortened_graph
    )
    return with_shorts(plan_graph(), parts)


def lowered_as_if_nothing_came_again() -> Plan:
    """A program that runs the short graph, but keeps values of the next run where this one still needs them."""
    device_plan, parts = plan_graph().device_plans[DEVICE], shorts(plan_graph())
    graph, program = lower_graph(parts[DEVICE].graph, device_plan.backend, device_plan.device)
    parts[DEVICE] = UnrollableProgram(graph, program, parts[DEVICE].shortened_graph)
    return with_shorts(plan_graph(), parts)


def with_exchanged_saves() -> Plan:
    """Return the plan in which the saves of two runs are exchanged."""

    def change(program: Program) -> Program:
        one, two = (program.instructions[at].dst[0].offset for at in sorted(program.save_positions)[4:6])
        exchanged = {one: two, two: one}

        def tensor(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.buffer else dataclasses.replace(t, offset=exchanged.get(t.offset, t.offset))

        def step(i: Instruction) -> Instruction:
            return dataclasses.replace(i, src=tuple(map(tensor, i.src)), dst=tuple(map(tensor, i.dst)))

        undo = tuple((at, step(back)) for at, back in program.undo)
        return dataclasses.replace(program, instructions=tuple(map(step, program.instructions)), undo=undo)

    return with_program_change(change)


def long_graph(name: str, **attrs: Any) -> Plan:
    """Return the plan for a graph with another node in place of one."""

    def rule(node: Node) -> Any:
        if node.name != name:
            return None
        return dataclasses.replace(node, attrs=type(node.attrs)({**node.attrs, **attrs})).results

    graph = rewrite_graph(plan_graph().graph, rule)
    return of_another(lambda of: dataclasses.replace(of, deep_graph=graph), graph=graph)


def without_update(name: str) -> Plan:
    graph = plan_graph().graph
    updates = {old: new for old, new in graph.updates.items() if old.node.name != name}
    change_step = Graph(graph.outputs, updates)
    return of_another(lambda of: dataclasses.replace(of, deep_graph=change_step), graph=change_step)


def with_wrong_layout(name: str) -> Plan:
    """The plan in which a leaf is said to lie as its like of another layer does."""
    leaves, (*_, what) = plan_graph().leaves, name.split(".")
    others = (layout for other, layout in leaves.items() if other.endswith(f".{what}") and layout != leaves[name])
    return dataclasses.replace(plan_graph(), leaves={**leaves, name: next(others)})


def another_name() -> Plan:
    """A node of one device is called by no number."""
    short = shorts(plan_graph())[DEVICE]
    name = f"{called_number(2, place_of('blk.1.gateed'))}"
    graph = rewrite_graph(
        short.graph, lambda n: dataclasses.replace(n, name="gate").results if n.name == name else None
    )
    parts = shorts(plan_graph())
    parts[DEVICE] = UnrollableProgram(graph, short.program, short.shortened_graph)
    return with_shorts(plan_graph(), parts)


def devices_exchanged() -> Plan:
    first, second, third = shorts(plan_graph())
    return with_shorts(plan_graph(), [second, first, third])


def with_repeats(**changes: Any) -> Plan:
    def change(of: ShortenedGraph) -> ShortenedGraph:
        known = {name: getattr(of.deep_repetitions, name) for name in ("start", "length", "count", "carried_positions")}
        return dataclasses.replace(of, deep_repetitions=RepeatedRuns(**{**known, **changes}))

    return of_another(change)


def nothing_carried_on() -> Plan:
    return with_repeats(carried_positions=frozenset())


FAULTS: dict[str, tuple[Callable[[], Plan], str]] = {
    "a leaf of another run": (wrong_leaf, "reads"),
    "a step is missing": (without_a_step, "never runs"),
    "a result lies elsewhere": (wrong_offset, "holds"),
    "meetings are exchanged": (with_exchanged_collectives, "runs after"),
    "lowered as if nothing came again": (lowered_as_if_nothing_came_again, "repetition"),
    "kept in another order": (with_exchanged_saves, "the saves of a repetition begin"),
    "another node in one run of the long graph": (lambda: long_graph("blk.10.attended", scale=0.25), "differs from"),
    "a state that one run does not change": (lambda: without_update("blk.10.cache_v"), "states of repetition 9 change"),
    "a leaf of one run lies otherwise": (lambda: with_wrong_layout("blk.10.gate"), "has another layout"),
    "a leaf of a kind that comes once lies otherwise": (lambda: with_wrong_layout("blk.6.gate"), "bound to entries"),
    "devices are exchanged": (devices_exchanged, "bound to entries"),
    "a run less": (lambda: with_repeats(count=LAYERS - 2), "which the graph"),
    "nothing is carried on": (nothing_carried_on, "reads other values"),
    "fewer kinds": (lambda: of_another(lambda of: dataclasses.replace(of, short_count=7)), "which the graph"),
    "a node has another name": (another_name, "does not have the number"),
    "runs behind the graph": (lambda: with_repeats(start=10_000), "which the graph"),
    "runs begin a node later": (
        lambda: with_repeats(start=shorts(plan_graph())[0].shortened_graph.deep_repetitions.start + 1),
        "repetition",
    ),
}


@pytest.mark.long
def test_the_plan_in_which_faults_are_planted_has_none():
    assert list(find_plan_faults(plan_graph())) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_short_plan_is_found(name):
    make, message = FAULTS[name]
    found = list(find_plan_faults(make()))
    assert any(message in why for why in found), found


def test_a_program_that_is_right_alone_may_be_no_program_to_repeat():
    device_plan = plan_graph().device_plans[DEVICE]
    broken = lowered_as_if_nothing_came_again().device_plans[DEVICE].short
    assert (
        list(
            find_faults_of_any_repetition_order(
                device_plan.short.graph,
                device_plan.short.program,
                device_plan.backend,
                device_plan.short.shortened_graph,
            )
        )
        == []
    )
    assert (
        list(
            find_faults_of_any_repetition_order(
                broken.graph, broken.program, device_plan.backend, broken.shortened_graph
            )
        )
        != []
    )


@pytest.mark.parametrize("name", ["lowered as if nothing came again", "a result lies elsewhere"])
def test_what_is_found_in_a_short_plan_is_wrong_step_by_step(name):
    plan = FAULTS[name][0]()
    device_plans = tuple(dataclasses.replace(device_plan) for device_plan in plan.device_plans)
    assert list(find_plan_faults(dataclasses.replace(plan, device_plans=device_plans)))


def test_a_device_plan_that_was_changed_after_unrolling_is_checked_step_by_step():
    plan, device_plans = plan_graph(), list(plan_graph().device_plans)
    program = device_plans[DEVICE].program
    (number,) = (at for at, b in enumerate(program.buffers) if b.name == "blk.10.gate")
    steps = tuple(
        i
        if i.node != "blk.11.gateed"
        else dataclasses.replace(i, src=(dataclasses.replace(i.src[0], buffer=number), *i.src[1:]))
        for i in program.instructions
    )
    device_plans[DEVICE] = dataclasses.replace(
        device_plans[DEVICE], program=dataclasses.replace(program, instructions=steps)
    )
    assert any(
        "blk.11.gate" in why for why in find_plan_faults(dataclasses.replace(plan, device_plans=tuple(device_plans)))
    )
