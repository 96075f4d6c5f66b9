"""States that a run changes several times: in place where that is possible, right and taken back wherever it fails."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hocket import ops
from hocket.graph import Graph, input, state
from hocket.ops import REGISTRY
from hocket.scheduler import Plan, Store, plan_for_group
from hocket.scheduler.verifier.plan_verifier import find_plan_faults

from ...given.devices.faulty import FaultyReference, FaultyRun, fail_everywhere, make_faulty_run

ROWS, WIDTH = 8, 4


def changed_often(seed: int) -> tuple[Graph, dict[str, np.ndarray]]:
    """Build a table with rows that are set, a scaling of the whole, and reads, in any order.

    Sometimes an intermediate value is an output, or is read again later. Its rows are numbered by inputs, or by a
    counter that grows.
    """
    dice, rng = random.Random(seed), np.random.default_rng(seed)
    table, counter = state("table", (ROWS, WIDTH)), state("counter", (2,), "i32")
    now, count, outputs, feed, earlier = table, counter, {}, {"one": np.array([1])}, [table]
    one = input("one", (1,), "i32")
    for turn in range(dice.randint(2, 5)):
        what = dice.choice(["rows", "rows", "counted", "whole", "read"])
        if what == "rows":
            rows = dice.randint(1, 3)
            x, at = input(f"x{turn}", (rows, WIDTH)), input(f"at{turn}", (rows,), "i32")
            feed |= {f"x{turn}": rng.standard_normal((rows, WIDTH)), f"at{turn}": rng.permutation(ROWS)[:rows]}
            now = ops.set_rows(now, x, at, name=f"rows{turn}")
        elif what == "counted":
            x = input(f"x{turn}", (2, WIDTH))
            feed[f"x{turn}"] = rng.standard_normal((2, WIDTH))
            now = ops.set_rows(now, x, count, name=f"counted{turn}")
            count = ops.calculate(count, one, kind="add", name=f"count{turn}")
        elif what == "whole":
            now = ops.scale(now, scale=0.5, name=f"whole{turn}")
        else:
            outputs[f"y{turn}"] = ops.scale(dice.choice(earlier), scale=2.0, name=f"y{turn}")
        earlier.append(now)
        if dice.random() < 0.15:
            outputs[f"seen{turn}"] = now
    outputs["y"] = ops.add(now, ops.scale(now, scale=3.0), name="y")
    graph = Graph(outputs, {table: now, counter: count})
    return graph, {v.node.name: feed[v.node.name] for v in graph.inputs}


def make_bench(seed: int) -> tuple[FaultyRun, Graph]:
    graph, feed = changed_often(seed)
    backend = FaultyReference()
    plan = plan_for_group(graph, [(backend, backend.device(0))])
    of = make_faulty_run(backend, plan, Store(plan.group), feed, np.random.default_rng(seed))
    of.states["counter"] = np.array([0, 1], np.int32)
    of.reset()
    return of, graph


def expected_results(graph: Graph, of: FaultyRun) -> dict[str, np.ndarray]:
    """Return the results of the graph without shared memory: each op by itself, in order."""
    leaves = {**of.feed, **of.states}
    known = {}
    for node in graph.nodes:
        if node.is_leaf:
            results = [np.array(leaves[node.name], node.specs[0].dtype.storage)]
        else:
            results = REGISTRY[node.op].run_reference([known[s] for s in node.src], node.attrs)
        known.update(zip(node.results, results, strict=True))
    return {name: known[value] for name, value in graph.outputs.items()}


@pytest.mark.parametrize("seed", range(60))
def test_states_that_are_changed_often_are_right_and_taken_back(seed):
    of, graph = make_bench(seed)
    results = of.run.run(of.feed)
    for name, array in expected_results(graph, of).items():
        np.testing.assert_allclose(results[name], array, rtol=1e-6, atol=1e-6)
    of.reset()
    assert fail_everywhere(of)


def in_place(of: FaultyRun) -> int:
    """How many results are written where a state lies."""
    program = of.run.plan.device_plans[0].program
    saves = {at for at, _ in program.undo}
    there = [
        program.buffers[t.buffer].kind for n, i in enumerate(program.instructions) for t in i.dst if n not in saves
    ]
    return there.count("state")


def test_states_are_usually_changed_in_place_each_time():
    """Check the exception: an intermediate value that is an output, or that is read again later."""
    changes = ("rows", "whole", "count")
    counts = []
    for seed in range(60):
        of, graph = make_bench(seed)
        counts.append((in_place(of), sum(n.name.startswith(changes) and not n.is_leaf for n in graph.nodes)))
    assert sum(some == all_ for some, all_ in counts) > 30
    assert max(some for some, _ in counts) >= 5


def rows_twice() -> Plan:
    table = state("table", (ROWS, WIDTH))
    now = table
    for turn in range(2):
        now = ops.set_rows(now, input(f"x{turn}", (2, WIDTH)), input(f"at{turn}", (2,), "i32"), name=f"rows{turn}")
    backend = FaultyReference()
    return plan_for_group(
        Graph({"y": ops.scale(now, scale=2.0, name="y")}, {table: now}), [(backend, backend.device(0))]
    )


def with_steps(order: Sequence[int]) -> str:
    """Return the verifier's message about the plan above with these steps: save, rows, save, rows, y."""
    plan = rows_twice()
    (device_plan,) = plan.device_plans
    steps, backs = device_plan.program.instructions, dict(device_plan.program.undo)
    assert [i.node for i in steps] == ["table.save", "rows0", "table.save", "rows1", "y"]
    undo = tuple((at, backs[old]) for at, old in enumerate(order) if old in backs)
    program = replace(device_plan.program, instructions=tuple(steps[old] for old in order), undo=undo)
    return next(find_plan_faults(replace(plan, device_plans=(replace(device_plan, program=program),))), "")


def test_each_change_of_rows_has_to_be_saved_before_it():
    assert with_steps([0, 1, 2, 3, 4]) == ""
    assert re.search(r"step 2 \(%rows1\): overwrites more of state %table than the rows", with_steps([0, 1, 3, 4]))
    assert re.search(
        r"step 0 \(%rows0\): overwrites state %table, which was not saved before", with_steps([1, 2, 3, 4])
    )
    assert re.search(r"%table is saved a second time, and holds %table", with_steps([0, 2, 1, 3, 4]))
    assert with_steps([2, 1, 0, 3, 4])
