"""Correct plans, and the ways in which the tests of the verifier break them."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

from hocket import ops
from hocket.backends.base import Support, find_device
from hocket.graph import Graph, Node, PlanError, Value, input, state, weight
from hocket.scheduler import Plan, plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.lowering.lower import lower_graph
from hocket.scheduler.verifier.plan_verifier import find_plan_faults, verify_plan

T, E, H, KV, D, F, C = 3, 8, 4, 2, 4, 12, 6
SLOW = Hardware(
    flops=1e3,
    bandwidth=1e3,
    launch=0,
    link_latency=0.3,
    op_flops={"attention": 1e3},
    op_bandwidth={"attention": 1e3},
    op_launch={"attention": 0.0},
)
"""Devices on which every cut pays, and to deal the rows of a sum does not."""

Edit = Callable[[Node, tuple[Any, ...]], Any]
PlannedFault = tuple[str, Callable[[], Plan]]
"""A pattern of the message that must appear, and a function that builds the faulty plan."""


def decoder() -> Graph:
    """One layer of a decoder with a fused key-value projection, a bias, caches and a head."""
    x, ids = input("x", (T, E)), input("ids", (T,), "i32")
    cache = state("cache.k", (C, KV * D)), state("cache.v", (C, KV * D))
    h = ops.mul(ops.rms_norm(x), weight("norm", (E,)), name="normed")
    q = ops.reshape(ops.mul_mat(weight("wq", (H * D, E)), h, name="q"), shape=(T, H, D))
    kv = ops.mul_mat(weight("wkv", (2 * KV * D, E)), h, name="kv")
    k = ops.slice_(kv, axis=1, start=0, stop=KV * D, name="k")
    v = ops.slice_(kv, axis=1, start=KV * D, stop=2 * KV * D, name="v")
    k = ops.reshape(ops.rope(ops.reshape(k, shape=(T, KV, D)), ids, n_dims=D, name="roped"), shape=(T, KV * D))
    new = [ops.set_rows(c, r, ids, name=f"new.{c.node.name}") for c, r in zip(cache, (k, v), strict=True)]
    kk, vv = (ops.reshape(n, shape=(C, KV, D)) for n in new)
    a = ops.attention(q, kk, vv, ops.causal_mask(ids, cells=C, name="mask"), scale=0.5, name="attended")
    o = ops.mul_mat(weight("wo", (E, H * D)), ops.reshape(a, shape=(T, H * D), name="flat"), name="o")
    y = ops.add(x, ops.add(o, weight("bo", (E,)), name="biased"), name="mixed")
    h = ops.rms_norm(y, name="normed2")
    g, u = (ops.mul_mat(weight(n, (F, E)), h, name=f"{n}ed") for n in ("gate", "up"))
    z = ops.add(y, ops.mul_mat(weight("down", (E, F)), ops.swiglu(g, u, name="act"), name="downed"), name="z")
    logits = ops.mul_mat(weight("head", (10, E)), ops.rms_norm(z, name="normed3"), name="logits")
    return Graph({"logits": logits, "z": z}, dict(zip(cache, new, strict=True)))


@cache
def tensor_plan() -> Plan:
    """The decoder cut over two devices: heads, columns and rows; two sums."""
    return plan_for_group(decoder(), [find_device("cpu:0"), find_device("cpu:1")], split_mode="tensor", hardware=SLOW)


@cache
def layer_plan() -> Plan:
    """The decoder with attention on one device and the rest on the other."""
    return plan_for_group(decoder(), [find_device("cpu:0"), find_device("cpu:1")], split_mode="layer")


@cache
def placed_plan() -> Plan:
    """Return the decoder sharded over two devices, with a gate on one device alone and a norm on the other."""
    group, place = [find_device("cpu:0"), find_device("cpu:1")], [("^(gate|up)", "cpu:1"), ("normed3", "cpu:0")]
    return plan_for_group(decoder(), group, split_mode="tensor", hardware=SLOW, place=place)


@cache
def gather_plan() -> Plan:
    """A product cut by its columns under a norm that needs all of them."""
    h = ops.mul_mat(weight("w1", (6, 4)), input("x", (2, 4)), name="h")
    graph = Graph({"y": ops.mul_mat(weight("w2", (5, 6)), ops.rms_norm(h, name="n"), name="y")})

    def columns(graph, factors):
        return frozenset(f for v in graph.weights if v.node.name == "w1" for f in factors.factors_of(v) if f.size == 6)

    return plan_for_group(graph, [find_device("cpu:0"), find_device("cpu:1")], choose=columns)


def experts() -> Graph:
    """Build a mixture of six experts with biases: of an expert, after a value that needs all of it, and of a
    whole value.
    """
    x, ids, others = input("x", (T, 1, E)), input("ids", (T, 2), "i32"), input("others", (T, 2), "i32")
    g, u = (ops.mul_mat_id(weight(n, (6, F, E)), x, ids, name=f"{n}ed") for n in ("gate", "up"))
    g = ops.add_id(g, weight("bg", (6, F)), ids, name="biased")
    d = ops.mul_mat_id(weight("down", (6, E, F)), ops.swiglu(g, u, name="act"), ids, name="downed")
    y = ops.mul_mat(ops.transpose(d, name="turned"), input("shares", (T, 1, 2)), name="combined")
    open_ = ops.sigmoid(ops.mul_mat_id(weight("route", (6, E, E)), x, ids, name="routed"), name="opened")
    z = ops.add_id(input("whole", (T, 2, E)), weight("bz", (6, E)), ids, name="z")
    far = ops.mul_mat_id(weight("far", (6, E, E)), x, others, name="fared")
    return Graph({"y": ops.rms_norm(y, name="normed"), "opened": open_, "z": z, "far": far})


@cache
def experts_plan(*shares: float) -> Plan:
    """The mixture on two devices, each with some of the experts."""

    def choose_whole_experts(graph, factors):
        every = (factor for value in graph.weights for factor in factors.factors_of(value))
        return frozenset(factor for factor in every if factors.format_signature_name_of_factor(factor) == "experts")

    return plan_for_group(
        experts(), [find_device("cpu:0"), find_device("cpu:1")], choose=choose_whole_experts, tensor_split=shares
    )


# --------------------------------------------------------------------------------------------------------- editing


def rebuild_graph(graph: Graph, edits: Mapping[str, Edit]) -> Graph:
    """`graph` with the nodes of these names made anew; an edit gets the node and its new sources."""
    became: dict[Value, Value] = {}
    used = set()
    for node in graph.nodes:
        src = tuple(None if s is None else became[s] for s in node.src)
        if node.name in edits:
            used.add(node.name)
            value = edits[node.name](node, src)
        else:
            value = Value(node) if node.is_leaf else ops.op_of(node)(*src, name=node.name, **node.attrs)
        results = value if isinstance(value, tuple) else (value,)
        became.update(zip(node.results, results, strict=True))
    assert used == set(edits), f"no node is called {set(edits) - used}"
    return Graph(
        {name: became[v] for name, v in graph.outputs.items()},
        {became[old]: became[new] for old, new in graph.updates.items()},
    )


def on(plan: Plan, *devices: int, graph: Callable[[Graph], Graph]) -> Plan:
    """`plan` with the graphs of some devices changed, and lowered again."""
    device_plans = list(plan.device_plans)
    for device in devices:
        device_plan = device_plans[device]
        lowered, program = lower_graph(graph(device_plan.graph), device_plan.backend, device_plan.device)
        device_plans[device] = dataclasses.replace(device_plan, graph=lowered, program=program)
    return dataclasses.replace(plan, device_plans=tuple(device_plans))


def nodes(plan: Plan, *devices: int, **edits: Edit) -> Plan:
    """`plan` with nodes of some devices made anew; ``__`` in a keyword is a dot of the name."""
    named = {name.replace("__", "."): edit for name, edit in edits.items()}
    return on(plan, *devices, graph=lambda g: rebuild_graph(g, named))


def again(**attrs: Any) -> Edit:
    """The same node with other attributes."""
    return lambda node, src: ops.op_of(node)(*src, name=node.name, **{**node.attrs, **attrs})


def read_other_value(**by_position: str) -> Callable[[Graph], Graph]:
    """Nodes that read another value, by name: ``read_other_value(normed2="mixed")`` for the first source."""

    def change(graph: Graph) -> Graph:
        seen: dict[str, Value] = {}

        def keep(node: Node, src: tuple[Any, ...]) -> Any:
            if node.name in by_position:
                src = (seen[by_position[node.name].replace("__", ".")], *src[1:])
            value = Value(node) if node.is_leaf else ops.op_of(node)(*src, name=node.name, **node.attrs)
            seen[node.name] = value
            return value

        return rebuild_graph(graph, {n.name: keep for n in graph.nodes if n.name})

    return change


def with_leaf_layouts(plan: Plan, **layouts: Any) -> Plan:
    """`plan` with other layouts of leaves; None takes one away."""
    leaves = {k: v for k, v in {**plan.leaves, **{k.replace("__", "."): v for k, v in layouts.items()}}.items() if v}
    return dataclasses.replace(plan, leaves=leaves)


def with_output_layouts(plan: Plan, **layouts: Any) -> Plan:
    return dataclasses.replace(plan, outputs={**plan.outputs, **layouts})


def with_placement_text(plan: Plan, old: str, *new: str, device: int | None = None) -> Plan:
    """`plan` that says other things of where the node `old` is placed."""
    placed = tuple(
        dataclasses.replace(p, nodes=new, device=p.device if device is None else device) if old in p.nodes else p
        for p in plan.pinned_nodes
    )
    assert placed != plan.pinned_nodes
    return dataclasses.replace(plan, pinned_nodes=placed)


def with_refusing_device(plan: Plan, device: int, op: str) -> Plan:
    """`plan` with a device that cannot run an op."""
    device_plans = list(plan.device_plans)
    backend = copy.copy(device_plans[device].backend)
    able = backend.supports
    refusal = Support(False, "not here")
    setattr(backend, "supports", lambda node, on: refusal if node.op == op else able(node, on))  # noqa: B010  # mypy refuses the plain assignment
    device_plans[device] = dataclasses.replace(device_plans[device], backend=backend)
    return dataclasses.replace(plan, device_plans=tuple(device_plans))


def with_program_changes(plan: Plan, device: int, **changes: Any) -> Plan:
    """`plan` with parts of a device's program replaced."""
    device_plans = list(plan.device_plans)
    program = dataclasses.replace(device_plans[device].program, **changes)
    device_plans[device] = dataclasses.replace(device_plans[device], program=program)
    return dataclasses.replace(plan, device_plans=tuple(device_plans))


def step(plan: Plan, device: int, name: str, change: Callable[[Any], Any]) -> Plan:
    """`plan` with one instruction of a device changed."""
    instructions = plan.device_plans[device].program.instructions
    assert any(i.node == name for i in instructions), f"no step is called {name}: {[i.node for i in instructions]}"
    return with_program_changes(
        plan, device, instructions=tuple(change(i) if i.node == name else i for i in instructions)
    )


def with_undo_changes(plan: Plan, device: int, change: Callable[[dict[int, Any]], None]) -> Plan:
    """Return `plan` with changed undo instructions of a device, by the position of their saves."""
    undo = dict(plan.device_plans[device].program.undo)
    change(undo)
    return with_program_changes(plan, device, undo=tuple(undo.items()))


def move_tensor(tensor: Any, by: int) -> Any:
    return dataclasses.replace(tensor, offset=tensor.offset + by)


def renumber_collectives(plan: Plan, device: int, numbers: Mapping[int, int]) -> Plan:
    """`plan` with other sequence numbers in a device's graph and program, its steps in the order they had."""

    def change(attrs: Mapping[str, Any]) -> Mapping[str, Any]:
        return (
            {**attrs, "sequence": numbers.get(attrs["sequence"], attrs["sequence"])} if "sequence" in attrs else attrs
        )

    def fresh(graph: Graph) -> Graph:
        became: dict[Value, Value] = {}
        for node in graph.nodes:
            src = tuple(None if s is None else became[s] for s in node.src)
            new = node if node.is_leaf else Node(node.op, src, change(node.attrs), node.specs, node.name)
            became.update(zip(node.results, new.results, strict=True))
        return Graph(
            {name: became[v] for name, v in graph.outputs.items()},
            {became[old]: became[new] for old, new in graph.updates.items()},
        )

    device_plan = plan.device_plans[device]
    instructions = tuple(dataclasses.replace(i, attrs=change(i.attrs)) for i in device_plan.program.instructions)
    program = dataclasses.replace(device_plan.program, instructions=instructions)
    device_plans = list(plan.device_plans)
    device_plans[device] = dataclasses.replace(device_plan, graph=fresh(device_plan.graph), program=program)
    return dataclasses.replace(plan, device_plans=tuple(device_plans))


def steps_exchanged(device: int, one: str, two: str) -> Plan:
    instructions = list(tensor_plan().device_plans[device].program.instructions)
    at = {i.node: n for n, i in enumerate(instructions)}
    instructions[at[one]], instructions[at[two]] = instructions[at[two]], instructions[at[one]]
    return with_program_changes(tensor_plan(), device, instructions=tuple(instructions))


def without_step(plan: Plan, device: int, name: str) -> Plan:
    """Remove the step `name` of a device, with the instruction that undoes it."""
    program = plan.device_plans[device].program
    at = [i.node for i in program.instructions].index(name)
    instructions = (*program.instructions[:at], *program.instructions[at + 1 :])
    undo = tuple((n - (n > at), back) for n, back in program.undo if n != at)
    return with_program_changes(plan, device, instructions=instructions, undo=undo)


def at_offset(i, offset: int):
    """Return an instruction with its result at another offset of its buffer."""
    return dataclasses.replace(i, dst=(dataclasses.replace(i.dst[0], offset=offset),))


def require_named(message: str, build_plan: Callable[[], Plan]) -> None:
    """Assert that the verifier refuses a faulty plan with a message that matches the pattern `message`."""
    faulty_plan = build_plan()
    found = list(find_plan_faults(faulty_plan))
    assert any(re.search(message, one) for one in found), found
    with pytest.raises(PlanError):
        verify_plan(faulty_plan)
