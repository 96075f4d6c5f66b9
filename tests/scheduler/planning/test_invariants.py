"""Invariants of every plan of any graph: each test is named by its invariant. Sharding has a file of its own."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.backends.base import Support, find_device
from hocket.backends.reference.backend import ReferenceBackend
from hocket.graph import Graph, PlanError, Value
from hocket.graph.graph import assign_names
from hocket.ops import op_of
from hocket.ops.collectives import COLLECTIVES
from hocket.scheduler import Executor, Store, load, plan_for_group
from hocket.scheduler.verifier.plan_verifier import verify_plan

from ...given.graphs.random_graphs import bindings, graphs, seeded_graph
from ...given.plans.grouped import cached_product, everything_that_fits, group_of, random_plan, run_of, weights_of

SEEDS = range(2000, 2040)
BOTH = pytest.mark.parametrize("mode", ["tensor", "layer"])
MANY = pytest.mark.parametrize("seed", SEEDS)


# ------------------------------------------------------------------------------------------------------ scheduling


@pytest.mark.long
@given(graphs(), st.integers(0, 1 << 30), st.integers(1, 8), st.booleans())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_every_plan_of_any_graph_is_verified(graph, seed, n, by_layers):
    """Operands are there, order is right, sums are owed to linear ops only and taken once, meetings are alike."""
    dice = random.Random(seed)
    shares = [dice.choice([0, 1, 1, 3]) for _ in range(n - 1)] + [1]
    if by_layers:
        plan = plan_for_group(graph, group_of(n), tensor_split=shares, split_mode="layer")
    else:
        plan = plan_for_group(
            graph, group_of(n), tensor_split=shares, choose=lambda g, f: everything_that_fits(g, f, dice)
        )
    verify_plan(plan)


@pytest.mark.parametrize("mode", ["tensor", "layer", "auto", "none"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_plans_of_the_search_are_verified_too(mode, n):
    from ...given.plans.faults import decoder

    verify_plan(plan_for_group(decoder(), group_of(n, "cpu"), split_mode=mode))


@BOTH
@MANY
def test_every_node_runs_once_on_each_device_that_has_it(seed, mode):
    plan, _, _ = random_plan(seed, mode)
    for device_plan in plan.device_plans:
        saves = device_plan.program.save_positions
        ran = Counter(i.node for at, i in enumerate(device_plan.program.instructions) if at not in saves)
        assert set(ran.values()) <= {1}
        work = [n for n in device_plan.graph.nodes if not n.is_leaf and not op_of(n).is_view]
        copies = sum(i.node.endswith(".update") for i in device_plan.program.instructions)
        assert len(ran) - copies <= len(work) <= len(ran)


@MANY
def test_in_a_layer_split_every_node_runs_on_one_device(seed):
    plan, _, _ = random_plan(seed, "layer")
    work = Counter(
        n.op
        for device_plan in plan.device_plans
        for n in device_plan.graph.nodes
        if not n.is_leaf and n.op not in (*COLLECTIVES, "cont")
    )
    assert work == Counter(n.op for n in plan.graph.nodes if not n.is_leaf and n.op != "cont")


class Picky(ReferenceBackend):
    """A device that can run some ops only."""

    def __init__(self, known):
        self.known = frozenset(known) | COLLECTIVES | {"cont", "scale", "concat"}

    def supports(self, node, on):
        return Support(node.op in self.known, "it never learnt to")


@MANY
def test_a_plan_needs_what_its_nodes_need_and_says_what_is_missing(seed):
    graph, dice = seeded_graph(seed), random.Random(seed)
    used = sorted({n.op for n in graph.nodes if not n.is_leaf and not op_of(n).is_view})
    known = set(used)
    plan_for_group(graph, [(Picky(known), find_device("reference:0")[1])])
    plan_for_group(graph, [(Picky({*known, "rope", "top_k"}), find_device("reference:0")[1])])
    needed = [op for op in used if op not in ("cont", "scale", "concat")]
    if needed:
        lost = dice.choice(needed)
        with pytest.raises(PlanError, match=rf"{lost}\(.*cannot run on reference:0: it never learnt to"):
            plan_for_group(graph, [(Picky(known - {lost}), find_device("reference:0")[1])])


@MANY
def test_no_value_is_sent_twice_to_a_device_and_no_weight_ever(seed):
    plan, _, _ = random_plan(seed, "layer")
    for device_plan in plan.device_plans:
        sends = [n for n in device_plan.graph.nodes if n.op == "send"]
        assert len({(n.inputs[0], n.attrs["to"]) for n in sends}) == len(sends)
        assert all(n.inputs[0].node.op not in ("weight", "input", "constant") for n in sends)


@pytest.mark.long(cases=1)
@BOTH
@MANY
def test_planning_leaves_the_graph_as_it_was_and_gives_the_same_plan_again(seed, mode):
    before = str(seeded_graph(seed))
    one, two = (random_plan(seed, mode)[0] for _ in range(2))
    assert str(one.graph) == before
    assert [device_plan.program for device_plan in one.device_plans] == [
        device_plan.program for device_plan in two.device_plans
    ]
    assert (one.leaves, one.outputs) == (two.leaves, two.outputs)


@BOTH
@pytest.mark.parametrize("seed", range(2000, 2020))
def test_an_observer_anywhere_sees_the_value_and_changes_nothing(seed, mode):
    graph, dice = seeded_graph(seed), random.Random(seed)
    seen = {f"seen.{i}": v for i, n in enumerate(graph.nodes) for v in n.results if not n.is_leaf}
    watched = Graph({**graph.outputs, **seen}, graph.updates)
    values = bindings(graph, np.random.default_rng(seed))
    if mode == "layer":
        plan = plan_for_group(watched, group_of(3), split_mode="layer")
    else:
        plan = plan_for_group(watched, group_of(3), choose=lambda g, f: everything_that_fits(g, f, dice))
    verify_plan(plan)
    unwatched = run_of(plan_for_group(graph, group_of(1)), values)
    want = run_of(plan_for_group(watched, group_of(1)), values)
    got = run_of(plan, values)
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(unwatched.get(name, array), array)


# ------------------------------------------------------------------------------------------------------ allocation


@BOTH
@MANY
def test_every_tensor_is_aligned_to_its_elements_and_inside_its_buffer(seed, mode):
    plan, _, _ = random_plan(seed, mode)
    for device_plan in plan.device_plans:
        for i in device_plan.program.instructions:
            for t in i.dst:
                assert t.buffer or t.offset % 64 == 0 or not t.spec.size
            for t in (*i.src, *i.dst):
                if t is not None and t.spec.size:
                    last = sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True))
                    end = t.offset + (last + 1) * t.dtype.storage.itemsize
                    assert 0 <= t.offset <= end <= device_plan.program.buffers[t.buffer].nbytes


@BOTH
@MANY
def test_an_arena_holds_what_is_live_at_once_and_no_more_than_everything(seed, mode):
    plan, _, _ = random_plan(seed, mode)
    for device_plan in plan.device_plans:
        reads: dict[tuple[int, int], int] = {}
        written = [(n, t) for n, i in enumerate(device_plan.program.instructions) for t in i.dst if not t.buffer]
        sizes = [-(-t.spec.size * t.dtype.storage.itemsize // 64) * 64 for _, t in written]
        sizes += [-(-t.spec.size * t.dtype.storage.itemsize // 64) * 64 for t in device_plan.program.inputs.values()]
        sizes += [-(-i.scratch.shape[0] // 64) * 64 for i in device_plan.program.instructions if i.scratch]
        for n, i in enumerate(device_plan.program.instructions):
            reads.update({(t.buffer, t.offset): n for t in i.src if t is not None})
        lower_bound = max(
            (
                sum(t.spec.size * t.dtype.storage.itemsize for t in i.dst if not t.buffer)
                for i in device_plan.program.instructions
            ),
            default=0,
        )
        assert lower_bound <= device_plan.count_memory_bytes_by_kind()["arena"] <= sum(sizes)


@BOTH
@MANY
def test_every_read_finds_what_its_source_wrote_whole(seed, mode):
    """Check byte by byte and by names alone, without the verifier: only the node of the value wrote there."""
    plan, _, _ = random_plan(seed, mode)
    for device_plan in plan.device_plans:
        called = assign_names(device_plan.graph)
        nodes = {called[n]: n for n in device_plan.graph.nodes}
        arena = np.full(device_plan.program.buffers[0].nbytes, -1)
        number = {v: k for k, v in enumerate(v for n in device_plan.graph.nodes for v in n.results)}
        for name, tensor in device_plan.program.inputs.items():
            arena[slice(*_reach(tensor))] = number[Value(nodes[name])]
        for at, i in enumerate(device_plan.program.instructions):
            if at in device_plan.program.save_positions:
                arena[slice(*_reach(i.dst[0]))] = -2 - at
                continue
            sources = (
                nodes[i.node].src
                if i.node in nodes
                else (device_plan.graph.updates[_state(device_plan.graph, i.node)],)
            )
            _check_location(arena, sources, i.src, number)
            for tensor in (i.scratch, *i.dst):
                if tensor is not None and tensor.buffer == 0:
                    arena[slice(*_reach(tensor))] = -1
            for value, tensor in zip(nodes[i.node].results if i.node in nodes else (), i.dst, strict=False):
                if tensor.buffer == 0:
                    arena[slice(*_reach(tensor))] = number[value]
        ends = [(device_plan.graph.outputs[name], tensor) for name, tensor in device_plan.program.outputs.items()]
        _check_location(arena, [v for v, _ in ends], [t for _, t in ends], number)
        for at in device_plan.program.save_positions:  # the saves that undo the run are present to its end
            assert (arena[slice(*_reach(device_plan.program.instructions[at].dst[0]))] == -2 - at).all()


def _state(graph: Graph, name: str) -> Value:
    return next(s for s in graph.updates if f"{s.node.name}.update" == name)


def _reach(tensor) -> tuple[int, int]:
    """Return the first byte and the end of a tensor's strides."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    return tensor.offset, tensor.offset + ((last + 1) * tensor.dtype.storage.itemsize if tensor.spec.size else 0)


def _check_location(arena, sources, tensors, number) -> None:
    for value, tensor in zip(sources, tensors, strict=True):
        if tensor is not None and tensor.buffer == 0:
            while not value.node.is_leaf and op_of(value.node).is_view:
                value = value.node.inputs[0]
            assert (arena[slice(*_reach(tensor))] == number[value]).all()


@BOTH
@pytest.mark.parametrize("seed", range(2000, 2020))
def test_outputs_of_a_run_stay_as_they_were_in_the_next(seed, mode):
    plan, _, values = random_plan(seed, mode)
    run = load(plan, weights_of(plan.graph, values))
    feed = {v.node.name: values[v.node.name] for v in plan.graph.inputs}
    first = run.run(feed)
    first_outputs = {name: np.array(a) for name, a in first.items()}
    run.run({name: np.zeros_like(a) for name, a in feed.items()})
    for name, array in first_outputs.items():
        np.testing.assert_array_equal(first[name], array)


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_a_smaller_plan_over_the_same_store_takes_no_more_memory(mode):
    group = group_of(2, "cpu")
    big = plan_for_group(cached_product(8), group, split_mode=mode)
    small = plan_for_group(cached_product(1), group, like=big)
    store = Store(group)
    store.bind("k", np.ones((8, 4), np.float32), big.graph.weights[0].spec, big.leaves["k"])
    run = Executor(big, store)
    before = store.count_bytes_by_kind()
    Executor(small, store).run({"x": np.ones((1, 4)), "ids": [3]})
    run.run({"x": np.ones((8, 4)), "ids": np.arange(8)})
    assert store.count_bytes_by_kind() == before
