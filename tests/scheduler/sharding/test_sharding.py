"""Any graph on any number of devices equals the graph on one; factors, layouts, shares, collectives."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket import ops
from hocket.backends.base import find_device
from hocket.distributed.thread_group import ThreadGroup
from hocket.frontends.gguf import open_gguf
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import Step, load_model
from hocket.frontends.open_model import open_model
from hocket.graph import BackendError, Graph, PlanError, Value, input, state, weight
from hocket.ops.collectives import COLLECTIVES
from hocket.scheduler import load, plan, plan_for_group
from hocket.scheduler.costs.hardware import Hardware
from hocket.scheduler.ir.layout import Shard
from hocket.scheduler.sharding.factors import Factors
from hocket.scheduler.sharding.shard_ranges import ShardRanges, compute_axis_ranges_of_factor, merge_adjacent_ranges

from ...given.graphs.random_graphs import bindings, seeded_graph
from ...given.models.goldens import DENSE, FIXTURES, FLOAT_CACHES, INDEX, nmse, path_of, single_device_logits, tokens_of
from ...given.plans.grouped import as_file_bytes, devices, everything_that_fits
from ...given.waits import WAIT_SECONDS

# ---------------------------------------------------------------------------------------------------------- models


@pytest.mark.nightly(cases=13)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize(
    ("n", "split"), [(2, (3, 1)), (3, ()), (4, (3, 1, 0, 0)), (8, ())], ids=["2-3,1", "3", "4-3,1,0,0", "8"]
)
@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("name", [*DENSE, "qwen3next", "qwen3-q4_k_m"])
def test_a_model_on_several_devices_gives_the_logits_of_one(name, mode, n, split):
    model = load_model(open_gguf(path_of(name)))
    tokens = tokens_of(name)
    golden = np.load(FIXTURES / name / "logits.npy")
    exact = "q4" in name  # rounding to 8 bits would differ wherever a sum differs in its last bit
    one = single_device_logits(name, exact)
    many = Session(
        model, on=DeviceGroup(devices=devices(n), split_mode=mode, tensor_split=split, exact=exact, **FLOAT_CACHES)
    )
    batch = many.evaluate([tokens], every_position=True)[0]
    many.reset(0)
    parts = [tokens[: len(tokens) // 2], *([t] for t in tokens[len(tokens) // 2 :])]
    stepped = np.concatenate([many.evaluate([part], every_position=True)[0] for part in parts])
    for logits in (batch, stepped):
        assert nmse(logits, one) <= 1e-10
        assert nmse(logits, golden) <= INDEX[name]["tol_f32"]


@pytest.mark.parametrize(
    ("name", "max_count"),
    [("llama", 4), ("llama-rope-freqs", 4), ("gemma3", 12), ("qwen2", 4), ("qwen3", 4), ("qwen35", 6)],
)
def test_a_decoder_has_two_reductions_per_layer(name, max_count):
    """Check one reduction after the mixer, and one after the feed-forward; the residual and the logits cost none.

    Messages are quick, since the work of a small model on a window does not justify the usual latency.
    """
    graph = load_model(open_gguf(path_of(name))).graph(Step(1, 1, 256, 512, 1))
    group = [find_device(device) for device in devices(2)]
    plan = plan_for_group(graph, group, split_mode="tensor", hardware=Hardware(link_latency=1e-6))
    assert plan.count_collectives() <= max_count
    assert {i.op for i in plan.device_plans[0].program.instructions} & COLLECTIVES == {"all_reduce"}


@pytest.mark.parametrize("name", ["llama", "qwen3next", "qwen35"])
def test_a_layer_split_sends_one_value_to_the_next_device(name):
    """Check that states stay with the layer that reads them, also convolution states with new values at the
    graph's end.
    """
    model = load_model(open_gguf(path_of(name)))
    new_plan = plan(model.graph(Step(1, 1, 31, 31, 1)), devices(2), split_mode="layer")
    sent = [i.node for device_plan in new_plan.device_plans for i in device_plan.program.instructions if i.op == "send"]
    assert len(sent) == 1
    assert "residual" in sent[0]


@pytest.mark.long
def test_each_device_keeps_its_share_of_the_weights_and_of_the_cache():
    graph = open_model(None).graph(Step(1, 8, 256, 512, 1))
    one, two = (plan(graph, devices(n), split_mode="tensor") for n in (1, 2))
    for kind in ("weight", "state"):
        whole, stored = one.device_plans[0].count_memory_bytes_by_kind()[kind], one.device_plans[0].backend.storage_spec
        sharded_leaves = (v for v in two.graph.leaves(kind) if isinstance(two.leaves[v.node.name], Shard))
        shard_bytes = sum(stored(v.spec, kind).nbytes for v in sharded_leaves)
        assert shard_bytes > 0.8 * whole
        for device_plan in two.device_plans:
            assert device_plan.count_memory_bytes_by_kind()[kind] == pytest.approx(
                shard_bytes / 2 + (whole - shard_bytes), rel=0.02
            )


# ---------------------------------------------------------------------------------------------------- random graphs


@pytest.mark.nightly(cases=60)
@pytest.mark.long(cases=1)
@pytest.mark.parametrize("seed", range(120))
def test_a_random_graph_sharded_wherever_possible_equals_one_device(seed):
    graph = seeded_graph(seed)
    dice = random.Random(seed)
    n = dice.choice([2, 3, 5, 8])
    shares = [dice.choice([0, 1, 1, 2]) for _ in range(n - 1)] + [1]
    bound = bindings(graph, np.random.default_rng(seed))
    group = [find_device(name) for name in devices(n, "reference")]
    sharded = plan_for_group(graph, group, tensor_split=shares, choose=lambda g, f: everything_that_fits(g, f, dice))
    whole = plan_for_group(graph, group[:1])
    results = []
    for each_plan in (whole, sharded):
        run = load(each_plan, {v.node.name: as_file_bytes(bound[v.node.name], v.dtype) for v in graph.weights})
        for v in graph.states:
            run.store.state(v.node.name)[...] = bound[v.node.name]
        feed = {v.node.name: bound[v.node.name] for v in graph.inputs}
        outputs = [run.run(feed) for _ in range(2)]
        results.append([*outputs, {name: np.array(run.store.state(name)) for name in run.store.states}])
    for one, many in zip(*results, strict=True):
        for name, want in one.items():
            np.testing.assert_allclose(many[name], want, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------------------------------- factors and layouts


def ops_value(graph: Graph, name: str) -> Value:
    (node,) = (n for n in graph.nodes if n.name == name)
    return Value(node)


def axes_of(graph: Graph, name: str):
    return [[[f.size for f in segment] for segment in axis] for axis in Factors(graph).axes_of(ops_value(graph, name))]


def test_a_fused_qkv_is_split_inside_each_part_and_v_heads_follow_their_key_head():
    """Tiled heads: the v part of the projection is (repeat, key heads, size), and all three parts share key heads."""
    model = load_model(open_gguf(path_of("qwen35")))
    graph = model.graph(Step(1, 4, 256, 512, 1))
    (rows, _) = axes_of(graph, "blk.0.attn_qkv.weight")
    assert rows == [[2, 32], [2, 32], [2, 2, 32]]
    new_plan = plan(graph, devices(2), split_mode="tensor")
    layout = new_plan.leaves["blk.0.attn_qkv.weight"]
    assert isinstance(layout, Shard)
    assert layout.index_ranges[0] == ((0, 32), (64, 32), (128, 32), (192, 32))
    assert layout.index_ranges[1] == ((32, 32), (96, 32), (160, 32), (224, 32))


@pytest.mark.parametrize("ordered", [False, True])
def test_devices_share_no_sum_that_is_to_be_ordered(ordered):
    x, up, down = input("x", (3, 64)), weight("up", (512, 64)), weight("down", (64, 512))
    y = ops.mul_mat(down, ops.silu(ops.mul_mat(up, x, ordered=ordered)), ordered=ordered)
    new_plan = plan(Graph({"y": y}), devices(2), split_mode="tensor")
    assert ("all_reduce" in {i.op for i in new_plan.device_plans[0].program.instructions}) is not ordered


def test_a_quantised_row_is_never_split_inside_a_block():
    """A feed-forward width of 768 in blocks of 256 has three parts: on four devices one gets nothing."""
    w, up, x = weight("w", (64, 768), "q4_K"), weight("up", (768, 64)), input("x", (1, 64))
    graph = Graph({"y": ops.mul_mat(w, ops.mul_mat(up, x))})
    (width,) = (f for f in Factors(graph).factors_of(ops_value(graph, "up")) if f.size == 3)

    def choose(g, factors):
        return frozenset(f for f in factors.factors_of(ops_value(g, "up")) if f.size == width.size)

    plan = plan_for_group(graph, [find_device(name) for name in devices(4)], choose=choose)
    layout = plan.leaves["w"]
    assert isinstance(layout, Shard)
    assert layout.axis == 1
    assert [layout.count_entries(d) for d in range(4)] == [256, 256, 256, 0]
    assert plan.count_collectives() == 1


@given(st.integers(0, 600), st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any))
@settings(deadline=None, derandomize=True)
def test_shares_cover_a_factor_and_are_off_by_less_than_one(size, proportions):
    from hocket.scheduler.sharding.axes import Factor

    ranges = ShardRanges(proportions).ranges_of(Factor(size))
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    for (_, end), (start, _) in pairwise(ranges):
        assert end == start
    for (low, high), p in zip(ranges, proportions, strict=True):
        assert abs((high - low) - size * p / sum(proportions)) < 1


def test_what_rounding_takes_in_one_layer_it_gives_back_in_the_next():
    """24 heads in 4 groups at 49 : 51 (a known drift elsewhere): over the layers each device gets its share."""
    from hocket.scheduler.sharding.axes import Factor

    shares = ShardRanges([49, 51])
    counts = [[high - low for low, high in shares.ranges_of(Factor(4))] for _ in range(100)]
    totals = np.sum(counts, axis=0)
    assert abs(totals[0] - 400 * 0.49) < 1


def test_runs_are_joined_and_exact():
    assert merge_adjacent_ranges([(0, 2), (2, 3), (7, 0), (8, 1)]) == ((0, 5), (8, 1))
    from hocket.scheduler.sharding.axes import Factor

    a, b, c = Factor(2), Factor(3), Factor(4)
    assert compute_axis_ranges_of_factor([[a, b, c]], b, 1, 3) == ((4, 8), (16, 8))
    assert compute_axis_ranges_of_factor([[a], [b, c]], b, 0, 1) == ((0, 6),)


def test_a_device_may_get_nothing():
    w, x = weight("w", (6, 4)), input("x", (2, 4))
    new_plan = plan(Graph({"y": ops.mul_mat(w, x)}), devices(3), split_mode="tensor", tensor_split=(1, 0, 1))
    data = {"w": np.arange(24, dtype=np.float32).reshape(6, 4)}
    feed = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(load(new_plan, data).run({"x": feed})["y"], feed @ data["w"].T)
    assert new_plan.device_plans[1].count_memory_bytes_by_kind()["weight"] == 0


# ------------------------------------------------------------------------------------------------------ collectives


def run_collective(
    attrs: list[dict], op: str, sources: list[np.ndarray], shapes: list[tuple[int, ...]]
) -> list[np.ndarray]:
    """Return the results of each device of a group for one collective of the NumPy backend."""
    from concurrent.futures import ThreadPoolExecutor

    from hocket.backends.host.bindings import HostInstruction
    from hocket.backends.numpy.kernel_table import find_or_make_binding

    threads = ThreadGroup(len(sources), WAIT_SECONDS)
    outs = [np.full(shape, np.nan) for shape in shapes]

    def run(rank: int) -> None:
        scratch = np.full(outs[rank].size, np.nan)
        call = HostInstruction(
            [sources[rank]], [outs[rank]], {**attrs[rank], "sequence": 3}, scratch, threads.member(rank)
        )
        for step in find_or_make_binding(op).bind(call):
            step()

    with ThreadPoolExecutor(len(sources)) as pool:
        list(pool.map(run, range(len(sources))))
    return outs


INDEX_RANGES = (((0, 2), (4, 1)), (), ((2, 2),))


def test_reduce_scatter_gives_each_device_its_entries_of_the_sum():
    sources = [np.arange(10.0).reshape(2, 5) * (d + 1) for d in range(3)]
    attrs = [{"axis": 1, "runs": INDEX_RANGES, "rank": d} for d in range(3)]
    outs = run_collective(attrs, "reduce_scatter", sources, [(2, 3), (2, 0), (2, 2)])
    total = sum(sources)
    for out, columns in zip(outs, ([0, 1, 4], [], [2, 3]), strict=True):
        np.testing.assert_array_equal(out, total[:, columns])


@pytest.mark.parametrize("axis", [0, 1])
def test_all_to_all_changes_the_split_along_either_axis(axis):
    whole = np.arange(25.0).reshape(5, 5)
    old = [whole[:, columns] for columns in ([0, 1, 4], [], [2, 3])]
    runs = (((0, 1),), ((1, 3),), ((4, 1),))
    attrs = [{"old_axis": 1, "old_runs": INDEX_RANGES, "axis": axis, "runs": runs, "rank": d} for d in range(3)]
    expected = [np.take(whole, rows, axis) for rows in ([0], [1, 2, 3], [4])]
    outs = run_collective(attrs, "all_to_all", old, [w.shape for w in expected])
    for out, want in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(out, want)


def test_all_reduce_gives_every_device_the_same_bits():
    rng = np.random.default_rng(0)
    sources = [rng.standard_normal(1000).astype(np.float32) for _ in range(8)]
    outs = run_collective([{}] * 8, "all_reduce", sources, [(1000,)] * 8)
    for out in outs:
        assert out.tobytes() == outs[0].tobytes()
    np.testing.assert_allclose(outs[0], np.sum(sources, axis=0, dtype=np.float64), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- failure


def test_a_device_that_fails_stops_the_others_and_is_named():
    table = weight("table", (8, 4))
    rows = ops.get_rows(table, input("ids", (2,), "i32"))
    new_plan = plan(Graph({"y": ops.mul_mat(weight("w", (8, 4)), rows)}), devices(2), split_mode="tensor")
    run = load(new_plan, {"table": np.ones((8, 4)), "w": np.ones((8, 4))})
    with pytest.raises(BackendError, match="id 99 names no row"):
        run.run({"ids": [1, 99]})
    assert run.run({"ids": [1, 2]})["y"].shape == (2, 8)


def test_a_member_that_does_not_come_is_an_error_and_not_a_hang():
    threads = ThreadGroup(2, timeout=0.05)
    x = np.ones(3, np.float32)
    with pytest.raises(BackendError, match=r"collective 7 on device 0 of 2: device 1 did not arrive within 0\.05 s"):
        threads.member(0).all_reduce(x, x, x.copy(), 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_mode": "rows"}, "split_mode is 'rows'; need one of none; layer; tensor; layer,tensor; auto"),
        ({"tensor_split": (1, 2, 3)}, "tensor_split='1,2,3': need at most 2 shares"),
        ({"tensor_split": (0, 0)}, "one above zero"),
        ({"tensor_split": (-1, 2)}, "none negative"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    graph = Graph({"y": ops.neg(input("x", (2,)))})
    with pytest.raises(PlanError) as caught:
        plan(graph, devices(2), **options)
    assert message in str(caught.value)


def test_a_graph_with_a_collective_of_its_own_is_refused():
    from hocket.ops.collectives import all_reduce

    graph = Graph({"y": all_reduce(input("x", (2,)), sequence=0)})
    with pytest.raises(PlanError, match="collectives are put in by the planner"):
        plan(graph)


def test_a_device_named_twice_is_refused():
    with pytest.raises(PlanError, match="name each once"):
        plan(Graph({"y": ops.neg(input("x", (2,)))}), "cpu:0,cpu:0")


def test_planning_twice_gives_the_same_plan():
    def once():
        cache = state("cache", (9, 8))
        new = ops.set_rows(cache, ops.mul_mat(weight("k", (8, 4)), input("x", (1, 4))), input("ids", (1,), "i32"))
        new_plan = plan(Graph({"y": ops.mul_mat(new, new)}, {cache: new}), devices(3), split_mode="tensor")
        return [device_plan.program for device_plan in new_plan.device_plans], new_plan.leaves, new_plan.sharded_factors

    assert once() == once()
