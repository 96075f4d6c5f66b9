"""From graph to program: views, order, donation, memory, and the verifier that follows every byte."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hocket
from hocket import ops
from hocket.backends import find_device
from hocket.graph import Graph, PlanError, constant, input, state, weight
from hocket.ops.collectives import COLLECTIVES, all_reduce
from hocket.scheduler import Executor, Store, load, plan, plan_for_group
from hocket.scheduler.lowering.arena import (
    ALIGNMENT,
    Lifetime,
    assign_arena_offsets,
    assign_arena_offsets_for_any_repetition_order,
)
from hocket.scheduler.lowering.lower import lower_graph
from hocket.scheduler.verifier.memory.program_verifier import find_faults_against_graph, verify_program
from hocket.scheduler.verifier.plan_verifier import find_plan_faults

from ..given.graphs.layered import perceptron
from ..given.plans.ways import SLOW


def counter(step: int = 1):
    """Build a graph with a state that grows by one each run; its output is the old value."""
    old = state("n", (2,))
    return old, ops.add(old, constant("one", [1.0, 1.0]), name="next")


def cache_graph(tokens: int = 1):
    cache = state("cache", (9, 4))
    rows = input("rows", (tokens, 4))
    ids = input("ids", (tokens,), "i32")
    new = ops.set_rows(cache, rows, ids, name="new")
    return Graph({"sum": ops.mul_mat(new, rows)}, {cache: new})


# ---------------------------------------------------------------------------------------------- order and donation


def test_a_state_is_updated_in_its_own_memory():
    new_plan = plan(cache_graph())
    writes = {i.node: i.dst[0].buffer for i in new_plan.device_plans[0].program.instructions}
    assert new_plan.device_plans[0].program.buffers[writes["new"]].name == "cache"
    assert [i.node for i in new_plan.device_plans[0].program.instructions] == ["cache.save", "new", "0"]


def test_readers_of_the_old_value_run_before_the_writer():
    cache, rows, ids = state("cache", (9, 4)), input("rows", (1, 4)), input("ids", (1,), "i32")
    new = ops.set_rows(cache, rows, ids, name="new")
    reads_new = ops.mul_mat(new, rows, name="reads_new")
    reads_old = ops.mul_mat(cache, rows, name="reads_old")  # reached last in graph order
    new_plan = plan(Graph({"new": reads_new, "old": reads_old}, {cache: new}))
    order = [i.node for i in new_plan.device_plans[0].program.instructions]
    assert order.index("reads_old") < order.index("new") < order.index("reads_new")
    run = load(new_plan, {})
    first = run.run({"rows": [[1, 2, 3, 4]], "ids": [3]})
    assert not first["old"].any()
    assert first["new"][0, 3] == 30
    assert run.run({"rows": [[1, 0, 0, 0]], "ids": [5]})["old"][0, 3] == 1


def test_what_only_a_new_state_needs_does_not_keep_memory_to_the_end():
    """Each layer remembers its last rows, as convolutions do: the rows of all layers never lie there together."""

    def arena(layers: int) -> int:
        x, rows, updates = input("x", (3, 64)), input("rows", (3,), "i32"), {}
        for layer in range(layers):
            old = state(f"last.{layer}", (3, 64))
            both = ops.concat(old, x, axis=0)
            updates[old] = ops.get_rows(both, rows)
            x = ops.silu(ops.ssm_conv(both, weight(f"w.{layer}", (64, 4))))
        (device_plan,) = plan(Graph({"y": x}, updates)).device_plans
        return device_plan.count_memory_bytes_by_kind()["arena"] - device_plan.program.undo_bytes

    assert arena(8) == arena(2)


def test_a_reader_that_needs_the_new_value_forces_a_copy():
    """`late` reads both the old and the new value, so neither order works in place."""
    old, new = counter()
    late = ops.sub(new, old, name="late")
    new_plan = plan(Graph({"late": late}, {old: new}))
    assert [i.node for i in new_plan.device_plans[0].program.instructions][-1] == "n.update"
    run = load(new_plan, {})
    for n in range(3):
        np.testing.assert_array_equal(run.run({})["late"], [1, 1])
        np.testing.assert_array_equal(run.store.state("n"), [n + 1, n + 1])


def test_runs_share_bytes_and_keep_theirs_in_turn_above_what_lasts():
    expected = [
        Lifetime(256, -1, 5),  # an input that all runs read
        Lifetime(512, 1, 2),  # of run 0 alone
        Lifetime(640, 3, 4),  # of run 1 alone
        Lifetime(128, 1, 7),  # saved by run 0
        Lifetime(384, 3, 7),  # saved by run 1
        Lifetime(128, 0, 0),  # earlier values
    ]
    arena = assign_arena_offsets_for_any_repetition_order(expected, [-1, 0, 0, 1, 1, 2, 2])
    assert arena.offsets == (0, 256, 256, 256 + 640, 256 + 640 + 128, 256)
    assert arena.nbytes == 256 + 640 + 128 + 384


@pytest.mark.parametrize("backend", ["reference", "null"])
def test_collectives_that_are_numbered_against_their_operands_are_refused(backend):
    first = all_reduce(input("x", (2, 4)), sequence=1, name="late")
    second = all_reduce(ops.silu(first), sequence=0, name="early")
    on = find_device(f"{backend}:0")
    with pytest.raises(PlanError, match=r"%late = all_reduce.* would wait for itself: collectives run in the order"):
        lower_graph(Graph({"y": second}), *on)


def test_a_program_with_collectives_numbered_against_its_steps_is_refused():
    group = [find_device("reference:0"), find_device("reference:1")]
    plan = plan_for_group(perceptron(2), group, split_mode="tensor", hardware=SLOW)
    numbers = [i.attrs["sequence"] for i in plan.device_plans[0].program.instructions if i.op in COLLECTIVES]
    assert numbers == [0, 1, 2]

    def reverse_numbers(program):
        steps = [
            dataclasses.replace(i, attrs={**i.attrs, "sequence": 2 - i.attrs["sequence"]}) if i.op in COLLECTIVES else i
            for i in program.instructions
        ]
        return dataclasses.replace(program, instructions=tuple(steps))

    device_plans = tuple(
        dataclasses.replace(device_plan, program=reverse_numbers(device_plan.program))
        for device_plan in plan.device_plans
    )
    assert any("runs after" in why for why in find_plan_faults(dataclasses.replace(plan, device_plans=device_plans)))


def test_states_can_trade_places():
    a, b = state("a", (2,)), state("b", (2,))
    run = load(plan(Graph({}, {a: b, b: a})), {})
    run.store.state("a")[:] = 1
    run.store.state("b")[:] = 2
    run.run({})
    assert run.store.state("a").tolist() == [2, 2]
    assert run.store.state("b").tolist() == [1, 1]


def test_an_output_keeps_the_old_value_of_a_state():
    old, new = counter()
    run = load(plan(Graph({"before": old, "view": ops.reshape(old, shape=(2, 1))}, {old: new})), {})
    for n in range(3):
        out = run.run({})
        assert out["before"].tolist() == [n, n]
        assert out["view"].tolist() == [[n], [n]]


def test_two_states_may_get_the_same_new_value():
    a, b = state("a", (2,)), state("b", (2,))
    new = ops.add(a, constant("one", [1.0, 1.0]))
    run = load(plan(Graph({"new": new}, {a: new, b: new})), {})
    run.run({})
    assert run.run({})["new"].tolist() == [2, 2]
    assert run.store.state("b").tolist() == [2, 2]


def test_a_state_takes_a_transposed_value_in_place_where_the_transposed_axis_has_one_entry():
    """How far entries of such an axis lie apart means nothing, to the planner and to the verifier."""
    old, x, up = state("old", (2, 1, 8)), input("x", (2, 8, 3)), weight("up", (1, 3))
    new_plan = plan(Graph({"y": ops.silu(x)}, {old: ops.transpose(ops.mul_mat(up, x, name="new"))}))
    program = new_plan.device_plans[0].program
    (new,) = (i for i in program.instructions if i.node == "new")
    assert program.buffers[new.dst[0].buffer].name == "old"


def test_a_state_that_stays_as_it_is_costs_nothing():
    a = state("a", (2,))
    new_plan = plan(Graph({"twice": ops.add(a, a)}, {a: a}))
    assert len(new_plan.device_plans[0].program.instructions) == 1


@pytest.mark.parametrize("devices", [1, 3])
def test_a_state_that_nothing_reads_is_preserved(devices):
    unread = state("kept", (2,))
    graph = Graph({"y": ops.silu(input("x", (2,)))}, {unread: unread})
    run = load(plan(graph, [f"reference:{d}" for d in range(devices)]), {})
    run.store.state("kept")[...] = [1, 2]
    run.run({"x": [0, 0]})
    assert run.store.state("kept").tolist() == [1, 2]


def test_an_operand_that_is_read_again_is_not_overwritten():
    x = input("x", (3,))
    once = ops.exp(x, name="once")
    new_plan = plan(Graph({"y": ops.add(ops.neg(once), once)}))
    out = load(new_plan, {}).run({"x": [0.0, 1.0, 2.0]})
    np.testing.assert_allclose(out["y"], 0, atol=0)


def test_chains_of_elementwise_ops_share_one_memory():
    x = input("x", (1000,))
    y = x
    for _ in range(50):
        y = ops.relu(ops.neg(y))
    new_plan = plan(Graph({"y": y}))
    assert new_plan.count_memory_bytes_by_kind()["arena"] <= 2 * 4096


def test_the_same_graph_gives_the_same_plan():
    assert plan(cache_graph()).device_plans[0].program == plan(cache_graph()).device_plans[0].program


def test_planning_leaves_the_graph_as_it_was():
    graph = cache_graph()
    before = str(graph)
    plan(graph)
    assert str(graph) == before


# ---------------------------------------------------------------------------------------------------------- views


def test_a_reshape_that_strides_cannot_say_gets_a_copy():
    x = input("x", (3, 4))
    y = ops.reshape(ops.transpose(x), shape=(12,))
    new_plan = plan(Graph({"y": ops.neg(y)}))
    assert [i.op for i in new_plan.device_plans[0].program.instructions] == ["cont", "neg"]
    out = load(new_plan, {}).run({"x": np.arange(12).reshape(3, 4)})
    np.testing.assert_array_equal(out["y"], -np.arange(12).reshape(3, 4).T.ravel())


def test_a_kernel_that_cannot_read_strides_gets_one_copy_for_all_readers():
    backend, device = find_device("cpu:0")
    backend.reads_strided = lambda node, operand: node.op != "mul"
    x = ops.transpose(input("x", (3, 4)))
    graph = Graph({"y": ops.mul(ops.mul(x, x), x), "z": ops.neg(x)})
    plan = plan_for_group(graph, [(backend, device)])
    assert [i.op for i in plan.device_plans[0].program.instructions].count("cont") == 1
    data = np.arange(12.0).reshape(3, 4)
    out = load(plan, {}).run({"x": data})
    np.testing.assert_array_equal(out["y"], data.T**3)


# --------------------------------------------------------------------------------------------------------- memory

LIFETIMES = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(0, 8)).map(
        lambda t: Lifetime(t[0], t[1], t[1] + t[2])
    ),
    max_size=40,
)


@given(LIFETIMES)
@settings(deadline=None, derandomize=True)
def test_no_two_live_values_share_a_byte(lifetimes):
    arena = assign_arena_offsets(lifetimes)
    for i, (a, at) in enumerate(zip(lifetimes, arena.offsets, strict=True)):
        assert at % ALIGNMENT == 0
        assert at + a.nbytes <= arena.nbytes or not a.nbytes
        for b, bt in list(zip(lifetimes, arena.offsets, strict=True))[:i]:
            alive_together = a.first_step <= b.last_step and b.first_step <= a.last_step
            assert not alive_together or at + a.nbytes <= bt or bt + b.nbytes <= at or not (a.nbytes and b.nbytes)
    live = [sum(x.nbytes for x in lifetimes if x.first_step <= t <= x.last_step) for t in range(30)]
    assert arena.nbytes >= max(live)
    assert arena.nbytes <= sum(-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in lifetimes)


def test_replay_allocates_nothing():
    n = 512
    cache, x, ids = state("cache", (n, 1024)), input("x", (n, 1024)), input("ids", (n,), "i32")
    h = ops.rms_norm(ops.mul_mat(weight("w", (1024, 1024)), x))
    new = ops.set_rows(cache, ops.swiglu(h, x), ids)
    q, kv = (ops.reshape(v, shape=(n, 16, 64)) for v in (h, new))
    y = ops.attention(ops.rope(q, ids, n_dims=64), kv, kv, ops.causal_mask(ids, cells=n), scale=0.125)
    run = load(plan(Graph({"y": y}, {cache: new})), {"w": np.ones((1024, 1024), np.float32)})
    feed = {"x": np.ones((n, 1024), np.float32), "ids": np.arange(n)}
    run.run(feed)
    run.bind(feed)
    tracemalloc.start()
    run.replay()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # NumPy's iterators take buffers of 8,192 elements for a moment; any temporary of ours would be 1 MiB at least.
    assert peak < 256 * 1024, f"{peak} bytes"


# ------------------------------------------------------------------------------------------------------- verifier


def plant_fault(program, kind: str):
    """`program` with one fault."""
    steps = list(program.instructions)

    def edit(i, **changes):
        steps[i] = dataclasses.replace(steps[i], **changes)

    def move_tensor(tensor, by):
        return dataclasses.replace(tensor, offset=tensor.offset + by)

    match kind:
        case "two steps exchanged":
            steps[1], steps[2] = steps[2], steps[1]
        case "a step is missing":
            del steps[2]
        case "a step runs twice":
            steps.append(steps[0])
        case "a result lands elsewhere":
            edit(1, dst=(move_tensor(steps[1].dst[0], 64),))
        case "an operand is read elsewhere":
            edit(2, src=(move_tensor(steps[2].src[0], 4), *steps[2].src[1:]))
        case "a result overwrites a live value":
            edit(0, dst=steps[0].src)
        case "a result lies outside the arena":
            edit(2, dst=(move_tensor(steps[2].dst[0], 1 << 20),))
        case "a result overlaps its operand shifted":
            edit(3, dst=(move_tensor(steps[3].src[0], 4),))
        case "an unknown step":
            edit(0, node="nobody")
        case "an operand has another shape":
            edit(2, src=(dataclasses.replace(steps[2].src[0], shape=(1, 1)), *steps[2].src[1:]))
        case "an output is lost":
            return dataclasses.replace(program, outputs={})
        case "an output is read elsewhere":
            outputs = {k: move_tensor(t, 64) for k, t in program.outputs.items()}
            return dataclasses.replace(program, outputs=outputs)
        case "the state is not updated":
            steps = [s for s in steps if s.node != "new"]
    return dataclasses.replace(program, instructions=tuple(steps))


FAULTS = [
    "two steps exchanged",
    "a step is missing",
    "a step runs twice",
    "a result lands elsewhere",
    "an operand is read elsewhere",
    "a result overwrites a live value",
    "a result lies outside the arena",
    "a result overlaps its operand shifted",
    "an unknown step",
    "an operand has another shape",
    "an output is lost",
    "an output is read elsewhere",
    "the state is not updated",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verifier_finds_a_program_where(fault):
    x, cache = input("x", (2, 16)), state("cache", (4, 16))
    a = ops.exp(x, name="a")
    b = ops.add(a, x, name="b")
    c = ops.mul(a, b, name="c")
    d = ops.neg(c, name="d")
    new = ops.set_rows(cache, d, input("ids", (2,), "i32"), name="new")
    graph = Graph({"y": ops.mul_mat(new, c, name="y")}, {cache: new})
    new_plan = plan(graph)
    verify_program(new_plan.device_plans[0].graph, new_plan.device_plans[0].program, new_plan.device_plans[0].backend)
    assert [i.node for i in new_plan.device_plans[0].program.instructions] == [
        "a",
        "b",
        "c",
        "d",
        "cache.save",
        "new",
        "y",
    ]
    assert list(
        find_faults_against_graph(
            new_plan.device_plans[0].graph,
            plant_fault(new_plan.device_plans[0].program, fault),
            new_plan.device_plans[0].backend,
        )
    ), fault


# ------------------------------------------------------------------------------------------------------- executor


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({}, "input %x: f32[2] is missing"),
        ({"x": [1, 2], "y": 3}, "there is no input %y; inputs: x"),
        ({"x": [1, 2, 3]}, "input %x: got shape [3], need f32[2]"),
    ],
)
def test_a_wrong_input_is_named(feed, message):
    run = load(plan(Graph({"y": ops.neg(input("x", (2,)))})), {})
    with pytest.raises(PlanError) as caught:
        run.run(feed)
    assert str(caught.value) == message


def test_a_weight_that_is_not_bound_is_named():
    with pytest.raises(PlanError, match=r"weight %w: f32\[2\] is not bound"):
        load(plan(Graph({"y": ops.neg(weight("w", (2,)))})), {})


def test_two_plans_share_weights_and_states():
    backend, device = find_device("cpu:0")
    store = Store([(backend, device)])
    one, four = (Executor(plan_for_group(cache_graph(n), [(backend, device)]), store) for n in (1, 4))
    four.run({"rows": np.ones((4, 4)), "ids": [0, 1, 2, 3]})
    out = one.run({"rows": [[1, 0, 0, 0]], "ids": [8]})
    assert out["sum"][0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 1]


def test_an_unknown_device_is_refused_with_the_known_kinds():
    graph = Graph({"y": ops.neg(input("x", (2,)))})
    with pytest.raises(hocket.BackendError, match=r"known kinds: .*cpu"):
        plan(graph, "tpu:0")
    with pytest.raises(hocket.BackendError, match="a number"):
        plan(graph, "cpu:first")
