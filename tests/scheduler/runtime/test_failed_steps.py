"""A step that fails on one device leaves the states of all as they were, and says which node failed where."""

from __future__ import annotations

import random
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest

from hocket import ops
from hocket.backends.base import find_device
from hocket.backends.numpy.backend import NumpyBackend
from hocket.conformance.cases.inputs import as_reference_array, generate_random_operands
from hocket.conformance.generate_cases import select_quick_cases
from hocket.frontends.gguf import open_gguf
from hocket.frontends.inference import device_group
from hocket.frontends.inference import session as sessions
from hocket.frontends.models import load_model
from hocket.graph import BackendError, Graph, StepError, input, state, weight
from hocket.ops import REGISTRY
from hocket.scheduler import Executor, Store, load, plan, plan_for_group

from ...given.devices.faulty import (
    FaultyCpu,
    FaultyReference,
    FaultyRun,
    fail_everywhere,
    make_faulty_model_run,
    make_faulty_run,
)
from ...given.graphs.random_graphs import bindings, seeded_graph
from ...given.models.goldens import path_of, tokens_of
from ...given.plans.grouped import everything_that_fits, weights_of
from ...given.waits import WAIT_SECONDS, wait_until


@pytest.mark.nightly(cases=8)
@pytest.mark.long
@pytest.mark.parametrize(("devices", "mode"), [(1, "none"), (3, "tensor"), (3, "layer")])
@pytest.mark.parametrize(
    ("name", "tokens"), [("llama", 1), ("llama", 7), ("qwen35", 1), ("qwen35", 7), ("qwen35moe", 1)]
)
def test_wherever_a_model_fails_its_states_are_those_before_the_step(name, devices, mode, tokens):
    bench = make_faulty_model_run(name, devices, mode, tokens)
    assert fail_everywhere(bench) > 40
    saved = [len(device_plan.program.undo) for device_plan in bench.run.plan.device_plans]
    assert sum(saved) >= len(bench.run.plan.graph.updates)


WITH_STATES = [seed for seed in range(400) if seeded_graph(seed).updates][:24]


@pytest.mark.parametrize("seed", WITH_STATES)
def test_wherever_a_random_graph_fails_its_states_are_those_before_the_step(seed):
    graph, dice, backend = seeded_graph(seed), random.Random(seed), FaultyReference()
    n = dice.choice([1, 2, 3])
    group = [(backend, backend.device(i)) for i in range(n)]
    choose_sharding = None if n == 1 else lambda g, f: everything_that_fits(g, f, dice)
    plan = plan_for_group(graph, group, choose=choose_sharding)
    values = bindings(graph, np.random.default_rng(seed))
    store = load(plan, weights_of(graph, values)).store
    feed = {v.node.name: values[v.node.name] for v in graph.inputs}
    assert fail_everywhere(make_faulty_run(backend, plan, store, feed, np.random.default_rng(seed)))


# ---------------------------------------------------------------------------------------------------- saves of a step


def instructions(graph: Graph):
    (device_plan,) = plan(graph).device_plans
    return {i.node: i for i in device_plan.program.instructions}


def test_of_a_cache_only_the_rows_that_are_set_are_saved():
    cache = state("cache", (1000, 8))
    new = ops.set_rows(cache, input("rows", (3, 8)), input("ids", (3,), "i32"), name="new")
    steps = instructions(Graph({"y": ops.neg(new)}, {cache: new}))
    assert steps["cache.save"].op == "get_rows"
    assert steps["cache.save"].dst[0].shape == (3, 8)


def test_of_a_pool_of_recurrent_states_only_the_rows_of_the_sequences_are_saved():
    t, h, d, e = 2, 1, 4, 3
    pool = state("pool", (50, h, e, d))
    shapes = {"q": (2, t, h, d), "k": (2, t, h, d), "v": (2, t, h, e), "g": (2, t, h, 1), "beta": (2, t, h)}
    operands = [input(name, shape) for name, shape in shapes.items()]
    slots = [input(name, (2,), "i32") for name in ("slots_in", "slots_out")]
    out, new = ops.gated_delta_net(*operands, pool, *slots, pool="update")
    steps = instructions(Graph({"out": out}, {pool: new}))
    assert steps["pool.save"].dst[0].shape == (2, h * e * d)


def test_the_same_rows_of_several_caches_in_one_state_are_saved():
    cache = state("cache", (2, 9, 4))
    new = ops.set_rows(cache, input("rows", (2, 3, 4)), input("ids", (3,), "i32"))
    new_plan = plan(Graph({"y": ops.neg(new)}, {cache: new}))
    save = new_plan.device_plans[0].program.instructions[0]
    assert (save.op, save.dst[0].shape, save.src[1].strides) == ("get_rows", (2, 3, 4), (0, 1))


def test_a_state_that_is_set_from_another_value_is_saved_whole():
    """The rows of `ids` are not all that changes where the others come from elsewhere."""
    cache, other = state("cache", (9, 4)), input("other", (9, 4))
    new = ops.set_rows(other, input("rows", (3, 4)), input("ids", (3,), "i32"))
    steps = instructions(Graph({"y": ops.neg(new)}, {cache: new}))
    assert steps["cache.save"].op == "cont"


def test_a_state_that_numbers_rows_of_another_and_changes_is_put_back_before_it():
    """The undo of the cache needs the old number, which the step has overwritten."""
    cache, at = state("cache", (9, 4)), state("at", (1,), "i32")
    new = ops.set_rows(cache, input("row", (1, 4)), at, name="new")
    graph = Graph({"y": ops.neg(new)}, {cache: new, at: input("next", (1,), "i32")})
    backend = FaultyReference()
    group = [(backend, backend.device(0))]
    new_plan = plan_for_group(graph, group)
    feed = {"row": np.ones((1, 4)), "next": [7]}
    run = make_faulty_run(backend, new_plan, Store(group), feed, np.random.default_rng(0))
    run.states["at"] = np.array([2])
    run.reset()
    assert [back.node for _, back in new_plan.device_plans[0].program.undo] == ["cache.undo", "at.undo"]
    assert fail_everywhere(run) >= 5


def test_a_state_without_entries_or_changes_costs_nothing():
    empty, same = state("empty", (0, 4)), state("same", (3, 4))
    graph = Graph({"y": ops.add(same, input("x", (3, 4)))}, {empty: ops.neg(empty), same: same})
    assert not plan(graph).device_plans[0].program.undo


def test_the_undo_log_of_a_step_is_in_the_table_of_memory():
    cache = state("cache", (1000, 8))
    new = ops.set_rows(cache, input("rows", (3, 8)), input("ids", (3,), "i32"), name="new")
    table = str(plan(Graph({"y": ops.neg(new)}, {cache: new}))).splitlines()[1:]
    assert "to undo" in table[0]
    assert "96 B" in table[1]


DECLARING = [op for op in REGISTRY.values() if op.overwrites is not None]


@pytest.mark.long
@pytest.mark.parametrize("op", DECLARING, ids=lambda op: op.name)
def test_an_op_changes_no_other_entries_than_it_declares(op):
    tried = 0
    for case in select_quick_cases(op):
        changed = op.overwritten_entries(case.attributes_with_defaults)
        if changed is None:
            continue
        operands = {name: as_reference_array(a, case.specs[name]) for name, a in generate_random_operands(case).items()}
        arrays = [operands.get(name) for name in op.operand_names]
        ((result, name),) = op.inplace_pairs(case.attributes_with_defaults)
        with np.errstate(invalid="ignore"):  # operands may hold NaN
            old, new = operands[name], op.run_reference(arrays, case.attributes_with_defaults)[result]
        index, axis = operands[changed[0]], changed[1] % old.ndim
        ahead = old.shape[:axis] if index.ndim > 1 and axis else ()
        if index.shape[:-1] != ahead and axis:
            continue  # several entries share numbers, and the planner saves everything
        named = np.zeros(old.shape[: axis + 1], bool)
        for at in np.ndindex(old.shape[:axis]):
            named[at][np.asarray(index[at] if ahead else index).reshape(-1).astype(int)] = True
        np.testing.assert_array_equal(new[~named], old[~named])
        tried += 1
    assert tried


def test_there_are_ops_that_declare_what_they_overwrite():
    assert {"set_rows", "gated_delta_net", "ssm_scan"} <= {op.name for op in DECLARING}


# ------------------------------------------------------------------------------------------------- backends


@pytest.mark.parametrize("kind", ["cpu", "reference"])
def test_a_kernel_that_fails_says_its_node_its_device_and_how_many_steps_had_finished(kind):
    rows = ops.get_rows(weight("table", (8, 4)), input("ids", (2,), "i32"), name="rows")
    bench = plan(Graph({"y": ops.neg(rows)}), f"{kind}:0")
    run = load(bench, {"table": np.ones((8, 4))})
    with pytest.raises(StepError, match=f"^%rows on {kind}:0: ") as caught:
        run.run({"ids": [1, 99]})
    assert caught.value.finished_instructions == 0
    assert run.run({"ids": [1, 2]})["y"].shape == (2, 4)


def stalling(what, patience: float) -> FaultyRun:
    """Return a model on two devices; the second one calls `what` before its first instruction."""
    bench = make_faulty_model_run("llama", 2, "tensor", 1)
    bench.run = Executor(bench.run.plan, bench.run.store, timeout=patience)
    bench.backend.plan_fault(bench.run.plan.device_plans[1].device, 0, late=False, what=what)
    return bench


def test_a_device_that_does_not_arrive_is_named_with_the_collective_and_the_step_is_taken_back():
    bench = stalling(lambda: wait_until(lambda: bench.run._device_threads.rendezvous.failure), patience=0.2)
    bench.run._device_threads.timeout = WAIT_SECONDS  # in which the device that came too late has to stop
    before = bench.copy_states()
    why = r"on cpu:0: collective 0 on device 0 of 2: device 1 did not arrive within 0\.2 s$"
    with pytest.raises(StepError, match=why):
        bench.run.run(bench.feed)
    assert bench.copy_states() == before
    bench.run = Executor(bench.run.plan, bench.run.store)
    expected = bench.outputs()
    bench.reset()
    assert bench.outputs() == expected


def test_a_device_that_never_stops_is_an_error_and_not_a_hang():
    gate = threading.Event()
    bench = stalling(gate.wait, patience=0.1)
    try:
        with pytest.raises(BackendError, match=r"device 1 did not arrive.*; and cpu:1 does not stop: states are lost"):
            bench.run.run(bench.feed)
        with pytest.raises(BackendError, match="does not stop"):
            bench.run.run(bench.feed)
    finally:
        gate.set()


def test_an_interrupt_takes_the_step_back_too():
    def interrupt() -> None:
        raise KeyboardInterrupt

    bench = make_faulty_model_run("llama", 1, "none", 1)
    before = bench.copy_states()
    bench.backend.plan_fault(bench.run.plan.device_plans[0].device, 40, late=True, what=interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.run.run(bench.feed)
    assert bench.copy_states() == before


@pytest.mark.long
@pytest.mark.parametrize("devices", [("cpu:0",), ("cpu:0", "cpu:1")], ids=["one", "two"])
def test_an_interrupt_in_compiled_code_comes_when_the_step_is_done(devices):
    model = load_model(open_gguf(path_of("qwen35")))
    tokens = tokens_of("qwen35")
    group = sessions.DeviceGroup(devices=devices, split_mode="tensor", threads=2)
    whole, interrupted = (sessions.Session(model, on=group) for _ in range(2))
    expected = [whole.evaluate([tokens[:4]]), whole.evaluate([tokens[4:8]])][1]
    executor = interrupted.executor(interrupted.make_step(4, 4))
    giving = executor._output_runners[0]
    executor._output_runners[0] = lambda: (signal.raise_signal(signal.SIGINT), giving())[1]
    with pytest.raises(KeyboardInterrupt):
        interrupted.evaluate([tokens[:4]])
    assert interrupted.lengths == [4]
    executor._output_runners[0] = giving
    assert interrupted.evaluate([tokens[4:8]])[0].tobytes() == expected[0].tobytes()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_stops_compiled_code_whose_states_are_then_lost():
    model = load_model(open_gguf(path_of("qwen35")))
    whole, session = (sessions.Session(model, on=sessions.DeviceGroup(threads=2)) for _ in range(2))
    (replay,) = session.executor(session.make_step(4, 4))._program_runners.values()
    thread_pool, run = replay.thread_pool, replay.thread_pool.run

    def twice(order: int) -> int:
        status = run(order)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return status

    thread_pool.run = twice
    with pytest.raises(BackendError, match="states of cpu:0 are lost: it does not say how far it came"):
        session.evaluate([[1, 2, 3, 4]])
    thread_pool.run = run
    assert session.lengths == [0]
    session.reset(0)
    expected = whole.evaluate([[1, 2, 3, 4]])[0]
    assert session.evaluate([[1, 2, 3, 4]])[0].tobytes() == expected.tobytes(), "the crew is still in order"


def test_a_backend_that_does_not_say_how_far_it_came_has_lost_its_states():
    class Silent(NumpyBackend):
        def compile(self, program, buffers, on, comm):
            def replay() -> None:
                raise OSError("no power")

            return replay

    cache = state("cache", (3,))
    backend = Silent()
    group = [(backend, backend.device(0))]
    bench = plan_for_group(Graph({"y": ops.neg(cache)}, {cache: ops.neg(cache)}), group)
    with pytest.raises(BackendError, match="no power; and states of numpy:0 are lost: it does not say how far it came"):
        Executor(bench, Store(group)).run({})


def test_the_devices_compute_as_before_when_all_is_over():
    """The group meets anew after a failure: sequence numbers and letters of the failed run are forgotten."""
    bench = make_faulty_model_run("qwen35", 3, "tensor", 7)
    expected = bench.outputs()
    for _ in range(3):
        bench.reset()
        bench.backend.plan_fault(bench.run.plan.device_plans[2].device, 60, late=True)
        with pytest.raises(StepError):
            bench.run.run(bench.feed)
        assert bench.outputs() == expected


# -------------------------------------------------------------------------------------------------- sessions


@pytest.fixture
def faulty(monkeypatch):
    """Sessions of this test run on a faulty CPU backend."""
    backend = FaultyCpu()
    monkeypatch.setattr(device_group, "find_device", lambda name: (backend, find_device(name)[1]))
    return backend


@pytest.mark.long
@pytest.mark.parametrize(
    "devices",
    [("cpu:0", "cpu:1"), pytest.param(("cpu:0",), marks=pytest.mark.nightly(cases=0))],
    ids=["two", "one"],
)
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_a_session_goes_on_after_a_step_that_failed(name, devices, faulty):
    model = load_model(open_gguf(path_of(name)))
    tokens = tokens_of(name)
    group = sessions.DeviceGroup(devices=devices, split_mode="tensor")
    whole, broken = (sessions.Session(model, on=group) for _ in range(2))
    for start, stop in ((0, 9), (9, 10), (10, 13)):
        part = [tokens[start:stop]]
        expected = whole.evaluate(part, every_position=True)[0]
        for number in (3, 20, 45):
            faulty.plan_fault(find_device(devices[-1])[1], number, late=True)
            with pytest.raises(StepError, match=devices[-1]):
                broken.evaluate(part, every_position=True)
            assert broken.lengths == [start]
        assert broken.evaluate(part, every_position=True)[0].tobytes() == expected.tobytes()
        assert broken.lengths == [stop]


def test_a_prefill_that_fails_in_its_second_batch_keeps_the_first(faulty, monkeypatch):
    model = load_model(open_gguf(path_of("qwen35")))
    tokens = tokens_of("qwen35")
    whole, broken = (sessions.Session(model, batch=8) for _ in range(2))
    expected = whole.evaluate([tokens[:16]], every_position=True)[0]
    step = broken.make_step(8, 8, 8)
    run, runs = broken.executor(step).run, []

    def second_fails(inputs):
        runs.append(1)
        if len(runs) == 2:
            faulty.plan_fault(find_device("cpu:0")[1], 30, late=True)
        return run(inputs)

    monkeypatch.setattr(broken.executor(step), "run", second_fails)
    with pytest.raises(StepError):
        broken.evaluate([tokens[:16]], every_position=True)
    assert broken.lengths == [8]
    assert broken.evaluate([tokens[8:16]], every_position=True)[0].tobytes() == expected[8:].tobytes()


def test_an_undo_runs_what_was_saved_and_nothing_else():
    bench = make_faulty_model_run("qwen35", 1, "none", 1)
    program = bench.run.plan.device_plans[0].program
    assert program.build_undo_program(0) == replace(program, instructions=(), undo=())
    first, second = program.undo[:2]
    assert program.build_undo_program(second[0]).instructions == (first[1],)
    assert program.build_undo_program(second[0] + 1).instructions == (second[1], first[1])
