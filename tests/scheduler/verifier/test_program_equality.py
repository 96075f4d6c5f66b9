"""Programs that equal a verified one: they are lowered and verified once, and faults in another one are seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket import ops
from hocket.backends.base import find_devices
from hocket.graph import Graph, input, state, weight
from hocket.scheduler import plan_for_group
from hocket.scheduler.lowering import device_plan, lower, structural_equality
from hocket.scheduler.verifier import plan_verifier
from hocket.scheduler.verifier.plan_verifier import find_plan_faults
from hocket.scheduler.verifier.program_equality import is_equal_to_proven_program_except_names

from ...given.plans.faults import SLOW

LAYERS = 6


def tower() -> Graph:
    """Layers that are all alike, each with a weight and a state."""
    x, updates = input("x", (2, 32)), {}
    for i in range(LAYERS):
        old_state = state(f"kept.{i}", (2, 32))
        y = ops.silu(ops.mul_mat(weight(f"w.{i}", (32, 32)), x))
        updates[old_state] = ops.add(y, old_state)
        x = ops.add(x, ops.scale(updates[old_state], scale=0.5), name=f"out.{i}")
    return Graph({"y": x}, updates)


def layers_on(devices: int):
    return plan_for_group(tower(), find_devices([f"reference:{d}" for d in range(devices)], None), split_mode="layer")


def count_calls(monkeypatch, module, name):
    """How often a function of a module was called, as a list that grows."""
    calls, real = [], getattr(module, name)

    def calling(*args):
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(module, name, calling)
    return calls


def test_equal_layers_are_lowered_and_verified_once(monkeypatch):
    lowered, proven = (
        count_calls(monkeypatch, device_plan, "lower_with_state_saves"),
        count_calls(monkeypatch, plan_verifier, "find_faults_against_graph"),
    )
    plan = layers_on(LAYERS)
    assert len({id(one.program) for one in plan.device_plans}) == LAYERS
    assert len(lowered) == len(proven) == 4  # the first two are cut elsewhere, the last gives the output


def test_what_is_stamped_is_what_lowering_gives():
    for one in layers_on(LAYERS).device_plans:
        graph, program = lower.lower_graph(one.graph, one.backend, one.device)
        assert graph.digest() == one.graph.digest()
        assert program == one.program


def test_a_graph_like_no_other_is_lowered_as_a_stamped_one_would_be(monkeypatch):
    stamped = count_calls(monkeypatch, device_plan, "restore_graph_names")
    group = find_devices([f"reference:{d}" for d in range(3)], None)
    plan = plan_for_group(tower(), group, split_mode="tensor", tensor_split=(4, 3, 1), hardware=SLOW)
    assert not stamped
    assert len({structural_equality.make_program_key_without_names(one.program) for one in plan.device_plans}) == 3
    for one in plan.device_plans:
        lowered = lower.lower_graph(structural_equality.with_numbered_names(one.graph), one.backend, one.device)
        graph, program = structural_equality.restore_graph_names(*lowered, one.graph)
        assert graph.digest() == one.graph.digest()
        assert program == one.program


def _on_buffer(program, number, by):
    return tuple(replace(b, **by) if at == number else b for at, b in enumerate(program.buffers))


def _step(at, **by):
    def change(p):
        return replace(p, instructions=tuple(replace(i, **by) if n == at else i for n, i in enumerate(p.instructions)))

    return change


def _move_tensor(p):
    first = p.instructions[1]
    (result,) = first.dst
    return _step(1, dst=(replace(result, offset=result.offset + 64),))(p)


FAULTS = {
    "a name of a step": _step(2, node="stranger"),
    "the node of a step": _step(2, index=0),
    "an attribute": _step(2, attrs={"scale": 3.0}),
    "an op": _step(2, op="neg"),
    "a place": _move_tensor,
    "a step too few": lambda p: replace(p, instructions=p.instructions[:-1]),
    "nothing is undone": lambda p: replace(p, undo=()),
    "another is put back": lambda p: replace(p, undo=tuple((at, replace(b, node="w.3.undo")) for at, b in p.undo)),
    "a leaf of another layer": lambda p: replace(p, buffers=_on_buffer(p, 1, {"name": "w.2"})),
    "a larger buffer": lambda p: replace(p, buffers=_on_buffer(p, 1, {"nbytes": 1 << 20})),
    "a larger arena": lambda p: replace(p, buffers=_on_buffer(p, 0, {"nbytes": 1 << 20})),
    "an output is called otherwise": lambda p: replace(p, outputs={f"{name}~": t for name, t in p.outputs.items()}),
    "an output is missing": lambda p: replace(p, outputs={}),
    "an input that is none": lambda p: replace(p, inputs={"x": p.instructions[0].dst[0]}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_program_that_was_stamped_is_found(fault):
    plan = layers_on(LAYERS)
    assert not list(find_plan_faults(plan))
    at = 3
    broken = replace(plan.device_plans[at], program=FAULTS[fault](plan.device_plans[at].program))
    other = plan.device_plans[2]
    assert is_equal_to_proven_program_except_names(
        plan.device_plans[at].graph, plan.device_plans[at].program, other.graph, other.program
    )
    assert not is_equal_to_proven_program_except_names(broken.graph, broken.program, other.graph, other.program)
    device_plans = tuple(broken if n == at else one for n, one in enumerate(plan.device_plans))
    assert list(find_plan_faults(replace(plan, device_plans=device_plans)))


def test_graphs_of_other_shapes_or_wiring_are_not_equal():
    plan = layers_on(LAYERS)
    first, third, fourth = (plan.device_plans[n] for n in (0, 2, 3))
    assert not is_equal_to_proven_program_except_names(first.graph, first.program, third.graph, third.program)
    (y,) = (v for v in fourth.graph.updates.values())
    crossed = Graph(fourth.graph.outputs, dict.fromkeys(fourth.graph.updates, y.node.inputs[0]))
    assert not is_equal_to_proven_program_except_names(crossed, fourth.program, third.graph, third.program)
