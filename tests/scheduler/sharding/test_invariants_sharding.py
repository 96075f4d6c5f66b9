"""Invariants of every sharding of any graph, and splits at which other schedulers are known to fail."""

from __future__ import annotations

import random
import threading
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import ops
from hocket.distributed.rank_group import DevicePlacement
from hocket.distributed.thread_group import ThreadGroup
from hocket.distributed.world import World
from hocket.graph import Graph, Value, input, state, weight
from hocket.graph.dtypes import DTYPE_BY_NAME
from hocket.graph.errors import GraphError
from hocket.graph.parse import parse_case
from hocket.graph.spec import Spec
from hocket.ops import REGISTRY
from hocket.ops.collectives import COLLECTIVES
from hocket.scheduler import Executor, Store, load, plan_for_group
from hocket.scheduler.ir.layout import Replicate, Shard
from hocket.scheduler.runtime.state_view import assemble_value, slice_for_device
from hocket.scheduler.sharding.factors import Factors
from hocket.scheduler.sharding.search.greedy_search import group_factors
from hocket.scheduler.verifier.plan_verifier import find_plan_faults

from ...given.graphs.random_graphs import bindings, graphs, seeded_graph
from ...given.plans.grouped import cached_product, everything_that_fits, group_of, random_plan, run_of, weights_of

SEEDS = range(2000, 2040)
MANY = pytest.mark.parametrize("seed", SEEDS)
BOTH = pytest.mark.parametrize("mode", ["tensor", "layer"])


# -------------------------------------------------------------------------------------------------------- sharding

SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def shards(draw):
    """Draw a shape, and a layout with runs of segments for up to eight devices."""
    shape = draw(SHAPES)
    axis, n = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 8))
    runs: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    at = 0
    while at < shape[axis]:
        k = draw(st.integers(1, shape[axis] - at))
        runs[draw(st.integers(0, n - 1))].append((at, k))
        at += k
    return shape, Shard(axis, tuple(map(tuple, runs)))


@given(shards(), st.sampled_from(["f32", "f16", "i32", "i64"]))
@settings(deadline=None, derandomize=True)
def test_what_is_scattered_is_gathered_again(shape_and_layout, dtype):
    shape, layout = shape_and_layout
    spec = Spec(shape, DTYPE_BY_NAME[dtype])
    data = np.arange(spec.size).reshape(shape).astype(DTYPE_BY_NAME[dtype].storage)
    parts = {d: slice_for_device(data, spec, layout, d) for d in range(len(layout.index_ranges))}
    np.testing.assert_array_equal(
        assemble_value(shape, layout, parts, DevicePlacement(World(None), [0] * len(parts))), data
    )
    assert sum(p.size for p in parts.values()) == data.size


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_K", "q6_K"])
def test_rows_of_blocks_are_scattered_whole(dtype):
    kind = DTYPE_BY_NAME[dtype]
    spec = Spec((3, 6 * kind.block), kind)
    data = np.random.default_rng(0).integers(0, 255, (3, 6 * kind.block_bytes)).astype(np.uint8)
    layout = Shard(1, (((0, kind.block), (4 * kind.block, kind.block)), (), ((kind.block, 3 * kind.block),)))
    parts = [slice_for_device(data, spec, layout, d).reshape(3, -1, kind.block_bytes) for d in range(3)]
    blocks = data.reshape(3, 6, kind.block_bytes)
    np.testing.assert_array_equal(parts[0], blocks[:, [0, 4]])
    assert parts[1].size == 0
    np.testing.assert_array_equal(parts[2], blocks[:, 1:4])


@pytest.mark.long
def test_shards_cover_and_lie_in_whole_blocks():
    shards = []

    @given(graphs(), st.integers(0, 1 << 30), st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any))
    @settings(deadline=None, derandomize=True, max_examples=80)
    def check_shards(graph, seed, shares):
        dice = random.Random(seed)
        plan = plan_for_group(
            graph, group_of(len(shares)), tensor_split=shares, choose=lambda g, f: everything_that_fits(g, f, dice)
        )
        for value in (*graph.weights, *graph.states):
            layout = plan.leaves[value.node.name]
            if isinstance(layout, Shard):
                shards.append(layout)
                coverage = np.zeros(value.shape[layout.axis], int)
                for runs in layout.index_ranges:
                    for start, k in runs:
                        coverage[start : start + k] += 1
                assert coverage.all()
                block = value.dtype.block if layout.axis == len(value.shape) - 1 else 1
                assert all(part % block == 0 for runs in layout.index_ranges for run in runs for part in run)

    check_shards()
    assert len(shards) > 50


def one_op_graph(op, sample: str) -> Graph | None:
    """Build a node with weights as operands, so that every axis may be sharded; None where one is quantised."""
    parts = parse_case(sample)
    operands = {k: v for k, v in parts.items() if isinstance(v, Spec)}
    if not operands or any(s.dtype.is_quantised for s in operands.values()):
        return None
    built = op(**{**parts, **{k: weight(k, s.shape, s.dtype) for k, s in operands.items()}})
    results = (built,) if isinstance(built, Value) else built
    return Graph({f"y{i}": v for i, v in enumerate(results)})


ALONE = [name for name in sorted(REGISTRY) if name not in COLLECTIVES]


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("chosen", [3, pytest.param(6, marks=pytest.mark.nightly(cases=0))])
@pytest.mark.parametrize("name", ALONE)
def test_every_op_sharded_along_any_allowed_factor_is_the_op(name, chosen):
    """Check each class of factors alone, over three devices with unequal shares; the result equals one device's."""
    op, rng = REGISTRY[name], np.random.default_rng(0)
    samples = [s for s in op.samples if (g := one_op_graph(op, s)) is not None and all(v.spec.size for v in g.weights)]
    for sample in dict.fromkeys((*samples[: chosen // 2], *samples[-(chosen - chosen // 2) :])):
        graph = one_op_graph(op, sample)
        assert graph is not None
        values = bindings(graph, rng)
        want = run_of(plan_for_group(graph, group_of(1)), values)
        for members in group_factors(graph, Factors(graph)):
            plan = plan_for_group(
                graph,
                group_of(3),
                tensor_split=(2, 0, 1),
                choose=lambda g, f, m=members: frozenset(group_factors(g, f)[m]),
            )
            got = run_of(plan, values)
            for key, array in want.items():
                np.testing.assert_allclose(got[key], array, rtol=1e-6, atol=1e-9, err_msg=f"{sample} by {members}")


@MANY
def test_devices_without_a_share_change_nothing(seed):
    """Check zero shares before, between and after the others: the bits of the other devices alone."""
    graph = seeded_graph(seed)
    values = bindings(graph, np.random.default_rng(seed))
    results = []
    for shares in ((1, 1), (0, 1, 0, 1, 0)):
        dice = random.Random(seed)
        plan = plan_for_group(
            graph, group_of(len(shares)), tensor_split=shares, choose=lambda g, f, d=dice: everything_that_fits(g, f, d)
        )
        results.append(run_of(plan, values))
    for name, array in results[0].items():
        np.testing.assert_array_equal(results[1][name], array)


@pytest.mark.parametrize("mode", ["auto", "tensor", "layer"])
@MANY
def test_one_device_runs_the_graph_as_it_is(seed, mode):
    graph = seeded_graph(seed)
    whole, alone = (plan_for_group(graph, group_of(1), split_mode=m) for m in ("none", mode))
    assert alone.count_collectives() == 0
    assert alone.device_plans[0].program.instructions == whole.device_plans[0].program.instructions


@pytest.mark.parametrize("seed", range(2000, 2020))
def test_the_order_of_devices_changes_rounding_only(seed):
    graph = seeded_graph(seed)
    values = bindings(graph, np.random.default_rng(seed))
    results = []
    for shares in ((1, 2, 3), (3, 1, 2)):
        dice = random.Random(seed)
        plan = plan_for_group(
            graph, group_of(3), tensor_split=shares, choose=lambda g, f, d=dice: everything_that_fits(g, f, d)
        )
        results.append(run_of(plan, values))
    for name, array in results[0].items():
        np.testing.assert_allclose(results[1][name], array, rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_what_is_whole_on_all_devices_is_the_same_bits_everywhere():
    compared = 0
    for seed in SEEDS:
        plan, _, values = random_plan(seed, "tensor")
        run = load(plan, weights_of(plan.graph, values))
        run.run({v.node.name: values[v.node.name] for v in plan.graph.inputs})
        for name, layout in plan.outputs.items():
            if isinstance(layout, Replicate):
                first, *others = [copy.tobytes() for copy in run.read_output_copies(name)]
                assert others == [first] * len(others), f"seed {seed}, output {name}"
                compared += len(others)
    assert compared > len(SEEDS)


@BOTH
@MANY
def test_devices_run_collectives_in_one_order(seed, mode):
    plan, _, _ = random_plan(seed, mode)
    sequences = [
        [(i.op, i.attrs["sequence"]) for i in device_plan.program.instructions if i.op in COLLECTIVES]
        for device_plan in plan.device_plans
    ]
    assert all([n for _, n in device_plan] == sorted(n for _, n in device_plan) for device_plan in sequences)
    if mode == "tensor":
        assert all(device_plan == sequences[0] for device_plan in sequences)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_reduction_is_the_sum_and_gives_every_rank_the_same_bits(n, dtype):
    rng = np.random.default_rng(n)
    sources = [rng.standard_normal((5, 7)).astype(dtype) for _ in range(n)]
    into = [np.empty((5, 7), dtype) for _ in range(n)]
    halves = [np.empty((2, 7), dtype) for _ in range(n)]
    group = ThreadGroup(n, 5.0)

    def member(rank: int) -> None:
        comm = group.member(rank)
        comm.all_reduce(sources[rank], into[rank], np.empty((5, 7), dtype), 0)
        comm.reduce_scatter(sources[rank], halves[rank], [((slice(0, 2),), (slice(1, 3),))], 1)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    exact = np.sum([s.astype(np.float64) for s in sources], axis=0)
    for whole, half in zip(into, halves, strict=True):
        np.testing.assert_allclose(whole, exact, atol=n * np.finfo(dtype).eps * np.abs(exact).max() * 4)
        np.testing.assert_array_equal(whole, into[0])
        np.testing.assert_array_equal(half, into[0][1:3])


@pytest.mark.parametrize("seed", range(2000, 2020))
def test_auto_is_never_predicted_to_be_slower_than_one_device(seed):
    graph = seeded_graph(seed, steps=30)
    alone = plan_for_group(graph, group_of(1, "cpu"))
    assert plan_for_group(graph, group_of(3, "cpu")).cost.total <= alone.cost.total * (1 + 1e-9)


# --------------------------------------------------------------------------------------- faults of other schedulers


def equal_to_one_device(graph: Graph, n: int, **options):
    """The plan over n devices, once it gives the outputs of one."""
    values = dict(bindings(graph, np.random.default_rng(0)))
    plan = plan_for_group(graph, group_of(n), **{"split_mode": "tensor", **options})
    want = run_of(plan_for_group(graph, group_of(1)), values)
    got = run_of(plan, values)
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-9, atol=1e-9)
    return plan


@pytest.fixture(name="slow")
def _slow():
    """Devices so slow that every cut pays."""
    from hocket.scheduler.costs.hardware import Hardware

    return Hardware(flops=1e3, bandwidth=1e3, launch=0, link_latency=1e-9)


def by_size(name: str, *sizes: int):
    """Cuts the factors of one leaf that have these sizes."""

    def choose(graph: Graph, factors: Factors):
        (value,) = (v for v in graph.weights if v.node.name == name)
        return frozenset(f for f in factors.factors_of(value) if f.size in sizes)

    return choose


@pytest.mark.parametrize("shares", [(), (3, 1), (1, 0, 1, 1)])
def test_a_feed_forward_of_768_in_blocks_on_four_devices(shares):
    x = input("x", (2, 64))
    gate, up = (ops.mul_mat(weight(n, (768, 64), "q8_0"), x) for n in ("gate", "up"))
    graph = Graph({"y": ops.mul_mat(weight("down", (64, 768), "q4_K"), ops.swiglu(gate, up))})
    plan = equal_to_one_device(graph, 4, tensor_split=shares, choose=by_size("down", 3))
    layout = plan.leaves["down"]
    assert isinstance(layout, Shard)
    assert layout.axis == 1
    assert sum(layout.count_entries(d) == 0 for d in range(4)) >= 1
    assert plan.count_collectives() == 1


@pytest.mark.parametrize("shares", [(), (0, 2, 1)])
def test_five_hundred_and_twelve_experts_on_three_devices(shares):
    x, ids = input("x", (2, 1, 32)), input("ids", (2, 4), "i32")
    up, gate = (ops.mul_mat_id(weight(n, (512, 48, 32)), x, ids) for n in ("up", "gate"))
    down = ops.mul_mat_id(weight("down", (512, 32, 48)), ops.swiglu(gate, up), ids)
    y = ops.sum_rows(ops.permute(ops.mul(down, input("weights", (2, 4, 1))), axes=(0, 2, 1)))
    plan = equal_to_one_device(Graph({"y": y}), 3, tensor_split=shares, choose=by_size("up", 48))
    layout = plan.leaves["up"]
    assert isinstance(layout, Shard)
    assert layout.axis == 1
    assert plan.count_collectives() == 1
    (reduced,) = (i for i in plan.device_plans[0].program.instructions if i.op == "all_reduce")
    assert reduced.dst[0].spec.size == 2 * 32  # after the experts are combined, not before


@pytest.mark.parametrize("n", [2, 3, 8])
def test_twenty_four_heads_over_four_key_heads_at_49_to_51(slow, n):
    shares = [49, 51, *[50] * (n - 2)]
    t, h, kv, d, s = 2, 24, 4, 8, 5
    x = input("x", (t, 32))
    q = ops.reshape(ops.mul_mat(weight("q", (h * d, 32)), x), shape=(t, h, d))
    y = input("y", (s, 32))
    k, v = (ops.reshape(ops.mul_mat(weight(w, (kv * d, 32)), y), shape=(s, kv, d)) for w in "kv")
    a = ops.reshape(ops.attention(q, k, v, scale=0.3), shape=(t, h * d))
    plan = equal_to_one_device(
        Graph({"y": ops.mul_mat(weight("o", (32, h * d)), a)}), n, tensor_split=shares, hardware=slow
    )
    assert sum(i.op == "all_reduce" for i in plan.device_plans[0].program.instructions) <= 1


def test_a_latent_cache_that_is_read_through_offsets(slow):
    """Check MLA: one latent row holds the source of keys and values, and a rotated part that all heads share."""
    t, h, latent, rope, d = 3, 4, 16, 8, 6
    ids = input("ids", (t,), "i32")
    row = ops.mul_mat(weight("kv_a", (latent + rope, 12)), input("x", (t, 12)))
    cache = state("cache", (7, latent + rope))
    rotated = ops.reshape(ops.slice_(row, axis=1, start=latent, stop=latent + rope), shape=(t, 1, rope))
    rotated = ops.reshape(ops.rope(rotated, ids, n_dims=rope), shape=(t, rope))
    new = ops.set_rows(cache, ops.concat(ops.slice_(row, axis=1, start=0, stop=latent), rotated, axis=1), ids)
    low = ops.slice_(new, axis=1, start=0, stop=latent)
    k = ops.reshape(ops.mul_mat(weight("k_b", (h * d, latent)), low), shape=(7, h, d))
    v = ops.reshape(ops.mul_mat(weight("v_b", (h * d, latent)), low), shape=(7, h, d))
    tail = ops.reshape(ops.slice_(new, axis=1, start=latent, stop=latent + rope), shape=(7, 1, rope))
    k = ops.concat(k, ops.broadcast(tail, shape=(7, h, rope)), axis=2)
    q = ops.reshape(ops.mul_mat(weight("q", (h * (d + rope), 12)), input("x2", (t, 12))), shape=(t, h, d + rope))
    a = ops.reshape(ops.attention(q, k, v, scale=0.2), shape=(t, h * d))
    graph = Graph({"y": ops.mul_mat(weight("o", (12, h * d)), a)}, {cache: new})
    for n in (2, 3, 4, 8):
        equal_to_one_device(graph, n, hardware=slow)


def test_two_contexts_share_weights_and_not_their_states():
    def graph(name: str) -> Graph:
        cache = state(name, (4, 8))
        new = ops.set_rows(cache, ops.mul_mat(weight("k", (8, 4)), input("x", (1, 4))), input("ids", (1,), "i32"))
        return Graph({"sum": ops.sum_rows(new)}, {cache: new})

    group = group_of(2, "cpu")
    first = plan_for_group(graph("one"), group, split_mode="tensor")
    second = plan_for_group(graph("two"), group, like=first)
    store = Store(group)
    store.bind("k", np.ones((8, 4), np.float32), first.graph.weights[0].spec, first.leaves["k"])
    one, two = Executor(first, store), Executor(second, store)
    one.run({"x": np.ones((1, 4)), "ids": [0]})
    assert two.run({"x": np.ones((1, 4)), "ids": [2]})["sum"].ravel().tolist() == [0, 0, 32, 0]
    assert one.run({"x": np.ones((1, 4)), "ids": [1]})["sum"].ravel().tolist() == [32, 32, 0, 0]
    weight_bytes = sum(d["weight"] for d in store.count_bytes_by_kind())
    assert weight_bytes <= 2 * 8 * 4 * 4


def test_state_rows_that_a_short_step_leaves_out_are_never_split():
    """The taps of a convolution lie three rows apart: one new row meets three of nine old ones, 64 meet all."""

    def graph(rows: int) -> Graph:
        x, old = ops.mul_mat(weight("v", (512, 512)), input("x", (1, rows, 512))), state("old", (1, 9, 512))
        known = ops.concat(old, x, axis=1)
        taps = [ops.slice_(known, axis=1, start=3 * i, stop=3 * i + rows) for i in range(4)]
        scaled = [ops.mul(tap, weight(f"k{i}", (512,))) for i, tap in enumerate(taps)]
        y = ops.mul_mat(weight("w", (512, 512)), ops.silu(reduce(ops.add, scaled)))
        return Graph({"y": y}, {old: ops.get_rows(known, input("kept", (1, 9), "i32"))})

    group = group_of(2, "numpy")
    first = plan_for_group(graph(1), group, split_mode="tensor")
    assert plan_for_group(graph(64), group, like=first).outputs  # it is proven


def test_a_graph_that_is_illegal_is_refused_before_it_is_planned():
    with pytest.raises(GraphError):
        plan_for_group(Graph({}), group_of(2))


def test_faults_of_a_correct_plan_are_none():
    assert not list(find_plan_faults(plan_for_group(cached_product(2), group_of(3), split_mode="layer")))
